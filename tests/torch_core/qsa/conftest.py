"""Kernels run in Triton's interpreter where there is no GPU."""

from collections.abc import Iterator

import pytest
import torch

from tests import interpreter


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Operators this small take longer on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The CPU interpreter and, where there is one, the GPU."""
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU in this process")
    return request.param


@pytest.fixture
def no_races(device: str) -> Iterator[None]:
    """What runs in the interpreter leaves nothing to which of a program's threads comes first."""
    if device == "cuda":
        yield
        return
    with interpreter.races() as found:
        yield
    assert not found
