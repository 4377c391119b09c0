"""Row metadata: by hand, and the Triton builder against the torch builder."""

import random

import pytest
import torch

from torch_core import qsa
from torch_core.qsa import launch, metadata, plan
from torch_core.qsa.problem import METADATA, QSAProblem

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_by_hand():
    """Two decodes of 2 rows, a chunk that ends a group, a request without rows, a padding row."""
    page_table = int32([[3, -1, -1], [5, 2, -1], [4, 1, -1], [0, 0, 0]])
    built, split = qsa.build_metadata(
        page_table,
        int32([8, 18, 14, 0]),
        int32([0, 2, 4, 9, 9]),
        num_rows=10,
        num_pages=6,
        page_size=8,
        compress_ratio=4,
        max_decode_query_len=2,
    )
    assert built.request_ids.tolist() == [0, 0, 1, 1, 2, 2, 2, 2, 2, -1]
    assert built.positions.tolist() == [6, 7, 16, 17, 9, 10, 11, 12, 13, -1]
    assert built.visible.tolist() == [1, 2, 4, 4, 2, 2, 3, 3, 3, 0]
    # Page 3 holds groups 6 and 7; position 11 ends group 2, the first one of page 1.
    assert built.slots.tolist() == [-1, 7, -1, -1, -1, -1, 2, -1, -1, -1]
    assert split == qsa.Split(
        num_decodes=2,
        decode_query_len=2,
        num_decode_tokens=4,
        num_prefills=2,
        num_prefill_tokens=5,
    )


def test_pages_that_are_not_there():
    """Unmapped and out of range: no slot, nothing read."""
    page_table = int32([[-1], [INT_MIN], [INT_MAX], [2]])
    built, _ = qsa.build_metadata(
        page_table,
        int32([4, 4, 4, 4]),
        int32([0, 1, 2, 3, 4]),
        num_rows=4,
        num_pages=2,
        page_size=16,
        compress_ratio=4,
    )
    assert built.slots.tolist() == [-1] * 4
    assert built.visible.tolist() == [1] * 4


def test_lengths_past_the_page_table():
    """What the CPU's call refuses: no slot, and no more groups than the pages hold."""
    sizes = dict(num_pages=2, page_size=16, compress_ratio=4)
    built = metadata.build(int32([[1]]), int32([20]), int32([0, 1]), num_rows=1, **sizes)
    assert (built.slots.tolist(), built.visible.tolist()) == ([-1], [4])


def test_rows_before_the_first_token_are_padding():
    """A CUDA graph's unused decode slots: one row each, no tokens."""
    built, _ = qsa.build_metadata(
        int32([[1], [2]]),
        int32([0, 5]),
        int32([0, 2, 4]),
        num_rows=4,
        num_pages=3,
        page_size=16,
        compress_ratio=4,
        num_decodes=2,
        decode_query_len=2,
    )
    assert built.request_ids.tolist() == [-1, -1, 1, 1]
    assert built.positions.tolist() == [-1, -1, 3, 4]
    assert built.visible.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "lengths, most, expected",
    [
        ([], 1, (0, 1, 0, 0, 0)),
        ([1, 1, 700, 1], 1, (2, 1, 2, 2, 701)),
        ([3, 3, 8], 4, (2, 3, 6, 1, 8)),
        ([0, 1], 1, (0, 1, 0, 2, 1)),
        ([9], 4, (0, 1, 0, 1, 9)),
    ],
)
def test_split(lengths, most, expected):
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    assert tuple(qsa.split_batch(offsets, most)) == expected


@pytest.mark.parametrize("trial", range(40))
def test_triton_equals_torch(trial, device):
    rng = random.Random(trial)
    generator = torch.Generator().manual_seed(trial)
    num_requests, pages_per_seq = rng.choice([0, 1, 2, 5]), rng.choice([1, 3, 6])
    ratio, page_size, num_pages = rng.choice([2, 4, 8]), rng.choice([16, 32]), 7
    lengths = [rng.choice([0, 1, 2, 3, 5, 17, 40, 150]) for _ in range(num_requests)]
    seq_lens = [n + rng.choice([0, 1, 3, 8, 31]) if rng.random() < 0.9 else 0 for n in lengths]
    page_table = torch.randint(
        -1, num_pages + 1, (num_requests, pages_per_seq), generator=generator, dtype=torch.int32
    )
    if num_requests:
        page_table[0, 0] = rng.choice([INT_MIN, INT_MAX, 3])
        seq_lens[-1] = rng.choice([INT_MIN, INT_MAX, seq_lens[-1], seq_lens[-1]])
    arrays = dict(
        page_table=page_table.to(device),
        seq_lens=int32(seq_lens).to(device),
        cu_seqlens_q=int32([0, *lengths]).cumsum(0).int().to(device),
    )
    num_rows = sum(lengths) + rng.choice([0, 1, 5])
    sizes = dict(compress_ratio=ratio, page_size=page_size, num_pages=num_pages)
    problem = QSAProblem(
        num_rows=num_rows, num_requests=num_requests, pages_per_seq=pages_per_seq, **sizes
    )
    built = launch.run(plan.plan_metadata(problem), arrays)
    wanted = metadata.build(**arrays, num_rows=num_rows, **sizes)
    for name in METADATA:
        expected = getattr(wanted, name)
        assert expected.dtype == torch.int32
        assert torch.equal(built[name], expected), name


@pytest.mark.gpu
def test_gpu_call_equals_cpu_call():
    arrays = (int32([[1, 2], [3, 4], [5, 6]]), int32([20, 7, 30]), int32([0, 2, 4, 30]))
    sizes = dict(num_rows=33, num_pages=7, page_size=16, compress_ratio=4)
    counts = dict(num_decodes=2, decode_query_len=2)
    wanted, wanted_split = qsa.build_metadata(*arrays, **sizes, **counts)
    built, split = qsa.build_metadata(*(x.cuda() for x in arrays), **sizes, **counts)
    for name in METADATA:
        assert torch.equal(getattr(built, name).cpu(), getattr(wanted, name))
    assert split[:3] == wanted_split[:3] and split.num_prefills == 1


@pytest.mark.gpu
def test_rows_past_65535():
    """70,000 decoding requests, and a prompt of as many rows."""
    lengths = int32([1] * 70_000 + [70_000])
    page_table = torch.arange(70_001 * 70, dtype=torch.int32).view(70_001, 70)
    arrays = dict(
        page_table=page_table.cuda(),
        seq_lens=torch.where(lengths == 1, torch.arange(70_001) % 5000, 70_000).int().cuda(),
        cu_seqlens_q=torch.cat((int32([0]), lengths.cumsum(0).int())).cuda(),
    )
    sizes = dict(compress_ratio=4, page_size=1024, num_pages=page_table.numel())
    problem = QSAProblem(
        num_rows=140_003,
        num_requests=70_001,
        pages_per_seq=70,
        num_decodes=70_000,
        **sizes,
    )
    built = launch.run(plan.plan_metadata(problem), arrays)
    wanted = metadata.build(**arrays, num_rows=140_003, **sizes)
    for name in METADATA:
        assert torch.equal(built[name], getattr(wanted, name)), name
