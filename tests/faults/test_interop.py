"""Faults (a), R5 to R7: layouts, dtypes and integers between JAX and torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

import jaxattn
import torch_core
from jaxattn import _ffi, interop
from tests import compare, faults, inputs, oracle
from tests.faults.interop import E4M3, append_arguments, fronts, phases
from tests.inputs import Case


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
