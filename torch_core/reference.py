"""Attention over a paged cache in plain torch: the definition of every number, and the backend of
a machine without a GPU. Computes in float32, or in the dtype given as `compute_dtype`."""

import itertools
from typing import Any

import torch

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
    if isinstance(problem, DecodeProblem):
        _decode(problem, inputs, out, lse, compute_dtype)
    elif isinstance(problem, PrefillProblem):
        _prefill(problem, inputs, out, lse, compute_dtype)


def _decode(problem, inputs, out, lse, compute_dtype) -> None:
    lengths = _checked_lengths(problem, inputs)
    live = [request for request, length in enumerate(lengths) if length > 0]
    if len(live) < problem.batch:
        out.zero_()
        if lse is not None:
            lse.copy_(_empty_row_lse(inputs).expand(problem.lse_shape))
    rows = (problem.batch, problem.q_len)
    query = inputs.query.unflatten(0, rows)
    out, lse = out.unflatten(0, rows), None if lse is None else lse.unflatten(0, rows)
    # Requests of one piece are padded to its longest; a request alone has its own length, so that
    # its bits do not depend on the others.
    longest = max(lengths, default=0)
    per_token = max(problem.num_qo_heads * problem.q_len, problem.num_kv_heads * problem.head_dim)
    step = 1 if problem.batch_invariant else max(1, PIECE_ELEMENTS // (per_token * max(longest, 1)))
    for start in range(0, len(live), step):
        piece = live[start : start + step]
        whole = len(piece) == problem.batch
        index = slice(None) if whole else torch.tensor(piece, device=query.device)
        length = max(lengths[request] for request in piece)
        key, value = _gather(problem, inputs, inputs.page_table[index], length)
        seq_lens = inputs.seq_lens[index]
        visible = None
        shortest = min(lengths[request] for request in piece)
        if shortest < length or problem.q_len > 1 or problem.window_left >= 0:
            positions = seq_lens[:, None] - problem.q_len + _arange(problem.q_len, query)
            visible = _visible(problem, positions, seq_lens, length)
        if problem.draft_mask is not None:
            draft = _draft_visible(problem, inputs.draft_mask[index], seq_lens, length)
            visible = draft if visible is None else visible & draft
        result, result_lse = _attend(
            problem, inputs, query[index], key, value, visible, compute_dtype
        )
        out[index] = result.to(out.dtype)
        if lse is not None:
            lse[index] = result_lse.to(lse.dtype)


def _prefill(problem, inputs, out, lse, compute_dtype) -> None:
    lengths = _checked_lengths(problem, inputs)
    offsets = _checked_offsets(problem, inputs)
    out[offsets[-1] :] = 0
    if lse is not None:
        lse[offsets[-1] :] = _empty_row_lse(inputs)
    for request, length in enumerate(lengths):
        begin, end = offsets[request], offsets[request + 1]
        if begin == end:
            continue
        table = inputs.page_table[request : request + 1]
        key, value = _gather(problem, inputs, table, length)
        step = max(1, PIECE_ELEMENTS // (problem.num_qo_heads * max(length, 1)))
        for first in range(begin, end, step):
            last = min(first + step, end)
            query = inputs.query[first:last]
            positions = length - end + first + _arange(last - first, query)
            visible = _visible(
                problem, positions[None], inputs.seq_lens[request : request + 1], length
            )
            result, result_lse = _attend(
                problem, inputs, query[None], key, value, visible, compute_dtype
            )
            out[first:last] = result[0].to(out.dtype)
            if lse is not None:
                lse[first:last] = result_lse[0].to(lse.dtype)


def _attend(problem, inputs, query, key, value, visible, compute_dtype):
    """softmax(query . key * scale) value over the visible keys.

    query [batch, rows, num_qo_heads, head_dim]; key and value [batch, length, num_kv_heads,
    head_dim]; visible [batch, rows, length], or None where every row sees every key. Returns out
    as query, and lse [batch, rows, num_qo_heads].
    """
    rows = query.shape[1]
    heads = (problem.num_kv_heads, problem.group_size)
    scale = inputs.sm_scale * inputs.k_scale
    if query.dtype == torch.float8_e4m3fn:
        scale = scale * inputs.q_scale
    # [batch, num_kv_heads, group_size * rows, head_dim]
    q = query.to(compute_dtype).unflatten(2, heads).permute(0, 2, 3, 1, 4).flatten(2, 3)
    k = key.to(compute_dtype).permute(0, 2, 3, 1)
    v = value.to(compute_dtype).transpose(1, 2)
    scores = (q @ k).mul_(scale).unflatten(2, (problem.group_size, rows))
    if problem.soft_cap is not None:
        scores = scores.div_(problem.soft_cap).tanh_().mul_(problem.soft_cap)
    if visible is not None:
        scores.masked_fill_(~visible[:, None, None], -torch.inf)
        # A key that nothing sees may hold NaN, and 0 * NaN is NaN.
        v = v.masked_fill(~visible.any(1)[:, None, :, None], 0)
    if inputs.sinks is not None:
        sinks = inputs.sinks.to(compute_dtype).view(*heads, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    # Finite where nothing is seen, so that such a row's weights are 0 and not NaN.
    if scores.shape[-1]:
        top = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(compute_dtype).min)
    else:
        top = scores.new_zeros((*scores.shape[:-1], 1))
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    lse = (total.log() + top).squeeze(-1)
    # The largest score weighs 1, so a total below 1 is that of an empty row: 0.
    weights = weights[..., : key.shape[1]].div_(total.clamp_min_(1))
    out = (weights.flatten(2, 3) @ v).unflatten(2, (problem.group_size, rows)) * inputs.v_scale
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2, 3)


def _visible(problem, positions, seq_lens, length) -> torch.Tensor:
    """bool [batch, rows, length]: which keys the rows at `positions` [batch, rows] see."""
    keys = _arange(length, positions)
    positions, seq_lens = positions[..., None], seq_lens[:, None, None]
    visible = keys < seq_lens
    if isinstance(problem, DecodeProblem):
        visible = visible & (positions >= 0)
    if problem.causal:
        visible = visible & (keys <= positions)
    if problem.window_left >= 0:
        visible = visible & (keys >= positions - problem.window_left)
    return visible.expand(*positions.shape[:2], length)


def _draft_visible(problem, draft_mask, seq_lens, length) -> torch.Tensor:
    """bool [batch, q_len, length]: the whole prefix, and in the block what the mask allows."""
    if problem.draft_mask == "packed":
        draft_mask = unpack_draft_mask(draft_mask, problem.q_len)
    column = _arange(length, seq_lens) - (seq_lens[:, None] - problem.q_len)
    index = column.clamp(0, problem.q_len - 1)[:, None].expand(-1, problem.q_len, -1)
    return (column < 0)[:, None] | draft_mask.gather(2, index.long())


def unpack_draft_mask(packed: torch.Tensor, q_len: int) -> torch.Tensor:
    """uint16 [batch, q_len, words], lowest bit first -> bool [batch, q_len, q_len]."""
    bits = packed.to(torch.int32)[..., None] >> _arange(16, packed)
    return (bits & 1).flatten(-2)[..., :q_len].bool()


def _gather(problem, inputs, page_table, length):
    """The first `length` tokens of each request, [batch, length, num_kv_heads, head_dim]."""
    pages = page_table[:, : -(-length // problem.page_size)].long()
    # A short request's table may hold anything past its pages.
    pages = pages.clamp(0, max(problem.num_pages - 1, 0))
    gathered = []
    for cache in (inputs.key_cache, inputs.value_cache):
        tokens = cache if problem.kv_layout == "NHD" else cache.transpose(1, 2)
        tokens = _bytes(tokens)[pages].view(cache.dtype)
        gathered.append(tokens.flatten(1, 2)[:, :length])
    return gathered


def _checked_lengths(problem, inputs) -> list[int]:
    """The lengths as host integers; ValueError where they or the used page ids are out of range."""
    lengths = inputs.seq_lens.tolist()
    capacity = problem.pages_per_seq * problem.page_size
    if lengths and not 0 <= min(lengths) <= max(lengths) <= capacity:
        raise ValueError(
            f"seq_lens must be in [0, pages_per_seq * page_size = {capacity}], "
            f"got {min(lengths)} to {max(lengths)}"
        )
    if any(lengths):
        first = _arange(problem.pages_per_seq, inputs.page_table) * problem.page_size
        used = inputs.page_table[first < inputs.seq_lens[:, None]]
        _check_range("page_table", used, "num_pages", problem.num_pages)
    return lengths


def _checked_offsets(problem, inputs) -> list[int]:
    """cu_seqlens_q as host integers; ValueError where they do not describe the query's rows."""
    offsets = inputs.cu_seqlens_q.tolist()
    counts = [end - begin for begin, end in itertools.pairwise(offsets)]
    if offsets[0] != 0 or offsets[-1] > problem.num_rows or min(counts, default=0) < 0:
        raise ValueError(
            f"cu_seqlens_q must rise from 0 to at most the query's {problem.num_rows} rows, "
            f"got {offsets}"
        )
    if max(counts, default=0) > problem.max_seqlen_q:
        raise ValueError(
            f"max_seqlen_q must be at least the longest query, {max(counts)}, "
            f"got {problem.max_seqlen_q}"
        )
    return offsets


def _empty_row_lse(inputs) -> torch.Tensor:
    """log of the softmax denominator without keys: the sink alone, or -inf."""
    return (
        torch.tensor(-torch.inf, device=inputs.query.device)
        if inputs.sinks is None
        else inputs.sinks
    )


def append(problem: AppendProblem, inputs: AppendInputs) -> None:
    """Writes new tokens into the caches, in place."""
    num_pages, page_size = inputs.key_cache.shape[0], problem.page_size
    by_slot = inputs.slots is not None
    places = inputs.slots if by_slot else inputs.positions
    rows = (places >= 0).nonzero()[:, 0]
    if not rows.numel():
        return
    places = places[rows].long()
    if by_slot:
        _check_range("slots", places, "num_pages * page_size", num_pages * page_size)
        page = places // page_size
    else:
        requests = rows if inputs.request_ids is None else inputs.request_ids[rows].long()
        batch, pages_per_seq = inputs.page_table.shape
        _check_range("request_ids", requests, "batch", batch)
        _check_range("positions", places, "pages_per_seq * page_size", pages_per_seq * page_size)
        page = inputs.page_table[requests, places // page_size].long()
        _check_range("page_table", page, "num_pages", num_pages)
    offset = places % page_size
    for cache, new, scale in (
        (inputs.key_cache, inputs.key, inputs.k_scale),
        (inputs.value_cache, inputs.value, inputs.v_scale),
    ):
        tokens = cache if problem.kv_layout == "NHD" else cache.transpose(1, 2)
        _bytes(tokens)[page, offset] = _bytes(_to_cache(new[rows], cache.dtype, scale))


def _check_range(name: str, values: torch.Tensor, bound: str, limit: int) -> None:
    low, high = (int(value) for value in torch.aminmax(values))
    if low < 0 or high >= limit:
        raise ValueError(f"{name} must be in [0, {bound} = {limit}), got {low} to {high}")


def _bytes(array: torch.Tensor) -> torch.Tensor:
    """An fp8 array as bytes: torch indexes those on every device."""
    return array.view(torch.uint8) if array.element_size() == 1 else array


def _to_cache(rows, dtype, scale) -> torch.Tensor:
    """rows / scale in the cache's dtype; fp8 saturates, as torch's own cast gives NaN."""
    if isinstance(scale, float) and scale == 1.0 and rows.dtype == dtype:
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


def _arange(count, like) -> torch.Tensor:
    return torch.arange(count, device=like.device, dtype=torch.int32)
