"""Section (a): faults reported for the way between JAX and torch."""

import re
import threading

import jax
import jax.numpy as jnp
import jax_tvm_ffi
import numpy as np
import psutil
import pytest
import torch
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxattn
import torch_core
from jaxattn import _ffi, interop
from tests import compare, faults, inputs, oracle
from tests.inputs import Case

fronts = pytest.mark.parametrize("front", faults.FRONTS)
phases = pytest.mark.parametrize(
    "case",
    [Case("decode", (9, 30, 0, 4)), Case("prefill", (9, 30, 0, 4), q_lens=(3, 5, 0, 4))],
    ids=str,
)
E4M3 = "float8_e4m3fn"


def column_major(array):
    """The same array with reversed strides."""
    layout = Layout(tuple(range(array.ndim))[::-1])
    return jax.device_put(array, Format(layout, SingleDeviceSharding(jax.devices()[0])))


@pytest.mark.parametrize("array_layout", ["row", "column"])
def test_r5_the_bridge_reads_any_operand_layout(array_layout):
    """A (2, 3) float32 operand arrives unscrambled whatever its layout in XLA is."""
    x = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
    operand = column_major(x) if array_layout == "column" else x

    def call(x):
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return _ffi.call("tests.r5.copy", lambda a, out: out.copy_(a), [x], [result])[0]

    np.testing.assert_array_equal(jax.jit(call)(operand), x)
    np.testing.assert_array_equal(jax.jit(lambda x: call(x.T))(operand), x.T)
    np.testing.assert_array_equal(jax.jit(lambda x: call(x.T).T + 1)(operand), x + 1)


@phases
@pytest.mark.parametrize("kv_dtype", ["float32", E4M3])
def test_r5_jit_operands_of_any_layout(case, kv_dtype):
    """Column-major operands and operands made by transposes inside jit give the right result."""
    case = Case(case.name, case.seq_lens, case.q_lens, kv_dtype=kv_dtype)
    arguments = case.make()
    arrays, static = faults.jax_arrays(arguments)
    function = getattr(jaxattn, case.phase)
    columns = {name: column_major(array) for name, array in arrays.items()}
    result = jax.jit(lambda arrays: function(**arrays, **static, return_lse=True))(columns)
    compare.check_attention(arguments, *map(np.asarray, result))
    turned = jax.tree.map(lambda array: jnp.array(np.asarray(array).T), arrays)

    @jax.jit
    def transposed(turned):
        out, lse = function(**{k: v.T for k, v in turned.items()}, **static, return_lse=True)
        return out.T, lse.T

    out, lse = transposed(turned)
    compare.check_attention(arguments, np.asarray(out.T), np.asarray(lse.T))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_r5_append_to_caches_of_any_layout(kv_layout):
    """append_kv writes the same tokens into column-major caches."""
    arguments = append_arguments(kv_layout)
    arrays, static = faults.jax_arrays(arguments)
    expected = faults.run("torch", "append_kv", arguments)
    columns = {name: column_major(array) for name, array in arrays.items()}
    written = jax.jit(lambda arrays: jaxattn.append_kv(**arrays, **static))(columns)
    assert faults.same_bits(tuple(map(np.asarray, written)), expected)


def append_arguments(kv_layout="NHD"):
    """Six tokens for an append_kv call by slots, one of them skipped."""
    rng = np.random.default_rng(3)
    shape = (4, 8, 2, 16) if kv_layout == "NHD" else (4, 2, 8, 16)
    arguments = {
        name: inputs.normal(rng, (6, 2, 16), np.dtype("f4")) for name in ("key", "value")
    } | {name: inputs.normal(rng, shape, np.dtype("f4")) for name in ("key_cache", "value_cache")}
    slots = np.array([31, 0, -1, 9, 8, 7], np.int32)
    return arguments | dict(slots=slots, kv_layout=kv_layout)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", E4M3])
@phases
def test_r5_torch_views_of_the_cache(case, kv_dtype):
    """Strided caches, queries, tables and lengths give the bits of contiguous ones."""
    dtype = "float32" if kv_dtype == "float32" else "bfloat16"
    case = Case(case.name, case.seq_lens, case.q_lens, dtype=dtype, kv_dtype=kv_dtype)
    arguments = case.make()
    tensors = {name: inputs.to_torch(value) for name, value in arguments.items()}
    function = getattr(torch_core, case.phase)
    expected = function(**tensors)
    compare.check_attention(arguments, inputs.to_numpy(expected))
    key, value = tensors["key_cache"], tensors["value_cache"]
    pool = torch.stack([key, value], dim=1)
    by_token = torch.stack([key, value], dim=-2)
    wide = torch.stack([tensors["query"]] * 2, dim=-1)
    table = tensors["page_table"]
    views = [
        dict(key_cache=pool[:, 0], value_cache=pool[:, 1]),
        dict(key_cache=by_token[..., 0, :], value_cache=by_token[..., 1, :]),
        dict(key_cache=key.transpose(1, 2), value_cache=value.transpose(1, 2), kv_layout="HND"),
        dict(
            key_cache=pool[:, 0].transpose(1, 2),
            value_cache=pool[:, 1].transpose(1, 2),
            kv_layout="HND",
        ),
        dict(
            key_cache=key.transpose(1, 2).contiguous().transpose(1, 2),
            value_cache=value.transpose(0, 3).contiguous().transpose(0, 3),
        ),
        dict(query=wide[..., 1], page_table=table.T.contiguous().T),
        dict(seq_lens=torch.stack([tensors["seq_lens"]] * 2, dim=1)[:, 0]),
    ]
    for view in views:
        assert any(isinstance(v, torch.Tensor) and not v.is_contiguous() for v in view.values())
        assert torch.equal(function(**tensors | view), expected), list(view)


