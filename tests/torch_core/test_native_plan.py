"""The work lists of FlashInfer's native kernels, read as upstream's kernels read them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxattn import _launch
from torch_core import binding
from torch_core.backends import native, native_plan
from torch_core.problem import AttentionInputs, DecodeProblem, PrefillProblem

SM_COUNT = 132
PAGE_SIZE = 16


def problem(q_lens, seq_lens, *, padding=0, decode=False, **changes):
    pages = math.ceil(max([1, *seq_lens]) / PAGE_SIZE) + 1
    shape = dict(
        query_dtype="bfloat16",
        kv_dtype="bfloat16",
        batch=len(seq_lens),
        num_rows=sum(q_lens) + padding,
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim=128,
        num_pages=100,
        page_size=PAGE_SIZE,
        pages_per_seq=pages,
    )
    if decode:
        return DecodeProblem(**(shape | changes))
    return PrefillProblem(**(shape | dict(max_seqlen_q=max([0, *q_lens])) | changes))


def plan_of(call, q_lens, seq_lens, kernel, sm_count=SM_COUNT):
    """The plan through torch; through JAX it must be the same."""
    offsets = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    lengths = dict(seq_lens=np.array(seq_lens, np.int32), cu_seqlens_q=offsets)
    none = [None] * 4
    on_torch = AttentionInputs(*none, **{n: torch.from_numpy(x) for n, x in lengths.items()})
    on_jax = AttentionInputs(*none, **{n: jnp.asarray(x) for n, x in lengths.items()})
    ops = binding.torch_ops(torch.device("cpu"))
    plan = native.make_plan(call, on_torch, ops, sm_count, kernel)
    with jax.numpy_rank_promotion("raise"):
        other = native.make_plan(call, on_jax, _launch._OPS, sm_count, kernel)
    assert plan.dtype == torch.int32
    assert plan.shape == (native.plan_size(call, sm_count, kernel),)
    np.testing.assert_array_equal(plan.numpy(), np.asarray(other))
    return plan.numpy()


def seen_keys(call, q_lens, seq_lens):
    """For each row the set of keys it sees, by hand."""
    rows = []
    for count, keys in zip(q_lens, seq_lens, strict=True):
        for i in range(count):
            position = keys - count + i
            last = position if call.causal else keys - 1
            first = 0 if call.window_left < 0 else max(0, position - call.window_left)
            rows.append(set(range(first, last + 1)))
    return rows + [set()] * (call.num_rows - len(rows))


LENGTHS = {
    "one": ([5], [5]),
    "prefix": ([100, 17, 3, 1], [300, 17, 140, 700]),
    "empty": ([0, 4, 0, 129], [0, 0, 7, 129]),
    "blind": ([8, 12, 300], [3, 8, 1]),
    "long": ([150, 1, 90], [400, 1, 90]),
    "many": ([3] * 20, [50] * 20),
    "none": ([], []),
}
CHANGES = [dict(), dict(causal=False), dict(window_left=20), dict(head_dim=64), dict(padding=200)]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("sm_count", [132, 4])
def test_hopper(name, changes, sm_count):
    """Every row and head is worked on once, with the keys of its request."""
    q_lens, seq_lens = LENGTHS[name]
    call = problem(q_lens, seq_lens, **changes)
    plan = plan_of(call, q_lens, seq_lens, "native_prefill_fa3", sm_count)
    layout = native_plan.hopper(call, sm_count)
    *offsets, same = layout.info
    tile, begin, page, rows, keys, head, indptr, batch = (plan[at // 4 :] for at in offsets)
    expected = seen_keys(call, q_lens, seq_lens)
    owner = np.repeat(np.arange(len(q_lens)), q_lens)
    done = np.zeros((call.num_rows, call.num_qo_heads), int)
    costs = []
    for block in range(sm_count):
        cost = 0
        for at in range(indptr[block], indptr[block + 1]):
            assert batch[at] == 0
            first, last = tile[at] * layout.rows, min((tile[at] + 1) * layout.rows, rows[at])
            for i in range(first, last):
                row = begin[at] + i
                heads = range(call.num_qo_heads) if same else [head[at]]
                done[row, list(heads)] += 1
                position = keys[at] - rows[at] + i
                if not expected[row]:
                    assert keys[at] == 0
                    continue
                assert keys[at] == seq_lens[owner[row]]
                assert page[at] == owner[row] * call.pages_per_seq
                assert (position if call.causal else keys[at] - 1) == max(expected[row])
            if first < last:
                limit = keys[at] - rows[at] + (tile[at] + 1) * layout.rows
                cost += max(0, min(limit, keys[at])) if call.causal else keys[at]
        costs.append(cost)
    assert (done == 1).all()
    if call.window_left < 0 and len(q_lens):
        # No list is longer than the mean by more than a tile.
        assert max(costs) <= np.mean(costs) + max(seq_lens)


@pytest.mark.parametrize("changes", [*CHANGES, dict(batch_invariant=True)], ids=str)
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("sm_count", [132, 8])
def test_tiled(name, changes, sm_count):
    q_lens, seq_lens = LENGTHS[name]
    call = problem(q_lens, seq_lens, **changes)
    check_tiled(call, q_lens, seq_lens, sm_count, "native_prefill_fa2")


@pytest.mark.parametrize("changes", [dict(), dict(window_left=20), dict(num_kv_heads=8)], ids=str)
@pytest.mark.parametrize("seq_lens", [[7], [0, 3000, 128, 1], [9000] * 3, [200] * 150], ids=len)
@pytest.mark.parametrize("sm_count", [132, 8])
def test_tiled_decode(seq_lens, changes, sm_count):
    q_lens = [1] * len(seq_lens)
    call = problem(q_lens, seq_lens, decode=True, **changes)
    check_tiled(call, q_lens, seq_lens, sm_count, "native_decode")


def check_tiled(call, q_lens, seq_lens, sm_count, kernel):
    """Every row meets each key it sees once, and its splits are merged."""
    plan = plan_of(call, q_lens, seq_lens, kernel, sm_count)
    layout = native_plan.tiled(call, sm_count)

    def part(name):
        place = layout.parts[name]
        return plan[place.start : place.start + place.length]

    works, num_rows, *_, split = layout.info
    q_indptr, kv_indptr = part("q_indptr"), part("kv_indptr")
    valid = part("valid").view(np.uint8)[:works].astype(bool)
    chunk_keys = part("chunk_keys")[0]
    group = call.num_qo_heads // call.num_kv_heads
    results: list[list[set]] = [[] for _ in range(call.num_rows)]
    slots = {}
    for at in np.flatnonzero(valid):
        request = part("request")[at]
        pages = kv_indptr[request + 1] - kv_indptr[request]
        keys = (pages - 1) * call.page_size + part("last_page_len")[request] if pages else 0
        count = q_indptr[request + 1] - q_indptr[request]
        begin = part("tile")[at] * layout.rows
        start = max(0, keys + begin // group - count - call.window_left) * (call.window_left >= 0)
        chunk = part("chunk")[at]
        size = chunk_keys if split else keys
        first, last = min(start + chunk * size, keys), min(start + (chunk + 1) * size, keys)
        if not split:
            assert chunk == 0
            first, last = start, keys
        for packed in range(begin, min(begin + layout.rows, count * group), group):
            i = packed // group
            if (i * group) < begin:
                continue
            row = q_indptr[request] + i
            position = keys - count + i
            visible = {
                key
                for key in range(first, last)
                if (key <= position or not call.causal)
                and (call.window_left < 0 or key >= position - call.window_left)
            }
            results[row].append(visible)
            place = part("o_indptr")[request] + (i * _splits(part, request) + chunk if split else i)
            assert slots.setdefault(place, row) == row
    expected = seen_keys(call, q_lens, seq_lens)
    for row in range(call.num_rows):
        assert results[row], row
        assert sum(map(len, results[row])) == len(expected[row])
        assert set().union(*results[row]) == expected[row]
        if split:
            merge = part("merge")
            assert [slots[at] for at in range(merge[row], merge[row + 1])] == [row] * len(
                results[row]
            )
    assert num_rows == call.num_rows


def _splits(part, request):
    rows = part("q_indptr")[request + 1] - part("q_indptr")[request]
    partial = part("o_indptr")[request + 1] - part("o_indptr")[request]
    return partial // rows


def test_splits_fill_the_device():
    """One long request is cut into about as many pieces as there are blocks."""
    call = problem([1], [100_000], decode=True)
    plan = plan_of(call, [1], [100_000], "native_decode")
    layout = native_plan.tiled(call, SM_COUNT)
    place = layout.parts["valid"]
    used = plan[place.start : place.start + place.length].view(np.uint8).sum()
    assert layout.works * 0.8 <= used <= layout.works


def test_batch_invariance():
    """Neither splits nor tiles depend on the other requests."""
    small, large = (
        native_plan.tiled(
            dataclasses.replace(problem([n] * b, [n] * b), batch_invariant=True), SM_COUNT
        )
        for n, b in ((2, 1), (500, 30))
    )
    assert (small.rows, small.split) == (large.rows, large.split)
