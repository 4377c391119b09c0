"""Fixtures and options of the whole suite."""

from collections.abc import Iterator

import jax
import jaxtyping
import pytest
import torch

jax.config.update("jax_num_cpu_devices", 2)
torch.set_num_threads(2)
# The shape annotations of both packages are enforced where a test asks for it: a test of an error
# message must reach the library's own check.
jaxtyping.config.update("jaxtyping_disable", True)


@pytest.fixture
def enforce_annotations() -> Iterator[None]:
    """Checks every annotated argument and result of both packages."""
    jaxtyping.config.update("jaxtyping_disable", False)
    yield
    jaxtyping.config.update("jaxtyping_disable", True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, this machine has none")
