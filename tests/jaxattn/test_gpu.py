"""The bridge on a GPU: bits of torch_core, capture, no Python in steady state."""

import functools
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxattn
import torch_core
from jaxattn import _ffi, _triton
from tests import inputs, loops
from tests.inputs import Case

pytestmark = pytest.mark.gpu

BASE = Case(
    "base",
    (5, 1, 17, 300, 64, 0, 0, 640),
    num_qo_heads=64,
    num_kv_heads=8,
    head_dim=128,
    page_size=64,
    dtype="bfloat16",
)
E4M3 = dict(kv_dtype="float8_e4m3fn", options=dict(k_scale=0.3, v_scale=0.7))
DRAFTS = dict(seq_lens=(5, 4, 17, 300, 2, 0), q_len=4)
CASES = [
    BASE,
    replace(BASE, name="e4m3_hnd_sinks", kv_layout="HND", sinks=True, **E4M3),
    replace(BASE, name="v_scale", options=dict(v_scale=0.7)),
    replace(BASE, name="window", options=dict(window_left=50)),
    replace(BASE, name="drafts", **DRAFTS),
    replace(BASE, name="draft_mask", kv_dtype="float8_e4m3fn", draft_mask="bool", **DRAFTS),
    replace(BASE, name="packed_mask", draft_mask="packed", **DRAFTS),
]


def bits(array) -> np.ndarray:
    return inputs.to_numpy(array).view(np.uint8)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bit_equal_to_torch(case):
    arguments = case.make()
    actual = inputs.run_jax(jaxattn.decode, arguments)
    assert np.array_equal(
        bits(actual), bits(inputs.run_torch(torch_core.decode, arguments, "cuda"))
    )


def test_traced_scales_equal_numbers():
    arguments = CASES[1].make()
    numbers = inputs.run_jax(jaxattn.decode, arguments)
    traced = arguments | dict(
        k_scale=np.float32(0.3).reshape(()), v_scale=np.float32(0.7).reshape(())
    )
    compare = inputs.run_jax(jaxattn.decode, traced)
    np.testing.assert_allclose(compare.astype(np.float32), numbers.astype(np.float32), rtol=2e-2)


