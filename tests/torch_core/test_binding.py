"""How a bound kernel is run: what happens around the launch."""

import types

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from torch_core import binding
from torch_core.binding import Binding, Operand
from torch_core.problem import AttentionInputs, describe_decode

QUERY, CACHE = torch.randn(2, 4, 16), torch.randn(3, 8, 2, 16)


def stub(lse: torch.Tensor, **fields):
    """A backend whose kernel writes ones, or 0 where lse is -inf, and this lse in base 2."""

    def kernel(out, lse_out):
        out.fill_(1.0)
        out[lse == -torch.inf] = 0
        lse_out.copy_(lse / np.log(2))

    bound = Binding(
        "stub", kernel, (Operand("out"), Operand("lse")), 0, lse_unit=np.log(2), **fields
    )
    return types.SimpleNamespace(
        bind=lambda *_: bound, scales=lambda *_: dict(out_scale=3.0), operands=lambda *_: {}
    )


def run(lse, sinks, return_lse=True, **fields):
    inputs = AttentionInputs(
        QUERY, CACHE, CACHE, torch.zeros(2, 1, dtype=torch.int32),
        torch.ones(2, dtype=torch.int32), sinks=sinks,
    )  # fmt: skip
    problem, inputs = describe_decode(inputs, return_lse=return_lse)
    out = torch.full((2, 4, 16), torch.nan)
    given = torch.full((2, 4), torch.nan) if return_lse else None
    binding.run(stub(lse, **fields), problem, inputs, out, given, "stub")
    return out, given


def test_scales_and_units():
    """v_scale multiplies the result; lse becomes natural."""
    lse = torch.tensor([[0.5, -2.0, 3.0, -torch.inf], [1.0, 0.0, -1.0, 7.0]])
    out, given = run(lse, None)
    torch.testing.assert_close(given, lse)
    assert (out == torch.where(lse == -torch.inf, 0.0, 3.0)[..., None]).all()


@pytest.mark.parametrize("return_lse", [True, False])
def test_sinks_by_way_of_lse(return_lse):
    """As one more key in the softmax; a row without keys stays 0, beside a sink of -inf too."""
    lse = torch.tensor([[0.5, -2.0, -torch.inf, -torch.inf], [1.0, 0.0, -1.0, 7.0]])
    sinks = torch.tensor([0.7, -torch.inf, 2.0, -torch.inf])
    out, given = run(lse, sinks, return_lse, sinks_after=True)
    share = torch.exp(lse.double()) / (torch.exp(lse.double()) + torch.exp(sinks.double()))
    share = torch.nan_to_num(share)
    torch.testing.assert_close(
        out.double(), (3 * share)[..., None].expand(2, 4, 16), rtol=1e-6, atol=0
    )
    if return_lse:
        total = torch.exp(lse.double()) + torch.exp(sinks.double())
        torch.testing.assert_close(given.double(), total.log(), rtol=1e-6, atol=1e-6)


def test_constants_of_a_fake_mode_are_not_kept():
    """torch.compile traces under one; a later call needs real memory."""
    array = np.arange(5, dtype=np.int32) + 12345
    with FakeTensorMode():
        binding.torch_ops(torch.device("cpu")).constant(array)
    made = binding.torch_ops(torch.device("cpu")).constant(array)
    assert type(made) is torch.Tensor
    assert made.tolist() == array.tolist()
