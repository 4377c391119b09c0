"""The launches of selection: workspace, grids, classes of constants."""

import dataclasses
import itertools

import numpy as np
import pytest

from tests.torch_core.qsa.test_select_kernels import QWEN, SMALL, make_case
from torch_core.qsa.plan import Chain
from torch_core.qsa.plan_select import SelectTuning, chunk_rows, plan_expand, plan_select
from torch_core.qsa.problem import QSAProblem


def test_short_contexts_launch_no_scores():
    problem = make_case([[30]], num_decodes=1, topk=64).problem
    assert [record.kernel for record in plan_select(problem)] == ["topk:select_rows"]


def _workspace(chain: Chain) -> int:
    """Bytes of scratch of a chain: all of one chunk, and of the one before it."""
    scratch = ("scores", "maxima", "scratch")
    sizes = [
        4 * np.prod(shape) for record in chain for name, shape, _ in record.outputs
        if name in scratch and len(shape) == 2
    ]  # fmt: skip
    chunks = [sum(sizes[i : i + 3]) for i in range(0, len(sizes), 3)]
    return int(max(a + b for a, b in zip([0, *chunks], [*chunks, 0], strict=True)))


@pytest.mark.parametrize("tokens", [65536, 262_144, 2**20])
@pytest.mark.parametrize(("rows", "decodes"), [(4096, 0), (4096, 64), (256, 256), (1, 0)])
@pytest.mark.parametrize("workspace_bytes", [2**28, 2**25, 2**23])
def test_workspace_stays_in_its_budget(tokens, rows, decodes, workspace_bytes):
    problem = QSAProblem(
        num_rows=rows, num_requests=decodes + 1, num_decodes=decodes,
        pages_per_seq=tokens // 64, **QWEN,
    )  # fmt: skip
    chain = plan_select(problem, workspace_bytes)
    assert _workspace(chain) <= workspace_bytes
    assert sum(r.grid[0] for r in chain if r.kernel == "topk:select_rows") == rows


def test_no_rows():
    problem = QSAProblem(num_rows=0, num_requests=0, pages_per_seq=1024, **QWEN)
    (record,) = plan_select(problem, tokens=True)
    assert record.grid == (0,)
    assert record.outputs[0] == ("selected", (0, 512), "int32")


def test_budget_below_one_row():
    problem = QSAProblem(num_rows=5, num_requests=1, pages_per_seq=1024, **QWEN)
    chain = plan_select(problem, 1)
    assert [r.grid[0] for r in chain if r.kernel == "topk:select_rows"] == [1] * 5
    assert [chunk_rows(5, 100, b, alone=True) for b in (0, 99, 250, 499, 500)] == [1, 1, 1, 2, 5]
    assert [chunk_rows(5, 100, b, alone=False) for b in (0, 250, 500)] == [1, 1, 2]


def test_no_constant_follows_the_batch():
    """A new batch size compiles nothing new: constants come from few classes."""

    def constants(rows, decodes, query_len):
        problem = QSAProblem(
            num_rows=rows, num_requests=decodes + 3, num_decodes=decodes,
            decode_query_len=query_len, pages_per_seq=1024, **QWEN,
        )  # fmt: skip
        return {(r.kernel, r.constants, r.num_warps) for r in plan_select(problem, tokens=True)}

    prefill = set().union(*(constants(rows, 0, 1) for rows in range(1, 9000, 37)))
    assert len(prefill) <= 6
    decode = set().union(*(constants(n, n, 1) for n in range(1, 600)))
    assert len(decode) <= 16


@pytest.mark.parametrize("workspace_bytes", [1, 2**22, 2**28])
def test_top_k_of_decodes_overlaps_their_scores(workspace_bytes):
    problem = QSAProblem(
        num_rows=40, num_requests=9, num_decodes=8, decode_query_len=3, pages_per_seq=1024, **QWEN
    )
    pairs = list(itertools.pairwise(plan_select(problem, workspace_bytes, tokens=True)))
    scored = [pair for pair in pairs if pair[0].kernel == "score:score_decode"]
    assert scored and [pair for pair in pairs if pair[1].overlaps] == scored
    for score, topk in scored:
        assert "OVERLAPS" in dict(score.constants) and "OVERLAPS" in dict(topk.constants)
        assert not score.overlaps


def test_prefill_grid_tells_the_rows():
    small = dataclasses.replace(SMALL, capacity=512, few=512)
    for rows in range(1, 200):
        problem = QSAProblem(num_rows=rows, num_requests=1, pages_per_seq=1024, **QWEN)
        for tuning in (small, SelectTuning(), SelectTuning(prefill_splits=64)):
            record = plan_select(problem, tuning=tuning)[0]
            constants = dict(record.constants)
            tiles, rest = divmod(record.grid[0], constants["SPLITS"])
            lacking = rest + (record.grid[1] - 1) * constants["SPLITS"]
            assert record.kernel == "score:score_prefill"
            assert 0 <= lacking < constants["BLOCK_ROWS"]
            assert tiles * constants["BLOCK_ROWS"] - lacking == rows


def test_limits():
    for groups, topk in ((262_144, 2048), (262_144, 512), (262_144, 64), (2048, 2048), (33, 1)):
        problem = dataclasses.replace(
            QSAProblem(num_rows=1, num_requests=1, pages_per_seq=groups, **QWEN),
            page_size=4,
            topk=topk,
        )
        assert plan_select(problem)
    with pytest.raises(NotImplementedError, match=r"no kernel for topk 40000 of 262144 groups"):
        plan_select(dataclasses.replace(problem, pages_per_seq=262_144, topk=40_000))


def test_expand_says_how_many_groups_it_takes():
    problem = QSAProblem(
        num_rows=1, num_requests=1, compress_ratio=8, topk=2**17 + 1, page_size=16,
        pages_per_seq=1, num_pages=1,
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="at most 131072"):
        plan_expand(problem)
