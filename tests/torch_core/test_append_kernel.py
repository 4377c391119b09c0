"""The kernel that appends on a GPU; Triton's interpreter runs it elsewhere."""

import numpy as np
import pytest
import torch

from tests import inputs, kv_model
from torch_core.problem import AppendInputs, describe_append

append = pytest.importorskip("torch_core.backends.append")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(arguments):
    given = {name: inputs.to_torch(value, DEVICE) for name, value in arguments.items()}
    kv_layout = given.pop("kv_layout")
    problem, call = describe_append(AppendInputs(**given), kv_layout=kv_layout)
    append.run(problem, call)
    return [inputs.to_numpy(given[name]) for name in ("key_cache", "value_cache")]


@pytest.mark.parametrize("case", kv_model.CASES, ids=str)
def test_equals_loop(case):
    arguments = case.make()
    for result, expected in zip(run(arguments), kv_model.append(arguments), strict=True):
        assert kv_model.same_bits(result, expected)


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
def test_a_place_that_does_not_exist_is_skipped(changes):
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


def test_nan_stays_nan():
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
