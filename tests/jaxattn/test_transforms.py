"""jaxattn under JAX's transformations, threads and x64, and the conversions to torch."""

import concurrent.futures
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax._src import test_util as jtu

import jaxattn
from tests import compare, inputs, kv_model
from tests.inputs import DTYPES, Case

DECODE = Case("decode", (24, 17, 9), sinks=True)
DRAFTS = Case("drafts", (24, 17, 9), q_len=3, draft_mask="bool", dtype="bfloat16",
              options=dict(window_left=6))  # fmt: skip
PREFILL = Case("prefill", (24, 17, 9), q_lens=(4, 3, 2), extra_rows=1)
CALLS = [DECODE, DRAFTS, PREFILL]
LENGTHS = np.array([[24, 17, 9], [1, 0, 3], [8, 16, 4], [23, 1, 0]], np.int32)


def parts(case):
    """The NumPy call, its JAX arrays, and the function with the static arguments."""
    arguments = case.make()
    arrays = {k: jnp.array(v) for k, v in arguments.items() if isinstance(v, np.ndarray)}
    static = {k: v for k, v in arguments.items() if not isinstance(v, np.ndarray)}
    function = functools.partial(getattr(jaxattn, case.phase), **static, return_lse=True)
    return arguments, arrays, function


def check(arguments, results):
    compare.check_attention(arguments, *map(np.asarray, results))


@pytest.mark.parametrize("case", CALLS, ids=str)
def test_one_trace_and_compile_for_all_lengths(case):
    """Nothing of the first call's values is kept."""
    arguments, arrays, function = parts(case)
    traces = []

    @jax.jit
    def step(arrays, lengths):
        traces.append(1)
        return function(**arrays | dict(seq_lens=lengths))

    jax.block_until_ready(step(arrays, LENGTHS[0]))
    with jtu.count_jit_and_pmap_lowerings() as lowerings:
        for lengths in LENGTHS:
            check(arguments | dict(seq_lens=lengths), step(arrays, lengths))
    assert len(traces) == 1 and lowerings() == 0


@pytest.mark.parametrize("case", CALLS, ids=str)
def test_eager_calls_compile_once(case):
    """Outside jit too, other lengths and scales reuse the first compilation."""
    arguments, arrays, function = parts(case)
    jax.block_until_ready(function(**arrays, k_scale=0.3))
    with jtu.count_jit_and_pmap_lowerings() as lowerings:
        for scale, lengths in enumerate(LENGTHS, 1):
            changes = dict(seq_lens=jnp.array(lengths))
            result = function(**arrays | changes, k_scale=scale / 2)
            check(arguments | dict(seq_lens=lengths, k_scale=scale / 2), result)
    assert lowerings() <= 1


@pytest.mark.parametrize("case", CALLS, ids=str)
def test_scan_over_lengths(case):
    """Each step sees its own lengths."""
    arguments, arrays, function = parts(case)

    def body(count, lengths):
        return count + 1, function(**arrays | dict(seq_lens=lengths))

    count, results = jax.jit(lambda lengths: jax.lax.scan(body, 0, lengths))(LENGTHS)
    assert count == len(LENGTHS)
    for step, lengths in enumerate(LENGTHS):
        check(arguments | dict(seq_lens=lengths), [r[step] for r in results])


def generate_by_while(step, state, count):
    return jax.lax.while_loop(
        lambda carry: carry[0] < count, lambda c: (c[0] + 1, step(c[0], c[1])), (0, state)
    )[1]


def generate_by_fori(step, state, count):
    return jax.lax.fori_loop(0, count, step, state)


@pytest.mark.parametrize("loop", [generate_by_while, generate_by_fori])
def test_loop_that_grows_its_lengths(loop):
    """Append, attend, feed back; equal to the same steps one by one, for a traced step count."""
    case = kv_model.Append("", tokens=2, batch=2, addressing="rows", head_dim=8, pages_per_seq=4)
    arrays = {k: jnp.array(v) for k, v in case.make().items() if isinstance(v, np.ndarray)}

    def step(index, state):
        query, key_cache, value_cache, lengths = state
        rows = query[:, :2]
        key_cache, value_cache = jaxattn.append_kv(
            rows, rows + 1, key_cache, value_cache, arrays["page_table"], positions=lengths
        )
        query = jaxattn.decode(query, key_cache, value_cache, arrays["page_table"], lengths + 1)
        return query, key_cache, value_cache, lengths + 1

    start = (
        jax.random.normal(jax.random.key(0), (2, 4, 8)),
        arrays["key_cache"],
        arrays["value_cache"],
        jnp.array([0, 3], jnp.int32),
    )
    run = jax.jit(lambda state, count: loop(step, state, count))
    expected = start
    for count in range(5):
        for got, want in zip(run(start, count), expected, strict=True):
            assert np.array_equal(got, want)
        expected = step(count, expected)
    assert run._cache_size() == 1
    assert not np.array_equal(expected[1], start[1])


