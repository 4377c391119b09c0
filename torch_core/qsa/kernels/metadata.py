"""Row metadata: request, position, visible groups and compressed slot of each row."""

import triton
import triton.language as tl


@triton.jit
def clear(blank_request_ids_ptr, blank_positions_ptr, blank_visible_ptr, blank_slots_ptr):
    """Every row as a padding row. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    tl.store(blank_request_ids_ptr + row, -1)
    tl.store(blank_positions_ptr + row, -1)
    tl.store(blank_visible_ptr + row, 0)
    tl.store(blank_slots_ptr + row, -1)


@triton.jit
def build(
    page_table_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    blank_request_ids_ptr,
    blank_positions_ptr,
    blank_visible_ptr,
    blank_slots_ptr,
    request_ids_ptr,
    positions_ptr,
    visible_ptr,
    slots_ptr,
    COMPRESS_RATIO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGES_PER_SEQ: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """The rows of one request. Grid: (requests, programs that share a request's rows)."""
    GROUPS_PER_PAGE: tl.constexpr = PAGE_SIZE // COMPRESS_RATIO
    request = tl.program_id(0).to(tl.int64)
    begin = tl.load(cu_seqlens_q_ptr + request).to(tl.int64)
    end = tl.load(cu_seqlens_q_ptr + request + 1).to(tl.int64)
    length = tl.load(seq_lens_ptr + request).to(tl.int64)
    # Rows before position 0 are padding.
    first = tl.maximum(begin, end - length)
    step = tl.num_programs(1) * BLOCK_ROWS
    for start in range(first + tl.program_id(1) * BLOCK_ROWS, end, step):
        row = start + tl.arange(0, BLOCK_ROWS)
        live = row < end
        position = tl.where(live, length - end + row, 0)
        groups = tl.minimum((position + 1) // COMPRESS_RATIO, length // COMPRESS_RATIO)
        logical = position // PAGE_SIZE
        mapped = live & (logical < PAGES_PER_SEQ)
        page = tl.load(page_table_ptr + request * PAGES_PER_SEQ + logical, mask=mapped, other=-1)
        page = page.to(tl.int64)
        writes = (position + 1) % COMPRESS_RATIO == 0
        writes = writes & (page >= 0) & (page < NUM_PAGES)
        slot = page * GROUPS_PER_PAGE + position % PAGE_SIZE // COMPRESS_RATIO
        tl.store(request_ids_ptr + row, request.to(tl.int32), mask=live)
        tl.store(positions_ptr + row, position.to(tl.int32), mask=live)
        visible = tl.minimum(groups, PAGES_PER_SEQ * GROUPS_PER_PAGE)
        tl.store(visible_ptr + row, visible.to(tl.int32), mask=live)
        tl.store(slots_ptr + row, tl.where(writes, slot, -1).to(tl.int32), mask=live)
