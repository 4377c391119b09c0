"""Attention over a paged cache in plain torch: the definition of every number, and the backend of
a machine without a GPU. Computes in float32, or in the dtype given as `compute_dtype`."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from .problem import (
    DESCRIBE,
    AppendInputs,
    AppendProblem,
    AttentionInputs,
    AttentionProblem,
    DecodeProblem,
    PrefillProblem,
)

# Bound on the elements of one intermediate (scores, gathered keys); longer work goes in pieces.
PIECE_ELEMENTS = 2**26
# Work of query . key below this many products stays on one thread: a few milliseconds there.
ONE_THREAD_PRODUCTS = 2**24


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


def run(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Runs a described call. Reads the lengths on the host, so a GPU synchronises."""
    lengths, page_table = _on_host(inputs.seq_lens), _on_host(inputs.page_table)
    _check_lengths(problem, lengths, page_table)
    rows: Any = problem.q_len if isinstance(problem, DecodeProblem) else None
    offsets = None
    if isinstance(problem, PrefillProblem):
        offsets = _on_host(inputs.cu_seqlens_q)
        _check_offsets(problem, offsets)
        rows = np.diff(offsets)
    keys = int((lengths.astype(np.int64) * rows).sum())
    with _threads_for(keys * problem.num_qo_heads * problem.head_dim):
        if offsets is None:
            _decode(problem, inputs, out, lse, compute_dtype, lengths, page_table)
        else:
            _prefill(problem, inputs, out, lse, compute_dtype, lengths, page_table, offsets)


@contextlib.contextmanager
def _threads_for(products: int) -> Iterator[None]:
    """Keeps small work on one thread: waking others takes longer, and milliseconds where XLA's own
    threads hold the cores. Costs under a microsecond."""
    before = torch.get_num_threads()
    if products < ONE_THREAD_PRODUCTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _decode(problem, inputs, out, lse, compute_dtype, lengths, page_table) -> None:
    live = np.flatnonzero(lengths)
    if len(live) < problem.batch:
        out.zero_()
        if lse is not None:
            lse.copy_(_empty_row_lse(inputs).expand(problem.lse_shape))
    rows = (problem.batch, problem.q_len)
    query = inputs.query.unflatten(0, rows)
    out, lse = out.unflatten(0, rows), None if lse is None else lse.unflatten(0, rows)
    draft_mask = None if inputs.draft_mask is None else _on_host(inputs.draft_mask)
    # Requests of one piece are padded to its longest; a request alone has its own length, so that
    # its bits do not depend on the others.
    per_token = max(problem.num_qo_heads * problem.q_len, problem.num_kv_heads * problem.head_dim)
    step = PIECE_ELEMENTS // (per_token * max(lengths.max(initial=0), 1))
    step = 1 if problem.batch_invariant else max(1, step)
    for start in range(0, len(live), step):
        piece = live[start : start + step]
        piece_lengths = lengths[piece]
        length = int(piece_lengths.max())
        visible = None
        if length > piece_lengths.min() or problem.q_len > 1 or problem.window_left >= 0:
            positions = piece_lengths[:, None] - problem.q_len + np.arange(problem.q_len)
            visible = _visible(problem, positions, piece_lengths, length)
        if draft_mask is not None:
            draft = _draft_visible(problem, draft_mask[piece], piece_lengths, length)
            visible = draft if visible is None else visible & draft
        whole = len(piece) == problem.batch
        index = slice(None) if whole else torch.from_numpy(piece).to(query.device)
        key, value = _gather(problem, inputs, page_table[piece], length)
        result, result_lse = _attend(
            problem, inputs, query[index], key, value, visible, compute_dtype, lse is not None
        )
        out[index] = result.to(out.dtype)
        if lse is not None:
            lse[index] = result_lse.to(lse.dtype)