@pytest.mark.parametrize("kv_dtype", ["float32", E4M3])
def test_r5_torch_append_writes_through_views(kv_dtype):
    """append_kv into slices of a fused pool and into an HND view writes the pool itself."""
    arguments = append_arguments()
    tensors = {name: inputs.to_torch(value) for name, value in arguments.items()}
    for name in ("key_cache", "value_cache"):
        tensors[name] = tensors[name].to(getattr(torch, kv_dtype))
    originals = [tensors.pop(name).clone() for name in ("key_cache", "value_cache")]
    expected = [cache.clone() for cache in originals]
    torch_core.append_kv(**tensors, key_cache=expected[0], value_cache=expected[1])
    pool = torch.stack(originals, dim=1)
    torch_core.append_kv(**tensors, key_cache=pool[:, 0], value_cache=pool[:, 1])
    heads_first = [cache.clone() for cache in originals]
    views = [cache.transpose(1, 2) for cache in heads_first]
    tensors["kv_layout"] = "HND"
    torch_core.append_kv(**tensors, key_cache=views[0], value_cache=views[1])
    for index, cache in enumerate(expected):
        assert torch.equal(pool[:, index].float(), cache.float())
        assert torch.equal(heads_first[index].float(), cache.float())
        assert not torch.equal(cache.float(), originals[index].float())


@fronts
@pytest.mark.parametrize(
    "case",
    [
        Case("1358", (5,), num_qo_heads=3, num_kv_heads=3, head_dim=8, page_size=5, extra_pages=0),
        Case("head", (9,), num_qo_heads=1, num_kv_heads=1, head_dim=1, page_size=1, extra_pages=0),
        Case("page", (1,), q_lens=(1,), num_qo_heads=1, num_kv_heads=1, page_size=1, extra_pages=0),
    ],
    ids=str,
)
def test_r5_axes_of_size_1(front, case):
    """Caches of one page, one head, one token or one element a head are read right."""
    arguments = case.make()
    compare.check_attention(arguments, *faults.attend(front, arguments))
    if front == "torch":
        tensors = {name: inputs.to_torch(value) for name, value in arguments.items()}
        for name in ("key_cache", "value_cache"):
            cache = tensors[name]
            strides = [7 if n == 1 else s for n, s in zip(cache.shape, cache.stride(), strict=True)]
            tensors[name] = cache.as_strided(cache.shape, strides)
        result = getattr(torch_core, case.phase)(**tensors)
        compare.check_attention(arguments, inputs.to_numpy(result))


def test_r5_handing_over_strided_arrays():
    """to_jax refuses a strided tensor by name; to_torch of a column-major array is right."""
    cache = torch.arange(24.0).view(2, 3, 4)
    for view in (cache.transpose(1, 2), cache[:, 0], cache[..., ::2]):
        with pytest.raises(ValueError, match=r"tensor must be contiguous, got strides"):
            jaxattn.to_jax(view)
    odd = torch.empty_strided((1, 3, 5, 8), (7, 40, 8, 1)).normal_()
    np.testing.assert_array_equal(jaxattn.to_jax(odd), odd.numpy())
    x = jnp.arange(24.0).reshape(2, 3, 4)
    np.testing.assert_array_equal(jaxattn.to_torch(column_major(x)).numpy(), x)


@pytest.mark.parametrize("dtype", interop.DTYPES)
def test_r6_dtypes_cross_bit_exact_without_a_copy(dtype):
    """JAX to torch to JAX keeps every bit and the pointer."""
    size = jnp.dtype(dtype).itemsize
    bits = np.arange(256, dtype=np.uint8).repeat(size).reshape(16, 16, size)
    bits[..., 0] = bits[..., 0].T if size > 1 else bits[..., 0]
    values = (bits[..., 0] % 2).astype(bool) if dtype == "bool" else bits.view(jnp.dtype(dtype))
    array = jnp.array(values)
    tensor = jaxattn.to_torch(array)
    assert str(tensor.dtype) == f"torch.{dtype}"
    back = jaxattn.to_jax(tensor)
    assert faults.same_bits(np.asarray(back), values)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr() == back.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", ["int64", "float64", "complex64"])
def test_r6_handing_over_other_dtypes_is_a_type_error(dtype):
    """64-bit and complex tensors and arrays are refused with the list of dtypes."""
    with pytest.raises(TypeError, match=rf"tensor must be one of bfloat16, .*, got {dtype}"):
        jaxattn.to_jax(torch.zeros(3, dtype=getattr(torch, dtype)))
    with jax.enable_x64(True):
        array = jnp.zeros(3, dtype)
    with pytest.raises(TypeError, match=rf"array must be one of bfloat16, .*, got {dtype}"):
        jaxattn.to_torch(array)


