"""Random calls on a GPU with two outcomes: as near to the exact answer as the same maths in the
kernel's dtype, or refused before a launch.

What FlashInfer compiles for is drawn from a short list, everything else freely. `JAXATTN_FUZZ=5000`
asks for that many examples.
"""

import os
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import jaxattn
import torch_core
from tests import compare, faults, inputs
from tests.faults import gpu
from tests.inputs import DTYPES, Case
from torch_core import reference

pytestmark = pytest.mark.gpu

EXAMPLES = int(os.environ.get("JAXATTN_FUZZ", "500"))
E4M3, E5M2 = gpu.E4M3, gpu.E5M2
FILLING = 7.0


def fuzz(share: float):
    """A share of all examples; the same ones each time, unless more are asked for."""
    return settings(
        max_examples=max(1, int(EXAMPLES * share)),
        derandomize="JAXATTN_FUZZ" not in os.environ,
        deadline=None,
        database=None,
        phases=(Phase.generate,),  # a shrunk example would be another compilation
        suppress_health_check=list(HealthCheck),
    )


def scales(*numbers: float) -> st.SearchStrategy:
    """Not given, a number, or a 0-d array."""
    kinds = st.sampled_from([float, np.float32, lambda x: np.array(x, np.float32)])
    return st.none() | st.builds(lambda x, kind: kind(x), st.sampled_from(numbers), kinds)


LENGTHS = st.one_of(st.integers(0, 9), *[st.integers(0, 140)] * 2, st.integers(0, 700))
Q_LENS = st.one_of(st.integers(0, 5), st.integers(0, 40))
WINDOWS = st.sampled_from([0, 1, 3, 15, 63, 64, 127, 128, 129, 500, 2**31 - 1])
CAPS = st.sampled_from([0.5, 4.0, 30.0])

# (page_size, head_dim, group_size, kv heads)
XQA_SIZES = [(64, 128, 8, 2), (16, 128, 8, 1), (32, 128, 4, 2), (64, 64, 3, 2), (64, 256, 12, 1),
             (16, 64, 1, 3)]  # fmt: skip
FREE_SIZES = st.tuples(st.sampled_from([1, 5, 16, 24, 64]), st.just(128),
                       st.sampled_from([1, 2, 3, 5, 7, 8, 16]), st.integers(1, 3))  # fmt: skip


@st.composite
def decodes(draw) -> dict[str, Any]:
    """Dtypes, sizes and features of a decode for XQA, or with lse or a soft cap for FA2."""
    kv_dtype = draw(st.sampled_from([None, E4M3]))
    if draw(st.booleans()):
        sizes, feature = draw(st.sampled_from(XQA_SIZES)), "plain"
        if sizes[:3] == XQA_SIZES[0][:3]:
            feature = draw(st.sampled_from(["plain", "window", "drafts"]))
        chosen: dict[str, Any] = dict(options={}, kv_dtype=kv_dtype, sizes=sizes)
        if feature == "window":
            chosen["options"] = dict(window_left=draw(WINDOWS))
        if feature == "drafts":
            mask = draw(st.sampled_from([None, "bool", "packed"]))
            chosen |= dict(q_len=4, draft_mask=mask)
        return chosen
    options = dict(return_lse=draw(st.booleans()), batch_invariant=draw(st.booleans()))
    options["return_lse"] |= not options["batch_invariant"]
    feature = "plain" if kv_dtype else draw(st.sampled_from(["plain", "window", "cap"]))
    return dict(
        kv_dtype=kv_dtype, sizes=draw(FREE_SIZES), options=options | featured(draw, feature)
    )


def featured(draw: Any, feature: str) -> dict[str, Any]:
    if feature == "plain":
        return {}
    return dict(window_left=draw(WINDOWS)) if feature == "window" else dict(soft_cap=draw(CAPS))


@st.composite
def prefills(draw) -> dict[str, Any]:
    """The same of a prefill, for FA2 or FA3."""
    dtype, kv_dtype = draw(st.sampled_from([("bfloat16", None)] * 3 + [("bfloat16", E4M3),
                                                                       (E4M3, None)]))  # fmt: skip
    same = dtype == "bfloat16" and kv_dtype is None
    feature = draw(st.sampled_from(["plain", "window", "cap"])) if same else "plain"
    options = featured(draw, feature) | dict(
        return_lse=draw(st.booleans()),
        batch_invariant=draw(st.booleans()),
        causal=draw(st.sampled_from([True, True, False])),
    )
    if same and draw(st.booleans()):
        options["backend"] = "native_prefill_fa2"
        options["causal"] |= feature == "window"
    return dict(dtype=dtype, kv_dtype=kv_dtype, sizes=draw(FREE_SIZES), options=options)


