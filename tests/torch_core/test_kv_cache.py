"""append_kv against a NumPy loop, merge_states against the oracle."""

import numpy as np
import pytest
import torch

import torch_core
from tests import compare, inputs, kv_model, split


def tensors(arguments):
    return {name: inputs.to_torch(value) for name, value in arguments.items()}


@pytest.mark.parametrize("case", kv_model.CASES, ids=str)
def test_append_equals_loop(case):
    """Every bit of both caches, in place, for each way to address."""
    arguments = case.make()
    given = tensors(arguments)
    results = torch_core.append_kv(**given)
    assert results[0] is given["key_cache"] and results[1] is given["value_cache"]
    for result, expected in zip(results, kv_model.append(arguments), strict=True):
        assert kv_model.same_bits(inputs.to_numpy(result), expected)
    for name in ("key", "value", "page_table", "positions", "request_ids", "slots"):
        if name in arguments:
            assert kv_model.same_bits(inputs.to_numpy(given[name]), arguments[name])


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", ["float32", "float8_e4m3fn"])
def test_append_into_views_of_one_pool(kv_layout, kv_dtype):
    """Caches that are strided views: interleaved key and value, and every second page."""
    arguments = kv_model.Append("", kv_dtype=kv_dtype, kv_layout=kv_layout).make()
    given = tensors(arguments)
    pool = torch.zeros(2 * given["key_cache"].shape[0], 2, *given["key_cache"].shape[1:])
    pool = pool.to(given["key_cache"].dtype)
    caches = dict(key_cache=pool[::2, 0], value_cache=pool[::2, 1])
    for name, view in caches.items():
        view.copy_(given[name])
    torch_core.append_kv(**given | caches)
    for view, expected in zip(caches.values(), kv_model.append(arguments), strict=True):
        assert kv_model.same_bits(inputs.to_numpy(view), expected)
    assert not inputs.to_numpy(pool[1::2]).astype(np.float32).any()


def test_append_takes_strided_rows():
    """Key and value as slices of one projection."""
    arguments = kv_model.Append("").make()
    given = tensors(arguments)
    both = torch.cat([given["key"], given["value"]], -1)
    split_rows = dict(zip(("key", "value"), both.chunk(2, -1), strict=True))
    results = torch_core.append_kv(**given | split_rows)
    for result, expected in zip(results, kv_model.append(arguments), strict=True):
        assert kv_model.same_bits(inputs.to_numpy(result), expected)


def test_append_takes_rows_of_the_cache():
    """A view of what is written: the values of before the call."""
    key_cache, value_cache = torch.randn(2, 4, 4, 2, 8)
    rows = [cache.view(-1, 2, 8)[:2] for cache in (value_cache, key_cache)]
    expected = [row.clone() for row in rows]
    torch_core.append_kv(*rows, key_cache, value_cache, slots=torch.tensor([1, 9]).int())
    for cache, wanted in zip((key_cache, value_cache), expected, strict=True):
        assert torch.equal(cache.view(-1, 2, 8)[[1, 9]], wanted)


@pytest.mark.parametrize("name, value", [("slots", 44), ("positions", 12), ("request_ids", 3)])
def test_refused_append_writes_nothing(name, value):
    """One row out of range leaves both caches as they were."""
    addressing = "slots" if name == "slots" else "request_ids"
    arguments = kv_model.Append("", addressing=addressing).make()
    arguments[name][-1] = value
    given = tensors(arguments)
    with pytest.raises(ValueError, match=f"^{name} must be in "):
        torch_core.append_kv(**given)
    for cache in ("key_cache", "value_cache"):
        assert kv_model.same_bits(inputs.to_numpy(given[cache]), arguments[cache])


def test_append_then_decode():
    """What is appended with a scale is read with the same scale."""
    case = kv_model.Append("", tokens=24, batch=2, kv_dtype="float8_e4m3fn", head_dim=8)
    arguments = case.make() | dict(k_scale=0.05, v_scale=0.02)
    given = tensors(arguments)
    torch_core.append_kv(**given)
    call = dict(
        query=np.random.default_rng(1).normal(size=(2, 4, 8)).astype(np.float32),
        key_cache=inputs.to_numpy(given["key_cache"]),
        value_cache=inputs.to_numpy(given["value_cache"]),
        page_table=arguments["page_table"],
        seq_lens=np.array([12, 12], np.int32),
        k_scale=0.05,
        v_scale=0.02,
    )
    out = inputs.run_torch(torch_core.decode, call)
    compare.check_attention(call, out)
    exact = np.zeros_like(out)
    for request in range(2):
        order = arguments["request_ids"] == request
        for head in range(4):
            key, value = (arguments[n][order][:, head // 2] for n in ("key", "value"))
            weights = np.exp(key @ call["query"][request, head] * 8**-0.5)
            exact[request, head] = weights @ value / weights.sum()
    np.testing.assert_allclose(out, exact, atol=0.1)


@pytest.mark.parametrize("case", split.CASES, ids=str)
def test_merged_halves_equal_the_whole(case):
    """Attention over two halves of the keys, merged, is attention over all."""
    whole, halves = split.halves(case)
    parts = [inputs.run_torch(torch_core.decode, half, return_lse=True) for half in halves]
    merged = inputs.run_torch(torch_core.merge_states, split.states(*parts))
    split.check(whole, merged)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_merge_equals_loop(dtype):
    """Random states, with parts that saw no key and whose output holds NaN."""
    states = split.random_states(dtype)
    out, lse = inputs.run_torch(torch_core.merge_states, states)
    split.check_merge(states, out, lse)
    assert out.dtype == states["out_a"].dtype and lse.dtype == np.float32


def test_merge_is_symmetric():
    """The order of the parts does not matter."""
    states = split.random_states("float32")
    swapped = {f"{n[:-1]}{'ba'[n[-1] == 'b']}": v for n, v in states.items()}
    for one, other in zip(inputs.run_torch(torch_core.merge_states, states),
                          inputs.run_torch(torch_core.merge_states, swapped),
                          strict=True):  # fmt: skip
        assert np.array_equal(one, other)


def test_merge_out():
    """`out` holds the result and is what comes back."""
    given = tensors(split.random_states("bfloat16"))
    expected = torch_core.merge_states(**given)
    out = (torch.full_like(given["out_a"], 7), torch.full_like(given["lse_a"], 7))
    results = torch_core.merge_states(**given, out=out)
    for result, target, value in zip(results, out, expected, strict=True):
        assert result is target and torch.equal(target, value)


def test_merge_of_one_key():
    """By hand: exp(0) and exp(log 3) weigh 1/4 and 3/4."""
    one = np.ones((1, 1, 2), np.float32)
    zero, three = np.zeros((1, 1), np.float32), np.full((1, 1), np.log(3), np.float32)
    out, lse = inputs.run_torch(
        torch_core.merge_states, dict(out_a=one, lse_a=zero, out_b=5 * one, lse_b=three)
    )
    np.testing.assert_allclose(out, 4 * one, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log([[4.0]]), rtol=1e-6)
