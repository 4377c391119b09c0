"""Triton's interpreter, which runs the kernels where there is no GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np


def mend() -> None:
    """Mends faults of Triton 3.6's interpreter: bounds of loops, arrays of one element, do not
    convert to int under NumPy 2.4; conversions to bf16 truncate, those to fp8 lose carries; tl.dot
    multiplies bf16 as the integers that hold it; tl.maximum and tl.minimum hand NaN on, where a
    GPU's take the other number."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor
    dtypes = {
        tl.float64: np.dtype(np.float64),
        tl.float32: np.dtype(np.float32),
        tl.float16: np.dtype(np.float16),
        tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
        tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
        tl.float8e5: np.dtype(ml_dtypes.float8_e5m2),
    }

    def patch(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def convert(data, source, target, rounding_mode):
        values = np.ascontiguousarray(data).view(dtypes[source]).astype(dtypes[target])
        return values.view(f"uint{8 * dtypes[target].itemsize}").reshape(data.shape)

    def float32(handle):
        dtype = handle.dtype.scalar
        data = handle.data.view(dtypes[dtype]) if dtype == tl.bfloat16 else handle.data
        return data.astype(np.float32)

    def create_dot(self, a, b, acc, input_precision, max_num_imprecise_acc):
        return interpreter.TensorHandle(float32(a) @ float32(b) + acc.data, acc.dtype.scalar)

    interpreter._patch_lang_tensor = patch
    interpreter._convert_float = convert
    builder = interpreter.InterpreterBuilder
    builder.create_dot = create_dot
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)


THREADS = 128  # of a program; a tensor of fewer elements is held by several warps


@contextmanager
def races() -> Iterator[list[str]]:
    """Collects the addresses that a program both loads and stores without a barrier between: on a
    GPU, its threads may be ahead of each other. One thread's own are left out: those of elements at
    the same place of tensors of one size, if no other thread holds them too."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    loaded: dict[int, Any] = {}
    stored: dict[int, Any] = {}
    found: list[str] = []

    def touch(what: str, pointers: Any, mask: Any, mine: dict[int, Any], other: dict[int, Any]):
        addresses = np.asarray(pointers.data)
        live = np.broadcast_to(np.asarray(mask.data, bool), addresses.shape).ravel()
        for place in np.flatnonzero(live).tolist():
            address = int(addresses.flat[place])
            owner = (place, addresses.size) if addresses.size >= THREADS else None
            if address in other and (owner is None or other[address] != owner):
                found.append(f"{what} of {address:#x} by {owner}, before by {other[address]}")
            mine[address] = owner

    def forget(original: Any) -> Any:
        def call(self: Any, *arguments: Any) -> Any:
            loaded.clear()
            stored.clear()
            return original(self, *arguments)

        return call

    load, store = builder.create_masked_load, builder.create_masked_store

    def masked_load(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        touch("load", pointers, mask, loaded, stored)
        return load(self, pointers, mask, *more)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        touch("store", pointers, mask, stored, loaded)
        return store(self, pointers, value, mask, *more)

    with mock.patch.multiple(
        builder,
        create_masked_load=masked_load,
        create_masked_store=masked_store,
        create_barrier=forget(builder.create_barrier),
        set_grid_idx=forget(builder.set_grid_idx),
    ):
        yield found
