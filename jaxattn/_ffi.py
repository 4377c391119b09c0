"""The bridge: Python functions over torch tensors as XLA custom calls, without copies.

The only importer of jax_tvm_ffi. A target has no attributes (they leak in jax-tvm-ffi 0.1.3, and a
missing one crashes): what changes between calls travels in operands, and the rest is in the
target's name. Operand and result layouts are row-major, the default of `jax.ffi.ffi_call`:
jax_tvm_ffi reports row-major strides whatever the layout is.
"""

import threading
from collections.abc import Callable, Sequence

import jax
import jax_tvm_ffi
import numpy as np
import torch
import tvm_ffi

# The handler table of jax-tvm-ffi holds this many entries for the whole process.
MAX_TARGETS = 1024

_lock = threading.Lock()
_registered: set[str] = set()


def call(
    name: str,
    function: Callable[..., None],
    operands: Sequence[jax.Array | np.ndarray],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    aliases: dict[int, int] | None = None,
) -> Sequence[jax.Array]:
    """Runs `function(*operands, *results)` on torch tensors over XLA's own buffers.

    Args:
        name: identity of the target; one name means one function and one number of operands.
        function: writes the results in place. It must not keep a tensor.
        operands: arrays, traced or not.
        results: shapes and dtypes of the results.
        aliases: operand index -> result index that shares its buffer.
    """
    _register(name, function)
    values = jax.ffi.ffi_call(name, results, input_output_aliases=aliases)(*operands)
    # Inside shard_map a result varies over every mesh axis that an operand varies over.
    axes = tuple(set().union(*map(_varying_axes, operands)))
    return [jax.lax.pcast(value, axes, to="varying") for value in values] if axes else values


def _varying_axes(operand: jax.Array | np.ndarray) -> frozenset[str]:
    kind = jax.typeof(operand)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


def _register(name: str, function: Callable[..., None]) -> None:
    with _lock:
        if name in _registered:
            return
        if jax_tvm_ffi.registered_count() >= MAX_TARGETS:
            raise RuntimeError(
                f"jaxattn cannot register {name!r}: the process has used all {MAX_TARGETS} entries "
                "of jax-tvm-ffi's handler table"
            )

        def callback(*buffers: tvm_ffi.Tensor) -> None:
            function(*map(torch.from_dlpack, buffers))

        jax_tvm_ffi.register_ffi_target(
            name,
            tvm_ffi.convert(callback),
            ["args", "rets"],
            platform="cpu",
            pass_owned_tensor=True,
        )
        _registered.add(name)
