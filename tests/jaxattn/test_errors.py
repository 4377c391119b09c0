"""Every message of jaxattn: what triggers it, and what it says."""

import dataclasses
import re
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import jax_tvm_ffi
import numpy as np
import pytest
import torch

import jaxattn
from jaxattn import _ffi, _launch, export
from tests import errors
from torch_core import dispatch


def to_array(array: np.ndarray) -> Any:
    """A JAX array, or NumPy's where JAX would cut 64 bits to 32."""
    return array if array.dtype.itemsize == 8 else jnp.array(array)


FRONT = errors.Front(jaxattn, to_array)


def call(function: str, **changes: Any) -> Any:
    arrays = {k: to_array(v) if isinstance(v, np.ndarray) else v for k, v in
              errors.valid(function).items()}  # fmt: skip
    return getattr(jaxattn, function)(**arrays | changes)


def traced(name: str) -> Callable[[], Any]:
    """A decode whose static argument is traced."""
    return lambda: jax.jit(lambda value: call("decode", **{name: value}))(2)


def mapped_pages():
    """vmap over pages of one head each."""
    pages = jnp.zeros((2, 1, 3, 8, 4))
    rest = (jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    attend = jaxattn.compat.paged_attention
    return jax.vmap(lambda pages: attend(jnp.zeros((1, 1, 4)), pages, pages, *rest))(pages)


def mapped(function: str, name: str) -> Callable[[], Any]:
    """vmap over one argument."""

    def run():
        array = to_array(errors.valid(function)[name])
        return jax.vmap(lambda array: call(function, **{name: array}))(jnp.stack([array, array]))

    return run


def gradient(function: str, name: str) -> Callable[[], Any]:
    def run():
        array = to_array(errors.valid(function)[name])
        return jax.grad(lambda array: jax.tree.leaves(call(function, **{name: array}))[0].sum())(
            array
        )

    return run


def full_table():
    with mock.patch.object(jax_tvm_ffi, "registered_count", return_value=_ffi.MAX_TARGETS):
        _ffi.call("one too many", print, [np.zeros(1, np.float32)], [])


def spread_array():
    mesh = jax.sharding.Mesh(jax.devices()[:2], "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    return jaxattn.to_torch(jax.device_put(jnp.zeros(4), sharding))


def split_caches(*spec: str | None):
    """A decode on caches that are split over two devices."""
    kind = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    names = ("key_cache", "value_cache")
    caches = {name: jax.device_put(errors.valid("decode")[name], sharding) for name in names}
    return call("decode", **caches)


def exported_by_dlpack():
    """QSA kernels that Python launches are this process's own."""

    def call(x):
        name = "jaxattn.qsa_by_dlpack.score"
        return _ffi.call(name, lambda a, out: out.copy_(a), [x], [jax.typeof(x)])

    export.export(jax.jit(call))(jnp.zeros(3))


def program_for_two_platforms():
    text = 'stablehlo.custom_call @"jaxattn.decode(1)"(%arg0)'
    export._prepare(types.SimpleNamespace(mlir_module=lambda: text, platforms=("cpu", "cuda")))


def symbolic_batch_on_a_gpu():
    (batch,) = jax.export.symbolic_shape("b")
    problem = dispatch.describe_call("decode", num_qo_heads=1, num_kv_heads=1, head_dim=64,
                                     page_size=16)  # fmt: skip
    problem = dataclasses.replace(problem, batch=batch, num_rows=batch)
    _launch._call_kernel(None, problem, "xqa", dispatch.AttentionInputs(*[None] * 5), {})


OTHER_GPU = "jaxattn.kernel((90, 7, '0.1'), 'backends.xqa', (), (), (), False)"
# name, trigger, error, start of the message
OWN = [
    ("torch_tensor", lambda: call("decode", page_table=torch.zeros(2, 3, dtype=torch.int32)),
     TypeError,
     "page_table must be a jax.Array, got torch.Tensor (jaxattn.to_jax takes torch tensors)"),
    ("torch_scale", lambda: call("append_kv", k_scale=torch.ones(())),
     TypeError, "k_scale must be a jax.Array, got torch.Tensor"),
    ("traced_q_len", traced("q_len"), TypeError,
     "q_len must be a Python int known before the call, got "),
    ("traced_window", traced("window_left"), TypeError,
     "window_left must be a Python int known before the call, got "),
    ("traced_soft_cap", lambda: jax.jit(lambda x: call("decode", soft_cap=x))(2.0), TypeError,
     "soft_cap must be a Python number or None, got an array"),
    ("traced_flag", lambda: jax.jit(lambda x: call("decode", return_lse=x))(True), TypeError,
     "return_lse must be True or False, got "),
    ("vmap_prefill", mapped("prefill", "query"), NotImplementedError,
     "jaxattn.prefill does not take vmap: pack the requests into one call with cu_seqlens_q"),
    ("vmap_append", mapped("append_kv", "key"), NotImplementedError,
     "jaxattn.append_kv does not take vmap: put the caches in one pool, or use jax.lax.scan"),
    ("vmap_sinks", mapped("decode", "sinks"), NotImplementedError,
     "jaxattn.decode under vmap takes sinks and scales that are the same for every element"),
    *[(f"grad_{function}", gradient(function, name), NotImplementedError,
       f"jaxattn.{function} is for inference and has no gradient: pass its "
       "arguments through jax.lax.stop_gradient, or train with another attention")
      for function, name in (("decode", "query"), ("prefill", "key_cache"), ("append_kv", "value"),
                             ("merge_states", "lse_a"))],
    ("split_pages", lambda: split_caches("x"), NotImplementedError,
     "jaxattn.decode over caches whose pages are split over devices needs decode with q_len 1, no "
     "draft_mask and no window: split the caches over KV heads for this call"),
    ("split_head_dim", lambda: split_caches(None, None, None, "x"), NotImplementedError,
     "jaxattn.decode would gather key_cache [6, 8, 2, 16], split over the mesh's axes "
     "P(None, None, None, 'x'), on every device: split its KV heads or its pages "),
    ("full_table", full_table, RuntimeError,
     "jaxattn cannot register 'one too many': the process has used all 1024 entries of "
     "jax-tvm-ffi's handler table"),
    ("export_symbolic", symbolic_batch_on_a_gpu, NotImplementedError,
     "jaxattn.decode on a GPU needs shapes of known numbers, got a batch of b: jax.export takes "
     "one program for each shape"),
    ("export_dlpack", exported_by_dlpack, ValueError,
     "a program with QSA calls of via='dlpack' cannot be exported: its kernels are launched by "
     "this process. Use via='triton'"),
    ("export_platforms", program_for_two_platforms, ValueError,
     "the program must be for one platform, got ('cpu', 'cuda')"),
    ("export_version", lambda: _ffi.restore("jaxattn.attend(1)", "cpu"), ValueError,
     "the program calls 'jaxattn.attend(1)', which this version of jaxattn cannot make"),
    ("export_gpu", lambda: _ffi.restore(OTHER_GPU, "gpu"), ValueError,
     "the program was exported for capability 90, 7 multiprocessors and FlashInfer 0.1; this "
     "process has capability "),
    ("to_torch_numpy", lambda: jaxattn.to_torch(np.zeros(2)), TypeError,
     "array must be a concrete jax.Array, got ndarray"),
    ("to_torch_traced", lambda: jax.jit(jaxattn.to_torch)(jnp.zeros(2)), TypeError,
     "array must be a concrete jax.Array, got "),
    ("vmap_pages", mapped_pages, NotImplementedError,
     "vmap must leave these caches as they are: map the rest"),
    ("to_torch_dtype", lambda: jaxattn.to_torch(jnp.zeros(2, jnp.complex64)), TypeError,
     "array must be one of bfloat16, float16, float32, float8_e4m3fn, float8_e5m2, bool, int8, "
     "uint8, int32, uint16, uint32, got complex64"),
    ("to_torch_spread", spread_array, ValueError, "array must lie on one device, got 2"),
    ("to_jax_numpy", lambda: jaxattn.to_jax(np.zeros(2)), TypeError,
     "tensor must be a torch.Tensor, got ndarray"),
    ("to_jax_int64", lambda: jaxattn.to_jax(torch.zeros(2, dtype=torch.int64)), TypeError,
     "tensor must be one of bfloat16, "),
    ("to_jax_strided", lambda: jaxattn.to_jax(torch.zeros(3, 4).T), ValueError,
     "tensor must be contiguous, got strides [1, 4] for shape [4, 3]: call .contiguous() first"),
]  # fmt: skip


@pytest.mark.parametrize("wrong", errors.SHARED, ids=str)
def test_shared_message(wrong):
    """As torch_core says it, while tracing; what needs values, at run time."""
    if wrong.at_run_time:
        prefix = "" if wrong.function == "append_kv" else "INTERNAL: "
        with pytest.raises(errors.AT_RUN_TIME, match="^" + re.escape(prefix + wrong.message)):
            jax.block_until_ready(wrong.run(FRONT))
    else:
        with pytest.raises(wrong.error, match="^" + re.escape(wrong.message)):
            wrong.run(FRONT)


@pytest.mark.parametrize("wrong", [w for w in errors.SHARED if not w.at_run_time], ids=str)
def test_shared_message_under_jit(wrong):
    """Tracing is enough to see the error."""
    with pytest.raises(wrong.error, match="^" + re.escape(wrong.message)):
        jax.eval_shape(lambda: wrong.run(FRONT))


@pytest.mark.parametrize(
    "trigger, error, message", [row[1:] for row in OWN], ids=[r[0] for r in OWN]
)
def test_own_message(trigger, error, message):
    """Messages that only jaxattn has."""
    with pytest.raises(error, match="^" + re.escape(message)):
        trigger()


@pytest.mark.parametrize("function", ["decode", "prefill", "append_kv", "merge_states"])
def test_a_call_after_an_error_works(function):
    """Refused calls leave nothing behind, at run time either."""
    for wrong in errors.SHARED:
        if wrong.function == function and wrong.at_run_time:
            with pytest.raises(errors.AT_RUN_TIME, match=" must "):
                jax.block_until_ready(wrong.run(FRONT))
    jax.block_until_ready(FRONT.call(function, errors.valid(function)))


def test_every_raise_is_triggered():
    """No `raise` of the sources lacks a row in the tables; some files have tests of their own."""
    early = [wrong for wrong in errors.SHARED if not wrong.at_run_time]
    triggers = [lambda wrong=wrong: wrong.run(FRONT) for wrong in early]
    missing = errors.uncovered(jaxattn, triggers + [row[1] for row in OWN])
    others = ("qsa/", "_triton.py", "doctor.py", "paged_cache.py", "paging.py", "speculative.py")
    others += ("rpa.py", "compat.py", "export.py")
    assert [place for place in missing if not place.startswith(others)] == []