@phases
@pytest.mark.parametrize("dtype", ["float64", "complex64", "int4", "uint4", "int8", "float8_e5m2"])
@pytest.mark.parametrize("name", ["query", "key_cache"])
def test_r6_other_dtypes_are_type_errors_while_tracing(case, name, dtype):
    """A dtype that no kernel takes is a TypeError naming the argument, before anything runs."""
    arrays, static = faults.jax_arrays(case.make())
    with jax.enable_x64(True):
        specs = {
            key: jax.ShapeDtypeStruct(array.shape, array.dtype) for key, array in arrays.items()
        }
        specs[name] = jax.ShapeDtypeStruct(arrays[name].shape, jnp.dtype(dtype))
        if (name, dtype) == ("key_cache", "float8_e5m2"):
            specs["value_cache"] = specs["key_cache"]
            jax.eval_shape(lambda specs: getattr(jaxattn, case.phase)(**specs, **static), specs)
            return
        with pytest.raises(TypeError, match=rf"(query|{name}).*{dtype}"):
            jax.eval_shape(lambda specs: getattr(jaxattn, case.phase)(**specs, **static), specs)


@pytest.mark.parametrize("q_len", [5, 17, 40])
@fronts
def test_r6_bool_and_packed_masks_agree(front, q_len):
    """A bool mask and its uint16 form give the same bits; other mask dtypes are TypeErrors."""
    arguments = Case("r6", (50, 70), q_len=q_len, draft_mask="bool").make()
    packed = oracle.pack(arguments["draft_mask"])
    assert packed.dtype == np.uint16
    result = faults.attend(front, arguments)
    compare.check_attention(arguments, *result)
    assert faults.same_bits(faults.attend(front, arguments, draft_mask=packed), result)
    for wrong in (packed.astype(np.uint32), arguments["draft_mask"].astype(np.uint8)):
        with pytest.raises(TypeError, match=r"draft_mask must be bool or uint16"):
            faults.attend(front, arguments, draft_mask=wrong)


INTEGER_ARGUMENTS = ("page_table", "seq_lens", "cu_seqlens_q")


@phases
@pytest.mark.parametrize("dtype", ["int64", "uint32", "int16", "float32"])
def test_r7_lengths_and_page_ids_are_int32(case, dtype):
    """Any other dtype is a TypeError naming the argument, with and without x64."""
    arguments = case.make()
    arrays, static = faults.jax_arrays(arguments)
    function = getattr(jaxattn, case.phase)
    for name in set(INTEGER_ARGUMENTS) & set(arguments):
        wrong = np.maximum(arguments[name], 0).astype(dtype)
        message = rf"{name} must be int32 \[.*, got {dtype}"
        with pytest.raises(TypeError, match=message):
            faults.attend("torch", arguments | {name: wrong})
        with pytest.raises(TypeError, match=message):
            function(**arrays | {name: wrong}, **static)
        with jax.enable_x64(True), pytest.raises(TypeError, match=message):
            jax.jit(lambda array, name=name: function(**arrays | {name: array}, **static))(wrong)


@pytest.mark.parametrize("name", ["slots", "positions", "request_ids", "page_table"])
def test_r7_append_places_are_int32(name):
    """The same for append_kv."""
    arguments = append_arguments()
    if name != "slots":
        del arguments["slots"]
        arguments |= dict(
            page_table=np.array([[2, 1], [3, 0]], np.int32),
            positions=np.array([0, 1, 2, 8, 9, 3], np.int32),
            request_ids=np.array([0, 0, 0, 1, 1, 1], np.int32),
        )
    expected = faults.run("torch", "append_kv", arguments)
    assert faults.same_bits(faults.run("jax", "append_kv", arguments), expected)
    wrong = arguments | {name: arguments[name].astype(np.int64)}
    message = rf"{name} must be int32 \[.*, got int64"
    with pytest.raises(TypeError, match=message):
        faults.run("torch", "append_kv", wrong)
    with pytest.raises(TypeError, match=message):
        jaxattn.append_kv(**wrong)
    with jax.enable_x64(True), pytest.raises(TypeError, match=message):
        faults.run("jax", "append_kv", wrong)


@phases
def test_r7_host_values_beyond_int32_are_refused(case):
    """Page ids of 2**40 and 2**31 + 5 are an error, never another page."""
    arguments = case.make()
    arrays, static = faults.jax_arrays(arguments)
    for page in (2**40, 2**31 + 5):
        table = arguments["page_table"].astype(np.int64)
        table[0, 0] = page
        with pytest.raises(TypeError, match=r"page_table must be int32"):
            getattr(jaxattn, case.phase)(**arrays | dict(page_table=table), **static)
        with pytest.raises(TypeError, match=r"page_table must be int32"):
            faults.attend("torch", arguments | dict(page_table=table))


