"""Faults (a) on a GPU, R11 to R16: lifetimes, donation, devices and memory."""

import os
import pathlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxattn
from tests import faults, inputs
from tests.faults import gpu
from tests.faults.gpu import bits, first, jitted
from tests.faults.interop import CACHE_NAMES

pytestmark = pytest.mark.gpu

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_r11_nothing_is_kept_between_calls(phase, backend):
    """Same shapes, new shapes, and for the callback a failing call: good ones stay right."""
    path = gpu.XQA if phase == "decode" else gpu.FA3

    def call(lengths, seed):
        arguments = path.case(lengths, tuple(min(n, 3) for n in lengths)).make(seed)
        out = gpu.run("jax", phase, arguments, backend=backend)
        gpu.check(arguments, out)
        return arguments

    for lengths, seed in (((9, 30), 0), ((9, 30), 1), ((4, 12), 2), ((5, 0, 17), 3)):
        arguments = call(lengths, seed)
    if backend == "reference":
        wrong = arguments | dict(seq_lens=arguments["seq_lens"] + 1000)
        for _ in range(2):
            with pytest.raises(faults.RUNTIME_ERRORS["jax"], match="seq_lens must be in"):
                gpu.run("jax", phase, wrong, backend=backend)
            call((5, 0, 17), 4)


@pytest.mark.parametrize("donate", [False, True])
def test_r12_append_and_decode_in_one_program(donate, append_by):
    """A decode before the append reads the old cache and one after it the new token; caches that
    are not donated keep their bits, donated ones their memory."""
    arguments = gpu.XQA.case((9, 30)).make()
    arrays, static = faults.jax_arrays(arguments)
    caches = [arrays.pop(name) for name in CACHE_NAMES]
    rng = np.random.default_rng(9)
    key = inputs.normal(rng, (2, 2, 128), inputs.DTYPES["bfloat16"])

    def decode(caches):
        return jaxattn.decode(**arrays, **dict(zip(CACHE_NAMES, caches, strict=True)), **static)

    def step(caches, key):
        old = decode(caches)
        places = dict(positions=arrays["seq_lens"] - 1)
        jaxattn.append_kv(3 * key, key, *caches, arrays["page_table"], **places)  # unused
        written = jaxattn.append_kv(key, 2 * key, *caches, arrays["page_table"], **places)
        return old, decode(written), written

    old, new, written = jax.jit(step, donate_argnums=0 if donate else ())(caches, key)
    assert [cache.is_deleted() for cache in caches] == [donate, donate]
    gpu.check(arguments, np.asarray(old))
    after = arguments | dict(zip(CACHE_NAMES, map(np.asarray, written), strict=True))
    gpu.check(after, np.asarray(new))
    for name, expected in zip(CACHE_NAMES, (key, 2 * key), strict=True):
        changed = (after[name] != arguments[name]).any((2, 3)).sum()
        assert changed == 2
        for request in range(2):
            page, offset = faults.token_places(after, request)
            np.testing.assert_array_equal(after[name][page[-1], offset[-1]], expected[request])
    if not donate:
        for cache, name in zip(caches, CACHE_NAMES, strict=True):
            assert faults.same_bits(np.asarray(cache), arguments[name])


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("split", ["heads", "batch"])
def test_r13_shard_map_of_decode(split, devices):
    """Split over KV heads or over the batch, every device gives its part of one device's answer."""
    if jax.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs, this machine has {jax.device_count()}")
    arguments = gpu.XQA.case((9, 300, 0, 64)).make()
    arrays, static = faults.jax_arrays(arguments)
    heads = P(None, None, "x")
    specs = dict(query=P(None, "x"), key_cache=heads, value_cache=heads)
    if split == "batch":
        specs = dict(query=P("x"), page_table=P("x"), seq_lens=P("x"))
    sharded = jax.shard_map(
        lambda arrays: jaxattn.decode(**arrays, **static),
        mesh=jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,)),
        in_specs=({name: specs.get(name, P()) for name in arrays},),
        out_specs=P(None, "x") if split == "heads" else P("x"),
    )
    out = jax.jit(sharded)(arrays)
    assert len(out.devices()) == devices
    gpu.check(arguments, np.asarray(out))


def test_r13_calls_from_several_threads():
    """4 threads with programs and lengths of their own, in flight together, stay right."""
    wrong = []

    def work(path, seed):
        arguments = path.case((300 + 100 * seed, 17, 0), (5, 3, 2)).make(seed)
        arrays, _ = faults.jax_arrays(arguments)
        expected = bits(first(jitted(path)(arrays)))
        wrong.extend(
            (path, step)
            for step in range(50)
            if not np.array_equal(bits(first(jitted(path)(arrays))), expected)
        )
        gpu.check(arguments, expected.view(inputs.DTYPES["bfloat16"]))

    threads = [
        threading.Thread(target=work, args=(path, seed))
        for seed, path in enumerate([gpu.XQA, gpu.DECODE, gpu.FA3, gpu.FA2])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


PREALLOCATED = """
import sys
order = sys.argv[1].split(",")
for name in order:
    if name == "jax":
        import jax, jax.numpy as jnp, jaxattn
        jnp.ones(4).block_until_ready()  # takes its share of the memory here
    else:
        import torch, torch_core
        torch.ones(4, device="cuda")
workspace = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
product = torch.randn(512, 512, device="cuda") @ torch.randn(512, 512, device="cuda")
cache = torch.ones(4, 64, 2, 128, dtype=torch.bfloat16, device="cuda")
query = torch.ones(1, 16, 128, dtype=torch.bfloat16, device="cuda")
table = torch.arange(4, dtype=torch.int32, device="cuda").view(1, 4)
lengths = torch.tensor([200], dtype=torch.int32, device="cuda")
call = (query, cache, cache * 2, table, lengths)
assert (torch_core.decode(*call) == 2).all()
assert (jax.jit(jaxattn.decode)(*map(jaxattn.to_jax, call)) == 2).all()
assert product.isfinite().all() and not workspace.any()
print("right")
"""


def test_r16_jax_and_torch_share_the_memory():
    """In either import order, with JAX's preallocation on, torch gets a workspace and cuBLAS."""
    environment = os.environ | dict(
        XLA_PYTHON_CLIENT_PREALLOCATE="true", XLA_PYTHON_CLIENT_MEM_FRACTION="0.1"
    )
    torch.cuda.empty_cache()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PREALLOCATED, order],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for order in ("jax,torch", "torch,jax")
    ]
    for process in processes:
        try:
            out, errors = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert out.strip().endswith("right"), errors[-2000:]


def test_r12_one_array_as_both_caches(append_by):
    """Donating one array as both caches is an error that says so."""
    cache = jnp.zeros((4, 64, 2, 128), jnp.bfloat16)
    key = jnp.ones((1, 2, 128), jnp.bfloat16)
    slots = jnp.array([3], jnp.int32)

    def append(key_cache, value_cache):
        return jaxattn.append_kv(key, 2 * key, key_cache, value_cache, slots=slots)

    key_cache, value_cache = jax.jit(append)(cache, cache)
    assert key_cache[0, 3, 0, 0] == 1 and value_cache[0, 3, 0, 0] == 2 and not cache.any()
    with pytest.raises(faults.RUNTIME_ERRORS["jax"], match="donate"):
        jax.block_until_ready(jax.jit(append, donate_argnums=(0, 1))(cache, cache))
