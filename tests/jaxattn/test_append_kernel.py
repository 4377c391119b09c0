"""append_kv by torch_core's kernel: on a GPU, or with Triton's interpreter on XLA's own buffers."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxattn
from jaxattn import _device, _triton, kv_cache
from tests import errors, faults, inputs, kv_model
from tests.jaxattn import interpreted
from torch_core import debug, dispatch

CACHES = ("key_cache", "value_cache")


@pytest.fixture
def launches(monkeypatch):
    """The records that were launched."""
    records = []
    launch = _triton.call if torch.cuda.is_available() else interpreted.call

    def call(record, *more):
        records.append(record)
        return launch(record, *more)

    if not torch.cuda.is_available():
        environment = dispatch.environment(90)
        monkeypatch.setattr(_device, "environment", lambda: environment)
        monkeypatch.setattr(_device, "platform", lambda: "cpu")
        monkeypatch.setattr(_triton, "failure", lambda capability: None)
    monkeypatch.setattr(_triton, "call", call)
    monkeypatch.setattr(kv_cache, "LAUNCHED_ROWS", 0)
    jax.clear_caches()
    yield records
    jax.clear_caches()


def scattered(arguments, monkeypatch):
    """The same call where jax-triton does not work."""
    with monkeypatch.context() as patch:
        patch.setattr(_triton, "failure", lambda capability: ImportError("missing"))
        jax.clear_caches()
        results = inputs.run_jax(jaxattn.append_kv, arguments)
        jax.clear_caches()
    return results


@pytest.mark.parametrize("case", kv_model.CASES, ids=str)
def test_equals_loop(case, launches):
    arguments = case.make()
    results = inputs.run_jax(jaxattn.append_kv, arguments)
    assert len(launches) == bool(case.tokens)
    for result, expected in zip(results, kv_model.append(arguments), strict=True):
        assert kv_model.same_bits(result, expected)


@pytest.mark.parametrize("by_rows", [False, True])
def test_few_rows_are_scattered(by_rows, launches, monkeypatch):
    arguments = kv_model.Append("", tokens=4, addressing="rows", batch=5).make()
    monkeypatch.setattr(kv_cache, "LAUNCHED_ROWS", 5 - by_rows)
    results = inputs.run_jax(jaxattn.append_kv, arguments)
    assert len(launches) == by_rows
    for result, expected in zip(results, kv_model.append(arguments), strict=True):
        assert kv_model.same_bits(result, expected)


ODD = np.array([0, 13, -1, 2**31 - 1, -(2**31), 3, 40], np.int32)


@pytest.mark.parametrize("change", [
    dict(slots=ODD), dict(positions=ODD), dict(request_ids=ODD), dict(page_table=ODD),
    dict(page_table=ODD[:0]),
], ids=lambda change: f"{next(iter(change))}_{next(iter(change.values())).size}")  # fmt: skip
@pytest.mark.parametrize("kv_dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_bits_of_the_scatter(kv_dtype, change, launches, monkeypatch):
    """Places that do not exist are dropped, numbers saturate and NaN stays, of whatever bits."""
    addressing = "slots" if "slots" in change else "request_ids"
    arguments = kv_model.Append(
        "", dtype="float16", kv_dtype=kv_dtype, addressing=addressing, batch=7, pages_per_seq=1,
        size=1e3, options=dict(v_scale=0.3),
    ).make()  # fmt: skip
    arguments["key"][:, 0, :3] = np.inf, -np.inf, np.nan
    if "page_table" in change:
        change = dict(page_table=change["page_table"].reshape(7, -1))
    results = inputs.run_jax(jaxattn.append_kv, arguments | change)
    assert len(launches) == 1
    expected = scattered(arguments | change, monkeypatch)
    assert len(launches) == 1
    for result, other, name in zip(results, expected, CACHES, strict=True):
        empty = np.isnan(result.astype(np.float32))
        assert np.array_equal(empty, np.isnan(other.astype(np.float32)))
        assert kv_model.same_bits(np.where(empty, 0, result), np.where(empty, 0, other))
        written = result.tobytes() != arguments[name].tobytes()
        assert written == all(array.size for array in change.values())


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_in_place_in_a_scan(kv_layout, launches):
    """Donated caches keep their memory through a loop, and there is no copy of one."""
    arguments = kv_model.Append("", tokens=3, addressing="rows", kv_layout=kv_layout).make()
    arrays, static = faults.jax_arrays(arguments)
    steps = np.array([[0, 1, 2], [5, 4, 3], [-1, 9, 11]], np.int32)

    def body(carry, positions):
        caches, rest = carry
        named = dict(zip(CACHES, caches, strict=True), positions=positions)
        return (jaxattn.append_kv(**rest | named, **static), rest), None

    caches = [arrays.pop(name) for name in CACHES]
    run = jax.jit(
        lambda caches, rest: jax.lax.scan(body, (caches, rest), jnp.array(steps))[0][0],
        donate_argnums=0,
    )
    before = [cache.unsafe_buffer_pointer() for cache in caches]
    compiled = run.lower(tuple(caches), arrays).compile()
    shape = ",".join(map(str, caches[0].shape))
    assert f"f32[{shape}]" in compiled.as_text()
    assert not [line for line in compiled.as_text().splitlines() if f"f32[{shape}]" in line
                and " copy(" in line]  # fmt: skip
    results = compiled(tuple(caches), arrays)
    assert [result.unsafe_buffer_pointer() for result in results] == before
    for positions in steps:
        written = kv_model.append(arguments | dict(positions=positions))
        arguments |= dict(zip(CACHES, written, strict=True))
    for result, name in zip(results, CACHES, strict=True):
        assert kv_model.same_bits(np.asarray(result), arguments[name])


def test_one_array_for_both_caches(launches):
    arguments = kv_model.Append("").make()
    arguments["value_cache"] = arguments["key_cache"]
    arrays, static = faults.jax_arrays(arguments)
    arrays["value_cache"] = arrays["key_cache"]
    results = jax.jit(lambda arrays: jaxattn.append_kv(**arrays, **static))(arrays)
    assert len(launches) == 1
    for result, expected in zip(results, kv_model.append(arguments), strict=True):
        assert kv_model.same_bits(np.asarray(result), expected)
    assert kv_model.same_bits(np.asarray(arrays["key_cache"]), arguments["key_cache"])


@pytest.mark.parametrize("split", ["heads", "pages", "shard_map"])
def test_over_a_mesh(split, launches):
    """Every device launches the kernel on its heads, or on its pages."""
    if jax.device_count() < 4:
        pytest.skip(f"needs 4 devices, this machine has {jax.device_count()}")
    case = kv_model.Append("", batch=2, num_kv_heads=4, skips=True, kv_dtype="float8_e4m3fn",
                           options=dict(k_scale=0.3))  # fmt: skip
    arguments = case.make()
    arrays, static = faults.jax_arrays(arguments)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    specs = dict.fromkeys(CACHES, P("x"))
    if split != "pages":
        specs = dict.fromkeys(("key", "value"), P(None, "x"))
        specs |= dict.fromkeys(CACHES, P(None, None, "x"))
    specs = {name: specs.get(name, P()) for name in arrays}
    given = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arrays.items()}

    def call(arrays):
        return jaxattn.append_kv(**arrays, **static)

    if split == "shard_map":
        out = (specs["key_cache"],) * 2
        call = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=out)
    results = jax.jit(call)(given)
    assert launches and dict(launches[-1].constants)["NUM_HEADS"] == (4 if split == "pages" else 1)
    assert launches[-1].outputs[0][1][0] == (2 if split == "pages" else 8)
    for result, expected in zip(results, kv_model.append(arguments), strict=True):
        assert kv_model.same_bits(np.asarray(result), expected)


def test_checked_places(launches, monkeypatch):
    """Under JAXATTN_DEBUG=1 a place that does not exist is an error before the launch."""
    monkeypatch.setattr(debug, "ENABLED", True)
    arguments = kv_model.Append("").make()
    for result, expected in zip(
        inputs.run_jax(jaxattn.append_kv, arguments), kv_model.append(arguments), strict=True
    ):
        assert kv_model.same_bits(result, expected)
    wrong = arguments | dict(positions=arguments["positions"] + 1000)
    with pytest.raises(errors.AT_RUN_TIME, match="positions must be "):
        inputs.run_jax(jaxattn.append_kv, wrong)
    assert len(launches) == 1


def test_what_depends_on_the_number_of_rows(launches):
    """The grid alone: one compiled kernel serves batches of any size."""
    case = kv_model.Append("", addressing="rows")
    for size in (1, 3, 5):
        inputs.run_jax(jaxattn.append_kv, replace(case, tokens=size, batch=5).make())
    for batch in (2, 4):
        arguments = replace(case, tokens=2, batch=batch).make()
        for name in CACHES:
            arguments[name] = np.resize(arguments[name], (17, *arguments[name].shape[1:]))
        inputs.run_jax(jaxattn.append_kv, arguments)
    assert len({record.constants for record in launches}) == 1
    assert [record.grid for record in launches] == [(1,), (3,), (5,), (2,), (2,)]