@phases
def test_r7_x64_programs(case):
    """With x64 on, int32 lengths made in jit are right, float64 scales too, int64 is an error."""
    arguments = case.make()
    arrays, static = faults.jax_arrays(arguments)
    function = getattr(jaxattn, case.phase)
    steps = np.diff(arguments["seq_lens"], prepend=0).astype(np.int32)
    with jax.enable_x64(True):

        @jax.jit
        def made(steps, scale):
            seq_lens = jnp.cumsum(steps).astype(jnp.int32)
            return function(
                **arrays | dict(seq_lens=seq_lens), **static, sm_scale=scale, return_lse=True
            )

        out, lse = made(steps, jnp.float64(0.3))
        assert out.dtype == jnp.float32
        with pytest.raises(TypeError, match=r"seq_lens must be int32 \[batch\].*, got int64"):
            jax.jit(
                lambda table: function(
                    **arrays | dict(seq_lens=jnp.argmax(table, axis=1)), **static
                )
            )(arrays["page_table"])
    compare.check_attention(arguments | dict(sm_scale=0.3), np.asarray(out), np.asarray(lse))


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


CACHE_NAMES = ("key_cache", "value_cache")


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


def mesh_of_two():
    return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))


HEADS = dict(
    query=P(None, "x"), key_cache=P(None, None, "x"), value_cache=P(None, None, "x"), sinks=P("x")
)
BATCH = dict(query=P("x"), page_table=P("x"), seq_lens=P("x"), draft_mask=P("x"))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("split", ["heads", "batch"])
@pytest.mark.parametrize("kv_dtype", ["float32", E4M3])
def test_r13_shard_map_of_decode(split, check_vma, kv_dtype):
    """Split over KV heads or over the batch, two devices give the oracle's result."""
    case = Case("r13", (9, 30, 0, 4), q_len=2, draft_mask="bool", sinks=True, kv_dtype=kv_dtype)
    arguments = case.make()
    arrays, static = faults.jax_arrays(arguments)
    specs = HEADS if split == "heads" else BATCH
    out_spec = P(None, "x") if split == "heads" else P("x")
    sharded = jax.shard_map(
        lambda arrays: jaxattn.decode(**arrays, **static, return_lse=True),
        mesh=mesh_of_two(),
        in_specs=({name: specs.get(name, P()) for name in arrays},),
        out_specs=(out_spec, out_spec),
        check_vma=check_vma,
    )
    out, lse = jax.jit(sharded)(arrays)
    assert len(out.devices()) == 2
    compare.check_attention(arguments, np.asarray(out), np.asarray(lse))


@pytest.mark.parametrize("check_vma", [True, False])
def test_r13_shard_map_of_append_and_prefill(check_vma):
    """A chunk appended and attended with the KV heads split over two devices."""
    arguments = Case("r13", (9, 30), q_lens=(3, 5), kv_layout="HND").make()
    arrays, static = faults.jax_arrays(arguments)
    rng = np.random.default_rng(2)
    new = {name: inputs.normal(rng, (8, 2, 16), np.dtype("f4")) for name in ("key", "value")}
    at = faults.positions(arguments)
    places = dict(
        positions=np.array([position for _, position in at], np.int32),
        request_ids=np.array([request for request, _ in at], np.int32),
    )

    def chunk(arrays, new, places):
        names = (*CACHE_NAMES, "page_table")
        caches = jaxattn.append_kv(
            **new, **places, **{name: arrays[name] for name in names}, kv_layout="HND"
        )
        arrays = arrays | dict(zip(CACHE_NAMES, caches, strict=True))
        return jaxattn.prefill(**arrays, **static), caches

    heads = P(None, "x")
    specs = {name: heads if name in ("query", *CACHE_NAMES) else P() for name in arrays}
    sharded = jax.shard_map(
        chunk,
        mesh=mesh_of_two(),
        in_specs=(specs, dict(key=heads, value=heads), dict(positions=P(), request_ids=P())),
        out_specs=(heads, (heads, heads)),
        check_vma=check_vma,
    )
    out, caches = jax.jit(sharded)(arrays, new, places)
    names = (*CACHE_NAMES, "page_table", "kv_layout")
    expected = faults.run(
        "torch", "append_kv", {name: arguments[name] for name in names} | new | places
    )
    assert faults.same_bits(tuple(map(np.asarray, caches)), expected)
    after = arguments | dict(zip(CACHE_NAMES, expected, strict=True))
    compare.check_attention(after, np.asarray(out))


@phases
def test_r13_sharded_operands_of_a_plain_jit(case):
    """NamedSharding operands outside shard_map give the right result."""
    arguments = case.make()
    arrays, static = faults.jax_arrays(arguments)
    mesh = mesh_of_two()
    for specs in (HEADS, BATCH if case.phase == "decode" else HEADS):
        placed = {
            name: jax.device_put(array, NamedSharding(mesh, specs.get(name, P())))
            for name, array in arrays.items()
        }
        out = jax.jit(lambda a: getattr(jaxattn, case.phase)(**a, **static))(placed)
        compare.check_attention(arguments, np.asarray(out))


@phases
def test_r13_on_the_second_device_alone(case):
    """Operands on device 1 give a result on device 1, interleaved with device 0."""
    arguments = case.make()
    arrays, static = faults.jax_arrays(arguments)
    call = jax.jit(lambda arrays: getattr(jaxattn, case.phase)(**arrays, **static))
    for device in (jax.devices()[1], jax.devices()[0], jax.devices()[1]):
        out = call(jax.device_put(arrays, device))
        assert out.devices() == {device}
        compare.check_attention(arguments, np.asarray(out))


