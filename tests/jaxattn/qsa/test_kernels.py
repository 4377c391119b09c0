"""Both ways to launch, with the kernels in Triton's interpreter on XLA's buffers: the order of
operands and results, aliases and scratch are those of a GPU's program. Bits as torch_core's."""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxattn import _device, _ffi, _triton
from jaxattn.qsa import _run
from tests.jaxattn import interpreted
from tests.jaxattn.qsa import front
from tests.torch_core.qsa import cases
from torch_core import dispatch, qsa
from torch_core.qsa import launch, plan, plan_attend
from torch_core.qsa.plan import Launch

_call = _ffi.call
BASE = cases.Sizes(dtype="float16", head_dim=64, budget=8)
CASES = {
    "plain": BASE,
    "drafts": replace(BASE, budget=16, compress_ratio=2, num_draft=1),
    "e4m3": replace(BASE, kv_dtype="float8_e4m3fn", index_dtype="float8_e4m3fn"),
}


def on_cpu(name, function, operands, results, *, platform, captured, **options):
    """A captured call of a GPU, on the CPU."""
    assert platform == "gpu" and captured

    def launched(*tensors: torch.Tensor) -> None:
        with interpreted.one_at_a_time, pytest.MonkeyPatch.context() as patch:
            # A capture must not allocate.
            patch.setattr(torch, "empty", None)
            function(*map(interpreted.borrowed, tensors))

    return _call(f"{name} on a CPU", launched, operands, results, **options)


