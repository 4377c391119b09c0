"""torch.compile, `out`, inference mode and gradients."""

import functools
import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch

import torch_core
from tests import inputs, kv_model, split
from tests.inputs import Case
from torch_core import checks, launch
from torch_core.problem import AppendProblem, AttentionProblem, DecodeProblem, PrefillProblem

DECODE = Case("decode", (9, 30, 4, 0), q_len=3, draft_mask="bool", sinks=True, dtype="bfloat16",
              kv_dtype="float8_e4m3fn", kv_layout="HND",
              options=dict(window_left=9, soft_cap=3.0, sm_scale=0.2, k_scale=0.5))  # fmt: skip
PREFILL = Case("prefill", (25, 17), q_lens=(5, 7), extra_rows=2, sinks=True)
CALLS = [DECODE, PREFILL, Case("plain", (9, 30)), Case("prefill_e4m3", (9, 6), q_lens=(2, 3),
         dtype="float8_e4m3fn", options=dict(causal=False, q_scale=2.0))]  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch):
    torch.compiler.reset()
    # Dynamo cannot trace methods that the suite's annotation checks wrap.
    kinds = (checks.Shapes, AppendProblem, AttentionProblem, DecodeProblem, PrefillProblem)
    for kind in kinds:
        for name, value in list(vars(kind).items()):
            if isinstance(value, property):
                monkeypatch.setattr(kind, name, property(inspect.unwrap(value.fget)))
            elif inspect.isfunction(value):
                monkeypatch.setattr(kind, name, inspect.unwrap(value))


def tensors(arguments):
    return {name: inputs.to_torch(value) for name, value in arguments.items()}


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def partly(function):
    """Compiled, with a way back to eager code: what raises while tracing raises as it is."""
    return torch.compile(function, backend="aot_eager")


def pair(results):
    return results if isinstance(results, tuple) else (results,)


def equal(actual, expected) -> bool:
    return all(
        a.dtype == e.dtype and torch.equal(a, e)
        for a, e in zip(pair(actual), pair(expected), strict=True)
    )


def outputs_like(results):
    return tuple(torch.full_like(r, 7) for r in pair(results))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("case", CALLS, ids=lambda c: f"{c.phase}-{c}")
def test_compiled_equals_eager(case, return_lse):
    """One graph, the same bits."""
    given = tensors(case.make())
    function = functools.partial(getattr(torch_core, case.phase), return_lse=return_lse)
    assert equal(compiled(lambda given: function(**given))(given), function(**given))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_compiled_with_default_compiler(phase):
    """With the default compiler around it: what surrounds the call is compiled."""
    given = tensors((DECODE if phase == "decode" else PREFILL).make())
    function = getattr(torch_core, phase)

    def step(given):
        out, lse = function(**given | dict(query=given["query"] * 2), return_lse=True)
        return out * 3, lse + 1

    actual = torch.compile(step, fullgraph=True)(given)
    for a, e in zip(actual, step(given), strict=True):
        torch.testing.assert_close(a, e)


def test_compiled_with_tensor_scales():
    """0-d tensors are data: a new value gives a new result without a new graph."""
    arguments = DECODE.make()
    given = tensors(arguments)
    step = compiled(lambda scale: torch_core.decode(**given | dict(k_scale=scale, sm_scale=scale)))
    for value in (0.25, 0.5, 1.5):
        numbers = given | dict(k_scale=value, sm_scale=value)
        assert equal(step(torch.tensor(value)), torch_core.decode(**numbers))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=lambda c: c.phase)
def test_compiled_with_out(case, return_lse):
    """`out` is written, and is what comes back."""
    given = tensors(case.make())
    function = functools.partial(getattr(torch_core, case.phase), return_lse=return_lse)
    expected = function(**given)
    out = outputs_like(expected)
    out = out if return_lse else out[0]
    result = compiled(lambda given, out: function(**given, out=out))(given, out)
    assert equal(out, expected) and equal(result, expected)


def test_compiled_follows_lengths():
    """New lengths, same shapes: no new graph."""
    given = tensors(Case("", (9, 30, 17)).make())
    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(
        lambda lengths: torch_core.decode(**given | dict(seq_lens=lengths)),
        fullgraph=True,
        backend=count,
    )
    for lengths in ((9, 30, 17), (1, 2, 3), (0, 30, 0)):
        lengths = torch.tensor(lengths, dtype=torch.int32)
        assert equal(step(lengths), torch_core.decode(**given | dict(seq_lens=lengths)))
    assert len(graphs) == 1