def test_r13_handing_over_a_sharded_array_is_an_error():
    """to_torch of an array on two devices names the number of devices."""
    array = jax.device_put(jnp.zeros((4, 4)), NamedSharding(mesh_of_two(), P("x")))
    with pytest.raises(ValueError, match="array must lie on one device, got 2"):
        jaxattn.to_torch(array)


def test_r13_an_error_on_one_device_surfaces():
    """A wrong length in one shard fails the call with our message; the next call works."""
    arguments = Case("r13", (9, 30)).make()
    arrays, static = faults.jax_arrays(arguments)
    sharded = jax.jit(
        jax.shard_map(
            lambda arrays: jaxattn.decode(**arrays, **static),
            mesh=mesh_of_two(),
            in_specs=({name: BATCH.get(name, P()) for name in arrays},),
            out_specs=P("x"),
        )
    )
    for wrong in ([9, 999], [999, 30]):
        with pytest.raises(faults.RUNTIME_ERRORS["jax"], match=r"seq_lens must be in .*999"):
            jax.block_until_ready(sharded(arrays | dict(seq_lens=jnp.array(wrong, jnp.int32))))
        compare.check_attention(arguments, np.asarray(sharded(arrays)))


def _zeros(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


TRACE_MISTAKES = [
    (dict(query=_zeros(4, 4)), ValueError, r"query must be .* got float32 \[4, 4\]"),
    (dict(query=_zeros(4, 4, 8)), ValueError, r"key_cache must be .*head_dim\] = .*8\]"),
    (dict(query=_zeros(5, 4, 16)), ValueError, r"query must have batch \* q_len = 4 \* 1 rows"),
    (dict(query=_zeros(4, 3, 16)), ValueError, r"query must have a positive multiple"),
    (dict(value_cache=_zeros(2, 8, 2, 16)), ValueError, r"value_cache must be .*got .*\[2, 8, 2"),
    (dict(page_table=_zeros(3, 5, dtype="int32")), ValueError, r"seq_lens must be int32 \[batch\]"),
    (dict(seq_lens=_zeros(4, 1, dtype="int32")), ValueError, r"seq_lens must be int32 \[batch\]"),
    (dict(sinks=_zeros(3)), ValueError, r"sinks must be float32 \[num_qo_heads\] = \[4\]"),
    (dict(sinks=_zeros(4, dtype="bfloat16")), TypeError, r"sinks must be float32"),
    (dict(draft_mask=_zeros(4, 2, 2, dtype="bool")), ValueError, r"draft_mask must be bool"),
    (dict(query=_zeros(4, 4, 16, dtype="bfloat16")), TypeError, r"key_cache must have the query's"),
    (dict(query=_zeros(4, 4, 16, dtype=E4M3)), TypeError, r"query of float8_e4m3fn needs a cache"),
    (dict(q_len=0), ValueError, r"q_len must be in \[1, "),
    (dict(q_len=2.0), TypeError, r"q_len must be a Python int"),
    (dict(kv_layout="NDH"), ValueError, r"kv_layout must be one of 'NHD', 'HND', got 'NDH'"),
    (dict(kv_layout="HND"), ValueError, r"query must have a positive multiple of num_kv_heads = 8"),
    (dict(return_lse=1), TypeError, r"return_lse must be True or False, got 1"),
    (dict(backend="fast"), ValueError, r"backend must be one of 'auto'"),
    (dict(sinks=None, draft_mask="tree"), TypeError, r"draft_mask must be an array, got str"),
]


@pytest.mark.parametrize("change, error, message", TRACE_MISTAKES)
def test_r15_mistakes_are_python_errors_while_tracing(change, error, message):
    """Shapes, dtypes and options are checked before anything is compiled."""
    arrays, static = faults.jax_arrays(Case("r15", (9, 30, 0, 4)).make())
    specs = {name: _zeros(*a.shape, dtype=a.dtype) for name, a in arrays.items()}
    arguments = specs | static | change
    specs = {k: v for k, v in arguments.items() if isinstance(v, jax.ShapeDtypeStruct)}
    static = {k: v for k, v in arguments.items() if k not in specs}
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda specs: jaxattn.decode(**specs, **static), specs)


DECODE, PREFILL = Case("decode", (9, 30)), Case("prefill", (9, 30), q_lens=(3, 5))
RUNTIME_MISTAKES = [
    (DECODE, dict(seq_lens=[9, 41]), r"seq_lens must be in \[0, .* = 40\], got 9 to 41"),
    (DECODE, dict(seq_lens=[-3, 30]), r"seq_lens must be in \[0, .*got -3 to 30"),
    (DECODE, dict(page_table=[[9, 1, 0, 0, 0]] * 2), r"page_table must be in \[0, .*9\)"),
    (DECODE, dict(page_table=[[0, -1, 0, 0, 0]] * 2), r"page_table must be in .*got -1"),
    (PREFILL, dict(page_table=[[9, 1, 0, 0, 0]] * 2), r"page_table must be in .* 9\)"),
    (PREFILL, dict(cu_seqlens_q=[1, 3, 8]), r"cu_seqlens_q must rise from 0"),
    (PREFILL, dict(cu_seqlens_q=[0, 5, 3]), r"cu_seqlens_q must rise from 0"),
    (PREFILL, dict(cu_seqlens_q=[0, 3, 9]), r"at most the query's 8 rows"),
    (PREFILL, dict(cu_seqlens_q=[0, 2, 8]), r"max_seqlen_q must be at least the longest query, 6"),
]


