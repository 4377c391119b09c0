"""What is known of the target device while tracing."""

import functools
from typing import Any

import jax

from torch_core import dispatch


def _device() -> Any:
    """The device that JAX puts a call on which says nothing else: `jax.default_device`, or the
    first one."""
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if chosen is None or isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return chosen


@functools.cache
def _capability(device: Any) -> int:
    if device.platform != "gpu":
        return 0
    major, minor = map(int, device.compute_capability.split("."))
    return major * 10 + minor


def count() -> int:
    """Devices of JAX's default platform, those of other processes included."""
    return jax.device_count(_device().client.platform)


def gpus() -> tuple[int, ...]:
    """Ordinals of this process's GPUs, as CUDA and torch count them."""
    devices = jax.local_devices(backend=_device().client.platform)
    return tuple(device.local_hardware_id for device in devices)


def platform() -> str:
    """What `_ffi` calls JAX's default platform."""
    return "gpu" if environment().capability else "cpu"


def multiprocessors() -> int:
    """Multiprocessors of JAX's default device, 0 without a GPU."""
    device = _device()
    return device.core_count if device.platform == "gpu" else 0


def environment() -> dispatch.Environment:
    """The environment of JAX's default device."""
    return dispatch.environment(_capability(_device()))
