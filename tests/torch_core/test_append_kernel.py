"""The kernels that append on a GPU; Triton's interpreter runs them elsewhere."""

import inspect

import numpy as np
import pytest
import torch

from tests import inputs, kv_model
from torch_core.problem import AppendInputs, describe_append
from torch_core.qsa import launch

append = pytest.importorskip("torch_core.backends.append")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["strided", "whole"])
def run(request):
    """Calls one of the two kernels on NumPy arguments."""

    def call(arguments):
        given = {name: inputs.to_torch(value, DEVICE) for name, value in arguments.items()}
        kv_layout = given.pop("kv_layout")
        problem, arrays = describe_append(AppendInputs(**given), kv_layout=kv_layout)
        launched = append.run if request.param == "strided" else by_record
        launched(problem, arrays)
        return [inputs.to_numpy(given[name]) for name in ("key_cache", "value_cache")]

    return call


def by_record(problem, arrays):
    scales = {
        name: None if scale == 1.0 else launch.scalar(scale, arrays.key.device)
        for name, scale in arrays._asdict().items()
        if name in ("k_scale", "v_scale")
    }
    arrays = arrays._replace(**scales)
    record = append.plan(problem, arrays)
    made = launch.run((record,), arrays._asdict())
    for name in ("key_cache", "value_cache"):
        assert made[f"new_{name}"] is getattr(arrays, name)


@pytest.mark.parametrize("case", kv_model.CASES, ids=str)
def test_equals_loop(case, run):
    arguments = case.make()
    for result, expected in zip(run(arguments), kv_model.append(arguments), strict=True):
        assert kv_model.same_bits(result, expected)


def test_the_record_names_every_parameter():
    """Pointers first and in the kernel's order, as XLA passes them."""
    for case in kv_model.CASES:
        given = {name: inputs.to_torch(value) for name, value in case.make().items()}
        kv_layout = given.pop("kv_layout")
        problem, arrays = describe_append(AppendInputs(**given), kv_layout=kv_layout)
        record = append.plan(problem, arrays)
        names = [name for name, _ in launch.inputs_of(record)]
        names += [f"{name}_ptr" for name, _, _ in record.outputs]
        parameters = list(inspect.signature(launch.load(record.kernel).fn).parameters)
        assert names == parameters[: len(names)]
        assert sorted([*names, *dict(record.constants)]) == sorted(parameters)


@pytest.mark.parametrize(
    "changes",
    [
        dict(positions=np.array([0, 12, 2**31 - 1], np.int32)),
        dict(request_ids=np.array([-1, 3, 2**31 - 1], np.int32)),
        dict(page_table=np.full((3, 3), -1, np.int32)),
        dict(page_table=np.full((3, 3), 2**31 - 1, np.int32)),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_place_that_does_not_exist_is_skipped(changes, run):
    """Only rows at places of the cache are written."""
    arguments = kv_model.Append("", tokens=3).make()
    arguments |= dict(positions=np.zeros(3, np.int32), request_ids=np.zeros(3, np.int32)) | changes
    if "positions" in changes:
        arguments |= dict(request_ids=np.arange(3, dtype=np.int32))
    written = run(arguments)
    if "positions" in changes:
        arguments["positions"] = np.array([0, -1, -1], np.int32)
        expected = kv_model.append(arguments)
    else:
        expected = [arguments["key_cache"], arguments["value_cache"]]
    for result, wanted in zip(written, expected, strict=True):
        assert kv_model.same_bits(result, wanted)


def test_nan_stays_nan(run):
    """Saturation must not turn a NaN into the largest number."""
    arguments = kv_model.Append("", kv_dtype="float8_e4m3fn", tokens=1).make()
    arguments["key"][:] = np.nan
    key_cache, _ = run(arguments)
    place = kv_model._place(arguments, 0, 4)
    assert np.isnan(key_cache.astype(np.float32)[place]).all()


@pytest.mark.gpu
def test_no_host_reads_and_int64_addresses():
    """In a CUDA graph, into a page whose offset passes 2^32 elements."""
    pages = 65_600
    cache = [torch.zeros(pages, 64, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    table = torch.tensor([[32767, 65599]], dtype=torch.int32, device="cuda")
    positions = torch.tensor([3, 64 + 5], dtype=torch.int32, device="cuda")
    key = torch.randn(2, 8, 128, dtype=torch.bfloat16, device="cuda")
    import torch_core

    def step():
        torch_core.append_kv(
            key, 2 * key, *cache, table, positions=positions,
            request_ids=torch.zeros_like(positions),
        )  # fmt: skip

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for x in cache:
        x.zero_()
    key.normal_()
    graph.replay()
    torch.cuda.synchronize()
    for x, factor in zip(cache, (1, 2), strict=True):
        assert torch.equal(x[32767, 3], key[0] * factor)
        assert torch.equal(x[65599, 5], key[1] * factor)
        assert (
            x.view(torch.int16).count_nonzero() == (factor * key).view(torch.int16).count_nonzero()
        )
