"""Building a FlashInfer module at first use: what is built is said, and a failure is readable."""

import functools
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

logger = logging.getLogger("torch_core")


class Source(NamedTuple):
    """A FlashInfer module: its JIT spec, its name for people, and how long nvcc takes for it on 16
    cores."""

    spec: Any
    label: str
    seconds: int


def load(spec: Any, label: str, seconds: int) -> Any:
    """The module of a JIT spec, from disk or built with nvcc in about `seconds` on 16 cores."""
    if not spec.is_compiled:
        logger.warning(
            "building %s with nvcc: about %d s on 16 cores, once for this machine "
            "(torch_core.warmup builds ahead)",
            label,
            seconds,
        )
    return _readable(label, spec.build_and_load)


def make(spec: Any, label: str, seconds: int) -> None:
    """Builds a module without loading it: that needs no GPU."""
    _readable(label, functools.partial(spec.build, need_lock=True))


def _readable(label: str, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        raise RuntimeError(
            f"torch_core could not build {label}: {_reason(error)}. It needs nvcc of the CUDA "
            "toolkit and ninja, or prebuilt kernels (flashinfer-jit-cache, of FlashInfer's index)"
        ) from error


class PerDevice:
    """A function of a module that every GPU loads for itself, on its first use there.

    XQA sets up its kernel while it is loaded, for the current device only. So where a process has
    several GPUs, each gets a copy of the library, which starts with initial values of its own."""

    def __init__(self, source: Source, function: str) -> None:
        self._module = functools.partial(load, *source)
        self._spec = source.spec
        self._function = function
        self.on = functools.cache(self._on)

    def _on(self, device: int) -> Any:
        """The function for a GPU."""
        with torch.cuda.device(device):
            module = self._module()
            if torch.cuda.device_count() > 1:
                # What is loaded stays when its file is gone.
                with tempfile.TemporaryDirectory() as folder:
                    module = self._spec.load(
                        Path(shutil.copy(self._spec.get_library_path(), folder))
                    )
            return getattr(module, self._function)


def on_device(function: Any, device: int) -> Any:
    """What to call for a GPU."""
    return function.on(device) if isinstance(function, PerDevice) else function


def _reason(error: Exception) -> str:
    """The lines of a build log that say why, or its last one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "error:" in line or "not found" in line]
    return "; ".join(causes[:3] or lines[-1:] or [type(error).__name__])
