"""JAXATTN_DEBUG=1: wrong page ids, lengths and offsets are errors by name before a launch."""

import functools
import re
import runpy
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxattn
import torch_core
from jaxattn.qsa import _run
from tests import errors, faults, inputs
from tests.torch_core.qsa import errors as qsa_errors
from torch_core import debug, dispatch, kv_cache, qsa
from torch_core.qsa import api, metadata

WRONG = [wrong for wrong in errors.SHARED if wrong.at_run_time]
ROWS = {"decode": "xqa", "prefill": "native_prefill_fa2"}


@pytest.fixture(params=[True, False], ids=["on", "off"])
def enabled(request, monkeypatch):
    monkeypatch.setattr(debug, "ENABLED", request.param)
    jax.clear_caches()  # of programs traced the other way
    yield request.param
    jax.clear_caches()


@pytest.fixture
def launched(monkeypatch):
    """Stand-ins for kernels, which check nothing, and the calls that reached them."""
    calls: list[str] = []

    def attend(problem, arrays, out, lse, kernel):
        calls.append(kernel)
        out.fill_(7)

    def append(problem, arrays):
        calls.append("append_kv")

    stub = types.SimpleNamespace(run=attend)
    monkeypatch.setattr(dispatch, "load", lambda kernel: stub)
    monkeypatch.setattr(dispatch, "choose", lambda problem, *_: dispatch.find(
        problem.phase, ROWS[problem.phase]))  # fmt: skip
    monkeypatch.setattr(kv_cache, "_append", lambda _: append)
    return calls


def arguments_of(wrong: errors.Wrong) -> dict[str, Any]:
    arguments = errors.valid(wrong.function)
    for name, change in wrong.changes.items():
        arguments[name] = change(arguments[name]) if callable(change) else change
    return {name: value for name, value in arguments.items() if value is not None}


def run(front: str, function: str, arguments: dict[str, Any]) -> Any:
    if front == "torch":
        return inputs.run_torch(getattr(torch_core, function), arguments)
    return inputs.run_jax(getattr(jaxattn, function), arguments)


@pytest.mark.parametrize("front", faults.FRONTS)
@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_wrong_values(wrong, front, enabled, launched):
    """Eager in torch, under jit in JAX: no kernel is launched, and the next call works."""
    arguments = arguments_of(wrong)
    if enabled:
        with pytest.raises(faults.RUNTIME_ERRORS[front], match=re.escape(wrong.message)):
            run(front, wrong.function, arguments)
        assert launched == []
    else:
        run(front, wrong.function, arguments)
    run(front, wrong.function, errors.valid(wrong.function))
    kernel = ROWS.get(wrong.function, "append_kv")
    by_xla = (front, wrong.function) == ("jax", "append_kv")
    assert launched == ([] if by_xla else [kernel] * (1 if enabled else 2))


@pytest.mark.parametrize("changes, message", [
    (dict(seq_lens=np.array([5, 25], np.int32)), "got 5 to 25 (row 1)"),
    (dict(page_table=np.array([[0, 1, 2], [0, 9, 2]], np.int32)), "got 0 to 9 (row 1)"),
])  # fmt: skip
def test_the_row_is_named(changes, message, monkeypatch, launched):
    monkeypatch.setattr(debug, "ENABLED", True)
    with pytest.raises(ValueError, match=re.escape(message)):
        run("torch", "decode", errors.valid("decode") | changes)


@pytest.mark.parametrize("changes, message", [
    (dict(positions=np.array([-1, 40], np.int32)), "got 40 to 40 (row 1)"),
    (dict(request_ids=np.array([0, 2], np.int32)), "got 0 to 2 (row 1)"),
])  # fmt: skip
def test_the_row_of_an_append_is_named(changes, message):
    """A skipped row counts."""
    with pytest.raises(ValueError, match=re.escape(message)):
        run("torch", "append_kv", errors.valid("append_kv") | changes)


def test_programs_hold_checks_only_when_asked(enabled, launched):
    for function in ("decode", "prefill", "append_kv"):
        arrays, static = faults.jax_arrays(errors.valid(function))
        call = functools.partial(getattr(jaxattn, function), **static)
        text = jax.jit(lambda arrays, call=call: call(**arrays)).lower(arrays).as_text()
        assert ('"jaxattn.check' in text) == enabled, function


