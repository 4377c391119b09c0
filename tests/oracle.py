"""Attention in NumPy, written apart from the library: float64 unless another dtype is asked for.

One request and one head at a time, with explicit masks; shares no code with torch_core.
"""

import numpy as np


def attention(
    query,
    key_cache,
    value_cache,
    page_table,
    seq_lens,
    cu_seqlens_q=None,
    *,
    q_len=1,
    max_seqlen_q=None,
    causal=True,
    draft_mask=None,
    sm_scale=None,
    window_left=-1,
    soft_cap=None,
    sinks=None,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    kv_layout="NHD",
    dtype=np.float64,
    noise=None,
    **_ignored,
):
    """Returns (out, lse) in `dtype` for a decode call (no cu_seqlens_q) or a prefill call.

    By the generator `noise`, as another program for the same maths might: sums in a random order,
    and the result of each step moved at random by up to half a unit in the last place.
    """

    def moved(x):
        if noise is None:
            return x
        shift = noise.uniform(-0.5, 0.5, np.shape(x)) * np.finfo(dtype).eps
        return (x * (1 + shift)).astype(dtype)

    batch = len(seq_lens)
    if cu_seqlens_q is None:
        cu_seqlens_q = np.arange(batch + 1) * q_len
    rows, num_qo_heads, head_dim = query.shape
    out = np.zeros(query.shape, dtype)
    lse = np.full((rows, num_qo_heads), -np.inf, dtype)
    if sinks is not None:
        lse[:] = np.asarray(sinks, dtype)
    if draft_mask is not None and draft_mask.dtype == np.uint16:
        draft_mask = unpack(draft_mask, q_len)
    scale = head_dim**-0.5 if sm_scale is None else float(sm_scale)
    scale *= 1.0 if k_scale is None else float(k_scale)
    if query.dtype.name == "float8_e4m3fn" and q_scale is not None:
        scale *= float(q_scale)
    dims = slice(None) if noise is None else noise.permutation(head_dim)
    for request in range(batch):
        begin, end = int(cu_seqlens_q[request]), int(cu_seqlens_q[request + 1])
        length = int(seq_lens[request])
        key = tokens(key_cache, page_table[request], length, kv_layout).astype(dtype)
        value = tokens(value_cache, page_table[request], length, kv_layout).astype(dtype)
        group_size = num_qo_heads // key.shape[1]
        for row in range(begin, end):
            position = length - (end - row)
            seen = mask_of_row(position, length, causal, window_left)
            if draft_mask is not None:
                start = length - q_len
                seen = np.array(
                    [
                        position >= 0
                        and (window_left < 0 or at >= position - window_left)
                        and (at < start or draft_mask[request, row - begin, at - start])
                        for at in range(length)
                    ],
                    bool,
                )
            at = np.flatnonzero(seen)
            at = at if noise is None else noise.permutation(at)
            for head in range(num_qo_heads):
                kv_head = head // group_size
                row_query = query[row, head, dims].astype(dtype)
                scores = moved(moved(key[at, kv_head][:, dims] @ row_query) * dtype(scale))
                if soft_cap is not None:
                    scores = moved(dtype(soft_cap) * moved(np.tanh(scores / dtype(soft_cap))))
                parts = scores if sinks is None else np.append(scores, dtype(sinks[head]))
                if len(parts) == 0:
                    continue
                top = parts.max()
                total = moved(np.exp(parts - top).sum())
                lse[row, head] = moved(moved(np.log(total)) + top)
                weights = moved(moved(np.exp(scores - top)) / total)
                factor = dtype(1.0 if v_scale is None else float(v_scale))
                out[row, head] = moved(moved(weights @ value[at, kv_head]) * factor)
    return out, lse


def mask_of_row(position, length, causal, window_left):
    """bool [length]: keys that a row at `position` sees."""
    at = np.arange(length)
    seen = at <= position if causal else np.ones(length, bool)
    if window_left >= 0:
        seen &= at >= position - window_left
    return seen


def tokens(cache, pages, length, kv_layout):
    """The first `length` tokens of one request: [length, num_kv_heads, head_dim]."""
    if kv_layout == "HND":
        cache = np.swapaxes(cache, 1, 2)
    page_size = cache.shape[1]
    count = -(-length // page_size)
    picked = [cache[int(page)] for page in pages[:count]]
    if not picked:
        return np.zeros((0, *cache.shape[2:]), cache.dtype)
    return np.concatenate(picked)[:length]


def unpack(packed, q_len):
    """uint16 [batch, q_len, words] -> bool [batch, q_len, q_len], lowest bit first."""
    batch = packed.shape[0]
    mask = np.zeros((batch, q_len, q_len), bool)
    for column in range(q_len):
        mask[:, :, column] = (packed[:, :, column // 16] >> np.uint16(column % 16)) & 1
    return mask


def pack(mask):
    """bool [batch, q_len, q_len] -> uint16 [batch, q_len, 2 * ceil(q_len / 32)]."""
    batch, q_len, _ = mask.shape
    packed = np.zeros((batch, q_len, 2 * -(-q_len // 32)), np.uint16)
    for column in range(q_len):
        bit = np.uint16(1 << column % 16)
        packed[:, :, column // 16] |= np.where(mask[:, :, column], bit, np.uint16(0))
    return packed
