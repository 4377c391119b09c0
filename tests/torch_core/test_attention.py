"""decode and prefill on every named case, against the float64 oracle."""

import numpy as np
import psutil
import pytest
import torch

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


def test_memory_grows_with_the_lengths_not_with_the_pool():
    """A pool of 2 GB, of which short requests use a little; torch's threads stay as they are."""
    pool = torch.zeros(65536, 16, 4, 64, dtype=torch.float16)  # untouched pages are not resident
    page_table = torch.arange(4 * 4, dtype=torch.int32).view(4, 4) * 4000
    seq_lens = torch.tensor([50, 64, 3, 0], dtype=torch.int32)
    query, threads = torch.randn(4, 8, 64).half(), torch.get_num_threads()
    process = psutil.Process()
    before = process.memory_info().rss
    out = torch_core.decode(query, pool, pool, page_table, seq_lens)
    offsets = torch.arange(5, dtype=torch.int32)
    torch_core.prefill(query, pool, pool, page_table, seq_lens, offsets, max_seqlen_q=1)
    assert process.memory_info().rss - before < 2**27
    assert not out.any()
    assert torch.get_num_threads() == threads
