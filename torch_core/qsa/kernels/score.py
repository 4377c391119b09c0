"""Scores of visible groups, and the maximum of each chunk of CHUNK groups.

A row that sees no more than TOPK groups keeps them all: it has no use for scores and gets none.
Both kernels add the heads in rising order in float32. What they leave unwritten, nobody uses.
"""

import triton
import triton.language as tl

from .primitives import launch_next, widen

# Pages of a tile that a thread holds one by one.
MOST_SCALARS: tl.constexpr = tl.constexpr(16)


@triton.jit
def load_pages(
    page_table_row_ptr, tile, limit, BLOCK_GROUPS: tl.constexpr, GROUPS_PER_PAGE: tl.constexpr
):
    """Pages of a tile's groups below limit, else -1: one by one where they are few, so that no
    thread waits for another's; else a page for each group.

    To be loaded a tile ahead: the asynchronous copies of keys, which end in order, then wait for no
    page."""
    if BLOCK_GROUPS % GROUPS_PER_PAGE == 0 and BLOCK_GROUPS // GROUPS_PER_PAGE <= MOST_SCALARS:
        NUM: tl.constexpr = BLOCK_GROUPS // GROUPS_PER_PAGE
        pages = ()
        for i in tl.static_range(NUM):
            page = tile * NUM + i
            page_ptr = page_table_row_ptr + page
            pages += (tl.load(page_ptr, mask=page * GROUPS_PER_PAGE < limit, other=-1),)
        return pages
    else:
        groups = tile * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
        pages_ptr = page_table_row_ptr + groups // GROUPS_PER_PAGE
        return (tl.load(pages_ptr, mask=groups < limit, other=-1),)


