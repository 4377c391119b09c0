"""Fixtures and options of the whole suite."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jaxtyping
import pytest
import torch

from . import interpreter

jax.config.update("jax_num_cpu_devices", 8)
torch.set_num_threads(2)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined
    if importlib.util.find_spec("triton") is not None:
        interpreter.mend()
# The shape annotations of both packages are enforced where a test asks for it: a test of an error
# message must reach the library's own check.
jaxtyping.config.update("jaxtyping_disable", True)

KERNELS = ("torch_core.qsa.kernels", "torch_core.backends.append")


def _leave_out(finder: Any) -> None:
    """Keeps jaxtyping's import hook away from Triton kernels: it wraps functions, and Triton would
    look for their globals in jaxtyping's own file."""
    find_spec = finder.find_spec
    finder.find_spec = lambda name, *more: (
        None if name.startswith(KERNELS) else find_spec(name, *more)
    )


for _finder in sys.meta_path:
    if "jaxtyping" in type(_finder).__module__:
        _leave_out(_finder)


@pytest.fixture
def enforce_annotations() -> Iterator[None]:
    """Checks every annotated argument and result of both packages."""
    jaxtyping.config.update("jaxtyping_disable", False)
    yield
    jaxtyping.config.update("jaxtyping_disable", True)


@pytest.fixture(params=["kernel", "scatter"])
def append_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How jaxattn.append_kv writes on a GPU: by our kernel, or as without jax-triton."""
    from jaxattn import _device, _triton, kv_cache

    monkeypatch.setattr(kv_cache, "LAUNCHED_ROWS", 0)
    if request.param == "scatter":
        monkeypatch.setattr(_triton, "failure", lambda _: ImportError("left out"))
    elif failure := _triton.failure(_device.environment().capability):
        pytest.skip(str(failure))
    jax.clear_caches()  # of programs traced the other way
    yield request.param
    jax.clear_caches()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, this machine has none")
