"""Launches of select and expand. Imports no framework.

An input that a launch has no use for is `visible`, as any pointer does.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .plan import OVERLAPS, Chain, Launch
from .problem import QSAProblem, power_of_two, round_up

WORKSPACE_BYTES = 256 * 2**20
# Elements that a program of the top-k kernel may hold in registers; place_kept counts in 16 bits.
_MAX_HELD = 2**15


@dataclass(frozen=True, kw_only=True)
class SelectTuning:
    """What may be tuned without a change of results. None: chosen by the problem's sizes."""

    chunk: int | None = None  # groups under one maximum: a power of two, at least 4
    # Powers of two, at least 2 and topk: chunks that top-k looks into, scores of its last search.
    capacity: int | None = None
    few: int | None = None
    decode_topk_warps: int | None = None
    prefill_topk_warps: int | None = None
    decode_groups: int = 64  # keys of one tile
    decode_splits: int | None = None  # programs of one request, at most
    decode_warps: int = 4
    prefill_rows: int | None = None  # rows of one tile
    prefill_groups: int = 128
    prefill_splits: int = 16  # programs of one tile of rows
    prefill_warps: int = 4
    prefill_stages: int = 2  # two programs then fit into a processor


@dataclass(frozen=True)
class _Sizes:
    """What the launches of one chain have in common."""

    width: int  # columns of the score workspace
    chunk: int
    capacity: int
    few: int
    block_chunks: int

    @property
    def scratch(self) -> int:
        """Of one row: chunk ids, then candidates and their keys."""
        return self.capacity + 2 * self.few

    @property
    def row_bytes(self) -> int:
        """Workspace of one row: scores, maxima, scratch."""
        return 4 * (self.width + self.width // self.chunk + self.scratch)


def chunk_rows(
    num_rows: int, row_bytes: int, workspace_bytes: int, *, multiple: int = 1, alone: bool = True
) -> int:
    """Rows of one chunk: as many as fit into the workspace, at least one; a multiple of `multiple`
    where as many fit. A chunk that is not `alone` takes half of the workspace, as the last one's
    memory may still be held.

    Not clipped to num_rows: a kernel constant must not follow it."""

    def fitting(size: int) -> int:
        rows = max(size // row_bytes, 1)
        return rows // multiple * multiple or rows

    rows = fitting(workspace_bytes)
    return rows if alone and rows >= num_rows else fitting(workspace_bytes // 2)


def plan_select(
    problem: QSAProblem,
    workspace_bytes: int = WORKSPACE_BYTES,
    *,
    tokens: bool = False,
    tuning: SelectTuning | None = None,
) -> Chain:
    """From index_query, compressed_cache, page_table, request_ids and visible to `selected`; with
    `tokens`, and positions, also to `token_indices` and `counts`."""
    return tuple(_launches(problem, workspace_bytes, tokens, tuning or SelectTuning()))


def _launches(
    problem: QSAProblem, workspace_bytes: int, tokens: bool, tuning: SelectTuning
) -> Iterator[Launch]:
    # Up to topk groups, all are kept and nothing is scored.
    scored = problem.max_groups > problem.topk
    first = True
    sizes = _sizes(problem, tuning, problem.num_decodes > 0)
    row_bytes = sizes.row_bytes if scored else 4
    if problem.num_decodes:
        rows = problem.num_decode_rows
        query_len = problem.decode_query_len
        step = chunk_rows(
            problem.num_decodes,
            query_len * row_bytes,
            workspace_bytes,
            alone=not problem.num_prefill_rows,
        )
        for start in range(0, rows, step * query_len):
            count = min(step * query_len, rows - start)
            if scored:
                yield _score_decode(problem, sizes, tuning, count, first)
            yield _select(problem, sizes, tuning, count, tokens, scored, first, True)
            first = False
    rows = problem.num_prefill_rows
    if not rows:
        if first:  # no row at all: only the outputs
            yield _select(problem, sizes, tuning, 0, tokens, False, first, False)
        return
    sizes = _sizes(problem, tuning, False)
    step = chunk_rows(
        rows,
        sizes.row_bytes if scored else 4,
        workspace_bytes,
        multiple=_prefill_rows(problem, tuning),
        alone=first,
    )
    for start in range(0, rows, step):
        count = min(step, rows - start)
        if scored:
            yield _score_prefill(problem, sizes, tuning, count, first)
        yield _select(problem, sizes, tuning, count, tokens, scored, first, False)
        first = False


def plan_expand(problem: QSAProblem) -> Chain:
    """From `selected` and positions to `token_indices` and `counts`."""
    if power_of_two(problem.topk) * problem.compress_ratio > 2**20:
        raise NotImplementedError(
            f"QSA expand has no kernel for selected of {problem.topk} groups a row at "
            f"compress_ratio {problem.compress_ratio}: rounded up to a power of two, they may be "
            f"at most {2**20 // problem.compress_ratio}"
        )
    return (
        Launch(
            kernel="expand:expand_rows",
            grid=(problem.num_rows,),
            inputs=("selected", "positions"),
            outputs=_token_outputs(problem),
            constants=(
                ("TOPK", problem.topk),
                ("BLOCK_TOPK", power_of_two(problem.topk)),
                ("RATIO", problem.compress_ratio),
                ("BLOCK", _token_block(problem)),
            ),
        ),
    )


def _sizes(problem: QSAProblem, tuning: SelectTuning, decode: bool) -> _Sizes:
    groups, topk = max(problem.max_groups, 1), problem.topk
    # Room beyond topk ends the searches early; many rows gain more from fewer scores to look at.
    room = 2 * power_of_two(topk)
    capacity = tuning.capacity or max(room if decode and topk <= 1024 else room // 2, 64)
    # The first two searches then look at about as many keys.
    chunk = tuning.chunk or min(max(power_of_two(round((groups / capacity) ** 0.5)), 8), 32)
    block_chunks = power_of_two(-(-groups // chunk))
    if not tuning.capacity:
        capacity = min(capacity, max(block_chunks, 32))
    few = tuning.few or max(room, 256)
    # Two scores for each that the last search may see: it sees them all.
    if not tuning.few and capacity * chunk <= 2 * few:
        few = capacity * chunk
    sizes = _Sizes(
        # Top-k reads maxima in fours.
        width=round_up(groups, max(32, 4 * chunk)),
        chunk=chunk,
        capacity=capacity,
        few=few,
        block_chunks=block_chunks,
    )
    if (
        capacity < min(topk, block_chunks)
        or capacity * chunk > _MAX_HELD
        or sizes.block_chunks > _MAX_HELD
    ):
        raise NotImplementedError(
            f"QSA select has no kernel for topk {topk} of {groups} groups: its top-k holds at most "
            f"{_MAX_HELD} scores"
        )
    return sizes


def _score_decode(
    problem: QSAProblem, sizes: _Sizes, tuning: SelectTuning, num_rows: int, first: bool
) -> Launch:
    query_len = problem.decode_query_len
    num_requests = num_rows // query_len
    groups = tuning.decode_groups
    # Up to three tiles for each program at 131072 tokens. More programs would all start, and mostly
    # end at once, where the table is for far longer requests than there are.
    splits = tuning.decode_splits or (512 if num_requests == 1 else 192)
    splits = min(splits, -(-problem.max_groups // groups))
    return Launch(
        kernel="score:score_decode",
        grid=(num_requests * splits,),
        inputs=(*_SCORE_INPUTS, _row_start(first)),
        outputs=_score_outputs(sizes, num_rows),
        constants=(
            *_query_constants(problem),
            ("ROWS", query_len),
            # At least 16 columns in a product, and 4 rows, so that a thread holds all heads.
            ("BLOCK_ROWS", max(power_of_two(query_len), 8 // _head_pairs(problem), 4)),
            *_cache_constants(problem),
            *_score_constants(problem, sizes),
            ("BLOCK_GROUPS", groups),
            ("SPLITS", splits),
            ("HAS_START", not first),
            OVERLAPS,
        ),
        num_warps=tuning.decode_warps,
        num_stages=1,
    )


def _score_prefill(
    problem: QSAProblem,
    sizes: _Sizes,
    tuning: SelectTuning,
    num_rows: int,
    first: bool,
) -> Launch:
    tiles = -(-problem.max_groups // tuning.prefill_groups)
    splits = min(tuning.prefill_splits, power_of_two(tiles))
    block_rows = _prefill_rows(problem, tuning)
    row_tiles = -(-num_rows // block_rows)
    lacking = row_tiles * block_rows - num_rows
    return Launch(
        kernel="score:score_prefill",
        # Tells the kernel the number of rows, too.
        grid=(row_tiles * splits + lacking % splits, 1 + lacking // splits),
        inputs=(*_SCORE_INPUTS, _row_start(first)),
        outputs=_score_outputs(sizes, num_rows),
        constants=(
            *_query_constants(problem),
            *_cache_constants(problem),
            *_score_constants(problem, sizes),
            ("BLOCK_ROWS", block_rows),
            ("BLOCK_GROUPS", tuning.prefill_groups),
            ("SPLITS", splits),
            ("STAGES", tuning.prefill_stages),
            ("HAS_START", not first),
        ),
        num_warps=tuning.prefill_warps,
        num_stages=tuning.prefill_stages,
    )


def _select(
    problem: QSAProblem,
    sizes: _Sizes,
    tuning: SelectTuning,
    num_rows: int,
    tokens: bool,
    scored: bool,
    first: bool,
    decode: bool,
) -> Launch:
    """Top-k of the next `num_rows` rows; later launches write into the first one's arrays."""
    outputs = (("selected", (problem.num_rows, problem.topk), "int32"),)
    if tokens:
        outputs += _token_outputs(problem)
    # Few rows are fastest with much of a processor each, many with little.
    warps = tuning.decode_topk_warps if decode else tuning.prefill_topk_warps
    held = max(sizes.capacity * sizes.chunk, sizes.block_chunks)
    aliased = tuple(f"{name}_in={'visible' if first else name}" for name, _, _ in outputs)
    constants = (
        *_cache_constants(problem),
        ("TOPK", problem.topk),
        ("BLOCK_TOPK", power_of_two(problem.topk)),
        ("WIDTH", sizes.width),
        ("CHUNK", sizes.chunk),
        ("BLOCK_CHUNKS", sizes.block_chunks),
        ("CAPACITY", sizes.capacity),
        ("FEW", sizes.few),
        ("EARLY", decode),
        ("HAS_START", not first),
        OVERLAPS,
    )
    if tokens:
        constants += (("RATIO", problem.compress_ratio), ("BLOCK", _token_block(problem)))
    return Launch(
        kernel="topk:select_tokens" if tokens else "topk:select_rows",
        grid=(num_rows,),
        inputs=(
            *(("scores", "maxima") if scored else ("scores=visible", "maxima=visible")),
            "page_table",
            "request_ids",
            "visible",
            *(("positions",) if tokens else ()),
            _row_start(first),
            *aliased,
        ),
        outputs=(
            *outputs,
            ("scratch", (num_rows, sizes.scratch if scored else 1), "int32"),
            ("row_end", (1,), "int32"),
        ),
        constants=constants,
        num_warps=warps or min(max(held // (1024 if decode else 2048), 4), 32),
        num_stages=1,
        overlaps=scored and decode,
        aliases=() if first else tuple(zip(aliased, (name for name, _, _ in outputs), strict=True)),
    )


_SCORE_INPUTS = ("index_query", "compressed_cache", "page_table", "request_ids", "visible")


def _row_start(first: bool) -> str:
    return "row_start=visible" if first else "row_start=row_end"


def _score_outputs(sizes: _Sizes, num_rows: int) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    return (
        ("scores", (num_rows, sizes.width), "float32"),
        ("maxima", (num_rows, sizes.width // sizes.chunk), "float32"),
    )


def _token_outputs(problem: QSAProblem) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    return (
        ("token_indices", (problem.num_rows, problem.num_selected), "int32"),
        ("counts", (problem.num_rows,), "int32"),
    )


def _head_pairs(problem: QSAProblem) -> int:
    return power_of_two(-(-problem.index_heads // 2))


def _prefill_rows(problem: QSAProblem, tuning: SelectTuning) -> int:
    """128 rows and heads fill a product of 4 warps, which a tile then gives 128 registers each."""
    return tuning.prefill_rows or 64 // _head_pairs(problem)


def _query_constants(problem: QSAProblem) -> tuple[tuple[str, int], ...]:
    return (
        ("HEADS", problem.index_heads),
        ("HEAD_PAIRS", _head_pairs(problem)),
        ("DIM", problem.index_dim),
        ("BLOCK_DIM", max(16, power_of_two(problem.index_dim))),
    )


def _cache_constants(problem: QSAProblem) -> tuple[tuple[str, int], ...]:
    return (
        ("GROUPS_PER_PAGE", problem.groups_per_page),
        ("PAGES_PER_SEQ", problem.pages_per_seq),
        ("NUM_PAGES", problem.num_pages),
    )


def _score_constants(problem: QSAProblem, sizes: _Sizes) -> tuple[tuple[str, int], ...]:
    return (("TOPK", problem.topk), ("WIDTH", sizes.width), ("CHUNK", sizes.chunk))


def _token_block(problem: QSAProblem) -> int:
    return min(power_of_two(problem.num_selected), 1024)
