"""Sparse attention of single rows over their token lists, split over programs, and its parts that
attend_prefill shares.

A row's state is (acc, top, total): the sum of exp(score - top) * value, the largest score, and the
sum of exp(score - top). top is -inf and total 0 as long as there is no score."""

import triton
import triton.language as tl

from .primitives import launch_next, wait_for_last, widen


@triton.jit
def slot_of(
    page_table_ptr,
    request,
    token,
    PAGE_SIZE: tl.constexpr,
    PAGES_PER_SEQ: tl.constexpr,
    NUM_PAGES: tl.constexpr,
):
    """Place of request-relative tokens in the cache of fewer than 2**31 tokens; -1: out of range or
    not mapped."""
    # A negative token becomes a page past the end; shifts replace signed division.
    page_index = token.to(tl.uint32) // PAGE_SIZE
    inside = page_index < PAGES_PER_SEQ
    row_ptr = page_table_ptr + request.to(tl.int64) * PAGES_PER_SEQ
    page = tl.load(row_ptr + page_index, mask=inside, other=-1)
    mapped = page.to(tl.uint32) < NUM_PAGES
    within = (token.to(tl.uint32) % PAGE_SIZE).to(tl.int32)
    return tl.where(mapped, page * PAGE_SIZE + within, -1)


@triton.jit
def exp(x):
    """exp of differences of scores. tl.exp would keep results below 2**-126, for two more
    instructions; log2 e in `scale` would save one, and round away the differences of large scores.
    """
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def softmax_update(q, k, v, allowed, acc, top, total, scale):
    """One tile of online softmax; `allowed` [BLOCK_M, BLOCK_N] or [1, BLOCK_N]. `total` [BLOCK_M],
    or [BLOCK_M, BLOCK_N] not yet summed."""
    k = widen(k, q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores = tl.where(allowed, scores * scale, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = exp(scores - anchor[:, None])
    decay = exp(top - anchor)
    if len(total.shape) == 2:
        total = total * decay[:, None] + weights
    else:
        total = total * decay + tl.sum(weights, 1)
    v = widen(v, q.dtype)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_top, total


@triton.jit
def load_gate(gate_ptr, offsets, mask, GATE: tl.constexpr):
    gate = 0.0
    if GATE:
        gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    return gate


@triton.jit
def store_out(out_ptr, offsets, mask, value, total, gate, GATE: tl.constexpr):
    """Rounds to the output dtype, then gates in fp32 and rounds again. Where total is 0 the value
    is, and stays 0 whatever the gate holds."""
    value = value.to(out_ptr.dtype.element_ty)
    if GATE:
        gate = tl.where(total != 0.0, gate, 0.0)
        value = (value.to(tl.float32) / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, value, mask=mask)


@triton.jit
def store_lse(lse_ptr, offsets, mask, top, total):
    lse = tl.where(total == 0.0, float("-inf"), top + tl.log(total))
    tl.store(lse_ptr + offsets, lse, mask=mask)


@triton.jit
def find_places(
    page_table_ptr,
    token_indices_ptr,
    counts_ptr,
    request_ids_ptr,
    row,
    columns,
    NUM_SELECTED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGES_PER_SEQ: tl.constexpr,
    NUM_PAGES: tl.constexpr,
):
    """(places in the cache of these columns of a row's list, -1 where nothing is to be read; length
    of the list). List, count and request are one round trip to memory, the page table the second.
    """
    tokens_ptr = token_indices_ptr + row.to(tl.int64) * NUM_SELECTED
    tokens = tl.load(tokens_ptr + columns, mask=columns < NUM_SELECTED, other=-1)
    request = tl.load(request_ids_ptr + row)
    count = tl.load(counts_ptr + row)
    # ptxas would load a query late, and keys and values wait for it: another round trip.
    tl.debug_barrier()
    count = tl.where(request >= 0, tl.minimum(count, NUM_SELECTED), 0)
    request = tl.maximum(request, 0)
    places = slot_of(page_table_ptr, request, tokens, PAGE_SIZE, PAGES_PER_SEQ, NUM_PAGES)
    return tl.where(columns < count, places, -1), count


@triton.jit
def attend_split(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    page_table_ptr,
    token_indices_ptr,
    counts_ptr,
    request_ids_ptr,
    places_ptr,
    row,
    kv_head,
    first,
    scale,
    NUM_QO_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGES_PER_SEQ: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
):
    """(acc [BLOCK_M, HEAD_DIM], top, total [BLOCK_M]) of the query heads of one row and KV head,
    over TILES tiles of its list from column `first` on.

    The places of all tiles are found first and kept in `places` [TILES * BLOCK_N]: found in the
    loop, they would take half of its instructions. Programs of other KV heads may write the same
    places to the same memory. In the loop those of the next tile are read ahead; Triton does not
    pipeline a loop that reads further. A single tile needs no `places`, but is a loop too: Triton
    would load its values after its keys have come."""
    GROUP: tl.constexpr = NUM_QO_HEADS // NUM_KV_HEADS
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, HEAD_DIM)
    key_cache_ptr += kv_head * HEAD_DIM
    value_cache_ptr += kv_head * HEAD_DIM
    q_rows = row.to(tl.int64) * NUM_QO_HEADS + kv_head * GROUP + m
    q = tl.load(
        query_ptr + q_rows[:, None] * HEAD_DIM + d[None, :], mask=(m < GROUP)[:, None], other=0.0
    )
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Summed over its columns at the end: in the loop, warps would wait for each other.
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if TILES == 1:
        slot, count = find_places(
            page_table_ptr, token_indices_ptr, counts_ptr, request_ids_ptr, row, first + n,
            NUM_SELECTED, PAGE_SIZE, PAGES_PER_SEQ, NUM_PAGES,
        )  # fmt: skip
    else:
        i = tl.arange(0, BLOCK_PLACES)
        count = 0
        for begin in tl.range(0, TILES * BLOCK_N, BLOCK_PLACES, num_stages=1):
            places, count = find_places(
                page_table_ptr, token_indices_ptr, counts_ptr, request_ids_ptr, row,
                first + begin + i, NUM_SELECTED, PAGE_SIZE, PAGES_PER_SEQ, NUM_PAGES,
            )  # fmt: skip
            tl.store(places_ptr + begin + i, places, mask=begin + i < TILES * BLOCK_N)
        # Other threads of the program wrote what it now reads.
        tl.debug_barrier()
        slot = tl.load(places_ptr + n)
    for start in tl.range(first, tl.minimum(count, first + TILES * BLOCK_N), BLOCK_N):
        live = slot >= 0
        if TILES == 1:  # or Triton moves the loads out of the loop
            live &= start + n < count
        offsets = (slot.to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM))[:, None] + d[None, :]
        k = tl.load(key_cache_ptr + offsets, mask=live[:, None], other=0.0)
        v = tl.load(value_cache_ptr + offsets, mask=live[:, None], other=0.0)
        if TILES > 1:
            after = tl.minimum(start - first + BLOCK_N, (TILES - 1) * BLOCK_N)
            slot = tl.load(places_ptr + after + n)
        acc, top, total = softmax_update(q, k, v, live[None, :], acc, top, total, scale)
    return acc, top, tl.sum(total, 1)


