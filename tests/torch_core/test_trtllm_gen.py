"""trtllm-gen with a recording stand-in for the kernel call only: no GPU here can run it."""

import dataclasses
import importlib.util
import inspect
import math
import sys
import types

import pytest
import torch

from tests import inputs
from tests.inputs import Case
from torch_core import reference
from torch_core.backends import trtllm_gen
from torch_core.problem import DESCRIBE, AttentionInputs

ENTRIES = {
    "decode": ("flashinfer.decode", "trtllm_batch_decode_with_kv_cache"),
    "prefill": ("flashinfer.prefill", "trtllm_batch_context_with_kv_cache"),
}
DECODE = Case("decode", (9, 30, 0, 4), q_len=2, dtype="bfloat16", head_dim=64, page_size=16,
              kv_layout="HND", sinks=True, options=dict(window_left=7))  # fmt: skip
PREFILL = Case("prefill", (25, 9, 0, 3), q_lens=(5, 9, 2, 6), extra_rows=3, dtype="bfloat16",
               head_dim=64, page_size=16)  # fmt: skip
E4M3 = dict(dtype="float8_e4m3fn", options=dict(k_scale=0.25, v_scale=0.5, q_scale=2.0))


@pytest.fixture
def recorded(monkeypatch):
    """Replaces both entries; they write what the reference computes, in upstream's units."""
    calls: list[dict] = []

    def entry(phase):
        def stand_in(**arguments):
            calls.append(arguments)
            answer(phase, arguments)

        return stand_in

    package = types.ModuleType("flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    for phase, (module, name) in ENTRIES.items():
        fake = types.ModuleType(module)
        setattr(fake, name, entry(phase))
        monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.setattr(trtllm_gen, "WORKSPACE_BYTES", 1024)
    trtllm_gen._local.__dict__.clear()
    yield calls
    trtllm_gen._local.__dict__.clear()


def answer(phase: str, given: dict) -> None:
    """Upstream's result from upstream's arguments: unscaled tensors, fused scales, base-2 lse."""
    key_cache, value_cache = given["kv_cache"]
    arguments = dict(
        query=given["query"].float(), key_cache=key_cache.float(), value_cache=value_cache.float(),
        page_table=given["block_tables"], seq_lens=given["seq_lens"], sinks=given["sinks"],
        sm_scale=given["bmm1_scale"], v_scale=given["bmm2_scale"],
        window_left=given["window_left"], kv_layout=given["kv_layout"],
    )  # fmt: skip
    if phase == "decode":
        arguments |= dict(q_len=given["q_len_per_req"])
    else:
        arguments |= dict(
            cu_seqlens_q=given["cum_seq_lens_q"],
            max_seqlen_q=given["max_q_len"],
            causal=given["causal"],
        )
    out, lse = reference.evaluate(phase, **arguments)
    empty = out.abs().sum((1, 2)) == 0
    given["out"].copy_(out).masked_fill_(empty[:, None, None], torch.nan)
    if given["lse"] is not None:
        given["lse"].copy_(lse / math.log(2)).masked_fill_(empty[:, None], torch.nan)


def run(case: Case):
    tensors = {name: inputs.to_torch(value) for name, value in case.make().items()}
    arrays = {n: tensors.pop(n) for n in list(tensors) if n in AttentionInputs._fields}
    described = DESCRIBE[case.phase](AttentionInputs(**arrays), **tensors, return_lse=True)
    problem, described_inputs = described
    out = torch.full(problem.out_shape, 7, dtype=getattr(torch, problem.out_dtype))
    lse = torch.full(problem.lse_shape, 7.0)
    trtllm_gen.run(problem, described_inputs, out, lse)
    exact = reference.evaluate(case.phase, **arrays, **tensors)
    return problem, described_inputs, (out, lse), exact


@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(DECODE, sinks=False),
        dataclasses.replace(DECODE, sinks=False, **E4M3),
        PREFILL,
        dataclasses.replace(PREFILL, **E4M3),
        dataclasses.replace(PREFILL, options=dict(causal=False)),
    ],
    ids=["decode", "decode_e4m3", "prefill", "prefill_e4m3", "prefill_non_causal"],
)
def test_units_and_empty_rows(recorded, case):
    """Scales in, base of lse out, NaN of rows without keys replaced."""
    _, _, results, exact = run(case)
    assert len(recorded) == 1
    for result, wanted in zip(results, exact, strict=True):
        torch.testing.assert_close(result.double(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=str)
def test_arguments(recorded, case):
    """Every array is ours, the workspace is zero and reused, bounds come from the page table."""
    problem, given, (out, lse), _ = run(case)
    run(case)
    first, second = recorded
    assert first["workspace_buffer"] is second["workspace_buffer"]
    assert not first["workspace_buffer"].any()
    assert first["query"] is given.query
    assert first["kv_cache"] == (given.key_cache, given.value_cache)
    assert (first["block_tables"], first["seq_lens"]) == (given.page_table, given.seq_lens)
    assert (first["out"].data_ptr(), first["lse"].data_ptr()) == (out.data_ptr(), lse.data_ptr())
    assert (first["kv_layout"], first["window_left"]) == (case.kv_layout, problem.window_left)
    assert first["backend"] == "trtllm-gen"
    bound = first["max_seq_len" if case.phase == "decode" else "max_kv_len"]
    assert bound == problem.pages_per_seq * problem.page_size
    if case.phase == "prefill":
        assert first["cum_seq_lens_kv"].tolist() == [0, 25, 34, 34, 37]


@pytest.mark.parametrize("where", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=str)
def test_arguments_fit_the_installed_signature(recorded, case, where):
    """What we pass binds to FlashInfer's real function, where it is installed: with a GPU."""
    run(case)
    for name in ("flashinfer", *(module for module, _ in ENTRIES.values())):
        sys.modules.pop(name)
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("needs flashinfer-python (the cuda extra)")
    module, name = ENTRIES[case.phase]
    function = getattr(importlib.import_module(module), name)
    inspect.signature(inspect.unwrap(function)).bind(**recorded[0])
