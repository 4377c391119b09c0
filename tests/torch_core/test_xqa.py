"""FlashInfer's XQA on a GPU of capability 90, against the reference in float64."""

import dataclasses

import numpy as np
import pytest
import torch

import torch_core
from tests import compare, inputs
from tests.inputs import Case
from torch_core import reference

pytestmark = pytest.mark.gpu

BASE = Case("base", (5, 1, 17, 300, 64, 0, 0, 640), num_qo_heads=16, head_dim=128, page_size=64,
            dtype="bfloat16")  # fmt: skip
E4M3 = dict(kv_dtype="float8_e4m3fn", options=dict(k_scale=0.25, v_scale=0.5, q_scale=2.0))
GEOMETRY = [
    dict(),
    dict(page_size=16),
    dict(num_qo_heads=8, page_size=32),
    dict(num_qo_heads=6, head_dim=64),
    dict(num_qo_heads=24, head_dim=256),
    dict(num_qo_heads=2, head_dim=64, page_size=16),
    dict(num_qo_heads=12, head_dim=80, page_size=16),
    dict(num_qo_heads=14, head_dim=96, page_size=128),
    dict(num_qo_heads=32, head_dim=112, page_size=32),
    dict(num_qo_heads=64, head_dim=16),
    dict(num_qo_heads=16, head_dim=512),
]
FEATURES = [
    dict(),
    dict(kv_layout="HND"),
    dict(sinks=True),
    dict(window_left=0),
    dict(window_left=4),
    dict(window_left=127),
    dict(sm_scale=0.3, k_scale=0.5, v_scale=3.0),
    dict(q_len=4),
    dict(q_len=4, kv_layout="HND", sinks=True),
    dict(q_len=4, draft_mask="bool"),
    dict(q_len=4, draft_mask="packed", seq_lens=(5, 4, 17, 300, 2, 0)),
]


def variant(**changes) -> Case:
    fields = {field.name for field in dataclasses.fields(Case)}
    options = {name: value for name, value in changes.items() if name not in fields}
    changes = {name: value for name, value in changes.items() if name in fields}
    changes["options"] = BASE.options | changes.get("options", {}) | options
    return dataclasses.replace(BASE, **changes)


def on_gpu(arguments: dict) -> dict:
    return {name: inputs.to_torch(value, "cuda") for name, value in arguments.items()}


def rounded(arguments: dict) -> np.ndarray:
    """The same maths with every intermediate in the query's dtype."""
    dtype = arguments["query"].dtype
    out, _ = reference.evaluate("decode", **arguments, compute_dtype=dtype)
    return out.double().cpu().numpy()


def check(arguments: dict, **more) -> torch.Tensor:
    arguments = on_gpu(arguments)
    out = torch_core.decode(**arguments, **more, backend="xqa")
    exact, _ = reference.evaluate("decode", **arguments)
    compare.check(inputs.to_numpy(out), exact.cpu().numpy(), rounded(arguments))
    return out


