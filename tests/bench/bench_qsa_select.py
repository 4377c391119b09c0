"""Times QSA's selection on a GPU, kernel by kernel and as a chain, for variants of its tuning.

    python tests/bench/bench_qsa_select.py [check] [decode] [topk] [prefill] [others]

Every variant is compiled ahead, in parallel; results are checked before they are timed. Times are
medians of CUDA graphs that rotate over caches larger than the L2. Counts: TB/s from the keys read;
TFLOP/s (TF/s) from rows * groups * heads * dim * 2. What has not begun after QSA_BENCH_SECONDS
(170) is skipped.
Needs torch and triton alone: the package's own imports are stepped around.
"""

import dataclasses
import functools
import os
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path

import timing
import torch

ROOT = Path(__file__).resolve().parents[2]
for _name in ("torch_core", "torch_core.qsa"):
    _module = types.ModuleType(_name)
    _module.__path__ = [str(ROOT / _name.replace(".", "/"))]
    sys.modules[_name] = _module
sys.path.insert(0, str(ROOT))

from torch_core.qsa import launch  # noqa: E402
from torch_core.qsa.plan import Chain  # noqa: E402
from torch_core.qsa.plan_select import SelectTuning, plan_expand, plan_select  # noqa: E402
from torch_core.qsa.problem import QSAProblem  # noqa: E402

DEADLINE = time.monotonic() + float(os.environ.get("QSA_BENCH_SECONDS", 170))
WORKERS = 14
L2_BYTES = 60e6
QWEN = dict(index_heads=4, index_dim=128, compress_ratio=4, topk=512, page_size=64)
INTEGERS = ("page_table", "request_ids", "visible", "positions", "selected")
TABLE: list[str] = []
Step = Callable[[], object]


def bind(chain: Chain, arrays: dict[str, torch.Tensor]) -> tuple[list[Step], dict]:
    """The launches of a chain on these arrays, with outputs allocated once; and all arrays."""
    steps = []
    for record in chain:
        given = arrays
        arrays = launch.run((record,), given)
        memory = {name: arrays[name] for name, _, _ in record.outputs}
        steps.append(functools.partial(launch.run, (record,), given, memory))
    return steps, arrays


