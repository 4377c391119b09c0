"""The public calls: their errors, `out`, warm-up, and the kernel path as a whole."""

import dataclasses
import random
import re

import pytest
import torch

import torch_core
from tests import errors as repository_errors
from tests.torch_core.qsa import cases, errors
from torch_core import qsa
from torch_core.qsa import launch, plan, plan_attend, plan_select
from torch_core.qsa.problem import QSAProblem
from torch_core.qsa.warmup import reachable

FRAMEWORK_FREE = ("describe", "plan", "plan_attend", "plan_select", "problem", "support")


@pytest.mark.parametrize("row", errors.WRONG, ids=lambda row: row[0])
def test_errors(row):
    _name, trigger, error, message = row
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        trigger()


@pytest.mark.parametrize(
    "call",
    ["build_metadata", "prepare_query", "compress", "select", "expand", "attend", "attention"],
)
def test_right_calls(call, enforce_annotations):
    getattr(qsa, call)(**errors.valid(call))


def test_every_message_has_a_test():
    """Left out: what needs a GPU, a missing package, or more pages than a test makes."""
    missing = repository_errors.uncovered(qsa, [row[1] for row in errors.WRONG])
    files = [place.split(":")[0] for place in missing if not place.startswith("plan_")]
    assert sorted(files) == ["api.py", "launch.py", "metadata.py"], missing


def test_out():
    arguments = errors.valid("attend")
    out, lse = qsa.attend(**arguments, return_lse=True)
    targets = torch.full_like(out, float("nan")), torch.full_like(lse, float("nan"))
    returned = qsa.attend(**arguments, return_lse=True, out=targets)
    assert returned[0] is targets[0] and returned[1] is targets[1]
    assert torch.equal(targets[0], out) and torch.equal(targets[1], lse)
    single = torch.full((3, 16, 4), float("nan")).transpose(1, 2)
    assert qsa.attend(**arguments, out=single) is single
    assert torch.equal(single, out)


def test_torch_is_not_needed_to_plan():
    for name in FRAMEWORK_FREE:
        path = f"{qsa.__path__[0]}/{name}.py"
        with open(path) as file:
            source = file.read()
        assert not re.search(r"^\s*(import|from) (torch|triton|jax|numpy)", source, re.M), name


def test_empty_steps():
    """No rows, no requests, no pages."""
    nothing = torch.zeros(0, dtype=torch.int32)
    metadata, split = qsa.build_metadata(
        torch.zeros(0, 3, dtype=torch.int32),
        nothing,
        torch.zeros(1, dtype=torch.int32),
        num_rows=2,
        num_pages=0,
        page_size=16,
        compress_ratio=4,
    )
    assert metadata.request_ids.tolist() == [-1, -1] and split.num_prefills == 0
    cache = torch.zeros(0, 16, 2, 8)
    ring = torch.zeros(0, 4, 16)
    table = torch.ones(8, 2)
    out, lse = qsa.attention(
        torch.ones(2, 4, 8),
        torch.ones(2, 4, 16),
        torch.ones(2, 16),
        cache,
        cache,
        torch.zeros(0, 4, 1, 16),
        ring,
        torch.zeros(0, 3, dtype=torch.int32),
        nothing,
        metadata,
        torch.zeros(16),
        table,
        table,
        budget=8,
        compress_ratio=4,
        return_lse=True,
    )
    assert not out.any() and (lse == -torch.inf).all()
    empty = qsa.Metadata(*[nothing] * 4)
    lists = torch.zeros(0, 11, dtype=torch.int32), nothing
    call = (torch.zeros(0, 4, 8), cache, cache, torch.zeros(0, 3, dtype=torch.int32), empty, *lists)
    assert qsa.attend(*call, compress_ratio=4).shape == (0, 4, 8)


SMALL = [
    cases.Sizes(dtype="float16", head_dim=64, budget=8),
    cases.Sizes(dtype="float16", head_dim=64, budget=16, compress_ratio=2, num_draft=1),
    cases.Sizes(
        dtype="float16", head_dim=64, budget=16, num_qo_heads=2, num_kv_heads=1, index_heads=2
    ),
]
LARGE = cases.Sizes(
    dtype="bfloat16",
    num_qo_heads=24,
    num_kv_heads=2,
    head_dim=256,
    index_dim=128,
    rotary_dim=64,
    budget=2048,
    page_size=64,
    pages_per_seq=64,
    num_draft=3,
)


