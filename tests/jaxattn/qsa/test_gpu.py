"""jaxattn.qsa on a GPU, by both ways: torch_core's bits, capture, no Python in steady state."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_core
from jaxattn import _ffi, _triton
from tests import loops
from tests.jaxattn.qsa import front
from tests.jaxattn.qsa.model import Model, decode_offsets
from tests.torch_core.qsa import cases
from torch_core import qsa
from torch_core.qsa import launch

pytestmark = pytest.mark.gpu

VIAS = ("triton", "dlpack")
E4M3 = dict(kv_dtype="float8_e4m3fn", index_dtype="float8_e4m3fn")
SMALL = cases.Sizes(dtype="bfloat16", head_dim=64, index_dim=32, budget=32)
QWEN = cases.Sizes(
    dtype="bfloat16", num_qo_heads=24, num_kv_heads=2, head_dim=256, index_dim=128, rotary_dim=64,
    budget=2048, page_size=64, pages_per_seq=64, num_draft=3,
)  # fmt: skip
CASES = {
    "small": SMALL,
    "float16": replace(SMALL, dtype="float16", head_dim=128, num_qo_heads=6),
    "ratio 2": replace(SMALL, compress_ratio=2, num_draft=1),
    "ratio 8": replace(SMALL, compress_ratio=8, page_size=32),
    "e4m3": replace(SMALL, **E4M3),
    "qwen": QWEN,
    "qwen e4m3": replace(QWEN, **E4M3),
}
MODEL = Model(dtype="bfloat16", head_dim=64, index_dim=32, pages_per_seq=16, budget=32)


def served(sizes: cases.Sizes, **options):
    """A mixed batch after prefixes, then decode alone; and the server."""
    long = sizes.pages_per_seq * sizes.page_size // 2
    tokens = [cases.random_tokens(sizes, long + 400, seed) for seed in range(3)]
    server = cases.Server(sizes, tokens, fill=0.0, device="cuda", **options)
    rows = 1 + sizes.num_draft
    takes = [
        [(0, long), (1, 7)],
        [(0, rows), (1, rows), (2, min(300, long))],
        [(0, rows), (1, rows), (2, rows)],
    ]
    steps = [server.step(take, num_decodes=at and 1 + at, padding=at) for at, take in
             enumerate(takes)]  # fmt: skip
    return steps, server


@pytest.mark.parametrize("via", VIAS)
@pytest.mark.parametrize("name", CASES)
def test_bits_of_torch_core(name, via):
    sizes = CASES[name]
    options = dict(k_scale=0.25, v_scale=0.5) if sizes.kv_dtype else {}
    expected, server = served(sizes, **options)
    with front.through_jax(via=via):
        actual, other = served(sizes, **options)
    for step, wanted in zip(actual, expected, strict=True):
        for ours, theirs in zip(step["metadata"], wanted["metadata"], strict=True):
            assert torch.equal(ours, theirs)
        for key in ("selected", "token_indices", "counts", "out", "lse"):
            assert front.same(step[key], wanted[key]), key
    for key in ("ring", "compressed_cache"):
        assert front.same(getattr(other, key), getattr(server, key)), key


@pytest.mark.parametrize("via", VIAS)
def test_selection_in_chunks(via):
    """A workspace of one row: many launches that write into the arrays of the first."""
    steps, server = served(SMALL)
    metadata = steps[1]["metadata"]
    table = torch.stack([server.page_table[request] for request in range(3)])
    query = torch.randn(len(metadata.positions), 4, 32, device="cuda").bfloat16()
    options = dict(budget=32, compress_ratio=4, num_decodes=2)
    arguments = (query, server.compressed_cache, table, metadata)
    expected = qsa.select(*arguments, **options)
    chunked = front.front(via).select(*arguments, **options, workspace_bytes=2**12)
    assert front.same(chunked, expected)


def torch_step(model: Model, x, state, seq_lens) -> tuple[torch.Tensor, dict]:
    """`Model.step` of a decode batch, in torch on copies."""
    x, lengths = (torch.from_dlpack(jnp.copy(a)) for a in (x, seq_lens))
    state = {name: torch.from_dlpack(jnp.copy(array)) for name, array in state.items()}
    constants = {name: torch.from_dlpack(a) for name, a in model.constants().items()}
    decodes = dict(num_decodes=model.requests, decode_query_len=1)
    sizes = dict(page_size=model.page_size, compress_ratio=model.compress_ratio)
    offsets = torch.from_numpy(decode_offsets(model)).to(x.device)
    rows, table = len(x), state["page_table"]
    metadata, _ = qsa.build_metadata(
        table, lengths, offsets, num_rows=rows, num_pages=model.layers * model.pages,
        **sizes, **decodes,
    )  # fmt: skip
    rings = torch.arange(model.requests, dtype=torch.int32, device=x.device)
    for at in range(model.layers):
        own, shift = table + at * model.pages, at * model.pages
        query = x.view(rows, model.num_qo_heads, model.head_dim)
        key = (query[:, : model.num_kv_heads] * 0.5).contiguous()
        torch_core.append_kv(
            key, key * 2, state["key_cache"], state["value_cache"], own,
            positions=metadata.positions, request_ids=metadata.request_ids,
        )  # fmt: skip
        index = x[:, : model.index_heads * model.index_dim].contiguous()
        groups = model.page_size // model.compress_ratio
        slots = torch.where(metadata.slots >= 0, metadata.slots + shift * groups, -1).int()
        out = qsa.attention(
            query,
            index.view(rows, model.index_heads, model.index_dim),
            index[:, : model.index_dim].contiguous(),
            state["key_cache"],
            state["value_cache"],
            state["compressed_cache"],
            state["ring"],
            own,
            lengths,
            metadata._replace(slots=slots),
            constants["weight"],
            constants["cos"],
            constants["sin"],
            budget=model.budget,
            compress_ratio=model.compress_ratio,
            ring_ids=rings + at * model.requests,
            **decodes,
        )
        x = x + out.view_as(x)
    return x, state


def decode_step(model: Model):
    traces = []

    def step(x, state, seq_lens):
        traces.append(1)
        offsets = decode_offsets(model)
        return model.step(x, state, seq_lens, offsets, num_decodes=model.requests,
                          decode_query_len=1)  # fmt: skip

    return step, traces


@pytest.mark.parametrize("via", VIAS)
def test_200_donated_steps(via):
    """Right against torch now and then; one trace; the same memory; no Python by "triton"."""
    model = replace(MODEL, via=via)
    step, traces = decode_step(model)
    jitted = jax.jit(step, donate_argnums=1)
    x, state, lengths = model.rows(3), model.state(), jnp.array([5, 100, 31], jnp.int32)
    calls = None
    for index in range(200):
        if index % 40 == 0:
            expected, caches = torch_step(model, x, state, lengths)
            names = ("compressed_cache", "ring")
            before = {name: state[name].unsafe_buffer_pointer() for name in names}
        out, state = jitted(x, state, lengths)
        if index % 40 == 0:
            assert front.same(out, expected), f"step {index}"
            for name in names:
                assert front.same(state[name], caches[name]), f"step {index}: {name}"
                assert state[name].unsafe_buffer_pointer() == before[name]
        x, lengths = model.rows(3, index), lengths % 250 + 1
        if index == 20:
            calls = _ffi.python_calls
    assert len(traces) == 1
    if via == "triton":
        assert _ffi.python_calls == calls


@pytest.mark.parametrize("via", VIAS)
def test_buffers_that_move(via):
    """Other arrays in each call, so that recordings are made anew."""
    model = replace(MODEL, via=via)
    jitted = jax.jit(decode_step(model)[0])
    kept = []
    for index in range(24):
        x, state = model.rows(3, index), model.state(seed=index)
        lengths = jnp.array([1 + index, 200 - index, 64], jnp.int32)
        expected, _ = torch_step(model, x, state, lengths)
        actual = jitted(x, state, lengths)
        kept.append((x, state, actual))  # their memory stays taken
        assert front.same(actual[0], expected), index


def kernel_launches(run) -> int:
    """How often the process asks the driver for a single kernel while `run` runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return sum(
        event.count for event in profiler.key_averages() if event.key.startswith("cuLaunchKernel")
    )


