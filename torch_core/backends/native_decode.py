"""FlashInfer's own decode: lse, soft cap, any page size, any GPU; plans on the host.

Runs its tensor-core variant, which upstream builds from the FA2 prefill kernel.
"""

import torch

from ..problem import AttentionInputs, DecodeProblem
from . import native


def run(
    problem: DecodeProblem,
    inputs: AttentionInputs,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    kernel: str = "native_decode",
) -> None:
    """Plans and launches on torch's current stream. Reads the lengths, so it synchronises."""
    import flashinfer  # pyright: ignore[reportMissingImports]

    lengths = inputs.seq_lens.tolist()
    if not lengths:
        return
    wrapper = native.wrapper(
        lambda workspace: flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, problem.kv_layout, use_tensor_cores=True
        ),
        inputs.query.device,
        kernel,
        problem.kv_layout,
    )
    score_scale, out_scale = native.scales(problem, inputs)
    wrapper.plan(
        *native.page_lists(problem, inputs, lengths),
        problem.num_qo_heads,
        problem.num_kv_heads,
        problem.head_dim,
        problem.page_size,
        window_left=problem.window_left,
        logits_soft_cap=problem.soft_cap,
        q_data_type=inputs.query.dtype,
        kv_data_type=inputs.key_cache.dtype,
        sm_scale=score_scale,
    )
    caches = (inputs.key_cache, inputs.value_cache)
    wrapper.run(
        inputs.query,
        caches,
        v_scale=None if out_scale == 1.0 else out_scale,
        out=out,
        lse=lse,
        return_lse=lse is not None,
    )
    native.finish(out, lse, [row for row, length in enumerate(lengths) if length == 0])