def test_donated_query_and_caches():
    """Donation of arguments that the call only reads changes no result."""
    arguments, arrays, function = parts(DECODE)
    donated = {name: arrays.pop(name) for name in ("query", "key_cache", "value_cache")}
    step = jax.jit(lambda donated, kept: function(**donated, **kept), donate_argnums=0)
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        check(arguments, step(donated, arrays))


MAPPED = [
    ("query",), ("seq_lens",), ("page_table",), ("query", "page_table", "seq_lens"),
    ("key_cache",), ("value_cache",), ("key_cache", "value_cache"),
    ("query", "key_cache", "value_cache", "page_table", "seq_lens"),
]  # fmt: skip


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("names", MAPPED, ids="-".join)
def test_vmap_equals_separate_calls(names, kv_layout):
    """Whichever of the arrays carry the mapped axis; bit for bit, being batch-invariant."""
    case = Case("", (24, 17, 9), kv_layout=kv_layout, sinks=True, q_len=2, draft_mask="bool",
                options=dict(batch_invariant=True))  # fmt: skip
    calls = [case.make(seed) for seed in range(3)]
    calls = [calls[0] | {name: call[name] for name in names} for call in calls]
    if "seq_lens" in names:
        for call, lengths in zip(calls, LENGTHS, strict=False):
            call["seq_lens"] = lengths
    _, arrays, function = parts(case)
    stacked = {name: jnp.stack([call[name] for call in calls]) for name in names}
    outs, lses = jax.jit(jax.vmap(lambda mapped: function(**arrays | mapped)))(stacked)
    for index, call in enumerate(calls):
        out, lse = inputs.run_jax(jaxattn.decode, call, return_lse=True)
        np.testing.assert_array_equal(outs[index], out)
        np.testing.assert_array_equal(lses[index], lse)
        check(call, (outs[index], lses[index]))


def test_vmap_over_masks_and_in_axes():
    """A mapped draft mask, and an axis other than the first."""
    case = Case("", (24, 17, 9), q_len=2, draft_mask="packed")
    calls = [case.make(seed) for seed in range(2)]
    _, arrays, function = parts(case)
    query = jnp.stack([call["query"] for call in calls], 2)
    mask = jnp.stack([call["draft_mask"] for call in calls])
    outs, lses = jax.vmap(
        lambda query, mask: function(**arrays | dict(query=query, draft_mask=mask)), (2, 0)
    )(query, mask)
    for index, call in enumerate(calls):
        mixed = calls[0] | dict(query=call["query"], draft_mask=call["draft_mask"])
        check(mixed, (outs[index], lses[index]))


def test_nested_vmap():
    """Two mapped axes are folded one after the other."""
    arguments, arrays, function = parts(Case("", (24, 17, 9)))
    rng = np.random.default_rng(1)
    queries = rng.normal(size=(2, 3, *arguments["query"].shape)).astype(np.float32)
    lengths = LENGTHS[:3]
    call = jax.vmap(
        jax.vmap(lambda q, n: function(**arrays | dict(query=q, seq_lens=n))), in_axes=(0, None)
    )
    outs, lses = call(queries, lengths)
    for i, j in np.ndindex(2, 3):
        check(arguments | dict(query=queries[i, j], seq_lens=lengths[j]), (outs[i, j], lses[i, j]))


