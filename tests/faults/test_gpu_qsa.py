"""R50 to R86: QSA and Triton faults on a GPU. What is small also runs on a CPU: by the kernels in
Triton's interpreter, or by the reference."""

import ast
import functools
import importlib
import pathlib
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import jaxattn
import torch_core
from tests.jaxattn.qsa import front
from tests.torch_core.qsa import cases, checked, test_attend_kernels, test_select_kernels
from tests.torch_core.qsa.test_reference import ask, int32, rows_at, scored
from torch_core import qsa
from torch_core.qsa import describe, kernels, launch, plan_attend

VIAS = ("triton", "dlpack")
FRONTS = ("torch", *VIAS)
E4M3 = "float8_e4m3fn"
MIB = 2**20
SMALL = cases.Sizes(dtype="bfloat16", head_dim=64, budget=16)
# The reference on a CPU, held against NumPy: the interpreter would take too long.
by_reference = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Kernels in the interpreter, or on a GPU."""
    threads = torch.get_num_threads()
    if request.param == "cpu":
        if torch.cuda.is_available():
            pytest.skip("kernels are compiled for the GPU in this process")
        monkeypatch.setattr(launch, "uses_kernels", lambda array: True)
        torch.set_num_threads(1)
    yield request.param
    torch.set_num_threads(threads)


def normal(*shape: int, device: str, dtype: str = "bfloat16", seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    array = torch.randn(*shape, generator=generator, device=device)
    return array.to(getattr(torch, dtype))


def rows_of(
    page_table: torch.Tensor, lengths: list[int], rows: list[int], num_decodes: int = 0,
    page_size: int = 64, compress_ratio: int = 4, num_pages: int | None = None,
) -> qsa.Metadata:  # fmt: skip
    """Checked metadata of requests with these lengths and numbers of rows."""
    offsets = int32([0, *rows]).cumsum(0).int()
    metadata, _ = checked.build_metadata(
        page_table,
        int32(lengths).to(page_table.device),
        offsets.to(page_table.device),
        num_rows=sum(rows),
        num_pages=page_table.numel() if num_pages is None else num_pages,
        page_size=page_size,
        compress_ratio=compress_ratio,
        num_decodes=num_decodes,
        decode_query_len=rows[0] if num_decodes else 1,
    )
    return metadata


def select(
    index_query: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor, rows: qsa.Metadata,
    **options: int,
) -> torch.Tensor:  # fmt: skip
    """Checked: on a CPU by NumPy, which sorts exact scores."""
    arguments = (index_query, cache, page_table, rows)
    if cache.device.type != "cpu":
        return checked.select(*arguments, **options)
    problem = describe.describe_select(*arguments, **options)
    arrays = dict(index_query=index_query, compressed_cache=cache, page_table=page_table)
    selected = qsa.select(*arguments, **options)
    test_select_kernels.Case(problem, arrays | rows._asdict()).check(selected)
    return selected


def attend(query: torch.Tensor, *arrays: Any, **options: Any) -> None:
    """Checked: on a CPU by NumPy in float64."""
    if query.device.type != "cpu":
        checked.attend(query, *arrays, **options)
        return
    problem, scales = describe.describe_attend(query, *arrays, **options)
    names = ("key_cache", "value_cache", "page_table", "metadata", "token_indices", "counts")
    given = dict(zip(names, arrays, strict=True))
    given |= given.pop("metadata")._asdict()
    given |= {name: torch.tensor(scale) for name, scale in scales.items()}
    case = test_attend_kernels.Case(problem, given | dict(query=query, gate=options["gate"]))
    out, lse = qsa.attend(query, *arrays, return_lse=True, **options)
    test_attend_kernels.verify(case, dict(out=out, lse=lse))


def check_keys(
    keys: torch.Tensor, index_key: torch.Tensor, weight: torch.Tensor, tables: Any, eps: float
) -> None:
    """e4m3 keys of groups of 4 against NumPy, rounding where the definition rounds."""
    raw, weight, cos, sin = (x.float().cpu().numpy() for x in (index_key, weight, *tables))

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)

    pooled = rounded(raw.reshape(-1, 4, raw.shape[1]).mean(1))
    square = (pooled**2).mean(1, keepdims=True)
    first, second, rest = np.split(
        rounded(pooled / np.sqrt(square + eps) * (1 + weight)),
        [cos.shape[1], 2 * cos.shape[1]], 1,
    )  # fmt: skip
    cos, sin = cos[: len(raw) : 4], sin[: len(raw) : 4]
    wanted = np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], 1)
    wanted = wanted.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    actual = keys.float().cpu().numpy()
    # A rounding more or less in float32 may end in another number of 8 bits, now and then.
    assert (actual == wanted).mean() > 0.999
    np.testing.assert_allclose(actual, wanted, rtol=2**-3, atol=2**-7 * np.abs(wanted).max())


def by_hand(scores: list[float], positions: list[int], device: str) -> list[list[int]]:
    """Tokens that rows at these positions keep of groups with these scores, budget 2048."""
    cache, page_table = (array.to(device) for array in scored(scores))
    rows = qsa.Metadata(*(array.to(device) for array in rows_at(positions)))
    query = ask(len(positions)).half().to(device)
    options = dict(budget=2048, compress_ratio=4)
    selected = qsa.select(query, cache.half(), page_table, rows, **options)
    token_indices, counts = qsa.expand(selected, rows, compress_ratio=4)
    lists = zip(token_indices.tolist(), counts.tolist(), strict=True)
    return [tokens[:count] for tokens, count in lists if set(tokens[count:]) <= {-1}]


@pytest.mark.gpu
def test_r50_below_the_budget_sparse_is_dense():
    """All of up to 2051 tokens are kept; 2052 tokens bring the first real selection."""
    lengths = [1, 3, 4, 5, 100, 511, 2047, 2048, 2051, 2052]
    pages = torch.randperm(10 * 33, generator=torch.Generator().manual_seed(0))
    page_table = pages.view(10, 33).int().cuda()
    draw = functools.partial(normal, device="cuda")
    query, caches = draw(10, 4, 64), [draw(330, 64, 1, 64, seed=seed) for seed in (1, 2)]
    rows = rows_of(page_table, lengths, [1] * 10, num_decodes=10)
    options = dict(compress_ratio=4, num_decodes=10)
    selected = checked.select(
        draw(10, 4, 128), draw(330, 16, 1, 128, seed=3), page_table, rows, budget=2048, **options
    )
    lists = checked.expand(selected, rows, compress_ratio=4)
    assert lists[1].tolist() == [*lengths[:-1], 2048]
    for row, length in enumerate(lengths[:-1]):
        assert lists[0][row, :length].tolist() == list(range(length))
    arguments = (query, *caches, page_table, rows, *lists)
    out, lse = checked.attend(*arguments, return_lse=True, **options)
    dense, dense_lse = torch_core.decode(
        query, *caches, page_table, int32(lengths).cuda(), return_lse=True, backend="reference"
    )
    torch.testing.assert_close(out[:9], dense[:9], rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(lse[:9], dense_lse[:9], rtol=1e-5, atol=1e-5)
    assert (lse[9] < dense_lse[9]).all()


def test_r51_only_the_unfinished_group_is_forced(device):
    """The last complete group scores worst of 1024 and is dropped, however near it is."""
    scores = [2000.0 - group for group in range(1023)] + [0.5]
    kept = by_hand(scores, [4095, 4096, 4097, 4098], device)
    tails = ([], [4096], [4096, 4097], [4096, 4097, 4098])
    assert kept == [[*range(2048), *tail] for tail in tails]


def test_r54_ties_take_the_lowest_groups(device):
    """600 groups that all score 0, since no product is positive."""
    assert by_hand([-1.0] * 600, [2399, 2399], device) == [list(range(2048))] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_r59_scratch_over_a_million_tokens_stays_in_the_workspace(phase):
    """2048 rows of a prompt, or 8 requests of 4 rows on shared pages. A workspace smaller than one
    row works, and no workspace changes the result."""
    tokens, heads, dim = 2**20, 4, 128
    requests, query_len = (1, 2048) if phase == "prefill" else (8, 4)
    num_decodes = requests if phase == "decode" else 0
    cache = normal(tokens // 64, 16, 1, dim, device="cuda")
    pages = torch.randperm(len(cache), generator=torch.Generator().manual_seed(0)).int().cuda()
    page_table = pages.expand(requests, -1).contiguous()
    lengths = [tokens - 1000 * request for request in range(requests)]
    rows = rows_of(page_table, lengths, [query_len] * requests, num_decodes, num_pages=len(cache))
    query = normal(requests * query_len, heads, dim, device="cuda", seed=1)
    options = dict(budget=2048, compress_ratio=4, num_decodes=num_decodes)
    options["decode_query_len"] = query_len if num_decodes else 1
    # Scores of a row take 1 MiB; their maxima and what is looked into again, far less.
    least = (query_len if num_decodes else 1) * 5 * MIB // 4
    results = []
    for workspace_bytes in (2**28, 2**26, 2**12):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        selected = qsa.select(
            query, cache, page_table, rows, **options, workspace_bytes=workspace_bytes
        )
        peak = torch.cuda.max_memory_allocated() - before
        # The memory of one chunk may still be held when the next one's is asked for.
        assert peak <= max(workspace_bytes, 2 * least) + selected.nbytes + MIB, workspace_bytes
        results.append(selected)
    assert all(torch.equal(selected, results[0]) for selected in results)
    some = torch.linspace(0, len(query) - 1, 6).long().cuda()
    few = qsa.Metadata(*(array[some] for array in rows))
    checked.check_selected(query[some], cache, page_table, few, results[0][some])


@by_reference
def test_r64_e4m3_layers_of_one_pool(device):
    """Layers 0 and 5 of one pool, with norms of other sizes: each writes its own bytes, which the
    reader finds, and selects what it selects from bfloat16 keys."""
    length, budget, asked = (8192, 2048, 64) if device == "cuda" else (512, 128, 6)
    pages, dim, page_size = length // 64, 128, 64
    pool = torch.full((6, pages, 16, 1, dim), float("nan"), device=device).to(torch.float8_e4m3fn)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
    page_table = order.int().to(device)[None]
    rows = rows_of(page_table, [length], [length], page_size=page_size)
    last = qsa.Metadata(*(array[-asked:] for array in rows))
    lengths, tables = int32([length]).to(device), qsa.rotary_tables(length, 64, 1e7, device)
    eps = 0.25  # of the size of a pooled key's mean square
    for layer, weight in ((0, -0.5), (5, 7.0)):
        index_key = normal(length, dim, device=device, seed=layer)
        weights = torch.full((dim,), weight, device=device).bfloat16()

        def write(cache, index_key=index_key, weights=weights):
            ring = torch.full((1, 4, dim), float("nan"), device=device).bfloat16()
            rest = (lengths, weights, *tables)
            qsa.compress(index_key, ring, cache, rows, *rest, compress_ratio=4, eps=eps)
            return cache

        before, view = checked.raw(pool).clone(), pool[layer]
        write(view)
        alone = write(torch.zeros_like(view))
        assert checked.same(view, alone)
        keys = checked.raw(view)[page_table[0].long()].view(view.dtype).flatten(0, 2)
        check_keys(keys, index_key, weights, tables, eps)
        changed = (checked.raw(pool) != before).flatten(1).any(1)
        assert changed.nonzero()[:, 0].tolist() == [layer]
        wide = write(torch.zeros(view.shape, dtype=torch.bfloat16, device=device))
        torch.testing.assert_close(
            view.float(), wide.float(), rtol=2**-4 + 2**-8, atol=2**-9
        )  # half a unit of e4m3, after a rounding to bfloat16
        query = normal(asked, 4, dim, device=device, seed=layer + 1)
        options = dict(budget=budget, compress_ratio=4)
        selected = select(query, view, page_table, last, **options)
        assert torch.equal(selected, qsa.select(query, alone, page_table, last, **options))
        best = qsa.select(query, wide, page_table, last, **options)
        pairs = zip(selected.tolist(), best.tolist(), strict=True)
        common = sum(len(set(ours) & set(theirs)) for ours, theirs in pairs)
        assert common >= 0.95 * best.numel()


def test_r64_views_that_no_kernel_takes_are_refused(device):
    """Layers that take turns in the pool, and one that starts at an odd place."""
    page_table = int32([[0, 1]]).to(device)
    rows = rows_of(page_table, [100], [2])
    query = normal(2, 4, 16, device=device)
    options = dict(budget=32, compress_ratio=4)
    turns = torch.zeros(2, 6, 16, 1, 16, device=device).to(torch.float8_e4m3fn)[:, 5]
    with pytest.raises(ValueError, match=r"^compressed_cache must be contiguous, got strides"):
        qsa.select(query, turns, page_table, rows, **options)
    odd = torch.zeros(8 + 512, dtype=torch.uint8, device=device)[8:].view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"^compressed_cache must start at a multiple of 16"):
        qsa.select(query, odd.view(2, 16, 1, 16), page_table, rows, **options)


@pytest.mark.gpu
def test_r69_prompts_of_2030_to_2060_tokens():
    """Ten repeats on other pages give the same bits and greedy ids; one more token does not change
    the selection of the rows before it."""
    sizes = cases.Sizes(
        dtype="bfloat16", num_kv_heads=1, head_dim=64, index_dim=128, rotary_dim=64, budget=2048,
        page_size=64, pages_per_seq=34,
    )  # fmt: skip
    tokens = {name: x.cuda() for name, x in cases.random_tokens(sizes, 2061).items()}
    vocabulary = normal(4 * 64, 1000, device="cuda", dtype="float32", seed=1)
    shorter = None
    for length in range(2030, 2061):
        first: list[torch.Tensor] = []
        for repeat in range(10):
            with nullcontext() if repeat else checked.checking():
                server = cases.Server(sizes, [tokens], seed=repeat, device="cuda")
                steps = [server.step([(0, length)]), server.step([(0, 1)], num_decodes=1)]
            results = [step[name] for step in steps for name in ("out", "lse", "token_indices")]
            results += [(s["out"].float().flatten(1) @ vocabulary).argmax(1) for s in steps]
            first = first or results
            assert all(map(torch.equal, results, first)), (length, repeat)
        selected = steps[0]["selected"]
        assert shorter is None or torch.equal(selected[:-1], shorter), length
        shorter = selected


def test_r70_r71_nothing_is_tuned_or_zeroed_at_run_time():
    """Every kernel is a plain function of Triton, and no launch asks for zeroed memory."""
    files = [f"torch_core.qsa.kernels.{path.stem}" for path in pathlib.Path(
        kernels.__path__[0]).glob("[!_]*.py")]  # fmt: skip
    assert len(files) >= 8
    for name in (*files, "torch_core.backends.append"):
        module = importlib.import_module(name)
        found = [type(x).__name__ for x in vars(module).values() if hasattr(x, "fn")]
        assert found and set(found) <= {"JITFunction", "InterpretedFunction"}, name
    for package in (torch_core, jaxattn):
        for path in pathlib.Path(package.__path__[0]).rglob("*.py"):
            tree = ast.walk(ast.parse(path.read_text()))
            used = {node.attr for node in tree if isinstance(node, ast.Attribute)}
            tree = ast.walk(ast.parse(path.read_text()))
            used |= {node.arg for node in tree if isinstance(node, ast.keyword)}
            assert not used & {"autotune", "heuristics", "zeroed_outputs"}, path


def writing(device: str) -> dict:
    """A compress call of two requests over caches and rings full of other numbers."""
    page_table = int32([[2, 0], [1, 3]]).to(device)
    rows = rows_of(page_table, [21, 9], [1, 6], page_size=16)
    cos, sin = qsa.rotary_tables(32, 8, 1e4, device)
    return dict(
        index_key=normal(7, 16, device=device),
        ring=torch.full((3, 4, 16), 5.0, device=device).bfloat16(),
        compressed_cache=torch.full((4, 4, 1, 16), 7.0, device=device).bfloat16(),
        metadata=rows,
        seq_lens=int32([21, 9]).to(device),
        weight=torch.zeros(16, device=device).bfloat16(),
        cos=cos,
        sin=sin,
    )


def test_r70_r71_what_a_call_does_not_write_stays(device):
    """The first call and the second give the same bits; nothing else changes."""
    results = []
    for _ in range(2):
        arguments = writing(device)
        qsa.compress(**arguments, compress_ratio=4)
        results.append((arguments["ring"], arguments["compressed_cache"]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    ring, cache = results[0]
    # Request 0 ends no group, request 1 those of tokens 3 and 7.
    kept = torch.ones(4, 4, dtype=torch.bool)
    kept[1, :2] = False
    assert torch.equal((cache.cpu() == 7).all(-1)[..., 0], kept)
    assert torch.equal(
        (ring.cpu() == 5).all(-1), torch.tensor([[0, 1, 1, 1], [0] * 4, [1] * 4]) > 0
    )


@pytest.mark.gpu
@pytest.mark.parametrize("via", VIAS)
def test_r70_r71_inputs_that_live_on_keep_their_values(via):
    """Caches that the program uses again are not changed, whether called once or twice."""
    arguments = writing("cuda")
    arrays = {name: front.to_jax(value) for name, value in arguments.items()}

    @jax.jit
    def program(arrays):
        ring, cache = first = jaxattn.qsa.compress(**arrays, compress_ratio=4, via=via)
        again = arrays | dict(ring=ring, compressed_cache=cache)
        second = jaxattn.qsa.compress(**again, compress_ratio=4, via=via)
        return first, second, (arrays["ring"] + 0, arrays["compressed_cache"] + 0)

    names, wanted, last = ("ring", "compressed_cache"), [], arguments
    for _ in range(2):
        last = last | {name: last[name].clone() for name in names}
        wanted.append(qsa.compress(**last, compress_ratio=4))
    for _ in range(3):
        *calls, before = program(arrays)
        for call, expected in zip(calls, wanted, strict=True):
            assert all(map(front.same, call, expected))
        for name, array in zip(names, before, strict=True):
            assert front.same(array, arguments[name]) and front.same(arrays[name], arguments[name])


def attending(device: str) -> dict:
    page_table = int32([[2, 0], [1, 3]]).to(device)
    rows = rows_of(page_table, [21, 9], [1, 2], page_size=16)
    selected = int32([[0, 3], [0, 1], [1, -1]]).to(device)
    token_indices, counts = qsa.expand(selected, rows, compress_ratio=4)
    draw = functools.partial(normal, device=device)
    return dict(
        query=draw(3, 4, 64),
        key_cache=draw(4, 16, 2, 64, seed=1),
        value_cache=draw(4, 16, 2, 64, seed=2),
        page_table=page_table,
        metadata=rows,
        token_indices=token_indices,
        counts=counts,
    )


def renamed(arguments: dict) -> dict:
    """As the checked calls name them."""
    return {"rows" if name == "metadata" else name: x for name, x in arguments.items()}


def test_r71_scales_of_every_kind_give_the_same_bits(device):
    arguments = attending(device) | dict(compress_ratio=4, return_lse=True)
    expected = qsa.attend(**arguments, sm_scale=0.1, v_scale=0.3)
    for kind in (np.float32, np.float64, torch.tensor):
        actual = qsa.attend(**arguments, sm_scale=kind(0.1), v_scale=kind(0.3))
        assert all(map(torch.equal, actual, expected)), kind
    assert not torch.equal(qsa.attend(**arguments)[0], expected[0])


@pytest.mark.gpu
@pytest.mark.parametrize("via", VIAS)
@pytest.mark.parametrize("kind", [float, np.float32, np.float64, jnp.float32, "traced"])
def test_r71_scales_of_every_kind_give_the_same_bits_in_jax(kind, via):
    arguments = attending("cuda")
    expected = qsa.attend(**arguments, compress_ratio=4, sm_scale=0.1)
    arrays = {name: front.to_jax(value) for name, value in arguments.items()}
    call = functools.partial(jaxattn.qsa.attend, compress_ratio=4, via=via)
    if kind == "traced":
        out = jax.jit(lambda scale: call(**arrays, sm_scale=scale))(jnp.float32(0.1))
    else:
        out = jax.jit(lambda: call(**arrays, sm_scale=kind(0.1)))()
    assert front.same(out, expected)


def one_of_each(sizes: cases.Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, whose rows are walked in tiles, then a decode step, all checked."""
    monkeypatch.setattr(plan_attend, "TILED_ROWS", 8)
    length = sizes.budget + 11
    tokens = [cases.random_tokens(sizes, length + 2)]
    scales = dict(k_scale=0.25, v_scale=0.5) if sizes.kv_dtype == E4M3 else {}
    server = cases.Server(sizes, tokens, device="cuda", **scales)
    with checked.checking():
        server.step([(0, length)])
        server.step([(0, 1 + sizes.num_draft)], num_decodes=1)


