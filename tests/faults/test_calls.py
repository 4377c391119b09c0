"""Faults (a), R9 to R12: numbers, memory, lifetimes and donation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import torch

import jaxattn
import torch_core
from tests import compare, faults, inputs
from tests.faults.interop import CACHE_NAMES, append_arguments, fronts, phases
from tests.inputs import Case


def scale_forms(value):
    return [
        value,
        np.float16(value),
        np.float32(value),
        np.float64(value),
        np.array(value, np.float32),
        jnp.float32(value),
        jnp.bfloat16(value),
        jnp.array(value, jnp.float16),
        int(value),
        np.int64(value),
    ]


@phases
@pytest.mark.parametrize("name", ["sm_scale", "q_scale", "k_scale", "v_scale", "soft_cap"])
def test_r9_numbers_of_any_kind_are_the_same_number(case, name):
    """A scale of 2 in each spelling gives the same bits in both packages."""
    arguments = case.make()
    arrays, static = faults.jax_arrays(arguments)
    tensors = {key: inputs.to_torch(value) for key, value in arguments.items()}
    expected = getattr(jaxattn, case.phase)(**arrays, **static, **{name: 2.0})
    torch_expected = getattr(torch_core, case.phase)(**tensors, **{name: 2.0})
    for scale in scale_forms(2.0):
        if isinstance(scale, jax.Array):
            if name == "soft_cap":
                with pytest.raises(TypeError, match=r"soft_cap must be a Python number or None"):
                    getattr(jaxattn, case.phase)(**arrays, **static, **{name: scale})
                continue
        else:
            result = getattr(torch_core, case.phase)(**tensors, **{name: scale})
            assert torch.equal(result, torch_expected), repr(scale)
        result = getattr(jaxattn, case.phase)(**arrays, **static, **{name: scale})
        assert faults.same_bits(np.asarray(result), np.asarray(expected)), repr(scale)
    compare.check_attention(arguments | {name: 2.0}, np.asarray(expected))
    if name != "soft_cap":
        traced = jax.jit(
            lambda scale: getattr(jaxattn, case.phase)(**arrays, **static, **{name: scale})
        )
        for scale in (2.0, jnp.float32(2), jnp.bfloat16(2)):
            assert faults.same_bits(np.asarray(traced(scale)), np.asarray(expected))
        tensor = torch.tensor(2.0)
        result = getattr(torch_core, case.phase)(**tensors, **{name: tensor})
        assert torch.equal(result, torch_expected)


@phases
@fronts
def test_r9_bad_numbers_are_errors_from_python(front, case):
    """Wrong kinds are TypeErrors, wrong values ValueErrors, each naming its argument."""
    arguments = case.make()
    for name in ("sm_scale", "q_scale", "k_scale", "v_scale"):
        for wrong in (True, "2", 2 + 0j, [2.0], (1, 2)):
            with pytest.raises(TypeError, match=rf"{name} must be a number or a 0-d float array"):
                call_eagerly(front, arguments, **{name: wrong})
        for value in (np.array([2.0]), np.array([[2.0]], np.float32)):
            with pytest.raises(ValueError, match=rf"{name} must be a number or a 0-d array"):
                call_eagerly(front, arguments, **{name: value})
        for value in (float("nan"), float("inf")):
            with pytest.raises(ValueError, match=rf"{name} must be a .*finite float32 number"):
                call_eagerly(front, arguments, **{name: value})
    for name in ("q_scale", "k_scale", "v_scale", "soft_cap"):
        for value in (0, -1.0):
            with pytest.raises(
                ValueError, match=rf"{name} must be a positive finite float32 number"
            ):
                call_eagerly(front, arguments, **{name: value})
    for wrong in (None, 3.0, "3", True):
        with pytest.raises(TypeError, match=r"window_left must be a Python int"):
            call_eagerly(front, arguments, window_left=wrong)
    for wrong in (-2, 2**31, 2**40):
        with pytest.raises(ValueError, match=r"window_left must be in \[-1, 2147483647\]"):
            call_eagerly(front, arguments, window_left=wrong)
    for typo in ("window_lft", "softcap", "scale"):
        with pytest.raises(TypeError, match=rf"unexpected keyword argument '{typo}'"):
            call_eagerly(front, arguments, **{typo: 1})


def call_eagerly(front, arguments, **more):
    if front == "torch":
        tensors = {name: inputs.to_torch(value) for name, value in arguments.items()}
        return getattr(torch_core, faults.phase_of(arguments))(**tensors, **more)
    arrays, static = faults.jax_arrays(arguments)
    return getattr(jaxattn, faults.phase_of(arguments))(**arrays, **static, **more)


@phases
@fronts
def test_r9_window_left_of_any_integer_kind(front, case):
    """-1 is no window; NumPy integers are integers; a traced window is a TypeError."""
    arguments = case.make()
    expected = np.asarray(call_eagerly(front, arguments, window_left=3))
    for window in (np.int64(3), np.int8(3), np.array(3)):
        assert faults.same_bits(
            np.asarray(call_eagerly(front, arguments, window_left=window)), expected
        )
    off = np.asarray(call_eagerly(front, arguments, window_left=-1))
    assert faults.same_bits(np.asarray(call_eagerly(front, arguments)), off)
    assert not faults.same_bits(off, expected)
    if front == "jax":
        with pytest.raises(TypeError, match=r"window_left must be a Python int known before"):
            jax.jit(lambda w: call_eagerly("jax", arguments, window_left=w))(3)


def test_r10_targets_have_no_attributes():
    """The lowered text of a call carries an empty backend_config; append_kv needs no call."""
    decode = Case("d", (9,), sinks=True, q_len=2, draft_mask="packed", options=dict(soft_cap=2.0))
    for name, arguments in (
        ("decode", decode.make() | dict(k_scale=0.5, window_left=3)),
        ("prefill", Case("p", (9,), q_lens=(3,)).make() | dict(sm_scale=0.5)),
        ("append_kv", append_arguments() | dict(k_scale=0.5)),
    ):
        arrays, static = faults.jax_arrays(arguments)
        static |= dict(return_lse=True) if name != "append_kv" else {}
        function = getattr(jaxattn, name)
        text = jax.jit(lambda arrays: function(**arrays, **static)).lower(arrays).as_text()  # noqa: B023
        calls = [line for line in text.splitlines() if "custom_call @" in line]
        assert len(calls) == (name != "append_kv")
        for line in calls:
            assert 'backend_config = ""' in line and "mhlo.backend_config = {}" in line


TINY = dict(num_qo_heads=1, num_kv_heads=1, head_dim=4, page_size=4)


def resident():
    return psutil.Process().memory_info().rss


def test_r10_memory_stays_flat_over_100_000_calls():
    """Calls inside compiled loops leave less than one scalar attribute's leak behind."""
    arrays, static = faults.jax_arrays(Case("r10", (3,), **TINY).make())
    prefill = dict(cu_seqlens_q=jnp.array([0, 1], jnp.int32), max_seqlen_q=1)
    del static["q_len"]
    bodies = {
        "append": lambda i, state: jaxattn.append_kv(
            *[arrays["query"].astype(jnp.bfloat16)] * 2,
            *state,
            slots=jnp.where(i % 8 == 0, 1, -1)[None],
        ),
        "decode": lambda i, query: jaxattn.decode(
            **arrays | dict(query=query), **static, backend="reference"
        ),
        "prefill": lambda i, query: jaxattn.prefill(
            **arrays | dict(query=query), **static, **prefill
        ),
    }
    calls = {"append": 10_000, "decode": 80_000, "prefill": 10_000}
    loops = {}
    for name, body in bodies.items():
        loop = jax.jit(lambda state, n, body=body: jax.lax.fori_loop(0, n, body, state))
        state = (
            # bfloat16: the caches that cross the bridge.
            tuple(arrays[n].astype(jnp.bfloat16) for n in CACHE_NAMES)
            if name == "append"
            else arrays["query"]
        )
        jax.block_until_ready(loop(state, 1000))
        loops[name] = (loop, state)
    before = resident()
    for name, (loop, state) in loops.items():
        jax.block_until_ready(loop(state, calls[name]))
    assert resident() - before < 16 * sum(calls.values())