# No kernel on Hopper takes these, or only the reference by name does.
REFUSED = [
    dict(phase="prefill", sizes=(16, 80, 2, 2)),
    dict(phase="prefill", sizes=(16, 128, 2, 2), kv_dtype=E5M2),
    dict(phase="prefill", sizes=(16, 128, 2, 2), dtype=E4M3, options=dict(window_left=9)),
    dict(phase="prefill", sizes=(16, 128, 2, 2), dtype=E4M3, options=dict(soft_cap=2.0)),
    dict(phase="prefill", sizes=(16, 128, 2, 2), dtype="float32"),
    dict(phase="prefill", sizes=(16, 512, 2, 2), dtype="float16"),
    dict(phase="decode", sizes=(8, 80, 2, 2)),
    dict(phase="decode", sizes=(8, 128, 2, 2), q_len=3),
    dict(phase="decode", sizes=(16, 128, 8, 1), dtype=E4M3),
    dict(phase="decode", sizes=(16, 128, 8, 1), dtype="float32"),
    dict(phase="decode", sizes=(16, 24, 2, 1), dtype="float16"),
    dict(phase="decode", sizes=(64, 128, 8, 1), q_len=4, options=dict(return_lse=True)),
    dict(phase="decode", sizes=(64, 128, 8, 1), q_len=4, options=dict(soft_cap=3.0)),
    dict(phase="decode", sizes=(64, 128, 8, 1), q_len=4, draft_mask="bool",
         options=dict(window_left=2)),
]  # fmt: skip


@st.composite
def cases(draw) -> tuple[Case, bool]:
    """A call, and whether it must be refused."""
    refused = draw(st.integers(0, 19)) == 0
    if refused:
        chosen = dict(draw(st.sampled_from(REFUSED)))
        phase = chosen.pop("phase")
    else:
        phase = draw(st.sampled_from(["decode", "prefill"]))
        chosen = draw(decodes() if phase == "decode" else prefills())
    return complete(draw, phase, **chosen), refused


def complete(draw: Any, phase: str, *, sizes: tuple, options=None, **chosen: Any) -> Case:
    """The rest of a call: lengths, layout, sinks, scales, padding."""
    lengths = tuple(draw(st.lists(LENGTHS, max_size=4)))
    page_size, head_dim, group, kv_heads = sizes
    given = dict(
        sm_scale=draw(scales(-0.25, 0.0, 0.01, 0.1, 0.25)),
        q_scale=draw(scales(0.25, 1.0, 1.7)),
        k_scale=draw(scales(0.25, 0.7, 1.0, 1.7)),
        v_scale=draw(scales(0.25, 0.7, 1.0, 3.0)),
    )
    given = {name: value for name, value in given.items() if value is not None}
    fields: dict[str, Any] = dict(dtype="bfloat16") | chosen
    if phase == "prefill":
        counts = draw(st.tuples(*[Q_LENS] * len(lengths)))
        fields |= dict(q_lens=counts, extra_rows=draw(st.integers(0, 3)))
    return Case(
        "fuzz",
        lengths,
        num_kv_heads=kv_heads,
        num_qo_heads=kv_heads * group,
        head_dim=head_dim,
        page_size=page_size,
        kv_layout=draw(st.sampled_from(["NHD", "HND"])),
        sinks=draw(st.booleans()),
        extra_pages=draw(st.integers(0, 2)),
        options=given | (options or {}),
        **fields,
    )


def check(arguments: dict[str, Any], results: Any) -> None:
    """Against the reference in float64; how near, says the same maths in the kernel's dtype."""
    call = {name: value for name, value in arguments.items() if name != "backend"}
    results = results if isinstance(results, tuple) else (results,)
    exact = reference.evaluate(faults.phase_of(call), **gpu.on_device(call))
    for result, right, plain in zip(results, exact, gpu.rounded(call), strict=False):
        compare.check(inputs.to_numpy(result), right.double().cpu().numpy(), plain)


def filled_out(arguments: dict[str, Any]) -> Any:
    """Result tensors that hold FILLING."""
    query = arguments["query"]
    kind = "bfloat16" if query.dtype.itemsize == 1 else query.dtype.name
    out = torch.full(query.shape, FILLING, dtype=getattr(torch, kind), device=gpu.DEVICE)
    if not arguments.get("return_lse"):
        return out
    return out, torch.full(query.shape[:2], FILLING, device=gpu.DEVICE)


