"""The named cases of torch_core.qsa through jaxattn, inside jit: the same bits, the same faults."""

import dataclasses

import pytest
import torch

from tests.jaxattn.qsa import front
from tests.torch_core.qsa import cases, test_faults, test_metadata

PLAIN = cases.Sizes()
CASES = {
    "plain": PLAIN,
    "drafts": cases.Sizes(num_draft=2, budget=8, compress_ratio=2),
    "ratio 8": cases.Sizes(compress_ratio=8, budget=32),
    "bf16": cases.Sizes(dtype="bfloat16"),
    "e4m3": cases.Sizes(
        dtype="bfloat16", kv_dtype="float8_e4m3fn", index_dtype="float8_e4m3fn", num_qo_heads=6
    ),
    "float16": cases.Sizes(dtype="float16", head_dim=64, index_heads=2),
}
STEPS = [[(0, 21), (1, 2)], [(0, 1), (1, 1), (2, 30)], [(2, 5)], [(0, 1), (1, 1), (2, 1)]]
SCALES = dict(sm_scale=0.3, k_scale=0.7, v_scale=1.3)


def served(sizes: cases.Sizes, **options) -> tuple[list[dict], cases.Server]:
    """What a few mixed steps give, and the server after them."""
    tokens = [cases.random_tokens(sizes, 64, seed) for seed in range(3)]
    server = cases.Server(sizes, tokens, **options)
    steps = []
    for takes in STEPS:
        takes = [(r, rows * (1 + sizes.num_draft) if rows == 1 else rows) for r, rows in takes]
        decodes = sum(rows == 1 + sizes.num_draft for _, rows in takes)
        steps.append(server.step(takes, num_decodes=decodes, padding=2))
    return steps, server


@pytest.mark.parametrize("scales", [{}, SCALES], ids=["", "scales"])
@pytest.mark.parametrize("name", CASES)
def test_same_bits(name, scales):
    """Mixed batches with drafts, prefill and padding rows; caches and rings at the end."""
    expected, server = served(CASES[name], **scales)
    with front.through_jax():
        actual, other = served(CASES[name], **scales)
    for step, wanted in zip(actual, expected, strict=True):
        assert step["split"][:4] == wanted["split"][:4]  # traced offsets count padding
        for key in ("selected", "token_indices", "counts", "out", "lse"):
            assert front.same(step[key], wanted[key]), key
        for ours, theirs in zip(step["metadata"], wanted["metadata"], strict=True):
            assert torch.equal(ours, theirs)
    for key in ("ring", "compressed_cache", "key_cache", "value_cache"):
        assert front.same(getattr(other, key), getattr(server, key)), key


FAULTS = [
    (test_faults.test_r50_below_the_budget_sparse_is_dense, {}),
    (test_faults.test_r51_only_the_unfinished_group_is_forced, {}),
    (test_faults.test_r52_extends_shorter_than_the_ratio,
     dict(prefix=3, extend=2, with_long=True)),
    (test_faults.test_r54_ties_take_the_lowest_groups, {}),
    (test_faults.test_r55_rows_with_fewer_groups_than_topk, {}),
    (test_faults.test_r56_pages_of_a_former_request, dict(length=37)),
    (test_faults.test_r56_fork_and_roll_back, {}),
    (test_faults.test_r60_page_sizes_change_nothing, dict(ratio=4)),
    (test_faults.test_r62_mixed_batch_with_poison, dict(fill=float("nan"))),
    (test_faults.test_r67_groups_follow_the_tokens_not_their_positions, {}),
    (test_metadata.test_by_hand, {}),
    (test_metadata.test_pages_that_are_not_there, {}),
    (test_metadata.test_rows_before_the_first_token_are_padding, {}),
]  # fmt: skip


@pytest.mark.parametrize("test, arguments", FAULTS, ids=[test.__name__[5:] for test, _ in FAULTS])
def test_faults_of_others(test, arguments):
    with front.through_jax(test_faults, test_metadata):
        test(**arguments)


def test_prepare_query_to_a_rounding():
    for dtype in ("float32", "bfloat16", "float16"):
        sizes = dataclasses.replace(PLAIN, dtype=dtype)
        projection = cases.random_tokens(sizes, 9)["index_query"]
        weight = torch.linspace(-1, 1, 16).to(projection.dtype)
        cos, sin = cases.qsa.rotary_tables(16, 8, 1e4)
        positions = torch.tensor([0, 1, 15, 3, 7, -1, 2, 2, 9], dtype=torch.int32)
        arguments = (projection, weight, cos, sin, positions)
        expected = cases.qsa.prepare_query(*arguments)
        actual = front.front().prepare_query(*arguments)
        assert actual.dtype == expected.dtype
        unit = torch.finfo(projection.dtype).eps
        torch.testing.assert_close(actual, expected, rtol=2 * unit, atol=2 * unit)
