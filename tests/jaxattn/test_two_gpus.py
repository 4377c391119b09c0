"""Two GPUs of one process: calls over KV heads, batch and pages, and the second GPU alone.

How far kernels split a sequence depends on how many heads a GPU has, and with it the last bits. So
the bits to equal are those of one GPU that is given each half; where the splits are the same, also
those of one GPU that is given the whole.
"""

import functools
import re
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxattn
import torch_core
from jaxattn import _ffi, _triton
from tests import compare, faults, inputs, kv_model
from tests.faults import gpu
from tests.inputs import Case
from tests.jaxattn.qsa.model import Model, decode_offsets

pytestmark = pytest.mark.gpu

CACHES = ("key_cache", "value_cache")
HEADS = dict(query=P(None, "x"), sinks=P("x")) | dict.fromkeys(CACHES, P(None, None, "x"))
BATCH = dict(query=P("x"), page_table=P("x"), seq_lens=P("x"))
PAGES = dict.fromkeys(CACHES, P("x"))

XQA = Case("xqa", (5, 1, 17, 300, 64, 0, 0, 640) * 5, num_qo_heads=64, num_kv_heads=8,
           head_dim=128, page_size=64, dtype="bfloat16")  # fmt: skip
LONG = replace(XQA, name="long", seq_lens=(9000, 5))  # split over blocks, with semaphores
E4M3 = replace(XQA, name="e4m3", kv_dtype="float8_e4m3fn", sinks=True,
               options=dict(k_scale=0.3, v_scale=0.7))  # fmt: skip
DRAFTS = replace(XQA, name="drafts", seq_lens=(5, 4, 17, 300, 2, 0), q_len=4, draft_mask="bool")
NATIVE = replace(XQA, name="native", options=dict(soft_cap=30.0))
FA3 = replace(XQA, name="fa3", seq_lens=(300, 17, 640), q_lens=(200, 3, 600))
FA2 = replace(FA3, name="fa2", kv_dtype="float8_e4m3fn")
CASES = [XQA, LONG, E4M3, DRAFTS, NATIVE, FA3, FA2]
SAME_SPLITS = ("xqa", "e4m3", "fa3")


@pytest.fixture(autouse=True)
def two_gpus():
    if jax.device_count() < 2:
        pytest.skip(f"needs two GPUs, this machine has {jax.device_count()}")


def mesh():
    return jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))


def placed(arrays, specs):
    return {
        name: jax.device_put(array, NamedSharding(mesh(), specs.get(name, P())))
        for name, array in arrays.items()
    }


def bits(result):
    return [inputs.to_numpy(x).view(np.uint8) for x in jax.tree.leaves(result)]


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))


def call_of(case, **more):
    arguments = case.make()
    arrays, static = faults.jax_arrays(arguments)
    function = functools.partial(getattr(jaxattn, case.phase), **static, **more)
    return arguments, arrays, jax.jit(lambda arrays: function(**arrays))


def half(arrays, specs, at):
    """What one of two devices holds of the arrays."""

    def part(array, spec):
        axis = list(spec).index("x") if "x" in spec else None
        return array if axis is None else jnp.split(array, 2, axis)[at]

    return {name: part(array, specs.get(name, P())) for name, array in arrays.items()}


def program(call, *given):
    """The compiled call; no cache crosses devices."""
    compiled = call.lower(*given).compile()
    assert "all-gather" not in compiled.as_text()
    return compiled


@pytest.mark.parametrize("case", CASES, ids=str)
def test_over_kv_heads(case):
    arguments, arrays, call = call_of(case)
    given = placed(arrays, HEADS)
    out = program(call, given)(given)
    assert out.sharding.spec[1] == "x"
    parts = [call(half(arrays, HEADS, at)) for at in range(2)]
    assert equal(out, jnp.concatenate(parts, 1))
    if case.name in SAME_SPLITS:
        assert equal(out, call(arrays))
    compare.check_attention(arguments, np.asarray(out))


