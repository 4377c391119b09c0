"""The work lists of FlashInfer's native kernels, made on the device.

Upstream makes them on the host, from lengths that it reads back. They follow from the lengths by a
few array operations, so here they are made where the lengths are: nothing synchronises, the launch
can be captured, and lengths change without a new trace. A plan is one int32 vector.

For prefill each request becomes two: its rows that see no key, and the others; the padding rows are
one more. A request without keys makes upstream write 0 and -inf, and so no row is left unwritten.
"""

import math
from typing import Any, NamedTuple

from ..binding import Ops, Part
from ..problem import AttentionInputs, AttentionProblem, DecodeProblem, PrefillProblem

MIN_CHUNK = 128  # keys of a split, upstream's least


def _parts(**lengths: int) -> dict[str, Part]:
    """Consecutive parts of the vector."""
    parts, start = {}, 0
    for name, length in lengths.items():
        parts[name] = Part("plan", start, length)
        start += length
    return parts


def size(parts: dict[str, Part]) -> int:
    """Length of the whole vector."""
    return sum(part.length for part in parts.values())


def _requests(problem: PrefillProblem, inputs: AttentionInputs, ops: Ops) -> tuple[Any, Any, Any]:
    """First row, rows and keys of each part of a request, then of the padding rows."""
    offsets, keys = inputs.cu_seqlens_q, inputs.seq_lens
    begin, rows = offsets[:-1], offsets[1:] - offsets[:-1]
    blind = (rows - keys).clip(min=0) if problem.causal else ops.where(keys == 0, rows, 0 * rows)
    end = offsets[-1:]

    def in_turn(first: Any, second: Any, last: Any) -> Any:
        pairs = ops.concatenate([first[:, None], second[:, None]], 1)
        return ops.concatenate([pairs.reshape(-1), last], 0)

    return (
        in_turn(begin, begin + blind, end),
        in_turn(blind, rows - blind, problem.num_rows - end),
        in_turn(0 * keys, keys, 0 * end),
    )


def _search(ends: Any, index: Any, ops: Ops) -> Any:
    """For each index, how many of the rising ends it has passed; the last one's at most."""
    return ops.cast(ops.search(ends, index), "int32").clip(max=ends.shape[0] - 1)


class Hopper(NamedTuple):
    """FA3's lists: what each multiprocessor works through."""

    rows: int  # query rows of a tile
    tiles: int  # upper bound
    heads: int  # that the lists name; 1 where all heads share them
    sm_count: int
    rounds: int  # tiles of a multiprocessor's list, upper bound
    parts: dict[str, Part]

    @property
    def info(self) -> list[int]:
        """Upstream's PrefillPlanSM90Info: byte offsets, and whether all heads share the lists."""
        names = ("tile", "begin", "page", "rows", "keys", "head", "work_indptr", "batch")
        return [4 * self.parts[name].start for name in names] + [int(self.heads == 1)]


def hopper(problem: PrefillProblem, sm_count: int) -> Hopper:
    """Sizes of FA3's lists for a problem."""
    rows = 192 if problem.head_dim == 64 else 128
    tiles = problem.num_rows // rows + 2 * problem.batch + 1
    # Enough tiles for every multiprocessor: a list for all heads, else one that names the heads.
    heads = 1 if tiles > sm_count else problem.num_qo_heads
    rounds = math.ceil(tiles * heads / sm_count)
    works = rounds * sm_count
    lists = dict.fromkeys(("tile", "begin", "page", "rows", "keys", "head", "batch"), works)
    parts = _parts(**lists, work_indptr=sm_count + 1)
    return Hopper(rows, tiles, heads, sm_count, rounds, parts)