@pytest.mark.parametrize("index_dtype", ["", E4M3], ids=["index same", "index e4m3"])
@pytest.mark.parametrize("kv_dtype", ["", E4M3], ids=["kv same", "kv e4m3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.gpu
def test_r73_every_listed_pair_of_dtypes_runs(dtype, kv_dtype, index_dtype, monkeypatch):
    sizes = replace(SMALL, dtype=dtype, kv_dtype=kv_dtype, index_dtype=index_dtype)
    one_of_each(sizes, monkeypatch)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_r73_gates_of_both_dtypes(dtype, device):
    gate = normal(3, 4, 64, device=device, dtype=dtype, seed=5)
    checked.attend(**renamed(attending(device)), compress_ratio=4, gate=gate)


def test_r73_other_pairs_of_dtypes_are_refused_by_name(device):
    attend = attending(device)
    rows, page_table = attend["metadata"], attend["page_table"]

    def selecting(query: torch.dtype, cache: torch.dtype) -> None:
        arrays = (torch.zeros(3, 4, 16), torch.zeros(4, 4, 1, 16))
        index_query, keys = (x.to(device, t) for x, t in zip(arrays, (query, cache), strict=True))
        qsa.select(index_query, keys, page_table, rows, budget=8, compress_ratio=4)

    def attending_to(query: torch.dtype, cache: torch.dtype) -> None:
        caches = {name: attend[name].to(cache) for name in ("key_cache", "value_cache")}
        changed = attend | caches | dict(query=attend["query"].to(query))
        qsa.attend(**changed, compress_ratio=4)

    wide, half, bf16, e5m2 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2
    with pytest.raises(NotImplementedError, match=r"^qsa.select on a GPU needs the dtype of index"):
        selecting(wide, wide)
    with pytest.raises(NotImplementedError, match=r"^qsa.attend on a GPU needs the dtype of query"):
        attending_to(wide, wide)
    for query, cache in ((half, bf16), (bf16, half), (bf16, e5m2)):
        with pytest.raises(TypeError, match=r"^compressed_cache must be .*, got "):
            selecting(query, cache)
        with pytest.raises(TypeError, match=r"^key_cache must have the query's dtype .*, got "):
            attending_to(query, cache)


@pytest.mark.gpu
@pytest.mark.parametrize("via", VIAS)
def test_r75_export_needs_the_documented_check(via):
    """jax.export refuses the custom call by name; with its check disabled the export runs."""
    arguments = attending("cuda")
    arrays = {name: front.to_jax(value) for name, value in arguments.items()}
    names = [name for name in arrays if name != "metadata"]

    @jax.jit
    def call(metadata, arrays):
        return jaxattn.qsa.attend(
            metadata=qsa.Metadata(*metadata), **arrays, compress_ratio=4, via=via
        )

    given = (tuple(arrays["metadata"]), {name: arrays[name] for name in names})
    found = re.findall(r'custom_call @(?:"([^"]+)"|([\w.$]+))', call.lower(*given).as_text())
    targets = {quoted or plain for quoted, plain in found}
    ours = [name for name in targets if name.startswith(("triton_kernel_call", "jaxattn"))]
    assert ours
    with pytest.raises(ValueError, match=r"custom_call @.?(triton_kernel_call|jaxattn\.)"):
        jax.export.export(call)(*given)
    allowed = [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
    exported = jax.export.export(call, disabled_checks=allowed)(*given)
    restored = jax.export.deserialize(exported.serialize())
    assert front.same(jax.jit(restored.call)(*given), qsa.attend(**arguments, compress_ratio=4))


@pytest.mark.parametrize("head_dim", [80, 96, 192])
def test_r76_odd_head_dims_are_refused_by_name(head_dim, device):
    arguments = attending(device)
    for name in ("query", "key_cache", "value_cache"):
        shape = (*arguments[name].shape[:-1], head_dim)
        arguments[name] = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    message = rf"^qsa.attend on a GPU needs head_dim in \(64, 128, 256\), got {head_dim}$"
    with pytest.raises(NotImplementedError, match=message):
        qsa.attend(**arguments, compress_ratio=4)


@pytest.mark.parametrize("group_size, index_heads, index_dim", [(6, 6, 96), (12, 3, 192)])
@pytest.mark.gpu
def test_r76_sizes_that_are_no_powers_of_two(group_size, index_heads, index_dim, monkeypatch):
    """Groups of 6 and 12, index heads of 96 and 192."""
    sizes = replace(
        SMALL, num_qo_heads=group_size, num_kv_heads=1, index_heads=index_heads,
        index_dim=index_dim, rotary_dim=24,
    )  # fmt: skip
    one_of_each(sizes, monkeypatch)


def jax_calls(device: str) -> dict[str, dict]:
    """Arguments of each public call that launches kernels, in JAX."""
    write, attend = writing(device), attending(device)
    index = dict(budget=8, compress_ratio=4)
    table, rows = attend["page_table"], attend["metadata"]
    cache = write["compressed_cache"]
    query = normal(3, 4, 16, device=device)
    lengths, offsets = int32([21, 9]).to(device), int32([0, 1, 3]).to(device)
    calls = {
        "build_metadata": dict(
            page_table=table, seq_lens=lengths, cu_seqlens_q=offsets, num_rows=3, num_pages=4,
            page_size=16, compress_ratio=4, num_decodes=0, decode_query_len=1,
        ),
        "compress": write | dict(compress_ratio=4),
        "select": dict(
            index_query=query, compressed_cache=cache, page_table=table, metadata=rows, **index
        ),
        "expand": dict(
            selected=int32([[0, 3], [0, 1], [1, -1]]).to(device), metadata=rows, compress_ratio=4
        ),
        "attend": attend | dict(compress_ratio=4),
    }  # fmt: skip
    return {call: {n: front.to_jax(x) for n, x in calls[call].items()} for call in calls}


@pytest.mark.gpu
@pytest.mark.parametrize("via", VIAS)
def test_r77_vmap_is_refused_by_name(via):
    for call, arguments in jax_calls("cuda").items():
        name = {"compress": "index_key", "expand": "selected"}.get(call, "page_table")
        array, function = arguments.pop(name), getattr(jaxattn.qsa, call)

        def one(array, function=function, name=name, arguments=arguments):
            return function(**{name: array}, **arguments, via=via)

        stacked = jnp.stack([array, array])
        with pytest.raises(NotImplementedError, match=rf"^jaxattn\.qsa\.{call} does not take vmap"):
            jax.vmap(one)(stacked)
        if call != "build_metadata":  # whose split is no array
            mapped, single = jax.lax.map(one, stacked), one(array)
            pairs = zip(jax.tree.leaves(mapped), jax.tree.leaves(single), strict=True)
            assert all(front.same(x[i], y) for x, y in pairs for i in range(2)), call


def varied(device: str) -> Iterator[tuple[str, dict, dict]]:
    """Calls on the same arrays with other static arguments."""
    write = writing(device)
    for eps in (1e-6, 0.5):
        yield "compress", write, dict(compress_ratio=4, eps=eps)
    yield "compress", write, dict(compress_ratio=2)
    attend = attending(device)
    table, rows = attend["page_table"], attend["metadata"]
    cache, query = normal(4, 4, 1, 16, device=device), normal(3, 4, 16, device=device)
    arrays = dict(index_query=query, compressed_cache=cache, page_table=table, metadata=rows)
    for budget, ratio in ((8, 4), (16, 4), (12, 2)):
        yield "select", arrays, dict(budget=budget, compress_ratio=ratio)
    selected = dict(selected=int32([[0, 3], [0, 1], [1, -1]]).to(device), metadata=rows)
    for ratio in (4, 2):
        yield "expand", selected, dict(compress_ratio=ratio)


def reference_of(call: str, arrays: dict, options: dict) -> tuple[torch.Tensor, ...]:
    """A checked call on copies."""
    copies = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in arrays.items()}
    if call == "compress":
        result = checked.compress(*copies.values(), **options)
    elif call == "select":
        result = checked.select(*copies.values(), **options)
    else:
        result = checked.expand(*copies.values(), **options)
    return result if isinstance(result, tuple) else (result,)


def test_r78_static_arguments_never_share_a_kernel(device):
    """Calls on the same shapes, in turns: each gives what it gave before, not another's result."""
    calls = list(varied(device))
    first = [reference_of(*call) for call in calls]
    for call, results in zip(calls, first, strict=True):
        assert all(map(checked.same, reference_of(*call), results)), call[0]
    for at, before in enumerate(first):
        for behind in range(at):
            if calls[at][0] == calls[behind][0] and before[-1].shape == first[behind][-1].shape:
                assert not torch.equal(before[-1], first[behind][-1]), calls[at][2]


@pytest.mark.gpu
@pytest.mark.parametrize("via", VIAS)
def test_r78_static_arguments_never_share_a_program(via):
    """All of them in one program, in turns."""
    calls = list(varied("cuda"))
    arrays = [{n: front.to_jax(x) for n, x in given.items()} for _, given, _ in calls]

    @jax.jit
    def program(arrays):
        functions = [functools.partial(getattr(jaxattn.qsa, c), via=via, **o) for c, _, o in calls]
        return [f(**a) for _ in range(2) for f, a in zip(functions, arrays, strict=True)]

    for result, call in zip(program(arrays), calls + calls, strict=True):
        pairs = zip(jax.tree.leaves(result), reference_of(*call), strict=True)
        assert all(front.same(ours, wanted) for ours, wanted in pairs), call[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", FRONTS)
def test_r83_one_page_id_serves_all_caches(name):
    """A packed batch of mixed lengths: another order of the pages, which raw keys and values and
    compressed keys share, changes no bit."""
    sizes = replace(SMALL, index_dim=32, budget=32, num_draft=1)
    tokens = [cases.random_tokens(sizes, 120, seed) for seed in range(4)]

    def served(seed: int) -> tuple[list, cases.Server]:
        server = cases.Server(sizes, tokens, seed=seed, device="cuda")
        takes = [[(0, 70), (1, 9), (3, 33)], [(0, 2), (1, 2), (2, 41), (3, 7)]]
        return [server.step(take, num_decodes=2 * at) for at, take in enumerate(takes)], server

    with nullcontext() if name == "torch" else front.through_jax(via=name):
        (steps, server), (others, moved) = served(0), served(7)
    assert not torch.equal(server.page_table, moved.page_table)
    for step, other in zip(steps, others, strict=True):
        for key in ("selected", "token_indices", "counts", "out", "lse"):
            assert front.same(step[key], other[key]), key
    for request in range(4):
        assert front.same(server.keys(request), moved.keys(request))


@pytest.mark.parametrize("budget, ratio", [(2048, 4), (4096, 4), (8192, 4), (4096, 2), (512, 4)])
@by_reference
def test_r86_other_budgets(budget, ratio, device):
    """Decode rows that keep all, the last one that does and the first that does not; a prompt's
    last 300 rows at three budgets."""
    tail = 300 if device == "cuda" else 2
    page_size, long = 64, 3 * budget + 1
    lengths = [budget - 1, budget + ratio - 1, budget + ratio, long]
    pages_per_seq = -(-long // page_size)
    pages = torch.randperm(4 * pages_per_seq, generator=torch.Generator().manual_seed(0))
    page_table = pages.view(4, pages_per_seq).int().to(device)
    rows = rows_of(
        page_table, lengths, [1, 1, 1, tail], 3, page_size=page_size, compress_ratio=ratio
    )
    draw, num_rows = functools.partial(normal, device=device), 3 + tail
    keys = draw(len(pages), page_size // ratio, 1, 32)
    caches = [draw(len(pages), page_size, 1, 64, seed=seed) for seed in (1, 2)]
    index_query, query = draw(num_rows, 2, 32, seed=3), draw(num_rows, 4, 64, seed=4)
    options = dict(compress_ratio=ratio, num_decodes=3)
    selected = select(index_query, keys, page_table, rows, budget=budget, **options)
    assert selected.shape == (num_rows, budget // ratio)
    token_indices, counts = checked.expand(selected, rows, compress_ratio=ratio)
    assert counts[:3].tolist() == [budget - 1, budget + ratio - 1, budget]
    assert (counts[3:] == budget + (rows.positions[3:] + 1) % ratio).all()
    arguments = (query, *caches, page_table, rows, token_indices, counts)
    attend(*arguments, gate=query.flip(0), v_scale=0.5, **options)


def test_r86_a_budget_of_too_many_groups_is_refused_by_name(device):
    attend = attending(device)
    arrays = (normal(3, 4, 16, device=device), normal(4, 4, 1, 16, device=device))
    message = r"^qsa.select on a GPU needs topk = budget / compress_ratio in 1 to 2048, got 4096$"
    with pytest.raises(NotImplementedError, match=message):
        qsa.select(
            *arrays, attend["page_table"], attend["metadata"], budget=16384, compress_ratio=4
        )
