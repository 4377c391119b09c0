"""The reference: by hand, and on identities."""

import numpy as np
import pytest
import torch

from tests import oracle
from tests.torch_core.qsa import cases
from torch_core import qsa
from torch_core.qsa import reference


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows_at(positions, request_ids=None, seq_len=None) -> qsa.Metadata:
    """Metadata of rows at these positions; slots are of no use to a reader."""
    positions = int32(positions)
    requests = torch.zeros_like(positions) if request_ids is None else int32(request_ids)
    return qsa.Metadata(requests, positions, (positions + 1) // 4, torch.full_like(positions, -1))


def scored(scores: list[float], page_size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """A compressed cache whose group g scores scores[g] for the query that `ask` makes, and its
    page table."""
    groups = page_size // 4
    num_pages = -(-len(scores) // groups)
    cache = torch.full((num_pages, groups, 1, 16), float("nan"))
    cache.view(-1, 16)[: len(scores)] = 0
    cache.view(-1, 16)[: len(scores), 3] = torch.tensor(scores)
    return cache, torch.arange(num_pages, dtype=torch.int32)[None]


def ask(num_rows: int) -> torch.Tensor:
    query = torch.zeros(num_rows, 1, 16)
    query[:, 0, 3] = 1
    return query


def chosen(scores: list[float], positions: list[int], budget: int) -> list[list[int]]:
    cache, page_table = scored(scores)
    return qsa.select(
        ask(len(positions)),
        cache,
        page_table,
        rows_at(positions),
        budget=budget,
        compress_ratio=4,
    ).tolist()


def test_select_by_hand():
    """Negative products count 0, and of equal scores the lowest group wins."""
    scores = [-3.0, 0.0, 2.0, 2.0, 2.0, 0.0, 5.0]
    assert chosen(scores, [27], 8) == [[2, 6]]
    assert chosen(scores, [27], 12) == [[2, 3, 6]]
    assert chosen(scores, [27], 20) == [[0, 2, 3, 4, 6]]
    assert chosen(scores, [27], 28) == [[0, 1, 2, 3, 4, 5, 6]]
    assert chosen(scores, [26, 2, 3, 6, 7], 8) == [[2, 3], [-1, -1], [0, -1], [0, -1], [0, 1]]


def test_heads_add_after_relu():
    cache, page_table = scored([0.0, 0.0])
    cache[0, 0, 0, :2] = torch.tensor([3.0, -2.0])  # relu 3 + 0
    cache[0, 1, 0, :2] = torch.tensor([1.0, 1.0])  # 1 + 1
    query = torch.zeros(1, 2, 16)
    query[0, 0, 0] = query[0, 1, 1] = 1
    picked = qsa.select(query, cache, page_table, rows_at([7]), budget=4, compress_ratio=4)
    assert picked.tolist() == [[0]]
    assert reference.score(query, cache[0, :2, 0]).tolist() == [[3.0, 2.0]]


def test_expand_by_hand():
    selected = int32([[1, 3, -1], [0, -1, -1], [-1, -1, -1], [-1, -1, -1], [0, 2, 4]])
    token_indices, counts = qsa.expand(selected, rows_at([17, 4, 2, -1, 19]), compress_ratio=4)
    assert token_indices.tolist() == [
        [4, 5, 6, 7, 12, 13, 14, 15, 16, 17, -1, -1, -1, -1, -1],
        [0, 1, 2, 3, 4, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1],
        [0, 1, 2, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1],
        [-1] * 15,
        [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, -1, -1, -1],
    ]
    assert counts.tolist() == [10, 5, 3, 0, 12]


def test_attend_by_hand():
    """Two tokens of scores 0 and ln 3 weigh 1/4 and 3/4; the second page is not mapped."""
    key_cache = torch.full((2, 16, 1, 8), float("nan"))
    value_cache = torch.full((2, 16, 1, 8), float("nan"))
    key_cache[1, 0], value_cache[1, 0] = 0, 4
    key_cache[1, 5], value_cache[1, 5] = torch.log(torch.tensor(3.0)) / 8, 8
    arguments = dict(
        key_cache=key_cache,
        value_cache=value_cache,
        page_table=int32([[1, -1]]),
        metadata=rows_at([20, 20, -1], [0, 0, -1]),
        token_indices=int32(
            [
                [5, 0, 20, 40, -(2**31), 2**31 - 1, -1],
                [16, 17, 0, 5, 1, 2, 3],
                [0, 5, -1, -1, -1, -1, -1],
            ]
        ),
        counts=int32([6, 2, 2]),
        compress_ratio=4,
        sm_scale=1.0,
        return_lse=True,
    )
    out, lse = qsa.attend(torch.ones(3, 2, 8), **arguments)
    torch.testing.assert_close(out[0], torch.full((2, 8), 7.0))
    torch.testing.assert_close(lse[0], torch.full((2,), 4.0).log())
    assert (out[1:] == 0).all() and (lse[1:] == -torch.inf).all()
    gated = qsa.attend(torch.ones(3, 2, 8), **arguments, gate=torch.zeros(3, 2, 8))[0]
    torch.testing.assert_close(gated, out / 2)
    scaled, lse = qsa.attend(torch.ones(3, 2, 8), **arguments, k_scale=2, v_scale=0.5)
    torch.testing.assert_close(scaled[0], torch.full((2, 8), (4 + 8 * 9) / 10 / 2))
    torch.testing.assert_close(lse[0], torch.full((2,), 10.0).log())


def test_output_shows_the_mask():
    """With a query of 0 and one-hot values each selected token weighs 1 / count."""
    sizes = cases.Sizes(num_qo_heads=1, num_kv_heads=1, head_dim=64, pages_per_seq=4)
    tokens = cases.random_tokens(sizes, 64)
    tokens["query"] = torch.zeros_like(tokens["query"])
    tokens["value"] = torch.eye(64)[:, None]
    tokens["gate"] = torch.full_like(tokens["gate"], 100.0)  # sigmoid 1
    result = cases.run(cases.Server(sizes, [tokens]), 0, [13, 40, 11])
    for row, picked in enumerate(cases.sets(result["token_indices"], result["counts"])):
        expected = torch.zeros(64)
        expected[sorted(picked)] = 1 / len(picked)
        torch.testing.assert_close(result["out"][row, 0], expected)
        assert len(picked) == min(row + 1, sizes.budget + (row + 1) % 4)


@pytest.mark.parametrize("kv_dtype", ["float32", "float8_e4m3fn"])
def test_full_selection_equals_dense_attention(kv_dtype):
    sizes = cases.Sizes(budget=128, kv_dtype=kv_dtype)
    tokens = cases.random_tokens(sizes, 100)
    scales = dict(k_scale=0.5, v_scale=0.25) if kv_dtype != "float32" else {}
    server = cases.Server(sizes, [tokens], fill=0.0, **scales)
    result = cases.run(server, 0, [100])
    out, lse = oracle.attention(
        tokens["query"].numpy(),
        server.key_cache.float().numpy(),
        server.value_cache.float().numpy(),
        server.page_table.numpy(),
        np.array([100]),
        np.array([0, 100]),
        **scales,
    )
    gated = out / (1 + np.exp(-tokens["gate"].numpy().astype(np.float64)))
    np.testing.assert_allclose(result["out"].numpy(), gated, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result["lse"].numpy(), lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_place_in_batch_and_pages_does_not_matter(dtype):
    """The same request alone, and third in a batch on other pages: equal bits."""
    sizes = cases.Sizes(dtype=dtype)
    tokens = [cases.random_tokens(sizes, 90, seed) for seed in range(3)]
    alone = cases.run(cases.Server(sizes, [tokens[2]], seed=7), 0, [50, 1, 1, 20])
    server = cases.Server(sizes, tokens)
    batched = []
    for take, others in ((50, 3), (1, 1), (1, 2), (20, 40)):
        step = server.step([(1, others), (0, others + 1), (2, take)], padding=2)
        rows = step["rows"][2]
        batched.append({name: step[name][rows] for name in ("selected", "token_indices", "out")})
    for name in ("selected", "token_indices"):
        assert torch.equal(torch.cat([piece[name] for piece in batched]), alone[name])
    torch.testing.assert_close(torch.cat([piece["out"] for piece in batched]), alone["out"])


def test_prepared_queries_by_hand():
    projection = torch.tensor([[[3.0, 4.0, 0.0, 0.0]], [[0.0, 0.0, 0.0, 0.0]]])
    cos, sin = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])
    weight = torch.tensor([1.0, 0.0, 0.0, 0.0])
    query = qsa.prepare_query(projection, weight, cos, sin, int32([1, -1]), eps=0.0 + 1e-12)
    # rms 2.5: [2.4, 1.6, 0, 0], rotated by 90 degrees.
    torch.testing.assert_close(query[0, 0], torch.tensor([-1.6, 2.4, 0.0, 0.0]))
    assert (query[1] == 0).all()


def test_rotary_tables():
    cos, sin = qsa.rotary_tables(3, 4, 100.0)
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]])
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