@pytest.mark.parametrize("kind", ["scan", "while_loop"])
@pytest.mark.parametrize("via", VIAS)
def test_captured_in_a_loop(via, kind):
    """Two layers launch a dozen kernels in each of 200 steps; a loop's body is recorded once."""
    model, steps = replace(MODEL, via=via), 200
    step, _ = decode_step(model)

    def body(_, carry):
        x, state, lengths = carry
        x, state = step(x, state, lengths)
        return x / 4, state, lengths % 250 + 1

    def loop(count, *carry):
        return loops.run(kind, body, carry, steps, count)

    carry = (model.rows(3), model.state(), jnp.array([5, 100, 31], jnp.int32))
    jitted = jax.jit(lambda *carry: body(0, carry))
    compiled = jax.jit(loop).lower(steps, *carry).compile()
    expected = carry
    for _ in range(steps):
        expected = jitted(*expected)
    first = jax.block_until_ready(compiled(steps, *carry))
    calls, results = _ffi.python_calls, []
    launches = kernel_launches(
        lambda: results.append(jax.block_until_ready(compiled(steps, *carry)))
    )
    assert _ffi.python_calls - calls < steps
    if via == "triton":
        assert _ffi.python_calls == calls
    small = jax.jit(lambda x: x + 1)
    one = jax.block_until_ready(small(jnp.zeros(8)))
    assert kernel_launches(lambda: jax.block_until_ready(small(one))) > 0, "profiler is blind"
    # Far fewer than the 12 of each step; a loop may launch its own condition.
    assert launches < 6 * steps, launches
    for result in (first, results[0]):
        assert front.same(result[0], expected[0])
        assert all(front.same(result[1][name], x) for name, x in expected[1].items())


