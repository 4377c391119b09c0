"""The write side: by hand, the kernel against the reference, and what the ring survives."""

import random

import pytest
import torch

from tests.torch_core.qsa import cases
from torch_core import qsa
from torch_core.qsa import describe, launch, metadata, plan, reference

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def build(page_table, seq_lens, lengths, sizes, num_rows=None):
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    return metadata.build(
        page_table,
        torch.tensor(seq_lens, dtype=torch.int32),
        offsets,
        num_rows=sum(lengths) if num_rows is None else num_rows,
        compress_ratio=sizes["compress_ratio"],
        page_size=sizes["page_size"],
        num_pages=sizes["num_pages"],
    )


def test_by_hand():
    """Pool, then norm, then rotation by 90 degrees at the group's first position, 2."""
    sizes = dict(compress_ratio=2, page_size=4, num_pages=2)
    rows = build(torch.tensor([[1]], dtype=torch.int32), [4], [2], sizes)
    index_key = torch.tensor([[1.0, 2.0, 3.0, 0.0], [5.0, 0.0, 1.0, 4.0]])  # mean [3, 1, 2, 2]
    ring, cache = torch.zeros(1, 2, 4), torch.full((2, 2, 1, 4), -7.0)
    weight = torch.tensor([0.0, 1.0, -0.5, 0.0])
    cos, sin = torch.ones(4, 1), torch.zeros(4, 1)
    cos[2], sin[2] = 0.0, 1.0
    returned = qsa.compress(
        index_key,
        ring,
        cache,
        rows,
        torch.tensor([4], dtype=torch.int32),
        weight,
        cos,
        sin,
        compress_ratio=2,
        eps=0.5,  # 18 / 4 + 0.5 = 5
    )
    assert returned[0] is ring and returned[1] is cache
    # Normed: [3, 2, 1, 2] / sqrt(5); the first two dims rotate: (x, y) -> (-y, x).
    expected = torch.tensor([-2.0, 3.0, 1.0, 2.0]) / 5**0.5
    torch.testing.assert_close(cache[1, 1, 0], expected)
    assert (cache[0] == -7).all() and (cache[1, 0] == -7).all()
    assert torch.equal(ring[0], index_key)


