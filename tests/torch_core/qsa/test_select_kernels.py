"""The selection kernels, against plain NumPy.

Queries and keys are small integers: every score is then exact in any order of addition, and ties
are common.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from torch_core.qsa.launch import load, run
from torch_core.qsa.plan import Chain
from torch_core.qsa.plan_select import SelectTuning, plan_expand, plan_select
from torch_core.qsa.problem import QSAProblem

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
# Tiles so small that a short test has many of them, and the first search of top-k work to do.
SMALL = SelectTuning(
    chunk=4,
    capacity=8,
    few=16,
    decode_groups=16,
    decode_splits=3,
    prefill_rows=16,
    prefill_groups=16,
    prefill_warps=4,
    prefill_splits=2,
)
QWEN = dict(index_heads=4, index_dim=128, compress_ratio=4, topk=512, page_size=64, num_pages=9)
GARBAGE = {"float32": float("nan"), "int32": -77}


GUARD = 2048  # elements behind each array


def guarded(array: torch.Tensor, guard: float) -> torch.Tensor:
    """A copy at the start of a buffer that ends in `guard`."""
    size = array.numel()
    buffer = torch.full((size + GUARD,), guard, device=array.device).to(array.dtype)
    buffer[:size] = array.reshape(-1)
    return buffer[:size].view(array.shape)


def guard_of(array: torch.Tensor) -> torch.Tensor:
    return array.as_strided((GUARD,), (1,), array.numel())


def launch(chain: Chain, arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Launches a chain; outputs start as garbage, and nothing may be written behind them."""
    arrays, outputs = dict(arrays), []
    device = next(iter(arrays.values())).device
    for record in chain:
        aliased = {new: arrays[old.partition("=")[2] or old] for old, new in record.aliases}
        given = {}
        for name in record.inputs:
            parameter, _, array = name.partition("=")
            given[f"{parameter}_ptr"] = arrays[array or parameter]
        for name, shape, dtype in record.outputs:
            if name not in aliased:
                array = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                aliased[name] = guarded(array.fill_(GARBAGE[dtype]), GARBAGE[dtype])
                outputs.append(aliased[name])
            arrays[name] = given[f"{name}_ptr"] = aliased[name]
        load(record.kernel)[record.grid](
            **given,
            **dict(record.constants),
            num_warps=record.num_warps,
            num_stages=record.num_stages,
        )
    for array in outputs:
        value = torch.tensor(GARBAGE[str(array.dtype).removeprefix("torch.")], device=device)
        assert torch.equal(guard_of(array).nan_to_num(-77), value.nan_to_num(-77).expand(GUARD))
    return arrays


