"""FlashInfer's own prefill (FA2 and FA3), which plans on the host."""

import torch

from ..problem import AttentionInputs, PrefillProblem
from . import native


def run(
    problem: PrefillProblem,
    inputs: AttentionInputs,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    kernel: str = "native_prefill_fa2",
) -> None:
    """Plans and launches on torch's current stream. Reads the lengths, so it synchronises."""
    import flashinfer  # pyright: ignore[reportMissingImports]

    lengths, offsets = inputs.seq_lens.tolist(), inputs.cu_seqlens_q.tolist()
    rows = offsets[-1]
    empty_rows = _empty_rows(problem, lengths, offsets)
    if rows == 0:
        native.finish(out, lse, empty_rows)
        return
    version = kernel.rpartition("_")[2]
    wrapper = native.wrapper(
        lambda workspace: flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, problem.kv_layout, backend=version
        ),
        inputs.query.device,
        kernel,
        problem.kv_layout,
    )
    score_scale, out_scale = native.scales(problem, inputs)
    wrapper.plan(
        # A tensor of our own: the plan keeps it, and a bridged one must not outlive the call.
        torch.tensor(offsets, dtype=torch.int32),
        *native.page_lists(problem, inputs, lengths),
        problem.num_qo_heads,
        problem.num_kv_heads,
        problem.head_dim,
        problem.page_size,
        causal=problem.causal,
        sm_scale=score_scale,
        window_left=problem.window_left,
        logits_soft_cap=problem.soft_cap,
        q_data_type=inputs.query.dtype,
        kv_data_type=inputs.key_cache.dtype,
        o_data_type=out.dtype,
    )
    wrapper.run(
        inputs.query[:rows],
        (inputs.key_cache, inputs.value_cache),
        v_scale=None if out_scale == 1.0 else out_scale,
        out=out[:rows],
        lse=None if lse is None else lse[:rows],
        return_lse=lse is not None,
    )
    native.finish(out, lse, empty_rows)


def _empty_rows(problem: PrefillProblem, lengths: list[int], offsets: list[int]) -> list[int]:
    """Rows that see no key: padding, rows before position 0, rows of requests without keys."""
    empty = list(range(offsets[-1], problem.num_rows))
    for length, begin, end in zip(lengths, offsets, offsets[1:], strict=False):
        before = end - begin - length if problem.causal or length == 0 else 0
        empty += range(begin, begin + max(0, before))
    return empty
