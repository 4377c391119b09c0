"""Which kernel a call gets on JAX's device."""

import functools
from collections.abc import Sequence
from typing import Any

import torch_core
from torch_core import dispatch
from torch_core.warmup import PHASES, Task, run, tasks

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
def warmup(
    phase: str | Sequence[str] = PHASES,
    *,
    jobs: int | None = None,
    progress: bool = False,
    **limits: Any,
) -> tuple[str, ...]:
    environment = _device.environment()
    # append_kv's kernel is compiled with the program that calls it, for its shapes.
    wanted = tasks(environment, phase, limits, _device.gpus(), append=False)
    if environment.capability:
        wanted.append(Task("adapter", "the C++ adapter of the bridge", _ffi.adapter, None, 10))
    return run(wanted, jobs=jobs, progress=progress)
