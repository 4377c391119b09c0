"""Pieces that the selection kernels share."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Ranks a score that is no candidate: below every other, so that no bound reaches it.
LOWEST: tl.constexpr = tl.constexpr(-(2**31))
# More ties than a row has.
ALL_TIES: tl.constexpr = tl.constexpr(0x7FFF)


@triton.jit
def launch_next(OVERLAPS: tl.constexpr):
    """Lets a next launch that `overlaps` start; its programs then wait for this launch's end."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(OVERLAPS: tl.constexpr):
    """Waits until the last launch has ended and its writes are seen: to be called by the kernel of
    a launch that `overlaps`, before it touches what that launch writes, and at its end at last."""
    if OVERLAPS:
        gdc_wait()


@triton.jit
def widen(x, dtype: tl.constexpr):
    """To the query's dtype. E4M3 goes through fp16 and fp32, all exact, NaN kept: the conversion to
    bf16 that Triton 3.6 makes takes an F2F, of low rate, for each element."""
    if x.dtype == tl.float8e4nv:
        x = x.to(tl.float16)
        if dtype != tl.float16:
            x = x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def sortable(scores):
    """int32 in the order of float32 scores, -0 equal to 0; -inf and NaN give LOWEST."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(scores > float("-inf"), ordered, LOWEST)


@triton.jit
def key_range(keys):
    """(lowest, highest) of the keys above LOWEST; LOWEST + 1 twice where there are none."""
    # One reduction instead of two: the highest key, and the complement of the lowest.
    mirrored = tl.where(keys > LOWEST, ~keys, LOWEST)
    high, low = tl.split(tl.max(tl.join(keys, mirrored), 0))
    low = tl.where(high > LOWEST, ~low, LOWEST + 1)
    return low, tl.maximum(high, LOWEST + 1)


@triton.jit
def count_reaching(keys, low, step):
    """How many keys reach low, low + 1, and each of six bounds `step` apart above that."""
    packed = ()
    for i in tl.static_range(4):
        first = low + 1 + step * (i - 1) if i > 0 else low
        second = low + 1 + step * (i + 3)
        packed += ((keys >= first).to(tl.int32) + ((keys >= second).to(tl.int32) << 16),)
    # One reduction, which gives every thread all counts.
    sums = tl.sum(tl.join(tl.join(packed[0], packed[1]), tl.join(packed[2], packed[3])), 0)
    left, right = tl.split(sums)
    c0, c1 = tl.split(left)
    c2, c3 = tl.split(right)
    counts = (c0 & 0xFFFF, c1 & 0xFFFF, c2 & 0xFFFF, c3 & 0xFFFF)
    counts += (c0 >> 16, c1 >> 16, c2 >> 16, c3 >> 16)
    return counts


@triton.jit
def find_bound(keys, low, high, LEAST: tl.constexpr, MOST: tl.constexpr):
    """(bound, ties, count): the keys above bound and the first `ties` keys equal to it are `count`
    keys, among them the LEAST highest of lowest index. LEAST <= count <= MOST, or fewer when fewer
    keys are from low to high, which must be all above LOWEST. Fewer than 2**15 keys are above it.

    Each step cuts what is left into `low` alone and seven pieces above it, and keeps the piece that
    the LEAST-th highest key lies in: at most 12 steps, on any data. `low` is alone since many keys
    often equal the lowest one: scores of 0."""
    keys = tl.reshape(keys, [keys.numel])
    span = (high - low).to(tl.uint32, bitcast=True)
    count = low * 0
    going = low == low
    while going:
        step = tl.where(span > 0, (span - 1) // 7 + 1, 0).to(tl.int32, bitcast=True)
        counts = count_reaching(keys, low, step)
        # The highest bound that LEAST keys reach.
        piece = low * 0
        count = counts[0]
        for i in tl.static_range(1, 8):
            enough = (counts[i] >= LEAST) & (span > 0)
            piece = tl.where(enough, i, piece)
            count = tl.where(enough, counts[i], count)
        start = tl.where(piece > 0, (piece - 1) * step + 1, 0)
        low += start
        left = tl.minimum(span - start.to(tl.uint32, bitcast=True), (step - 1).to(tl.uint32))
        span = tl.where(piece > 0, left, 0)
        going = (count > MOST) & (span > 0)
    ties = low * 0 + ALL_TIES
    if count > MOST:
        ties = LEAST - tl.sum((keys > low).to(tl.int32), 0)
        count = low * 0 + LEAST
    return low, ties, count


@triton.jit
def split_columns(values):
    """The four columns of [rows, 4]."""
    even, odd = tl.split(tl.reshape(values, [values.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def place_kept(keys, bound, ties):
    """For rows of 4 keys: (mask of those that find_bound keeps, how many are kept before each row).
    `bound` is above LOWEST. At most 2**15 keys."""
    columns = tl.arange(0, 4)[None, :]
    if ties == ALL_TIES:
        kept = (keys >= bound).to(tl.int32)
        counts = tl.sum(kept, 1)
        place = tl.cumsum(counts, 0) - counts
        mask = tl.sum(kept << columns, 1)
    else:
        above = (keys > bound).to(tl.int32)
        level = (keys == bound).to(tl.int32)
        counts = tl.sum((above << 16) + level, 1)
        before = tl.cumsum(counts, 0) - counts
        level_before = before & 0xFFFF
        # Of the row's level keys, those before the last tie.
        rank = level_before[:, None] + tl.cumsum(level, 1)
        kept = ((above != 0) | ((level != 0) & (rank <= ties))).to(tl.int32)
        place = (before >> 16) + tl.minimum(level_before, ties)
        mask = tl.sum(kept << columns, 1)
    return mask, place


@triton.jit
def store_candidates(keys, ids, bound, ties, ids_ptr, keys_ptr, WITH_KEYS: tl.constexpr):
    """Stores the ids of the keys that find_bound keeps, in rising order, and the keys themselves;
    ids rise by 1 within each aligned 4."""
    # A thread holds rows of 4 whole: what follows then moves no data but the scan's.
    ROWS: tl.constexpr = keys.numel // 4
    keys = tl.reshape(keys, [ROWS, 4])
    first_id = tl.min(tl.reshape(ids, [ROWS, 4]), 1)
    mask, place = place_kept(keys, bound, ties)
    keys = split_columns(keys)
    for column in tl.static_range(4):
        kept = (mask >> column) & 1
        tl.store(ids_ptr + place, first_id + column, mask=kept != 0)
        if WITH_KEYS:
            tl.store(keys_ptr + place, keys[column], mask=kept != 0)
        place += kept


@triton.jit
def unfinished_group(position, RATIO: tl.constexpr):
    """(first token, number of tokens) of the group that a row's position has not finished."""
    end = tl.maximum(position.to(tl.int64) + 1, 0)
    count = (end % RATIO).to(tl.int32)
    return (end - count).to(tl.int32), count
