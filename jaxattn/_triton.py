"""Compiles Triton kernels for XLA. The only importer of jax_triton.

`jax_triton.triton_call` is lowered by itself, for one launch record, and what it made is put into a
call of our own. So a record is spelled alike for jax-triton 0.3 and 0.4, which treat aliased
outputs differently; the call may be recorded in a command buffer, which XLA refuses to jax-triton
0.3's own; and versions that do not work together show before a kernel runs. Nothing is tuned at run
time, no output relies on being zeroed, and no number is passed as an argument.
"""

import functools
import inspect
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir

from torch_core.qsa import launch
from torch_core.qsa.plan import Launch

from . import _ffi

VERSIONS = (0, 3, 1), (0, 5)  # of jax-triton: from, and before
TESTED = (
    "jax-triton 0.3.1 with jax 0.10.2 or 0.11.2 and triton 3.6, "
    "jax-triton 0.4.1 with jax 0.11.2 and triton 3.7"
)
# What jaxlib registers for Triton kernels of its own; unlike its older one, it may be captured.
TARGET = "triton_kernel_call_ffi"
_CACHE = "TRITON_CACHE_DIR"
_WORKER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jaxattn-triton")


def load() -> Any:
    """The module jax_triton. ImportError where it, or what it needs, cannot be used."""
    before = os.environ.get(_CACHE)
    try:
        import triton  # noqa: F401 - the first thing that may be missing
        from jaxlib import gpu_triton

        if not hasattr(gpu_triton, "TritonKernelCall"):
            raise ImportError("this jax has no GPU support")
        import jax_triton
    except Exception as error:
        raise ImportError(
            f"via='triton' cannot use jax-triton here ({error}): pip install 'jaxattn[cuda]', or "
            f"use via='dlpack'. Tested: {TESTED}"
        ) from error
    finally:
        # jax-triton changes it, and Triton would cache torch's kernels in the working directory.
        os.environ.pop(_CACHE, None)
        os.environ.update({} if before is None else {_CACHE: before})
    version = jax_triton.__version_info__
    if not VERSIONS[0] <= version < VERSIONS[1]:
        raise ImportError(
            f"via='triton' does not know jax-triton {jax_triton.__version__}: install a tested "
            f"version, or use via='dlpack'. Tested: {TESTED}"
        )
    return jax_triton


@functools.cache
def failure(capability: int) -> Exception | None:
    """Why no kernel can be compiled here; None where a small one can."""
    outputs = ("request_ids", "positions", "visible", "slots")
    pointers = tuple((f"blank_{name}_ptr", "int32") for name in outputs)
    small = launch.Specialization("metadata:clear", pointers, (), num_warps=1, num_stages=2)
    try:
        compiled(small, grid=(1,), capability=capability)
    except (ImportError, RuntimeError) as error:
        return error
    return None


def run(record: Launch, arrays: Mapping[str, Any], capability: int) -> dict[str, jax.Array]:
    """The arrays that one launch makes or changes."""
    sources = {new: launch.names_of(old)[1] for old, new in record.aliases}
    if not all(record.grid):
        return {
            name: arrays[sources[name]] if name in sources else jnp.zeros(shape, dtype)
            for name, shape, dtype in record.outputs
        }
    names = [name for name, _, _ in record.outputs]
    values = call(
        record,
        {parameter: arrays[name] for parameter, name in launch.inputs_of(record)},
        {
            f"{name}_ptr": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
            for name, shape, dtype in record.outputs
        },
        {record.inputs.index(old): names.index(new) for old, new in record.aliases},
        capability,
    )
    return dict(zip(names, values, strict=True))


def call(
    record: Launch,
    operands: dict[str, jax.Array | np.ndarray],
    results: dict[str, jax.ShapeDtypeStruct],
    aliases: dict[int, int],
    capability: int,
) -> Sequence[jax.Array]:
    """One launch.

    Args:
        record: which kernel, with which constants.
        operands, results: by the kernel's parameters, in its order.
        aliases: index of an operand -> index of the result that shares its buffer.
        capability: of the GPU.
    """
    arrays = {**operands, **results}
    wanted = launch.Specialization(
        record.kernel,
        tuple((parameter, str(array.dtype)) for parameter, array in arrays.items()),
        record.constants,
        record.num_warps,
        record.num_stages,
    )
    opaque = compiled(wanted, grid=record.grid, capability=capability)
    given, made = list(operands.values()), list(results.values())
    return _ffi.custom_call(TARGET, given, made, aliases, opaque=opaque)


@functools.lru_cache(maxsize=2**14)
def compiled(wanted: launch.Specialization, *, grid: tuple[int, ...], capability: int) -> bytes:
    """A compiled kernel and its grid, in the form that XLA's call takes."""
    jax_triton, function = load(), launch.load(wanted.kernel)
    check_names(wanted, function)
    try:
        # A thread of its own has none of the caller's transformations and meshes about it.
        return _WORKER.submit(_lower, jax_triton, function, wanted, grid, capability).result()
    except Exception as error:
        import triton

        raise RuntimeError(
            f"via='triton' could not compile {wanted.kernel} with jax-triton "
            f"{jax_triton.__version__}, jax {jax.__version__} and triton {triton.__version__} "
            f"({type(error).__name__}: {error}): use via='dlpack'. Tested: {TESTED}"
        ) from error


def check_names(wanted: launch.Specialization, function: Any) -> None:
    """TypeError where the names are not the kernel's: triton_call passes pointers by position, and
    takes a misspelled constant for one more."""
    given = [name for name, _ in (*wanted.pointers, *wanted.constants)]
    parameters = list(inspect.signature(function.fn).parameters)
    pointers = len(wanted.pointers)
    if given[:pointers] != parameters[:pointers] or sorted(given) != sorted(parameters):
        raise TypeError(f"{wanted.kernel} takes {parameters}, its record gives {given}")


def _lower(
    jax_triton: Any,
    function: Any,
    wanted: launch.Specialization,
    grid: tuple[int, ...],
    capability: int,
) -> bytes:
    """What jax-triton hands to XLA for a call without inputs: which pointers are inputs, and how
    large arrays are, changes nothing in it."""
    outputs = [jax.ShapeDtypeStruct((1,), jnp.dtype(dtype)) for _, dtype in wanted.pointers]
    parameters = inspect.signature(jax_triton.triton_call).parameters
    options = dict(wanted.constants)
    options["out_type" if "out_type" in parameters else "out_shape"] = outputs

    def launched() -> Any:
        return jax_triton.triton_call(
            kernel=function,
            grid=grid,
            num_warps=wanted.num_warps,
            num_stages=wanted.num_stages,
            compute_capability=capability,
            **options,
        )

    module: Any = jax.jit(launched).trace().lower(lowering_platforms=("cuda",)).compiler_ir()
    found: list[bytes] = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            attributes = operation.attributes
            typed = "mhlo.backend_config" in attributes  # jax-triton 0.4's call
            config = attributes["mhlo.backend_config" if typed else "backend_config"]
            found.append((config["opaque"] if typed else config).value_bytes)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    (opaque,) = found
    if not opaque:
        raise ValueError("jax-triton's call holds no kernel")
    return opaque
