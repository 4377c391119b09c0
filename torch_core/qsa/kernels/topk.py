"""Exact top-k of each row, deterministic: of equal scores the lowest group, in rising order.

Three searches on ever less data instead of one on the row. The groups of the TOPK highest scores
lie in the TOPK chunks of highest maximum (of equal maxima the lowest chunk), so a search over the
maxima keeps at most CAPACITY chunks, on any data. Its bound is also one for scores: of those in
these chunks that reach it at most FEW are kept, if need be by a second search, and a last search
over them is exact. All searches count keys in registers, and integers sum to the same in any
order; no sort.
"""

import triton
import triton.language as tl

from .primitives import (
    ALL_TIES,
    LOWEST,
    find_bound,
    key_range,
    place_kept,
    sortable,
    split_columns,
    store_candidates,
    unfinished_group,
)


@triton.jit
def load_first(pointer, count, other, SIZE: tl.constexpr):
    """The first `count` of SIZE elements, else `other`. Reads fours, whole: a mask that may end
    within one would split them into loads of one element."""
    index = tl.arange(0, SIZE)
    values = tl.load(pointer + index, mask=index // 4 * 4 < count, other=other)
    return tl.where(index < count, values, other)


@triton.jit
def store_groups(
    groups, place, kept, selected_row_ptr, tokens_row_ptr, RATIO: tl.constexpr, TOKENS: tl.constexpr
):
    """Stores groups at their places, and their tokens where TOKENS."""
    tl.store(selected_row_ptr + place, groups, mask=kept)
    if TOKENS:
        for i in tl.static_range(RATIO):
            tl.store(tokens_row_ptr + place * RATIO + i, groups * RATIO + i, mask=kept)


@triton.jit
def keep_mapped(
    page_table_row_ptr,
    visible,
    selected_row_ptr,
    tokens_row_ptr,
    GROUPS_PER_PAGE: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
    RATIO: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Writes all visible groups of one row; returns their number. They are no more than TOPK."""
    groups = tl.arange(0, BLOCK_TOPK)
    pages = tl.load(page_table_row_ptr + groups // GROUPS_PER_PAGE, mask=groups < visible, other=-1)
    mapped = (pages >= 0) & (pages < NUM_PAGES)
    counts = tl.cumsum(mapped.to(tl.int32), 0)
    store_groups(groups, counts - 1, mapped, selected_row_ptr, tokens_row_ptr, RATIO, TOKENS)
    return tl.max(counts, 0)


@triton.jit
def keep_highest(
    scores_row_ptr,
    maxima_row_ptr,
    visible,
    selected_row_ptr,
    tokens_row_ptr,
    scratch_row_ptr,
    TOPK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    FEW: tl.constexpr,
    RATIO: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Writes the selected groups of one row; returns their number."""
    ranks = tl.arange(0, CAPACITY)
    num_chunks = tl.cdiv(visible, CHUNK)
    chunk_ids = ranks
    # No selected key is below `least`, and none above `highest`, that of +inf.
    least = visible * 0 + LOWEST + 1
    highest = visible * 0 + 0x7F800000
    if BLOCK_CHUNKS > CAPACITY:
        if num_chunks > CAPACITY:
            chunks = tl.arange(0, BLOCK_CHUNKS)
            keys = sortable(load_first(maxima_row_ptr, num_chunks, float("-inf"), BLOCK_CHUNKS))
            low, highest = key_range(keys)
            least, ties, num_chunks = find_bound(keys, low, highest, TOPK, CAPACITY)
            store_candidates(keys, chunks, least, ties, scratch_row_ptr, scratch_row_ptr, False)
            # Other threads of the program wrote the chunks that it now reads.
            tl.debug_barrier()
            chunk_ids = load_first(scratch_row_ptr, num_chunks, 0, CAPACITY)
    groups = chunk_ids[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    # Chunks whole, as in load_first.
    mask = (ranks < num_chunks)[:, None]
    keys = sortable(tl.load(scores_row_ptr + groups, mask=mask, other=float("-inf")))
    keys = tl.where((groups < visible) & (keys >= least), keys, LOWEST)
    keys = tl.reshape(keys, [CAPACITY * CHUNK])
    groups = tl.reshape(groups, [CAPACITY * CHUNK])
    if FEW < CAPACITY * CHUNK:
        ties = least * 0 + ALL_TIES
        count = tl.sum((keys > LOWEST).to(tl.int32), 0)
        if count > FEW:
            least, highest = key_range(keys)
            least, ties, count = find_bound(keys, least, highest, TOPK, FEW)
        groups_ptr = scratch_row_ptr + CAPACITY
        keys_ptr = groups_ptr + FEW
        store_candidates(keys, groups, least, ties, groups_ptr, keys_ptr, True)
        tl.debug_barrier()
        keys = load_first(keys_ptr, count, LOWEST, FEW)
        groups = load_first(groups_ptr, count, 0, FEW)
    else:
        least, highest = key_range(keys)
    bound, ties, count = find_bound(keys, least, highest, TOPK, TOPK)
    ROWS: tl.constexpr = keys.numel // 4
    mask, place = place_kept(tl.reshape(keys, [ROWS, 4]), bound, ties)
    columns = split_columns(tl.reshape(groups, [ROWS, 4]))
    for column in tl.static_range(4):
        kept = (mask >> column) & 1
        store_groups(
            columns[column], place, kept != 0, selected_row_ptr, tokens_row_ptr, RATIO, TOKENS
        )
        place += kept
    return count


@triton.jit
def select_row(
    scores_row_ptr,
    maxima_row_ptr,
    page_table_row_ptr,
    visible,
    selected_row_ptr,
    tokens_row_ptr,
    scratch_row_ptr,
    GROUPS_PER_PAGE: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
    MAX_GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    FEW: tl.constexpr,
    RATIO: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Writes the selected groups of one row, then -1, and their tokens; returns their number."""
    count = visible * 0
    if visible <= TOPK:
        count = keep_mapped(
            page_table_row_ptr,
            visible,
            selected_row_ptr,
            tokens_row_ptr,
            GROUPS_PER_PAGE,
            NUM_PAGES,
            BLOCK_TOPK,
            RATIO,
            TOKENS,
        )
    else:
        if MAX_GROUPS > TOPK:
            count = keep_highest(
                scores_row_ptr,
                maxima_row_ptr,
                visible,
                selected_row_ptr,
                tokens_row_ptr,
                scratch_row_ptr,
                TOPK,
                CHUNK,
                BLOCK_CHUNKS,
                CAPACITY,
                FEW,
                RATIO,
                TOKENS,
            )
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
):
    """A program's row, in this chunk and in the outputs, its request and its visible groups.
    `row_end` is where the next chunk of rows starts."""
    row = tl.program_id(0).to(tl.int64)
    output_row = row
    if HAS_START:
        output_row += tl.load(row_start_ptr)
    if row == 0:
        tl.store(row_end_ptr, (output_row + tl.num_programs(0)).to(tl.int32))
    request = tl.load(request_ids_ptr + output_row).to(tl.int64)
    visible = tl.load(visible_ptr + output_row)
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
    HAS_START: tl.constexpr,
):
    """One program selects one row's groups."""
    MAX_GROUPS: tl.constexpr = PAGES_PER_SEQ * GROUPS_PER_PAGE
    row, output_row, request, visible = start_row(
        request_ids_ptr, visible_ptr, row_start_ptr, row_end_ptr, MAX_GROUPS, HAS_START
    )
    select_row(
        scores_ptr + row * WIDTH,
        maxima_ptr + row * (WIDTH // CHUNK),
        page_table_ptr + request * PAGES_PER_SEQ,
        visible,
        selected_ptr + output_row * TOPK,
        selected_ptr,
        scratch_ptr + row * (CAPACITY + 2 * FEW),
        GROUPS_PER_PAGE,
        NUM_PAGES,
        TOPK,
        BLOCK_TOPK,
        MAX_GROUPS,
        CHUNK,
        BLOCK_CHUNKS,
        CAPACITY,
        FEW,
        1,
        False,
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
    HAS_START: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """select_rows and expand_rows in one launch."""
    MAX_GROUPS: tl.constexpr = PAGES_PER_SEQ * GROUPS_PER_PAGE
    row, output_row, request, visible = start_row(
        request_ids_ptr, visible_ptr, row_start_ptr, row_end_ptr, MAX_GROUPS, HAS_START
    )
    position = tl.load(positions_ptr + output_row)
    tokens_row_ptr = token_indices_ptr + output_row * (TOPK * RATIO + RATIO - 1)
    count = select_row(
        scores_ptr + row * WIDTH,
        maxima_ptr + row * (WIDTH // CHUNK),
        page_table_ptr + request * PAGES_PER_SEQ,
        visible,
        selected_ptr + output_row * TOPK,
        tokens_row_ptr,
        scratch_ptr + row * (CAPACITY + 2 * FEW),
        GROUPS_PER_PAGE,
        NUM_PAGES,
        TOPK,
        BLOCK_TOPK,
        MAX_GROUPS,
        CHUNK,
        BLOCK_CHUNKS,
        CAPACITY,
        FEW,
        RATIO,
        True,
    )
    # Behind the tokens of the selected groups: those of the unfinished one, then -1.
    tail_start, tail = unfinished_group(position, RATIO)
    NUM_SELECTED: tl.constexpr = TOPK * RATIO + RATIO - 1
    for start in tl.static_range(0, NUM_SELECTED, BLOCK):
        columns = start + tl.arange(0, BLOCK) - count * RATIO
        tokens = tl.where(columns < tail, tail_start + columns, -1)
        mask = (columns >= 0) & (columns + count * RATIO < NUM_SELECTED)
        tl.store(tokens_row_ptr + count * RATIO + columns, tokens, mask=mask)
    tl.store(counts_ptr + output_row, count * RATIO + tail)
