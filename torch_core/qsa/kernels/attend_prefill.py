"""Sparse attention of tiles of neighbouring rows: the union of their groups is read once.

Lists may hold anything. Those of the form that select and expand give (groups in ascending order,
then the tail) are joined; a tile with any other list, or whose rows have little in common, is
walked row by row."""

import triton
import triton.language as tl

from .attend import attend_row, load_gate, slot_of, softmax_update, store_lse, store_out
from .primitives import launch_next, wait_for_last


@triton.jit
def find_in_row(firsts_ptr, wanted, LENGTH: tl.constexpr, TOPK_BITS: tl.constexpr):
    """Whether each of `wanted` (first tokens of groups) is among LENGTH ascending ones, of which
    the last is larger than any, and how many of these are smaller."""
    HALF: tl.constexpr = 1 << (TOPK_BITS - 1)
    below = tl.where(tl.load(firsts_ptr + (LENGTH - HALF - 1)) < wanted, LENGTH - HALF, 0)
    for bit in tl.static_range(1, TOPK_BITS):
        probe = below + (HALF >> bit)
        below = tl.where(tl.load(firsts_ptr + probe - 1) < wanted, probe, below)
    return tl.load(firsts_ptr + below) == wanted, below


@triton.jit
def find_tails(
    page_table_ptr,
    tokens_ptr,
    requests,
    counts,
    NUM_SELECTED: tl.constexpr,
    COMPRESS_RATIO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGES_PER_SEQ: tl.constexpr,
    NUM_PAGES: tl.constexpr,
):
    """(length, cache slot of the first token or -1) of what comes after the groups of each row,
    and whether some row's is of another form than the first tokens of a group."""
    r = tl.arange(0, counts.numel)
    j = tl.arange(0, COMPRESS_RATIO)
    groups = counts // COMPRESS_RATIO
    tails = counts - groups * COMPRESS_RATIO
    present = j[None, :] < tails[:, None]
    tails_ptr = tokens_ptr + r * NUM_SELECTED + groups * COMPRESS_RATIO
    # Of consecutive tokens, each gives the first one.
    starts = tl.load(tails_ptr[:, None] + j[None, :], mask=present, other=0) - j[None, :]
    first = tl.max(tl.where(present, starts, 0), 1)
    fault = present & ((starts != first[:, None]) | (first % COMPRESS_RATIO != 0)[:, None])
    slots = slot_of(
        page_table_ptr, tl.maximum(requests, 0), first, PAGE_SIZE, PAGES_PER_SEQ, NUM_PAGES
    )
    return tails, tl.where(tails > 0, slots, -1), tl.max(tl.max(fault.to(tl.int32), 1), 0)