@fronts
@pytest.mark.parametrize("case, change, message", RUNTIME_MISTAKES)
def test_r15_wrong_values_keep_our_message(front, case, change, message):
    """Values out of range surface with our text, and the next call works."""
    arguments = case.make()
    change = {name: np.array(value, np.int32) for name, value in change.items()}
    for _ in range(2):
        with pytest.raises(faults.RUNTIME_ERRORS[front], match=message):
            faults.attend(front, arguments | change)
        compare.check_attention(arguments, *faults.attend(front, arguments))


@fronts
@pytest.mark.parametrize(
    "change, message",
    [
        (dict(slots=[32]), r"slots must be in \[0, num_pages \* page_size = 32\), got 32 to 32"),
        (dict(positions=[16]), r"positions must be in \[0, pages_per_seq \* page_size = 16\)"),
        (dict(positions=[0], request_ids=[2]), r"request_ids must be in \[0, batch = 2\), got 2"),
        (dict(positions=[0], request_ids=[-1]), r"request_ids must be in .*got -1"),
        (dict(positions=[8]), r"page_table must be in \[0, num_pages = 4\), got 7"),
    ],
)
def test_r15_append_to_a_wrong_place_keeps_our_message(front, change, message):
    """The same for append_kv; the caches of the failed call keep their values. Inside jit, XLA's
    scatter drops the row and writes nowhere else."""
    arguments = append_arguments()
    arguments |= {name: arguments[name][:1] for name in ("key", "value")}
    good = dict(arguments, slots=np.array([3], np.int32))
    del arguments["slots"]
    if "slots" not in change:
        arguments["page_table"] = np.array([[2, 7], [3, 0]], np.int32)
    arguments |= {name: np.array(value, np.int32) for name, value in change.items()}
    before = [arguments[name].copy() for name in CACHE_NAMES]
    with pytest.raises(ValueError, match=message):
        if front == "torch":
            faults.run(front, "append_kv", arguments)
        else:
            arrays, static = faults.jax_arrays(arguments)
            jaxattn.append_kv(**arrays, **static)
    if front == "jax":
        assert faults.same_bits(faults.run("jax", "append_kv", arguments), tuple(before))
    assert all(faults.same_bits(arguments[n], b) for n, b in zip(CACHE_NAMES, before, strict=True))
    written = faults.run(front, "append_kv", good)
    np.testing.assert_array_equal(written[0][0, 3], good["key"][0])


@fronts
def test_r15_calls_from_8_threads(front):
    """8 threads x 50 calls, each thread with its own lengths and now and then a failing call."""
    cases = [Case("r15", (3 + thread, 40 - thread, 9)) for thread in range(8)]
    table = np.arange(18, dtype=np.int32).reshape(3, 6)
    base = cases[0].make() | dict(page_table=table)
    base |= {
        name: inputs.normal(np.random.default_rng(1), (18, 8, 2, 16), np.dtype("f4"))
        for name in CACHE_NAMES
    }
    calls = [base | dict(seq_lens=np.array(case.seq_lens, np.int32)) for case in cases]
    expected = [faults.attend(front, call) for call in calls]
    for call, result in zip(calls, expected, strict=True):
        compare.check_attention(call, *result)
    wrong, failures = base | dict(seq_lens=np.array([1, 1, 49], np.int32)), []

    def work(thread):
        try:
            for step in range(50):
                if step % 10 == thread:
                    with pytest.raises(faults.RUNTIME_ERRORS[front], match="seq_lens must be in"):
                        faults.attend(front, wrong)
                assert faults.same_bits(faults.attend(front, calls[thread]), expected[thread])
        except BaseException as failure:
            failures.append((thread, failure))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


VMAP = Case("r17", (9, 30, 0), q_len=2, draft_mask="bool")


@pytest.mark.parametrize(
    "mapped",
    [
        ("query",),
        ("seq_lens",),
        ("query", "page_table", "seq_lens", "draft_mask"),
        ("key_cache",),
        ("query", "key_cache", "value_cache", "page_table", "seq_lens"),
    ],
    ids="-".join,
)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_r17_vmap_of_decode_equals_stacked_calls(mapped, kv_layout):
    """vmap folds any set of mapped arrays, caches among them."""
    case = Case("r17", (9, 30, 0), q_len=2, draft_mask="bool", kv_layout=kv_layout)
    calls = [case.make(seed) for seed in range(3)]
    lengths = [(9, 30, 0), (1, 24, 7), (0, 2, 30)]
    for call, seq_lens in zip(calls, lengths, strict=True):
        call["seq_lens"] = np.array(seq_lens, np.int32)
        call["page_table"] = np.random.default_rng(seq_lens[0]).permutation(12).reshape(3, 4)
        call["page_table"] = (call["page_table"] % 9).astype(np.int32)
    calls = [calls[0] | {name: call[name] for name in mapped} for call in calls]
    arrays, static = faults.jax_arrays(calls[0])
    arrays |= {name: jnp.stack([call[name] for call in calls]) for name in mapped}
    axes = ({name: 0 if name in mapped else None for name in arrays},)
    function = jax.vmap(lambda a: jaxattn.decode(**a, **static, return_lse=True), in_axes=axes)
    for out, lse in (function(arrays), jax.jit(function)(arrays)):
        for call, call_out, call_lse in zip(calls, out, lse, strict=True):
            compare.check_attention(call, np.asarray(call_out), np.asarray(call_lse))