@pytest.mark.parametrize("case", [XQA, LONG, E4M3, NATIVE], ids=str)
def test_over_batch(case):
    arguments, arrays, call = call_of(case)
    given = placed(arrays, BATCH)
    out = program(call, given)(given)
    parts = [call(half(arrays, BATCH, at)) for at in range(2)]
    assert equal(out, jnp.concatenate(parts))
    compare.check_attention(arguments, np.asarray(out))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_append_kv(kv_dtype, append_by):
    """In place on each GPU: the same memory, no copy of a cache."""
    case = kv_model.Append("", num_kv_heads=8, head_dim=128, dtype="bfloat16", kv_dtype=kv_dtype)
    arguments = case.make()
    arrays, static = faults.jax_arrays(arguments)
    rows = dict.fromkeys(("key", "value"), P(None, "x"))
    given = placed(arrays, HEADS | rows)
    caches = {name: given.pop(name) for name in CACHES}
    call = jax.jit(lambda caches, rest: jaxattn.append_kv(**caches, **rest, **static),
                   donate_argnums=0)  # fmt: skip
    compiled = program(call, caches, given)
    assert (_triton.TARGET in compiled.as_text()) == (append_by == "kernel")
    shape = list(arguments["key_cache"].shape)
    shape[2] //= 2
    assert not re.search(rf"\[{','.join(map(str, shape))}\]\S* copy", compiled.as_text())
    before = [pointers(caches[name]) for name in CACHES]
    results = compiled(caches, given)
    assert [pointers(cache) for cache in results] == before
    assert equal(results, jax.jit(lambda a: jaxattn.append_kv(**a, **static))(arrays))


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.mark.parametrize("case", [replace(XQA, sinks=True), LONG, E4M3], ids=str)
def test_context_parallel_decode(case):
    """Pages over two GPUs, against the oracle."""
    missing = case.make()["key_cache"].shape[0] % 2
    case = replace(case, extra_pages=case.extra_pages + missing)
    arguments, arrays, call = call_of(case, return_lse=True)
    out, lse = call(placed(arrays, PAGES))
    gpu.check(arguments, np.asarray(out), np.asarray(lse))


@pytest.mark.parametrize("via", ["triton", "dlpack"])
@pytest.mark.parametrize("split", ["heads", "pages"])
def test_qsa_step(split, via):
    """A layer's whole step: over KV heads, where attend has the bits of one GPU given each half,
    and over pages. Index keys and rings are the same whatever is split."""
    model = Model(layers=1, requests=3, num_qo_heads=8, num_kv_heads=4, head_dim=64, index_dim=64,
                  pages_per_seq=33, budget=128, dtype="bfloat16", via=via)  # fmt: skip
    lengths = jnp.array([500, 528, 5], jnp.int32)
    step = functools.partial(model.step, cu_seqlens_q=decode_offsets(model), num_decodes=3,
                             decode_query_len=1)  # fmt: skip
    x = model.rows(3)
    expected, state = jax.jit(step)(x, model.state(), lengths)
    given = placed(model.state(), HEADS if split == "heads" else PAGES)
    whole = jax.device_put((x, lengths), NamedSharding(mesh(), P()))
    compiled = jax.jit(step, donate_argnums=1).lower(whole[0], given, whole[1]).compile()
    assert split == "pages" or "all-gather" not in compiled.as_text()
    out, after = compiled(whole[0], given, whole[1])
    assert equal(after, state)
    np.testing.assert_allclose(
        np.asarray(out, np.float32), np.asarray(expected, np.float32), rtol=2e-2, atol=2e-2
    )