@pytest.fixture(params=["triton", "dlpack"])
def via(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU in this process")
    environment = dispatch.environment(90)
    monkeypatch.setattr(_device, "environment", lambda: environment)
    monkeypatch.setattr(_device, "gpus", tuple)
    monkeypatch.setattr(_triton, "failure", lambda capability: None)
    monkeypatch.setattr(_triton, "call", interpreted.call)
    monkeypatch.setattr(_ffi, "call", on_cpu)
    monkeypatch.setattr(launch, "uses_kernels", lambda array: True)
    yield request.param
    front.jitted.cache_clear()
    jax.clear_caches()


def one_step(sizes: cases.Sizes, **options):
    """A mixed batch with prefixes of zeros and a padding row: what it gives, and the caches."""
    tokens = [cases.random_tokens(sizes, 60, seed) for seed in range(3)]
    server = cases.Server(sizes, tokens, fill=0.0, **options)
    server.lengths = [17, 2, 0]
    rows = 1 + sizes.num_draft
    step = server.step([(0, rows), (1, rows), (2, 13)], num_decodes=2, padding=1)
    caches = {name: getattr(server, name) for name in ("ring", "compressed_cache")}
    return step, caches


@pytest.mark.parametrize("name", CASES)
def test_bits_of_torch_core(name, via):
    options = dict(k_scale=0.25, v_scale=0.5) if name == "e4m3" else {}
    expected, caches = one_step(CASES[name], **options)
    with front.through_jax(via=via):
        actual, others = one_step(CASES[name], **options)
    for key in ("selected", "token_indices", "counts", "out", "lse"):
        assert front.same(actual[key], expected[key]), key
    for ours, theirs in zip(actual["metadata"], expected["metadata"], strict=True):
        assert torch.equal(ours, theirs)
    for key, cache in caches.items():
        assert front.same(others[key], cache), key


@pytest.mark.parametrize("workspace_bytes", [0, 2**12])
@pytest.mark.parametrize("num_decodes", [0, 2])
def test_selection_in_chunks(workspace_bytes, num_decodes, via):
    """Later chunks write into the arrays of the first."""
    sizes = replace(BASE, pages_per_seq=8)
    rows, requests = 12, 4
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(40, 4, 1, 16, generator=generator).half()
    table = torch.randperm(40, generator=generator)[:32].view(4, 8).int()
    query = torch.randn(rows, 4, 16, generator=generator).half()
    positions = torch.tensor([60, 61, 90, 91, 100, 101, 102, 3, 120, 121, 122, 123]).int()
    request_ids = torch.tensor([0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]).int()
    nothing = torch.full_like(positions, -1)
    metadata = qsa.Metadata(request_ids, positions, (positions + 1) // 4, nothing)
    options = dict(budget=sizes.budget, compress_ratio=4, num_decodes=num_decodes)
    arguments = (query, cache, table, metadata)
    options |= dict(decode_query_len=2, workspace_bytes=workspace_bytes)
    assert requests == table.shape[0]
    expected = qsa.select(*arguments, **options)
    assert front.same(front.front(via).select(*arguments, **options), expected)


def test_prefill_in_tiles(via, monkeypatch):
    """The tiled attention writes its output, and the odd rows into it."""
    monkeypatch.setattr(plan_attend, "TILED_ROWS", 8)
    rows = 9
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(rows, 2, 64, generator=generator).half()
    caches = torch.randn(2, 5, 16, 1, 64, generator=generator).half()
    positions = torch.arange(20, 20 + rows).int()
    metadata = qsa.Metadata(positions * 0, positions, positions // 4, positions * 0)
    selected = torch.tensor([[0, 2, 3]] * rows).int()
    selected[4] = torch.tensor([3, 1, 0])  # not in order
    lists = qsa.expand(selected, metadata, compress_ratio=4)
    table = torch.tensor([[4, 2, 0]]).int()
    arguments = (query, *caches, table, metadata, *lists)
    options = dict(compress_ratio=4, gate=query.flip(0), return_lse=True)
    expected = qsa.attend(*arguments, **options)
    actual = front.front(via).attend(*arguments, **options)
    assert all(map(front.same, actual, expected))


def test_empty_grids(via):
    """No rows: caches come back, results are empty."""
    nothing = jnp.zeros(0, jnp.int32)
    metadata = qsa.Metadata(*[nothing] * 4)
    cache, table = jnp.ones((3, 4, 1, 16), jnp.float16), jnp.ones((4, 4))
    ring = jnp.ones((2, 4, 16), jnp.float16)
    one = jnp.zeros((0, 16), jnp.float16)
    results = front.jaxattn.qsa.compress(
        one, ring, cache, metadata, jnp.zeros(2, jnp.int32), ring[0, 0], table, table,
        compress_ratio=4, via=via,
    )  # fmt: skip
    assert front.same(results[0], ring) and front.same(results[1], cache)
    selected = front.jaxattn.qsa.select(
        one.reshape(0, 1, 16), cache, jnp.zeros((2, 1), jnp.int32), metadata, budget=8,
        compress_ratio=4, via=via,
    )  # fmt: skip
    assert selected.shape == (0, 2)


def test_donated_caches_are_not_copied(via):
    """The program's only cache-sized values are its arguments and their successors in place."""
    pages, rings = 512, 256
    arguments = dict(
        index_key=jnp.arange(48, dtype=jnp.float16).reshape(3, 16),
        metadata=qsa.Metadata(*(jnp.array(x, jnp.int32) for x in (
            [0, 1, 1], [3, 6, 7], [1, 1, 2], [5, -1, 9]))),
        seq_lens=jnp.array([4, 8], jnp.int32),
        weight=jnp.zeros(16, jnp.float16),
        cos=jnp.ones((32, 4)),
        sin=jnp.zeros((32, 4)),
    )  # fmt: skip
    ring = jnp.ones((rings, 4, 16), jnp.float16)
    cache = jnp.ones((pages, 4, 1, 16), jnp.float16)

    def call(ring, cache, arguments):
        return front.jaxattn.qsa.compress(
            ring=ring, compressed_cache=cache, compress_ratio=4, via=via, **arguments
        )

    compiled = jax.jit(call, donate_argnums=(0, 1)).lower(ring, cache, arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < ring.nbytes // 4
    before = [array.unsafe_buffer_pointer() for array in (ring, cache)]
    results = compiled(ring, cache, arguments)
    assert [array.unsafe_buffer_pointer() for array in results] == before
    assert not np.array_equal(results[1][1, 1], jnp.ones((1, 16)))


def test_pieces():
    """A new call begins where a name of new memory comes again, not where memory is reused."""

    def record(*outputs: str, aliases: tuple = ()) -> Launch:
        shaped = tuple((name, (1,), "int32") for name in outputs)
        inputs = tuple(old for old, _ in aliases)
        return Launch(kernel="a:b", grid=(1,), inputs=inputs, outputs=shaped, aliases=aliases)

    first, second = record("scores"), record("selected", "end")
    again = record("selected", "end", aliases=(("selected_in=selected", "selected"),))
    assert list(_run.pieces((first, second))) == [(first, second)]
    chain = (first, second, first, again, first, again)
    assert list(_run.pieces(chain)) == [(first, second), (first, again), (first, again)]
    assert list(_run.pieces(())) == []


def test_names_tell_pieces_apart():
    problem = qsa.problem.QSAProblem(
        num_rows=4, num_requests=2, compress_ratio=4, page_size=16, pages_per_seq=3, num_pages=9
    )
    names = ("page_table", "seq_lens", "cu_seqlens_q")
    chains = [
        plan.plan_metadata(replace(problem, **change))
        for change in ({}, dict(num_rows=5), dict(num_pages=8))
    ]
    found = {_run._identity(chain, names) for chain in chains}
    assert len(found) == 3 and _run._identity(chains[0], names) in found
    assert _run._identity(chains[0], names[::-1]) not in found
