"""Fixtures and options of the whole suite."""

import jax
import pytest
import torch

jax.config.update("jax_num_cpu_devices", 2)
torch.set_num_threads(2)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, this machine has none")