@pytest.mark.parametrize("sizes", SMALL, ids=["plain", "drafts", "group 2"])
def test_kernels_equal_the_reference(sizes, device, monkeypatch):
    """A mixed batch through the public calls, with kernels and without."""
    tokens = [cases.random_tokens(sizes, 60, seed) for seed in range(3)]
    query_len = 1 + sizes.num_draft
    takes = [(0, query_len), (1, query_len), (2, 17)]
    expected, keys = two_steps(sizes, tokens, [(0, 21), (1, 2)], takes)
    monkeypatch.setattr(launch, "uses_kernels", lambda array: True)
    actual, kernel_keys = two_steps(sizes, tokens, [(0, 21), (1, 2)], takes, device)
    check_step(actual, expected, most_apart=0 if device == "cpu" else 2)
    torch.testing.assert_close(kernel_keys, keys, rtol=2e-3, atol=2e-3)


def check_step(actual, expected, *, most_apart):
    """Equal, but for some rows in which keys a rounding apart exchange two groups."""
    assert torch.equal(actual["counts"], expected["counts"])
    same = (actual["selected"] == expected["selected"]).all(1)
    assert (~same).sum() <= most_apart
    lists = zip(actual["selected"].tolist(), expected["selected"].tolist(), strict=True)
    for ours, wanted in lists:
        assert len(set(ours) & set(wanted)) >= len(set(wanted)) - 2
    assert torch.equal(actual["token_indices"][same], expected["token_indices"][same])
    eps = torch.finfo(actual["out"].dtype).eps
    for name, bound in (("out", 4 * eps), ("lse", 1e-3)):
        torch.testing.assert_close(actual[name][same], expected[name][same], rtol=bound, atol=bound)


def two_steps(sizes, tokens, first, second, device="cpu", **options):
    """What the second step gives, and all compressed keys, on the CPU."""
    server = cases.Server(sizes, tokens, fill=0.0, device=device, **options)
    server.step(first)
    step = server.step(second, num_decodes=2)
    names = ("selected", "token_indices", "counts", "out", "lse")
    return {name: step[name].cpu() for name in names}, server.compressed_cache.cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("index_dtype", ["bfloat16", "float8_e4m3fn"])
def test_large_kernels_equal_the_reference(kv_dtype, index_dtype, monkeypatch):
    """The geometry of Qwen3.8-Flash-Next, against the reference on the same GPU."""
    sizes = dataclasses.replace(LARGE, kv_dtype=kv_dtype, index_dtype=index_dtype)
    tokens = [cases.random_tokens(sizes, 3100, seed) for seed in range(3)]
    scales = dict(k_scale=0.25, v_scale=0.5) if kv_dtype == "float8_e4m3fn" else {}
    first, takes = [(0, 3000), (1, 7), (2, 2600)], [(0, 4), (1, 4), (2, 300)]
    results = []
    for kernels in (True, False):
        monkeypatch.setattr(launch, "uses_kernels", lambda array, k=kernels: k)
        results.append(two_steps(sizes, tokens, first, takes, "cuda", **scales))
    (actual, kernel_keys), (expected, keys) = results
    unit = torch.finfo(keys.dtype).eps
    torch.testing.assert_close(kernel_keys.float(), keys.float(), rtol=unit, atol=0.06)
    check_step(actual, expected, most_apart=60)


LIMITS = dict(
    num_qo_heads=24,
    index_heads=4,
    budget=2048,
    pages_per_seq=2048,
    max_requests=40,
    eps=1e-6,
)


