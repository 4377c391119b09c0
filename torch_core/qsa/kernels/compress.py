"""The write side: keys of completed groups into the compressed cache, raw keys into the rings."""

import triton
import triton.language as tl


@triton.jit
def same_request(request_ids_ptr, row, request):
    """Whether a row of this step, if there is one, belongs to the request."""
    exists = (row >= 0) & (row < tl.num_programs(0))
    return exists & (tl.load(request_ids_ptr + row, mask=exists, other=-1) == request)


@triton.jit
def pool(
    index_key_ptr,
    ring_ptr,
    request_ids_ptr,
    row,
    request,
    ring,
    position,
    dim,
    live,
    INDEX_DIM: tl.constexpr,
    COMPRESS_RATIO: tl.constexpr,
    RING_ROWS: tl.constexpr,
):
    """float32 mean of the raw keys of the group that ends at `row`, rounded to their dtype."""
    total = tl.zeros_like(dim).to(tl.float32)
    for j in tl.static_range(COMPRESS_RATIO):
        source = row - (COMPRESS_RATIO - 1 - j)
        in_step = same_request(request_ids_ptr, source, request)
        held = ring * RING_ROWS + (position - (COMPRESS_RATIO - 1 - j)) % RING_ROWS
        new = tl.load(index_key_ptr + source * INDEX_DIM + dim, mask=live & in_step, other=0.0)
        old = tl.load(ring_ptr + held * INDEX_DIM + dim, mask=live & ~in_step, other=0.0)
        total += tl.where(in_step, new, old).to(tl.float32)
    return (total * (1.0 / COMPRESS_RATIO)).to(index_key_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def compress(
    index_key_ptr,
    ring_ptr,
    compressed_cache_ptr,
    request_ids_ptr,
    positions_ptr,
    slots_ptr,
    seq_lens_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    ring_ids_ptr,
    rotary_positions_ptr,
    new_ring_ptr,
    new_compressed_cache_ptr,
    INDEX_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    COMPRESS_RATIO: tl.constexpr,
    RING_ROWS: tl.constexpr,
    BLOCK_RING: tl.constexpr,
    NUM_RINGS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    MAX_POSITIONS: tl.constexpr,
    EPS: tl.constexpr,
    RING_IDS: tl.constexpr,
    ROTARY_POSITIONS: tl.constexpr,
):
    """One row of the step. Grid: (rows,).

    Of the rows of a request only the first that completes a group reads the ring: the groups of
    later ones lie within the step. The same program writes the ring, after it has read it; without
    such a row, the request's last row writes it. So no write can reach a key that is still needed.
    Rows of a ring that does not exist write nothing.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    key_dtype: tl.constexpr = index_key_ptr.dtype.element_ty
    cache_dtype: tl.constexpr = new_compressed_cache_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ids_ptr + row).to(tl.int64)
    if request < 0:
        return
    position = tl.load(positions_ptr + row).to(tl.int64)
    unfinished = (position + 1) % COMPRESS_RATIO
    completes = unfinished == 0
    # Row that ended the group before, if it is of this step.
    former_end = row - tl.where(completes, COMPRESS_RATIO, unfinished)
    first_end = ~same_request(request_ids_ptr, former_end, request)
    last = ~same_request(request_ids_ptr, row + 1, request)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    ring = request
    has_ring = request >= 0
    if RING_IDS:
        ring = tl.load(ring_ids_ptr + request).to(tl.int64)
        has_ring = (ring >= 0) & (ring < NUM_RINGS)
    writes_ring = has_ring & first_end & (completes | last)
    dim = tl.arange(0, BLOCK_DIM)
    live = dim < INDEX_DIM
    if has_ring & (slot >= 0) & (slot < NUM_GROUPS):
        rotates = dim < ROTARY_DIM
        partner = tl.where(rotates, tl.where(dim < HALF, dim + HALF, dim - HALF), dim)
        # The partner's dims are pooled once more rather than exchanged between threads.
        x = pool(
            index_key_ptr, ring_ptr, request_ids_ptr, row, request, ring, position, dim, live,
            INDEX_DIM, COMPRESS_RATIO, RING_ROWS,
        )  # fmt: skip
        y = pool(
            index_key_ptr, ring_ptr, request_ids_ptr, row, request, ring, position, partner,
            live & rotates, INDEX_DIM, COMPRESS_RATIO, RING_ROWS,
        )  # fmt: skip
        scale = tl.rsqrt(tl.sum(x * x, 0) / INDEX_DIM + EPS)
        x_weight = tl.load(weight_ptr + dim, mask=live, other=0.0).to(tl.float32)
        y_weight = tl.load(weight_ptr + partner, mask=live & rotates, other=0.0).to(tl.float32)
        x = (x * scale * (1.0 + x_weight)).to(key_dtype).to(tl.float32)
        y = (y * scale * (1.0 + y_weight)).to(key_dtype).to(tl.float32)
        place = position - (COMPRESS_RATIO - 1)
        if ROTARY_POSITIONS:
            place = tl.load(rotary_positions_ptr + row).to(tl.int64)
        reads = rotates & (place >= 0) & (place < MAX_POSITIONS)
        angle = place * HALF + tl.where(dim < HALF, dim, dim - HALF)
        cos = tl.load(cos_ptr + angle, mask=reads, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=reads, other=0.0).to(tl.float32)
        key = x * cos + tl.where(dim < HALF, -y, y) * sin
        if cache_dtype == tl.float8e4nv:
            key = tl.minimum(tl.maximum(key, -448.0), 448.0)
        tl.store(new_compressed_cache_ptr + slot * INDEX_DIM + dim, key.to(cache_dtype), mask=live)
    if writes_ring:
        tl.debug_barrier()  # other threads of this program have read the ring
        length = tl.load(seq_lens_ptr + request).to(tl.int64)
        place = tl.arange(0, BLOCK_RING)
        # The last position before `length` that this row of the ring holds.
        held = length - 1 - (length - 1 - place + RING_ROWS) % RING_ROWS
        source = row + held - position
        kept = (place < RING_ROWS) & (held >= 0) & same_request(request_ids_ptr, source, request)
        mask = kept[:, None] & live[None, :]
        raw = tl.load(index_key_ptr + source[:, None] * INDEX_DIM + dim[None, :], mask=mask)
        target = (ring * RING_ROWS + place)[:, None] * INDEX_DIM + dim[None, :]
        tl.store(new_ring_ptr + target, raw, mask=mask)
