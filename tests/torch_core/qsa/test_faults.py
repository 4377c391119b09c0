"""Faults that others reported in sparse attention, through the public calls."""

import pytest
import torch

import torch_core
from tests.torch_core.qsa import cases
from tests.torch_core.qsa.test_reference import ask, int32, rows_at, scored
from torch_core import qsa
from torch_core.qsa import launch

REAL = dict(num_qo_heads=2, num_kv_heads=1, index_heads=4, budget=2048, page_size=64)


def test_r50_below_the_budget_sparse_is_dense():
    """Up to 2051 tokens all are kept; token 2052 brings the first real selection."""
    sizes = cases.Sizes(**REAL, pages_per_seq=33)
    tokens = cases.random_tokens(sizes, 2053)
    tokens["gate"] = torch.full_like(tokens["gate"], 100.0)  # sigmoid 1
    server = cases.Server(sizes, [tokens], fill=0.0)
    result = cases.run(server, 0, [2053])
    dense, lse = torch_core.prefill(
        tokens["query"],
        server.key_cache,
        server.value_cache,
        server.page_table,
        int32([2053]),
        int32([0, 2053]),
        max_seqlen_q=2053,
        return_lse=True,
    )
    picked = cases.sets(result["token_indices"], result["counts"])
    for length in (1, 3, 4, 5, 100, 511, 2047, 2048, 2051):
        assert picked[length - 1] == set(range(length))
    assert result["counts"][2051:].tolist() == [2048, 2049]
    torch.testing.assert_close(result["out"][:2051], dense[:2051])
    torch.testing.assert_close(result["lse"][:2051], lse[:2051])
    assert (result["lse"][2051:] < lse[2051:]).all()


def test_r51_only_the_unfinished_group_is_forced():
    """The last complete group scores worst of 1024 and is dropped, however near it is."""
    scores = [2000.0 - group for group in range(1023)] + [0.5]
    cache, page_table = scored(scores)
    metadata = rows_at([4095, 4096, 4097, 4098])
    selected = qsa.select(ask(4), cache, page_table, metadata, budget=2048, compress_ratio=4)
    token_indices, counts = qsa.expand(selected, metadata, compress_ratio=4)
    tails = ([], [4096], [4096, 4097], [4096, 4097, 4098])
    for row, tail in enumerate(tails):
        expected = [*range(2048), *tail]
        assert token_indices[row].tolist() == expected + [-1] * (2051 - len(expected))
        assert counts[row] == len(expected)


