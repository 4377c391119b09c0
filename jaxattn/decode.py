"""Paged decode: a few query rows for each request, over its whole cached sequence."""

import numpy as np
from jax import Array
from jaxtyping import Bool, Float32, Int32, Shaped, UInt16

from torch_core.problem import AttentionInputs

from . import _launch

AnyArray = Array | np.ndarray
Scale = float | Float32[AnyArray, ""]


def decode(
    query: Shaped[AnyArray, "rows num_qo_heads head_dim"],
    key_cache: Shaped[AnyArray, "num_pages _ _ head_dim"],
    value_cache: Shaped[AnyArray, "num_pages _ _ head_dim"],
    page_table: Int32[AnyArray, "batch pages_per_seq"],
    seq_lens: Int32[AnyArray, " batch"],
    *,
    sm_scale: Scale | None = None,
    window_left: int = -1,
    soft_cap: float | None = None,
    sinks: Float32[AnyArray, " num_qo_heads"] | None = None,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    q_len: int = 1,
    draft_mask: Bool[AnyArray, "batch {q_len} {q_len}"]
    | UInt16[AnyArray, "batch {q_len} _"]
    | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> Array | tuple[AnyArray, Array]:
    """Attends the last `q_len` tokens of each request to its paged cache.

    Row i of request b stands at position p = seq_lens[b] - q_len + i and computes
    softmax(query . key * sm_scale * k_scale) value * v_scale over its visible keys: positions
    0 to p, cut to p - window_left and later, and within the last q_len tokens to what
    `draft_mask` allows. Pure: works in jit, scan, while_loop and shard_map; vmap makes one larger
    batch; a gradient is refused. Over a mesh, in jit, each device computes on its part of the
    caches: of their KV heads, or of their pages (q_len 1, no window), where the parts are merged by
    lse and page ids stay those of the whole cache; requests may be split too.

    Args:
        query: [batch * q_len, num_qo_heads, head_dim]; bfloat16, float16, float32 or float8_e4m3fn.
        key_cache, value_cache: [num_pages, page_size, num_kv_heads, head_dim] ("NHD") or
            [num_pages, num_kv_heads, page_size, head_dim] ("HND"); the query's dtype,
            float8_e4m3fn or float8_e5m2. num_qo_heads is a multiple of num_kv_heads.
        page_table: int32 [batch, pages_per_seq]. Entries past ceil(seq_len / page_size) may hold
            anything.
        seq_lens: int32 [batch], cached tokens of each request, the q_len new ones included.
        sm_scale: multiplies query . key; default head_dim ** -0.5. Scales are numbers or 0-d
            arrays, traced or not.
        window_left: each row sees the window_left keys before its position and its own; -1 is off.
        soft_cap: scores become soft_cap * tanh(scores / soft_cap); None is off.
        sinks: float32 [num_qo_heads], an extra score per head in the softmax denominator.
        q_scale: dequantisation factor of a float8_e4m3fn query; any other query ignores it.
        k_scale, v_scale: dequantisation factors of the caches; default 1.
        q_len: query rows of each request, a Python int. Where a request has fewer new tokens, the
            rest are rows whose result means nothing: before them, or after and counted in seq_lens.
        draft_mask: bool [batch, q_len, q_len], whether row i sees draft token j, or the same packed
            as uint16 [batch, q_len, 2 * ceil(q_len / 32)], lowest bit first. Default: causal.
        kv_layout: "NHD" or "HND", order of the cache's axes.
        return_lse: also return the log-sum-exp of the scores.
        batch_invariant: use only kernels whose result for a request does not depend on the others.
        backend: "auto", or a kernel's name (see `explain`).

    Returns:
        out [batch * q_len, num_qo_heads, head_dim] in the query's dtype (bfloat16 for an e4m3
        query), and with return_lse also lse float32 [batch * q_len, num_qo_heads], natural log,
        sinks included. A row with no visible key gives 0 and -inf (with sinks: the sink).

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype, while tracing.
        NotImplementedError: no kernel runs this call, a gradient is asked for, or caches would
            have to be gathered (in jit over a mesh of Auto axes: a JaxRuntimeError with the text).
        jax.errors.JaxRuntimeError (or ValueError, JAX's fast path): on a CPU, at run time,
            page ids or lengths out of range.

    Caller's contract: page ids that are read lie in [0, num_pages) and seq_lens in
    [0, pages_per_seq * page_size].
    Keys and values that some row of a request sees are finite: others of its rows may else see
    NaN too. So are those of its last q_len places, whatever draft_mask hides.
    A row whose scores are all below -99000 gives 0 on XQA.
    """
    inputs = AttentionInputs(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        page_table=page_table,
        seq_lens=seq_lens,
        sinks=sinks,
        draft_mask=draft_mask,
        sm_scale=sm_scale,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return _launch.attend(
        "decode",
        inputs,
        backend=backend,
        q_len=q_len,
        kv_layout=kv_layout,
        window_left=window_left,
        soft_cap=soft_cap,
        return_lse=return_lse,
        batch_invariant=batch_invariant,
    )