@pytest.mark.parametrize("case", [
    kv_model.CASES[0], kv_model.CASES[4],
    kv_model.Append("fp8", kv_dtype="float8_e4m3fn", dtype="bfloat16", kv_layout="HND",
                    options=dict(k_scale=0.3, v_scale=np.array(2.0, np.float32))),
], ids=str)  # fmt: skip
def test_compiled_append(case):
    """The caches are written in place."""
    arguments = case.make()
    given = tensors(arguments)

    def step(given):
        key_cache, value_cache = torch_core.append_kv(**given)
        return key_cache.float().sum(), value_cache.float().sum()

    sums = compiled(step)(given)
    for name, total, expected in zip(
        ("key_cache", "value_cache"), sums, kv_model.append(arguments), strict=True
    ):
        assert kv_model.same_bits(inputs.to_numpy(given[name]), expected)
        torch.testing.assert_close(total, inputs.to_torch(expected).float().sum())


@pytest.mark.parametrize("with_out", [False, True])
def test_compiled_merge(with_out):
    """merge_states is plain torch."""
    given = tensors(split.random_states("bfloat16"))
    expected = torch_core.merge_states(**given)
    out = outputs_like(expected) if with_out else None
    result = compiled(lambda given, out: torch_core.merge_states(**given, out=out))(given, out)
    assert equal(result, expected)
    assert not with_out or equal(out, expected)


def refusal_of(call):
    """The type and message of the error, looked for below what torch.compile wraps around it."""
    with pytest.raises(Exception) as error:
        call()
    found = error.value
    while found is not None and not isinstance(found, ValueError | TypeError | NotImplementedError):
        found = found.__cause__ or found.__context__ or getattr(found, "inner_exception", None)
    return found if found is not None else error.value


WRONG = [
    ("soft_cap", dict(soft_cap=0.0), "soft_cap must be a positive finite float32 number"),
    ("soft_cap_negative", dict(soft_cap=-1.0), "soft_cap must be a positive finite float32 number"),
    ("k_scale_nan", dict(k_scale=float("nan")), "k_scale must be a positive finite float32 number"),
    ("k_scale_text", dict(k_scale="1"), "k_scale must be a number or a 0-d float array"),
    ("k_scale_bool", dict(k_scale=True), "k_scale must be a number or a 0-d float array"),
    ("window_left", dict(window_left=-2), "window_left must be in"),
    ("window_left_float", dict(window_left=2.5), "window_left must be a Python int"),
    ("q_len_float", dict(q_len=1.5), "q_len must be a Python int"),
    ("return_lse", dict(return_lse=1), "return_lse must be True or False"),
    ("batch_invariant", dict(batch_invariant=2), "batch_invariant must be True or False"),
    ("kv_layout", dict(kv_layout="NDH"), "kv_layout must be one of 'NHD', 'HND'"),
    ("backend", dict(backend="xla"), "backend must be one of 'auto'"),
    ("seq_lens", dict(seq_lens=torch.zeros(2, dtype=torch.int64)), "seq_lens must be int32"),
    ("page_table", dict(page_table=torch.zeros(3, 2, dtype=torch.int32)), "seq_lens must be int32"),
    ("query", dict(query=torch.zeros(3, 4, 16)), "query must have batch * q_len"),
    ("out_dtype", dict(out=torch.zeros(2, 4, 16, dtype=torch.bfloat16)), "out must be"),
    ("out_shape", dict(out=torch.zeros(3, 2, 4, 16)), "out must be"),
    ("out_count", dict(out=(torch.zeros(2, 4, 16), torch.zeros(2, 4))), "out must be one tensor"),
]  # fmt: skip


@pytest.mark.parametrize("changes, message", [row[1:] for row in WRONG], ids=[r[0] for r in WRONG])
def test_compiled_refuses_what_eager_refuses(changes, message):
    """The same wrong argument, the same message; a silent answer would be worse than either."""
    given = tensors(Case("", (9, 30)).make()) | changes
    with pytest.raises((ValueError, TypeError), match=message.replace("*", r"\*")):
        torch_core.decode(**given)
    static = {name: v for name, v in given.items() if not isinstance(v, torch.Tensor | tuple)}
    moving = {name: v for name, v in given.items() if isinstance(v, torch.Tensor | tuple)}
    call = partly(lambda moving: torch_core.decode(**moving, **static))
    assert message in str(refusal_of(lambda: call(moving)))


def test_compiled_prefill_takes_a_plan():
    """And refuses one of another size, as eagerly."""
    given = tensors(PREFILL.make())
    plan = torch_core.plan_prefill(**given)
    step = partly(lambda given, plan: torch_core.prefill(**given, plan=plan))
    assert torch.equal(step(given, plan), torch_core.prefill(**given))
    message = str(refusal_of(lambda: step(given, torch.zeros(3, dtype=torch.int32))))
    assert "plan must be int32 [0]" in message