def test_r10_memory_stays_flat_over_dispatches():
    """Jitted calls dispatched one by one leave nothing behind either."""
    arrays, static = faults.jax_arrays(Case("r10", (3,), **TINY).make())
    static |= dict(backend="reference")
    call = jax.jit(lambda arrays, scale: jaxattn.decode(**arrays, **static, k_scale=scale))
    for _ in range(500):
        call(arrays, 1.0).block_until_ready()
    before = resident()
    for step in range(4000):
        call(arrays, 1.0 + step / 4000).block_until_ready()
    assert resident() - before < 2**20


@pytest.mark.parametrize("name", ["decode", "prefill", "append_kv"])
def test_r11_nothing_is_kept_between_calls(name):
    """Same shapes, new shapes, a failing call, then good ones: no leak error, no stale value."""

    def make(lengths, seed):
        if name == "append_kv":
            arguments = append_arguments()
            return arguments | dict(slots=np.roll(arguments["slots"], seed))
        rows = tuple(min(n, 3) for n in lengths)
        q_lens = rows if name == "prefill" else None
        return Case("r11", lengths, q_lens).make(seed)

    def check(arguments):
        arrays, static = faults.jax_arrays(arguments)
        if name == "decode":
            static |= dict(backend="reference")
        result = getattr(jaxattn, name)(**arrays, **static)
        if name == "append_kv":
            expected = faults.run("torch", name, arguments)
            assert faults.same_bits(tuple(map(np.asarray, result)), expected)
        else:
            compare.check_attention(arguments, np.asarray(result))

    for lengths, seed in (((9, 30), 0), ((9, 30), 1), ((4, 12), 2), ((5, 0, 17), 3)):
        check(make(lengths, seed))
    wrong = make((9, 30), 4)
    places = "slots" if name == "append_kv" else "seq_lens"
    wrong[places] = wrong[places] + 1000
    for _ in range(3):
        with pytest.raises(faults.RUNTIME_ERRORS["jax"], match=rf"{places} must be in"):
            arrays, static = faults.jax_arrays(wrong)
            jax.block_until_ready(getattr(jaxattn, name)(**arrays, **static))
        check(make((9, 30), 5))


