"""XQA's operands of a decode with drafts, read as upstream's kernel reads them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxattn import _launch
from tests import oracle
from tests.inputs import Case
from torch_core import binding, problem
from torch_core.backends import xqa

LENGTHS = (3, 0, 17, 4, 1, 30)
NAMES = ("seq_lens", "page_table", "cu_seqlens_q", "draft_mask")


def operands(q_len: int, mask: str | None) -> tuple[dict, dict]:
    arguments = Case("drafts", LENGTHS, q_len=q_len, draft_mask=mask, page_size=8).make()
    tensors = {
        name: torch.from_numpy(arguments[name])
        for name in problem.AttentionInputs._fields
        if isinstance(arguments.get(name), np.ndarray)
    }
    described, inputs = problem.describe_decode(problem.AttentionInputs(**tensors), q_len=q_len)
    ops = binding.torch_ops(torch.device("cpu"))
    made = xqa.operands(described, inputs, {}, ops, 132, "xqa")
    return arguments, {name: x.numpy() for name, x in made.items() if isinstance(x, torch.Tensor)}


@pytest.mark.parametrize("mask", [None, "bool", "packed"])
@pytest.mark.parametrize("q_len", [4, 40])
def test_each_row_sees_its_keys_and_nothing_past_the_length(q_len, mask):
    """A request shorter than the block too: its first rows belong to a request without keys, as
    nothing says that the slots past its length hold numbers."""
    arguments, made = operands(q_len, mask)
    draft_mask = arguments.get("draft_mask")
    if draft_mask is None:
        draft_mask = np.broadcast_to(np.tri(q_len, dtype=bool), (len(LENGTHS), q_len, q_len))
    elif mask == "packed":
        draft_mask = oracle.unpack(draft_mask, q_len)
    ends, lengths = made["cu_seqlens_q"], made["seq_lens"]
    words = made["draft_mask"].astype(int).reshape(len(LENGTHS) * q_len, -1)
    rows = []
    for request, (first, last) in enumerate(itertools.pairwise(ends)):
        length, count = lengths[request], last - first
        assert length == 0 or length >= count  # upstream counts from length - count, unsigned
        assert (made["page_table"][request] == arguments["page_table"][request // 2]).all()
        for row in range(first, last):
            bits = [words[row][column // 16] >> column % 16 & 1 for column in range(count)]
            drafts = [length - count + column for column in range(count) if bits[column]]
            seen = [] if length == 0 else [*range(length - count), *drafts]
            rows.append((row, request // 2, seen))
    expected = []
    for row in range(len(LENGTHS) * q_len):
        request, draft = divmod(row, q_len)
        start = LENGTHS[request] - q_len
        seen = [*range(start), *(start + c for c in range(q_len) if draft_mask[request][draft][c])]
        expected.append((row, request, [key for key in seen if key >= 0 <= start + draft]))
    assert rows == expected


@pytest.mark.parametrize("q_len", [4, 40])
def test_a_packed_mask_gives_the_operands_of_the_same_bits(q_len):
    """From jax too, whose arrays are traced."""
    arguments, made = operands(q_len, "packed")
    calls = [arguments, arguments | dict(draft_mask=oracle.unpack(arguments["draft_mask"], q_len))]
    for call in calls:
        for name, array in traced(q_len, call).items():
            assert np.array_equal(array, made[name]), name


def traced(q_len: int, arguments: dict) -> dict:
    """The operands of drafts as JAX makes them."""
    arrays = {name: jnp.asarray(v) for name, v in arguments.items() if isinstance(v, np.ndarray)}

    @jax.jit
    def make(arrays):
        described, inputs = problem.describe_decode(problem.AttentionInputs(**arrays), q_len=q_len)
        made = xqa.operands(described, inputs, {}, _launch._OPS, 132, "xqa")
        return {name: made[name] for name in NAMES}

    return jax.tree.map(np.asarray, make(arrays))
