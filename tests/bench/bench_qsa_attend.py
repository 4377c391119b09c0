"""QSA attention on a GPU: every path checked against float32 torch, then timed in a CUDA graph.

    python tests/bench/bench_qsa_attend.py [decode] [prefill]

24 query and 2 KV heads of 256, bf16, ratio 4, budget 2048, pages of 64 in random order. Decode rows
belong to requests of 16384 tokens; calls of one graph read other requests. Prefill is one chunk at
the end of one request, four requests in turn, or comes with a row of each of several others.
`random` draws each row's 512 groups anew; `shared` keeps 80% of the previous row's groups and draws
the rest anew, both among the visible ones. Kernels are compiled in parallel processes first. Needs
torch and triton only.
"""

import functools
import importlib
import multiprocessing
import os
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from timing import graph_us

ROOT = Path(__file__).parents[2]
START = time.perf_counter()
SECONDS = {"decode": 35.0, "prefill": 35.0}


def _load(name: str):
    """A module of torch_core.qsa without what the packages' __init__ import."""
    for package in ("torch_core", "torch_core.qsa"):
        if package not in sys.modules:
            module = types.ModuleType(package)
            module.__path__ = [str(ROOT / package.replace(".", "/"))]
            sys.modules[package] = module
    return importlib.import_module(f"torch_core.qsa.{name}")


launch = _load("launch")
plan_attend = _load("plan_attend")
problems = _load("problem")
Rows, Tiles = plan_attend.RowsTuning, plan_attend.TilesTuning

DECODE_PAGES = dict(num_requests=128, pages_per_seq=256, num_pages=128 * 256)
GEOMETRY = dict(
    num_qo_heads=24, num_kv_heads=2, head_dim=256, compress_ratio=4, topk=512, page_size=64
)


@dataclass(frozen=True)
class Variant:
    """A tuning of one path."""

    tuning: object = None

    def chain(self, problem):
        return plan_attend.plan_attend(problem, gate=False, tuning=self.tuning)

    def __str__(self) -> str:
        t = self.tuning
        if t is None:
            return "default"
        shape = f"n{t.block_tokens} w{t.num_warps} s{t.num_stages}"
        if isinstance(t, Tiles):
            return f"tiles T{t.tile_rows} m{t.block_vectors} {shape}"
        return f"rows t{t.tiles} {shape} d{t.merge_dim}"


def rows(tiles: int, tokens: int, warps: int, stages: int, dim: int = 256) -> Variant:
    return Variant(
        Rows(
            block_tokens=tokens,
            tiles=tiles,
            num_warps=warps,
            num_stages=stages,
            merge_dim=dim,
        )
    )


def tiles(tile_rows: int, vectors: int, tokens: int, warps: int, stages: int) -> Variant:
    return Variant(
        Tiles(
            tile_rows=tile_rows,
            block_vectors=vectors,
            block_tokens=tokens,
            num_warps=warps,
            num_stages=stages,
        )
    )


ALL = 999  # tiles of a whole list
PREFILL_SIZES = ((8192, 8192), (4096, 65536))  # rows, tokens
MIXED_SIZES = ((8, 512), (32, 512), (32, 2048))  # decodes, prefill rows
DECODE = {
    1: (
        Variant(),
        rows(1, 64, 4, 2, 64),
        rows(1, 64, 4, 2, 32),
        rows(1, 64, 8, 2, 64),
        rows(1, 32, 4, 2, 64),
    ),
    8: (
        Variant(),
        rows(2, 64, 4, 2),
        rows(2, 64, 8, 2),
        rows(4, 32, 4, 3),
    ),
    32: (
        Variant(),
        rows(8, 64, 4, 2),
        rows(8, 64, 8, 2),
        rows(16, 32, 4, 3),
    ),
    128: (Variant(), rows(ALL, 64, 4, 2)),
}
E4M3 = (
    Variant(),
    rows(16, 32, 4, 4),
    rows(8, 32, 4, 3),
    rows(16, 32, 8, 3),
    rows(8, 64, 8, 2),
)
PREFILL = (
    Variant(),
    tiles(5, 64, 16, 4, 3),
    tiles(5, 64, 16, 4, 4),
    tiles(10, 128, 32, 8, 3),
    tiles(10, 128, 64, 8, 2),
)


def problem_of(num_rows: int, **fields):
    return problems.QSAProblem(**(GEOMETRY | fields), num_rows=num_rows)


def decode_problem(num_rows: int, kv_dtype: str = "bfloat16"):
    decodes = dict(num_decodes=num_rows, kv_dtype=kv_dtype)
    return problem_of(num_rows, **DECODE_PAGES, **decodes)