def test_r17_nested_vmap_of_decode():
    """vmap of vmap, the caches mapped by the outer one, equals the calls apart."""
    arguments = Case("r17", (9, 30)).make()
    arrays, static = faults.jax_arrays(arguments)
    queries = jnp.stack(
        [jnp.stack([arrays["query"] * (1 + (i + 2 * j) / 8) for i in range(2)]) for j in range(3)]
    )
    keys = jnp.stack([arrays["key_cache"] * (1 + j / 8) for j in range(3)])

    def call(query, key_cache):
        return jaxattn.decode(**arrays | dict(query=query, key_cache=key_cache), **static)

    out = jax.vmap(jax.vmap(call, in_axes=(0, None)))(queries, keys)
    for j in range(3):
        for i in range(2):
            single = dict(query=np.asarray(queries[j, i]), key_cache=np.asarray(keys[j]))
            compare.check_attention(arguments | single, np.asarray(out[j, i]))


@pytest.mark.parametrize("offset", [0, 2, -1])
@pytest.mark.parametrize("element", [0, 1])
def test_r17_vmap_does_not_let_page_ids_cross_elements(element, offset):
    """A page id out of range is an error under vmap too, not a page of the next element."""
    case = Case("r17", (9, 30))
    calls = [case.make(seed) for seed in range(2)]
    arrays, static = faults.jax_arrays(calls[0])
    arrays = {name: jnp.stack([call[name] for call in calls]) for name in arrays}
    num_pages = arrays["key_cache"].shape[1]
    wrong = -1 if offset < 0 else num_pages + offset
    table = arrays["page_table"].at[element, 0, 0].set(wrong)
    function = jax.jit(jax.vmap(lambda arrays: jaxattn.decode(**arrays, **static)))
    function(arrays).block_until_ready()
    with pytest.raises(faults.RUNTIME_ERRORS["jax"], match="page_table must be in"):
        function(arrays | dict(page_table=table)).block_until_ready()


def test_r17_vmap_of_the_others_names_the_way_out():
    """prefill, append_kv and mapped scales or sinks refuse vmap; merge_states takes it."""
    arrays, static = faults.jax_arrays(Case("r17", (9, 30), q_lens=(3, 5)).make())
    queries = jnp.stack([arrays["query"]] * 2)
    with pytest.raises(NotImplementedError, match=r"jaxattn.prefill does not take vmap: pack the"):
        jax.vmap(lambda query: jaxattn.prefill(**arrays | dict(query=query), **static))(queries)
    append, append_static = faults.jax_arrays(append_arguments())
    with pytest.raises(NotImplementedError, match=r"jaxattn.append_kv does not take vmap: put the"):
        jax.vmap(lambda key: jaxattn.append_kv(**append | dict(key=key), **append_static))(
            jnp.stack([append["key"]] * 2)
        )
    arrays, static = faults.jax_arrays(Case("r17", (9, 30)).make())
    for name, values in (("sm_scale", jnp.ones(2)), ("sinks", jnp.ones((2, 4)))):
        with pytest.raises(NotImplementedError, match=r"jaxattn.decode under vmap .*jax.lax.map"):
            jax.vmap(lambda value, name=name: jaxattn.decode(**arrays, **static, **{name: value}))(
                values
            )
    rng = np.random.default_rng(0)
    out_a, out_b = (jnp.array(rng.normal(size=(2, 3, 4, 8)), jnp.float32) for _ in range(2))
    lse_a, lse_b = (jnp.array(rng.normal(size=(2, 3, 4)), jnp.float32) for _ in range(2))
    merged = jax.vmap(jaxattn.merge_states)(out_a, lse_a, out_b, lse_b)
    for index in range(2):
        single = jaxattn.merge_states(out_a[index], lse_a[index], out_b[index], lse_b[index])
        np.testing.assert_allclose(merged[0][index], single[0], rtol=1e-6)
        np.testing.assert_allclose(merged[1][index], single[1], rtol=1e-6)


def test_r17_lax_map_is_a_way_out_of_vmap():
    """What the messages advise works: jax.lax.map over a scale and over prefill."""
    arguments = Case("r17", (9, 30)).make()
    arrays, static = faults.jax_arrays(arguments)
    out = jax.lax.map(
        lambda s: jaxattn.decode(**arrays, **static, sm_scale=s), jnp.array([0.5, 2.0])
    )
    for scale, result in zip((0.5, 2.0), out, strict=True):
        compare.check_attention(arguments | dict(sm_scale=scale), np.asarray(result))


