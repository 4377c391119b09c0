"""Launches of attend. Imports no framework."""

from dataclasses import dataclass, replace

from .plan import OVERLAPS, Chain, Launch
from .problem import QSAProblem, power_of_two


@dataclass(frozen=True, kw_only=True)
class RowsTuning:
    """How single rows are walked: by programs of `tiles` tiles of block_tokens tokens. A row that
    takes several of them is merged by programs of merge_dim elements of a head."""

    block_tokens: int
    tiles: int
    num_warps: int
    num_stages: int
    merge_dim: int

    def whole(self, problem: QSAProblem) -> int:
        """Tiles of a whole list."""
        return -(-problem.num_selected // self.block_tokens)

    def splits(self, problem: QSAProblem) -> int:
        """Programs for one row and KV head."""
        return -(-self.whole(problem) // self.tiles)


@dataclass(frozen=True, kw_only=True)
class TilesTuning:
    """How tiles of neighbouring rows are walked: tile_rows rows, block_vectors query vectors."""

    tile_rows: int
    block_vectors: int
    block_tokens: int
    num_warps: int
    num_stages: int
    max_union: int = 65  # percent of the listed groups; of a larger union, rows are walked singly


# Prefill rows from which a batch is walked in tiles: fewer give too few programs.
TILED_ROWS = 256
_PROCESSORS = 132  # multiprocessors of an H200
# Of attend_rows, which mostly has nothing to do. Three fill a multiprocessor at head_dim 256: they
# are spread evenly although they start while attend_tiles ends.
_ROW_PROGRAMS = 3 * _PROCESSORS
_MAX_TILE_ROWS = 16
# A list is cut into single tiles, or about one of these numbers of parts: a few classes, so that
# another number of rows compiles nothing.
_SPLITS = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2)
_MOST_SPLITS = 66
_MERGES = 1024  # programs of a warp that merge splits, at most, where rows are few


# Measured on an H200, 24 / 2 heads of 256, bf16, budget 2048, in us. Rows, by programs on a
# multiprocessor x stages x tokens of a tile:
#     rows   1 x 4 x 32   3 x 2 x 32   2 x 2 x 64
#        8         16.6         16.9         17.9
#       16         26.1         26.5         28.0
#       32         43.6         43.5         44.7
#       64         89.9         76.9         76.6
# Merges of 1, 2 and 4 warps: 7.4, 7.6 and 7.6 for 1 row by 16 elements of a head, 15.5, 15.7 and
# 16.4 for 8 by 64, 40.9, 40.9 and 41.7 for 32 by 256.
# 32 rows in E4M3: 35.4 by 3 x 3 x 32, 56.5 by 1 x 6 x 32. 1 row: 7.9 by 65 programs a KV head, 8.7
# by 33. All without overlap of the two launches (programmatic dependent launch), which takes 1.1
# off 1 row, 0.6 off 8 and 0.5 off 32, if the first lets the second start when it has read all.
# 4096 rows over 65536 with random lists, whose union is 94% of what is listed: 4342 in tiles of 5,
# 2567 as single rows. By the union from which rows are walked singly:
#     rows                                               50%    65%    80%
#     8192 over 8192, random lists                      2557   2430   2435
#     2048 that share 80%, and 32 decodes                742    741    898
# By the number of programs that walk single rows:       264    396   1056
#     4096 over 65536, random lists                     3170   2567   2714
#     the same, started after attend_tiles has ended    2826   2667   2840


def rows_tuning(problem: QSAProblem) -> RowsTuning:
    """One program for each multiprocessor, with many tiles in flight; two where rows are too many
    for that. Keys and values of 8 bits take instructions to be widened: three, so that one
    computes while the others wait."""
    pairs = max(problem.num_rows * problem.num_kv_heads, 1)
    size = problem.num_rows * problem.num_qo_heads * problem.head_dim
    merge_dim = next((dim for dim in (16, 64) if size <= _MERGES * dim), 256)
    each, num_stages = (3, 3) if problem.kv_dtype.startswith("float8") else (1, 4)
    most = each * _PROCESSORS // pairs
    if most < 2:
        return _cut(problem, whole_lists(problem), 2 * _PROCESSORS // pairs)
    tuning = RowsTuning(
        block_tokens=32 if problem.head_dim == 256 else 64,
        tiles=1,
        num_warps=4,
        num_stages=num_stages,
        merge_dim=min(merge_dim, problem.head_dim),
    )
    tuning = _cut(problem, tuning, most)
    return replace(tuning, num_stages=2) if tuning.tiles == 1 else tuning


def _cut(problem: QSAProblem, tuning: RowsTuning, most: int) -> RowsTuning:
    """Lists cut into no more than `most` programs."""
    whole, most = tuning.whole(problem), max(min(most, _MOST_SPLITS), 1)
    sizes = (1, *(-(-whole // count) for count in _SPLITS), whole)
    cuts = (replace(tuning, tiles=size) for size in sizes)
    return next(cut for cut in cuts if cut.splits(problem) <= most)


def whole_lists(problem: QSAProblem) -> RowsTuning:
    """One program for each row and KV head."""
    # Keys and values of 8 bits take registers to be widened: those of 64 tokens would not fit.
    small = problem.head_dim == 256 and problem.kv_dtype.startswith("float8")
    block_tokens = 32 if small else 64
    large = problem.head_dim == 256 and not small
    tuning = RowsTuning(
        block_tokens=block_tokens,
        tiles=1,
        num_warps=4,
        num_stages=2 if large else 3,
        merge_dim=problem.head_dim,
    )
    return replace(tuning, tiles=tuning.whole(problem))


def tiles_tuning(problem: QSAProblem) -> TilesTuning:
    """Query vectors of a tile: up to 64, one warp group, so that two programs share a
    multiprocessor and one computes while the other waits. A third stage would leave no room."""
    tile_rows = max(min(64 // problem.group_size, _MAX_TILE_ROWS), 1)
    wide = problem.head_dim == 256
    return TilesTuning(
        tile_rows=tile_rows,
        block_vectors=max(power_of_two(tile_rows * problem.group_size), 16),
        block_tokens=32 if wide else 64,
        num_warps=4,
        num_stages=2 if wide else 3,
    )


def plan_attend(
    problem: QSAProblem, *, gate: bool, tuning: RowsTuning | TilesTuning | None = None
) -> Chain:
    """From query, key_cache, value_cache, page_table, token_indices, counts, request_ids, sm_scale,
    k_scale, v_scale (and gate) to out and lse. Scales are float32 [1].

    Few rows are walked one by one, each list split over programs. Many prefill rows are walked in
    tiles that read what neighbours have in common once, for lists as expand gives them; other
    lists, and tiles of little in common, are found on the device and walked row by row."""
    if problem.num_pages * problem.page_size >= 2**31:
        raise NotImplementedError(
            f"key_cache must have fewer than 2**31 tokens, got {problem.num_pages} pages of "
            f"{problem.page_size}"
        )
    if tuning is None:
        tiled = problem.num_prefill_rows >= TILED_ROWS
        tuning = tiles_tuning(problem) if tiled else rows_tuning(problem)
    if isinstance(tuning, TilesTuning):
        return _tiles(problem, gate, tuning)
    return _rows(problem, gate, tuning)


_LISTS = ("page_table", "token_indices", "counts", "request_ids")
_CACHES = ("query", "key_cache", "value_cache")
_SCALES = ("sm_scale", "k_scale", "v_scale")


def _gate(gate: bool) -> str:
    return "gate" if gate else "gate=query"


def _results(problem: QSAProblem) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    shape = (problem.num_rows, problem.num_qo_heads, problem.head_dim)
    return (("out", shape, problem.query_dtype), ("lse", shape[:2], "float32"))


def _heads(problem: QSAProblem) -> tuple[tuple[str, int], ...]:
    return (
        ("NUM_QO_HEADS", problem.num_qo_heads),
        ("NUM_KV_HEADS", problem.num_kv_heads),
        ("HEAD_DIM", problem.head_dim),
    )


def _pages(problem: QSAProblem) -> tuple[tuple[str, int], ...]:
    return (
        ("PAGE_SIZE", problem.page_size),
        ("PAGES_PER_SEQ", problem.pages_per_seq),
        ("NUM_PAGES", problem.num_pages),
    )


def _rows(problem: QSAProblem, gate: bool, tuning: RowsTuning) -> Chain:
    count = tuning.splits(problem)
    # A program that may walk more tiles than there are walks these.
    tiles = tuning.tiles if count > 1 else tuning.whole(problem)
    width = tiles * tuning.block_tokens
    selected = ("NUM_SELECTED", problem.num_selected)
    blocks = (
        ("TILES", tiles),
        ("BLOCK_M", max(power_of_two(problem.group_size), 16)),
        ("BLOCK_N", tuning.block_tokens),
        # Places that a program finds at a time: up to 16 a thread.
        ("BLOCK_PLACES", min(power_of_two(width), 16 * 32 * tuning.num_warps)),
    )
    pairs = problem.num_rows * problem.num_kv_heads
    places = ("places", (problem.num_rows, count * width), "int32")
    single = Launch(
        kernel="attend:decode",
        grid=(pairs,),
        inputs=(*_CACHES, *_LISTS, _gate(gate), *_SCALES),
        outputs=(places, *_results(problem)),
        constants=(*_heads(problem), selected, *_pages(problem), *blocks, ("GATE", gate)),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    if count == 1:
        return (single,)
    splits = ("SPLITS", count)
    states = (problem.num_rows, problem.num_qo_heads, count)
    split = replace(
        single,
        kernel="attend:decode_split",
        grid=(pairs, count),
        inputs=(*_CACHES, *_LISTS, "sm_scale", "k_scale"),
        outputs=(
            places,
            ("partial", (*states, problem.head_dim), "float32"),
            ("state", (*states, 2), "float32"),
        ),
        constants=(*_heads(problem), selected, *_pages(problem), splits, *blocks, OVERLAPS),
    )
    merge = Launch(
        kernel="attend:merge",
        grid=(problem.num_rows * problem.num_qo_heads, problem.head_dim // tuning.merge_dim),
        inputs=("partial", "state", _gate(gate), "v_scale"),
        outputs=_results(problem),
        constants=(
            ("HEAD_DIM", problem.head_dim),
            splits,
            ("BLOCK_SPLITS", power_of_two(count)),
            ("BLOCK_DIM", tuning.merge_dim),
            ("GATE", gate),
            OVERLAPS,
        ),
        num_warps=1,  # whose reductions need no barrier
        num_stages=1,
        overlaps=True,
    )
    return (split, merge)


def _tiles(problem: QSAProblem, gate: bool, tuning: TilesTuning) -> Chain:
    rows = tuning.tile_rows
    tiles = -(-problem.num_rows // rows)
    capacity = rows * (problem.topk + 1)
    selected = ("NUM_SELECTED", problem.num_selected)
    ratio = ("COMPRESS_RATIO", problem.compress_ratio)
    tile = (("TILE_ROWS", rows), ("CAPACITY", capacity))
    join = Launch(
        kernel="attend_prefill:join_rows",
        grid=(tiles, problem.num_rows - (tiles - 1) * rows),
        inputs=_LISTS,
        outputs=(
            ("slots", (tiles, capacity), "int32"),
            ("words", (tiles, capacity), "int32"),
            ("header", (tiles, 2 * rows + 3), "int32"),
        ),
        constants=(
            selected,
            ratio,
            *_pages(problem),
            *tile,
            ("TOPK_BITS", problem.topk.bit_length()),
            ("BLOCK_ROWS", power_of_two(rows)),
            ("BLOCK_GROUPS", min(power_of_two(problem.topk), 512)),
            ("BLOCK_ENTRIES", 256),  # no fewer than threads: each rewrites what it alone read
            ("MAX_UNION", tuning.max_union),
        ),
        num_warps=4,
        num_stages=1,
    )
    attend = Launch(
        kernel="attend_prefill:attend_tiles",
        grid=(tiles * problem.num_kv_heads,),
        inputs=(*_CACHES, _gate(gate), *_SCALES, "slots", "words", "header"),
        outputs=_results(problem),
        constants=(
            *_heads(problem),
            ratio,
            *tile,
            ("BLOCK_M", tuning.block_vectors),
            ("BLOCK_N", tuning.block_tokens),
            ("GATE", gate),
            OVERLAPS,
        ),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    lists = whole_lists(problem)
    (single,) = _rows(problem, gate, lists)
    programs = min(tiles * rows * problem.num_kv_heads, _ROW_PROGRAMS)
    places = ("places", (programs, lists.tiles * lists.block_tokens), "int32")
    apart = replace(
        single,
        kernel="attend_prefill:attend_rows",
        grid=(programs,),
        outputs=(places, *_results(problem)),
        inputs=(*single.inputs, "header", "tiled_out=out", "tiled_lse=lse"),
        constants=(*single.constants, tile[0], ("BLOCK_ITEMS", 128), OVERLAPS),
        overlaps=True,
        aliases=(("tiled_out=out", "out"), ("tiled_lse=lse", "lse")),
    )
    return (join, attend, apart)