def prefill_problem(num_rows: int, length: int):
    pages = length // 64
    return problem_of(num_rows, num_requests=4, pages_per_seq=pages, num_pages=4 * pages)


def mixed_problem(decodes: int, num_rows: int):
    return problem_of(decodes + num_rows, **DECODE_PAGES, num_decodes=decodes)


def all_work(sections: list[str]) -> list[tuple]:
    """(problem, variant), the slow to compile apart."""
    work = []
    if "prefill" in sections:
        work += [(prefill_problem(n, size), v) for n, size in PREFILL_SIZES for v in PREFILL]
        work += [(mixed_problem(*sizes), Variant()) for sizes in MIXED_SIZES]
    if "decode" in sections:
        work += [(decode_problem(n), v) for n, variants in DECODE.items() for v in variants]
        work += [(decode_problem(32, "float8_e4m3fn"), v) for v in E4M3]
    return work


def dtypes(problem) -> dict[str, str]:
    ints = ("page_table", "token_indices", "counts", "request_ids")
    floats = ("sm_scale", "k_scale", "v_scale")
    kinds = dict.fromkeys(ints, "int32") | dict.fromkeys(floats, "float32")
    caches = dict.fromkeys(("key_cache", "value_cache"), problem.kv_dtype)
    return kinds | caches | {"query": problem.query_dtype}


def specializations(problem, variant) -> list:
    return sorted(launch.specializations(variant.chain(problem), dtypes(problem)), key=repr)


def compile_one(wanted) -> str:
    """Fills Triton's cache on disk; what went wrong."""
    try:
        launch.compile_ahead(wanted)
    except Exception as error:
        return f"compile {wanted.kernel}: {type(error).__name__} {str(error)[:200]}"
    return ""


def compile_all(sections: list[str]) -> None:
    """In forked processes, so that torch is imported once; CUDA must not be in use before."""
    tasks = [task for pair in all_work(sections) for task in specializations(*pair)]
    tasks = list(dict.fromkeys(tasks))
    for wanted in tasks:
        launch.load(wanted.kernel)  # imports triton, once
    workers = min(14, os.cpu_count() or 1, len(tasks))
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        problems_met = {text for text in pool.imap_unordered(compile_one, tasks) if text}
    print(f"{len(tasks)} kernels compiled after {since()}", *problems_met, sep="\n", flush=True)


def since() -> str:
    return f"{time.perf_counter() - START:.0f} s"


def draw(visible: np.ndarray, topk: int, keep: float, rng: np.random.Generator) -> np.ndarray:
    """Ascending groups of each row, then -1."""
    selected = np.full((len(visible), topk), -1, np.int32)
    member = np.zeros(int(visible.max()) + 1, bool)
    before = np.zeros(0, np.int64)
    for row, count in enumerate(visible.tolist()):
        if count <= topk:
            before = np.arange(count)
        else:
            kept = rng.permutation(before)[: round(keep * topk)]
            member[kept] = True
            fresh: list[int] = []
            while len(fresh) < topk - len(kept):
                for group in rng.integers(count, size=topk).tolist():
                    if not member[group] and len(fresh) < topk - len(kept):
                        member[group] = True
                        fresh.append(group)
            before = np.concatenate([kept, np.array(fresh, np.int64)])
            member[before] = False
        selected[row, : len(before)] = np.sort(before)
    return selected