def test_vmap_is_checked(monkeypatch, launched):
    """The folded batch is what the kernel gets, and its row is named."""
    monkeypatch.setattr(debug, "ENABLED", True)
    jax.clear_caches()
    arrays, static = faults.jax_arrays(errors.valid("decode"))
    lengths = jnp.array([[5, 9], [5, 25]], jnp.int32)
    mapped = jax.vmap(lambda n: jaxattn.decode(**arrays | dict(seq_lens=n), **static))
    with pytest.raises(errors.AT_RUN_TIME, match=r"seq_lens must be .*, got 5 to 25 \(row 3\)"):
        jax.block_until_ready(jax.jit(mapped)(lengths))
    assert launched == []
    jax.clear_caches()


@pytest.fixture
def qsa_launched(monkeypatch):
    """torch_core.qsa as on a GPU, with nothing behind it."""
    chains: list[Any] = []

    def record(chain, arrays, *_):
        chains.append(chain)
        return dict.fromkeys(qsa.Metadata._fields)

    for module in (api, metadata):
        monkeypatch.setattr(module.launch, "uses_kernels", lambda _: True)
        monkeypatch.setattr(module.launch, "run", record)
    return chains


QSA = [
    ("build_metadata", dict(cu_seqlens_q=qsa_errors.int32(0, 3, 2)), "cu_seqlens_q must rise"),
    ("build_metadata", dict(seq_lens=qsa_errors.int32(9999, 6)), "seq_lens must be in"),
    ("compress", dict(ring_ids=qsa_errors.int32(1, 2)), "ring_ids must be in"),
    ("compress", dict(cos=torch.ones(4, 4), sin=torch.ones(4, 4),
                      metadata=qsa.Metadata(*[qsa_errors.int32(0, 1, 1)] * 2,
                                            *[qsa_errors.int32(7, 7, 7)] * 2)),
     "cos must have a row for each rotary position"),
]  # fmt: skip


@pytest.mark.parametrize(
    "name, changes, message", QSA, ids=[f"{row[0]}-{row[2][:8]}" for row in QSA]
)
def test_qsa_in_torch(name, changes, message, enabled, qsa_launched):
    counts = dict(num_decodes=1, decode_query_len=1) if name == "build_metadata" else {}
    arguments = qsa_errors.valid(name) | changes | counts
    if enabled:
        with pytest.raises(ValueError, match=f"^{message}"):
            getattr(qsa, name)(**arguments)
    else:
        getattr(qsa, name)(**arguments)
    assert len(qsa_launched) == (not enabled)


@pytest.mark.parametrize(
    "name, changes, message", QSA, ids=[f"{row[0]}-{row[2][:8]}" for row in QSA]
)
def test_qsa_in_jax(name, changes, message, enabled):
    """What is put before a launch, inside jit."""
    numbers = dict(num_rows=4, page_size=16, num_decodes=1, decode_query_len=1)
    if name == "compress":
        numbers = dict(compress_ratio=4, num_rings=2, num_pages=4, groups_per_page=4)

    def passed(arguments):
        flat = dict(arguments)
        flat |= flat.pop("metadata")._asdict() if "metadata" in flat else {}
        arrays = {k: inputs.to_jax(v.numpy()) for k, v in flat.items() if hasattr(v, "numpy")}
        checked = jax.jit(lambda arrays: _run.checked(name, arrays, **numbers)["seq_lens"])
        return np.asarray(checked(arrays)).tolist()

    assert passed(qsa_errors.valid(name)) == [21, 6]
    if enabled:
        with pytest.raises(errors.AT_RUN_TIME, match=message):
            passed(qsa_errors.valid(name) | changes)
    else:
        wanted = changes.get("seq_lens", qsa_errors.int32(21, 6))
        assert passed(qsa_errors.valid(name) | changes) == wanted.tolist()


