"""Attention over a paged cache in plain torch: the definition of every number, and the backend of
a machine without a GPU. Computes in float32, or in the dtype given as `compute_dtype`."""

import itertools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from .checks import FP8
from .problem import (
    DESCRIBE,
    SCALES,
    AppendInputs,
    AppendProblem,
    AttentionInputs,
    AttentionProblem,
    DecodeProblem,
    score_scale,
)

# Bound on the elements of one intermediate (scores, gathered keys); longer work goes in pieces.
PIECE_ELEMENTS = 2**26


def evaluate(
    phase: str, *, compute_dtype: torch.dtype = torch.float64, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact answer of a `decode` or `prefill` call, for tests.

    Args:
        phase: "decode" or "prefill".
        compute_dtype: of all arithmetic and of the results; float64 by default.
        arguments: those of the call, by name, without backend, plan and out.

    Returns:
        out and lse in `compute_dtype`.
    """
    arrays = {name: arguments.pop(name) for name in AttentionInputs._fields if name in arguments}
    problem, inputs = DESCRIBE[phase](AttentionInputs(**arrays), **arguments)
    out = inputs.query.new_empty(problem.out_shape, dtype=compute_dtype)
    lse = out.new_empty(problem.lse_shape)
    run(problem, inputs, out, lse, compute_dtype=compute_dtype)
    return out, lse


def check(problem: AttentionProblem, inputs: AttentionInputs) -> None:
    """ValueError where lengths, offsets or the page ids that they use are out of range."""
    _used_pages(problem, inputs, inputs.seq_lens.tolist())
    if inputs.cu_seqlens_q is not None:
        _check_offsets(problem, inputs.cu_seqlens_q.tolist())


def run(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    kernel: str = "reference",
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Runs a described call. Reads lengths and page ids on the host, so a GPU synchronises."""
    lengths = inputs.seq_lens.tolist()
    pages = _used_pages(problem, inputs, lengths)
    if isinstance(problem, DecodeProblem):
        _decode(problem, inputs, out, lse, compute_dtype, lengths, pages)
    else:
        offsets = inputs.cu_seqlens_q.tolist()
        _check_offsets(problem, offsets)
        _prefill(problem, inputs, out, lse, compute_dtype, lengths, pages, offsets)


def _decode(problem, inputs, out, lse, compute_dtype, lengths, pages) -> None:
    live = [request for request, length in enumerate(lengths) if length]
    if len(live) < problem.batch:
        out.zero_()
        if lse is not None:
            lse.copy_(_empty_row_lse(inputs).expand(problem.lse_shape))
    rows = (problem.batch, problem.q_len, problem.num_qo_heads)
    query, out = inputs.query.view(*rows, problem.head_dim), out.view(*rows, problem.head_dim)
    lse = None if lse is None else lse.view(rows)
    # Requests of one piece are padded to its longest; a request alone has its own length, so that
    # its bits do not depend on the others.
    per_token = max(problem.num_qo_heads * problem.q_len, problem.num_kv_heads * problem.head_dim)
    step = max(1, PIECE_ELEMENTS // (per_token * max(lengths, default=0) + 1))
    step = 1 if problem.batch_invariant else step
    for start in range(0, len(live), step):
        piece = live[start : start + step]
        piece_lengths = [lengths[request] for request in piece]
        length = max(piece_lengths)
        visible = None
        ragged = min(piece_lengths) < length
        if ragged or problem.q_len > 1 or problem.window_left >= 0 or not problem.causal:
            visible = _visible_to_decode(problem, inputs, piece, piece_lengths, length)
        key, value = _gather(problem, inputs, pages[piece], length)
        whole = len(piece) == problem.batch
        index = None if whole else torch.tensor(piece, device=query.device)
        result, result_lse = _attend(
            problem,
            inputs,
            query if whole else query[index],
            key,
            value,
            visible,
            compute_dtype,
            lse is not None,
        )
        _store(out, index, result)
        if lse is not None:
            _store(lse, index, result_lse)


def _store(target: Any, index: Any, result: Any) -> None:
    """Writes a result, or a part of it, in the target's dtype."""
    if index is None:
        target.copy_(result)
    else:
        target[index] = result.to(target.dtype)


def _prefill(problem, inputs, out, lse, compute_dtype, lengths, pages, offsets) -> None:
    out[offsets[-1] :] = 0
    if lse is not None:
        lse[offsets[-1] :] = _empty_row_lse(inputs)
    for request, length in enumerate(lengths):
        begin, end = offsets[request], offsets[request + 1]
        if begin == end:
            continue
        key, value = _gather(problem, inputs, pages[request : request + 1], length)
        step = max(1, PIECE_ELEMENTS // (problem.num_qo_heads * max(length, 1)))
        for first in range(begin, end, step):
            last = min(first + step, end)
            positions = length - end + np.arange(first, last)[None]
            visible = _visible(problem, positions, np.array([length]), length)
            query = inputs.query[None, first:last]
            result, result_lse = _attend(
                problem, inputs, query, key, value, visible, compute_dtype, lse is not None
            )
            rows = slice(first, last)
            _store(out, rows, result[0])
            if lse is not None:
                _store(lse, rows, result_lse[0])


def _attend(
    problem, inputs, query, key, value, visible, compute_dtype, with_lse
) -> tuple[torch.Tensor, Any]:
    """softmax(query . key * scale) value over the visible keys.

    query [batch, rows, num_qo_heads, head_dim]; key and value [batch, length, num_kv_heads,
    head_dim], overwritten; visible bool [batch, rows, length] on the host, or None where every row
    sees every key. Returns out as query, and lse [batch, rows, num_qo_heads] or None.
    """
    rows, length = query.shape[1], key.shape[1]
    heads = (problem.num_kv_heads, problem.group_size)
    numbers = {name: float(getattr(inputs, name)) for name in SCALES}
    scale = score_scale(problem, inputs._replace(**numbers))
    seen = None
    if visible is not None:
        seen = torch.from_numpy(visible).to(query.device)
        # A key that nothing sees may hold NaN, which no mask takes out of a product.
        unseen = torch.from_numpy(~visible.any(1)).to(query.device)[:, :, None, None]
        key, value = (_bytes(x).masked_fill_(unseen, 0).view(x.dtype) for x in (key, value))
    # [batch, num_kv_heads, group_size * rows, head_dim]
    batch, head_dim = query.shape[0], problem.head_dim
    q = query.to(compute_dtype)
    if rows > 1:
        q = q.reshape(batch, rows, *heads, head_dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch, heads[0], heads[1] * rows, head_dim)
    k, v = key.to(compute_dtype).transpose(1, 2), value.to(compute_dtype).transpose(1, 2)
    plain = problem.soft_cap is None and inputs.sinks is None and not with_lse
    if plain and length and (visible is None or visible.any(-1).all()):
        if seen is not None:
            seen = seen[:, None].repeat(1, 1, problem.group_size, 1)
        out = F.scaled_dot_product_attention(q, k, v, seen, scale=scale)
        lse = None
    else:
        scores = (q @ k.transpose(2, 3)).mul_(scale).unflatten(2, (problem.group_size, rows))
        if problem.soft_cap is not None:
            scores = scores.div_(problem.soft_cap).tanh_().mul_(problem.soft_cap)
        if seen is not None:
            scores.masked_fill_(~seen[:, None, None], -torch.inf)
        weights, lse = _softmax(scores, inputs.sinks, heads)
        out = weights.flatten(2, 3) @ v
        lse = lse.permute(0, 3, 1, 2).flatten(2, 3)
    if rows > 1:
        out = out.view(batch, *heads, rows, head_dim).permute(0, 3, 1, 2, 4)
    out = out.reshape(batch, rows, problem.num_qo_heads, head_dim)
    v_scale = float(inputs.v_scale)
    return out if v_scale == 1.0 else out.mul_(v_scale), lse


def _softmax(scores, sinks, heads) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, 0 in a row without scores, and the log of their denominator.

    scores [batch, num_kv_heads, group_size, rows, length], overwritten.
    """
    length = scores.shape[-1]
    if sinks is not None:
        sinks = sinks.to(scores.dtype).view(*heads, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    # Finite where nothing is seen, so that such a row's weights are 0 and not NaN.
    if scores.shape[-1]:
        top = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).min)
    else:
        top = scores.new_zeros((*scores.shape[:-1], 1))
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    lse = (total.log() + top).squeeze(-1)
    # The largest score weighs 1, so a total below 1 is that of an empty row: 0.
    return weights[..., :length].div_(total.clamp_min_(1)), lse


def _visible(problem, positions, lengths, length) -> np.ndarray:
    """bool [batch, rows, length]: which keys the rows at `positions` [batch, rows] see."""
    keys = np.arange(length)
    positions, lengths = positions[..., None], lengths[:, None, None]
    visible = np.repeat(keys < lengths, positions.shape[1], axis=1)
    if isinstance(problem, DecodeProblem):
        visible = visible & (positions >= 0)
    if problem.causal:
        visible = visible & (keys <= positions)
    if problem.window_left >= 0:
        visible = visible & (positions - keys <= problem.window_left)
    return visible


def _visible_to_decode(problem, inputs, piece, piece_lengths, length) -> np.ndarray:
    """bool [batch, q_len, length] for the requests of a piece: in the draft block, what the mask
    allows."""
    lengths = np.array(piece_lengths)
    block_start = lengths[:, None] - problem.q_len
    visible = _visible(problem, block_start + np.arange(problem.q_len), lengths, length)
    if problem.causal:
        return visible
    mask = _host(inputs.draft_mask)[piece]
    if problem.draft_mask == "packed":
        bits = mask[..., None] >> np.arange(16, dtype=np.uint16) & 1
        mask = bits.reshape(*mask.shape[:2], -1)[..., : problem.q_len].astype(bool)
    column = np.arange(length) - block_start
    index = np.broadcast_to(column.clip(0, problem.q_len - 1)[:, None], visible.shape)
    return visible & ((column < 0)[:, None] | np.take_along_axis(mask, index, 2))


def _gather(problem, inputs, pages, length) -> list[torch.Tensor]:
    """Copies of each request's first `length` tokens: [batch, length, num_kv_heads, head_dim]."""
    pages = pages[:, : -(-length // problem.page_size)].astype(np.int64)
    index = torch.from_numpy(pages.reshape(-1)).to(inputs.query.device)
    shape = (len(pages), pages.shape[1] * problem.page_size, problem.num_kv_heads, problem.head_dim)
    gathered = []
    for cache in (inputs.key_cache, inputs.value_cache):
        if problem.kv_dtype in FP8:
            tokens = _bytes(cache).index_select(0, index).view(cache.dtype)
        else:
            tokens = cache.index_select(0, index)
        if problem.kv_layout == "HND":
            tokens = tokens.transpose(1, 2)
        gathered.append(tokens.reshape(shape)[:, :length])
    return gathered


def _used_pages(problem, inputs, lengths) -> np.ndarray:
    """The page table up to the longest request, 0 where a request has no page; ValueError where
    lengths or the page ids that they use are out of range."""
    shortest, longest = check_lengths(lengths, problem.pages_per_seq * problem.page_size)
    count = -(-longest // problem.page_size)
    pages = _host(inputs.page_table)[:, :count]
    if shortest <= (count - 1) * problem.page_size:
        first = np.arange(count) * problem.page_size
        pages = np.where(first < np.array(lengths)[:, None], pages, 0)
    if pages.size:
        check_range("page_table", pages, "num_pages", problem.num_pages)
    return pages


def check_lengths(lengths: list[int], capacity: int) -> tuple[int, int]:
    """The shortest and the longest; ValueError where one is not in [0, capacity]."""
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    if shortest < 0 or longest > capacity:
        raise ValueError(
            f"seq_lens must be in [0, pages_per_seq * page_size = {capacity}], "
            f"got {shortest} to {longest}{_row(lengths, capacity)}"
        )
    return shortest, longest


def _host(array: torch.Tensor | np.ndarray) -> np.ndarray:
    return array.cpu().numpy() if isinstance(array, torch.Tensor) else array


def _check_offsets(problem, offsets) -> None:
    """ValueError where cu_seqlens_q does not describe the query's rows."""
    counts = [end - begin for begin, end in itertools.pairwise(offsets)]
    if offsets[0] != 0 or offsets[-1] > problem.num_rows or min(counts, default=0) < 0:
        raise ValueError(
            f"cu_seqlens_q must rise from 0 to at most the query's {problem.num_rows} rows, "
            f"got {offsets}"
        )
    if max(counts, default=0) > problem.max_seqlen_q:
        raise ValueError(
            f"max_seqlen_q must be at least the longest query, {max(counts)}, "
            f"got {problem.max_seqlen_q} (request {counts.index(max(counts))})"
        )


def check_range(name: str, values: Any, bound: str, limit: int, rows: Any = None) -> None:
    """ValueError where a value is not in [0, limit). `rows`: of the values, where they are some."""
    values = np.asarray(values)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= limit:
        row = _row(values, limit - 1, rows)
        raise ValueError(f"{name} must be in [0, {bound} = {limit}), got {low} to {high}{row}")


def _row(values: Any, most: int, rows: Any = None) -> str:
    """Where the first value that is not in [0, most] stands."""
    values = np.asarray(values)
    row = int(np.argwhere((values < 0) | (values > most))[0][0])
    return f" (row {row if rows is None else rows[row]})"


def _empty_row_lse(inputs) -> torch.Tensor:
    """log of the softmax denominator without keys: the sink alone, or -inf."""
    if inputs.sinks is not None:
        return inputs.sinks
    return torch.tensor(-torch.inf, device=inputs.query.device)


def append(problem: AppendProblem, inputs: AppendInputs) -> None:
    """Writes new tokens into the caches, in place. Works out the places on the host."""
    rows, slots = places(problem, inputs)
    if not rows:
        return
    device = inputs.key.device
    index = torch.tensor(slots, device=device)
    every = len(rows) == inputs.key.shape[0]
    picked = slice(None) if every else torch.tensor(rows, device=device)
    for cache, new, scale in (
        (inputs.key_cache, inputs.key, inputs.k_scale),
        (inputs.value_cache, inputs.value, inputs.v_scale),
    ):
        if cache is None:
            continue
        tokens = _bytes(cache if problem.kv_layout == "NHD" else cache.transpose(1, 2))
        new_tokens = _bytes(_to_cache(new[picked], cache.dtype, scale))
        if tokens.is_contiguous():
            tokens.view(-1, *tokens.shape[2:]).index_copy_(0, index, new_tokens)
        else:
            tokens[index // problem.page_size, index % problem.page_size] = new_tokens


def places(problem: AppendProblem, inputs: AppendInputs) -> tuple[list[int], list[int]]:
    """The rows that are not skipped and the flat slot of each; ValueError where one does not exist.

    Reads slots, or positions, requests and page table, from torch or NumPy arrays.
    """
    page_size, num_pages = problem.page_size, inputs.key_cache.shape[0]
    by_slot = inputs.slots is not None
    wanted = (inputs.slots if by_slot else inputs.positions).tolist()
    rows = [row for row, place in enumerate(wanted) if place >= 0]
    if not rows:
        return rows, []
    wanted = [wanted[row] for row in rows]
    if by_slot:
        limit = num_pages * page_size
        check_range("slots", wanted, "num_pages * page_size", limit, rows)
        return rows, wanted
    requests = rows
    if inputs.request_ids is not None:
        requests = inputs.request_ids[rows].tolist()
    batch, pages_per_seq = inputs.page_table.shape
    check_range("request_ids", requests, "batch", batch, rows)
    capacity = pages_per_seq * page_size
    check_range("positions", wanted, "pages_per_seq * page_size", capacity, rows)
    pages = inputs.page_table[requests, [place // page_size for place in wanted]].tolist()
    check_range("page_table", pages, "num_pages", num_pages, rows)
    return rows, [p * page_size + w % page_size for p, w in zip(pages, wanted, strict=True)]


def _bytes(array: torch.Tensor) -> torch.Tensor:
    """An fp8 array as bytes: torch indexes those on every device."""
    return array.view(torch.uint8) if array.element_size() == 1 else array


def _to_cache(rows, dtype, scale) -> torch.Tensor:
    """rows / scale in the cache's dtype; fp8 saturates, as torch's own cast gives NaN."""
    scale = float(scale)
    if scale == 1.0 and rows.dtype == dtype:
        return rows
    rows = rows.float() / scale
    if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        limit = torch.finfo(dtype).max
        rows = rows.clamp(-limit, limit)
    return rows.to(dtype)


def merge(out_a, lse_a, out_b, lse_b) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins two partial attentions over disjoint keys, in float32."""
    top = torch.maximum(lse_a, lse_b)
    shift = top.masked_fill(top == -torch.inf, 0)
    weight_a, weight_b = (lse_a - shift).exp(), (lse_b - shift).exp()
    total = weight_a + weight_b
    share_a = (weight_a / total.masked_fill(total == 0, 1))[..., None]
    share_b = (weight_b / total.masked_fill(total == 0, 1))[..., None]
    # A part that saw no key weighs 0, whatever its output holds.
    part_a = (out_a.float() * share_a).masked_fill(share_a == 0, 0)
    part_b = (out_b.float() * share_b).masked_fill(share_b == 0, 0)
    return (part_a + part_b).to(out_a.dtype), total.log() + shift
