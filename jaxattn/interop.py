"""Handing arrays between JAX and torch, for eager code outside jit."""

import jax
import jax.numpy as jnp
import torch
from jax.core import Tracer

from torch_core import checks

DTYPES = (*checks.CACHE_DTYPES, "bool", "int8", "uint8", "int32", "uint16", "uint32")


def to_torch(array: jax.Array) -> torch.Tensor:
    """The same memory as a torch tensor, without a copy.

    Stream order: torch's current stream waits for JAX's pending work on the array. Afterwards the
    two share memory: JAX believes its arrays constant, so do not write to the tensor while JAX
    uses the array, and keep it no longer than a donation of the array allows.

    Args:
        array: a concrete array on one device; a floating dtype that `decode` accepts, bool, int8,
            uint8, int32, uint16 or uint32.

    Returns:
        A tensor on the array's device.

    Raises:
        TypeError: not a concrete jax.Array, or another dtype (64-bit ones among them).
        ValueError: the array lies on several devices.
    """
    if not isinstance(array, jax.Array) or isinstance(array, Tracer):
        raise TypeError(f"array must be a concrete jax.Array, got {type(array).__name__}")
    _require_dtype("array", array)
    if len(array.devices()) != 1:
        raise ValueError(f"array must lie on one device, got {len(array.devices())}")
    return torch.from_dlpack(array)


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """The same memory as a JAX array, without a copy.

    Stream order: JAX waits for the work that torch's current stream holds at this moment; work on
    other streams is the caller's to order. JAX believes its arrays constant, so do not write to the
    tensor afterwards.

    Args:
        tensor: contiguous; a floating dtype that `decode` accepts, bool, int8, uint8, int32,
            uint16 or uint32. A gradient is not carried over.

    Returns:
        An array on the tensor's device. A CPU tensor whose memory is not aligned to 64 bytes (a
        slice, say; new tensors are) is copied: XLA requires the alignment.

    Raises:
        TypeError: not a torch.Tensor, or another dtype (64-bit ones among them).
        ValueError: the tensor is not contiguous.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, got {type(tensor).__name__}")
    _require_dtype("tensor", tensor)
    if not tensor.is_contiguous():
        raise ValueError(
            f"tensor must be contiguous, got strides {list(tensor.stride())} for shape "
            f"{list(tensor.shape)}: call .contiguous() first"
        )
    return jnp.from_dlpack(tensor.detach())


def _require_dtype(name: str, array: jax.Array | torch.Tensor) -> None:
    if checks.dtype_name(array) not in DTYPES:
        raise TypeError(
            f"{name} must be one of {', '.join(DTYPES)}, got {checks.dtype_name(array)}"
        )
