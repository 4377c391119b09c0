"""QSA in plain torch: the definition of every number, and the backend of a machine without a GPU.

Each step takes contiguous tensors on one device and reads request ids and positions on the host.
Source: Qwen4ExpTextQSAIndexer and Qwen4ExpTextAttention of transformers 5.24.
"""

import torch
from torch import Tensor

from .. import checks
from ..checks import INT32_MAX
from ..reference import PIECE_ELEMENTS, _bytes
from .metadata import Metadata

E4M3_MAX = 448.0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * (1 + weight) in float32 or wider, rounded to the dtype of x."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (1.0 + weight.to(wide.dtype))).to(x.dtype)


def rotary_tables(
    max_positions: int, rotary_dim: int, theta: float, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Rotary tables of the angles position * theta ** (-2 i / rotary_dim), in radians.

    Args:
        max_positions: rows of the tables, 0 or more.
        rotary_dim: dims that are rotated, an even number of 2 or more.
        theta: base of the angles, a positive Python number.
        device: where the tables are computed and lie; default: the CPU.

    Returns:
        (cos, sin), float32 [max_positions, rotary_dim // 2] each.

    Raises:
        ValueError, TypeError: an argument is no such Python number.

    Source: the default rotary embedding of transformers 5.24.
    """
    max_positions = checks.integer("max_positions", max_positions, 0)
    rotary_dim = checks.integer("rotary_dim", rotary_dim, 2)
    if rotary_dim % 2:
        raise ValueError(f"rotary_dim must be even, got {rotary_dim}")
    if not isinstance(theta := checks.scale("theta", theta), float):
        raise TypeError("theta must be a Python number, got an array")
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    positions = torch.arange(max_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * (1.0 / theta**exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + half) of the first 2 * half dims; cos and sin [..., half]. Returns
    float32 or wider."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    half = cos.shape[-1]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def prepare_query(
    projection: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, eps: float
) -> Tensor:
    """The index query of each row: norm, then rotation at its own place in the tables."""
    place = positions.clamp(min=0, max=len(cos) - 1).long()
    query = rms_norm(projection, weight, eps)
    return rotate(query, cos[place, None], sin[place, None]).to(projection.dtype)


def group_keys(
    raw_keys: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, places: Tensor, eps: float
) -> Tensor:
    """Keys of groups from their raw keys [groups, compress_ratio, index_dim]: pool, norm, rotate at
    `places`. float32 or wider."""
    total = torch.zeros_like(raw_keys[:, 0], dtype=torch.promote_types(raw_keys.dtype, torch.float))
    for raw_key in raw_keys.unbind(1):
        total += raw_key
    pooled = (total / raw_keys.shape[1]).to(raw_keys.dtype)
    return rotate(rms_norm(pooled, weight, eps), cos[places], sin[places])


def compress(
    index_key: Tensor,
    ring: Tensor,
    compressed_cache: Tensor,
    metadata: Metadata,
    seq_lens: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    compress_ratio: int,
    eps: float,
    ring_ids: Tensor | None = None,
    rotary_positions: Tensor | None = None,
) -> None:
    """Writes the keys of the groups that this step completes, then the ring, in place."""
    request_ids, positions, slots = (
        array.long() for array in (metadata.request_ids, metadata.positions, metadata.slots)
    )
    rings = request_ids.clamp(min=0)
    if ring_ids is not None and len(ring_ids):
        rings = ring_ids.long()[rings]
    rows = (slots >= 0).nonzero()[:, 0]
    if len(rows):
        raw_keys = []
        for back in reversed(range(compress_ratio)):
            source = (rows - back).clamp(min=0)
            in_step = (rows >= back) & (request_ids[source] == request_ids[rows])
            held = ring[rings[rows], (positions[rows] - back) % ring.shape[1]]
            raw_keys.append(torch.where(in_step[:, None], index_key[source], held))
        if rotary_positions is None:
            places = positions[rows] - (compress_ratio - 1)
        else:
            places = rotary_positions.long()[rows]
        keys = group_keys(torch.stack(raw_keys, 1), weight, cos, sin, places, eps)
        cache = compressed_cache.view(-1, compressed_cache.shape[-1])
        _bytes(cache)[slots[rows]] = _bytes(_store_as(keys, cache.dtype))
    lengths = seq_lens.long()
    if len(lengths):
        kept = positions >= lengths[request_ids.clamp(min=0)] - ring.shape[1]
        kept &= request_ids >= 0
        ring[rings[kept], positions[kept] % ring.shape[1]] = index_key[kept]


def _store_as(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys in the cache's dtype; e4m3 saturates, as torch's own cast gives NaN."""
    return (keys.clamp(-E4M3_MAX, E4M3_MAX) if dtype == torch.float8_e4m3fn else keys).to(dtype)


def score(index_query: Tensor, keys: Tensor) -> Tensor:
    """Sum over heads of relu(query . key), float32 [rows, groups]; relu(NaN) is 0.

    Computed in float64 and rounded once, so that bits do not depend on the shapes, and equal keys
    have equal scores."""
    products = index_query.double() @ keys.double().T
    return products.relu_().nan_to_num_(0, torch.inf).sum(1).float()


def select(
    index_query: Tensor,
    compressed_cache: Tensor,
    page_table: Tensor,
    metadata: Metadata,
    *,
    topk: int,
) -> Tensor:
    """int32 [rows, topk]: the visible groups of highest score, in rising order, then -1."""
    num_rows, heads, _ = index_query.shape
    selected = torch.full((num_rows, topk), -1, dtype=torch.int32, device=index_query.device)
    groups_per_page = compressed_cache.shape[1]
    visible = metadata.visible.clamp(max=page_table.shape[1] * groups_per_page)
    for request, rows in _rows_of_requests(metadata.request_ids):
        num_groups = int(visible[rows].max())
        if num_groups <= 0:
            continue
        pages = page_table[request, : -(-num_groups // groups_per_page)].long()
        mapped = (pages >= 0) & (pages < len(compressed_cache))
        keys = _bytes(compressed_cache)[pages.masked_fill(~mapped, 0)].view(compressed_cache.dtype)
        keys = keys.reshape(-1, keys.shape[-1])[:num_groups]
        mapped = mapped.repeat_interleave(groups_per_page)[:num_groups]
        step = max(1, PIECE_ELEMENTS // (heads * num_groups))
        for piece in rows.split(step):
            seen = torch.arange(num_groups, device=visible.device) < visible[piece, None]
            scores = score(index_query[piece], keys).masked_fill_(~(seen & mapped), -torch.inf)
            chosen = highest(scores, seen & mapped, topk)
            selected[piece, : chosen.shape[1]] = chosen
    return selected


def highest(scores: Tensor, seen: Tensor, topk: int) -> Tensor:
    """int32 [rows, min(topk, groups)]: groups of highest score among the seen ones, of equal scores
    the lowest group; in rising order, then -1."""
    num_groups = scores.shape[1]
    width = min(topk, num_groups)
    bar = scores.topk(width, sorted=True).values[:, -1:]
    above, level = scores > bar, scores == bar
    places = width - above.sum(1, keepdim=True)
    chosen = (above | (level & (level.cumsum(1) <= places))) & seen
    order = torch.arange(num_groups, dtype=torch.int32, device=scores.device)
    chosen = torch.where(chosen, order, num_groups).sort(1).values[:, :width]
    return torch.where(chosen == num_groups, -1, chosen).int()


def expand(selected: Tensor, positions: Tensor, *, compress_ratio: int) -> tuple[Tensor, Tensor]:
    """(token_indices int32 [rows, budget + compress_ratio - 1], counts int32 [rows])."""
    budget = selected.shape[1] * compress_ratio
    columns = torch.arange(budget + compress_ratio - 1, device=selected.device)
    chosen = (selected >= 0).sum(1, keepdim=True) * compress_ratio
    ends = (positions[:, None].long() + 1).clamp(min=0)
    tail = ends % compress_ratio
    group = selected[:, columns.clamp(max=budget - 1) // compress_ratio].long()
    tokens = group * compress_ratio + columns % compress_ratio
    tokens = tokens.masked_fill((group < 0) | (tokens > INT32_MAX), -1)
    tokens = torch.where(columns < chosen, tokens, ends - tail + columns - chosen)
    counts = chosen + tail
    return tokens.masked_fill(columns >= counts, -1).int(), counts[:, 0].int()


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    metadata: Metadata,
    token_indices: Tensor,
    counts: Tensor,
    *,
    sm_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    gate: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(query . key * sm_scale * k_scale) value * v_scale over the listed tokens of each row.

    Returns out in `out_dtype` (default: the query's) and lse in `compute_dtype`."""
    num_rows, num_qo_heads, head_dim = query.shape
    num_pages, page_size, num_kv_heads, _ = key_cache.shape
    out = query.new_empty(query.shape, dtype=out_dtype or query.dtype)
    lse = query.new_empty(num_rows, num_qo_heads, dtype=compute_dtype)
    columns = torch.arange(token_indices.shape[1], device=query.device)
    width = int(counts.max()) if num_rows else 0
    step = max(1, PIECE_ELEMENTS // (max(width, 1) * num_kv_heads * head_dim))
    pieces = torch.arange(num_rows, device=query.device).split(step) if num_rows else ()
    for rows in pieces:
        width = int(counts[rows].clamp(0, token_indices.shape[1]).max())
        tokens = token_indices[rows, :width].long()
        valid = (columns[:width] < counts[rows, None]) & (metadata.request_ids[rows, None] >= 0)
        valid &= (tokens >= 0) & (tokens < page_table.shape[1] * page_size)
        tokens = tokens.masked_fill(~valid, 0)
        pages = torch.zeros_like(tokens)
        if page_table.numel():
            requests = metadata.request_ids[rows, None].clamp(min=0).long()
            pages = page_table[requests, tokens // page_size].long()
        valid &= (pages >= 0) & (pages < num_pages)
        place = (pages * page_size + tokens % page_size).masked_fill(~valid, 0)
        key, value = (
            _take(cache, place, valid).to(compute_dtype).transpose(1, 2)
            for cache in (key_cache, value_cache)
        )
        q = query[rows].to(compute_dtype).view(len(rows), num_kv_heads, -1, head_dim)
        scores = (q @ key.transpose(2, 3)).mul_(sm_scale * k_scale)
        scores.masked_fill_(~valid[:, None, None], -torch.inf)
        top = scores.amax(-1, keepdim=True) if width else scores.new_zeros(*q.shape[:3], 1)
        # Finite in an empty row, so that its weights are 0 and not NaN.
        top = top.clamp(min=torch.finfo(compute_dtype).min)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        lse[rows] = (total.log() + top).view(len(rows), num_qo_heads)
        # The largest score weighs 1, so a total below 1 is that of an empty row: 0.
        result = (weights.div_(total.clamp(min=1)) @ value).mul_(v_scale)
        out[rows] = result.reshape(len(rows), num_qo_heads, head_dim).to(out.dtype)
    if gate is not None:
        wide = torch.promote_types(out.dtype, torch.float32)
        gated = (out.to(wide) * gate.to(wide).sigmoid()).to(out.dtype)
        # A padding row's gate may hold anything.
        out = gated.masked_fill_((lse == -torch.inf)[..., None], 0)
    return out, lse


def _take(cache: Tensor, place: Tensor, valid: Tensor) -> Tensor:
    """Copies of the tokens at flat places, zero where not valid: [rows, width, heads, dim]."""
    if not cache.numel():
        return cache.new_zeros(*place.shape, *cache.shape[2:])
    taken = _bytes(cache).flatten(0, 1)[place]
    # A token that is not valid may hold NaN, which no mask takes out of a product.
    return taken.masked_fill_(~valid[..., None, None], 0).view(cache.dtype)


def _rows_of_requests(request_ids: Tensor) -> list[tuple[int, Tensor]]:
    """Each request that has rows, and its rows."""
    if not len(request_ids):
        return []
    ids, order = request_ids.sort(stable=True)
    values, counts = ids.unique_consecutive(return_counts=True)
    groups = order.split(counts.tolist())
    return [
        (request, rows)
        for request, rows in zip(values.tolist(), groups, strict=True)
        if request >= 0
    ]
