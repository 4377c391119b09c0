"""Exact top-k of each row, deterministic: of equal scores the lowest group, in rising order.

Three searches on ever less data instead of one on the row. The groups of the TOPK highest scores
lie in the TOPK chunks of highest maximum (of equal maxima the lowest chunk), so a search over the
maxima keeps at most CAPACITY chunks, on any data. Where TOPK chunks have a score, its bound is also
one for scores: of those in these chunks that reach it at most FEW are kept, if need be by a second
search, and a last search over them is exact. All searches count keys in registers, and integers sum
to the same in any order; no sort.
"""

import triton
import triton.language as tl

from .primitives import (
    HIGHEST_KEY,
    LEAST_KEY,
    MANY,
    as_score,
    exponent,
    find_bound,
    key_range,
    place_kept,
    sortable,
    store_candidates,
    store_tokens,
    wait_for_last,
)


@triton.jit
def load_first(pointer, count, other, SIZE: tl.constexpr):
    """The first `count` of SIZE elements, else `other`. Reads fours, whole: a mask that may end
    within one would split them into loads of one element."""
    index = tl.arange(0, SIZE)
    values = tl.load(pointer + index, mask=index // 4 * 4 < count, other=other)
    return tl.where(index < count, values, other)


@triton.jit
def keep_mapped(
    page_table_row_ptr,
    visible,
    selected_row_ptr,
    GROUPS_PER_PAGE: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
):
    """Writes all visible groups of one row; returns their number. They are no more than TOPK."""
    groups = tl.arange(0, BLOCK_TOPK)
    pages = tl.load(page_table_row_ptr + groups // GROUPS_PER_PAGE, mask=groups < visible, other=-1)
    mapped = (pages >= 0) & (pages < NUM_PAGES)
    counts = tl.cumsum(mapped.to(tl.int32), 0)
    tl.store(selected_row_ptr + counts - 1, groups, mask=mapped)
    return tl.max(counts, 0)


@triton.jit
def keep_highest(
    scores_row_ptr,
    maxima,
    visible,
    selected_row_ptr,
    scratch_row_ptr,
    TOPK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    FEW: tl.constexpr,
):
    """Writes the selected groups of one row; returns their number."""
    num_chunks = tl.cdiv(visible, CHUNK)
    # Rows of four scores, of the chunks that may hold selected ones.
    rows = tl.arange(0, CAPACITY * CHUNK // 4)
    chunk_of_row = rows // (CHUNK // 4)
    chunks = chunk_of_row
    # No selected key is below `least`, and no key above `highest`.
    least = visible * 0 + LEAST_KEY
    highest = visible * 0 + HIGHEST_KEY
    if BLOCK_CHUNKS > CAPACITY:
        if num_chunks > CAPACITY:
            keys = tl.where(tl.arange(0, BLOCK_CHUNKS) < num_chunks, maxima, float("-inf"))
            keys = tl.reshape(sortable(keys), [BLOCK_CHUNKS // 4, 4])
            low, highest = key_range(keys)
            # Of the scores, some more than of their maxima reach the bound.
            MOST: tl.constexpr = max(CAPACITY - CAPACITY // 8, TOPK)
            least, ties, num_chunks = find_bound(keys, low, highest, MANY, TOPK, MOST)
            ids = tl.arange(0, BLOCK_CHUNKS // 4) * 4
            store_candidates(keys, ids, least, ties, scratch_row_ptr, False)
            # Of fewer chunks with a score, TOPK of their scores may be below the lowest maximum.
            least = tl.where(num_chunks < TOPK, LEAST_KEY, least)
            # Other threads of the program wrote the chunks that it now reads.
            tl.debug_barrier()
            chunks = tl.load(
                scratch_row_ptr + chunk_of_row, mask=chunk_of_row < num_chunks, other=0
            )
    first_groups = chunks * CHUNK + rows % (CHUNK // 4) * 4
    scores = tl.load(
        scores_row_ptr + first_groups[:, None] + tl.arange(0, 4)[None, :],
        mask=(chunk_of_row < num_chunks)[:, None],
        other=float("-inf"),
    )
    first_bits = visible * 0 + MANY
    if FEW < CAPACITY * CHUNK:
        ties = visible * 0 + MANY
        bound = as_score(least)
        count = tl.sum(tl.reshape((scores >= bound).to(tl.int32), [CAPACITY * CHUNK]), 0)
        if count > FEW:
            keys = sortable(scores)
            low, highest = key_range(keys)
            low = tl.maximum(low, least)
            least, ties, count = find_bound(keys, low, highest, MANY, TOPK, FEW)
            bound = as_score(least)
        pairs_ptr = (scratch_row_ptr + CAPACITY).to(tl.pointer_type(tl.int64), bitcast=True)
        store_candidates(scores, first_groups, bound, ties, pairs_ptr, True)
        tl.debug_barrier()
        i = tl.arange(0, FEW)
        # The upper half of this is -inf.
        pairs = tl.load(pairs_ptr + i, mask=i < count, other=-(2**55))
        keys = sortable((pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True))
        groups = pairs.to(tl.int32)
        if least == LEAST_KEY:  # no search has found their range
            least, highest = key_range(keys)
        # Scores thin out from `least` on: pieces in which the TOPK-th highest is likely, with few.
        span = (highest - least).to(tl.uint32, bitcast=True).to(tl.float32)
        first_bits = tl.maximum(exponent(span * ((count - TOPK).to(tl.float32) / (8 * count))), 0)
    else:
        keys = tl.reshape(sortable(scores), [CAPACITY * CHUNK])
        groups = tl.reshape(first_groups[:, None] + tl.arange(0, 4)[None, :], [CAPACITY * CHUNK])
        least, highest = key_range(keys)
    # A thread holds rows of two whole, as it loaded them.
    keys = tl.reshape(keys, [keys.numel // 2, 2])
    bound, ties, count = find_bound(keys, least, highest, first_bits, TOPK, TOPK)
    mask, place = place_kept(keys, bound, ties)
    even, odd = tl.split(tl.reshape(groups, [groups.numel // 2, 2]))
    tl.store(selected_row_ptr + place, even, mask=(mask & 1) != 0)
    tl.store(selected_row_ptr + place + (mask & 1), odd, mask=(mask & 2) != 0)
    return count


@triton.jit
def select_row(
    scores_row_ptr,
    maxima_row_ptr,
    page_table_row_ptr,
    visible,
    selected_row_ptr,
    scratch_row_ptr,
    GROUPS_PER_PAGE: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
    MAX_GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    FEW: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Writes the selected groups of one row, then -1; returns their number.

    EARLY: reads all maxima that the row may have, beside how many it has: for few rows, whose time
    is that of round trips to memory."""
    maxima = 0
    if BLOCK_CHUNKS > CAPACITY:
        scored = tl.where(visible > TOPK, tl.cdiv(visible, CHUNK), 0)
        maxima = load_first(
            maxima_row_ptr, WIDTH // CHUNK if EARLY else scored, float("-inf"), BLOCK_CHUNKS
        )
    count = visible * 0
    if visible <= TOPK:
        count = keep_mapped(
            page_table_row_ptr, visible, selected_row_ptr, GROUPS_PER_PAGE, NUM_PAGES, BLOCK_TOPK
        )
    else:
        if MAX_GROUPS > TOPK:
            count = keep_highest(
                scores_row_ptr, maxima, visible, selected_row_ptr, scratch_row_ptr, TOPK, CHUNK,
                BLOCK_CHUNKS, CAPACITY, FEW,
            )  # fmt: skip
    ranks = tl.arange(0, BLOCK_TOPK)
    none = tl.full([BLOCK_TOPK], -1, tl.int32)
    tl.store(selected_row_ptr + ranks, none, mask=(ranks >= count) & (ranks < TOPK))
    return count


@triton.jit
def start_row(
    request_ids_ptr,
    visible_ptr,
    row_start_ptr,
    row_end_ptr,
    MAX_GROUPS: tl.constexpr,
    HAS_START: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A program's row, in this chunk and in the outputs, its request and its visible groups.
    `row_end` is where the next chunk of rows starts."""
    row = tl.program_id(0).to(tl.int64)
    output_row = row
    if HAS_START:
        output_row += tl.load(row_start_ptr)
    request = tl.load(request_ids_ptr + output_row).to(tl.int64)
    visible = tl.load(visible_ptr + output_row)
    wait_for_last(OVERLAPS)
    if row == 0:
        tl.store(row_end_ptr, (output_row + tl.num_programs(0)).to(tl.int32))
    return row, output_row, request, tl.where(request >= 0, tl.minimum(visible, MAX_GROUPS), 0)


@triton.jit
def select_rows(
    scores_ptr,
    maxima_ptr,
    page_table_ptr,
    request_ids_ptr,
    visible_ptr,
    row_start_ptr,
    selected_in_ptr,
    selected_ptr,
    scratch_ptr,
    row_end_ptr,
    GROUPS_PER_PAGE: tl.constexpr,
    PAGES_PER_SEQ: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    FEW: tl.constexpr,
    EARLY: tl.constexpr,
    HAS_START: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program selects one row's groups."""
    MAX_GROUPS: tl.constexpr = PAGES_PER_SEQ * GROUPS_PER_PAGE
    row, output_row, request, visible = start_row(
        request_ids_ptr, visible_ptr, row_start_ptr, row_end_ptr, MAX_GROUPS, HAS_START, OVERLAPS
    )
    select_row(
        scores_ptr + row * WIDTH,
        maxima_ptr + row * (WIDTH // CHUNK),
        page_table_ptr + request * PAGES_PER_SEQ,
        visible,
        selected_ptr + output_row * TOPK,
        scratch_ptr + row * (CAPACITY + 2 * FEW),
        GROUPS_PER_PAGE,
        NUM_PAGES,
        TOPK,
        BLOCK_TOPK,
        MAX_GROUPS,
        WIDTH,
        CHUNK,
        BLOCK_CHUNKS,
        CAPACITY,
        FEW,
        EARLY,
    )


@triton.jit
def select_tokens(
    scores_ptr,
    maxima_ptr,
    page_table_ptr,
    request_ids_ptr,
    visible_ptr,
    positions_ptr,
    row_start_ptr,
    selected_in_ptr,
    token_indices_in_ptr,
    counts_in_ptr,
    selected_ptr,
    token_indices_ptr,
    counts_ptr,
    scratch_ptr,
    row_end_ptr,
    GROUPS_PER_PAGE: tl.constexpr,
    PAGES_PER_SEQ: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    FEW: tl.constexpr,
    EARLY: tl.constexpr,
    HAS_START: tl.constexpr,
    OVERLAPS: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """select_rows and expand_rows in one launch."""
    MAX_GROUPS: tl.constexpr = PAGES_PER_SEQ * GROUPS_PER_PAGE
    row, output_row, request, visible = start_row(
        request_ids_ptr, visible_ptr, row_start_ptr, row_end_ptr, MAX_GROUPS, HAS_START, OVERLAPS
    )
    position = tl.load(positions_ptr + output_row)
    selected_row_ptr = selected_ptr + output_row * TOPK
    count = select_row(
        scores_ptr + row * WIDTH,
        maxima_ptr + row * (WIDTH // CHUNK),
        page_table_ptr + request * PAGES_PER_SEQ,
        visible,
        selected_row_ptr,
        scratch_ptr + row * (CAPACITY + 2 * FEW),
        GROUPS_PER_PAGE,
        NUM_PAGES,
        TOPK,
        BLOCK_TOPK,
        MAX_GROUPS,
        WIDTH,
        CHUNK,
        BLOCK_CHUNKS,
        CAPACITY,
        FEW,
        EARLY,
    )
    # Other threads of the program wrote the groups that it now reads.
    tl.debug_barrier()
    ranks = tl.arange(0, BLOCK_TOPK)
    groups = tl.load(selected_row_ptr + ranks, mask=ranks < count, other=-1)
    NUM_SELECTED: tl.constexpr = TOPK * RATIO + RATIO - 1
    tokens_row_ptr = token_indices_ptr + output_row * NUM_SELECTED
    length = store_tokens(groups, count, position, tokens_row_ptr, TOPK, RATIO, BLOCK)
    tl.store(counts_ptr + output_row, length)