def hopper_plan(plan: Hopper, problem: PrefillProblem, inputs: AttentionInputs, ops: Ops) -> Any:
    """FA3's plan: tiles by falling cost, dealt to the multiprocessors to and fro."""
    begin, rows, keys = _requests(problem, inputs, ops)
    request = (ops.arange(2 * problem.batch + 1) // 2).clip(max=max(problem.batch - 1, 0))
    page = request * problem.pages_per_seq
    count = (rows + plan.rows - 1) // plan.rows
    ends = ops.cumsum(count)
    index = ops.arange(plan.tiles)
    owner = _search(ends, index, ops)
    tile = index - (ends - count)[owner]
    tile_rows = ops.where(index < ends[-1], rows[owner], 0 * index)
    tile_keys = keys[owner]
    seen = tile_keys
    if problem.causal:
        limit = (tile_keys - tile_rows + (tile + 1) * plan.rows).clip(min=0)
        seen = ops.where(limit < seen, limit, seen)
    if problem.window_left >= 0:
        seen = seen.clip(max=problem.window + plan.rows)
    order = ops.argsort(ops.where(tile_rows > 0, -seen - 1, 0 * seen))
    # One more tile, without rows: what a list is filled up with.
    columns = [array[:, None] for array in (tile, begin[owner], page[owner], tile_rows, tile_keys)]
    fields = ops.concatenate(columns, 1)
    fields = ops.concatenate([fields, 0 * fields[:1]])
    order = ops.concatenate([order, 0 * order[:1] + plan.tiles])
    rank, head = _deal(plan, ops)
    lists = fields[order[rank]].T.reshape(-1)
    indptr = ops.arange(plan.sm_count + 1) * plan.rounds
    return ops.cast(ops.concatenate([lists, head, 0 * head, indptr]), "int32")


def _deal(plan: Hopper, ops: Ops) -> tuple[Any, Any]:
    """For each place of the lists: the rank of its tile and its head."""
    place = ops.arange(plan.sm_count * plan.rounds)
    owner, turn = place // plan.rounds, place % plan.rounds
    owner = ops.where(turn % 2 == 0, owner, plan.sm_count - 1 - owner)
    place = turn * plan.sm_count + owner
    return (place // plan.heads).clip(max=plan.tiles), place % plan.heads


class Tiled(NamedTuple):
    """FA2's lists: one entry for each CTA."""

    rows: int  # query rows times group_size of a tile
    requests: int
    works: int  # CTAs
    split: bool  # whether keys are split between CTAs
    scratch: int  # bytes of the splits' results
    parts: dict[str, Part]
    num_rows: int
    lse_offset: int

    @property
    def info(self) -> list[int]:
        """Upstream's PrefillPlanInfo; offsets in bytes, the last flags: graph-safe, split."""

        def at(name: str) -> int:
            return 4 * self.parts[name].start if name in self.parts else 0

        return [
            *(self.works, self.num_rows, at("num_rows"), self.rows),
            *(at("request"), at("tile"), at("chunk"), at("merge"), at("o_indptr")),
            *(at("chunk_keys"), 0, self.lse_offset, at("valid"), 1, int(self.split)),
        ]


def tiled(problem: AttentionProblem, sm_count: int) -> Tiled:
    """Sizes of FA2's lists for a problem."""
    group, invariant = problem.group_size, problem.batch_invariant
    decode = isinstance(problem, DecodeProblem)
    average = group if decode else problem.num_rows * group // max(problem.batch, 1)
    if (average > 64 and problem.head_dim < 256) or (invariant and not decode):
        rows = 128 if problem.head_dim < 256 else 64
    else:
        rows = 64 if average > 16 else 16
    if decode:
        requests, tiles = problem.batch, problem.batch * math.ceil(group / rows)
    else:
        requests = 2 * problem.batch + 1
        tiles = problem.num_rows * group // rows + requests
    slots = 2 * sm_count // problem.num_kv_heads
    split = tiles < slots and not invariant
    works = slots if split else tiles
    lengths = dict(q_indptr=requests + 1, kv_indptr=requests + 1, last_page_len=requests)
    lengths |= dict(request=works, tile=works, chunk=works, o_indptr=requests + 1)
    lengths |= dict(chunk_keys=1, num_rows=1, valid=math.ceil(works / 4))
    scratch = lse_offset = 0
    if split:
        lengths["merge"] = problem.num_rows + 1
        partial = math.ceil(works * rows / group) * problem.num_qo_heads
        lse_offset = 4 * partial * problem.head_dim
        scratch = lse_offset + 4 * partial
    parts = _parts(**lengths)
    return Tiled(rows, requests, works, split, scratch, parts, problem.num_rows, lse_offset)


def tiled_plan(plan: Tiled, problem: AttentionProblem, inputs: AttentionInputs, ops: Ops) -> Any:
    """FA2's plan: each request's tiles, times its splits."""
    group, pages = problem.group_size, problem.pages_per_seq
    if isinstance(problem, PrefillProblem):
        begin, rows, keys = _requests(problem, inputs, ops)
        first = ops.arange(2 * problem.batch + 2) // 2 * pages
        causal = problem.causal
    else:
        begin, keys = ops.arange(problem.batch), inputs.seq_lens
        rows = 0 * keys + 1
        first = ops.arange(problem.batch + 1) * pages
        causal = True
    q_indptr = ops.concatenate([begin, 0 * begin[:1] + problem.num_rows])
    tiles = (rows * group + plan.rows - 1) // plan.rows
    seen = keys.clip(min=1)
    if causal and problem.window_left >= 0:
        seen = seen.clip(max=problem.window + plan.rows + 1)
    chunk_keys = _chunk_keys(plan, tiles, seen, ops) if plan.split else 0 * seen[:1] + 2**30
    chunks = (seen + chunk_keys - 1) // chunk_keys
    ends = ops.cumsum(tiles * chunks)
    index = ops.arange(4 * math.ceil(plan.works / 4))
    owner = _search(ends, index, ops)
    place = index - (ends - tiles * chunks)[owner]
    valid = index < ends[-1]
    lists = [ops.where(valid, values, 0 * index)[: plan.works] for values in (
        owner, place // chunks[owner], place % chunks[owner]
    )]  # fmt: skip
    partial = ops.cumsum(rows * chunks)
    o_indptr = ops.concatenate([0 * partial[:1], partial])
    flags = ops.cast(valid, "int32").reshape(-1, 4)
    flags = sum((flags[:, byte] * 2 ** (8 * byte) for byte in range(4)), 0 * flags[:, 0])
    vector = [
        q_indptr,
        first,
        # Upstream's length is that of all but the last page, and this: right also when negative.
        keys - (pages - 1) * problem.page_size,
        *lists,
        o_indptr,
        chunk_keys,
        0 * chunk_keys + problem.num_rows,
        flags,
    ]
    if plan.split:
        row = ops.arange(problem.num_rows + 1)
        owner = _search(q_indptr[1:], row, ops)
        vector.append(o_indptr[owner] + (row - q_indptr[owner]) * chunks[owner])
    return ops.concatenate([ops.cast(part, "int32") for part in vector])


def _chunk_keys(plan: Tiled, tiles: Any, seen: Any, ops: Ops) -> Any:
    """The fewest keys of a split, [1], for which the CTAs are enough."""
    splits = ops.arange(plan.works) + 1
    keys = (seen.max() + splits - 1) // splits
    keys = (keys + MIN_CHUNK - 1) // MIN_CHUNK * MIN_CHUNK
    chunks = (seen[None, :] + keys[:, None] - 1) // keys[:, None]
    fits = ops.cast((tiles[None, :] * chunks).sum(-1) <= plan.works, "int32")
    # The number of works only grows along `keys`, and one split always fits.
    best = ops.cast(fits.sum(), "int32").clip(min=1) - 1
    return keys[best.reshape(1)]
