"""A launch of jaxattn's with the kernel in Triton's interpreter, on XLA's own buffers."""

import ctypes
import threading

import torch

from jaxattn import _ffi, _triton
from torch_core.qsa import launch

_call = _ffi.call
one_at_a_time = threading.Lock()  # the interpreter has global state


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory: the interpreter keeps tensors in cycles, which XLA's must not be in."""
    if not tensor.nbytes:
        return tensor.clone()
    memory = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


def call(record, operands, results, aliases, capability):
    """What XLA does with a compiled kernel: its parameters are the operands, then the results."""
    arrays = {**operands, **results}
    pointers = tuple((name, str(array.dtype)) for name, array in arrays.items())
    wanted = launch.Specialization(
        record.kernel, pointers, record.constants, record.num_warps, record.num_stages
    )
    kernel = launch.load(record.kernel)
    _triton.check_names(wanted, kernel)

    def launched(*tensors: torch.Tensor) -> None:
        with one_at_a_time:
            kernel[record.grid](*map(borrowed, tensors), **dict(record.constants))

    name = f"interpreted {record} {aliases}"
    return _call(name, launched, list(operands.values()), list(results.values()), aliases=aliases)