@pytest.mark.parametrize("name", ["decode", "prefill", "append_kv", "merge_states"])
def test_r17_gradients_are_refused_by_name(name):
    """grad, jvp and grad under jit or vmap say that the op is for inference."""
    if name == "merge_states":
        arguments = dict(
            out_a=np.ones((3, 4, 8), "f4"),
            lse_a=np.ones((3, 4), "f4"),
            out_b=np.ones((3, 4, 8), "f4"),
            lse_b=np.ones((3, 4), "f4"),
        )
    elif name == "append_kv":
        arguments = append_arguments()
    else:
        arguments = Case("r17", (9, 30), (3, 5) if name == "prefill" else None).make()
    arrays, static = faults.jax_arrays(arguments)
    first = next(iter(arrays))

    def loss(array):
        result = getattr(jaxattn, name)(**arrays | {first: array}, **static)
        return jax.tree.leaves(result)[0].sum()

    x = arrays[first]
    message = rf"jaxattn.{name} is for inference and has no gradient.*stop_gradient"
    for attempt in (
        lambda: jax.grad(loss)(x),
        lambda: jax.jit(jax.grad(loss))(x),
        lambda: jax.jvp(loss, (x,), (x,)),
    ):
        with pytest.raises(NotImplementedError, match=message):
            attempt()
    gradient = jax.grad(lambda x: (x * loss(jax.lax.stop_gradient(x))).sum())(x)
    np.testing.assert_allclose(gradient, np.full(x.shape, loss(x)), rtol=1e-5)


@pytest.mark.parametrize("name", ["decode", "prefill", "append_kv"])
def test_r17_torch_gradients_are_refused_by_name(name):
    """torch refuses a tensor that requires a gradient, and runs under no_grad."""
    if name == "append_kv":
        arguments = append_arguments()
    else:
        arguments = Case("r17", (9, 30), (3, 5) if name == "prefill" else None).make()
    tensors = {key: inputs.to_torch(value) for key, value in arguments.items()}
    first = next(iter(tensors))
    tensors[first].requires_grad_()
    message = rf"torch_core.{name} is for inference and has no gradient.*no_grad"
    with pytest.raises(NotImplementedError, match=message):
        getattr(torch_core, name)(**tensors)
    with torch.no_grad():
        result = getattr(torch_core, name)(**tensors)
    assert not any(tensor.requires_grad for tensor in jax.tree.leaves(result))


@phases
def test_r17_export_needs_the_documented_check(case):
    """jax.export refuses the custom call by name; with its check disabled the export runs."""
    arguments = case.make()
    arrays, static = faults.jax_arrays(arguments)
    call = jax.jit(lambda arrays: getattr(jaxattn, case.phase)(**arrays, **static))
    with pytest.raises(ValueError, match=rf"custom_call @.?jaxattn.{case.phase}"):
        jax.export.export(call)(arrays)
    target = re.search(r'custom_call @"?(jaxattn[^"]*)"', call.lower(arrays).as_text())[1]
    allowed = [jax.export.DisabledSafetyCheck.custom_call(target)]
    exported = jax.export.export(call, disabled_checks=allowed)(arrays)
    compare.check_attention(arguments, np.asarray(jax.jit(exported.call)(arrays)))


def static_configurations(count):
    """Distinct (page_size, head_dim, window_left, soft_cap, sm_scale, phase, layout)."""
    for index in range(count):
        yield dict(
            phase=("decode", "prefill")[index % 2],
            page_size=1 + index % 7,
            head_dim=8 * (1 + index % 3),
            window_left=index % 301 - 1,
            soft_cap=(None, 1.0 + index)[index % 5 % 2],
            sm_scale=0.01 + index / 500,
            kv_layout=("NHD", "HND")[index % 11 % 2],
        )


def configured(configuration):
    """The NumPy arguments of a tiny call with that configuration."""
    options = {
        k: v for k, v in configuration.items() if k in ("window_left", "soft_cap", "sm_scale")
    }
    return Case(
        "r18",
        (5,),
        q_lens=(3,) if configuration["phase"] == "prefill" else None,
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim=configuration["head_dim"],
        page_size=configuration["page_size"],
        kv_layout=configuration["kv_layout"],
        extra_pages=0,
        options=options,
    ).make()


def test_r18_1100_configurations_add_no_targets():
    """1100 distinct static configurations are traced, 300 of them run, all on two targets."""
    for phase in ("decode", "prefill"):
        faults.run("jax", phase, configured(next(static_configurations(1)) | dict(phase=phase)))
    before = jax_tvm_ffi.registered_count()
    calls = [(c["phase"], configured(c)) for c in static_configurations(1100)]
    seen = set()
    for begin in range(0, 1100, 50):
        block = calls[begin : begin + 50]
        split = [faults.jax_arrays(arguments) for _, arguments in block]
        operands = [arrays for arrays, _ in split]
        for (phase, _), (arrays, static) in zip(block, split, strict=True):
            seen.add((phase, str(static), str({n: a.shape for n, a in arrays.items()})))

        def program(operands, block=block, split=split):
            return [
                getattr(jaxattn, phase)(**arrays, **static)
                for (phase, _), arrays, (_, static) in zip(block, operands, split, strict=True)
            ]

        if begin >= 300:
            jax.eval_shape(program, operands)
            continue
        for (_, arguments), result in zip(block, jax.jit(program)(operands), strict=True):
            compare.check_attention(arguments, np.asarray(result))
    assert len(seen) == 1100
    assert jax_tvm_ffi.registered_count() == before
