"""FlashInfer's native decode and prefill on a GPU, against the reference in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxattn
import torch_core
from jaxattn import _ffi
from tests import compare, inputs
from tests.inputs import Case
from torch_core import reference

pytestmark = pytest.mark.gpu

DECODE = Case("decode", (5, 1, 17, 300, 64, 0, 0, 640), num_qo_heads=16, num_kv_heads=2,
              head_dim=128, page_size=16, dtype="bfloat16")  # fmt: skip
PREFILL = dataclasses.replace(
    DECODE, name="prefill", seq_lens=(300, 17, 0, 8, 640), q_lens=(100, 17, 3, 12, 1), extra_rows=5
)
SINKS = dataclasses.replace(PREFILL, name="sinks", sinks=True)
E4M3 = dict(kv_dtype="float8_e4m3fn", k_scale=0.25, v_scale=0.5)
WIDE = dict(head_dim=256, num_qo_heads=14)
CASES = [
    dict(),
    dict(kv_layout="HND"),
    dict(page_size=1),
    dict(soft_cap=20.0),
    dict(window_left=127),
    dict(sm_scale=0.3, k_scale=0.5, v_scale=3.0),
    dict(sinks=True),
    WIDE,
    dict(dtype="float16"),
]

SPLIT = dict(seq_lens=(70_000, 3), q_lens=(3, 2), extra_rows=0)


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
    dtype = arguments["query"].dtype
    dtype = dtype if dtype.itemsize == 2 else torch.bfloat16
    rounded = reference.evaluate(case.phase, **arguments, compute_dtype=dtype)
    for result, wanted, plain in zip(results, exact, rounded, strict=True):
        wanted, plain = (x.double().cpu().numpy() for x in (wanted, plain))
        compare.check(inputs.to_numpy(result), wanted, plain)
    return results


@pytest.mark.parametrize("kv", [dict(), E4M3], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("changes", [*CASES, dict(seq_lens=(70_000, 3))], ids=str)
def test_decode(changes, kv):
    check(variant(DECODE, **(kv | changes)), "native_decode")


@pytest.mark.parametrize("changes", [dict(), dict(kv_layout="HND", page_size=1)], ids=str)
def test_decode_over_e5m2(changes):
    check(variant(DECODE, kv_dtype="float8_e5m2", k_scale=0.25, **changes), "native_decode")


@pytest.mark.parametrize("version", ["fa2", "fa3"])
@pytest.mark.parametrize("changes", [*CASES, dict(causal=False), SPLIT], ids=str)
def test_prefill(changes, version):
    check(variant(PREFILL, **changes), f"native_prefill_{version}")


@pytest.mark.parametrize("changes", [dict(), dict(kv_layout="HND"), WIDE], ids=str)
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


@pytest.mark.parametrize("case", [DECODE, PREFILL, SINKS], ids=str)
def test_from_jax(case):
    """Inside jit: torch's bits, also with lengths that change, and no Python in the calls."""
    arguments = case.make()
    traced = {n: inputs.to_jax(x) for n, x in arguments.items() if isinstance(x, np.ndarray)}
    static = {n: x for n, x in arguments.items() if not isinstance(x, np.ndarray)}
    function = getattr(jaxattn, case.phase)
    jitted = jax.jit(lambda traced: function(**traced, **static, return_lse=True))
    jitted(traced)
    before = _ffi.python_calls
    for shift in (0, 1, 3):
        arguments["seq_lens"] = np.maximum(arguments["seq_lens"] - shift, 0)
        results = jitted(traced | dict(seq_lens=jnp.asarray(arguments["seq_lens"])))
        expected = inputs.run_torch(
            getattr(torch_core, case.phase), arguments, "cuda", return_lse=True
        )
        for one, other in zip(results, expected, strict=True):
            if case.sinks:  # XLA's logistic is not torch's
                one, other = np.asarray(one, np.float32), other.astype(np.float32)
                np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-2)
            else:
                assert np.array_equal(np.asarray(one).view(np.uint8), other.view(np.uint8))
    assert jitted._cache_size() == 1
    assert _ffi.python_calls == before


@pytest.mark.parametrize("front", ["torch", "jax"])
@pytest.mark.parametrize("version", ["fa2", "fa3"])
def test_plan_given(front, version):
    """A plan made before gives the same bits as the call's own."""
    arguments = PREFILL.make() | dict(backend=f"native_prefill_{version}")
    package, convert = (
        (torch_core, lambda x: inputs.to_torch(x, "cuda"))
        if front == "torch"
        else (jaxattn, inputs.to_jax)
    )
    given = {name: convert(value) for name, value in arguments.items()}
    plan = package.plan_prefill(**given)
    assert plan.shape[0] > 0
    for_lse = package.plan_prefill(**given, return_lse=True)
    own, named = package.prefill(**given), package.prefill(**given, plan=plan)
    assert np.array_equal(bits(own), bits(named))
    with_lse, _ = package.prefill(**given, return_lse=True, plan=for_lse)
    assert np.array_equal(bits(own), bits(with_lse))
    with pytest.raises(ValueError, match=r"plan must be int32 \["):
        package.prefill(**given, plan=plan[:-1])


def bits(array) -> np.ndarray:
    return inputs.to_numpy(array).view(np.uint8)


@pytest.mark.parametrize("backend", ["native_decode", "native_prefill_fa2", "native_prefill_fa3"])
def test_in_a_cuda_graph(backend):
    """Captured once, replayed with other lengths: nothing is read back."""
    case = DECODE if backend == "native_decode" else PREFILL
    given = {name: inputs.to_torch(value, "cuda") for name, value in case.make().items()}
    function = functools.partial(getattr(torch_core, case.phase), backend=backend)
    function(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(**given)
    for shift in (1, 2):
        given["seq_lens"].sub_(shift).clamp_(min=0)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, function(**given))


def test_scales_as_arrays():
    """On the device they are not read back, and mean the same as numbers."""
    case = variant(DECODE, sm_scale=0.3, k_scale=0.5, v_scale=3.0)
    given = {name: inputs.to_torch(value, "cuda") for name, value in case.make().items()}
    numbers = torch_core.decode(**given, return_lse=True)
    names = ("sm_scale", "k_scale", "v_scale")
    arrays = {name: torch.tensor(given[name], device="cuda") for name in names}
    for one, other in zip(
        torch_core.decode(**given | arrays, return_lse=True), numbers, strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_batch_invariance():
    """A request's bits do not depend on the others, nor on where it stands."""
    given = {name: inputs.to_torch(value, "cuda") for name, value in DECODE.make().items()}
    names = ("query", "page_table", "seq_lens")
    whole = torch_core.decode(**given, batch_invariant=True)
    for request in (2, 7):
        alone = given | {name: given[name][request : request + 1] for name in names}
        assert torch.equal(torch_core.decode(**alone, batch_invariant=True)[0], whole[request])