@pytest.mark.parametrize("kv", [dict(), E4M3], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("geometry", GEOMETRY, ids=str)
def test_geometry(geometry, kv):
    check(variant(**geometry, **kv).make())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kv", [dict(), E4M3], ids=["same", "e4m3"])
@pytest.mark.parametrize("feature", FEATURES, ids=str)
def test_feature(feature, kv, dtype):
    check(variant(num_kv_heads=8, num_qo_heads=64, dtype=dtype, **(kv | feature)).make())


def test_auto_takes_xqa():
    arguments = on_gpu(variant().make())
    named = torch_core.decode(**arguments, backend="xqa")
    assert torch.equal(torch_core.decode(**arguments), named)


@pytest.mark.parametrize("scale", [0.5, np.float32(0.5)], ids=["number", "array"])
def test_scales_as_numbers_and_arrays(scale):
    arguments = variant(**E4M3).make() | dict(k_scale=0.5, v_scale=0.5)
    expected = check(arguments)
    for device in ("cpu", "cuda"):
        array = torch.tensor(float(scale), device=device)
        actual = torch_core.decode(**on_gpu(arguments | dict(k_scale=array, v_scale=array)))
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("kv", [dict(), E4M3], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e4])
@pytest.mark.parametrize("q_len", [1, 4])
def test_r21_poison(poison, q_len, kv):
    """What must not be read may hold anything: the bits stay the same."""
    case = variant(
        seq_lens=(4, 13, 16, 17, 0, 200), q_len=q_len, num_kv_heads=8, num_qo_heads=64, **kv
    )
    clean, dirty = case.make(), case.make()
    if poison == 3e4 and case.kv_dtype:
        poison = 448.0
    used = np.zeros(clean["key_cache"].shape[:2], bool)
    for request, length in enumerate(clean["seq_lens"]):
        for at in range(length):
            used[clean["page_table"][request, at // case.page_size], at % case.page_size] = True
    for name in ("key_cache", "value_cache"):
        clean[name][~used] = 0
        dirty[name][~used] = poison
    expected = check(clean)
    assert torch.equal(torch_core.decode(**on_gpu(dirty), backend="xqa"), expected)


def test_r20_rows_without_keys():
    """Padding rows give 0 and do not touch the others' bits."""
    padded = variant(seq_lens=(5, 1, 17, 300, 64, 0, 0, 0)).make()
    out = check(padded)
    assert not out[5:].any()
    alone = {name: value[:5] if name in ("query", "page_table", "seq_lens") else value
             for name, value in padded.items()}  # fmt: skip
    assert torch.equal(torch_core.decode(**on_gpu(alone), backend="xqa"), out[:5])
    assert not check(padded | dict(seq_lens=np.zeros(8, np.int32))).any()


@pytest.mark.parametrize("window_left", [128, -1])
def test_r32_split_sequence_is_deterministic(window_left):
    arguments = variant(seq_lens=(32768,), num_kv_heads=8, num_qo_heads=64, window_left=window_left)
    arguments = on_gpu(arguments.make())
    first = torch_core.decode(**arguments)
    exact, _ = reference.evaluate("decode", **arguments)
    compare.check(inputs.to_numpy(first), exact.cpu().numpy(), rounded(arguments))
    for _ in range(50):
        assert torch.equal(torch_core.decode(**arguments), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_r27_pages_past_32_bits(dtype):
    """Page ids whose byte and element offsets pass 2^31 and 2^32 read the same data."""
    num_pages, high = 65_600, [32767, 32768, 65535, 65590]
    key_cache = torch.empty(num_pages, 64, 8, 128, dtype=dtype, device="cuda")
    value_cache = torch.empty_like(key_cache)
    for low, page in enumerate(high):
        for cache in (key_cache, value_cache):
            cache[low] = torch.randn(64, 8, 128, device="cuda").to(dtype)
            cache[page] = cache[low]
    query = torch.randn(1, 64, 128, dtype=torch.bfloat16, device="cuda")
    seq_lens = torch.tensor([250], dtype=torch.int32, device="cuda")
    tables = [
        torch.tensor([pages], dtype=torch.int32, device="cuda") for pages in ([0, 1, 2, 3], high)
    ]
    low, far = (torch_core.decode(query, key_cache, value_cache, t, seq_lens) for t in tables)
    assert low.any()
    assert torch.equal(low, far)


def test_runs_under_a_torch_cuda_graph():
    """A replay follows changed lengths, tables and data."""
    arguments = on_gpu(variant(num_kv_heads=8, num_qo_heads=64).make())
    out = torch_core.decode(**arguments)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch_core.decode(**arguments, out=out)
    for shift in (0, 3):
        arguments["seq_lens"].copy_((arguments["seq_lens"] - shift).clamp(min=0))
        arguments["query"].normal_()
        graph.replay()
        assert torch.equal(out, torch_core.decode(**arguments))


def test_refusals_name_the_reason():
    arguments = on_gpu(variant().make())
    for changes, reason in (
        (dict(return_lse=True), "cannot return lse"),
        (dict(soft_cap=3.0), "has no soft cap"),
        (dict(batch_invariant=True), "depends on the rest of the batch"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            torch_core.decode(**arguments, **changes, backend="xqa")