@pytest.mark.parametrize("budget, ratio", [(16, 2), (64, 4), (48, 8)])
def test_float64_oracle(budget, ratio):
    """One step against plain NumPy, row by row."""
    sizes = cases.Sizes(compress_ratio=ratio, budget=budget, pages_per_seq=16)
    tokens = cases.random_tokens(sizes, 200)
    server = cases.Server(sizes, [tokens])
    result = cases.run(server, 0, [77, 123])
    keys = server.keys(0).double().numpy()
    arrays = {name: x.double().numpy() for name, x in tokens.items()}
    picked_sets = cases.sets(result["token_indices"], result["counts"])
    for row in range(0, 200, 7):
        visible = (row + 1) // ratio
        products = np.maximum(arrays["index_query"][row] @ keys[:visible].T, 0).sum(0)
        order = np.argsort(-products.astype(np.float32), kind="stable")[: sizes.topk]
        picked = {group * ratio + i for group in order.tolist() for i in range(ratio)}
        picked |= set(range(visible * ratio, row + 1))
        assert picked_sets[row] == picked
        at = sorted(picked)
        for head in range(sizes.num_qo_heads):
            kv_head = head // (sizes.num_qo_heads // sizes.num_kv_heads)
            scores = arrays["key"][at, kv_head] @ arrays["query"][row, head] / sizes.head_dim**0.5
            weights = np.exp(scores - scores.max())
            out = weights @ arrays["value"][at, kv_head] / weights.sum()
            out /= 1 + np.exp(-arrays["gate"][row, head])
            np.testing.assert_allclose(result["out"][row, head].numpy(), out, rtol=1e-4, atol=1e-5)
            total = np.log(weights.sum()) + scores.max()
            np.testing.assert_allclose(result["lse"][row, head].item(), total, rtol=1e-5, atol=1e-5)