def lists(positions: np.ndarray, keep: float, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """token_indices and counts as select and expand give them."""
    ratio, topk = GEOMETRY["compress_ratio"], GEOMETRY["topk"]
    selected = draw((positions + 1) // ratio, topk, keep, rng)
    tokens = np.full((len(positions), topk * ratio + ratio - 1), -1, np.int32)
    groups = (selected >= 0).sum(1)
    whole = selected[:, :, None] * ratio + np.arange(ratio)
    tokens[:, : topk * ratio] = np.where(selected[:, :, None] < 0, -1, whole).reshape(
        len(positions), -1
    )
    tail = (positions + 1) % ratio
    for j in range(ratio - 1):
        at = np.nonzero(tail > j)[0]
        tokens[at, groups[at] * ratio + j] = positions[at] + 1 - tail[at] + j
    counts = (groups * ratio + tail).astype(np.int32)
    return dict(
        token_indices=torch.from_numpy(tokens).cuda(), counts=torch.from_numpy(counts).cuda()
    )


def caches(problem) -> dict[str, torch.Tensor]:
    shape = (problem.num_pages, problem.page_size, problem.num_kv_heads, problem.head_dim)
    made = {
        name: torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        for name in ("key_cache", "value_cache")
    }
    made["page_table"] = (
        torch.randperm(problem.num_pages, device="cuda").int().view(problem.num_requests, -1)
    )
    for name, value in (("sm_scale", 0.0625), ("k_scale", 1.0), ("v_scale", 1.0)):
        made[name] = torch.tensor([value], device="cuda")
    return made


def reference(problem, arrays, picked: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    outs, lses = [], []
    for row in picked:
        request = int(arrays["request_ids"][row])
        tokens = arrays["token_indices"][row, : int(arrays["counts"][row])].long()
        pages = arrays["page_table"][request, tokens // problem.page_size].long()
        k, v = (
            arrays[name].view(torch.int8)[pages, tokens % problem.page_size]
            .view(arrays[name].dtype)
            .float()
            .repeat_interleave(problem.group_size, 1)
            for name in ("key_cache", "value_cache")
        )  # fmt: skip
        scale = arrays["sm_scale"] * arrays["k_scale"]
        scores = torch.einsum("hd,nhd->hn", arrays["query"][row].float(), k) * scale
        outs.append(torch.einsum("hn,nhd->hd", scores.softmax(1), v) * arrays["v_scale"])
        lses.append(scores.logsumexp(1))
    return torch.stack(outs), torch.stack(lses)


def wrong(results, exact, picked: list[int]) -> str:
    """Empty, or what is wrong with a result."""
    errors = [
        (results[name][picked].float() - x).abs().max().item()
        for name, x in zip(("out", "lse"), exact, strict=True)
    ]
    good = errors[0] < 0.02 and errors[1] < 2e-3
    return "" if good else f"WRONG: out {errors[0]:.3g}, lse {errors[1]:.3g}"


def calls(chain, inputs) -> list[Callable[[], object]]:
    return [functools.partial(launch.run, chain, arrays) for arrays in inputs]


def measure(case: str, problem, sets, variants, picked, repeats: int, deadline: float):
    """(us, variant, note) of each variant, printed as it comes."""
    exact = reference(problem, sets[0], picked)
    read = float(sets[0]["counts"].sum()) * 2 * problem.num_kv_heads * problem.head_dim
    read *= sets[0]["key_cache"].element_size()
    print(f"-- {case}: {read / 1e6:.0f} MB listed", flush=True)
    found = []
    joined = set()
    for variant in variants:
        if time.perf_counter() - START > deadline:
            found.append((float("inf"), str(variant), "out of time"))
            continue
        try:
            chain = variant.chain(problem)
            note = wrong(launch.run(chain, sets[0]), exact, picked)
            us = graph_us(calls(chain, sets), repeats)
            if len(chain) == 3 and chain[0] not in joined:
                joined.add(chain[0])
                note += f" of it join {graph_us(calls(chain[:1], sets), repeats):.0f}"
                header = launch.run(chain[:1], sets[0])["header"]
                note += f", {int((header[:, -2] != 0).sum())} tiles row by row"
            found.append((us, str(variant), note))
        except Exception as error:
            text = " ".join(str(error).split())[:120]
            found.append((float("inf"), str(variant), f"{type(error).__name__}: {text}"))
        us, name, note = found[-1]
        print(f"{us:9.1f}  {name:34} {read / us / 1e3:6.0f} GB/s {note}", flush=True)
    torch.cuda.empty_cache()
    return case, read, found


def decode_sets(base, num_rows: int, rng) -> list[dict[str, torch.Tensor]]:
    count = {1: 48, 8: 12, 32: 4, 128: 2}[num_rows]
    sets = []
    for i in range(count):
        requests = (torch.arange(num_rows, device="cuda") + i * num_rows) % 128
        positions = rng.integers(12000, 16384, size=num_rows)
        query = torch.randn(num_rows, 24, 256, device="cuda", dtype=torch.bfloat16)
        sets.append(
            base | lists(positions, 0.0, rng) | dict(query=query, request_ids=requests.int())
        )
    return sets


def prefill_sets(base, problem, positions, keep: float, rng) -> list[dict[str, torch.Tensor]]:
    shared = lists(positions, keep, rng)
    query = torch.randn(len(positions), 24, 256, device="cuda", dtype=torch.bfloat16)
    ids = [torch.full((len(positions),), i, device="cuda", dtype=torch.int32) for i in range(4)]
    return [base | shared | dict(query=query, request_ids=i) for i in ids]


def mixed_sets(base, decodes: int, num_rows: int, rng) -> list[dict[str, torch.Tensor]]:
    """The last request's prefill chunk behind a row of each of `decodes` others."""
    positions = rng.integers(8000, 16384, size=decodes)
    parts = lists(positions, 0.0, rng), lists(np.arange(16384 - num_rows, 16384), 0.8, rng)
    shared = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    sets = []
    for i in range(4):
        requests = (torch.arange(decodes) + i * decodes) % 127
        ids = torch.cat([requests, torch.full((num_rows,), 127)]).int().cuda()
        query = torch.randn(decodes + num_rows, 24, 256, device="cuda", dtype=torch.bfloat16)
        sets.append(base | shared | dict(query=query, request_ids=ids))
    return sets


def check_odd_tiles(problem, arrays) -> str:
    """Lists in another order go through attend_rows."""
    tokens = arrays["token_indices"].clone()
    count = int(arrays["counts"][700])
    tokens[700, :count] = tokens[700, :count].flip(0)
    picked = [698, 700, 702, 3000]
    chain = plan_attend.plan_attend(problem, gate=False)
    results = launch.run(chain, arrays | {"token_indices": tokens})
    return wrong(results, reference(problem, arrays, picked), picked) or "right"


def bench_decode(deadline: float) -> list[tuple]:
    rng = np.random.default_rng(0)
    base = caches(decode_problem(1))
    table = []
    for num_rows, variants in DECODE.items():
        sets = decode_sets(base, num_rows, rng)
        picked = sorted({0, num_rows // 2, num_rows - 1})
        problem = decode_problem(num_rows)
        table.append(measure(f"decode {num_rows}", problem, sets, variants, picked, 15, deadline))
    e4m3 = {name: base[name].to(torch.float8_e4m3fn) for name in ("key_cache", "value_cache")} | {
        "k_scale": torch.tensor([0.25], device="cuda"),
        "v_scale": torch.tensor([0.5], device="cuda"),
    }
    sets = [arrays | e4m3 for arrays in decode_sets(base, 32, rng)]
    problem = decode_problem(32, "float8_e4m3fn")
    table.append(measure("decode 32 e4m3", problem, sets, E4M3, [0, 31], 15, deadline))
    return table


def bench_prefill(deadline: float) -> list[tuple]:
    rng = np.random.default_rng(0)
    table = []
    base = caches(decode_problem(1))
    for decodes, num_rows in MIXED_SIZES:
        problem, sets = mixed_problem(decodes, num_rows), mixed_sets(base, decodes, num_rows, rng)
        case, picked = f"prefill {num_rows}/16384 and {decodes} decodes", [0, decodes, num_rows]
        table.append(measure(case, problem, sets, (Variant(),), picked, 5, deadline))
    for num_rows, length in PREFILL_SIZES:
        problem = prefill_problem(num_rows, length)
        base = caches(problem)
        positions = np.arange(length - num_rows, length)
        for name, keep in (("shared", 0.8), ("random", 0.0)):
            sets = prefill_sets(base, problem, positions, keep, rng)
            picked = [0, 1, 5, 2047, 2999, num_rows - 1]
            case = f"prefill {num_rows}/{length} {name}"
            table.append(measure(case, problem, sets, PREFILL, picked, 5, deadline))
            try:
                print("odd tiles:", check_odd_tiles(problem, sets[0]), flush=True)
            except Exception as error:
                print(f"odd tiles: {type(error).__name__} {str(error)[:160]}", flush=True)
    return table


def main() -> None:
    sections = [name for name in SECONDS if name in sys.argv[1:]] or [*SECONDS]
    compile_all(sections)
    torch.manual_seed(0)
    table, deadline = [], 0.0
    for section in sections:
        deadline += SECONDS[section]
        table += (bench_decode if section == "decode" else bench_prefill)(deadline)
        torch.cuda.empty_cache()
    report(table)


def report(table) -> None:
    print(f"== best, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("us, variant; GB/s counts each row's tokens once per KV head, whatever is read again")
    for case, read, found in table:
        print(f"-- {case}: {read / 1e6:.0f} MB listed")
        ranked = sorted(found, key=lambda entry: entry[0])
        finite = [entry for entry in ranked if entry[0] < float("inf")]
        shown = finite[:6]
        shown += [entry for entry in finite if entry[1] == "default" and entry not in shown]
        for us, variant, note in shown:
            print(f"{us:9.1f}  {variant:34} {read / us / 1e3:6.0f} GB/s {note}")
        failed = [entry for entry in ranked if entry[0] == float("inf") or "WRONG" in entry[2]]
        if failed:
            print("   failed: " + "; ".join(f"{name}: {note}" for _, name, note in failed))
    print(f"{since()} in all")


if __name__ == "__main__":
    main()
