"""Which kernel a call gets on JAX's device."""

import functools
from typing import Any

import torch_core
from torch_core import dispatch
from torch_core.warmup import build

from . import _device, _ffi


@functools.wraps(dispatch.explain)
def explain(phase: str, *, capability: int | None = None, **arguments: Any) -> dispatch.Explanation:
    capability = _device.environment().capability if capability is None else capability
    return dispatch.explain(phase, capability=capability, **arguments)


@functools.wraps(dispatch.supported)
def supported(phase: str, *, capability: int | None = None, **arguments: Any) -> bool:
    capability = _device.environment().capability if capability is None else capability
    return dispatch.supported(phase, capability=capability, **arguments)


@functools.wraps(torch_core.warmup)
def warmup(phase: str, **arguments: Any) -> str:
    environment = _device.environment()
    if environment.capability:
        _ffi.adapter()
    return build(environment, _device.multiprocessors(), _device.gpus(), phase, **arguments)
