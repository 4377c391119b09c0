"""The search that top-k is made of, on keys that are hard for it."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from torch_core.qsa.kernels.primitives import MANY, as_score, find_bound, key_range, sortable


@triton.jit
def search(
    keys_ptr, first_bits_ptr, found_ptr, N: tl.constexpr, WIDTH: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    keys = tl.reshape(tl.load(keys_ptr + tl.arange(0, N)), [N // WIDTH, WIDTH])
    low, high = key_range(keys)
    first_bits = tl.load(first_bits_ptr)
    bound, ties, count = find_bound(keys, low, high, first_bits, LEAST, MOST)
    tl.store(found_ptr, bound)
    tl.store(found_ptr + 1, ties)
    tl.store(found_ptr + 2, count)


@triton.jit
def round_trip(scores_ptr, keys_ptr, back_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    keys = sortable(tl.load(scores_ptr + i))
    tl.store(keys_ptr + i, keys)
    tl.store(back_ptr + i, as_score(keys))


def draw(kind: str, size: int, random: np.random.Generator) -> np.ndarray:
    """Keys above -2**31, of finite and infinite scores."""
    low, high = -0x7F800000, 0x7F800000
    if kind == "equal":
        return np.full(size, random.integers(low, high, endpoint=True))
    if kind == "spread":
        return random.integers(low, high, size, endpoint=True)
    if kind == "ends":
        return random.choice([low, low + 1, 0, high - 1, high], size)
    if kind == "near":
        return random.integers(low, high - 40) + random.integers(0, 40, size)
    if kind == "doubling":
        return low + 2 ** random.integers(0, 32, size) - 1
    if kind == "half at the lowest":
        return np.where(random.random(size) < 0.5, 7, random.integers(7, 9 + size // 4, size))
    scores = np.maximum(random.standard_normal((size, 4)), 0).sum(1).astype(np.float32)
    return scores.view(np.int32).astype(np.int64)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(("size", "least", "most"), [(64, 8, 8), (256, 32, 56), (1024, 512, 1024)])
@pytest.mark.parametrize(
    "kind", ["equal", "spread", "ends", "near", "doubling", "half at the lowest", "scores"]
)
def test_kept_keys(kind, size, least, most, width, device):
    """What the bound keeps holds the highest keys, of equal ones the first, and is few enough."""
    random = np.random.default_rng(size + width)
    for absent in (0.0, 0.3, 0.97):
        keys = draw(kind, size, random).astype(np.int32)
        keys[random.random(size) < absent] = -(2**31)
        found = torch.zeros(3, dtype=torch.int32, device=device)
        for first_bits in (MANY.value, *random.integers(0, 31, 2)):
            search[(1,)](
                torch.from_numpy(keys).to(device),
                torch.tensor([first_bits], dtype=torch.int32, device=device),
                found, N=size, WIDTH=width, LEAST=least, MOST=most,
            )  # fmt: skip
            bound, ties, count = found.tolist()
            above, level = np.flatnonzero(keys > bound), np.flatnonzero(keys == bound)
            level = level if ties == MANY.value else level[:ties]
            kept = np.concatenate([above, level])
            order = np.argsort(-keys.astype(np.int64), kind="stable")
            present = int((keys > -(2**31)).sum())
            assert len(kept) == count if present else count == 0
            assert min(least, present) <= count <= most
            assert set(order[: min(least, present)]) <= set(kept)


def test_keys_are_in_the_order_of_scores(device):
    tiny = np.float32(1e-45)
    largest = np.finfo(np.float32).max
    ordered = np.float32([-largest, -1.5, -tiny, -0.0, 0.0, tiny, 1.5, np.inf])
    scores = np.concatenate([ordered, np.float32([np.nan, -np.inf] * 4)])
    keys = torch.zeros(16, dtype=torch.int32, device=device)
    back = torch.zeros(16, device=device)
    round_trip[(1,)](torch.from_numpy(scores).to(device), keys, back, N=16)
    assert keys[3] == keys[4] == 0
    assert (torch.cat([keys[:4], keys[5:8]]).diff() > 0).all()
    assert keys[8:].tolist() == [-(2**31)] * 8
    assert back[:8].tolist() == ordered.tolist()