@triton.jit
def keep_firsts(
    tokens_ptr, groups, marks_ptr, firsts_ptr, LENGTH: tl.constexpr, RATIO: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """Clears the marks of a row's groups and keeps their first tokens, LENGTH of them with those
    past the end larger than any. Whether groups are not consecutive tokens, or do not ascend."""
    LAST: tl.constexpr = 2147483647
    i = tl.arange(0, BLOCK_GROUPS)
    fault = i < 0
    for begin in range(0, LENGTH - 1, BLOCK_GROUPS):
        group = begin + i
        present = group < groups
        first = tl.load(tokens_ptr + group * RATIO, mask=present, other=LAST)
        before = tl.load(tokens_ptr + (group - 1) * RATIO, mask=present & (group > 0), other=-1)
        fault = fault | (present & ((first <= before) | (first % RATIO != 0)))
        for k in tl.static_range(1, RATIO):
            token = tl.load(tokens_ptr + group * RATIO + k, mask=present, other=0)
            fault = fault | (present & (token != first + k))
        tl.store(marks_ptr + group, tl.zeros_like(i), mask=group < LENGTH - 1)
        tl.store(firsts_ptr + group, first, mask=group < LENGTH - 1)
    tl.store(firsts_ptr + LENGTH - 1, LAST)
    return fault


@triton.jit
def join_rows(
    page_table_ptr,
    token_indices_ptr,
    counts_ptr,
    request_ids_ptr,
    slots_ptr,
    words_ptr,
    header_ptr,
    NUM_SELECTED: tl.constexpr,
    COMPRESS_RATIO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGES_PER_SEQ: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TOPK_BITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
    MAX_UNION: tl.constexpr,
):
    """Grid (tiles, rows of the last tile): a grid may depend on the number of rows, a constexpr may
    not. One program joins the lists of TILE_ROWS rows.

    An entry is a group of one request that some of its rows in the tile select: the cache slot of
    its first token, and a word: bit a for row a of the tile, the tokens to read from bit 16 on. The
    rows of one request form a run, and each row adds the groups that no row of the run before it
    has, then its tail. header[tile]: entries up to the end of each row [TILE_ROWS], end of each
    row's run [TILE_ROWS], rows in the tile, whether to walk them one by one, number of tiles. They
    are walked one by one if a list is of another form, or if the groups of several rows are more
    than MAX_UNION percent of those listed. A single row, in the last tile, takes no longer than
    other tiles, and starts first.

    A row looks its new groups up in the rows after it only, and marks what it finds there. Until
    its turn, a row keeps the mark and the first token of its group i where entry
    a * (topk + 1) + i will be: the rows before it put no entry there, and the row itself only once
    it has read both."""
    LENGTH: tl.constexpr = CAPACITY // TILE_ROWS
    tile = tl.program_id(0)
    if tl.program_id(1) == 0:
        rows = tl.where(tile == tl.num_programs(0) - 1, tl.num_programs(1), TILE_ROWS)
        i = tl.arange(0, BLOCK_GROUPS)
        e = tl.arange(0, BLOCK_ENTRIES)
        r = tl.arange(0, BLOCK_ROWS)
        header_ptr += tile.to(tl.int64) * (2 * TILE_ROWS + 3)
        slots_ptr += tile.to(tl.int64) * CAPACITY
        words_ptr += tile.to(tl.int64) * CAPACITY
        first_row = tile.to(tl.int64) * TILE_ROWS
        requests = tl.load(request_ids_ptr + first_row + r, mask=r < rows, other=-1)
        counts = tl.load(counts_ptr + first_row + r, mask=r < rows, other=0)
        counts = tl.where(requests >= 0, tl.minimum(tl.maximum(counts, 0), NUM_SELECTED), 0)
        groups_of = counts // COMPRESS_RATIO
        tokens_ptr = token_indices_ptr + first_row * NUM_SELECTED
        tails, tail_slots, apart = find_tails(
            page_table_ptr, tokens_ptr, requests, counts, NUM_SELECTED, COMPRESS_RATIO, PAGE_SIZE,
            PAGES_PER_SEQ, NUM_PAGES,
        )  # fmt: skip
        has_tail = tail_slots >= 0
        fault = i < 0
        for a in range(0, rows):
            groups = tl.sum(tl.where(r == a, groups_of, 0), 0)
            fault = fault | keep_firsts(
                tokens_ptr + a * NUM_SELECTED, groups, slots_ptr + a * LENGTH,
                words_ptr + a * LENGTH, LENGTH, COMPRESS_RATIO, BLOCK_GROUPS,
            )  # fmt: skip
        apart = tl.maximum(apart, tl.max(fault.to(tl.int32), 0))
        used = 0
        joined = 0
        ends = tl.zeros_like(r)
        run_ends = tl.zeros_like(r)
        for a in range(0, rows):
            groups = tl.sum(tl.where(r == a, groups_of, 0), 0)
            request = tl.sum(tl.where(r == a, requests, 0), 0)
            run_end = tl.min(tl.where((r > a) & (requests != request), r, rows), 0)
            first_entry = used
            tl.debug_barrier()  # what follows reads other threads' stores
            for begin in range(0, groups, BLOCK_GROUPS):
                at = a * LENGTH + begin + i
                present = begin + i < groups
                mark = tl.load(slots_ptr + at, mask=present, other=1)
                first = tl.load(words_ptr + at, mask=present, other=0)
                slot = slot_of(
                    page_table_ptr, tl.maximum(request, 0), first, PAGE_SIZE, PAGES_PER_SEQ,
                    NUM_PAGES,
                )  # fmt: skip
                fresh = present & (slot >= 0) & (mark == 0)
                place = used + tl.cumsum(fresh.to(tl.int32), 0) - 1
                # All warps have read before one stores: few groups are held by several of them.
                tl.debug_barrier()
                tl.store(slots_ptr + place, slot, mask=fresh)
                tl.store(words_ptr + place, first, mask=fresh)
                used += tl.sum(fresh.to(tl.int32), 0)
            joined += used - first_entry
            tl.debug_barrier()
            for begin in range(first_entry, used, BLOCK_ENTRIES):
                entry = begin + e
                first = tl.load(words_ptr + entry, mask=entry < used, other=-1)
                word = tl.zeros_like(first) + ((1 << a) | (COMPRESS_RATIO << 16))
                for b in range(a + 1, run_end):
                    found, rank = find_in_row(words_ptr + b * LENGTH, first, LENGTH, TOPK_BITS)
                    word = word | (found.to(tl.int32) << b)
                    tl.store(slots_ptr + b * LENGTH + rank, word, mask=found)
                tl.store(words_ptr + entry, word, mask=entry < used)
            used += tl.sum(tl.where(r == a, has_tail.to(tl.int32), 0), 0)
            ends = tl.where(r == a, used, ends)
            run_ends = tl.where(r == a, run_end, run_ends)
        tl.store(slots_ptr + ends - 1, tail_slots, mask=has_tail)
        tl.store(words_ptr + ends - 1, (1 << r) | (tails << 16), mask=has_tail)
        tl.store(header_ptr + r, ends, mask=r < rows)
        tl.store(header_ptr + TILE_ROWS + r, run_ends, mask=r < rows)
        apart_pays = (rows > 1) & (joined * 100 > tl.sum(groups_of, 0) * MAX_UNION)
        apart = tl.where(apart_pays, 1, apart)
        tl.store(header_ptr + 2 * TILE_ROWS, rows)
        tl.store(header_ptr + 2 * TILE_ROWS + 1, apart)
        tl.store(header_ptr + 2 * TILE_ROWS + 2, tl.num_programs(0))


@triton.jit
def attend_tiles(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    gate_ptr,
    sm_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slots_ptr,
    words_ptr,
    header_ptr,
    out_ptr,
    lse_ptr,
    NUM_QO_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COMPRESS_RATIO: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (tiles * NUM_KV_HEADS). Query vector m is head m % GROUP of row m // GROUP of the tile.
    Tiles to walk row by row are left to attend_rows: their entries may lie outside the cache.

    Runs of rows of different requests are computed one after another, so that a NaN in the values
    of one does not reach the rows of another. Within a run it may: rows share the values they read.
    """
    GROUP: tl.constexpr = NUM_QO_HEADS // NUM_KV_HEADS
    HEADER: tl.constexpr = 2 * TILE_ROWS + 3
    launch_next(OVERLAPS)
    # Late rows have the longest lists, and start first.
    tile = tl.num_programs(0) // NUM_KV_HEADS - 1 - tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    header_ptr += tile.to(tl.int64) * HEADER
    slots_ptr += tile.to(tl.int64) * CAPACITY
    words_ptr += tile.to(tl.int64) * CAPACITY
    key_cache_ptr += kv_head * HEAD_DIM
    value_cache_ptr += kv_head * HEAD_DIM
    first_row = tile.to(tl.int64) * TILE_ROWS
    apart = tl.load(header_ptr + 2 * TILE_ROWS + 1)
    rows = tl.where(apart != 0, 0, tl.load(header_ptr + 2 * TILE_ROWS))
    scale = tl.load(sm_scale_ptr) * tl.load(k_scale_ptr)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, HEAD_DIM)
    m_row = m // GROUP
    bit = 1 << tl.minimum(m_row, 15)
    q_rows = (first_row + m_row) * NUM_QO_HEADS + kv_head * GROUP + m % GROUP
    offsets = q_rows[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(query_ptr + offsets, mask=(m_row < rows)[:, None], other=0.0)
    run_begin = 0
    begin = 0
    while run_begin < rows:
        run_end = tl.load(header_ptr + TILE_ROWS + run_begin)
        end = tl.load(header_ptr + run_end - 1)
        acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        # Past the end, and past a tail's length, a token already read is read again: loads without
        # a mask take fewer instructions, and bring nothing that may be poison.
        entry = tl.maximum(tl.minimum(begin + n // COMPRESS_RATIO, end - 1), 0)
        slot = tl.load(slots_ptr + entry)
        word = tl.load(words_ptr + entry)
        for start in tl.range(begin, end, BLOCK_N // COMPRESS_RATIO):
            length = word >> 16
            place = (slot + tl.minimum(n % COMPRESS_RATIO, length - 1)).to(tl.int64)
            kv_offsets = (place * (NUM_KV_HEADS * HEAD_DIM))[:, None] + d[None, :]
            k = tl.load(key_cache_ptr + kv_offsets)
            v = tl.load(value_cache_ptr + kv_offsets)
            live = (start + n // COMPRESS_RATIO < end) & (n % COMPRESS_RATIO < length)
            allowed = (tl.where(live, word, 0)[None, :] & bit[:, None]) != 0
            # Entries are read a tile ahead: keys and values need not wait for them.
            entry = tl.minimum(start + (BLOCK_N + n) // COMPRESS_RATIO, end - 1)
            slot = tl.load(slots_ptr + entry)
            word = tl.load(words_ptr + entry)
            acc, top, total = softmax_update(q, k, v, allowed, acc, top, total, scale)
        mine = (m_row >= run_begin) & (m_row < run_end)
        value = acc * (tl.load(v_scale_ptr) / tl.where(total == 0.0, 1.0, total))[:, None]
        gate = load_gate(gate_ptr, offsets, mine[:, None], GATE)
        store_out(out_ptr, offsets, mine[:, None], value, total[:, None], gate, GATE)
        store_lse(lse_ptr, q_rows, mine, top, total)
        run_begin = run_end
        begin = end


@triton.jit
def attend_rows(
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
    header_ptr,
    tiled_out_ptr,
    tiled_lse_ptr,
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
    TILE_ROWS: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (programs): the rows of the tiles that attend_tiles left out, in place. Programs take
    rows and KV heads in turn, and learn in one round trip which of the next BLOCK_ITEMS are to be
    walked: mostly none are.

    It needs nothing of attend_tiles, and fills the room that this leaves once its last programs
    have started. What comes after them both waits for this launch, which waits for the other."""
    HEADER: tl.constexpr = 2 * TILE_ROWS + 3
    places_ptr += tl.program_id(0) * (TILES * BLOCK_N)
    i = tl.arange(0, BLOCK_ITEMS)
    step = tl.num_programs(0)
    items = tl.load(header_ptr + 2 * TILE_ROWS + 2) * (TILE_ROWS * NUM_KV_HEADS)
    for begin in tl.range(tl.program_id(0), items, BLOCK_ITEMS * step, num_stages=1):
        item = begin + i * step
        headers_ptr = header_ptr + (item // (TILE_ROWS * NUM_KV_HEADS)).to(tl.int64) * HEADER
        apart = tl.load(headers_ptr + 2 * TILE_ROWS + 1, mask=item < items, other=0)
        if tl.max(apart, 0) != 0:
            for j in tl.range(0, BLOCK_ITEMS, num_stages=1):
                one = begin + j * step
                tile = one // (TILE_ROWS * NUM_KV_HEADS)
                a = one // NUM_KV_HEADS % TILE_ROWS
                one_ptr = header_ptr + tile.to(tl.int64) * HEADER
                rows = tl.load(one_ptr + 2 * TILE_ROWS, mask=one < items, other=0)
                one_apart = tl.load(one_ptr + 2 * TILE_ROWS + 1, mask=one < items, other=0)
                if (one_apart != 0) & (a < rows):
                    attend_row(
                        query_ptr, key_cache_ptr, value_cache_ptr, page_table_ptr,
                        token_indices_ptr, counts_ptr, request_ids_ptr, gate_ptr, sm_scale_ptr,
                        k_scale_ptr, v_scale_ptr, places_ptr, out_ptr, lse_ptr,
                        tile * TILE_ROWS + a, one % NUM_KV_HEADS, NUM_QO_HEADS, NUM_KV_HEADS,
                        HEAD_DIM, NUM_SELECTED, PAGE_SIZE, PAGES_PER_SEQ, NUM_PAGES, TILES,
                        BLOCK_M, BLOCK_N, BLOCK_PLACES, GATE,
                    )  # fmt: skip
    wait_for_last(OVERLAPS)
