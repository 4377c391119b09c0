"""Random calls with two outcomes: the oracle's answer, or a refusal that wrote nothing.

Which of the two is due is decided here, before the call: a drawn call is valid, and a mutation of
it is invalid by construction. `JAXATTN_FUZZ=100000` asks for that many examples.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import jaxattn
import torch_core
from tests import compare, errors, inputs, kv_model, split
from tests.inputs import DTYPES, Case

EXAMPLES = int(os.environ.get("JAXATTN_FUZZ", "2000"))
REFUSALS = (ValueError, TypeError, NotImplementedError)
FILLING = 7.0
FP8 = ("float8_e4m3fn", "float8_e5m2")


def fuzz(share: float):
    """A share of all examples; the same ones each time, unless more are asked for."""
    return settings(
        max_examples=max(1, int(EXAMPLES * share)),
        derandomize="JAXATTN_FUZZ" not in os.environ,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


# Valid calls.

LENGTHS = st.one_of(st.integers(0, 9), st.integers(0, 40))
DTYPE_PAIRS = [
    ("float32", None), ("bfloat16", None), ("float16", None), ("float8_e4m3fn", None),
    ("float32", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn"), ("float16", "float8_e5m2"),
]  # fmt: skip


def scales(sign: bool = False) -> st.SearchStrategy:
    """Not given, a number of any kind, or a 0-d array. Scores stay small: what float32 rounds off
    a large score, the softmax multiplies."""
    numbers = st.sampled_from([-0.5, 0.0, 0.01, 0.25, 0.7] if sign else [0.25, 0.5, 1.0, 1.7])
    ints = st.sampled_from([0, 1, np.int64(1)] if sign else [1, 2, np.int64(2)])
    kinds = [float, np.float32, np.float64, lambda x: np.array(x, np.float32)]
    arrays = st.builds(lambda x, d: np.array(x, DTYPES[d]), numbers,
                       st.sampled_from(["float32", "float16", "bfloat16"]))  # fmt: skip
    typed = st.builds(lambda x, kind: kind(x), numbers, st.sampled_from(kinds))
    return st.none() | typed | ints | arrays


@st.composite
def options(draw, phase: str) -> dict[str, Any]:
    """The keyword arguments that do not depend on shapes."""
    drawn: dict[str, Any] = dict(
        sm_scale=draw(scales(sign=True)),
        q_scale=draw(scales()),
        k_scale=draw(scales()),
        v_scale=draw(scales()),
        soft_cap=draw(st.sampled_from([None, None, 1, 0.5, 4.0, np.float32(30)])),
        window_left=draw(st.sampled_from([-1, -1, 0, 1, 3, 8, np.int64(5), 2**31 - 1])),
        batch_invariant=draw(st.booleans()),
        return_lse=draw(st.booleans()),
        backend=draw(st.sampled_from(["auto", "reference"])),
    )
    if phase == "prefill":
        drawn["causal"] = draw(st.booleans())
    return {name: value for name, value in drawn.items() if value is not None}


@st.composite
def cases(draw) -> Case:
    """A valid decode or prefill call."""
    dtype, kv_dtype = draw(st.sampled_from(DTYPE_PAIRS))
    lengths = tuple(draw(st.lists(LENGTHS, max_size=4)))
    prefill = draw(st.booleans())
    counts = st.tuples(*[st.integers(0, 5)] * len(lengths))
    heads = draw(st.integers(1, 3))
    given = dict(
        name="fuzz",
        seq_lens=lengths,
        num_kv_heads=heads,
        num_qo_heads=heads * draw(st.sampled_from([1, 1, 2, 3, 7])),
        head_dim=draw(st.sampled_from([1, 2, 5, 8, 16, 24])),
        page_size=draw(st.sampled_from([1, 2, 3, 5, 8, 16])),
        dtype=dtype,
        kv_dtype=kv_dtype,
        kv_layout=draw(st.sampled_from(["NHD", "HND"])),
        sinks=draw(st.booleans()),
        extra_pages=draw(st.integers(0, 2)),
        options=draw(options("prefill" if prefill else "decode")),
    )
    if prefill:
        return Case(**given, q_lens=draw(counts), extra_rows=draw(st.integers(0, 3)))
    q_len = draw(st.sampled_from([1, 1, 2, 3, 5, 18]))
    mask = draw(st.sampled_from([None, None, "bool", "packed"]))
    return Case(**given, q_len=q_len, draft_mask=mask)


def strided(array: np.ndarray) -> torch.Tensor:
    """The array as every second row of a larger tensor."""
    tensor = inputs.to_torch(array)
    return torch.stack([tensor, tensor])[0] if tensor.ndim == 0 else (
        torch.stack([tensor, tensor], tensor.ndim)[..., 0])  # fmt: skip


def filled_out(case: Case, arguments: dict[str, Any]) -> Any:
    """Result tensors that hold FILLING."""
    query = arguments["query"]
    dtype = torch.bfloat16 if case.dtype in FP8 else getattr(torch, case.dtype)
    out = torch.full(query.shape, FILLING, dtype=dtype)
    if not arguments["return_lse"]:
        return out
    return out, torch.full(query.shape[:2], FILLING)


def as_tuple(results: Any) -> tuple:
    return results if isinstance(results, tuple) else (results,)


# Found once: float32 sums in one order are near the exact ones by chance, here and in FEW below.
ONE_ELEMENT = Case("fuzz", (1, 8), q_lens=(0, 1), num_qo_heads=1, num_kv_heads=1, head_dim=1,
                   kv_dtype=FP8[0], extra_pages=2, extra_rows=1,
                   options=dict(soft_cap=4.0, causal=False))  # fmt: skip


@fuzz(0.36)
@example(case=ONE_ELEMENT, seed=6259, with_out=False, views=False)
@given(case=cases(), seed=st.integers(0, 2**16), with_out=st.booleans(), views=st.booleans())
def test_torch_attention_equals_oracle(case, seed, with_out, views):
    """A valid call is answered, into `out` where that is given."""
    arguments = case.make(seed)
    convert = strided if views else inputs.to_torch
    tensors = {k: convert(v) if isinstance(v, np.ndarray) and v.ndim else inputs.to_torch(v)
               for k, v in arguments.items()}  # fmt: skip
    out = filled_out(case, arguments) if with_out else None
    results = as_tuple(getattr(torch_core, case.phase)(**tensors, out=out))
    if with_out:
        assert all(result is target for result, target in zip(results, as_tuple(out), strict=True))
    compare.check_attention(arguments, *map(inputs.to_numpy, results))


# Invalid calls: each mutation takes valid arguments and makes them wrong, whatever they were.

Mutation = Callable[[dict[str, Any], np.random.Generator], dict[str, Any]]


def set_to(name: str, value: Any) -> Mutation:
    return lambda arguments, rng: {name: value}


def cast(name: str, dtype: str) -> Mutation:
    return lambda arguments, rng: {name: np.zeros(arguments[name].shape, DTYPES.get(dtype, dtype))}


def add_axis(name: str) -> Mutation:
    return lambda arguments, rng: {name: np.expand_dims(arguments[name], rng.integers(0, 2))}


def drop_axis(name: str) -> Mutation:
    return lambda arguments, rng: {name: np.zeros(arguments[name].shape[1:], arguments[name].dtype)}


def grow(name: str, axis: int) -> Mutation:
    """One entry more on an axis that another argument fixes."""

    def mutate(arguments, rng):
        shape = list(arguments[name].shape)
        shape[axis] += 1
        return {name: np.zeros(shape, arguments[name].dtype)}

    return mutate


def overwrite(name: str, index: tuple[int, ...], value: int) -> Mutation:
    def mutate(arguments, rng):
        array = arguments[name].copy()
        array[index] = value
        return {name: array}

    return mutate


def scale_mutations(names: list[str]) -> dict[str, tuple[Mutation, bool]]:
    """Values and types that no scale may have."""
    wrong = dict(nan=float("nan"), inf=float("inf"), text="1", boolean=True, complex=1j,
                 integers=np.ones((), "i4"), vector=np.ones(1, np.float32),
                 fp8=np.ones((), DTYPES[FP8[0]]))  # fmt: skip
    positive = dict(zero=0.0, zero_int=0, negative=-1.0)
    found = {}
    for name in names:
        values = wrong if name == "sm_scale" else wrong | positive
        found |= {
            f"{name}={label}": (set_to(name, value), False) for label, value in values.items()
        }
    return found


def array_mutations(arguments: dict[str, Any]) -> dict[str, tuple[Mutation, bool]]:
    """Kind, dtype and rank of each array."""
    found = {}
    for name, array in arguments.items():
        if not isinstance(array, np.ndarray) or not array.ndim:
            continue
        bad = "int64" if array.dtype.kind == "i" else "int8"
        found |= {
            f"{name}:dtype": (cast(name, bad), False),
            f"{name}:float64": (cast(name, "float64"), False),
            f"{name}:more_axes": (add_axis(name), False),
            f"{name}:fewer_axes": (drop_axis(name), False),
            f"{name}:list": (set_to(name, [[0]]), False),
            f"{name}:text": (set_to(name, "array"), False),
        }
    for name in ("query", "key_cache", "value_cache", "page_table", "seq_lens", "cu_seqlens_q",
                 "key", "value"):  # fmt: skip
        if name in arguments:
            found[f"{name}:none"] = (set_to(name, None), False)
    return found


def attention_mutations(case: Case, arguments: dict[str, Any]) -> dict[str, tuple[Mutation, bool]]:
    """Name -> (mutation, whether an array's values decide it)."""
    decode = case.phase == "decode"
    batch, pages_per_seq = arguments["page_table"].shape
    num_pages = len(arguments["key_cache"])
    rows = len(arguments["query"])
    found = array_mutations(arguments)
    found |= scale_mutations(["sm_scale", "q_scale", "k_scale", "v_scale"])
    sizes = [("query", 2), ("key_cache", 0), ("value_cache", 0), ("key_cache", 1),
             ("value_cache", 2), ("key_cache", 3), ("seq_lens", 0)]  # fmt: skip
    sizes += [("sinks", 0)] * case.sinks
    sizes += [("query", 0)] * decode + [("cu_seqlens_q", 0)] * (not decode)
    sizes += [("draft_mask", axis) for axis in range(3 * (case.draft_mask is not None))]
    sizes += [("query", 1)] * (case.num_kv_heads > 1)
    found |= {f"{name}:axis{axis}": (grow(name, axis), False) for name, axis in sizes}
    values: dict[str, list] = dict(
        window_left=[-2, 2**31, 1.0, None, True, "1"],
        soft_cap=[0, 0.0, -1.0, float("nan"), float("inf"), "1", True],
        kv_layout=["nhd", "NDH", None, 0],
        backend=["xla", "", None, 1],
        return_lse=[1, None, "yes"],
        batch_invariant=[0, None, np.array(True)],
    )  # fmt: skip
    if decode:
        values |= dict(q_len=[0, -1, 1.0, None, True, *[case.q_len + 1] * (batch > 0)])
        gpu = ["xqa", "native_decode", "trtllm_gen", "fmha_v2", "native_prefill_fa2"]
    else:
        values |= dict(max_seqlen_q=[-1, 2.0, None, True], causal=[1, None], plan=[0, {}, "plan"])
        gpu = ["fmha_v2", "native_prefill_fa2", "native_prefill_fa3", "trtllm_gen", "xqa"]
    values["backend"] += gpu
    found |= {f"{name}={value!r}": (set_to(name, value), False)
              for name, options in values.items() for value in options}  # fmt: skip
    return found | value_mutations(case, arguments, batch, pages_per_seq, num_pages, rows)


def value_mutations(case, arguments, batch, pages_per_seq, num_pages, rows):
    """What only the values of the arrays show."""
    found = {}
    capacity = pages_per_seq * case.page_size
    for request in range(batch):
        for value in (-1, capacity + 1, 2**31 - 1, -(2**31)):
            found[f"seq_lens[{request}]={value}"] = (overwrite("seq_lens", (request,), value), True)
        last = -(-case.seq_lens[request] // case.page_size) - 1
        for value in (-1, num_pages, 2**31 - 1):
            if last >= 0:
                change = overwrite("page_table", (request, last), value)
                found[f"page_table[{request}]={value}"] = (change, True)
    if case.phase == "prefill":
        name = "cu_seqlens_q"
        found[f"{name}[0]"] = (overwrite(name, (0,), 1), True)
        found[f"{name}[-1]"] = (overwrite(name, (batch,), rows + 1), True)
        if batch:
            found[f"{name}[-1]<0"] = (overwrite(name, (batch,), -1), True)
        if batch > 1:
            found[f"{name}[1]"] = (overwrite(name, (1,), rows + 1), True)
        if max(case.q_lens, default=0) > 0:
            found["max_seqlen_q:short"] = (set_to("max_seqlen_q", max(case.q_lens) - 1), True)
    return found


@fuzz(0.30)
@given(case=cases(), seed=st.integers(0, 2**16), data=st.data())
def test_torch_attention_refuses(case, seed, data):
    """A mutated call raises, and the result tensors keep what they held."""
    arguments = case.make(seed)
    out = filled_out(case, arguments)
    mutations = attention_mutations(case, arguments)
    mutate, _ = mutations[data.draw(st.sampled_from(sorted(mutations)))]
    arguments |= mutate(arguments, np.random.default_rng(seed))
    tensors = {name: inputs.to_torch(value) for name, value in arguments.items()}
    with pytest.raises(REFUSALS) as error:
        getattr(torch_core, case.phase)(**tensors, out=out)
    assert type(error.value) in REFUSALS
    assert all((target == FILLING).all() for target in as_tuple(out))


def wrong_outs(case: Case, arguments: dict[str, Any]) -> dict[str, Any]:
    """Result tensors that do not fit the call."""
    good = as_tuple(filled_out(case, arguments))
    first, rest = good[0], good[1:]
    other = torch.float16 if first.dtype != torch.float16 else torch.float32
    wrong = [(first.to(other), *rest), (first.unsqueeze(0), *rest), (first[..., :-1], *rest),
             (torch.cat([first, first[:1]]) if len(first) else first.new_zeros(1, 1, 1), *rest),
             (inputs.to_numpy(first), *rest), (first, *rest, first)]  # fmt: skip
    if rest:
        lse = rest[0]
        wrong += [(first,), (first, lse.double()), (first, lse[..., :-1]), (first, None)]
    return {str(i): outs if len(outs) > 1 else outs[0] for i, outs in enumerate(wrong)}


@fuzz(0.04)
@given(case=cases(), seed=st.integers(0, 2**16), data=st.data())
def test_torch_attention_refuses_out(case, seed, data):
    """A result tensor of another shape, dtype, kind or number is refused unwritten."""
    arguments = case.make(seed)
    outs = wrong_outs(case, arguments)
    out = outs[data.draw(st.sampled_from(sorted(outs)))]
    before = [t.clone() for t in as_tuple(out) if isinstance(t, torch.Tensor)]
    tensors = {name: inputs.to_torch(value) for name, value in arguments.items()}
    with pytest.raises((ValueError, TypeError), match=r"^out"):
        getattr(torch_core, case.phase)(**tensors, out=out)
    after = [t for t in as_tuple(out) if isinstance(t, torch.Tensor)]
    assert all(map(torch.equal, before, after))


# append_kv and merge_states.


@st.composite
def appends(draw) -> kv_model.Append:
    """A valid append_kv call."""
    addressing = draw(st.sampled_from(["request_ids", "slots", "rows"]))
    batch, page_size = draw(st.integers(0, 3)), draw(st.sampled_from([1, 2, 3, 8]))
    pages_per_seq = draw(st.integers(1, 3))
    room = batch if addressing == "rows" else batch * page_size * pages_per_seq
    given = {name: draw(scales()) for name in ("k_scale", "v_scale")}
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    return kv_model.Append(
        "fuzz",
        tokens=draw(st.integers(0, min(room, 9))),
        batch=batch,
        addressing=addressing,
        skips=draw(st.booleans()),
        dtype=dtype,
        kv_dtype=draw(st.sampled_from([None, *FP8])),
        kv_layout=draw(st.sampled_from(["NHD", "HND"])),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([1, 3, 8])),
        page_size=page_size,
        pages_per_seq=pages_per_seq,
        size=draw(st.sampled_from([1.0, 300.0])),
        options={name: value for name, value in given.items() if value is not None},
    )


def cast_rows(dtype: str) -> Mutation:
    return lambda arguments, rng: {
        name: arguments[name].astype(DTYPES[dtype]) for name in ("key", "value")
    }


def append_mutations(call: kv_model.Append, arguments: dict[str, Any]):
    """Name -> (mutation, whether an array's values decide it)."""
    found = array_mutations(arguments) | scale_mutations(["k_scale", "v_scale"])
    by_slot = call.addressing == "slots"
    place = "slots" if by_slot else "positions"
    sizes = [("key_cache", 0), ("key_cache", 3), ("value_cache", 1), ("key", 1), ("value", 2),
             ("value", 0), (place, 0)]  # fmt: skip
    found |= {f"{name}:axis{axis}": (grow(name, axis), False) for name, axis in sizes}
    found |= {f"kv_layout={v!r}": (set_to("kv_layout", v), False) for v in ("nhd", None, 1)}
    found[f"{place}:missing"] = (set_to(place, None), False)
    more = "positions" if by_slot else "slots"
    found[f"{more}:too"] = (set_to(more, np.zeros(call.tokens, np.int32)), False)
    if call.addressing != "rows" and not by_slot and call.tokens > call.batch:
        found["request_ids:missing"] = (set_to("request_ids", None), False)
    if call.kv_dtype is None:
        other = "float16" if call.dtype != "float16" else "float32"
        found["key:other_dtype"] = (cast_rows(other), False)
    return found | place_mutations(call, arguments)


def place_mutations(call, arguments):
    """What only the values of the arrays show."""
    found = {}
    num_pages = len(arguments["key_cache"])
    place = "slots" if call.addressing == "slots" else "positions"
    limit = num_pages if place == "slots" else call.pages_per_seq
    for row in range(call.tokens):
        for value in (limit * call.page_size, 2**31 - 1):
            found[f"{place}[{row}]={value}"] = (overwrite(place, (row,), value), True)
        if place == "slots" or arguments[place][row] < 0:
            continue
        request = row
        if call.addressing == "request_ids":
            request = int(arguments["request_ids"][row])
            for value in (-1, call.batch, 2**31 - 1):
                found[f"request_ids[{row}]={value}"] = (
                    overwrite("request_ids", (row,), value), True)  # fmt: skip
        where = (request, int(arguments[place][row]) // call.page_size)
        for value in (-1, num_pages):
            found[f"page_table[{row}]={value}"] = (overwrite("page_table", where, value), True)
    if call.addressing == "request_ids":
        # A skipped row's request may be anything, so a place out of range must not be hidden.
        found = {n: f for n, f in found.items() if not n.startswith("positions") or
                 arguments["positions"][int(n.split("[")[1].split("]")[0])] >= 0}  # fmt: skip
    return found


@fuzz(0.08)
@given(call=appends(), seed=st.integers(0, 2**16))
def test_torch_append_equals_loop(call, seed):
    """A valid call writes every bit as the loop does."""
    arguments = call.make(seed)
    results = inputs.run_torch(torch_core.append_kv, arguments)
    for result, expected in zip(results, kv_model.append(arguments), strict=True):
        assert kv_model.same_bits(result, expected)


@fuzz(0.08)
@given(call=appends(), seed=st.integers(0, 2**16), data=st.data())
def test_torch_append_refuses(call, seed, data):
    """A mutated call raises, and both caches keep every bit."""
    arguments = call.make(seed)
    mutations = append_mutations(call, arguments)
    mutate, _ = mutations[data.draw(st.sampled_from(sorted(mutations)))]
    arguments |= mutate(arguments, np.random.default_rng(seed))
    tensors = {name: inputs.to_torch(value) for name, value in arguments.items()}
    with pytest.raises(REFUSALS):
        torch_core.append_kv(**tensors)
    for name in ("key_cache", "value_cache"):
        if isinstance(arguments[name], np.ndarray):
            assert kv_model.same_bits(inputs.to_numpy(tensors[name]), arguments[name])


STATES = st.builds(
    split.random_states,
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    rows=st.integers(0, 6),
    heads=st.integers(0, 3),
    seed=st.integers(0, 2**16),
)


@fuzz(0.02)
@given(arguments=STATES)
def test_torch_merge_equals_loop(arguments):
    """A valid call joins the states."""
    split.check_merge(arguments, *inputs.run_torch(torch_core.merge_states, arguments))


def merge_mutations(arguments):
    found = array_mutations(arguments)
    sizes = [("out_a", 0), ("lse_a", 1), ("out_b", 2), ("out_b", 1), ("lse_b", 0)]
    found |= {f"{name}:axis{axis}": (grow(name, axis), False) for name, axis in sizes}
    other = "float16" if arguments["out_a"].dtype != np.float16 else "float32"
    return found | {"out_b:other": (cast("out_b", other), False)}


@fuzz(0.02)
@given(arguments=STATES, data=st.data())
def test_torch_merge_refuses(arguments, data):
    """A mutated call raises and writes nothing to `out`."""
    dtype = getattr(torch, str(arguments["out_a"].dtype))
    out = tuple(torch.full(arguments[name].shape, FILLING, dtype=of)
                for name, of in (("out_a", dtype), ("lse_a", torch.float32)))  # fmt: skip
    mutations = merge_mutations(arguments)
    mutate, _ = mutations[data.draw(st.sampled_from(sorted(mutations)))]
    mutated = arguments | mutate(arguments, np.random.default_rng(0))
    with pytest.raises((ValueError, TypeError)):
        inputs.run_torch(torch_core.merge_states, mutated, out=out)
    assert all((target == FILLING).all() for target in out)


# jaxattn, where a new shape compiles: a pool of shapes, and everything else drawn.

POOL = [
    Case("decode", (24, 17, 9)),
    Case("decode_all", (24, 40), kv_layout="HND", dtype="bfloat16", kv_dtype=FP8[0], q_len=3,
         draft_mask="bool", sinks=True, options=dict(window_left=9, soft_cap=3.0)),
    Case("decode_packed", (12, 20, 3), q_len=18, draft_mask="packed", num_qo_heads=3,
         num_kv_heads=1, page_size=5),
    Case("decode_e4m3", (16, 8), dtype=FP8[0], num_qo_heads=7, num_kv_heads=1),
    Case("decode_e5m2", (16, 8), dtype="float16", kv_dtype=FP8[1], sinks=True),
    Case("prefill", (24, 17, 9), q_lens=(4, 3, 2)),
    Case("prefill_all", (24, 17), q_lens=(4, 5), extra_rows=2, kv_layout="HND", sinks=True,
         dtype="bfloat16", kv_dtype=FP8[0], options=dict(window_left=5, soft_cap=2.0)),
    Case("prefill_non_causal", (9, 30), q_lens=(3, 3), page_size=3, options=dict(causal=False)),
    Case("prefill_e4m3", (9, 30), q_lens=(3, 3), dtype=FP8[0]),
]  # fmt: skip


@st.composite
def pooled(draw) -> tuple[Case, int, dict[str, Any]]:
    """A case of the pool, a seed, and drawn lengths, query lengths and scales."""
    case = draw(st.sampled_from(POOL))
    changes: dict[str, Any] = dict(seq_lens=[draw(st.integers(0, most)) for most in case.seq_lens])
    if case.q_lens is not None:
        changes["q_lens"] = [draw(st.integers(0, most)) for most in case.q_lens]
    for name in ("sm_scale", "q_scale", "k_scale", "v_scale"):
        scale = draw(scales(sign=name == "sm_scale"))
        changes |= {} if scale is None else {name: scale}
    return case, draw(st.integers(0, 2**16)), changes


def make_pooled(case: Case, seed: int, changes: dict[str, Any]) -> tuple[Case, dict[str, Any]]:
    """The arrays of a drawn call: the pool's shapes, its own lengths."""
    changes = dict(changes)
    arguments = case.make(seed) | dict(return_lse=True)
    arguments["seq_lens"] = np.array(changes["seq_lens"], np.int32)
    fields = dict(seq_lens=tuple(changes.pop("seq_lens")))
    if "q_lens" in changes:
        fields["q_lens"] = tuple(changes.pop("q_lens"))
        arguments["cu_seqlens_q"] = np.cumsum([0, *fields["q_lens"]]).astype(np.int32)
    return dataclasses.replace(case, **fields), arguments | changes


def jax_arrays(arguments: dict[str, Any]) -> dict[str, Any]:
    """JAX arrays; NumPy's own where JAX would cut 64 bits."""
    return {
        name: inputs.to_jax(value)
        if isinstance(value, np.ndarray) and value.dtype.itemsize < 8
        else value
        for name, value in arguments.items()
    }


FEW = [
    (POOL[5], 23, dict(seq_lens=[16, 0, 0], q_lens=[1, 0, 0], sm_scale=0.7)),
    (POOL[2], 10, dict(seq_lens=[12, 0, 0], sm_scale=1, k_scale=2)),
]


@fuzz(0.05)
@example(FEW[0])
@example(FEW[1])
@given(pooled())
def test_jax_attention_equals_oracle(drawn):
    """A valid call is answered."""
    case, arguments = make_pooled(*drawn)
    results = getattr(jaxattn, case.phase)(**jax_arrays(arguments))
    compare.check_attention(arguments, *map(np.asarray, results))


@fuzz(0.03)
@given(pooled(), st.data())
def test_jax_attention_refuses(drawn, data):
    """A mutated call raises while tracing, or at run time where array values decide."""
    case, arguments = make_pooled(*drawn)
    mutations = attention_mutations(case, arguments)
    if case.q_lens is not None:
        # The bound is static: a new one compiles anew.
        mutations.pop("max_seqlen_q:short", None)
    mutate, at_run_time = mutations[data.draw(st.sampled_from(sorted(mutations)))]
    arguments |= mutate(arguments, np.random.default_rng(0))
    function = functools.partial(getattr(jaxattn, case.phase), **jax_arrays(arguments))
    if at_run_time:
        with pytest.raises(errors.AT_RUN_TIME, match=r"^INTERNAL: .* must (be|rise) "):
            jax.block_until_ready(function())
    else:
        with pytest.raises(REFUSALS):
            jax.eval_shape(function)


APPENDS = [
    kv_model.Append("slots", addressing="slots", skips=True),
    kv_model.Append("ids", dtype="bfloat16", kv_dtype=FP8[0], skips=True, kv_layout="HND"),
    kv_model.Append("rows", addressing="rows", tokens=2, kv_dtype=FP8[1]),
]


@fuzz(0.01)
@given(st.sampled_from(APPENDS), st.integers(0, 2**16), scales())
def test_jax_append_equals_loop(call, seed, k_scale):
    """A valid call gives the loop's bits and leaves the arrays as they were."""
    arguments = call.make(seed) | ({} if k_scale is None else dict(k_scale=k_scale))
    arrays = jax_arrays(arguments)
    results = jaxattn.append_kv(**arrays)
    expected = kv_model.append(arguments | dict(v_scale=1.0, k_scale=arguments.get("k_scale", 1.0)))
    for name, result, cache in zip(("key_cache", "value_cache"), results, expected, strict=True):
        assert kv_model.same_bits(np.asarray(result), cache)
        assert kv_model.same_bits(np.asarray(arrays[name]), arguments[name])


@fuzz(0.01)
@given(st.sampled_from(APPENDS), st.integers(0, 2**16), st.data())
def test_jax_append_refuses(call, seed, data):
    """A mutated call raises, and the arrays keep every bit."""
    arguments = call.make(seed)
    mutations = append_mutations(call, arguments)
    mutate, at_run_time = mutations[data.draw(st.sampled_from(sorted(mutations)))]
    arguments |= mutate(arguments, np.random.default_rng(seed))
    arrays = jax_arrays(arguments)
    expected = errors.AT_RUN_TIME if at_run_time else REFUSALS
    with pytest.raises(expected, match=r"^\w+ must be " if at_run_time else None):
        jax.block_until_ready(jaxattn.append_kv(**arrays))
    for name in ("key_cache", "value_cache"):
        if isinstance(arrays[name], jax.Array):
            assert kv_model.same_bits(np.asarray(arrays[name]), arguments[name])