@triton.jit
def attend_row(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    page_table_ptr,
    token_indices_ptr,
    counts_ptr,
    request_ids_ptr,
    gate_ptr,
    sm_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    places_ptr,
    out_ptr,
    lse_ptr,
    row,
    kv_head,
    NUM_QO_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGES_PER_SEQ: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    GATE: tl.constexpr,
):
    """The whole list of one row, TILES tiles, for the heads of one KV head, to the outputs."""
    GROUP: tl.constexpr = NUM_QO_HEADS // NUM_KV_HEADS
    scale = tl.load(sm_scale_ptr) * tl.load(k_scale_ptr)
    acc, top, total = attend_split(
        query_ptr, key_cache_ptr, value_cache_ptr, page_table_ptr, token_indices_ptr, counts_ptr,
        request_ids_ptr, places_ptr, row, kv_head, 0, scale, NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM,
        NUM_SELECTED, PAGE_SIZE, PAGES_PER_SEQ, NUM_PAGES, TILES, BLOCK_M, BLOCK_N, BLOCK_PLACES,
    )  # fmt: skip
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_DIM)
    value = acc * (tl.load(v_scale_ptr) / tl.where(total == 0.0, 1.0, total))[:, None]
    rows = row.to(tl.int64) * NUM_QO_HEADS + kv_head * GROUP + m
    mask = m < GROUP
    offsets = rows[:, None] * HEAD_DIM + d[None, :]
    gate = load_gate(gate_ptr, offsets, mask[:, None], GATE)
    store_out(out_ptr, offsets, mask[:, None], value, total[:, None], gate, GATE)
    store_lse(lse_ptr, rows, mask, top, total)


