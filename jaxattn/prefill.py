"""Ragged, chunked prefill over the paged cache."""

from typing import Any

from jax import Array
from jaxtyping import Float32, Int32, Shaped

from torch_core.problem import AttentionInputs

from . import _launch
from .decode import AnyArray, Scale


def prefill(
    query: Shaped[AnyArray, "total_q num_qo_heads head_dim"],
    key_cache: Shaped[AnyArray, "num_pages _ _ head_dim"],
    value_cache: Shaped[AnyArray, "num_pages _ _ head_dim"],
    page_table: Int32[AnyArray, "batch pages_per_seq"],
    seq_lens: Int32[AnyArray, " batch"],
    cu_seqlens_q: Int32[AnyArray, " batch+1"],
    *,
    max_seqlen_q: int,
    causal: bool = True,
    sm_scale: Scale | None = None,
    window_left: int = -1,
    soft_cap: float | None = None,
    sinks: Float32[AnyArray, " num_qo_heads"] | None = None,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    batch_invariant: bool = False,
    plan: Int32[AnyArray, " plan_size"] | None = None,
    backend: str = "auto",
) -> Array | tuple[AnyArray, Array]:
    """Attends the newest tokens of each request to its paged cache, prefix included.

    Request b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of the query. Its row i stands at
    position p = seq_lens[b] - (rows of b) + i; the causal mask is aligned bottom-right:

        rows 2, keys 5:  1 1 1 1 0      rows 5, keys 2:  0 0   (an empty row gives 0)
                         1 1 1 1 1                       0 0
                                                         0 0
                                                         1 0
                                                         1 1

    Kernels compute a request's rows 64 or 128 at a time, so that a batch of many requests with one
    row each is slow: give those to `decode` (`jaxattn.rpa` does so in mixed batches).

    Pure: works in jit, scan, while_loop and shard_map; vmap and gradients are refused. Over a mesh
    the caches may be split over KV heads, as in `decode`; a plan is then made on each device.

    Args:
        query: [total_q, num_qo_heads, head_dim]; rows past cu_seqlens_q[-1] are padding, output 0.
        key_cache, value_cache, page_table: as in `decode`.
        seq_lens: int32 [batch], cached tokens of each request, the new ones included.
        cu_seqlens_q: int32 [batch + 1], prefix sums of the query lengths; a length may be 0.
        max_seqlen_q: upper bound on the query lengths, a Python int.
        causal: rows see keys up to their own position; False: every key of their request.
        sm_scale, window_left, soft_cap, sinks, q_scale, k_scale, v_scale, kv_layout, return_lse,
            batch_invariant, backend: as in `decode`.
        plan: int32 [n] from `plan_prefill` for the same lengths, shapes and options; default: made
            in the call.

    Returns:
        out [total_q, num_qo_heads, head_dim], and with return_lse lse float32 [total_q,
        num_qo_heads], as in `decode`.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype, while tracing.
        NotImplementedError: no kernel runs this call, or vmap or a gradient is asked for.
        jax.errors.JaxRuntimeError (or ValueError, JAX's fast path): on a CPU, at run time,
            page ids or lengths out of range.

    Caller's contract: as in `decode`; cu_seqlens_q rises from 0 to at most total_q and no length
    exceeds max_seqlen_q.
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
    return _launch.attend(
        "prefill",
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


def plan_prefill(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    page_table: Any,
    seq_lens: Int32[AnyArray, " batch"],
    cu_seqlens_q: Int32[AnyArray, " batch+1"],
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
) -> Int32[Array, " plan_size"]:
    """Makes the work lists of a prefill, once for all layers of a step.

    They depend on the lengths, and are made on the device, inside jit too. `prefill` makes its own
    where it gets none; XLA merges those of layers that it sees side by side, but not those of a
    scan.

    Args:
        query, key_cache, value_cache, page_table: as in `prefill`; only shapes and dtypes are
            looked at, so a jax.ShapeDtypeStruct will do.
        seq_lens, cu_seqlens_q: as in `prefill`.
        max_seqlen_q, causal, window_left, soft_cap, sinks, kv_layout, return_lse,
            batch_invariant, backend: as in the calls that the plan is for.

    Returns:
        int32 [n] for `prefill(plan=...)`; n is 0 where the kernel needs no plan.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype, while tracing.
        NotImplementedError: no kernel runs such a call.

    Caller's contract: the plan serves calls with the same lengths, shapes, dtypes and options.
    """
    inputs = AttentionInputs(
        query, key_cache, value_cache, page_table, seq_lens, cu_seqlens_q, sinks
    )
    return _launch.make_plan(
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
