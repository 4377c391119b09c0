"""append_kv against a NumPy loop, merge_states against the oracle, inside jit."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattn
from tests import inputs, kv_model, split


def arrays_of(arguments):
    return {k: jnp.array(v) for k, v in arguments.items() if isinstance(v, np.ndarray)}


def static_of(arguments):
    return {k: v for k, v in arguments.items() if not isinstance(v, np.ndarray)}


@pytest.mark.parametrize("case", kv_model.CASES, ids=str)
def test_append_equals_loop(case):
    """Every bit of both caches, for each way to address."""
    arguments = case.make()
    results = inputs.run_jax(jaxattn.append_kv, arguments)
    for result, expected in zip(results, kv_model.append(arguments), strict=True):
        assert kv_model.same_bits(result, expected)


@pytest.mark.parametrize("case", kv_model.CASES[:8], ids=str)
def test_append_outside_jit_leaves_the_arrays(case):
    """The caches that were passed keep their values."""
    arguments = case.make()
    arrays = arrays_of(arguments)
    results = jaxattn.append_kv(**arrays, **static_of(arguments))
    for name, result, expected in zip(
        ("key_cache", "value_cache"), results, kv_model.append(arguments), strict=True
    ):
        assert kv_model.same_bits(np.asarray(result), expected)
        assert kv_model.same_bits(np.asarray(arrays[name]), arguments[name])


DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_donated_caches_are_not_copied(kv_layout, kv_dtype):
    """No temporary of a cache's size, and no cache-sized result but the parameters' own memory."""
    dtype = "bfloat16" if kv_dtype.startswith("float8") else kv_dtype
    arguments = kv_model.Append("", dtype=dtype, kv_layout=kv_layout, kv_dtype=kv_dtype).make()
    arrays = arrays_of(arguments)
    pages = jnp.zeros((512, *arrays.pop("key_cache").shape[1:]), kv_dtype)
    del arrays["value_cache"]
    step = jax.jit(
        lambda key, value, arrays: jaxattn.append_kv(
            key_cache=key, value_cache=value, kv_layout=kv_layout, **arrays
        ),
        donate_argnums=(0, 1),
    )
    compiled = step.lower(pages, pages + 1, arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pages.nbytes // 4
    shape = ",".join(map(str, pages.shape))
    made = [line for line in compiled.as_text().splitlines() if f"[{shape}]" in line.split("(")[0]]
    assert not [line for line in made if re.search(r"\b(copy|convert|bitcast-convert)\(", line)]


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_donated_caches_are_written_in_place(kv_layout, kv_dtype):
    """Same memory before and after, and the donated arrays are gone."""
    dtype = "bfloat16" if kv_dtype.startswith("float8") else kv_dtype
    arguments = kv_model.Append("", dtype=dtype, kv_layout=kv_layout, kv_dtype=kv_dtype).make()
    arrays = arrays_of(arguments)
    caches = [arrays.pop("key_cache"), arrays.pop("value_cache")]
    step = jax.jit(
        lambda key, value, arrays: jaxattn.append_kv(
            key_cache=key, value_cache=value, kv_layout=kv_layout, **arrays
        ),
        donate_argnums=(0, 1),
    )
    before = [cache.unsafe_buffer_pointer() for cache in caches]
    results = step(*caches, arrays)
    assert [result.unsafe_buffer_pointer() for result in results] == before
    assert all(cache.is_deleted() for cache in caches)
    for result, expected in zip(results, kv_model.append(arguments), strict=True):
        assert kv_model.same_bits(np.asarray(result), expected)


def test_one_array_for_both_caches():
    """Pure functions may be given the same array twice."""
    arguments = kv_model.Append("").make()
    arguments["value_cache"] = arguments["key_cache"]
    arrays = arrays_of(arguments)
    arrays["value_cache"] = arrays["key_cache"]
    results = jax.jit(jaxattn.append_kv)(**arrays)
    for result, expected in zip(results, kv_model.append(arguments), strict=True):
        assert kv_model.same_bits(np.asarray(result), expected)


def test_append_twice_with_other_places():
    """One compiled function, different positions and scales."""
    calls = [kv_model.Append("", kv_dtype="float8_e4m3fn").make(seed) for seed in range(3)]
    traces = []

    @jax.jit
    def step(arrays):
        traces.append(1)
        return jaxattn.append_kv(**arrays)

    for scale, arguments in enumerate(calls, 1):
        arguments["k_scale"] = np.array(scale / 4, np.float32)
        results = step(arrays_of(arguments))
        for result, expected in zip(results, kv_model.append(arguments), strict=True):
            assert kv_model.same_bits(np.asarray(result), expected)
    assert len(traces) == 1


def test_append_in_scan():
    """Carried caches see every write."""
    case = kv_model.Append("", tokens=3, addressing="rows")
    arguments = case.make()
    arrays = arrays_of(arguments)
    steps = np.array([[0, 1, 2], [5, 4, 3], [-1, 9, 11]], np.int32)

    def body(caches, positions):
        named = dict(key_cache=caches[0], value_cache=caches[1], positions=positions)
        return jaxattn.append_kv(**arrays | named), None

    caches = (arrays["key_cache"], arrays["value_cache"])
    results, _ = jax.jit(lambda caches: jax.lax.scan(body, caches, jnp.array(steps)))(caches)
    for positions in steps:
        key, value = kv_model.append(arguments | dict(positions=positions))
        arguments |= dict(key_cache=key, value_cache=value)
    for result, name in zip(results, ("key_cache", "value_cache"), strict=True):
        assert kv_model.same_bits(np.asarray(result), arguments[name])


@pytest.mark.parametrize("case", split.CASES, ids=str)
def test_merged_halves_equal_the_whole(case):
    """Attention over two halves of the keys, merged, is attention over all."""
    whole, halves = split.halves(case)
    parts = [inputs.run_jax(jaxattn.decode, half, return_lse=True) for half in halves]
    split.check(whole, inputs.run_jax(jaxattn.merge_states, split.states(*parts)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_merge_equals_loop(dtype):
    """Random states, with parts that saw no key and whose output holds NaN."""
    states = split.random_states(dtype)
    out, lse = inputs.run_jax(jaxattn.merge_states, states)
    split.check_merge(states, out, lse)
    assert out.dtype == states["out_a"].dtype and lse.dtype == np.float32


def test_merge_under_vmap():
    """Equals one call for each element."""
    calls = [split.random_states("float32", seed=seed) for seed in range(3)]
    stacked = {name: np.stack([call[name] for call in calls]) for name in calls[0]}
    outs, lses = inputs.run_jax(
        lambda **arrays: jax.vmap(lambda a: jaxattn.merge_states(**a))(arrays), stacked
    )
    for index, states in enumerate(calls):
        split.check_merge(states, outs[index], lses[index])


def test_a_table_without_entries_takes_skipped_rows():
    """Nothing exists in it, so nothing is written."""
    cache, key = jnp.ones((3, 4, 1, 2)), jnp.zeros((2, 1, 2))
    table, skipped = jnp.zeros((2, 0), jnp.int32), jnp.full(2, -1, jnp.int32)
    for places in (skipped, jnp.arange(2, dtype=jnp.int32)):
        call = jax.jit(lambda p: jaxattn.append_kv(key, key, cache, cache, table, positions=p))
        for result in call(places):
            assert np.array_equal(result, cache)