@triton.jit
def decode(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    page_table_ptr,
    token_indices_ptr,
    counts_ptr,
    request_ids_ptr,
    gate_ptr,
    sm_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    places_ptr,
    out_ptr,
    lse_ptr,
    NUM_QO_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGES_PER_SEQ: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    GATE: tl.constexpr,
):
    """Grid (rows * NUM_KV_HEADS): one program walks a whole list."""
    row = tl.program_id(0) // NUM_KV_HEADS
    places_ptr += row.to(tl.int64) * (TILES * BLOCK_N)
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    attend_row(
        query_ptr, key_cache_ptr, value_cache_ptr, page_table_ptr, token_indices_ptr, counts_ptr,
        request_ids_ptr, gate_ptr, sm_scale_ptr, k_scale_ptr, v_scale_ptr, places_ptr, out_ptr,
        lse_ptr, row, kv_head, NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_SELECTED, PAGE_SIZE,
        PAGES_PER_SEQ, NUM_PAGES, TILES, BLOCK_M, BLOCK_N, BLOCK_PLACES, GATE,
    )  # fmt: skip


@triton.jit
def decode_split(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    page_table_ptr,
    token_indices_ptr,
    counts_ptr,
    request_ids_ptr,
    sm_scale_ptr,
    k_scale_ptr,
    places_ptr,
    partial_ptr,
    state_ptr,
    NUM_QO_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGES_PER_SEQ: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (rows * NUM_KV_HEADS, SPLITS): TILES tiles of a list each. The KV heads of a row, whose
    keys lie side by side, start together, and the last splits, which have little to read, last.
    partial [rows, NUM_QO_HEADS, SPLITS, HEAD_DIM]: sums not yet divided; state [rows, NUM_QO_HEADS,
    SPLITS, 2]: top and total."""
    GROUP: tl.constexpr = NUM_QO_HEADS // NUM_KV_HEADS
    row = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(1)
    places_ptr += (row.to(tl.int64) * SPLITS + split) * (TILES * BLOCK_N)
    scale = tl.load(sm_scale_ptr) * tl.load(k_scale_ptr)
    acc, top, total = attend_split(
        query_ptr, key_cache_ptr, value_cache_ptr, page_table_ptr, token_indices_ptr, counts_ptr,
        request_ids_ptr, places_ptr, row, kv_head, split * (TILES * BLOCK_N), scale, NUM_QO_HEADS,
        NUM_KV_HEADS, HEAD_DIM, NUM_SELECTED, PAGE_SIZE, PAGES_PER_SEQ, NUM_PAGES, TILES, BLOCK_M,
        BLOCK_N, BLOCK_PLACES,
    )  # fmt: skip
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_DIM)
    states = (row.to(tl.int64) * NUM_QO_HEADS + kv_head * GROUP + m) * SPLITS + split
    mask = m < GROUP
    launch_next(OVERLAPS)
    tl.store(partial_ptr + states[:, None] * HEAD_DIM + d[None, :], acc, mask=mask[:, None])
    tl.store(state_ptr + states * 2, top, mask=mask)
    tl.store(state_ptr + states * 2 + 1, total, mask=mask)


@triton.jit
def merge(
    partial_ptr,
    state_ptr,
    gate_ptr,
    v_scale_ptr,
    out_ptr,
    lse_ptr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    GATE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (rows * NUM_QO_HEADS, HEAD_DIM // BLOCK_DIM): joins the splits of one row and head."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_SPLITS)
    d = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    # What no launch of this call writes is read before the last one has ended.
    gate = load_gate(gate_ptr, row * HEAD_DIM + d, d < HEAD_DIM, GATE)
    v_scale = tl.load(v_scale_ptr)
    wait_for_last(OVERLAPS)
    places = row * SPLITS + s
    top = tl.load(state_ptr + places * 2, mask=s < SPLITS, other=float("-inf"))
    total = tl.load(state_ptr + places * 2 + 1, mask=s < SPLITS, other=0.0)
    # Not masked by total: that would be another round trip.
    offsets = places[:, None] * HEAD_DIM + d[None, :]
    partial = tl.load(partial_ptr + offsets, mask=(s < SPLITS)[:, None], other=0.0)
    new_top = tl.max(top, 0)
    weights = exp(top - tl.where(new_top == float("-inf"), 0.0, new_top))
    new_total = tl.sum(weights * total, 0)
    partial = tl.where((total != 0.0)[:, None], partial * weights[:, None], 0.0)
    value = tl.sum(partial, 0) * (v_scale / tl.where(new_total == 0.0, 1.0, new_total))
    totals = tl.zeros([BLOCK_DIM], tl.float32) + new_total
    store_out(out_ptr, row * HEAD_DIM + d, d < HEAD_DIM, value, totals, gate, GATE)
    store_lse(lse_ptr, row, tl.program_id(1) == 0, new_top, new_total)
