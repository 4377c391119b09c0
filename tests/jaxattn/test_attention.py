"""decode and prefill inside jit on every named case."""

import pytest

import jaxattn
from tests import cases, compare, inputs

pytestmark = pytest.mark.usefixtures("enforce_annotations")


@pytest.mark.parametrize("case", cases.DECODE + cases.PREFILL, ids=lambda c: f"{c.phase}-{c}")
def test_equals_oracle(case):
    arguments = case.make()
    out, lse = inputs.run_jax(getattr(jaxattn, case.phase), arguments, return_lse=True)
    compare.check_attention(arguments, out, lse)
    compare.check_attention(arguments, inputs.run_jax(getattr(jaxattn, case.phase), arguments))