@pytest.mark.parametrize("case", [
    Case("decode", (9, 30, 0), q_len=2, draft_mask="packed", sinks=True), PREFILL,
], ids=lambda c: c.phase)  # fmt: skip
def test_opcheck_of_attention(case, monkeypatch):
    """Schema, fake implementation and dispatch of the operator agree with what it does."""
    calls = []
    monkeypatch.setattr(launch, "_attention_op", lambda *a: calls.append(a) or launch.attend)
    given = tensors(case.make())
    arrays = {n: given.pop(n) for n in list(given) if n in launch.AttentionInputs._fields}
    options = dict(window_left=-1, soft_cap=None, return_lse=True, batch_invariant=False) | given
    options.setdefault("causal", True) if case.phase == "prefill" else None
    _, described = launch.DESCRIBE[case.phase](launch.AttentionInputs(**arrays), **options)
    launch._compiled(case.phase, described, "auto", options)
    torch.library.opcheck(
        torch.ops.torch_core.attention.default,
        calls[0],
        test_utils=("test_schema", "test_faketensor"),
    )


def test_opcheck_of_append():
    """It mutates what its schema says."""
    given = tensors(kv_model.CASES[0].make())
    names = ("key", "value", "key_cache", "value_cache", "page_table", "positions", "request_ids")
    arguments = (*(given[name] for name in names), None, 1.0, None, 1.0, None, "NHD")
    torch.library.opcheck(
        torch.ops.torch_core.append_kv.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("case", CALLS, ids=lambda c: f"{c.phase}-{c}")
def test_out_equals_new_tensors(case):
    """Given `out` is written whole, strided or not, and returned."""
    given = tensors(case.make())
    function = functools.partial(getattr(torch_core, case.phase), return_lse=True)
    expected = function(**given)
    out = outputs_like(expected)
    assert all(r is t for r, t in zip(function(**given, out=out), out, strict=True))
    assert equal(out, expected)
    views = tuple(torch.full((2, *r.shape), 7, dtype=r.dtype).movedim(0, -1)[..., 1] for r in out)
    function(**given, out=views)
    assert equal(views, expected)


@pytest.mark.parametrize("case", CALLS[:2], ids=lambda c: c.phase)
def test_inference_mode(case):
    """The same bits, also on tensors that want a gradient."""
    given = tensors(case.make())
    expected = getattr(torch_core, case.phase)(**given)
    given["query"].requires_grad_()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            result = getattr(torch_core, case.phase)(**given)
        assert equal(result, expected) and not result.requires_grad


@pytest.mark.parametrize("name", ["query", "key_cache", "value_cache", "sinks", "k_scale"])
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_gradients_are_refused(how, name):
    """Whichever floating tensor asks for one."""
    case = Case("", (9, 30), sinks=True, options=dict(k_scale=np.array(0.5, np.float32)))
    given = tensors(case.make())
    given[name].requires_grad_()
    call = partly(lambda given: torch_core.decode(**given)) if how == "compiled" else (
        lambda given: torch_core.decode(**given))  # fmt: skip
    error = refusal_of(lambda: call(given))
    assert "torch_core.decode is for inference and has no gradient" in str(error)


@pytest.mark.parametrize("function, name", [
    ("append_kv", "key"), ("append_kv", "value_cache"), ("merge_states", "out_b"),
    ("merge_states", "lse_a"),
])  # fmt: skip
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_gradients_of_the_other_calls_are_refused(how, function, name):
    """append_kv and merge_states too."""
    states = split.random_states("float32")
    given = tensors(states if function == "merge_states" else kv_model.CASES[0].make())
    given[name].requires_grad_()
    call = functools.partial(lambda f, given: f(**given), getattr(torch_core, function))
    call = partly(call) if how == "compiled" else call
    error = refusal_of(lambda: call(given))
    assert f"torch_core.{function} is for inference and has no gradient" in str(error)


@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=lambda c: c.phase)
def test_symbolic_numbers(case):
    """dynamic=True, a second number and a second head_dim: no graph break, eager's results."""
    function = getattr(torch_core, case.phase)
    given = tensors(case.make())
    dynamic = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    assert equal(dynamic(**given), function(**given))
    again = compiled(function)
    for scale in (0.3, 0.7):
        assert equal(
            again(**given | dict(sm_scale=scale)), function(**given | dict(sm_scale=scale))
        )
    for head_dim in (16, 24):
        other = tensors(replace(case, head_dim=head_dim).make())
        assert equal(again(**other), function(**other))