def test_both_ways_in_one_program():
    """And beside each other."""
    steps = [decode_step(replace(MODEL, via=via))[0] for via in VIAS]
    x, state, lengths = MODEL.rows(3), MODEL.state(), jnp.array([5, 100, 31], jnp.int32)
    both = jax.jit(lambda *carry: [step(*carry) for step in steps])
    for _ in range(20):
        one, other = both(x, state, lengths)
        assert front.same(one[0], other[0])
        assert all(front.same(one[1][name], other[1][name]) for name in state)
        (x, state), lengths = one, lengths + 1


@pytest.mark.parametrize("via", VIAS)
def test_warmup(via):
    """Compiles once; steps within the limits then compile no kernel."""
    sizes = dict(num_qo_heads=4, index_heads=2, budget=48, pages_per_seq=9, max_requests=3)
    dtype, struct = jnp.bfloat16, jax.ShapeDtypeStruct
    arrays = (
        struct((28, 16, 2, 64), dtype), struct((28, 4, 1, 32), dtype), struct((3, 8, 32), dtype),
        struct((32,), dtype), struct((144, 4), jnp.float32),
    )  # fmt: skip
    from jaxattn import qsa as jax_qsa

    limits = sizes | dict(max_rows=6, max_draft=1, via=via)
    assert jax_qsa.warmup(*arrays, **limits) > 0
    assert jax_qsa.warmup(*arrays, **limits) == 0
    if via == "dlpack":
        names = {"score:score_decode", "topk:select_tokens", "compress:compress", "attend:decode"}
        before = {name: launch._count(launch.load(name)) for name in names}
        model = Model(dtype="bfloat16", head_dim=64, index_dim=32, pages_per_seq=9, budget=48,
                      layers=1, num_draft=1, via=via)  # fmt: skip
        step, _ = decode_step(model)
        step(model.rows(3), model.state(), jnp.array([5, 100, 31], jnp.int32))
        assert {name: launch._count(launch.load(name)) for name in names} == before


def test_auto_is_triton():
    from jaxattn.qsa import _run

    assert _triton.failure(torch_core.dispatch.device_capability(torch.device("cuda"))) is None
    assert _run.way("auto") == "triton"


def test_prepare_query_on_the_gpu():
    projection = torch.randn(9, 4, 128).bfloat16()
    cos, sin = qsa.rotary_tables(64, 64, 1e7)
    weight, positions = torch.randn(128).bfloat16() / 8, torch.arange(9).int()
    arguments = (projection, weight, cos, sin, positions)
    expected = qsa.prepare_query(*arguments)
    actual = front.front().prepare_query(*(x.cuda() for x in arguments)).cpu()
    unit = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(actual, expected, rtol=2 * unit, atol=2 * unit)


def test_offsets_on_the_gpu_need_the_counts():
    from jaxattn import qsa as jax_qsa

    table, lengths = jnp.zeros((2, 3), jnp.int32), jnp.ones(2, jnp.int32)
    sizes = dict(num_rows=2, num_pages=4, page_size=16, compress_ratio=4)
    with pytest.raises(ValueError, match=r"^num_decodes and decode_query_len must be given"):
        jax_qsa.build_metadata(table, lengths, jnp.arange(3, dtype=jnp.int32), **sizes)
    _, split = jax_qsa.build_metadata(table, lengths, np.arange(3, dtype=np.int32), **sizes)
    assert split[:2] == (2, 1)