def model(layers: int, num_pages: int, seed: int = 0):
    """A decode step of `layers` append + decode layers with a residual, and its state."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = (num_pages, 64, 8, 128)
    pool = jax.random.normal(keys[0], (layers, 2, *shape), jnp.bfloat16)
    caches = [(pool[layer, 0], pool[layer, 1]) for layer in range(layers)]
    query = jax.random.normal(keys[1], (4, 64, 128), jnp.bfloat16)
    page_table = jax.random.permutation(keys[2], num_pages).reshape(4, -1).astype(jnp.int32)

    def step(query, caches, page_table, seq_lens):
        new_caches = []
        for key_cache, value_cache in caches:
            key = query[:, ::8]
            key_cache, value_cache = jaxattn.append_kv(
                key, key * 2, key_cache, value_cache, page_table, positions=seq_lens - 1
            )
            out = jaxattn.decode(query, key_cache, value_cache, page_table, seq_lens)
            query = (query + out).astype(jnp.bfloat16) / 2
            new_caches.append((key_cache, value_cache))
        return query, new_caches

    return step, query, caches, page_table


def test_no_python_and_right_over_1000_donated_steps(append_by):
    """A jitted step with donated caches and other page tables each time, against a torch loop now
    and then; no Python callback, also where buffers move and XLA records anew."""
    step, query, caches, page_table = model(3, 64)
    jitted = jax.jit(step, donate_argnums=1)
    seq_lens = jnp.array([1, 7, 20, 3], jnp.int32)
    before = _ffi.python_calls
    for index in range(1000):
        checked = index % 100 == 0
        if checked:
            expected = torch_step(query, caches, page_table, seq_lens)
        query, caches = jitted(query, caches, page_table, seq_lens)
        if checked:
            assert np.array_equal(bits(query), bits(expected)), f"step {index}"
        seq_lens, page_table = seq_lens % 900 + 1, page_table[jnp.array([1, 2, 3, 0])]
    assert _ffi.python_calls == before


def torch_step(query, caches, page_table, seq_lens) -> torch.Tensor:
    """The step of `model` in torch, on copies."""
    query, table, lens = (torch.from_dlpack(jnp.copy(x)) for x in (query, page_table, seq_lens))
    for pair in caches:
        key_cache, value_cache = (torch.from_dlpack(jnp.copy(cache)) for cache in pair)
        key = query[:, ::8]
        torch_core.append_kv(key, key * 2, key_cache, value_cache, table, positions=lens - 1)
        query = (query + torch_core.decode(query, key_cache, value_cache, table, lens)) / 2
    return query


@pytest.mark.parametrize("loop", ["scan", "while_loop"])
def test_captured_in_loops(loop):
    """Inside a loop the launches are recorded once, far fewer adapter calls than iterations, and
    replayed with the lengths and page tables of each step."""
    step, query, caches, page_table = model(2, 64)
    steps = 200

    def body(_, carry):
        query, caches, table, seq_lens = carry
        query, caches = step(query, caches, table, seq_lens)
        return query, caches, jnp.roll(table, 1, 0), seq_lens % 900 + 1

    def run(query, caches, table, seq_lens, count):
        return loops.run(loop, body, (query, caches, table, seq_lens), steps, count)

    seq_lens = jnp.array([1, 7, 20, 3], jnp.int32)
    expected_query, table, lens = query, page_table, seq_lens
    expected_caches = [tuple(map(jnp.copy, c)) for c in caches]
    jitted = jax.jit(step)
    for _ in range(steps):
        expected_query, expected_caches = jitted(expected_query, expected_caches, table, lens)
        table, lens = jnp.roll(table, 1, 0), lens % 900 + 1
    given = (query, caches, page_table, seq_lens, steps)
    compiled = jax.jit(run, donate_argnums=1).lower(*given).compile()
    before = _ffi.kernel_calls()
    result, *_ = compiled(*given)
    result.block_until_ready()
    assert _ffi.kernel_calls() - before < steps
    assert np.array_equal(bits(result), bits(expected_query))


def test_r1_r26_operands_computed_right_before():
    """Query, lengths and tables made by the same program just before: no stale read in 100 runs."""
    arguments = BASE.make()
    weights = jax.random.normal(jax.random.key(0), (128, 128), jnp.bfloat16)
    arrays = {name: inputs.to_jax(value) for name, value in arguments.items()
              if isinstance(value, np.ndarray)}  # fmt: skip

    def parts(query, seq_lens, bump):
        for _ in range(4):
            query = jnp.tanh(query @ weights)
        return query, jnp.cumsum(jnp.ones_like(seq_lens)) * bump

    def whole(arrays, bump):
        query, lens = parts(arrays["query"], arrays["seq_lens"], bump)
        return jaxattn.decode(**arrays | dict(query=query, seq_lens=lens)) * 2

    table = np.arange(8 * 11, dtype=np.int32).reshape(8, 11) % arguments["key_cache"].shape[0]
    arrays["page_table"] = jnp.asarray(table)
    jitted, first, second = jax.jit(whole), jax.jit(parts), jax.jit(jaxattn.decode)
    for bump in range(100):
        bump = jnp.int32(bump % 80)
        query, lens = jax.block_until_ready(first(arrays["query"], arrays["seq_lens"], bump))
        expected = jax.block_until_ready(second(**arrays | dict(query=query, seq_lens=lens))) * 2
        assert np.array_equal(bits(jitted(arrays, bump)), bits(expected))


def test_independent_calls_and_programs_in_flight():
    """Two independent split calls in one program, and two programs in flight, stay right."""
    arguments = Case("long", (9000, 8000), num_qo_heads=64, num_kv_heads=8, head_dim=128,
                     page_size=64, dtype="bfloat16").make()  # fmt: skip
    arrays = {name: inputs.to_jax(v) for name, v in arguments.items() if isinstance(v, np.ndarray)}
    expected = jax.jit(jaxattn.decode)(**arrays)

    def both(arrays):
        other = arrays | dict(query=arrays["query"][::-1])
        return jaxattn.decode(**arrays), jaxattn.decode(**other)

    pair, single = jax.jit(both), jax.jit(functools.partial(jaxattn.decode, sm_scale=128**-0.5))
    reversed_expected = jax.jit(jaxattn.decode)(**arrays | dict(query=arrays["query"][::-1]))
    for _ in range(50):
        results = pair(arrays), single(**arrays), pair(arrays)
        assert np.array_equal(bits(results[1]), bits(expected))
        for first, second in (results[0], results[2]):
            assert np.array_equal(bits(first), bits(expected))
            assert np.array_equal(bits(second), bits(reversed_expected))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_append_equals_torch(dtype, kv_layout, append_by):
    """The bits of the reference, and of the kernel as torch launches it."""
    rng = np.random.default_rng(0)
    tokens = (64, 8) if kv_layout == "NHD" else (8, 64)
    cache = inputs.normal(rng, (12, *tokens, 128), inputs.DTYPES[dtype])
    key = inputs.normal(rng, (5, 8, 128), inputs.DTYPES["bfloat16"])
    call = dict(key=key, value=key[::-1].copy(), key_cache=cache, value_cache=cache[::-1].copy(),
                page_table=np.array([[3, 1], [7, 9]], np.int32),
                positions=np.array([0, 127, -1, 64, 5], np.int32),
                request_ids=np.array([0, 0, 0, 1, 1], np.int32),
                kv_layout=kv_layout, k_scale=0.25, v_scale=2.0)  # fmt: skip
    actual = inputs.run_jax(jaxattn.append_kv, call)
    for device in ("cpu", "cuda"):
        expected = inputs.run_torch(torch_core.append_kv, call, device)
        for one, other in zip(actual, expected, strict=True):
            assert np.array_equal(bits(one), bits(other)), device


def test_append_past_32_bits(append_by):
    """Into pages whose offsets pass 2^31 and 2^32 elements."""
    pages = np.array([32767, 65599])
    key = jax.random.normal(jax.random.key(0), (2, 8, 128), jnp.bfloat16)
    slots = jnp.array(pages * 64 + [3, 5], jnp.int32)
    append = jax.jit(jaxattn.append_kv, donate_argnums=(2, 3))
    caches = [jnp.zeros((65_600, 64, 8, 128), jnp.bfloat16) for _ in "kv"]
    for cache, new in zip(append(key, 2 * key, *caches, slots=slots), (key, 2 * key), strict=True):
        assert np.array_equal(bits(cache[pages, jnp.array([3, 5])]), bits(new))
        assert jnp.count_nonzero(cache) == jnp.count_nonzero(new)


def test_reference_by_name_runs_on_the_gpu():
    arguments = BASE.make()
    named = inputs.run_jax(jaxattn.decode, arguments, backend="reference", return_lse=True)
    expected = inputs.run_torch(torch_core.decode, arguments, return_lse=True)
    for one, other in zip(named, expected, strict=True):
        np.testing.assert_allclose(
            one.astype(np.float32), other.astype(np.float32), rtol=2e-2, atol=1e-2
        )


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_append_makes_no_temporary_of_a_cache(dtype, kv_layout, append_by):
    """Donated caches are written in place: no temporary near their size, the same memory."""
    tokens = (64, 8) if kv_layout == "NHD" else (8, 64)
    cache = jnp.zeros((1024, *tokens, 128), dtype)
    other, key = cache + jnp.ones((), dtype), jnp.ones((4, 8, 128), jnp.bfloat16)
    slots = jnp.array([3, 70, -1, 65535], jnp.int32)

    def append(key_cache, value_cache):
        return jaxattn.append_kv(
            key, key, key_cache, value_cache, slots=slots, kv_layout=kv_layout, k_scale=0.5
        )

    compiled = jax.jit(append, donate_argnums=(0, 1)).lower(cache, other).compile()
    assert (_triton.TARGET in compiled.as_text()) == (append_by == "kernel")
    assert compiled.memory_analysis().temp_size_in_bytes < cache.nbytes // 8
    before = [array.unsafe_buffer_pointer() for array in (cache, other)]
    results = compiled(cache, other)
    assert [array.unsafe_buffer_pointer() for array in results] == before


@pytest.mark.parametrize("case", [CASES[1], CASES[5]], ids=str)
def test_without_the_adapter(case, monkeypatch):
    """Where no compiler can build it, Python launches the kernel, with the same bits."""
    arguments = case.make()
    expected = inputs.run_jax(jaxattn.decode, arguments)
    monkeypatch.setattr(_ffi, "adapter", lambda: None)
    jax.clear_caches()
    before = _ffi.python_calls
    actual = inputs.run_jax(jaxattn.decode, arguments)
    assert _ffi.python_calls > before
    assert np.array_equal(bits(actual), bits(expected))
    jax.clear_caches()


SERVE = """
import jax, jax.numpy as jnp, jaxattn
from torch_core import build

