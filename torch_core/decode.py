"""Paged decode: a few query rows for each request, over its whole cached sequence."""

from jaxtyping import Bool, Float32, Int32, Shaped, UInt16
from torch import Tensor

from .launch import attend
from .problem import AttentionInputs

Scale = float | Float32[Tensor, ""]


def decode(
    query: Shaped[Tensor, "rows num_qo_heads head_dim"],
    key_cache: Shaped[Tensor, "num_pages _ _ head_dim"],
    value_cache: Shaped[Tensor, "num_pages _ _ head_dim"],
    page_table: Int32[Tensor, "batch pages_per_seq"],
    seq_lens: Int32[Tensor, " batch"],
    *,
    sm_scale: Scale | None = None,
    window_left: int = -1,
    soft_cap: float | None = None,
    sinks: Float32[Tensor, " num_qo_heads"] | None = None,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    q_len: int = 1,
    draft_mask: Bool[Tensor, "batch {q_len} {q_len}"]
    | UInt16[Tensor, "batch {q_len} _"]
    | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    batch_invariant: bool = False,
    backend: str = "auto",
    out: Tensor | tuple[Tensor, Tensor] | None = None,
) -> (
    Shaped[Tensor, "rows num_qo_heads head_dim"]
    | tuple[Shaped[Tensor, "rows num_qo_heads head_dim"], Float32[Tensor, "rows num_qo_heads"]]
):
    """Attends the last `q_len` tokens of each request to its paged cache.

    Row i of request b stands at position p = seq_lens[b] - q_len + i and computes
    softmax(query . key * sm_scale * k_scale) value * v_scale over its visible keys: positions
    0 to p, cut to p - window_left and later, and within the last q_len tokens to what
    `draft_mask` allows.

    Args:
        query: [batch * q_len, num_qo_heads, head_dim]; bfloat16, float16, float32 or float8_e4m3fn.
        key_cache, value_cache: [num_pages, page_size, num_kv_heads, head_dim] ("NHD") or
            [num_pages, num_kv_heads, page_size, head_dim] ("HND"); the query's dtype,
            float8_e4m3fn or float8_e5m2. num_qo_heads is a multiple of num_kv_heads. A GPU reads
            views whose strides are the same for both and multiples of head_dim, with whole rows,
            from multiples of 16 bytes on.
        page_table: int32 [batch, pages_per_seq]. Entries past ceil(seq_len / page_size) may hold
            anything.
        seq_lens: int32 [batch], cached tokens of each request, the q_len new ones included.
        sm_scale: multiplies query . key; default head_dim ** -0.5. Scales are numbers or 0-d
            arrays.
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
        out: tensor, or (out, lse) with return_lse, to write the result to.

    Returns:
        out [batch * q_len, num_qo_heads, head_dim] in the query's dtype (bfloat16 for an e4m3
        query), and with return_lse also lse float32 [batch * q_len, num_qo_heads], natural log,
        sinks included. A row with no visible key gives 0 and -inf (with sinks: the sink).

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype, before any launch.
        NotImplementedError: no kernel runs this call, or a gradient is asked for.

    Caller's contract: page ids that are read lie in [0, num_pages) and seq_lens in
    [0, pages_per_seq * page_size]. The CPU checks both; a GPU would have to synchronise.
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
    return attend(
        "decode",
        inputs,
        out=out,
        backend=backend,
        q_len=q_len,
        kv_layout=kv_layout,
        window_left=window_left,
        soft_cap=soft_cap,
        return_lse=return_lse,
        batch_invariant=batch_invariant,
    )