@pytest.mark.parametrize("via", ["triton", "dlpack"])
def test_qsa_attend_over_kv_heads(via):
    rng = np.random.default_rng(0)
    normal = functools.partial(inputs.normal, rng, dtype=inputs.DTYPES["bfloat16"])
    rows, pages = 64, 32
    caches = {name: normal((pages, 16, 4, 64)) for name in CACHES}
    table = rng.permutation(pages).reshape(2, 16).astype(np.int32)
    offsets = np.array([0, rows // 2, rows], np.int32)
    lengths = np.array([256, 200], np.int32)
    metadata, _ = jaxattn.qsa.build_metadata(
        table, lengths, offsets, num_rows=rows, num_pages=pages, page_size=16, compress_ratio=4,
        via=via,
    )  # fmt: skip
    selected = np.sort(rng.integers(0, 40, (rows, 8)).astype(np.int32), 1)
    tokens, counts = jaxattn.qsa.expand(selected, metadata, compress_ratio=4, via=via)
    arrays = dict(query=normal((rows, 16, 64)), gate=normal((rows, 16, 64)), **caches)
    arrays = {name: jnp.asarray(array) for name, array in arrays.items()}

    def call(arrays, table, metadata, tokens, counts):
        return jaxattn.qsa.attend(
            **arrays, page_table=table, metadata=metadata, token_indices=tokens, counts=counts,
            compress_ratio=4, return_lse=True, via=via,
        )  # fmt: skip

    specs = HEADS | dict(gate=P(None, "x"))
    rest = (jnp.asarray(table), metadata, tokens, counts)
    given = (placed(arrays, specs), *jax.device_put(rest, NamedSharding(mesh(), P())))
    jitted = jax.jit(call)
    result = program(jitted, *given)(*given)
    parts = [jitted(half(arrays, specs, at), *rest) for at in range(2)]
    assert equal(result, jax.tree.map(lambda *x: jnp.concatenate(x, 1), *parts))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_second_gpu_alone(case):
    """Committed to device 1: its result lies there, with the bits of device 0."""
    _, arrays, call = call_of(case)
    results = []
    for device in (jax.devices()[1], jax.devices()[0], jax.devices()[1]):
        out = call(jax.device_put(arrays, device))
        assert out.devices() == {device}
        results.append(out)
    assert equal(results[0], results[1]) and equal(results[0], results[2])


def test_second_gpu_alone_in_torch():
    for case in (XQA, LONG, NATIVE, FA3):
        function = getattr(torch_core, case.phase)
        one, other = (inputs.run_torch(function, case.make(), f"cuda:{at}") for at in (1, 0))
        assert np.array_equal(one.view(np.uint8), other.view(np.uint8))


FIRST = """
import sys
import jax, numpy as np, torch
import jaxattn
from tests.jaxattn import test_two_gpus as tests

if sys.argv[1] == "torch":
    tests.test_second_gpu_alone_in_torch()
else:
    for case in tests.CASES:
        tests.test_second_gpu_alone(case)
print("done")
"""


@pytest.mark.parametrize("front", ["torch", "jax"])
def test_second_gpu_first(front):
    """A process whose first call of every kernel is on the second GPU."""
    root = inputs.__file__.rsplit("/tests/", 1)[0]
    result = subprocess.run(
        [sys.executable, "-c", FIRST, front], cwd=root, capture_output=True, text=True
    )
    assert result.stdout.endswith("done\n"), result.stderr


def test_both_gpus_at_once():
    """Programs of both GPUs in flight, with semaphores and scratch of their own."""
    _, arrays, call = call_of(LONG)
    expected = call(arrays)
    there = [jax.device_put(arrays, device) for device in jax.devices()[:2]]
    for _ in range(50):
        results = [call(there[at]) for at in (0, 1, 0, 1)]
        assert all(equal(result, expected) for result in results)


def test_no_python_in_a_sharded_step(append_by):
    """Donated steps of append and decode run without a callback, on both GPUs."""
    _, arrays, _ = call_of(XQA)
    given = placed(arrays, HEADS)
    key = jax.device_put(jnp.ones((40, 8, 128), jnp.bfloat16), NamedSharding(mesh(), P(None, "x")))
    table, lengths = given["page_table"], given["seq_lens"]

    def step(query, caches):
        caches = jaxattn.append_kv(key, key, *caches, table, positions=lengths - 1)
        return query + jaxattn.decode(query, *caches, table, lengths), caches

    jitted = jax.jit(step, donate_argnums=1)
    state = given["query"], tuple(given[name] for name in CACHES)
    state = jax.block_until_ready(jitted(*state))
    before = _ffi.python_calls
    for _ in range(20):
        state = jitted(*state)
    jax.block_until_ready(state)
    assert _ffi.python_calls == before


def test_torch_devices_of_arrays():
    """What JAX calls device 1 is torch's cuda:1."""
    array = jax.device_put(jnp.zeros(4), jax.devices()[1])
    assert jaxattn.to_torch(array).device == torch.device("cuda", 1)
