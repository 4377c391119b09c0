"""FlashInfer's trtllm-gen decode and prefill, for capability 100 and 103. Not run on hardware yet.

Upstream's terms: `bmm1_scale` multiplies the scores, `bmm2_scale` the output; lse has base 2; the
workspace is zero at first use and left zero.
"""

import math
import threading

import torch

from ..problem import AttentionInputs, DecodeProblem, PrefillProblem, score_scale

WORKSPACE_BYTES = 128 * 2**20

_local = threading.local()


def run(
    problem: DecodeProblem | PrefillProblem,
    inputs: AttentionInputs,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    kernel: str = "trtllm_gen",
) -> None:
    """Launches on torch's current stream; nothing synchronises."""
    arguments = dict(
        query=inputs.query,
        kv_cache=(inputs.key_cache, inputs.value_cache),
        workspace_buffer=_workspace(inputs.query.device),
        block_tables=inputs.page_table,
        seq_lens=inputs.seq_lens,
        bmm1_scale=score_scale(problem, inputs),
        bmm2_scale=inputs.v_scale,
        window_left=problem.window_left,
        out=out,
        sinks=inputs.sinks,
        kv_layout=problem.kv_layout,
        lse=lse,
        return_lse=lse is not None,
        backend="trtllm-gen",
    )
    capacity = problem.pages_per_seq * problem.page_size
    if isinstance(problem, DecodeProblem):
        from flashinfer.decode import (  # pyright: ignore[reportMissingImports]
            trtllm_batch_decode_with_kv_cache,
        )

        trtllm_batch_decode_with_kv_cache(
            **arguments, max_seq_len=capacity, q_len_per_req=problem.q_len
        )
        row = torch.arange(problem.num_rows, device=out.device)
        lengths = inputs.seq_lens[row // problem.q_len]
        positions = lengths - problem.q_len + row % problem.q_len
    else:
        from flashinfer.prefill import (  # pyright: ignore[reportMissingImports]
            trtllm_batch_context_with_kv_cache,
        )

        trtllm_batch_context_with_kv_cache(
            **arguments,
            max_q_len=problem.max_seqlen_q,
            max_kv_len=capacity,
            batch_size=problem.batch,
            cum_seq_lens_q=inputs.cu_seqlens_q,
            cum_seq_lens_kv=_prefix_sums(inputs.seq_lens),
            causal=problem.causal,
        )
        positions = _positions(problem, inputs)
    _finish(out, lse, positions < 0)


def _workspace(device: torch.device) -> torch.Tensor:
    """Zeros, made once for each thread and stream: two launches at a time must not share them."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    workspaces = _local.__dict__.setdefault("workspaces", {})
    if (device, stream) not in workspaces:
        workspaces[device, stream] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return workspaces[device, stream]


def _prefix_sums(lengths: torch.Tensor) -> torch.Tensor:
    sums = lengths.new_zeros(len(lengths) + 1)
    torch.cumsum(lengths, 0, dtype=lengths.dtype, out=sums[1:])
    return sums


def _positions(problem: PrefillProblem, inputs: AttentionInputs) -> torch.Tensor:
    """The position of each row; -1 where it sees no key."""
    offsets = inputs.cu_seqlens_q
    row = torch.arange(problem.num_rows, device=offsets.device, dtype=offsets.dtype)
    request = torch.searchsorted(offsets, row, right=True).sub_(1).clamp_(max=problem.batch - 1)
    lengths = inputs.seq_lens[request]
    positions = lengths - offsets[request + 1] + row
    if not problem.causal:
        positions = lengths - 1
    return positions.masked_fill((row >= offsets[-1]) | (lengths == 0), -1)


def _finish(out: torch.Tensor, lse: torch.Tensor | None, empty: torch.Tensor) -> None:
    """Fills the rows that see no key, and converts the base of lse."""
    out.masked_fill_(empty[:, None, None], 0)
    if lse is not None:
        lse.mul_(math.log(2)).masked_fill_(empty[:, None], -torch.inf)