def _prefill(problem, inputs, out, lse, compute_dtype, lengths, page_table, offsets) -> None:
    out[int(offsets[-1]) :] = 0
    if lse is not None:
        lse[int(offsets[-1]) :] = _empty_row_lse(inputs)
    for request, length in enumerate(lengths.tolist()):
        begin, end = offsets[request : request + 2].tolist()
        if begin == end:
            continue
        key, value = _gather(problem, inputs, page_table[request : request + 1], length)
        step = max(1, PIECE_ELEMENTS // (problem.num_qo_heads * max(length, 1)))
        for first in range(begin, end, step):
            last = min(first + step, end)
            positions = length - end + np.arange(first, last)[None]
            visible = _visible(problem, positions, lengths[request : request + 1], length)
            query = inputs.query[None, first:last]
            result, result_lse = _attend(
                problem, inputs, query, key, value, visible, compute_dtype, lse is not None
            )
            out[first:last] = result[0].to(out.dtype)
            if lse is not None:
                lse[first:last] = result_lse[0].to(lse.dtype)


def _attend(problem, inputs, query, key, value, visible, compute_dtype, with_lse):
    """softmax(query . key * scale) value over the visible keys.

    query [batch, rows, num_qo_heads, head_dim]; key and value [batch, length, num_kv_heads,
    head_dim], overwritten; visible bool [batch, rows, length] on the host, or None where every row
    sees every key. Returns out as query, and lse [batch, rows, num_qo_heads] or None.
    """
    rows, length = query.shape[1], key.shape[1]
    heads = (problem.num_kv_heads, problem.group_size)
    scale = float(inputs.sm_scale) * float(inputs.k_scale)
    if query.dtype == torch.float8_e4m3fn:
        scale *= float(inputs.q_scale)
    seen = None
    if visible is not None:
        seen = torch.from_numpy(visible).to(query.device)
        # A key that nothing sees may hold NaN, which no mask takes out of a product.
        unseen = torch.from_numpy(~visible.any(1)).to(query.device)[:, :, None, None]
        key, value = (_bytes(x).masked_fill_(unseen, 0).view(x.dtype) for x in (key, value))
    # [batch, num_kv_heads, group_size * rows, head_dim]
    q = query.to(compute_dtype).unflatten(2, heads).permute(0, 2, 3, 1, 4).flatten(2, 3)
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
    out = out.unflatten(2, (problem.group_size, rows)).permute(0, 3, 1, 2, 4).flatten(2, 3)
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


def _draft_visible(problem, draft_mask, lengths, length) -> np.ndarray:
    """bool [batch, q_len, length]: the whole prefix, and in the block what the mask allows."""
    if problem.draft_mask == "packed":
        bits = draft_mask[..., None] >> np.arange(16, dtype=np.uint16) & 1
        draft_mask = bits.reshape(*draft_mask.shape[:2], -1)[..., : problem.q_len].astype(bool)
    column = np.arange(length) - (lengths[:, None] - problem.q_len)
    index = np.broadcast_to(
        column.clip(0, problem.q_len - 1)[:, None], (*draft_mask.shape[:2], length)
    )
    return (column < 0)[:, None] | np.take_along_axis(draft_mask, index, 2)


def _gather(problem, inputs, page_table, length) -> list[torch.Tensor]:
    """Copies of each request's first `length` tokens: [batch, length, num_kv_heads, head_dim]."""
    batch, count = len(page_table), -(-length // problem.page_size)
    # A short request's table may hold anything past its pages.
    pages = page_table[:, :count].clip(0, max(problem.num_pages - 1, 0)).reshape(-1)
    index = torch.from_numpy(pages).to(inputs.query.device)
    gathered = []
    for cache in (inputs.key_cache, inputs.value_cache):
        tokens = _bytes(cache).index_select(0, index).view(cache.dtype)
        tokens = tokens if problem.kv_layout == "NHD" else tokens.transpose(1, 2)
        tokens = tokens.reshape(batch, count * problem.page_size, *tokens.shape[2:])
        gathered.append(tokens[:, :length])
    return gathered


def _on_host(array: torch.Tensor) -> np.ndarray:
    return array.cpu().numpy()


def _check_lengths(problem, lengths, page_table) -> None:
    """ValueError where the lengths or the page ids that they use are out of range."""
    capacity = problem.pages_per_seq * problem.page_size
    if not len(lengths):
        return
    low, high = int(lengths.min()), int(lengths.max())
    if low < 0 or high > capacity:
        raise ValueError(
            f"seq_lens must be in [0, pages_per_seq * page_size = {capacity}], got {low} to {high}"
        )
    count = -(-high // problem.page_size)
    used = page_table[:, :count][np.arange(count) * problem.page_size < lengths[:, None]]
    _check_range("page_table", used, "num_pages", problem.num_pages)


def _check_offsets(problem, offsets) -> None:
    """ValueError where cu_seqlens_q does not describe the query's rows."""
    counts = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] > problem.num_rows or counts.min(initial=0) < 0:
        raise ValueError(
            f"cu_seqlens_q must rise from 0 to at most the query's {problem.num_rows} rows, "
            f"got {offsets.tolist()}"
        )
    if counts.max(initial=0) > problem.max_seqlen_q:
        raise ValueError(
            f"max_seqlen_q must be at least the longest query, {counts.max()}, "
            f"got {problem.max_seqlen_q}"
        )


def _check_range(name: str, values: np.ndarray, bound: str, limit: int) -> None:
    if not values.size:
        return
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= limit:
        raise ValueError(f"{name} must be in [0, {bound} = {limit}), got {low} to {high}")


def _empty_row_lse(inputs) -> torch.Tensor:
    """log of the softmax denominator without keys: the sink alone, or -inf."""
    if inputs.sinks is not None:
        return inputs.sinks
    return torch.tensor(-torch.inf, device=inputs.query.device)


def append(problem: AppendProblem, inputs: AppendInputs) -> None:
    """Writes new tokens into the caches, in place."""
    num_pages, page_size = inputs.key_cache.shape[0], problem.page_size
    by_slot = inputs.slots is not None
    places = _on_host(inputs.slots if by_slot else inputs.positions)
    rows = np.flatnonzero(places >= 0)
    if not len(rows):
        return
    places = places[rows]
    if by_slot:
        _check_range("slots", places, "num_pages * page_size", num_pages * page_size)
        pages = places // page_size
    else:
        page_table = _on_host(inputs.page_table)
        requests = rows if inputs.request_ids is None else _on_host(inputs.request_ids)[rows]
        batch, pages_per_seq = page_table.shape
        _check_range("request_ids", requests, "batch", batch)
        _check_range("positions", places, "pages_per_seq * page_size", pages_per_seq * page_size)
        pages = page_table[requests, places // page_size]
        _check_range("page_table", pages, "num_pages", num_pages)
    device = inputs.key.device
    index = tuple(torch.from_numpy(i).to(device) for i in (pages, places % page_size))
    every = len(rows) == len(inputs.key)
    picked = slice(None) if every else torch.from_numpy(rows).to(device)
    for cache, new, scale in (
        (inputs.key_cache, inputs.key, inputs.k_scale),
        (inputs.value_cache, inputs.value, inputs.v_scale),
    ):
        tokens = cache if problem.kv_layout == "NHD" else cache.transpose(1, 2)
        _bytes(tokens)[index] = _bytes(_to_cache(new[picked], cache.dtype, scale))


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