def decode_of(caches, arguments):
    """jaxattn.decode over other caches."""
    arrays, static = faults.jax_arrays(arguments)
    return jaxattn.decode(**arrays | dict(zip(CACHE_NAMES, caches, strict=True)), **static)


def new_token(arguments):
    """Keyword arguments of an append_kv call that writes the last token of every request."""
    rng = np.random.default_rng(9)
    batch = len(arguments["seq_lens"])
    key, value = (jnp.array(rng.normal(size=(batch, 2, 16)), jnp.float32) for _ in range(2))
    positions = jnp.array(arguments["seq_lens"] - 1)
    return dict(
        key=key, value=value, page_table=jnp.array(arguments["page_table"]), positions=positions
    )


@pytest.mark.parametrize("donate", [False, True])
def test_r12_decode_sees_the_token_appended_in_the_same_jit(donate):
    """append_kv then decode in one jit equals the same steps apart; donation only moves memory."""
    arguments = Case("r12", (9, 30)).make()
    token = new_token(arguments)
    caches = [jnp.array(arguments[name]) for name in CACHE_NAMES]
    copies = [np.array(cache) for cache in caches]
    pointers = [cache.unsafe_buffer_pointer() for cache in caches]

    def step(caches, token):
        caches = jaxattn.append_kv(**token, **dict(zip(CACHE_NAMES, caches, strict=True)))
        return decode_of(caches, arguments), caches

    jitted = jax.jit(step, donate_argnums=0 if donate else ())
    shape = "f32[" + ",".join(map(str, caches[0].shape)) + "]"
    text = jitted.lower(caches, token).compile().as_text()
    copied = [line for line in text.splitlines() if re.search(r" copy(-start)?\(", line)]
    copied = [line for line in copied if f"= {shape}" in line]
    assert len(copied) == (0 if donate else 2)
    out, written = jitted(caches, token)
    assert [cache.is_deleted() for cache in caches] == [donate, donate]
    same_memory = [w.unsafe_buffer_pointer() == p for w, p in zip(written, pointers, strict=True)]
    assert same_memory == [donate, donate]
    if not donate:
        assert all(faults.same_bits(np.asarray(c), o) for c, o in zip(caches, copies, strict=True))
    after = arguments | dict(zip(CACHE_NAMES, map(np.asarray, written), strict=True))
    assert not faults.same_bits(after["key_cache"], copies[0])
    for request in range(2):
        page, offset = faults.token_places(after, request)
        for name, new in (("key_cache", token["key"]), ("value_cache", token["value"])):
            np.testing.assert_array_equal(after[name][page[-1], offset[-1]], new[request])
    compare.check_attention(after, np.asarray(out))