@triton.jit
def pages_of_groups(pages, BLOCK_GROUPS: tl.constexpr, GROUPS_PER_PAGE: tl.constexpr):
    """The page of each group of a tile, from load_pages."""
    group_pages = pages[0]
    if BLOCK_GROUPS % GROUPS_PER_PAGE == 0 and BLOCK_GROUPS // GROUPS_PER_PAGE <= MOST_SCALARS:
        page_in_tile = tl.arange(0, BLOCK_GROUPS) // GROUPS_PER_PAGE
        group_pages = tl.where(page_in_tile == 0, group_pages, -1)
        for i in tl.static_range(1, BLOCK_GROUPS // GROUPS_PER_PAGE):
            group_pages = tl.where(page_in_tile == i, pages[i], group_pages)
    return group_pages


@triton.jit
def load_keys(
    compressed_cache_ptr,
    pages,
    groups,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    GROUPS_PER_PAGE: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """(keys [groups, BLOCK_DIM], mapped [groups]): zeros where not mapped."""
    mapped = pages.to(tl.uint32) < NUM_PAGES
    # Unsigned: the remainder by a power of two is then one instruction.
    within = (groups.to(tl.uint32) % GROUPS_PER_PAGE).to(tl.int64)
    rows = pages.to(tl.int64) * GROUPS_PER_PAGE + within
    dims = tl.arange(0, BLOCK_DIM)
    mask = mapped[:, None]
    if BLOCK_DIM != DIM:
        mask = mask & (dims[None, :] < DIM)
    keys = tl.load(
        compressed_cache_ptr + (rows * DIM)[:, None] + dims[None, :],
        mask=mask,
        other=0.0,
        eviction_policy=EVICTION,
    )
    return keys, mapped


@triton.jit
def scored_groups(visible, TOPK: tl.constexpr, MAX_GROUPS: tl.constexpr):
    """How many groups of each row need a score."""
    return tl.where(visible > TOPK, tl.minimum(visible, MAX_GROUPS), 0)


@triton.jit
def sum_heads(products, HEADS: tl.constexpr):
    """[a, b, pairs of heads, 2] products -> [a, b]: relu, then the sum, heads in rising order."""
    A: tl.constexpr = products.shape[0]
    B: tl.constexpr = products.shape[1]
    PAIRS: tl.constexpr = products.shape[2]
    even, odd = tl.split(tl.maximum(products, 0.0))
    if PAIRS == 1:
        even, odd = tl.reshape(even, [A, B]), tl.reshape(odd, [A, B])
        total = even + odd if HEADS > 1 else even
    elif PAIRS == 2:
        head_0, head_2 = tl.split(even)
        head_1, head_3 = tl.split(odd)
        total = head_0 + head_1 + head_2
        total = total + head_3 if HEADS > 3 else total
    else:
        even_0, even_1 = tl.split(tl.reshape(even, [A, B, 2, 2]))
        odd_0, odd_1 = tl.split(tl.reshape(odd, [A, B, 2, 2]))
        head_0, head_4 = tl.split(even_0)
        head_2, head_6 = tl.split(even_1)
        head_1, head_5 = tl.split(odd_0)
        head_3, head_7 = tl.split(odd_1)
        total = head_0 + head_1 + head_2 + head_3 + head_4
        total = total + head_5 if HEADS > 5 else total
        total = total + head_6 if HEADS > 6 else total
        total = total + head_7 if HEADS > 7 else total
    return total


@triton.jit
def score_decode(
    index_query_ptr,
    compressed_cache_ptr,
    page_table_ptr,
    request_ids_ptr,
    visible_ptr,
    row_start_ptr,
    scores_ptr,
    maxima_ptr,
    HEADS: tl.constexpr,
    HEAD_PAIRS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GROUPS_PER_PAGE: tl.constexpr,
    PAGES_PER_SEQ: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    TOPK: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_START: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program scores every SPLITS-th tile of a request's keys for the request's ROWS rows.

    Keys are the long side of the product, queries its 16 or more columns: (pair of heads, row, head
    of the pair). A thread of a tensor core's result then holds all heads of its rows, and their sum
    moves nothing.

    Programs are many and small, and hide each other's waits: nothing is loaded ahead. Keys, used
    once, are the first to leave the L2 cache, and scores and maxima the last."""
    program = tl.program_id(0)
    request = program // SPLITS
    split = program % SPLITS
    first_row = request.to(tl.int64) * ROWS
    first_query = first_row
    if HAS_START:
        first_query += tl.load(row_start_ptr)

    rows = tl.arange(0, BLOCK_ROWS)
    visible = tl.load(visible_ptr + first_query + rows, mask=rows < ROWS, other=0)
    ids = tl.load(request_ids_ptr + first_query + rows, mask=rows < ROWS, other=-1)
    page_table_row_ptr = page_table_ptr + tl.max(ids, 0).to(tl.int64) * PAGES_PER_SEQ
    scored = scored_groups(visible, TOPK, PAGES_PER_SEQ * GROUPS_PER_PAGE)
    scored = tl.where(ids >= 0, scored, 0)
    limit = tl.max(scored, 0)
    if split * BLOCK_GROUPS < limit:
        # Not before: programs that have nothing to do would take longer.
        launch_next(OVERLAPS)
        columns = tl.arange(0, HEAD_PAIRS * BLOCK_ROWS * 2)
        query_row = (columns // 2) % BLOCK_ROWS
        head = columns // (2 * BLOCK_ROWS) * 2 + columns % 2
        dims = tl.arange(0, BLOCK_DIM)
        offsets = ((first_query + query_row) * HEADS + head) * DIM
        query = tl.load(
            index_query_ptr + offsets[:, None] + dims[None, :],
            mask=((query_row < ROWS) & (head < HEADS))[:, None] & (dims[None, :] < DIM),
            other=0.0,
        )
        query = tl.trans(query)  # [BLOCK_DIM, columns]

        for tile in tl.range(split, tl.cdiv(limit, BLOCK_GROUPS), SPLITS, num_stages=1):
            groups = tile * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
            pages = tl.load(
                page_table_row_ptr + groups.to(tl.uint32) // GROUPS_PER_PAGE,
                mask=groups < limit,
                other=-1,
            )
            keys, mapped = load_keys(
                compressed_cache_ptr, pages, groups, DIM, BLOCK_DIM, GROUPS_PER_PAGE, NUM_PAGES,
                "evict_first",
            )  # fmt: skip
            products = tl.dot(widen(keys, query.dtype), query, input_precision="ieee")
            products = tl.reshape(products, [BLOCK_GROUPS, HEAD_PAIRS, BLOCK_ROWS, 2])
            scores = sum_heads(tl.permute(products, [0, 2, 1, 3]), HEADS)
            wanted = groups[:, None] < scored[None, :]
            scores = tl.where(wanted & mapped[:, None], scores, float("-inf"))
            score_offsets = (first_row + rows)[None, :] * WIDTH + groups[:, None]
            # To a chunk's end: top-k looks at all of its scores.
            stored = groups[:, None] < (tl.cdiv(scored, CHUNK) * CHUNK)[None, :]
            tl.store(scores_ptr + score_offsets, scores, mask=stored, eviction_policy="evict_last")

            chunks = tile * (BLOCK_GROUPS // CHUNK) + tl.arange(0, BLOCK_GROUPS // CHUNK)
            maxima = tl.max(tl.reshape(scores, [BLOCK_GROUPS // CHUNK, CHUNK, BLOCK_ROWS]), 1)
            chunk_offsets = (first_row + rows)[None, :] * (WIDTH // CHUNK) + chunks[:, None]
            in_row = chunks[:, None] * CHUNK < scored[None, :]
            tl.store(maxima_ptr + chunk_offsets, maxima, mask=in_row, eviction_policy="evict_last")


@triton.jit
def score_prefill(
    index_query_ptr,
    compressed_cache_ptr,
    page_table_ptr,
    request_ids_ptr,
    visible_ptr,
    row_start_ptr,
    scores_ptr,
    maxima_ptr,
    HEADS: tl.constexpr,
    HEAD_PAIRS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    GROUPS_PER_PAGE: tl.constexpr,
    PAGES_PER_SEQ: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    TOPK: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_START: tl.constexpr,
):
    """One program scores a tile of rows against every SPLITS-th tile of groups.

    A tile of rows may hold the end of one request and the start of others: the program takes the
    requests in turn, which needs no list of tiles. Only requests with few rows repeat a tile.
    The rows of a product are (pair of heads, rows / 8, head of the pair, 8 rows), for the reason
    that score_decode states.

    Only a grid may depend on the number of rows, so it tells what the last tile of rows lacks: as
    many programs more, for each SPLITS of them a line of axis 1 instead."""
    program = tl.program_id(0)
    split = program % SPLITS
    first_row = (program // SPLITS).to(tl.int64) * BLOCK_ROWS
    row_start = 0
    if HAS_START:
        row_start = tl.load(row_start_ptr)
    num_tiles = tl.num_programs(0) // SPLITS
    lacking = tl.num_programs(0) % SPLITS + (tl.num_programs(1) - 1) * SPLITS
    num_rows = num_tiles.to(tl.int64) * BLOCK_ROWS - lacking
    # The programs that only count get no rows.
    row_end = row_start + tl.where(tl.program_id(1) == 0, num_rows, 0)

    tile_rows = tl.arange(0, BLOCK_ROWS)
    rows = row_start + first_row + tile_rows
    ids = tl.load(request_ids_ptr + rows, mask=rows < row_end, other=-1)
    visible = tl.load(visible_ptr + rows, mask=rows < row_end, other=0)
    scored = scored_groups(visible, TOPK, PAGES_PER_SEQ * GROUPS_PER_PAGE)
    scored = tl.where(ids >= 0, scored, 0)
    if split * BLOCK_GROUPS < tl.max(scored, 0):
        lines = tl.arange(0, HEAD_PAIRS * BLOCK_ROWS * 2)
        query_row = lines // 16 % (BLOCK_ROWS // 8) * 8 + lines % 8
        head = lines // (2 * BLOCK_ROWS) * 2 + lines // 8 % 2
        query_row = row_start + first_row + query_row
        dims = tl.arange(0, BLOCK_DIM)
        query = tl.load(
            index_query_ptr + ((query_row * HEADS + head) * DIM)[:, None] + dims[None, :],
            mask=((query_row < row_end) & (head < HEADS))[:, None] & (dims[None, :] < DIM),
            other=0.0,
        )
        first = tl.min(tl.where(scored > 0, ids, 0x7FFFFFFF), 0)
        last = tl.max(tl.where(scored > 0, ids, -1), 0)
        scores_tile_ptr = scores_ptr + first_row * WIDTH
        maxima_tile_ptr = maxima_ptr + first_row * (WIDTH // CHUNK)
        for request in range(first.to(tl.int64), last.to(tl.int64) + 1):
            scored_here = tl.where(ids == request, scored, 0)
            limit = tl.max(scored_here, 0)
            page_table_row_ptr = page_table_ptr + request * PAGES_PER_SEQ
            pages = load_pages(page_table_row_ptr, split, limit, BLOCK_GROUPS, GROUPS_PER_PAGE)
            for tile in tl.range(split, tl.cdiv(limit, BLOCK_GROUPS), SPLITS, num_stages=STAGES):
                groups = tile * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
                group_pages = pages_of_groups(pages, BLOCK_GROUPS, GROUPS_PER_PAGE)
                keys, mapped = load_keys(
                    compressed_cache_ptr, group_pages, groups, DIM, BLOCK_DIM, GROUPS_PER_PAGE,
                    NUM_PAGES, "",
                )  # fmt: skip
                pages = load_pages(
                    page_table_row_ptr, tile + SPLITS, limit, BLOCK_GROUPS, GROUPS_PER_PAGE
                )
                keys = tl.trans(widen(keys, query.dtype))
                products = tl.dot(query, keys, input_precision="ieee")
                products = tl.reshape(products, [HEAD_PAIRS, BLOCK_ROWS // 8, 2, 8, BLOCK_GROUPS])
                products = tl.permute(products, [1, 3, 4, 0, 2])
                products = tl.reshape(products, [BLOCK_ROWS, BLOCK_GROUPS, HEAD_PAIRS, 2])
                scores = sum_heads(products, HEADS)
                wanted = groups[None, :] < scored_here[:, None]
                scores = tl.where(wanted & mapped[None, :], scores, float("-inf"))
                # From the tile's first row, offsets fit into 32 bits.
                score_offsets = (tile_rows * WIDTH)[:, None] + groups[None, :]
                stored = groups[None, :] < (tl.cdiv(scored_here, CHUNK) * CHUNK)[:, None]
                tl.store(scores_tile_ptr + score_offsets, scores, mask=stored)

                NUM_CHUNKS: tl.constexpr = BLOCK_GROUPS // CHUNK
                chunks = tile * NUM_CHUNKS + tl.arange(0, NUM_CHUNKS)
                maxima = tl.max(tl.reshape(scores, [BLOCK_ROWS, NUM_CHUNKS, CHUNK]), 2)
                chunk_offsets = (tile_rows * (WIDTH // CHUNK))[:, None] + chunks[None, :]
                in_row = chunks[None, :] * CHUNK < scored_here[:, None]
                tl.store(maxima_tile_ptr + chunk_offsets, maxima, mask=in_row)
