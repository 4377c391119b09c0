"""Pieces that the selection kernels share."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Ranks a score that is no candidate: below every other, so that no bound reaches it.
LOWEST: tl.constexpr = tl.constexpr(-(2**31))
# Those of the lowest and the highest number.
LEAST_KEY: tl.constexpr = tl.constexpr(-0x7F800000)
HIGHEST_KEY: tl.constexpr = tl.constexpr(0x7F800000)
# More than a row has.
MANY: tl.constexpr = tl.constexpr(2**30)


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
def as_score(key):
    """The score of a key above LOWEST."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_range(keys):
    """(lowest, highest) of the keys above LOWEST; LEAST_KEY twice where there are none."""
    keys = tl.reshape(keys, [keys.numel])
    # One reduction instead of two: the highest key, and the complement of the lowest.
    mirrored = tl.where(keys > LOWEST, ~keys, LOWEST)
    high, low = tl.split(tl.max(tl.join(keys, mirrored), 0))
    low = tl.where(high > LOWEST, ~low, LEAST_KEY)
    return low, tl.maximum(high, LEAST_KEY)


@triton.jit
def exponent(x):
    """Of 2 in a number that is not negative; -127 for 0."""
    return (x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def count_reaching(keys, low, bits):
    """How many keys in rows of at most 8 reach low + 1 + i * 2**bits, for i from 0 to 7."""
    piece = tl.minimum((keys - low - 1).to(tl.uint32, bitcast=True) >> bits.to(tl.uint32), 7)
    # A row counts in 4 bits for each piece, and rows in 16: those of i and i + 4 in one word.
    ones = tl.full(keys.shape, 1, tl.int32) << (piece * 4).to(tl.int32)
    row = tl.sum(tl.where(keys > low, ones, 0), 1)
    words = ()
    for i in tl.static_range(4):
        words += ((row >> (4 * i)) & 0x000F000F,)
    # One reduction, which gives every thread all counts.
    sums = tl.sum(tl.join(tl.join(words[0], words[1]), tl.join(words[2], words[3])), 0)
    left, right = tl.split(sums)
    c0, c1 = tl.split(left)
    c2, c3 = tl.split(right)
    # From one piece to those from it on.
    c2 += c3
    c1 += c2
    c0 += c1
    upper = c0 >> 16
    lower = (upper + (c0 & 0xFFFF), upper + (c1 & 0xFFFF), upper + (c2 & 0xFFFF))
    lower += (upper + (c3 & 0xFFFF),)
    return lower, (upper, c1 >> 16, c2 >> 16, c3 >> 16)


@triton.jit
def last_reaching(lower, upper, LEAST: tl.constexpr):
    """(index, value) of the last of four and four falling counts that reaches LEAST, else of the
    first."""
    second = upper[0] >= LEAST
    c0 = tl.where(second, upper[0], lower[0])
    c1 = tl.where(second, upper[1], lower[1])
    c2 = tl.where(second, upper[2], lower[2])
    c3 = tl.where(second, upper[3], lower[3])
    later = c2 >= LEAST
    c0 = tl.where(later, c2, c0)
    c1 = tl.where(later, c3, c1)
    last = c1 >= LEAST
    index = second.to(tl.int32) * 4 + later.to(tl.int32) * 2 + last.to(tl.int32)
    return index, tl.where(last, c1, c0)


@triton.jit
def find_bound(keys, low, high, first_bits, LEAST: tl.constexpr, MOST: tl.constexpr):
    """(bound, ties, count): of keys in rows, those above bound and the first `ties` equal to it are
    `count` keys, among them the LEAST highest of lowest index. LEAST <= count <= MOST, or fewer
    when fewer keys are from low to high; high is no less than any key and low above LOWEST. Fewer
    than 2**15 keys are above low.

    Each step cuts what is left into `low` alone and eight pieces of 2**bits above it, and keeps the
    piece that the LEAST-th highest key lies in: at most 13 steps, on any data. `low` is alone since
    many keys often equal the lowest one: scores of 0. The first step's pieces may be smaller, of
    2**first_bits, but for the last one."""
    span = (high - low).to(tl.uint32, bitcast=True)
    bits = tl.minimum(tl.maximum(exponent(span) - 2, 0), first_bits)
    count = low * 0 + MANY
    going = low == low
    while going:
        lower, upper = count_reaching(keys, low, bits)
        piece, reaching = last_reaching(lower, upper, LEAST)
        above = (lower[0] >= LEAST) & (span > 0)
        count = tl.where(above, reaching, count)
        start = tl.where(above, (piece << bits) + 1, 0)
        low += start
        left = span - start.to(tl.uint32, bitcast=True)
        size = (tl.full([], 1, tl.uint32) << bits.to(tl.uint32)) - 1
        left = tl.where(piece < 7, tl.minimum(left, size), left)
        span = tl.where(above, left, 0)
        bits = tl.maximum(exponent(span) - 2, 0)
        going = (count > MOST) & (span > 0)
    ties = low * 0 + MANY
    if count > MOST:
        flat = tl.reshape(keys, [keys.numel])
        count = tl.sum((flat >= low).to(tl.int32), 0)
        if count > MOST:
            ties = LEAST - tl.sum((flat > low).to(tl.int32), 0)
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
    """For rows of keys: (mask of those that find_bound keeps, how many are kept before each row).
    `bound` is above LOWEST. At most 2**15 keys."""
    columns = tl.arange(0, keys.shape[1])[None, :]
    if ties == MANY:
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
def store_candidates(keys, first_ids, bound, ties, out_ptr, WITH_KEYS: tl.constexpr):
    """Stores the ids of the keys, in rows of 4, that find_bound keeps, in rising order; WITH_KEYS
    in the lower half of 64 bits, whose upper half holds the key. Keys may be scores, and bound one.
    Ids rise by 1 in each row, from first_ids on."""
    # A thread holds a row whole: what follows then moves no data but the scan's.
    mask, place = place_kept(keys, bound, ties)
    keys = split_columns(keys)
    for column in tl.static_range(4):
        kept = (mask >> column) & 1
        ids = first_ids + column
        if WITH_KEYS:
            upper = keys[column].to(tl.int32, bitcast=True).to(tl.int64) << 32
            tl.store(out_ptr + place, upper | ids.to(tl.int64), mask=kept != 0)
        else:
            tl.store(out_ptr + place, ids, mask=kept != 0)
        place += kept


@triton.jit
def store_tokens(
    groups, count, position, tokens_row_ptr, TOPK: tl.constexpr, RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores the tokens of the first `count` of a row's groups, then those of the group that its
    position has not finished, then -1; returns how many tokens."""
    ranks = tl.arange(0, groups.numel)
    i = tl.arange(0, RATIO)
    offsets = ranks[:, None] * RATIO + i[None, :]
    tokens = groups[:, None] * RATIO + i[None, :]
    tl.store(tokens_row_ptr + offsets, tokens, mask=(ranks < count)[:, None])
    end = tl.maximum(position.to(tl.int64) + 1, 0)
    tail = (end % RATIO).to(tl.int32)
    tokens = tl.where(i < tail, (end - tail).to(tl.int32) + i, -1)
    tl.store(tokens_row_ptr + count * RATIO + i, tokens, mask=i < RATIO - 1)
    NUM_SELECTED: tl.constexpr = TOPK * RATIO + RATIO - 1
    none = tl.full([BLOCK], -1, tl.int32)
    for start in range((count + 1) * RATIO - 1, NUM_SELECTED, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        tl.store(tokens_row_ptr + columns, none, mask=columns < NUM_SELECTED)
    return count * RATIO + tail