limits = dict(num_qo_heads=64, num_kv_heads=8, head_dim=128, page_size=64)
named = [jaxattn.warmup(phase, **limits) for phase in ("decode", "prefill")]
assert [names[0] for names in named] == ["xqa", "native_prefill_fa3"], named

def refuse(*_):
    raise AssertionError("built after warmup")

build.load = refuse
for batch, rows in ((2, 3), (5, 40)):
    cache = jnp.ones((8 * batch, 64, 8, 128), jnp.bfloat16)
    query, key = (jnp.ones((rows * batch, heads, 128), jnp.bfloat16) for heads in (64, 8))
    table = jnp.arange(8 * batch, dtype=jnp.int32).reshape(batch, 8)
    lengths = jnp.full(batch, 300, jnp.int32)
    starts = jnp.arange(batch + 1, dtype=jnp.int32) * rows
    slots = jnp.arange(rows * batch, dtype=jnp.int32)
    caches = jax.jit(jaxattn.append_kv)(key, key, cache, cache, slots=slots)
    outs = [
        jax.jit(jaxattn.decode)(query[:batch], *caches, table, lengths),
        jax.jit(jaxattn.prefill, static_argnames="max_seqlen_q")(
            query, *caches, table, lengths, starts, max_seqlen_q=rows
        ),
    ]
    assert all((out == 1).all() for out in outs)
"""


def test_nothing_is_built_after_warmup():
    """A fresh process warms up, and steps of any batch then build no module."""
    done = subprocess.run([sys.executable, "-c", SERVE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