@pytest.mark.parametrize("with_long", [False, True])
@pytest.mark.parametrize("extend", [1, 2, 3])
@pytest.mark.parametrize("prefix", [0, 1, 2, 3, 4, 5])
def test_r52_extends_shorter_than_the_ratio(prefix, extend, with_long):
    sizes = cases.Sizes()
    tokens = [cases.random_tokens(sizes, 100, seed) for seed in range(2)]
    server = cases.Server(sizes, tokens)
    if prefix:
        server.step([(0, prefix)])
    before = server.compressed_cache.clone(), server.ring.clone()
    takes = [(1, 50), (0, extend)] if with_long else [(0, extend)]
    step = server.step(takes)
    rows = step["rows"][0]
    plain = cases.Server(sizes, [tokens[0]])
    expected = cases.run(plain, 0, [1] * (prefix + extend))
    for name in ("token_indices", "counts"):
        assert torch.equal(step[name][rows], expected[name][prefix:])
    torch.testing.assert_close(step["out"][rows], expected["out"][prefix:])
    assert torch.equal(server.keys(0), plain.keys(0))
    # Written: the new groups' slots and the rings of the step's requests, nothing else.
    allowed = torch.zeros(len(before[0]), 4, dtype=torch.bool)
    for request, took in takes:
        end = server.lengths[request]
        for group in range((end - took) // 4, end // 4):
            allowed[server.page_table[request, group // 4], group % 4] = True
    changed = ~(server.compressed_cache == before[0]) & ~before[0].isnan()
    changed |= before[0].isnan() & ~server.compressed_cache.isnan()
    assert torch.equal(changed.any(-1)[..., 0], allowed)
    if not with_long:
        assert server.ring[1].isnan().all()


def test_r54_ties_take_the_lowest_groups():
    cache, page_table = scored([-1.0] * 600)
    metadata = rows_at([2399] * 3)
    query = ask(3)
    query[1] = 0
    selected = qsa.select(query, cache, page_table, metadata, budget=2048, compress_ratio=4)
    assert (selected == torch.arange(512, dtype=torch.int32)).all()


def test_r55_rows_with_fewer_groups_than_topk():
    """visible 0, 1, 511, 512, 513, 5000 in this order, of six requests."""
    sizes = cases.Sizes(**REAL, pages_per_seq=320)
    visible = [0, 1, 511, 512, 513, 5000]
    generator = torch.Generator().manual_seed(0)
    cache = torch.full((6 * 320 + 1, 16, 1, 16), float("nan"))
    page_table = torch.zeros(6, 320, dtype=torch.int32)
    keys = torch.randn(6, 320 * 16, 16, generator=generator)
    for request, groups in enumerate(visible):
        pages = -(-groups // 16)
        page_table[request, :pages] = torch.arange(1, pages + 1, dtype=torch.int32) + 320 * request
        place = page_table[request, torch.arange(groups) // 16].long()
        cache[place, torch.arange(groups) % 16, 0] = keys[request, :groups]
    query = torch.randn(6, 4, 16, generator=generator)
    seq_lens = int32([4 * groups + 3 for groups in visible])
    metadata, _ = qsa.build_metadata(
        page_table,
        seq_lens,
        torch.arange(7, dtype=torch.int32),
        num_rows=6,
        num_pages=len(cache),
        page_size=64,
        compress_ratio=4,
    )
    assert metadata.visible.tolist() == visible
    selected = qsa.select(
        query, cache, page_table, metadata, budget=sizes.budget, compress_ratio=4, num_decodes=6
    )
    for request, groups in enumerate(visible):
        scores = (query[request].double() @ keys[request, :groups].double().T).relu().sum(0)
        kept = scores.float().sort(descending=True, stable=True).indices[:512].sort().values
        assert selected[request].tolist() == kept.tolist() + [-1] * (512 - len(kept))


@pytest.mark.parametrize("length", [20, 37, 100])
def test_r56_pages_of_a_former_request(length):
    """A request on pages and in a ring that hold another's keys gives the bits of a fresh one."""
    sizes = cases.Sizes()
    former, tokens = cases.random_tokens(sizes, 61, 1), cases.random_tokens(sizes, 100, 2)
    used, fresh = cases.Server(sizes, [former]), cases.Server(sizes, [tokens])
    cases.run(used, 0, [61])
    used.tokens, used.lengths = [tokens], [0]
    pieces = [length // 2, 1, length - length // 2 - 1]
    expected = cases.run(fresh, 0, pieces)
    for name, value in cases.run(used, 0, pieces).items():
        assert torch.equal(value, expected[name]), name


def test_r56_fork_and_roll_back():
    """A fork shares its parent's full pages and copies the page and the ring in use; a sequence cut
    back by one token within a group and continued otherwise equals one that never differed."""
    sizes = cases.Sizes(num_draft=3)
    base, other = cases.random_tokens(sizes, 90, 1), cases.random_tokens(sizes, 90, 2)
    mixed = {name: torch.cat((base[name][:39], other[name][39:])) for name in base}
    server = cases.Server(sizes, [base, mixed])
    server.step([(0, 39)])
    page, used = 39 // sizes.page_size, server.page_table
    server.page_table[1, :page] = used[0, :page]
    for cache in (server.key_cache, server.value_cache, server.compressed_cache):
        cache[used[1, page]] = cache[used[0, page]]
    server.ring[1], server.lengths[1] = server.ring[0], 39
    forked = [server.step([(0, 1), (1, 1)]) for _ in range(30)]
    plain = cases.run(cases.Server(sizes, [mixed]), 0, [39] + [1] * 30)
    for name in ("selected", "token_indices"):
        pieces = torch.cat([step[name][1:2] for step in forked])
        assert torch.equal(pieces, plain[name][39:])
    server = cases.Server(sizes, [base])
    server.step([(0, 41)])
    server.lengths[0], server.tokens = 39, [mixed]
    rolled = cases.run(server, 0, [3, 1, 20])
    assert torch.equal(rolled["selected"], plain["selected"][39:63])


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])
def test_r56_index_keys_that_were_never_written(kernels, phase, device, monkeypatch):
    """Groups whose keys are NaN score 0: all are kept where all fit, else the ones with a score go
    first, then the lowest groups of score 0."""
    if device == "cuda" and not kernels:
        pytest.skip("the reference is a CPU's")
    monkeypatch.setattr(launch, "uses_kernels", lambda _: kernels)
    nan = float("nan")
    cache, page_table = scored([nan, 2.0, nan, 1.0, nan, -1.0, 3.0, nan])
    rows = rows_at([19, 31, 31], [0, 1, 2])
    arrays = (ask(3).half(), cache.half(), page_table.repeat(3, 1), rows)
    query, cache, page_table, rows = (
        qsa.Metadata(*(y.to(device) for y in x)) if isinstance(x, tuple) else x.to(device)
        for x in arrays
    )
    query[2, 0, 0] = nan
    options = dict(budget=20, compress_ratio=4, num_decodes=3 if phase == "decode" else 0)
    selected = qsa.select(query, cache, page_table, rows, **options)
    assert selected.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 6], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("ratio", [2, 4, 8])
def test_r60_page_sizes_change_nothing(ratio):
    results = []
    for page_size in (16, 64, 128):
        sizes = cases.Sizes(
            compress_ratio=ratio, budget=32, page_size=page_size, pages_per_seq=256 // page_size
        )
        tokens = cases.random_tokens(sizes, 203)
        results.append(cases.run(cases.Server(sizes, [tokens]), 0, [111, 1, 91]))
    for result in results[1:]:
        for name, value in result.items():
            assert torch.equal(value, results[0][name]), name


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 3e4])
def test_r62_mixed_batch_with_poison(fill):
    """q lens [1, 1, 700, 1, 4] with prefixes and padding rows; the null page and all that no
    request has written are poisoned."""
    sizes = cases.Sizes(pages_per_seq=52)
    tokens = [cases.random_tokens(sizes, 820, seed) for seed in range(5)]
    prefixes, takes = [37, 4, 101, 0, 18], [1, 1, 700, 1, 4]
    server = cases.Server(sizes, tokens, fill=fill)
    for request, prefix in enumerate(prefixes):
        if prefix:
            server.step([(request, prefix)])
    step = server.step(list(enumerate(takes)), num_decodes=2, padding=3)
    assert step["out"].isfinite().all()
    assert not step["out"][707:].any() and (step["counts"][707:] == 0).all()
    for request, take in enumerate(takes):
        alone = cases.Server(sizes, [tokens[request]], fill=0.0)
        if prefixes[request]:
            alone.step([(0, prefixes[request])])
        expected, rows = alone.step([(0, take)]), step["rows"][request]
        assert torch.equal(step["token_indices"][rows], expected["token_indices"])
        torch.testing.assert_close(step["out"][rows], expected["out"])
        assert torch.equal(server.keys(request), alone.keys(0))


def test_r63_e4m3_cache_with_scales():
    """5000 tokens in chunks of 1024, then decode; the index cache stays bf16. The oracle reads the
    dequantised cache."""
    sizes = cases.Sizes(
        num_qo_heads=2,
        num_kv_heads=1,
        budget=512,
        page_size=64,
        pages_per_seq=80,
        dtype="bfloat16",
        kv_dtype="float8_e4m3fn",
    )
    tokens = cases.random_tokens(sizes, 5003)
    pieces = [1024] * 4 + [904, 1, 1, 1]
    scaled = cases.Server(sizes, [tokens], k_scale=0.25, v_scale=0.5)
    result = cases.run(scaled, 0, pieces)
    assert scaled.compressed_cache.dtype == torch.bfloat16

    def dequantised(x: torch.Tensor, scale: float) -> torch.Tensor:
        return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).bfloat16()

    plain_tokens = tokens | dict(
        key=dequantised(tokens["key"], 0.25), value=dequantised(tokens["value"], 0.5)
    )
    plain_sizes = cases.Sizes(**{**sizes.__dict__, "kv_dtype": "bfloat16"})
    expected = cases.run(cases.Server(plain_sizes, [plain_tokens]), 0, pieces)
    assert torch.equal(result["token_indices"], expected["token_indices"])
    torch.testing.assert_close(result["out"], expected["out"], rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(result["lse"], expected["lse"], rtol=1e-5, atol=1e-5)


def test_r67_groups_follow_the_tokens_not_their_positions():
    """Rotary positions far from 0, and repeated ones: the same slots and groups of tokens."""
    sizes = cases.Sizes()
    tokens = cases.random_tokens(sizes, 64)
    tables = qsa.rotary_tables(100_100, sizes.rotary_dim, 1e4)
    places = {
        "default": torch.arange(64),
        "offset": torch.arange(64) + 100_000,
        "repeated": torch.arange(64) // 10,
    }
    keys = {}
    for name, place in places.items():
        server = cases.Server(sizes, [tokens], tables=tables)
        # Of the group that each row completes, the first token's place.
        firsts = place[(torch.arange(64) - 3).clamp(min=0)].int()
        step = server.step([(0, 64)], rotary_positions=firsts)
        assert step["metadata"].slots[3::4].tolist() == [
            int(server.page_table[0, group // 4]) * 4 + group % 4 for group in range(16)
        ]
        keys[name] = server.keys(0)
    server = cases.Server(sizes, [tokens], tables=tables)
    server.step([(0, 64)])
    assert torch.equal(keys["default"], server.keys(0))
    # What does not rotate is the same; what rotates keeps its length.
    for other in (keys["offset"], keys["repeated"]):
        assert torch.equal(other[:, sizes.rotary_dim :], keys["default"][:, sizes.rotary_dim :])
        assert not torch.equal(other, keys["default"])
        torch.testing.assert_close(other.norm(dim=1), keys["default"].norm(dim=1))