@pytest.mark.parametrize("name", ["sinks", "sm_scale", "k_scale"])
def test_vmap_over_shared_numbers_is_refused(name):
    """The message names the call and the way out."""
    _, arrays, function = parts(DECODE)
    value = jnp.stack([arrays["sinks"]] * 2) if name == "sinks" else jnp.ones(2)
    with pytest.raises(NotImplementedError, match=r"jaxattn\.decode under vmap .* jax\.lax\.map"):
        jax.vmap(lambda value: function(**arrays | {name: value}))(value)
    results = jax.lax.map(lambda value: function(**arrays | {name: value}), value)
    assert results[0].shape == (2, *arrays["query"].shape)


def mapped_call(name):
    if name == "prefill":
        _, arrays, function = parts(PREFILL)
        return lambda query: function(**arrays | dict(query=query)), arrays["query"]
    made = kv_model.CASES[0].make()
    arrays = {k: jnp.array(v) for k, v in made.items() if isinstance(v, np.ndarray)}
    return lambda key: jaxattn.append_kv(**arrays | dict(key=key)), arrays["key"]


@pytest.mark.parametrize("name", ["prefill", "append_kv"])
def test_vmap_is_refused(name):
    """By name, inside jit and outside."""
    call, array = mapped_call(name)
    for outer in (jax.vmap(call), jax.jit(jax.vmap(call)), jax.vmap(jax.jit(call))):
        with pytest.raises(NotImplementedError, match=rf"jaxattn\.{name} does not take vmap: "):
            outer(jnp.stack([array, array]))


def differentiated(name):
    """A scalar function of one array of a call."""
    if name == "merge_states":
        lse = jnp.zeros((3, 4))
        out = jnp.ones((3, 4, 8))
        return lambda x: jaxattn.merge_states(x, lse, out, lse)[0].sum(), out
    if name == "append_kv":
        call, key = mapped_call(name)
        return lambda x: call(x)[0].sum(), key
    _, arrays, function = parts(DECODE if name == "decode" else PREFILL)
    return lambda x: function(**arrays | dict(query=x))[0].sum(), arrays["query"]


TRANSFORMS = dict(
    grad=lambda f, x: jax.grad(f)(x),
    value_and_grad_in_jit=lambda f, x: jax.jit(jax.value_and_grad(f))(x),
    jvp=lambda f, x: jax.jvp(f, (x,), (x,)),
    vjp=lambda f, x: jax.vjp(f, x),
    linearize=lambda f, x: jax.linearize(f, x),
    hessian=lambda f, x: jax.hessian(f)(x),
    grad_of_checkpoint=lambda f, x: jax.grad(jax.checkpoint(f))(x),
    grad_of_scan=lambda f, x: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=2)[0]
    )(x),
)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["decode", "prefill", "append_kv", "merge_states"])
def test_gradients_are_refused(name, transform):
    """By name, with the way out."""
    function, array = differentiated(name)
    with pytest.raises(
        NotImplementedError, match=rf"jaxattn\.{name} is for inference.*jax\.lax\.stop_gradient"
    ):
        TRANSFORMS[transform](function, array)


@pytest.mark.parametrize("name", ["decode", "prefill", "append_kv", "merge_states"])
def test_stop_gradient_is_the_way_out(name):
    """The value is a constant for the gradient of the rest."""
    function, array = differentiated(name)

    def loss(array):
        return (array**2).sum() + function(jax.lax.stop_gradient(array))

    value, gradient = jax.value_and_grad(loss)(array)
    np.testing.assert_allclose(gradient, 2 * array, rtol=1e-6)
    np.testing.assert_allclose(value, (array**2).sum() + function(array), rtol=1e-5)


@pytest.mark.parametrize("case", CALLS, ids=str)
def test_checkpoint_without_a_gradient(case):
    """Rematerialisation around an inference call is harmless."""
    arguments, arrays, function = parts(case)
    check(arguments, jax.jit(jax.checkpoint(lambda arrays: function(**arrays)))(arrays))


@pytest.mark.parametrize("case", CALLS, ids=str)
def test_numbers_and_traced_scales_give_the_same_bits(case):
    """Python, NumPy and JAX spellings of one value, static or traced."""
    _, arrays, function = parts(case)
    values = dict(sm_scale=0.3, q_scale=2.0, k_scale=0.7, v_scale=1.9)
    expected = function(**arrays, **values)
    kinds = [np.float32, np.float64, np.array, jnp.float32,
             lambda value: jnp.array(value, jnp.float32)]  # fmt: skip
    spelled = [{name: kind(value) for name, value in values.items()} for kind in kinds]
    calls = [lambda given=given: function(**arrays, **given) for given in spelled]
    calls.append(lambda: jax.jit(lambda given: function(**arrays, **given))(values))
    calls.append(lambda: jax.jit(lambda: function(**arrays, **values))())
    calls.append(lambda: function(**arrays, **values | dict(k_scale=jnp.float32(0.7))))
    for call in calls:
        for result, want in zip(call(), expected, strict=True):
            assert np.array_equal(result, want)


