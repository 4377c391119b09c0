"""Kernels of attend against float64 NumPy, each path by its tuning."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
import torch

from tests import oracle
from tests.compare import check
from torch_core.qsa import launch
from torch_core.qsa.plan_attend import (
    RowsTuning,
    TilesTuning,
    plan_attend,
    rows_tuning,
    tiles_tuning,
)
from torch_core.qsa.problem import QSAProblem

PATHS = ("rows", "split", "tiles", "apart")  # apart: what tiles leave to attend_rows
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@dataclass
class Case:
    problem: QSAProblem
    arrays: dict[str, torch.Tensor]

    def fields(self) -> tuple[QSAProblem, dict[str, torch.Tensor]]:
        return self.problem, self.arrays

    def clone(self) -> "Case":
        return Case(self.problem, {name: array.clone() for name, array in self.arrays.items()})


def listed(position: int, groups: list[int], ratio: int, width: int) -> tuple[list[int], int]:
    """token_indices and count of a row, from its selected groups."""
    tokens = [group * ratio + j for group in groups for j in range(ratio)]
    tokens += range((position + 1) // ratio * ratio, position + 1)
    return tokens + [-1] * (width - len(tokens)), len(tokens)


def make(
    positions: list[list[int]],
    *,
    group_size: int = 3,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    ratio: int = 4,
    topk: int = 6,
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype | None = None,
    gate: bool = False,
    scales: tuple[float, float, float] | None = None,
    keep: float = 0.6,
    seed: int = 0,
) -> Case:
    """Rows at `positions` of each request; -1 is a padding row. Of its neighbour's groups a row
    keeps the share `keep`."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    requests = len(positions)
    pages_per_seq = max([1, *(p // page_size + 1 for row in positions for p in row)])
    num_pages = requests * pages_per_seq + 3
    flat = [(i, p) for i, row in enumerate(positions) for p in row]
    rows, width = len(flat), topk * ratio + ratio - 1
    problem = QSAProblem(
        num_rows=rows,
        num_requests=requests,
        num_qo_heads=group_size * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        compress_ratio=ratio,
        topk=topk,
        page_size=page_size,
        pages_per_seq=pages_per_seq,
        num_pages=num_pages,
        query_dtype=str(dtype).removeprefix("torch."),
        kv_dtype=str(kv_dtype or dtype).removeprefix("torch."),
    )
    tokens = np.full((rows, width), -1, np.int32)
    counts = np.zeros(rows, np.int32)
    before: set[int] = set()
    for row, (_, position) in enumerate(flat):
        visible = (position + 1) // ratio
        kept = [g for g in sorted(before) if g < visible and rng.random() < keep]
        others = [g for g in rng.permutation(visible).tolist() if g not in kept]
        before = set((kept + others)[: min(topk, visible)])
        tokens[row], counts[row] = listed(position, sorted(before), ratio, width)
    shape = (num_pages, page_size, num_kv_heads, head_dim)
    q_shape = (rows, group_size * num_kv_heads, head_dim)
    sm_scale, k_scale, v_scale = scales or (head_dim**-0.5, 1.0, 1.0)
    arrays = dict(
        query=torch.randn(q_shape).to(dtype),
        key_cache=torch.randn(shape).to(kv_dtype or dtype),
        value_cache=torch.randn(shape).to(kv_dtype or dtype),
        page_table=torch.from_numpy(
            rng.permutation(num_pages)[: requests * pages_per_seq]
            .reshape(requests, pages_per_seq)
            .astype(np.int32)
        ),
        token_indices=torch.from_numpy(tokens),
        counts=torch.from_numpy(counts),
        request_ids=torch.tensor([i if p >= 0 else -1 for i, p in flat], dtype=torch.int32),
        sm_scale=torch.tensor([sm_scale]),
        k_scale=torch.tensor([k_scale]),
        v_scale=torch.tensor([v_scale]),
    )
    if gate:
        arrays["gate"] = torch.randn(q_shape).to(dtype)
    return Case(problem, arrays)


def run(case: Case, path: str, device: str, block: int = 16) -> dict[str, torch.Tensor]:
    """The results of one path; outputs start as NaN. block: tokens of a tile in the interpreter,
    few, so that loops do loop."""
    problem, arrays = case.fields()
    gate = "gate" in arrays
    arrays = {name: array.to(device) for name, array in arrays.items()}
    if device == "cuda":
        block = 32
    rows = RowsTuning(
        block_tokens=block, tiles=10**6, num_warps=4, num_stages=3, merge_dim=problem.head_dim
    )
    if path == "rows":
        chain = plan_attend(problem, gate=gate, tuning=rows)
    elif path == "split":
        tuning = replace(rows, tiles=max(-(-problem.num_selected // (3 * block)), 1))
        chain = plan_attend(problem, gate=gate, tuning=tuning)
    else:
        union = 0 if path == "apart" else 100
        tuning = replace(tiles_tuning(problem), block_tokens=block, max_union=union)
        chain = plan_attend(problem, gate=gate, tuning=tuning)
    out = {
        name: torch.full(shape, torch.nan, dtype=getattr(torch, dtype), device=device)
        for name, shape, dtype in chain[-1].outputs
        if name in ("out", "lse")
    }
    results = launch.run(chain, arrays, out)
    return {name: array.cpu() for name, array in results.items()}


def numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == BF16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.float().numpy() if tensor.dtype == E4M3 else tensor.numpy()


def slots_of(case: Case, row: int) -> list[int]:
    """Places in the cache that a row reads."""
    problem, arrays = case.fields()
    request = int(arrays["request_ids"][row])
    count = max(int(arrays["counts"][row]), 0) if request >= 0 else 0
    slots = []
    for token in arrays["token_indices"][row, :count].tolist():
        if 0 <= token < problem.pages_per_seq * problem.page_size:
            page = int(arrays["page_table"][request, token // problem.page_size])
            if 0 <= page < problem.num_pages:
                slots.append(page * problem.page_size + token % problem.page_size)
    return slots


def expected(case: Case, dtype: Any, rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of some rows, one head at a time."""
    problem, arrays = case.fields()
    heads, head_dim = problem.num_qo_heads, problem.head_dim
    out = np.zeros((len(rows), heads, head_dim), dtype)
    lse = np.full((len(rows), heads), -np.inf, dtype)
    flat = (-1, problem.num_kv_heads, head_dim)
    key, value = (arrays[name].view(flat) for name in ("key_cache", "value_cache"))
    scale = dtype(arrays["sm_scale"].item()) * dtype(arrays["k_scale"].item())
    for i, row in enumerate(rows):
        slots = torch.tensor(slots_of(case, row), dtype=torch.long)
        if not len(slots):
            continue
        # Through int8: not every dtype can be indexed.
        picked = [x.view(torch.int8)[slots].view(x.dtype) for x in (key, value)]
        k, v = (numpy(x).astype(dtype) for x in picked)
        for head in range(heads):
            kv_head = head // problem.group_size
            scores = k[:, kv_head] @ numpy(arrays["query"][row, head]).astype(dtype) * scale
            weights = np.exp(scores - scores.max())
            lse[i, head] = np.log(weights.sum()) + scores.max()
            out[i, head] = weights / weights.sum() @ v[:, kv_head] * arrays["v_scale"].item()
        if "gate" in arrays:
            out[i] /= 1 + np.exp(-numpy(arrays["gate"][row]).astype(dtype))
    return out, lse


def verify(case: Case, results: dict[str, torch.Tensor], rows: list[int] | None = None) -> None:
    rows = list(range(case.problem.num_rows)) if rows is None else rows
    exact, plain = expected(case, np.float64, rows), expected(case, np.float32, rows)
    check(numpy(results["out"][rows]), exact[0], plain[0], "out")
    check(numpy(results["lse"][rows]), exact[1], plain[1], "lse")


PREFILL = [[38, 39, 40], [-1], [0, 2, 3], [61], [-1]]
GEOMETRIES = [
    dict(group_size=2, num_kv_heads=1, kv_dtype=E4M3, scales=(0.3, 0.25, 0.5), gate=True),
    dict(group_size=3, dtype=torch.float16, gate=True),
    dict(group_size=1, num_kv_heads=1, head_dim=64, ratio=2),
    dict(group_size=2, head_dim=128, page_size=32, ratio=8),
    dict(group_size=5, num_kv_heads=1, page_size=48, ratio=8, topk=5),
    dict(group_size=7, page_size=128, topk=2),
    dict(group_size=8, num_kv_heads=1, page_size=64, topk=40),
    dict(group_size=12, head_dim=256, gate=True),
    dict(group_size=16, num_kv_heads=1, head_dim=256, ratio=2, topk=9),
    dict(group_size=12, kv_dtype=E4M3, dtype=torch.float16, scales=(0.1, 0.25, 0.5)),
    dict(scales=(-0.2, 1.0, 1.0)),
    dict(scales=(0.0, 1.0, 1.0)),
]


@pytest.mark.usefixtures("no_races")
# split shares all but the end with rows. The interpreter is slow: some cases are left to the GPU.
@pytest.mark.parametrize(
    "geometry, path",
    [
        *((g, path) for g in GEOMETRIES[:2] for path in PATHS),
        *((g, ("rows", "tiles")[i % 2]) for i, g in enumerate(GEOMETRIES[2:])),
        *(
            pytest.param(g, ("tiles", "rows")[i % 2], marks=pytest.mark.gpu)
            for i, g in enumerate(GEOMETRIES[2:])
        ),
        *(
            pytest.param(
                dict(group_size=group, num_kv_heads=1, head_dim=(64, 128, 256)[group % 3]),
                path,
                marks=pytest.mark.gpu,
            )
            for group in (9, 10, 11, 13, 14, 15)
            for path in ("rows", "tiles")
        ),
    ],
    ids=str,
)
def test_attention(geometry: dict[str, Any], path: str, device: str) -> None:
    case = make(PREFILL, **geometry)
    verify(case, run(case, path, device))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("budget, ratio", [(512, 4), (2048, 8), (4096, 2)])
def test_budgets(budget: int, ratio: int, path: str, device: str) -> None:
    case = make(
        [[budget + 200, budget + 201]],
        group_size=2,
        num_kv_heads=1,
        ratio=ratio,
        topk=budget // ratio,
        keep=0.8,
    )
    verify(case, run(case, path, device, block=128))


@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_split_sizes(tiles: int, device: str) -> None:
    """Programs of one tile and of several; lists that end before, at and after a split's end."""
    case = make([[15, 16, 30, 31, 32, *range(62, 68)]], topk=16, group_size=2, num_kv_heads=1)
    tuning = RowsTuning(block_tokens=16, tiles=tiles, num_warps=4, num_stages=2, merge_dim=32)
    assert tuning.splits(case.problem) == 64 // (16 * tiles) + 1
    chain = plan_attend(case.problem, gate=False, tuning=tuning)
    results = launch.run(chain, {name: array.to(device) for name, array in case.arrays.items()})
    verify(case, {name: results[name].cpu() for name in ("out", "lse")})


@pytest.mark.parametrize("path", PATHS)
def test_gate_of_a_padding_row_may_be_nan(path: str, device: str) -> None:
    case = make([[20, 21], [-1], [30]], gate=True)
    case.arrays["gate"][2] = torch.nan
    results = run(case, path, device)
    assert not results["out"][2].any()
    case.arrays["gate"][2] = 0
    verify(case, results)


@pytest.mark.parametrize("path", PATHS)
def test_whole_selection_is_dense_attention(path: str, device: str) -> None:
    """Positions 26..32 with room for all groups: causal attention, by another oracle."""
    case = make([[*range(26, 33)]], topk=8, group_size=2)
    results = run(case, path, device)
    names = ("query", "key_cache", "value_cache", "page_table")
    dense = dict({name: numpy(case.arrays[name]) for name in names}, seq_lens=np.array([33]))
    exact, plain = (oracle.attention(**dense, q_len=7, dtype=t) for t in (np.float64, np.float32))
    check(numpy(results["out"]), exact[0], plain[0], "out")
    check(numpy(results["lse"]), exact[1], plain[1], "lse")


@pytest.mark.parametrize("path", PATHS)
def test_mask_by_one_hot_values(path: str, device: str) -> None:
    """q = 0 and V[token] one-hot at the token: the output is the mask over its size."""
    case = make([[63, 62, 50, 51, 52, 7, 2, 0]], topk=5, num_kv_heads=1)
    problem, arrays = case.fields()
    arrays["query"].zero_()
    values = torch.zeros(problem.num_pages * 16, 64)
    for token in range(64):
        page = int(arrays["page_table"][0, token // 16])
        values[page * 16 + token % 16, token] = 1
    arrays["value_cache"] = values.to(BF16).view_as(arrays["value_cache"])
    results = run(case, path, device)
    for row, count in enumerate(arrays["counts"].tolist()):
        mask = torch.zeros(64)
        mask[arrays["token_indices"][row, :count].long()] = 1 / count
        assert torch.equal(results["out"][row], mask.to(BF16).expand(3, 64)), row
        assert torch.allclose(results["lse"][row], torch.tensor(float(count)).log(), rtol=1e-6)


@pytest.mark.parametrize(
    "kv_dtype, path", [*((BF16, path) for path in PATHS), (E4M3, "tiles")], ids=str
)
def test_poison(kv_dtype: torch.dtype, path: str, device: str) -> None:
    """Slots that no row lists hold NaN, then Inf; so do columns past the count, as indices."""
    case = make([[37, 38], [-1], [0, 21, 22]], kv_dtype=kv_dtype, group_size=2, num_kv_heads=1)
    clean = run(case, path, device)
    used = sorted({slot for row in range(case.problem.num_rows) for slot in slots_of(case, row)})
    for poison, index in ((torch.nan, INT_MAX), (torch.inf, INT_MIN), (-torch.inf, 0)):
        poisoned = case.clone()
        for name in ("key_cache", "value_cache"):
            cache = case.arrays[name].float().flatten(0, 1)
            kept = cache[used]
            cache[:] = poison
            cache[used] = kept
            poisoned.arrays[name] = cache.to(kv_dtype).view_as(case.arrays[name])
        columns = torch.arange(case.problem.num_selected)
        tokens = poisoned.arrays["token_indices"]
        tokens[columns >= case.arrays["counts"][:, None]] = index
        results = run(poisoned, path, device)
        for name in ("out", "lse"):
            assert torch.equal(results[name], clean[name]), (name, poison)
    verify(case, clean)


@pytest.mark.parametrize("path", PATHS)
def test_invalid_entries_are_left_out(path: str, device: str) -> None:
    """Extreme and unmapped indices, lists in no order, cut lists, no lists."""
    case = make([[*range(100, 120)], [60, 61, 62]], topk=10, group_size=2, num_kv_heads=1)
    problem, arrays = case.fields()
    tokens, table = arrays["token_indices"], arrays["page_table"]
    bad = (INT_MIN, INT_MAX, -1, -2, problem.pages_per_seq * 16, INT_MAX - 3, 2**30)
    for column, token in enumerate(bad):
        tokens[0, 3 + 2 * column] = token
    tokens[1] = INT_MIN
    tokens[2, :4] = torch.arange(INT_MAX - 3, INT_MAX + 1, dtype=torch.int64).int()
    tokens[6] = tokens[6, torch.randperm(problem.num_selected)]
    arrays["counts"][6] = problem.num_selected
    for row, count in ((10, 0), (11, 1), (12, 7), (13, INT_MIN), (14, -1), (15, 16)):
        arrays["counts"][row] = count
    arrays["counts"][20] = INT_MAX
    table[0, 1], table[0, 2], table[0, 4] = -1, problem.num_pages, INT_MIN
    table[1, 0], table[1, 3] = INT_MAX, -7
    results = run(case, path, device)
    verify(case, results)
    for row in (1, 10, 13, 14):
        assert not results["out"][row].any() and torch.isneginf(results["lse"][row]).all()


@pytest.mark.parametrize("path", PATHS)
def test_order_of_entries_does_not_matter(path: str, device: str) -> None:
    case = make([[*range(72, 78)]])
    exact = expected(case, np.float64, [*range(6)])
    for row in (1, 5):
        count = int(case.arrays["counts"][row])
        order = torch.randperm(count)
        case.arrays["token_indices"][row, :count] = case.arrays["token_indices"][row, order]
    results = run(case, path, device)
    check(numpy(results["out"]), exact[0], expected(case, np.float32, [*range(6)])[0])


@pytest.mark.parametrize("path", PATHS)
def test_another_requests_nan_stays_there(path: str, device: str) -> None:
    case = make([[30, 31, 32], [33], [40, 41, 42]], group_size=2)
    clean = run(case, path, device)
    pages = case.arrays["page_table"][1].long()
    for name in ("key_cache", "value_cache"):
        case.arrays[name][pages] = torch.nan
    results = run(case, path, device)
    assert results["out"][3].isnan().all()
    others = [row for row in range(7) if row != 3]
    for name in ("out", "lse"):
        assert torch.equal(results[name][others], clean[name][others])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("keys", [1, 20, "mixed"])
def test_very_low_scores(keys: int | str, path: str, device: str) -> None:
    """q . k = -524288: a finite sentinel in place of -inf would win."""
    count = 24 if keys == "mixed" else int(keys)
    case = make([[count - 1]], head_dim=128, topk=6)
    arrays = case.arrays
    arrays["query"][:] = -64
    arrays["key_cache"][:] = 64
    if keys == "mixed":
        arrays["key_cache"][..., 0] += torch.randn(arrays["key_cache"].shape[:-1])
    else:
        arrays["value_cache"][:] = arrays["value_cache"][0, 0]
    results = run(case, path, device)
    verify(case, results)
    if keys == 1:
        value = arrays["value_cache"][0, 0, :, None].expand(2, 3, 128).reshape(6, 128)
        assert torch.equal(results["out"][0], value)
        np.testing.assert_allclose(results["lse"][0], -524288 * 128**-0.5, rtol=1e-6)


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize("topk", [2, 5, 17])
@pytest.mark.parametrize("tile_rows", [1, 5, 16])
def test_join_rows(tile_rows: int, topk: int, device: str) -> None:
    """Each row gets its own tokens back, and a run's groups come once. On a GPU many times: several
    warps hold the groups of short lists, and drift apart."""
    positions = [[*range(61, 70)], [-1], [0, 3, 5], [80], [*range(81, 90)]]
    case = make(positions * (100 if device == "cuda" else 1), topk=topk, keep=0.8)
    problem, arrays = case.fields()
    tuning = TilesTuning(
        tile_rows=tile_rows,
        block_vectors=64,
        block_tokens=16,
        num_warps=4,
        num_stages=3,
        max_union=100,
    )
    chain = plan_attend(problem, gate=False, tuning=tuning)
    results = launch.run(chain, {name: array.to(device) for name, array in arrays.items()})
    slots, words, header = (results[name].cpu() for name in ("slots", "words", "header"))
    requests = arrays["request_ids"].tolist()
    for tile, (*ends, rows, apart, tiles) in enumerate(header.tolist()):
        assert not apart and tiles == len(header)
        assert rows == min(tile_rows, problem.num_rows - tile * tile_rows)
        first = 0
        while first < rows:
            end = ends[tile_rows + first]
            inside = range(tile * tile_rows + first, tile * tile_rows + end)
            assert len({requests[row] for row in inside}) == 1
            begin = ends[first - 1] if first else 0
            entries = [
                (int(slots[tile, i]), int(words[tile, i])) for i in range(begin, ends[end - 1])
            ]
            whole = [slot for slot, word in entries if word >> 16 == problem.compress_ratio]
            assert len(whole) == len(set(whole))
            for row in inside:
                bit = 1 << (row - tile * tile_rows)
                got = [s + j for s, word in entries if word & bit for j in range(word >> 16)]
                assert sorted(got) == sorted(slots_of(case, row))
            first = end


@pytest.mark.parametrize("last", [1, 2])
@pytest.mark.parametrize("same", [True, False])
def test_rows_with_little_in_common_are_walked_singly(same: bool, last: int, device: str) -> None:
    """Rows of one request list the same groups, or none twice. The last tile is not full; a single
    row is walked as a tile."""
    case = make([[*range(124, 128 + last)]], topk=4, group_size=8, num_kv_heads=2)
    problem, arrays = case.fields()
    for row in range(4 + last):
        groups = [4, 5, 6, 30] if same else [*range(4 * row, 4 * row + 4)]
        tokens, count = listed(124 + row, groups, 4, problem.num_selected)
        arrays["token_indices"][row] = torch.tensor(tokens, dtype=torch.int32)
        arrays["counts"][row] = count
    tuning = replace(tiles_tuning(problem), tile_rows=4, block_vectors=32, block_tokens=16)
    chain = plan_attend(problem, gate=False, tuning=tuning)
    results = launch.run(chain, {name: array.to(device) for name, array in arrays.items()})
    header = results["header"].cpu()
    rows_apart_tiles = header[:, 2 * 4 : 2 * 4 + 3].tolist()
    assert rows_apart_tiles == [[4, int(not same), 2], [last, int(not same and last > 1), 2]]
    verify(case, {name: results[name].cpu() for name in ("out", "lse")})


def test_tuning_follows_classes() -> None:
    """A row more compiles nothing new, but at the bounds of a few classes."""
    base = make([[100]], num_kv_heads=2, topk=512, head_dim=256).problem
    problems = [replace(base, num_rows=rows) for rows in range(1, 300)]
    tunings = [rows_tuning(problem) for problem in problems]
    classes = [first for first, second in pairwise(tunings) if first != second]
    assert len(set(tunings)) == len(classes) + 1 == 14
    programs = [p.num_rows * 2 * t.splits(p) for p, t in zip(problems, tunings, strict=True)]
    assert max(programs[:33]) == 132
    assert max(programs[33:132]) == 264
    e4m3 = [replace(p, kv_dtype="float8_e4m3fn") for p in problems[:198]]
    programs = [p.num_rows * 2 * rows_tuning(p).splits(p) for p in e4m3]
    assert max(programs) == 396
    prefill = [replace(base, num_rows=rows) for rows in (1000, 1001)]
    constants = [[r.constants for r in plan_attend(p, gate=False)] for p in prefill]
    assert constants[0] == constants[1]


@pytest.mark.parametrize("num_rows", [1, 1000])
def test_too_many_tokens(num_rows: int) -> None:
    problem = replace(make([[100]]).problem, num_rows=num_rows, num_pages=2**27)
    with pytest.raises(NotImplementedError, match=r"key_cache must have fewer than 2\*\*31 tokens"):
        plan_attend(problem, gate=False)


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
def test_pages_past_2_to_the_31_elements(path: str) -> None:
    case = make([[*range(60, 66)]], num_kv_heads=8, group_size=1, head_dim=128, page_size=64)
    problem, arrays = case.fields()
    clean = run(case, path, "cuda")
    far = torch.tensor([[32767, 65590]], dtype=torch.int32)
    for name in ("key_cache", "value_cache"):
        cache = torch.empty(65600, 64, 8, 128, dtype=BF16, device="cuda")
        cache[far[0].long().cuda()] = arrays[name][arrays["page_table"][0].long()].cuda()
        arrays[name] = cache
    arrays["page_table"] = far
    results = run(Case(replace(problem, num_pages=65600), arrays), path, "cuda")
    assert torch.equal(results["out"], clean["out"])


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
def test_rows_past_65535(path: str) -> None:
    case = make([[*range(14)] * 5000], group_size=1, num_kv_heads=1, topk=2)
    results = run(case, path, "cuda")
    assert not results["out"].isnan().any()
    verify(case, results, [*range(65530, 65545), *range(69990, 70000)])


@pytest.mark.parametrize("capability, able", [((8, 0), False), ((9, 0), True), ((10, 3), True)])
@pytest.mark.parametrize("rows, kernels", [
    (1, ["attend:decode_split", "attend:merge"]),
    (300, ["attend_prefill:join_rows", "attend_prefill:attend_tiles",
           "attend_prefill:attend_rows"]),
])  # fmt: skip
def test_last_launch_overlaps_where_the_gpu_can(monkeypatch, rows, kernels, capability, able):
    """The last two kernels are compiled for it, and only the last one is launched early, in calls
    and warm-up."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    case = make([[*range(500, 500 + rows)]], topk=100)
    chain = plan_attend(case.problem, gate=False)
    assert [record.kernel for record in chain] == kernels
    launched, warmed = [], []

    class Kernel:
        device_caches: ClassVar[dict] = {}

        def __getitem__(self, grid):
            return lambda **options: launched.append(options)

        def warmup(self, grid, **options):
            warmed.append(options)
            return SimpleNamespace(run=None)

    monkeypatch.setattr(launch, "load", lambda name: Kernel())
    launch.run(chain, case.arrays)
    dtypes = {name: str(x.dtype).removeprefix("torch.") for name, x in case.arrays.items()}
    for wanted in launch.specializations(chain, dtypes):
        launch.compile_ahead(wanted)
    expected = [(able, False), (able, able)]
    for options in (launched, warmed):
        overlapping = [one for one in options if "OVERLAPS" in one]
        assert sorted((one["OVERLAPS"], one["launch_pdl"]) for one in overlapping) == expected
        assert len(options) == len(chain)
    assert (launched[-1]["OVERLAPS"], launched[-1]["launch_pdl"]) == (able, able)