def kernel(arrays, options):
    """The compress kernel on the arrays, in place."""
    problem = describe.describe_compress(**arrays, **options)
    flat = {name: x for name, x in arrays.items() if name != "metadata"}
    flat |= arrays["metadata"]._asdict()
    flat |= {name: options.get(name) for name in ("ring_ids", "rotary_positions")}
    launch.run(plan.plan_compress(problem), flat)


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize("trial", range(48))
def test_kernel_equals_reference(trial, device):
    rng = random.Random(trial)
    generator = torch.Generator().manual_seed(trial)
    ratio, page_size = rng.choice([2, 4, 8]), rng.choice([16, 32])
    num_requests, pages_per_seq, num_draft = rng.choice([1, 2, 4]), 4, rng.choice([0, 1, 3, 5])
    dim, half = rng.choice([16, 24, 64, 128]), rng.choice([4, 8])
    dtype = (torch.float32, torch.bfloat16, torch.float16)[trial % 3]
    index_dtype = (dtype, torch.float8_e4m3fn)[trial % 2]
    sizes = dict(compress_ratio=ratio, page_size=page_size, num_pages=num_requests * pages_per_seq)
    lengths = [rng.choice([0, 1, 2, 3, 5, 17, 30]) for _ in range(num_requests)]
    seq_lens = [min(n + rng.choice([0, 1, 3, 8, 31]), pages_per_seq * page_size) for n in lengths]
    pages = torch.randperm(sizes["num_pages"], generator=generator).int() - 1
    page_table = pages.view(num_requests, pages_per_seq)
    num_rows = sum(lengths) + rng.choice([0, 3])
    rings = num_requests + 2

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    cache = torch.full((sizes["num_pages"], page_size // ratio, 1, dim), float("nan"))
    angles = 6 * normal(200, half)
    arrays = dict(
        index_key=4 * normal(num_rows, dim).to(dtype),
        ring=normal(rings, qsa.ring_rows(ratio, num_draft), dim).to(dtype),
        compressed_cache=cache.to(index_dtype),
        metadata=build(page_table, seq_lens, lengths, sizes, num_rows),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        weight=normal(dim).to(dtype),
        cos=angles.cos(),
        sin=angles.sin(),
    )
    options = dict(compress_ratio=ratio, eps=1e-6)
    if rng.random() < 0.5:
        options["ring_ids"] = torch.randperm(rings, generator=generator)[:num_requests].int()
    if rng.random() < 0.5:
        options["rotary_positions"] = torch.randint(
            0, 200, (num_rows,), generator=generator, dtype=torch.int32
        )

    def move(x):
        return metadata.Metadata(*map(move, x)) if isinstance(x, tuple) else x.to(device).clone()

    ours = {name: move(x) for name, x in arrays.items()}
    moved = {n: move(x) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    kernel(ours, moved)
    reference.compress(**arrays, **options)
    assert torch.equal(ours["ring"].cpu(), arrays["ring"])
    check_keys(ours["compressed_cache"].cpu(), arrays["compressed_cache"], dtype)


def check_keys(actual, expected, dtype):
    """Nearly all the same bits, the others a rounding apart, nothing else written. A key is rounded
    before its rotation, to `dtype`, and after it."""
    actual, wide = actual.float(), expected.float()
    written = ~wide.isnan()
    assert torch.equal(~actual.isnan(), written)
    actual, wide = actual[written], wide[written]
    units = torch.finfo(expected.dtype).eps * wide.abs() + 4 * torch.finfo(dtype).eps * 8
    assert ((actual - wide).abs() <= units).all()
    if dtype != torch.float32:
        assert (actual != wide).float().mean() <= 0.02 if len(wide) else True


@pytest.mark.parametrize("take", [1, 3, 4, 7, 8, 9, 30])
@pytest.mark.parametrize("held", [0, 1, 2, 3])
@pytest.mark.parametrize("order", ["rising", "falling"])
def test_no_write_reaches_a_key_that_is_read(order, take, held, device, monkeypatch):
    """Long chunks wrap around the ring, whose rows hold the group that the chunk's first rows end.
    The order of the programs is the interpreter's."""
    if order == "falling":
        if device != "cpu":
            pytest.skip("a GPU chooses its own order")
        from triton.runtime.interpreter import InterpreterBuilder

        def set_grid_idx(self, x, y, z):
            self.grid_idx = (take - 1 - x, y, z)

        monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", set_grid_idx)
    ratio, dim, start = 4, 16, 8
    sizes = dict(compress_ratio=ratio, page_size=64, num_pages=1)
    page_table = torch.zeros(1, 1, dtype=torch.int32)
    raw = torch.randn(start + held + take, dim, generator=torch.Generator().manual_seed(take))
    ring = torch.full((1, ratio, dim), float("nan"))
    for position in range(start, start + held):
        ring[0, position % ratio] = raw[position]
    length = start + held + take
    arrays = dict(
        index_key=raw[start + held :],
        ring=ring,
        compressed_cache=torch.full((1, 16, 1, dim), float("nan")),
        metadata=build(page_table, [length], [take], sizes),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        weight=torch.zeros(dim),
        cos=torch.ones(64, 2),
        sin=torch.zeros(64, 2),
    )
    arrays = {
        name: metadata.Metadata(*(y.to(device) for y in x)) if name == "metadata" else x.to(device)
        for name, x in arrays.items()
    }
    kernel(arrays, dict(compress_ratio=ratio))
    groups = raw[start : length // ratio * ratio].view(-1, ratio, dim)
    expected = reference.rms_norm(groups.mean(1), torch.zeros(dim), 1e-6)
    keys = arrays["compressed_cache"][0, start // ratio :, 0].cpu()
    torch.testing.assert_close(keys[: len(groups)], expected)
    assert keys[len(groups) :].isnan().all()
    kept = range(max(length - ratio, start + held), length)
    for position in kept:
        assert torch.equal(arrays["ring"][0, position % ratio].cpu(), raw[position])


@pytest.mark.parametrize("num_draft", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("ratio", [2, 4, 8])
def test_committed_keys_survive_rejected_drafts(ratio, num_draft):
    """Steps of 1 + num_draft rows of which a random part is rejected and written again, against
    one token at a time."""
    sizes = cases.Sizes(compress_ratio=ratio, budget=4 * ratio, num_draft=num_draft)
    right, wrong = (cases.random_tokens(sizes, 120, seed) for seed in (0, 1))
    server = cases.Server(sizes, [dict(right)])
    rng = random.Random(num_draft)
    while server.lengths[0] + 1 + num_draft < 100:
        start = server.lengths[0]
        accepted = rng.randint(1, 1 + num_draft)
        drafts = {name: x.clone() for name, x in right.items()}
        for name in drafts:
            drafts[name][start + accepted :] = wrong[name][start + accepted :]
        server.tokens = [drafts]
        server.step([(0, 1 + num_draft)], num_decodes=1)
        server.lengths[0] = start + accepted
    server.tokens = [right]
    server.step([(0, 100 - server.lengths[0])])
    plain = cases.Server(sizes, [right])
    cases.run(plain, 0, [1] * 100)
    assert torch.equal(server.keys(0), plain.keys(0))


@pytest.mark.parametrize("index_dtype", ["bfloat16", "float8_e4m3fn"])
def test_pieces_give_the_same_bits(index_dtype):
    sizes = cases.Sizes(dtype="bfloat16", index_dtype=index_dtype)
    tokens = [cases.random_tokens(sizes, 100)]
    servers = [cases.Server(sizes, tokens) for _ in range(3)]
    pieces = ([100], [1] * 100, [3, 5, 1, 1, 7, 33, 2, 48])
    results = [cases.run(s, 0, p) for s, p in zip(servers, pieces, strict=True)]
    for server, result in zip(servers[1:], results[1:], strict=True):
        assert torch.equal(server.keys(0).float(), servers[0].keys(0).float())
        assert torch.equal(result["selected"], results[0]["selected"])
        assert torch.equal(result["token_indices"], results[0]["token_indices"])


@pytest.mark.parametrize("rings", [(-1, 1), (1, 2), (INT_MIN, 1), (1, INT_MAX), (0, 1)])
@pytest.mark.parametrize("slot", [7, 8, INT_MAX])
def test_places_that_do_not_exist_are_not_written(slot, rings, device):
    """Two requests of a group each; what lies before and behind ring and cache keeps its values."""

    def int32(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    slots = [-1, -1, -1, 5, -1, -1, -1, slot]
    rows = metadata.Metadata(*map(int32, ([0] * 4 + [1] * 4, [0, 1, 2, 3] * 2, [0] * 8, slots)))
    memory = torch.full((4, 4, 16), 5.0, device=device)
    groups = torch.full((4, 4, 1, 16), 7.0, device=device)
    arrays = dict(
        index_key=torch.randn(2, 4, 16, device=device).flatten(0, 1),
        ring=memory[1:3],
        compressed_cache=groups[1:3],
        metadata=rows,
        seq_lens=int32([4, 4]),
        weight=torch.zeros(16, device=device),
        cos=torch.ones(8, 2, device=device),
        sin=torch.zeros(8, 2, device=device),
    )
    kernel(arrays, dict(compress_ratio=4, ring_ids=int32(rings)))
    wanted = torch.full_like(memory, 5.0)
    changed = set()
    for request, (ring, place) in enumerate(zip(rings, (5, slot), strict=True)):
        if ring in (0, 1):
            wanted[1 + ring] = arrays["index_key"].view(2, 4, 16)[request]
            changed |= {4 + place} if place < 8 else set()
    assert torch.equal(memory, wanted)
    written = (groups != 7).any(3).flatten().nonzero()[:, 0]
    assert set(written.tolist()) == changed


def test_e4m3_saturates():
    sizes = dict(compress_ratio=2, page_size=2, num_pages=1)
    cache = torch.zeros(1, 1, 1, 2, dtype=torch.float8_e4m3fn)
    qsa.compress(
        torch.tensor([[1.0, -1.0], [1.0, -1.0]]),
        torch.zeros(1, 2, 2),
        cache,
        build(torch.zeros(1, 1, dtype=torch.int32), [2], [2], sizes),
        torch.tensor([2], dtype=torch.int32),
        torch.full((2,), 999.0),
        torch.ones(1, 1),
        torch.zeros(1, 1),
        compress_ratio=2,
    )
    assert cache.flatten().tolist() == [448.0, -448.0]


def moved(rows):
    return metadata.Metadata(*(array.cuda() for array in rows))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "index_dtype, elements", [("bfloat16", 2**31), ("float8_e4m3fn", 2**32)], ids=str
)
def test_memory_past_2_to_the_31_elements(index_dtype, elements):
    """70 rows behind two raw keys in the ring: the bits that small memory gets, on both sides of
    that element of the cache and past it in the rings."""
    far_ring, far_page = 2**31 // (4 * 128), elements // (16 * 128)
    index_key = torch.randn(70, 128).bfloat16().cuda()
    held = torch.randn(4, 128).bfloat16().cuda()
    tables = [table.cuda() for table in qsa.rotary_tables(128, 64, 1e4)]
    results = []
    for ring_id, page in ((1, 1), (far_ring, far_page)):
        table = torch.tensor([[page, page - 1]], dtype=torch.int32)
        sizes = dict(compress_ratio=4, page_size=64, num_pages=page + 1)
        ring = torch.empty(ring_id + 1, 4, 128, dtype=torch.bfloat16, device="cuda")
        ring[ring_id] = held
        shape = (page + 1, 16, 1, 128)
        cache = torch.empty(shape, dtype=getattr(torch, index_dtype), device="cuda")
        cache.view(torch.uint8)[page - 1 :] = 0
        arrays = dict(
            index_key=index_key,
            ring=ring,
            compressed_cache=cache,
            metadata=moved(build(table, [128], [70], sizes)),
            seq_lens=torch.tensor([128], dtype=torch.int32).cuda(),
            weight=torch.zeros(128).cuda(),
            cos=tables[0],
            sin=tables[1],
        )
        ring_ids = torch.tensor([ring_id], dtype=torch.int32).cuda()
        kernel(arrays, dict(compress_ratio=4, ring_ids=ring_ids))
        results.append((ring[ring_id].clone(), cache.view(torch.uint8)[page - 1 :].clone()))
    for near, far in zip(*results, strict=True):
        assert torch.equal(near, far)
    assert torch.equal(results[0][0], index_key[-4:])
    assert results[0][1].flatten(1).any(1).all()


@pytest.mark.gpu
def test_rows_past_65535():
    """100 requests of 701 rows behind 3."""
    sizes = dict(compress_ratio=4, page_size=64, num_pages=1200)
    page_table = torch.randperm(1200).int().view(100, 12)
    arrays = dict(
        index_key=torch.randn(70_100, 16).cuda(),
        ring=torch.randn(100, 4, 16).cuda(),
        compressed_cache=torch.full((1200, 16, 1, 16), float("nan")).cuda(),
        metadata=moved(build(page_table, [704] * 100, [701] * 100, sizes)),
        seq_lens=torch.full((100,), 704, dtype=torch.int32).cuda(),
        weight=torch.zeros(16).cuda(),
        cos=torch.ones(704, 4).cuda(),
        sin=torch.zeros(704, 4).cuda(),
    )
    wanted = {n: arrays[n].clone() for n in ("ring", "compressed_cache")}
    kernel(arrays, dict(compress_ratio=4))
    reference.compress(**arrays | wanted, compress_ratio=4, eps=1e-6)
    assert torch.equal(arrays["ring"], wanted["ring"])
    check_keys(arrays["compressed_cache"], wanted["compressed_cache"], torch.float32)
