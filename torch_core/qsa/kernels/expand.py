"""From selected groups to token indices."""

import triton
import triton.language as tl

from .primitives import store_tokens


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
    ranks = tl.arange(0, BLOCK_TOPK)
    groups = tl.load(selected_ptr + row * TOPK + ranks, mask=ranks < TOPK, other=-1)
    count = tl.sum((groups >= 0).to(tl.int32), 0)
    position = tl.load(positions_ptr + row)
    NUM_SELECTED: tl.constexpr = TOPK * RATIO + RATIO - 1
    tokens_row_ptr = token_indices_ptr + row * NUM_SELECTED
    length = store_tokens(groups, count, position, tokens_row_ptr, TOPK, RATIO, BLOCK)
    tl.store(counts_ptr + row, length)