@pytest.mark.parametrize("workspace_bytes, max_draft", [(0, 5), (2**22, 3), (2**28, 3)])
def test_warmup_reaches_every_step(workspace_bytes, max_draft):
    """Random steps within the limits launch nothing that warm-up does not compile, drafts that
    reuse a selection, wider by a group for each 4 of them, included."""
    meta = dict(device="meta", dtype=torch.bfloat16)
    key_cache = torch.empty(5000, 64, 2, 256, **meta)
    compressed_cache = torch.empty(5000, 16, 1, 128, **meta)
    ring, weight = torch.empty(64, 12, 128, **meta), torch.empty(128, **meta)
    cos = torch.empty(1000, 32, device="meta")
    max_rows = {0: 64, 2**22: 700, 2**28: 4096}[workspace_bytes]  # planning takes its time
    limits = LIMITS | dict(max_rows=max_rows, workspace_bytes=workspace_bytes, max_draft=max_draft)
    known = reachable(key_cache, compressed_cache, ring, weight, cos, **limits)
    shapes = {(k.kernel, *k[2:]) for k in known}
    base = QSAProblem(
        num_rows=1, num_requests=1, num_qo_heads=24, num_kv_heads=2, head_dim=256, index_heads=4,
        index_dim=128, compress_ratio=4, topk=512, page_size=64, pages_per_seq=2048, num_pages=5000,
    )  # fmt: skip
    rng = random.Random(workspace_bytes)
    for _ in range(60):
        query_len = rng.randint(1, 1 + max_draft)
        decodes = rng.randint(0, min(40, max_rows // query_len))
        most = max_rows - decodes * query_len if decodes < 40 else 0
        prefill = min(rng.choice([0, 1, 17, 300, most]), most)
        problem = dataclasses.replace(
            base,
            num_rows=decodes * query_len + prefill,
            num_requests=decodes + (prefill > 0),
            num_decodes=decodes,
            decode_query_len=query_len,
        )
        if not problem.num_rows:
            continue
        chains = [plan.plan_metadata(problem), plan_select.plan_expand(problem)]
        for flag in (False, True):
            chains.append(plan_select.plan_select(problem, workspace_bytes, tokens=flag))
            chains.append(plan_attend.plan_attend(problem, gate=flag))
        if not problem.num_prefill_rows:
            num_draft = rng.randint(1, max_draft)
            wide = dataclasses.replace(problem, topk=512 + -(-num_draft // 4))
            chains.append(plan_select.plan_expand(wide))
            chains += [plan_attend.plan_attend(wide, gate=flag) for flag in (False, True)]
        for record in {record for chain in chains for record in chain}:
            options = (record.num_warps, record.num_stages, record.overlaps)
            assert (record.kernel, record.constants, *options) in shapes, (problem, record)


def test_warmup_compiles_nothing_on_a_cpu():
    assert qsa.warmup(**errors.valid("warmup")) == 0


@pytest.mark.gpu
def test_warmup_compiles_all_that_steps_use():
    sizes = cases.Sizes(dtype="bfloat16", head_dim=64, index_dim=32, budget=64)
    key_cache = torch.zeros(9, 16, 2, 64, dtype=torch.bfloat16, device="cuda")
    compressed_cache = torch.zeros(9, 4, 1, 32, dtype=torch.bfloat16, device="cuda")
    ring = torch.zeros(4, 8, 32, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros(32, dtype=torch.bfloat16, device="cuda")
    cos, sin = qsa.rotary_tables(128, 8, 1e4, "cuda")
    limits = dict(num_qo_heads=4, index_heads=4, budget=sizes.budget, pages_per_seq=8)
    arguments = (key_cache, compressed_cache, ring, weight, cos)
    limits |= dict(max_requests=4, max_rows=300, max_draft=1)
    assert qsa.warmup(*arguments, **limits) > 0
    assert qsa.warmup(*arguments, **limits) == 0

    def compiled() -> int:
        names = {k.kernel for k in reachable(*arguments, **limits, eps=1e-6, workspace_bytes=2**28)}
        return sum(launch._count(launch.load(name)) for name in names)

    before = compiled()
    for decodes, query_len, prefill in ((1, 1, 0), (3, 2, 0), (4, 1, 0), (2, 2, 33), (0, 1, 290)):
        lengths = [query_len] * decodes + ([prefill] if prefill else [])
        offsets = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
        rows, requests = sum(lengths), len(lengths)
        page_table = torch.arange(1, 9, dtype=torch.int32).repeat(requests, 1).cuda()
        seq_lens = torch.full((requests,), 100, dtype=torch.int32).cuda()
        counts = dict(num_decodes=decodes, decode_query_len=query_len)
        metadata, _ = qsa.build_metadata(
            page_table, seq_lens, offsets, num_rows=rows, num_pages=9, page_size=16,
            compress_ratio=4, **counts,
        )  # fmt: skip

        def normal(*shape, rows=rows):
            return torch.randn(rows, *shape, dtype=torch.bfloat16, device="cuda")

        for gate in (None, normal(4, 64)):
            out = qsa.attention(
                normal(4, 64), normal(4, 32), normal(32), key_cache, key_cache.clone(),
                compressed_cache, ring, page_table, seq_lens, metadata, weight, cos, sin,
                budget=sizes.budget, compress_ratio=4, gate=gate, **counts,
            )  # fmt: skip
            assert out.isfinite().all()
        if not prefill:  # drafts that reuse a selection of 16 groups
            wide = torch.full((rows, 17), -1, dtype=torch.int32, device="cuda")
            lists = qsa.expand(wide, metadata, compress_ratio=4)
            caches = (key_cache, key_cache, page_table, metadata)
            qsa.attend(normal(4, 64), *caches, *lists, compress_ratio=4, **counts)
    assert compiled() == before


def test_exported():
    assert torch_core.qsa is qsa