def test_r12_decode_before_append_reads_the_old_cache():
    """In one jit with donated caches, a decode before the append does not see the new token."""
    arguments = Case("r12", (9, 30)).make()
    token = new_token(arguments)

    def step(caches, token):
        old = decode_of(caches, arguments)
        written = jaxattn.append_kv(**token, **dict(zip(CACHE_NAMES, caches, strict=True)))
        return old, decode_of(written, arguments), written

    caches = [jnp.array(arguments[name]) for name in CACHE_NAMES]
    old, new, written = jax.jit(step, donate_argnums=0)(caches, token)
    compare.check_attention(arguments, np.asarray(old))
    after = arguments | dict(zip(CACHE_NAMES, map(np.asarray, written), strict=True))
    compare.check_attention(after, np.asarray(new))


def test_r12_one_array_as_both_caches():
    """Donating one array as both caches is an error; undonated it is copied, and torch refuses."""
    cache = jnp.zeros((4, 8, 2, 16))
    key = jnp.ones((1, 2, 16))
    slots = jnp.array([3], jnp.int32)

    def append(key_cache, value_cache):
        return jaxattn.append_kv(key, 2 * key, key_cache, value_cache, slots=slots)

    key_cache, value_cache = jax.jit(append)(cache, cache)
    assert key_cache[0, 3, 0, 0] == 1 and value_cache[0, 3, 0, 0] == 2
    assert not cache.any()
    donated = jnp.zeros((4, 8, 2, 16))
    with pytest.raises(faults.RUNTIME_ERRORS["jax"], match="donate the same buffer twice"):
        jax.jit(append, donate_argnums=(0, 1))(donated, donated)
    shared = torch.zeros(4, 8, 2, 16)
    with pytest.raises(ValueError, match="value_cache must not share its memory with key_cache"):
        torch_core.append_kv(
            torch.ones(1, 2, 16),
            torch.ones(1, 2, 16),
            shared,
            shared,
            slots=torch.tensor([3]).int(),
        )
    assert not shared.any()


def test_r12_an_unused_append_does_nothing():
    """XLA drops an append whose result is unused, and the caches keep their bits."""
    arguments = Case("r12", (9, 30)).make()
    token = new_token(arguments)
    caches = [jnp.array(arguments[name]) for name in CACHE_NAMES]

    def step(caches, token):
        jaxattn.append_kv(**token, **dict(zip(CACHE_NAMES, caches, strict=True)))
        return decode_of(caches, arguments)

    jitted = jax.jit(step)
    assert "append_kv" not in jitted.lower(caches, token).compile().as_text()
    compare.check_attention(arguments, np.asarray(jitted(caches, token)))
    for cache, name in zip(caches, CACHE_NAMES, strict=True):
        assert faults.same_bits(np.asarray(cache), arguments[name])
