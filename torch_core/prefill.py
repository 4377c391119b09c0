"""Ragged, chunked prefill over the paged cache."""

from typing import Any

from jaxtyping import Float32, Int32, Shaped
from torch import Tensor

from .decode import Scale
from .launch import attend, make_plan
from .problem import AttentionInputs


def prefill(
    query: Shaped[Tensor, "total_q num_qo_heads head_dim"],
    key_cache: Shaped[Tensor, "num_pages _ _ head_dim"],
    value_cache: Shaped[Tensor, "num_pages _ _ head_dim"],
    page_table: Int32[Tensor, "batch pages_per_seq"],
    seq_lens: Int32[Tensor, " batch"],
    cu_seqlens_q: Int32[Tensor, " batch+1"],
    *,
    max_seqlen_q: int,
    causal: bool = True,
    sm_scale: Scale | None = None,
    window_left: int = -1,
    soft_cap: float | None = None,
    sinks: Float32[Tensor, " num_qo_heads"] | None = None,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    batch_invariant: bool = False,
    plan: Int32[Tensor, " plan_size"] | None = None,
    backend: str = "auto",
    out: Tensor | tuple[Tensor, Tensor] | None = None,
) -> (
    Shaped[Tensor, "total_q num_qo_heads head_dim"]
    | tuple[
        Shaped[Tensor, "total_q num_qo_heads head_dim"], Float32[Tensor, "total_q num_qo_heads"]
    ]
):
    """Attends the newest tokens of each request to its paged cache, prefix included.

    Request b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of the query. Its row i stands at
    position p = seq_lens[b] - (rows of b) + i; the causal mask is aligned bottom-right:

        rows 2, keys 5:  1 1 1 1 0      rows 5, keys 2:  0 0   (an empty row gives 0)
                         1 1 1 1 1                       0 0
                                                         0 0
                                                         1 0
                                                         1 1

    Kernels compute a request's rows 64 or 128 at a time, so that a batch of many requests with one
    row each is slow: give those to `decode`.

    Args:
        query: [total_q, num_qo_heads, head_dim]; rows past cu_seqlens_q[-1] are padding, output 0.
        key_cache, value_cache, page_table: as in `decode`.
        seq_lens: int32 [batch], cached tokens of each request, the new ones included.
        cu_seqlens_q: int32 [batch + 1], prefix sums of the query lengths; a length may be 0.
        max_seqlen_q: upper bound on the query lengths, a Python int.
        causal: rows see keys up to their own position; False: every key of their request.
        sm_scale, window_left, soft_cap, sinks, q_scale, k_scale, v_scale, kv_layout, return_lse,
            batch_invariant, backend, out: as in `decode`.
        plan: int32 [n] from `plan_prefill` for the same lengths, shapes and options; default: made
            in the call.

    Returns:
        out [total_q, num_qo_heads, head_dim], and with return_lse lse float32 [total_q,
        num_qo_heads], as in `decode`.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype, before any launch.
        NotImplementedError: no kernel runs this call, or a gradient is asked for.

    Caller's contract: as in `decode`; cu_seqlens_q rises from 0 to at most total_q and no length
    exceeds max_seqlen_q. The CPU checks these.
    """
    inputs = AttentionInputs(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        page_table=page_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        sinks=sinks,
        plan=plan,
        sm_scale=sm_scale,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return attend(
        "prefill",
        inputs,
        out=out,
        backend=backend,
        max_seqlen_q=max_seqlen_q,
        causal=causal,
        kv_layout=kv_layout,
        window_left=window_left,
        soft_cap=soft_cap,
        return_lse=return_lse,
        batch_invariant=batch_invariant,
    )


def plan_prefill(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    page_table: Any,
    seq_lens: Int32[Tensor, " batch"],
    cu_seqlens_q: Int32[Tensor, " batch+1"],
    *,
    max_seqlen_q: int,
    causal: bool = True,
    window_left: int = -1,
    soft_cap: float | None = None,
    sinks: Any = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> Int32[Tensor, " plan_size"]:
    """Makes the work lists of a prefill, once for all layers of a step.

    They depend on the lengths, and are made on their device without reading them back. `prefill`
    makes its own where it gets none.

    Args:
        query, key_cache, value_cache, page_table: as in `prefill`; only shapes and dtypes are
            looked at, so anything with both will do, a tensor on device "meta" for example.
        seq_lens, cu_seqlens_q: as in `prefill`.
        max_seqlen_q, causal, window_left, soft_cap, sinks, kv_layout, return_lse,
            batch_invariant, backend: as in the calls that the plan is for.

    Returns:
        int32 [n] for `prefill(plan=...)`; n is 0 where the kernel needs no plan.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype.
        NotImplementedError: no kernel runs such a call, or torch.compile traces this one.

    Caller's contract: the plan serves calls with the same lengths, shapes, dtypes and options.
    """
    inputs = AttentionInputs(
        query, key_cache, value_cache, page_table, seq_lens, cu_seqlens_q, sinks
    )
    return make_plan(
        inputs,
        backend=backend,
        max_seqlen_q=max_seqlen_q,
        causal=causal,
        kv_layout=kv_layout,
        window_left=window_left,
        soft_cap=soft_cap,
        return_lse=return_lse,
        batch_invariant=batch_invariant,
    )
