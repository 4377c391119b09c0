"""decode and prefill inside jit on every named case."""

import jax
import pytest

import jaxattn
from tests import cases, compare, inputs
from tests.inputs import Case

pytestmark = pytest.mark.usefixtures("enforce_annotations")


@pytest.mark.parametrize("case", cases.DECODE + cases.PREFILL, ids=lambda c: f"{c.phase}-{c}")
def test_equals_oracle(case):
    arguments = case.make()
    out, lse = inputs.run_jax(getattr(jaxattn, case.phase), arguments, return_lse=True)
    compare.check_attention(arguments, out, lse)
    compare.check_attention(arguments, inputs.run_jax(getattr(jaxattn, case.phase), arguments))


@pytest.mark.parametrize("case", [Case("decode", (9, 30)), Case("prefill", (9, 30), q_lens=(2, 3))],
                         ids=str)  # fmt: skip
def test_strict_rank_promotion(case):
    """Models that turn it on can call the library."""
    with jax.numpy_rank_promotion("raise"):
        jax.clear_caches()
        inputs.run_jax(getattr(jaxattn, case.phase), case.make())
    jax.clear_caches()