@dataclasses.dataclass
class Case:
    """Arrays of one step, and what its rows may see."""

    problem: QSAProblem
    arrays: dict[str, torch.Tensor]

    def select(self, workspace_bytes=2**28, *, tokens=False, tuning=SMALL):
        return launch(
            plan_select(self.problem, workspace_bytes, tokens=tokens, tuning=tuning), self.arrays
        )

    def expected(self, rows: Sequence[int]) -> np.ndarray:
        """Selected groups by a stable sort of exact scores."""
        problem, host = self.problem, {k: v.cpu() for k, v in self.arrays.items()}
        cache = host["compressed_cache"].double().numpy()[:, :, 0]
        query = host["index_query"].double().numpy()
        selected = np.full((len(rows), problem.topk), -1, np.int32)
        for at, row in enumerate(rows):
            request, visible = int(host["request_ids"][row]), int(host["visible"][row])
            if request < 0:
                continue
            groups, scores = [], []
            for group in range(visible):
                page = int(host["page_table"][request, group // problem.groups_per_page])
                if 0 <= page < problem.num_pages:
                    key = cache[page, group % problem.groups_per_page]
                    groups.append(group)
                    scores.append(np.maximum(query[row] @ key, 0).sum())
            best = np.argsort(-np.array(scores), kind="stable")[: problem.topk]
            best = sorted(groups[index] for index in best)
            selected[at, : len(best)] = best
        return selected

    def check(self, selected: torch.Tensor, rows: Sequence[int] | None = None) -> None:
        rows = range(self.problem.num_rows) if rows is None else rows
        np.testing.assert_array_equal(selected.cpu().numpy()[rows], self.expected(rows))


def make_case(
    positions: list[list[int]],
    *,
    num_decodes: int = 0,
    padding: int = 0,
    heads: int = 4,
    dim: int = 16,
    ratio: int = 4,
    page_size: int = 16,
    topk: int = 8,
    query_dtype: str = "bfloat16",
    index_dtype: str = "bfloat16",
    num_pages: int | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """A step of requests with rows at these positions, pages in random order, then padding rows."""
    random = np.random.default_rng(seed)
    rows = [(request, p) for request, given in enumerate(positions) for p in given]
    rows += [(-1, -1)] * padding
    pages_per_seq = max((p for _, p in rows), default=0) // page_size + 3
    num_pages = num_pages or len(positions) * pages_per_seq + 3
    problem = QSAProblem(
        num_rows=len(rows),
        num_requests=len(positions),
        index_heads=heads,
        index_dim=dim,
        compress_ratio=ratio,
        topk=topk,
        page_size=page_size,
        pages_per_seq=pages_per_seq,
        num_pages=num_pages,
        query_dtype=query_dtype,
        index_dtype=index_dtype,
        num_decodes=num_decodes,
        decode_query_len=len(positions[0]) if num_decodes else 1,
    )
    table = np.full((len(positions), pages_per_seq), INT_MAX, np.int64)
    free = iter(random.permutation(num_pages))
    for request, given in enumerate(positions):
        used = -(-(max(given) + 1) // page_size)
        table[request, :used] = [next(free) for _ in range(used)]
        table[request, used:] = random.choice([INT_MIN, -1, num_pages, INT_MAX])

    def integers(*shape):
        return torch.from_numpy(random.integers(-3, 4, shape)).float()

    positions_array = np.array([p for _, p in rows], np.int32)
    arrays = {
        "index_query": integers(len(rows), heads, dim).to(getattr(torch, query_dtype)),
        "compressed_cache": integers(num_pages, page_size // ratio, 1, dim).to(
            getattr(torch, index_dtype)
        ),
        "page_table": torch.from_numpy(table.astype(np.int32)),
        "request_ids": torch.tensor([r for r, _ in rows], dtype=torch.int32),
        "positions": torch.from_numpy(positions_array),
        "visible": torch.from_numpy((positions_array + 1) // ratio),
    }
    # Behind the rows: what would pass for rows that see all.
    hostile = {"request_ids": 0, "visible": problem.max_groups, "page_table": 0}
    return Case(
        problem,
        {
            name: guarded(array.to(device), hostile[name]) if name in hostile else array.to(device)
            for name, array in arrays.items()
        },
    )


def span(end: int, count: int) -> list[int]:
    return list(range(end - count, end))


# Visible 0, 1, topk - 1, topk, topk + 1, many, with topk 8 and ratio 4: a short row may leave
# nothing behind for the long one after it.
LENGTHS = [3, 7, 31, 35, 36, 39, 200, 5, 333]


@pytest.mark.parametrize("query_len", [1, 2, 3, 8])
def test_decode_lengths(query_len, device):
    positions = [span(max(n, query_len), query_len) for n in LENGTHS]
    case = make_case(positions, num_decodes=len(LENGTHS), device=device)
    case.check(case.select()["selected"])


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize(
    "options",
    [
        dict(heads=1, dim=24, ratio=2, page_size=16),
        dict(heads=2, dim=16, ratio=8, page_size=64, topk=7),
        dict(heads=3, dim=40, ratio=4, page_size=32, topk=1),
        dict(heads=5, dim=16, ratio=4, page_size=128, topk=12),
        dict(heads=6, dim=16, ratio=2, page_size=16),
        dict(heads=7, dim=16, ratio=4, page_size=16),
        dict(heads=8, dim=32, ratio=8, page_size=16),
        dict(heads=4, dim=32, index_dtype="float8_e4m3fn"),
        dict(heads=4, dim=16, query_dtype="float16", index_dtype="float16"),
        dict(heads=2, dim=16, query_dtype="float16", index_dtype="float8_e4m3fn"),
        dict(heads=4, dim=16, query_dtype="float32", index_dtype="float32"),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_sizes(phase, options, device):
    options = {"topk": 8, **options}
    tuning = dataclasses.replace(SMALL, capacity=8 if options["topk"] <= 8 else 16)
    decode = phase == "decode"
    positions = [span(n, 2) for n in (150, 30, 163)] if decode else [span(50, 3), span(163, 15)]
    case = make_case(positions, num_decodes=3 if decode else 0, device=device, **options)
    case.check(case.select(tuning=tuning)["selected"])


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize("workspace_bytes", [2**28, 6000, 1])
def test_mixed_batch(workspace_bytes, device):
    """Decode rows, a chunk of a long prompt, prompts of a few rows in one tile, padding rows; the
    result does not depend on the workspace."""
    positions = [span(140, 2), span(36, 2), span(170, 18), span(2, 2), [97], span(41, 9)]
    case = make_case(positions, num_decodes=2, padding=3, device=device)
    arrays = case.select(workspace_bytes, tokens=True)
    case.check(arrays["selected"])
    expanded = launch(plan_expand(case.problem), {**case.arrays, "selected": arrays["selected"]})
    for name in ("token_indices", "counts"):
        assert torch.equal(arrays[name], expanded[name])


def test_default_tuning(device):
    """The tiles that the plan itself chooses."""
    case = make_case([span(300, 2), span(620, 2)], num_decodes=1, topk=33, device=device)
    case.check(case.select(tuning=None)["selected"])


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("sign", [0, -1])
def test_all_scores_zero(phase, sign, device):
    """600 visible groups of score 0, by a zero query or by negative products: the lowest 512."""
    case = make_case(
        [[2399]],
        num_decodes=phase == "decode",
        topk=512,
        page_size=64,
        heads=2,
        device=device,
    )
    case.arrays["index_query"].fill_(sign)
    case.arrays["compressed_cache"].abs_()
    arrays = case.select(tokens=True, tuning=dataclasses.replace(SMALL, capacity=512, few=512))
    assert arrays["selected"][0].tolist() == list(range(512))
    assert arrays["token_indices"][0].tolist() == [*range(2048), -1, -1, -1]
    assert arrays["counts"].tolist() == [2048]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e4])
def test_poison(poison, device):
    """Nothing but visible groups of mapped pages is read: same bits with the rest poisoned."""
    positions = [span(90, 2), span(33, 2), span(75, 4), span(39, 9)]
    case = make_case(positions, num_decodes=2, padding=2, device=device)
    plain = case.select(tokens=True)
    cache = case.arrays["compressed_cache"]
    read = torch.zeros(cache.shape[:2], dtype=torch.bool, device=device)
    for request, given in enumerate(positions):
        for group in range((given[-1] + 1) // 4):
            read[int(case.arrays["page_table"][request, group // 4]), group % 4] = True
    cache[~read] = poison
    case.arrays["index_query"][-2:] = poison
    poisoned = case.select(tokens=True)
    case.check(plain["selected"])
    for name in ("selected", "token_indices", "counts"):
        assert torch.equal(plain[name], poisoned[name])


@pytest.mark.parametrize("page", [-1, INT_MIN, INT_MAX, "num_pages"])
def test_unmapped_pages(page, device):
    """An unmapped page among the visible ones gives no candidates, in short and long rows."""
    case = make_case([[130], [34], [40]], num_decodes=1, device=device)
    page = case.problem.num_pages if page == "num_pages" else page
    case.arrays["page_table"][:, 1] = page
    case.check(case.select()["selected"])


def test_fewer_mapped_than_topk(device):
    case = make_case([[130], [99]], num_decodes=1, device=device)
    case.arrays["page_table"][:, 1:] = -1
    arrays = case.select()
    assert arrays["selected"].tolist() == [[0, 1, 2, 3, -1, -1, -1, -1]] * 2


@pytest.mark.parametrize("num_decodes", [0, 2])
@pytest.mark.parametrize("mapped", [(0, 24), (5, 9, 11), (24,)])
def test_fewer_mapped_chunks_than_topk(num_decodes, mapped, device):
    """Long rows in which fewer than topk chunks have a score: no bound of theirs is one for
    scores."""
    case = make_case([[399], [399]], num_decodes=num_decodes, topk=8, seed=1, device=device)
    pages = torch.arange(case.arrays["page_table"].shape[1])
    case.arrays["page_table"][:, ~torch.isin(pages, torch.tensor(mapped))] = -1
    case.check(case.select()["selected"])


def test_visible_past_the_page_table(device):
    case = make_case([[130], [150]], num_decodes=1, device=device)
    case.arrays["visible"][:] = torch.tensor([INT_MAX, INT_MIN])
    arrays = case.select()
    case.arrays["visible"][:] = torch.tensor([case.problem.max_groups, 0])
    case.check(arrays["selected"])


@pytest.mark.parametrize(
    ("visible", "few", "shape"),
    [
        (61, 8, "given"),
        (40, 16, "reversed"),
        (60, 8, "reversed"),
        (33, 16, "given"),
        (61, 32, "reversed"),
    ],
)
@pytest.mark.parametrize(
    "kind",
    [
        "equal",
        "two",
        "exponential",
        "denormal",
        "inf",
        "negative",
        "zeros",
        "step",
        "one page",
        "extremes",
    ],
)
def test_search(kind, visible, few, shape, device):
    """The top-k kernel on scores that are hard for a search: any float32 but NaN is ranked."""
    tuning = dataclasses.replace(SMALL, few=few)
    problem = make_case([[255]], num_decodes=1).problem
    chain = plan_select(problem, tuning=tuning)
    assert [record.kernel for record in chain] == ["score:score_decode", "topk:select_rows"]
    _, (_, width), _ = chain[0].outputs[0]
    index = np.arange(width, dtype=np.float32)
    random = np.random.default_rng(1)
    scores = {
        "equal": np.full(width, 1.5),
        "two": np.where(random.random(width) < 0.1, 2.0, np.nextafter(np.float32(2), 1)),
        "exponential": 2.0 ** (np.minimum(index, 60) * 3 - 60),
        "denormal": index * 1e-45,
        "inf": np.where(index % 9 == 2, np.inf, 1e30 * index),
        "negative": -index - 1,
        "zeros": np.where(index % 13 == 5, index, np.where(index % 2 == 0, 0.0, -0.0)),
        "step": np.where((index >= 20) & (index < 26), 3e38, 1e-30),
        "extremes": np.where(index % 3 == 0, -3e38, np.where(index % 11 == 4, np.inf, index)),
        "one page": np.where((index >= 16) & (index < 36), 100 + index % 3, index % 2),
    }[kind].astype(np.float32)
    scores = scores[::-1].copy() if shape == "reversed" else scores
    scores[visible:] = np.nan
    chunks = np.where(np.isnan(scores), -np.inf, scores).reshape(-1, 4)
    arrays = {
        "scores": torch.from_numpy(scores[None]).to(device),
        "maxima": torch.from_numpy(chunks.max(1)[None]).to(device),
        "page_table": torch.zeros(1, problem.pages_per_seq, dtype=torch.int32, device=device),
        "request_ids": torch.zeros(1, dtype=torch.int32, device=device),
        "visible": torch.tensor([visible], dtype=torch.int32, device=device),
    }
    arrays["maxima"][:, -(-visible // 4) :] = float("nan")
    selected = launch(chain[1:], arrays)["selected"][0].tolist()
    best = np.argsort(-(scores[:visible] + np.float32(0)), kind="stable")[:8]
    assert selected == sorted(best.tolist())


def test_scores_that_are_not_numbers_rank_lowest(device):
    problem = make_case([[255]], num_decodes=1).problem
    record = plan_select(problem, tuning=SMALL)[1]
    scores = torch.full((1, 96), float("nan"), device=device)
    scores[0, 40:45] = torch.tensor([0.0, 1.0, float("nan"), -1.0, float("-inf")])
    arrays = {
        "scores": scores,
        "maxima": scores.view(1, -1, 4).nan_to_num(float("-inf")).amax(2),
        "page_table": torch.zeros(1, problem.pages_per_seq, dtype=torch.int32, device=device),
        "request_ids": torch.zeros(1, dtype=torch.int32, device=device),
        "visible": torch.tensor([60], dtype=torch.int32, device=device),
    }
    selected = launch((record,), arrays)["selected"][0].tolist()
    assert selected == [40, 41, 43, -1, -1, -1, -1, -1]


def test_expand_by_hand(device):
    problem = QSAProblem(
        num_rows=5, num_requests=1, compress_ratio=4, topk=3, page_size=4, pages_per_seq=9,
        num_pages=9,
    )  # fmt: skip
    selected = [[0, 2, 5], [1, -1, -1], [-1, -1, -1], [-1, -1, -1], [4, 1, -1]]
    arrays = {
        "selected": torch.tensor(selected, dtype=torch.int32, device=device),
        "positions": torch.tensor([25, 7, 2, -1, INT_MAX], dtype=torch.int32, device=device),
    }
    expanded = launch(plan_expand(problem), arrays)
    none = [-1] * 15
    assert expanded["token_indices"].tolist() == [
        [0, 1, 2, 3, 8, 9, 10, 11, 20, 21, 22, 23, 24, 25, -1],
        [4, 5, 6, 7, *none[4:]],
        [0, 1, 2, *none[3:]],
        none,
        [16, 17, 18, 19, 4, 5, 6, 7, *none[8:]],
    ]
    assert expanded["counts"].tolist() == [14, 4, 3, 0, 8]


@pytest.mark.parametrize(("ratio", "topk"), [(2, 5), (8, 3), (4, 300)])
def test_expand_counts(ratio, topk, device):
    """Every length of the tail, columns in more than one block."""
    rows = 2 * ratio
    problem = QSAProblem(
        num_rows=rows, num_requests=1, compress_ratio=ratio, topk=topk, page_size=16,
        pages_per_seq=999, num_pages=999,
    )  # fmt: skip
    selected = np.full((rows, topk), -1, np.int32)
    for row in range(rows):
        count = min(row, topk)
        selected[row, :count] = 2 * np.arange(count)
    positions = np.arange(rows, dtype=np.int32) + 2 * topk * ratio
    arrays = {"selected": torch.from_numpy(selected), "positions": torch.from_numpy(positions)}
    expanded = launch(plan_expand(problem), {k: v.to(device) for k, v in arrays.items()})
    for row in range(rows):
        tokens = [g * ratio + i for g in selected[row] if g >= 0 for i in range(ratio)]
        end = int(positions[row]) + 1
        tokens += range(end // ratio * ratio, end)
        line = expanded["token_indices"][row].tolist()
        assert line == tokens + [-1] * (topk * ratio + ratio - 1 - len(tokens))
        assert int(expanded["counts"][row]) == len(tokens)


def _random_case(rows: int, tokens: int, device: str) -> Case:
    """Decoding requests of real sizes, with scores whose order rounding may change."""
    problem = QSAProblem(
        num_rows=rows, num_requests=rows, num_decodes=rows, pages_per_seq=tokens // 64,
        **{**QWEN, "num_pages": rows * tokens // 64},
    )  # fmt: skip
    random = torch.Generator(device).manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=random, device=device, dtype=torch.bfloat16)

    table = torch.randperm(problem.num_pages, generator=random, device=device)
    visible = torch.arange(rows, device=device) * 37 % (tokens // 8) + tokens // 8 + 1
    arrays = {
        "index_query": normal(rows, 4, 128),
        "compressed_cache": normal(problem.num_pages, 16, 1, 128),
        "page_table": table.view(rows, -1).int(),
        "request_ids": torch.arange(rows, device=device).int(),
        "positions": (visible * 4).int(),
        "visible": visible.int(),
    }
    return Case(problem, arrays)


@pytest.mark.gpu
def test_repeats_and_batch_slots():
    """Equal bits in 20 repeats, and in every slot of the batch; no group twice."""
    case = _random_case(8, 65536, "cuda")
    first = case.select(tuning=None)["selected"]
    for _ in range(20):
        assert torch.equal(case.select(tuning=None)["selected"], first)
    for name in ("index_query", "page_table", "visible", "positions"):
        case.arrays[name] = case.arrays[name].flip(0).contiguous()
    assert torch.equal(case.select(tuning=None)["selected"].flip(0), first)
    assert (first.diff(dim=1) > 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_real_sizes(phase):
    """The scores of the selected groups are the highest that the kernel itself wrote, and those are
    right."""
    case = _random_case(4, 131072, "cuda")
    if phase == "prefill":
        case.problem = dataclasses.replace(case.problem, num_decodes=0)
    arrays = case.select(tuning=None)
    for row in range(4):
        visible = int(case.arrays["visible"][row])
        keys = case.arrays["compressed_cache"][case.arrays["page_table"][row].long()]
        keys = keys.reshape(-1, 128)[:visible].double()
        exact = (case.arrays["index_query"][row].double() @ keys.T).relu().sum(0)
        scores = arrays["scores"][row, :visible]
        torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-4)
        order = torch.argsort(scores, descending=True, stable=True)[:512]
        assert torch.equal(arrays["selected"][row].long(), order.sort().values)


@pytest.mark.gpu
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("ties", [False, True], ids=["reals", "ties"])
def test_2048_of_262144_groups(ties, phase):
    """As a stable sort of the kernel's scores; exact ones are whole numbers, often equal."""
    case = _random_case(4, 2**20, "cuda")
    case.problem = dataclasses.replace(
        case.problem, topk=2048, num_decodes=4 if phase == "decode" else 0
    )
    visible = [262_144, 262_143, 131_077, 2049]
    case.arrays["visible"] = torch.tensor(visible, dtype=torch.int32, device="cuda")
    if ties:
        for name in ("index_query", "compressed_cache"):
            case.arrays[name].round_()
    arrays = case.select(tuning=None)
    for row, count in enumerate(visible):
        pages = case.arrays["page_table"][row].long()
        keys = case.arrays["compressed_cache"][pages].reshape(-1, 128)[:count].double()
        exact = (case.arrays["index_query"][row].double() @ keys.T).relu().sum(0)
        scores = arrays["scores"][row, :count]
        if ties:
            assert torch.equal(scores.double(), exact)
        else:
            torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-4)
        order = torch.argsort(scores, descending=True, stable=True)[:2048]
        assert torch.equal(arrays["selected"][row].long(), order.sort().values)


@pytest.mark.gpu
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(
    "index_dtype, elements", [("bfloat16", 2**31), ("float8_e4m3fn", 2**32)], ids=str
)
def test_caches_past_2_to_the_31_elements(index_dtype, elements, phase):
    """Pages on both sides of that element give what they give at the start of a cache."""
    case = make_case(
        [span(900, 2), span(150, 2), span(1203, 2)], num_decodes=3 if phase == "decode" else 0,
        dim=128, page_size=64, topk=33, index_dtype=index_dtype, device="cuda",
    )  # fmt: skip
    near = case.select(tokens=True, tuning=None)
    case.check(near["selected"])
    cache, table = case.arrays["compressed_cache"], case.arrays["page_table"]
    num_pages, middle = len(cache), elements // cache[0].numel()
    first = middle - num_pages // 2
    far = torch.empty(first + num_pages, *cache.shape[1:], dtype=cache.dtype, device="cuda")
    far.view(torch.uint8)[first:] = cache.view(torch.uint8)
    mapped = (table >= 0) & (table < num_pages)
    table[mapped] += first
    assert (table[mapped] < middle).any() and (table[mapped] >= middle).any()
    case.arrays["compressed_cache"] = far
    case.problem = dataclasses.replace(case.problem, num_pages=len(far))
    results = case.select(tokens=True, tuning=None)
    for name in ("selected", "token_indices", "counts"):
        assert torch.equal(results[name], near[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_rows_past_65535(phase):
    decode = phase == "decode"
    positions = [[40 + i % 14] for i in range(70_000)] if decode else [[*range(40, 54)] * 5000]
    case = make_case(positions, num_decodes=70_000 if decode else 0, device="cuda")
    arrays = case.select(tokens=True, tuning=None)
    case.check(arrays["selected"], [*range(65_530, 65_545), *range(69_990, 70_000)])
    expanded = launch(plan_expand(case.problem), {**case.arrays, "selected": arrays["selected"]})
    for name in ("token_indices", "counts"):
        assert torch.equal(arrays[name], expanded[name])


@pytest.mark.gpu
def test_decode_and_prefill_agree():
    """Bit for bit the same scores, so the same selections, whichever path a row takes."""
    case = _random_case(4, 32768, "cuda")
    decode = case.select(tuning=None)
    case.problem = dataclasses.replace(case.problem, num_decodes=0)
    prefill = case.select(tuning=None)
    assert torch.equal(decode["selected"], prefill["selected"])


@pytest.mark.gpu
def test_peak_memory():
    """4096 rows over 262,144 tokens: no more extra memory than the stated workspace."""
    rows, budget = 4096, 2**26
    problem = QSAProblem(
        num_rows=rows, num_requests=1, pages_per_seq=4096, **{**QWEN, "num_pages": 4096}
    )
    arrays = {
        "index_query": torch.randn(rows, 4, 128, device="cuda").bfloat16(),
        "compressed_cache": torch.randn(4096, 16, 1, 128, device="cuda").bfloat16(),
        "page_table": torch.arange(4096, device="cuda", dtype=torch.int32)[None],
        "request_ids": torch.zeros(rows, dtype=torch.int32, device="cuda"),
        "visible": torch.full((rows,), 65536, dtype=torch.int32, device="cuda"),
    }
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    selected = run(plan_select(problem, budget), arrays)["selected"]
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= budget + selected.numel() * 4 + 2**20
