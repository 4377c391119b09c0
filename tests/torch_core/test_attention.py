"""decode and prefill on every named case, against the float64 oracle."""

import numpy as np
import pytest

import torch_core
from tests import cases, compare, inputs, oracle
from torch_core import reference

pytestmark = pytest.mark.usefixtures("enforce_annotations")


@pytest.mark.parametrize("case", cases.DECODE + cases.PREFILL, ids=lambda c: f"{c.phase}-{c}")
def test_equals_oracle(case):
    arguments = case.make()
    function = getattr(torch_core, case.phase)
    out, lse = inputs.run_torch(function, arguments, return_lse=True)
    compare.check_attention(arguments, out, lse)
    compare.check_attention(arguments, inputs.run_torch(function, arguments))


@pytest.mark.parametrize("case", cases.DECODE + cases.PREFILL, ids=lambda c: f"{c.phase}-{c}")
def test_reference_in_float64_equals_oracle(case):
    arguments = case.make()
    tensors = {name: inputs.to_torch(value) for name, value in arguments.items()}
    out, lse = reference.evaluate(case.phase, **tensors)
    for actual, exact in zip((out, lse), oracle.attention(**arguments), strict=True):
        np.testing.assert_allclose(actual.numpy(), exact, rtol=1e-12, atol=1e-13)