def test_threads():
    """Calls of several threads at once, compiled and not, each with its own lengths."""
    prepared = [parts(case) for case in CALLS]

    def work(index):
        arguments, arrays, function = prepared[index % len(prepared)]
        lengths = LENGTHS[index % len(LENGTHS)]
        call = jax.jit(lambda arrays: function(**arrays)) if index % 2 else function
        given = arrays | dict(seq_lens=jnp.array(lengths))
        check(arguments | dict(seq_lens=lengths), call(given) if index % 2 else call(**given))
        return index

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(24))) == list(range(24))


def test_unused_and_repeated_calls():
    """XLA may drop or merge calls; what is used is right."""
    arguments, arrays, function = parts(DECODE)

    @jax.jit
    def step(arrays):
        function(**arrays | dict(seq_lens=arrays["seq_lens"] - 1))
        first, second = function(**arrays), function(**arrays)
        return first[0] + 0, second[1]

    check(arguments, step(arrays))


ROUND_TRIP = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "bool", "int8",
              "uint8", "int32", "uint16", "uint32"]  # fmt: skip


def values(dtype, shape=(4, 32)):
    rng = np.random.default_rng(0)
    return (rng.normal(size=shape) * 3).astype(np.float32).astype(np.int32).astype(
        DTYPES.get(dtype, dtype))  # fmt: skip


def bits_of(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ROUND_TRIP)
def test_to_torch_shares_memory(dtype):
    """Same pointer, dtype, shape and bits."""
    array = jax.block_until_ready(jnp.array(values(dtype)))
    tensor = jaxattn.to_torch(array)
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    assert str(tensor.dtype) == f"torch.{dtype}" and tuple(tensor.shape) == array.shape
    assert bits_of(tensor) == values(dtype).tobytes()


@pytest.mark.parametrize("dtype", ROUND_TRIP)
def test_to_jax_shares_memory(dtype):
    """Same pointer, dtype, shape and bits, and back."""
    tensor = jaxattn.to_torch(jnp.array(values(dtype))).clone()
    array = jaxattn.to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert array.dtype.name == dtype and array.shape == tuple(tensor.shape)
    assert np.asarray(array).tobytes() == values(dtype).tobytes()
    assert jaxattn.to_torch(array).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3, 1, 5)])
def test_conversions_keep_every_shape(shape):
    """0-d and empty arrays too."""
    array = jnp.array(values("float32", shape))
    tensor = jaxattn.to_torch(array)
    assert tuple(tensor.shape) == shape
    back = jaxattn.to_jax(tensor)
    assert back.shape == shape and np.array_equal(back, array)


@pytest.mark.parametrize("start", [16, 32])
def test_to_jax_of_a_slice_shares_memory(start):
    """A contiguous slice that starts inside its storage, at the 64 bytes that XLA asks for."""
    tensor = torch.arange(64, dtype=torch.float32)[start:]
    array = jaxattn.to_jax(tensor)
    assert np.array_equal(array, np.arange(start, 64, dtype=np.float32))
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()


def test_to_jax_says_what_it_copies():
    """XLA reads no CPU memory off a 64-byte boundary, so the docstring must not promise sharing."""
    tensor = torch.arange(64, dtype=torch.float32)[1:17]
    array = jaxattn.to_jax(tensor)
    assert np.array_equal(array, np.arange(1, 17, dtype=np.float32))
    shared = array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert shared or "64 bytes" in jaxattn.to_jax.__doc__


def test_to_jax_drops_the_gradient():
    """A tensor that wants a gradient is passed as its values."""
    tensor = torch.ones(64, requires_grad=True)
    array = jaxattn.to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr() and tensor.requires_grad


