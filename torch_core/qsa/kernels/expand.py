"""From selected groups to token indices."""

import triton
import triton.language as tl

from .primitives import unfinished_group


@triton.jit
def expand_rows(
    selected_ptr,
    positions_ptr,
    token_indices_ptr,
    counts_ptr,
    TOPK: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program writes one row: the tokens of its selected groups, then those of its unfinished
    group, then -1."""
    row = tl.program_id(0).to(tl.int64)
    NUM_SELECTED: tl.constexpr = TOPK * RATIO + RATIO - 1
    selected_row_ptr = selected_ptr + row * TOPK
    ranks = tl.arange(0, BLOCK_TOPK)
    selected = tl.load(selected_row_ptr + ranks, mask=ranks < TOPK, other=-1)
    chosen = tl.sum((selected >= 0).to(tl.int32), 0) * RATIO
    tail_start, tail = unfinished_group(tl.load(positions_ptr + row), RATIO)
    for start in tl.static_range(0, NUM_SELECTED, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        group = tl.load(selected_row_ptr + columns // RATIO, mask=columns < chosen, other=-1)
        tokens = tl.where(columns < chosen, group * RATIO + columns % RATIO, -1)
        in_tail = (columns >= chosen) & (columns < chosen + tail)
        tokens = tl.where(in_tail, tail_start + columns - chosen, tokens)
        tl.store(
            token_indices_ptr + row * NUM_SELECTED + columns, tokens, mask=columns < NUM_SELECTED
        )
    tl.store(counts_ptr + row, chosen + tail)