@fuzz(0.9)
@given(
    drawn=cases(),
    seed=st.integers(0, 2**16),
    fill=st.sampled_from([None, np.nan, np.inf]),
    with_out=st.booleans(),
)
def test_torch_is_right_or_refuses(drawn, seed, fill, with_out):
    """Slots that must not be read hold anything; a refused call writes nothing, and the reference
    by name takes it."""
    case, refused = drawn
    arguments = case.make(seed)
    if fill is not None:
        arguments = gpu.poisoned(arguments, fill)
    out = filled_out(arguments) if with_out or refused else None
    function, tensors = getattr(torch_core, case.phase), gpu.on_device(arguments)
    if refused:
        with pytest.raises(NotImplementedError, match="no kernel runs this"):
            function(**tensors, out=out)
        targets = out if isinstance(out, tuple) else (out,)
        assert all((target == FILLING).all() for target in targets)
        results = function(**tensors, out=out, backend="reference")
    else:
        results = function(**tensors, out=out)
    check(arguments, results)


# Under jit a new shape compiles: a pool of shapes, and the rest drawn.
SMALL = dict(num_qo_heads=16, num_kv_heads=2, head_dim=128, page_size=64, dtype="bfloat16")
POOL = [
    Case("xqa", (300, 170, 90), **SMALL),
    Case("xqa_e4m3", (300, 170), kv_dtype=E4M3, kv_layout="HND", sinks=True, **SMALL),
    Case("xqa_window", (300, 170), **SMALL, options=dict(window_left=127)),
    Case("xqa_drafts", (300, 17, 9), q_len=4, draft_mask="bool", **SMALL),
    Case("native", (300, 170), **SMALL, options=dict(return_lse=True)),
    Case("native_cap", (300, 170), sinks=True, **SMALL, options=dict(soft_cap=3.0)),
    Case("fa3", (300, 17), q_lens=(40, 9), extra_rows=2, **SMALL, options=dict(return_lse=True)),
    Case("fa3_window", (300, 17), q_lens=(40, 9), sinks=True, **SMALL,
         options=dict(window_left=64)),
    Case("fa2_e4m3", (300, 17), q_lens=(40, 9), kv_dtype=E4M3, kv_layout="HND", **SMALL),
    Case("fa3_e4m3", (300, 17), q_lens=(40, 9), **(SMALL | dict(dtype=E4M3))),
]  # fmt: skip


@fuzz(0.2)
@given(st.sampled_from(POOL), st.integers(0, 2**16), st.data())
def test_jax_is_right(case, seed, data):
    """The pool's calls with other lengths, query lengths and scales."""
    arguments = case.make(seed)
    lengths = [data.draw(st.integers(0, most)) for most in case.seq_lens]
    arguments["seq_lens"] = np.array(lengths, np.int32)
    if case.q_lens is not None:
        counts = [data.draw(st.integers(0, most)) for most in case.q_lens]
        arguments["cu_seqlens_q"] = np.cumsum([0, *counts]).astype(np.int32)
    for name in ("q_scale", "k_scale", "v_scale"):
        arguments[name] = np.array(data.draw(st.sampled_from([0.25, 0.7, 1.7])), np.float32)
    arrays, static = faults.jax_arrays(gpu.poisoned(arguments, np.nan))
    program = faults.jitted(case.phase, tuple(sorted(static.items())))
    results = jax.block_until_ready(program(arrays))
    check(arguments, results)


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_jax_refuses(index):
    """What must be refused is refused while tracing, with a reason against every kernel."""
    chosen = dict(REFUSED[index])
    phase, (page_size, head_dim, group, kv_heads) = chosen.pop("phase"), chosen.pop("sizes")
    rows = dict(q_lens=(3, 9)) if phase == "prefill" else {}
    sizes = dict(num_kv_heads=kv_heads, num_qo_heads=kv_heads * group, head_dim=head_dim)
    case = Case("refused", (30, 9), **rows, **sizes, page_size=page_size,
                **(dict(dtype="bfloat16") | chosen))  # fmt: skip
    arrays, static = faults.jax_arrays(case.make())
    assert arrays["query"].dtype == DTYPES[case.dtype]
    with pytest.raises(NotImplementedError, match="no kernel runs this"):
        jax.eval_shape(lambda arrays: getattr(jaxattn, phase)(**arrays, **static), arrays)