def test_a_torch_tensor_reaches_decode():
    """A cache that torch holds is read where it lies."""
    arguments, arrays, function = parts(DECODE)
    caches = {
        name: jaxattn.to_jax(inputs.to_torch(arguments[name]))
        for name in ("key_cache", "value_cache")
    }
    check(arguments, function(**arrays | caches))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.int16, torch.complex64])
def test_to_jax_refuses_other_dtypes(dtype):
    """64-bit ones would be cut."""
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(TypeError, match=f"^tensor must be one of bfloat16, .*, got {name}$"):
        jaxattn.to_jax(torch.zeros(2, dtype=dtype))


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_to_torch_refuses_64_bits(dtype):
    """As the other way."""
    with jax.enable_x64(True):
        array = jnp.zeros(2, dtype)
        assert array.dtype == dtype
        with pytest.raises(TypeError, match=f"^array must be one of bfloat16, .*, got {dtype}$"):
            jaxattn.to_torch(array)


@pytest.mark.parametrize("case", CALLS, ids=str)
def test_x64_mode(case):
    """The same bits as without; 64-bit scalars are welcome as scales."""
    arguments, arrays, function = parts(case)
    expected = function(**arrays, k_scale=0.7)
    with jax.enable_x64(True):
        for scale in (0.7, np.float64(0.7), jnp.float64(0.7)):
            results = function(**arrays, k_scale=scale)
            assert all(map(np.array_equal, results, expected))
        results = jax.jit(lambda arrays: function(**arrays, k_scale=0.7))(arrays)
    check(arguments | dict(k_scale=0.7), results)


def test_x64_mode_with_mapped_caches():
    """The page numbers that vmap makes stay int32."""
    arguments, arrays, function = parts(Case("", (24, 17, 9)))
    with jax.enable_x64(True):
        caches = {n: jnp.stack([arrays[n], arrays[n] * 2]) for n in ("key_cache", "value_cache")}
        outs, lses = jax.vmap(lambda caches: function(**arrays | caches))(caches)
    check(arguments, (outs[0], lses[0]))
    doubled = {name: arguments[name] * 2 for name in caches}
    check(arguments | doubled, (outs[1], lses[1]))


@pytest.mark.parametrize("name", ["seq_lens", "page_table", "cu_seqlens_q"])
def test_x64_lengths_are_refused(name):
    """An int64 array raises while tracing, whether JAX or NumPy holds it."""
    arguments, arrays, function = parts(PREFILL)
    wide = arguments[name].astype(np.int64)
    with pytest.raises(TypeError, match=f"^{name} must be int32 .*, got int64"):
        function(**arrays | {name: wide})
    with jax.enable_x64(True):
        array = jnp.array(wide)
        assert array.dtype == np.int64
        with pytest.raises(TypeError, match=f"^{name} must be int32 .*, got int64"):
            jax.eval_shape(lambda array: function(**arrays | {name: array}), array)


def test_merge_states_in_x64_mode():
    """float32 stays float32."""
    out, lse = jnp.ones((2, 3, 4), jnp.float32), jnp.zeros((2, 3), jnp.float32)
    with jax.enable_x64(True):
        merged = jaxattn.merge_states(out, lse, out, lse)
    assert [part.dtype.name for part in merged] == ["float32", "float32"]
    np.testing.assert_allclose(merged[1], np.log(2), rtol=1e-6)


def test_process_with_x64_from_the_start():
    """A fresh process with JAX_ENABLE_X64 decodes, appends and merges."""
    code = """
import jax, jax.numpy as jnp, numpy as np, jaxattn
from tests import compare, inputs
from tests.inputs import Case
assert jnp.zeros(1).dtype == "float64"
call = Case("", (9, 30)).make()
out, lse = inputs.run_jax(jaxattn.decode, call, return_lse=True)
compare.check_attention(call, out, lse)
jaxattn.merge_states(out, lse, out, lse)
cache = jnp.array(call["key_cache"])
new = cache[0, :2] * 2
key, _ = jaxattn.append_kv(new, new, cache, cache, slots=jnp.array([3, -1], "int32"))
assert np.array_equal(key[0, 3], new[0]) and np.array_equal(key[1:], cache[1:])
print("done")
"""
    root = inputs.__file__.rsplit("/tests/", 1)[0]
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True,
        env={**os.environ, "JAX_ENABLE_X64": "1"},
    )  # fmt: skip
    assert result.stdout == "done\n", result.stderr