def run(chain: Chain, arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    arrays = launch.run(chain, arrays)
    torch.cuda.synchronize()
    return arrays


def graph_us(steps: list[Step], per: int, repeats: int = 25) -> float:
    """Median time of `steps` in one CUDA graph, divided by `per`, in us."""
    return timing.graph_us(steps, repeats) * len(steps) / per


def report(line: str) -> None:
    TABLE.append(line)
    print(line, flush=True)


def attempt(label: str, call: Callable[[], str]) -> None:
    """One line of the table; an error is one, too."""
    if time.monotonic() > DEADLINE:
        report(f"{label:58s} skipped: out of time")
        return
    try:
        report(f"{label:58s} {call()}")
    except Exception as error:
        traceback.print_exc()
        report(f"{label:58s} FAILED {type(error).__name__}: {str(error).splitlines()[-1][:120]}")
        # What a failing launch left behind must not fail the next one unseen.
        torch.cuda.synchronize()


@dataclasses.dataclass
class Work:
    """Sets of inputs of one problem, together larger than the L2 cache."""

    problem: QSAProblem
    sets: list[dict[str, torch.Tensor]]

    @property
    def key_bytes(self) -> float:
        visible = self.sets[0]["visible"].view(-1)[:: self.problem.decode_query_len]
        return float(visible.sum()) * self.problem.index_dim * self.sets[0]["item"].item()


def decode_problem(
    requests: int,
    tokens: int,
    *,
    query_len: int = 1,
    table_tokens: int | None = None,
    index_dtype: str = "bfloat16",
) -> QSAProblem:
    return QSAProblem(
        num_rows=requests * query_len, num_requests=requests, num_decodes=requests,
        decode_query_len=query_len, pages_per_seq=(table_tokens or tokens) // 64,
        num_pages=requests * tokens // 64, index_dtype=index_dtype, **QWEN,
    )  # fmt: skip


def decode_work(
    problem: QSAProblem, *, ragged: bool = False, ordered: bool = False, most: int = 16
) -> Work:
    requests, query_len = problem.num_requests, problem.decode_query_len
    pages = problem.num_pages // requests
    size = problem.num_pages * 16 * 128 * (1 if problem.index_dtype.startswith("float8") else 2)
    count = min(max(2, int(2.5 * L2_BYTES / size) + 1), most)
    ends = torch.full((requests,), pages * 64 - 1, device="cuda")
    if ragged:
        ends = ends // torch.arange(1, requests + 1, device="cuda")
    positions = (ends[:, None] - torch.arange(query_len, device="cuda").flip(0)).view(-1)
    sets = []
    for _ in range(count):
        shape = (requests, problem.pages_per_seq)
        table = torch.full(shape, -1, dtype=torch.int32, device="cuda")
        order = torch.arange(problem.num_pages, device="cuda").int()
        if not ordered:
            order = order[torch.randperm(problem.num_pages, device="cuda")]
        table[:, :pages] = order.view(requests, pages)
        sets.append(_arrays(problem, table, positions, query_len))
    return Work(problem, sets)


def _arrays(problem, table, positions, query_len):
    rows = len(positions)
    cache = torch.empty(problem.num_pages, 16, 1, 128, device="cuda", dtype=torch.bfloat16)
    cache = cache.normal_().to(getattr(torch, problem.index_dtype))
    return {
        "index_query": torch.randn(rows, 4, 128, device="cuda").bfloat16(),
        "compressed_cache": cache,
        "page_table": table,
        "request_ids": (torch.arange(rows, device="cuda") // query_len).int(),
        "positions": positions.int(),
        "visible": ((positions + 1) // 4).int(),
        "item": torch.tensor(cache.element_size()),
    }


def prefill_problem(rows: int, tokens: int, requests: int = 1) -> QSAProblem:
    pages = tokens // 64
    return QSAProblem(
        num_rows=rows, num_requests=requests, pages_per_seq=pages, num_pages=requests * pages,
        **QWEN,
    )  # fmt: skip


def prefill_work(problem: QSAProblem) -> Work:
    requests, tokens = problem.num_requests, problem.pages_per_seq * 64
    order = torch.randperm(problem.num_pages, device="cuda").int().view(requests, -1)
    each = problem.num_rows // requests
    positions = torch.arange(tokens - each, tokens, device="cuda").repeat(requests)
    return Work(problem, [_arrays(problem, order, positions, each)])


def check_rows(work: Work, tuning: SelectTuning | None = None, rows: int = 6) -> str:
    """Scores against float64, selections against a stable sort of the kernel's own scores, tokens
    against the expand kernel."""
    problem, arrays = work.problem, work.sets[0]
    done = run(plan_select(problem, 2**30, tokens=True, tuning=tuning), arrays)
    worst = 0.0
    picked = torch.linspace(0, problem.num_rows - 1, rows).long().unique().tolist()
    for row in picked:
        visible = int(arrays["visible"][row])
        request = int(arrays["request_ids"][row])
        used = arrays["page_table"][request, : -(-visible // 16)].long()
        keys = arrays["compressed_cache"].view(torch.uint8).view(problem.num_pages, -1)[used]
        keys = keys.view(arrays["compressed_cache"].dtype).view(-1, 128)[:visible]
        exact = (arrays["index_query"][row].double() @ keys.double().T).relu().sum(0)
        scores = done["scores"][row, :visible]
        worst = max(worst, float((scores.double() - exact).abs().max() / exact.abs().max()))
        order = torch.argsort(scores, descending=True, stable=True)[: problem.topk]
        expected = order.sort().values.int()
        assert torch.equal(done["selected"][row, : len(expected)], expected), f"row {row}"
        exact_values = exact.topk(len(expected)).values
        chosen_values = exact[expected.long()].sort(descending=True).values
        assert torch.allclose(chosen_values, exact_values, rtol=1e-4), f"row {row}: values"
    assert worst < 1e-5, f"scores are off by {worst:.2g}"
    expanded = run(plan_expand(problem), {**arrays, "selected": done["selected"]})
    for name in ("token_indices", "counts"):
        assert torch.equal(done[name], expanded[name]), name
    for _ in range(3):
        again = run(plan_select(problem, 2**30, tokens=True, tuning=tuning), arrays)
        assert torch.equal(again["token_indices"], done["token_indices"]), "not deterministic"
    return f"right ({len(picked)} rows, scores within {worst:.1e})"


def check_chunks() -> str:
    """The result does not depend on the workspace."""
    problem, size = CHUNKS
    arrays = prefill_work(problem).sets[0]
    chain = plan_select(problem, size)
    assert torch.equal(
        run(chain, arrays)["selected"], run(plan_select(problem), arrays)["selected"]
    )
    return f"same selections in {len(chain) // 2} chunks"


def check_agreement(problem: QSAProblem) -> str:
    """The decode and prefill kernels give the same bits."""
    work = decode_work(problem, most=1)
    decode = run(plan_select(problem), work.sets[0])
    prefill = run(plan_select(dataclasses.replace(problem, num_decodes=0)), work.sets[0])
    visible = int(work.sets[0]["visible"][0])
    same = torch.equal(decode["scores"][:, :visible], prefill["scores"][:, :visible])
    assert torch.equal(decode["selected"], prefill["selected"]), "selections differ"
    return f"decode and prefill scores have the same bits: {same}"


def parts_of(work: Work, tuning: SelectTuning | None) -> str:
    """Times of each kernel alone and of the chain."""
    bound = [bind(plan_select(work.problem, tokens=True, tuning=tuning), a)[0] for a in work.sets]
    count = len(bound)
    times = [graph_us([steps[i] for steps in bound], count) for i in range(len(bound[0]))]
    chain = graph_us([step for steps in bound for step in steps], count)
    rate = work.key_bytes / times[0] / 1e6
    line = f"chain {chain:7.1f} us; alone {' + '.join(f'{t:.1f}' for t in times)}"
    return f"{line}; score {rate:.2f} TB/s"


def score_us(work: Work, tuning: SelectTuning) -> str:
    bound = [bind(plan_select(work.problem, tokens=True, tuning=tuning)[:1], a) for a in work.sets]
    time_us = graph_us([steps[0] for steps, _ in bound], len(bound))
    return f"score {time_us:7.1f} us  {work.key_bytes / time_us / 1e6:.2f} TB/s"


def scoring(groups: int, warps: int, splits: int) -> dict[str, int]:
    return dict(decode_groups=groups, decode_warps=warps, decode_splits=splits)


GOALS = {"32 x 131072": (32, 131072), "8 x 131072": (8, 131072), "1 x 131072": (1, 131072)}
SCORE_VARIANTS = {
    "32 x 131072": [(64, 4, 512), (64, 4, 128), (64, 2, 512), (128, 4, 256), (32, 2, 1024)],
    "8 x 131072": [(64, 4, 512), (64, 4, 128), (64, 2, 512), (128, 4, 256), (32, 2, 1024)],
    "1 x 131072": [(64, 4, 256), (64, 2, 512), (128, 4, 256), (32, 2, 1024)],
}
OTHERS = {
    "8 x 131072, 4 rows each": dict(requests=8, tokens=131072, query_len=4),
    "32 x 131072 e4m3": dict(requests=32, tokens=131072, index_dtype="float8_e4m3fn"),
    "32 x 8192": dict(requests=32, tokens=8192),
    "8 x 32768, table of 1M": dict(requests=8, tokens=32768, table_tokens=2**20),
    "1 x 1048576": dict(requests=1, tokens=2**20),
}
RAGGED_VARIANTS = [(64, 4, 512), (128, 4, 256)]
TOPK_VARIANTS = [
    dict(),
    dict(few=2048),
    dict(chunk=16, capacity=512),
]
PREFILL_VARIANTS = [
    dict(),
    dict(prefill_groups=64),
    dict(prefill_splits=8),
    dict(capacity=1024),
    dict(prefill_topk_warps=8),
]
PREFILL_MEGABYTES = (512, 128, 64)
PREFILL = (4096, 65536)


def label_of(variant: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in variant.items()) or "default"


def bench_decode() -> None:
    for name, sizes in GOALS.items():
        work = decode_work(decode_problem(*sizes))
        attempt(f"decode {name}", lambda w=work: parts_of(w, None))
        for variant in SCORE_VARIANTS[name]:
            tuning = SelectTuning(**scoring(*variant))
            label = f"  {name} groups/warps/splits {'/'.join(map(str, variant))}"
            attempt(label, lambda w=work, t=tuning: score_us(w, t))
        if name == "32 x 131072":
            ordered = decode_work(work.problem, ordered=True)
            attempt(f"  {name}, pages in order", lambda w=ordered: score_us(w, SelectTuning()))
            del ordered


def bench_others() -> None:
    """Decoding at other sizes, ragged lengths, prefill in other workspaces."""
    for name, options in OTHERS.items():
        call = functools.partial(decode_problem, **options)
        attempt(f"decode {name}", lambda c=call: parts_of(decode_work(c()), None))
    work = decode_work(decode_problem(*GOALS["32 x 131072"]), ragged=True)
    attempt("decode 32 x up to 131072, ragged", lambda: parts_of(work, None))
    for variant in RAGGED_VARIANTS:
        tuning = SelectTuning(**scoring(*variant))
        label = f"  ragged groups/warps/splits {'/'.join(map(str, variant))}"
        attempt(label, lambda t=tuning: score_us(work, t))
    short = prefill_work(prefill_problem(*SHORT))
    attempt(
        "prefill 64 requests of 64 rows over 2560",
        lambda: f"chain {_chain_us(short, plan_select(short.problem, tokens=True))} us",
    )


def _chain_us(work: Work, chain: Chain) -> str:
    return f"{graph_us(bind(chain, work.sets[0])[0], 1, 7):6.0f}"


def bench_topk() -> None:
    """Variants of top-k with expand, on scores of several kinds, 32 and 1 rows of 32768 groups."""
    problem = decode_problem(*GOALS["32 x 131072"])
    rows, groups = 32, 32768
    kinds = {
        "relu sums": torch.randn(rows, groups, 4, device="cuda").relu().sum(2),
        "walk": torch.randn(rows, groups, device="cuda").cumsum(1).relu(),
        "400 above 0": torch.randn(rows, groups, device="cuda").sub(2.25).relu(),
        "all equal": torch.ones(rows, groups, device="cuda"),
        "8 values": torch.randint(8, (rows, groups), device="cuda").float(),
    }
    arrays = decode_work(problem, most=1).sets[0]
    report(f"topk columns: {', '.join(kinds)}; one row of relu sums")
    for variant in TOPK_VARIANTS:

        def call(variant=variant):
            record = plan_select(problem, tokens=True, tuning=SelectTuning(**variant))[1]
            chunk = dict(record.constants)["CHUNK"]
            parts = []
            for scores in kinds.values():
                given = {**arrays, "scores": scores}
                given["maxima"] = scores.view(rows, -1, chunk).amax(2)
                done = run((record,), given)
                order = torch.argsort(scores, dim=1, descending=True, stable=True)[:, :512]
                assert torch.equal(done["selected"], order.sort(1).values.int())
                parts.append(graph_us(bind((record,), given)[0] * 16, 16))
            small = dataclasses.replace(record, grid=(1,))
            given |= {"scores": kinds["relu sums"]}
            given["maxima"] = given["scores"].view(rows, -1, chunk).amax(2)
            parts.append(graph_us(bind((small,), given)[0] * 16, 16))
            return " ".join(f"{t:6.1f}" for t in parts) + " us"

        attempt(f"  topk {label_of(variant)}", call)


def bench_prefill() -> None:
    work = prefill_work(prefill_problem(*PREFILL))
    flops = float(work.sets[0]["visible"].sum()) * 4 * 128 * 2
    for variant in PREFILL_VARIANTS:

        def call(variant=variant):
            chain = plan_select(work.problem, tokens=True, tuning=SelectTuning(**variant))
            steps, _ = bind(chain, work.sets[0])
            names = [record.kernel.split(":")[1] for record in chain]
            # Of the whole chain first: a kernel alone reads where its rows start from the memory
            # that the one before it in the chain left.
            whole = graph_us(steps, 1, 7)
            alone = {
                name: graph_us([s for s, n in zip(steps, names, strict=True) if n == name], 1, 7)
                for name in dict.fromkeys(names)
            }
            parts = ", ".join(f"{name} {t:.0f}" for name, t in alone.items())
            rate = flops / alone["score_prefill"] / 1e6
            return f"chain {whole:6.0f} us; {parts}; {rate:.0f} TF/s"

        attempt(f"prefill 4096 x 65536 {label_of(variant)}", call)
    for megabytes in PREFILL_MEGABYTES:

        def call(megabytes=megabytes):
            chain = plan_select(work.problem, megabytes * 2**20, tokens=True)
            chunks = sum(record.kernel == "score:score_prefill" for record in chain)
            return f"chain {_chain_us(work, chain)} us; {chunks} chunks"

        attempt(f"prefill 4096 x 65536 workspace {megabytes} MiB", call)


SHORT = (4096, 2560, 64)
CHECKS = {
    "decode 32 x 131072": decode_problem(32, 131072),
    "decode 3 x 65536, 5 rows each": decode_problem(3, 65536, query_len=5),
    "decode e4m3": decode_problem(4, 32768, index_dtype="float8_e4m3fn"),
    "prefill 701 x 16384": prefill_problem(701, 16384),
    "prefill 7 x 100 x 4096": prefill_problem(700, 4096, 7),
}
CHUNKS = (prefill_problem(701, 16384), 2**23)
AGREEMENT = decode_problem(4, 32768)


def check() -> None:
    for name, problem in CHECKS.items():

        def call(problem=problem):
            work = decode_work(problem, most=1) if problem.num_decodes else prefill_work(problem)
            return check_rows(work)

        attempt(f"check {name}", call)
    attempt("check chunks of rows", check_chunks)
    attempt("check agreement", lambda: check_agreement(AGREEMENT))


def all_chains(parts: list[str]) -> list[tuple[Chain, str]]:
    """What the parts launch, with the dtype of the keys."""
    work: list[tuple[QSAProblem, int, bool, dict]] = []
    if "check" in parts:
        work += [(problem, 2**30, True, {}) for problem in CHECKS.values()]
        work += [(CHUNKS[0], size, False, {}) for size in (CHUNKS[1], 2**28)]
        work += [(AGREEMENT, 2**28, False, {})]
        work += [(dataclasses.replace(AGREEMENT, num_decodes=0), 2**28, False, {})]
    if "topk" in parts:
        problem = decode_problem(*GOALS["32 x 131072"])
        work += [(problem, 2**28, True, variant) for variant in TOPK_VARIANTS]
    if "decode" in parts:
        for name, sizes in GOALS.items():
            tunings = [{}, *(scoring(*variant) for variant in SCORE_VARIANTS[name])]
            work += [(decode_problem(*sizes), 2**28, True, tuning) for tuning in tunings]
    if "prefill" in parts:
        problem = prefill_problem(*PREFILL)
        work += [(problem, 2**28, True, variant) for variant in PREFILL_VARIANTS]
        work += [(problem, size * 2**20, True, {}) for size in PREFILL_MEGABYTES]
    if "others" in parts:
        work += [(decode_problem(**options), 2**28, True, {}) for options in OTHERS.values()]
        problem = decode_problem(*GOALS["32 x 131072"])
        work += [(problem, 2**28, True, scoring(*variant)) for variant in RAGGED_VARIANTS]
        work += [(prefill_problem(*SHORT), 2**28, True, {})]
    chains = [
        (plan_select(p, size, tokens=tokens, tuning=SelectTuning(**v)), p.index_dtype)
        for p, size, tokens, v in work
    ]
    return [*chains, (plan_expand(decode_problem(1, 131072)), "bfloat16")]


def compile_share(index: int, parts: list[str]) -> None:
    """Fills Triton's cache on disk with every WORKERS-th kernel."""
    wanted = set()
    for chain, index_dtype in all_chains(parts):
        known = dict.fromkeys(INTEGERS, "int32")
        wanted |= launch.specializations(
            chain, {**known, "index_query": "bfloat16", "compressed_cache": index_dtype}
        )
    for one in sorted(wanted, key=repr)[index::WORKERS]:
        try:
            launch.compile_ahead(one)
        except Exception as error:
            print(f"compile {one}: {type(error).__name__} {str(error)[:200]}", flush=True)


def compile_all(parts: list[str]) -> None:
    start = time.monotonic()
    command = [sys.executable, __file__, "--compile"]
    children = [subprocess.Popen([*command, str(i), *parts]) for i in range(WORKERS)]
    for child in children:
        child.wait()
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)


PARTS = {
    "check": check,
    "decode": bench_decode,
    "topk": bench_topk,
    "prefill": bench_prefill,
    "others": bench_others,
}


def main(parts: list[str]) -> None:
    torch.manual_seed(0)
    import triton

    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    compile_all(parts)
    for name in parts:
        try:
            PARTS[name]()
        except Exception:
            traceback.print_exc()
        torch.cuda.empty_cache()
    print("\n--- table ---")
    print("\n".join(TABLE))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        compile_share(int(sys.argv[2]), sys.argv[3:])
    else:
        main(sys.argv[1:] or list(PARTS))
