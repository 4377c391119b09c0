"""FlashInfer's native decode and prefill on a GPU, against the reference in float64."""

import dataclasses

import numpy as np
import pytest
import torch

import jaxattn
import torch_core
from tests import compare, inputs
from tests.inputs import Case
from torch_core import reference

pytestmark = pytest.mark.gpu

DECODE = Case("decode", (5, 1, 17, 300, 64, 0, 0, 640), num_qo_heads=16, num_kv_heads=2,
              head_dim=128, page_size=16, dtype="bfloat16")  # fmt: skip
PREFILL = dataclasses.replace(
    DECODE, name="prefill", seq_lens=(300, 17, 0, 8, 640), q_lens=(100, 17, 3, 12, 1), extra_rows=5
)
E4M3 = dict(kv_dtype="float8_e4m3fn", k_scale=0.25, v_scale=0.5)
CASES = [
    dict(),
    dict(kv_layout="HND"),
    dict(page_size=1),
    dict(soft_cap=20.0),
    dict(window_left=127),
    dict(sm_scale=0.3, k_scale=0.5, v_scale=3.0),
]


def variant(base: Case, **changes) -> Case:
    fields = {field.name for field in dataclasses.fields(Case)}
    options = {name: value for name, value in changes.items() if name not in fields}
    changes = {name: value for name, value in changes.items() if name in fields}
    return dataclasses.replace(base, options=base.options | options, **changes)


def check(case: Case, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = {name: inputs.to_torch(value, "cuda") for name, value in case.make().items()}
    function = getattr(torch_core, case.phase)
    results = function(**arguments, return_lse=True, backend=backend)
    exact = reference.evaluate(case.phase, **arguments)
    rounded = reference.evaluate(case.phase, **arguments, compute_dtype=torch.bfloat16)
    for result, wanted, plain in zip(results, exact, rounded, strict=True):
        wanted, plain = (x.double().cpu().numpy() for x in (wanted, plain))
        compare.check(inputs.to_numpy(result), wanted, plain)
    return results


@pytest.mark.parametrize("kv", [dict(), E4M3], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("changes", CASES, ids=str)
def test_decode(changes, kv):
    check(variant(DECODE, **(kv | changes)), "native_decode")


@pytest.mark.parametrize("version", ["fa2", "fa3"])
@pytest.mark.parametrize("changes", [*CASES, dict(causal=False)], ids=str)
def test_prefill(changes, version):
    check(variant(PREFILL, **changes), f"native_prefill_{version}")


@pytest.mark.parametrize("changes", [dict(), dict(kv_layout="HND")], ids=str)
def test_fa2_prefill_over_e4m3(changes):
    check(variant(PREFILL, **(E4M3 | changes)), "native_prefill_fa2")


def test_auto_gives_lse_and_soft_cap_to_native_decode():
    arguments = {name: inputs.to_torch(value, "cuda") for name, value in DECODE.make().items()}
    out, lse = torch_core.decode(**arguments, return_lse=True)
    named, named_lse = torch_core.decode(**arguments, return_lse=True, backend="native_decode")
    assert torch.equal(out, named)
    assert torch.equal(lse, named_lse)


@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=str)
def test_r21_poison(case):
    """What must not be read may hold NaN: the bits stay the same."""
    clean, dirty = case.make(), case.make()
    used = np.zeros(clean["key_cache"].shape[:2], bool)
    for request, length in enumerate(clean["seq_lens"]):
        for at in range(length):
            used[clean["page_table"][request, at // case.page_size], at % case.page_size] = True
    for name in ("key_cache", "value_cache"):
        clean[name][~used] = 0
        dirty[name][~used] = np.nan
    function = getattr(torch_core, case.phase)
    names = (
        ["native_decode"]
        if case.phase == "decode"
        else ["native_prefill_fa2", "native_prefill_fa3"]
    )
    for backend in names:
        pair = [
            inputs.run_torch(function, call, "cuda", backend=backend) for call in (clean, dirty)
        ]
        assert np.array_equal(pair[0].view(np.uint16), pair[1].view(np.uint16)), backend


@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=str)
def test_from_jax(case):
    """Under jit the plan is made in the call, and follows lengths that change."""
    arguments = case.make()
    for shift in (0, 1):
        arguments["seq_lens"] = np.maximum(arguments["seq_lens"] - shift, 0)
        actual = inputs.run_jax(getattr(jaxattn, case.phase), arguments, return_lse=True)
        expected = inputs.run_torch(
            getattr(torch_core, case.phase), arguments, "cuda", return_lse=True
        )
        for one, other in zip(actual, expected, strict=True):
            assert np.array_equal(one.view(np.uint8), other.view(np.uint8))