@pytest.mark.parametrize("value, wanted", [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_variable(value, wanted, monkeypatch):
    monkeypatch.delenv("JAXATTN_DEBUG", raising=False)
    if value is not None:
        monkeypatch.setenv("JAXATTN_DEBUG", value)
    assert runpy.run_path(debug.__file__)["ENABLED"] is wanted


def test_captured_calls_are_not_checked(monkeypatch, caplog):
    """A capture cannot read memory: said once."""
    monkeypatch.setattr(debug, "ENABLED", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    debug._tell.cache_clear()
    for _ in range(2):
        debug.check(lambda: pytest.fail("read while capturing"))
    assert caplog.text.count("checks nothing in calls that a CUDA graph captures") == 1


GPU = dict(num_qo_heads=8, num_kv_heads=1, head_dim=128, page_size=64, dtype="bfloat16")
GPU_WRONG = [
    (dict(seq_lens=np.array([5, 9999], np.int32)), "seq_lens must be in"),
    (dict(page_table=np.full((2, 6), 2**30, np.int32)), "page_table must be in"),
    (dict(cu_seqlens_q=np.array([0, 9, 5], np.int32)), "cu_seqlens_q must rise"),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("front", faults.FRONTS)
@pytest.mark.parametrize("phase", ["decode", "prefill", "planned"])
def test_kernels_on_a_gpu(phase, front, enabled):
    """Page ids that would fault stop before the kernel: the context lives, good calls follow."""
    if not enabled:
        pytest.skip("would fault")
    q_lens = None if phase == "decode" else (2, 3)
    name = "decode" if phase == "decode" else "prefill"
    case = inputs.Case("", (90, 300), q_lens, **GPU)
    arguments = case.make()
    arguments["page_table"] = np.resize(arguments["page_table"], (2, 6))
    arguments["page_table"][:] = np.arange(12).reshape(2, 6) % arguments["key_cache"].shape[0]

    def result(arguments):
        if front == "torch":
            return inputs.run_torch(getattr(torch_core, name), arguments, "cuda")
        return inputs.run_jax(getattr(jaxattn, name), arguments)

    expected = result(arguments)
    if phase == "planned":
        arrays = (arguments[n] for n in ("query", "key_cache", "value_cache", "page_table"))
        lengths = (inputs.to_torch(arguments[n], "cuda") for n in ("seq_lens", "cu_seqlens_q"))
        plan = torch_core.plan_prefill(*map(inputs.to_torch, arrays), *lengths, max_seqlen_q=3)
        arguments |= dict(plan=inputs.to_numpy(plan))
    for changes, message in GPU_WRONG:
        if set(changes) <= set(arguments):
            with pytest.raises(faults.RUNTIME_ERRORS[front], match=message):
                result(arguments | changes)
            assert faults.same_bits(result(arguments), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("front", faults.FRONTS)
def test_append_on_a_gpu(front, enabled):
    """Without the variable a place that does not exist is dropped."""
    arguments = errors.valid("append_kv") | dict(positions=np.array([4, 90], np.int32))
    call = functools.partial(inputs.run_torch, torch_core.append_kv, device="cuda")
    if front == "jax":
        call = functools.partial(inputs.run_jax, jaxattn.append_kv)
    if enabled:
        with pytest.raises(faults.RUNTIME_ERRORS[front], match=r"positions must .* \(row 1\)"):
            call(arguments)
    else:
        call(arguments)
    call(errors.valid("append_kv"))


@pytest.mark.gpu
@pytest.mark.parametrize("via", ["torch", "triton", "dlpack"])
def test_qsa_on_a_gpu(via, enabled):
    """Offsets that do not rise."""
    arguments = qsa_errors.valid("build_metadata") | dict(num_decodes=1, decode_query_len=1)
    wrong = arguments | dict(cu_seqlens_q=qsa_errors.int32(0, 3, 2))

    def call(arguments):
        if via == "torch":
            moved = {k: v.cuda() if hasattr(v, "cuda") else v for k, v in arguments.items()}
            return qsa.build_metadata(**moved)[0].positions.tolist()
        moved = {k: inputs.to_jax(v.numpy()) if hasattr(v, "numpy") else v
                 for k, v in arguments.items()}  # fmt: skip
        arrays = {k: v for k, v in moved.items() if hasattr(v, "shape")}
        static = {k: v for k, v in moved.items() if k not in arrays} | dict(via=via)
        build = jax.jit(lambda arrays: jaxattn.qsa.build_metadata(**arrays, **static)[0])
        return np.asarray(build(arrays).positions).tolist()

    if enabled:
        with pytest.raises(errors.AT_RUN_TIME, match="cu_seqlens_q must rise"):
            call(wrong)
    assert call(arguments) == [20, 4, 5, -1]
