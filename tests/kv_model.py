"""append_kv and merge_states as NumPy loops, and random calls of append_kv."""

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from .inputs import DTYPES, normal

FP8 = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Append:
    """An append_kv call by its parameters; `make` draws its arrays."""

    name: str
    tokens: int = 7
    batch: int = 3
    addressing: str = "request_ids"  # or "slots", "rows" (row i is request i)
    skips: bool = False
    dtype: str = "float32"
    kv_dtype: str | None = None
    kv_layout: str = "NHD"
    num_kv_heads: int = 2
    head_dim: int = 4
    page_size: int = 4
    pages_per_seq: int = 3
    size: float = 1.0  # of the new rows
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def make(self, seed: int = 0) -> dict[str, Any]:
        """The keyword arguments of the call, arrays as NumPy arrays; all places are distinct."""
        rng = np.random.default_rng(seed)
        num_pages = self.batch * self.pages_per_seq + 2
        token_axes = (self.page_size, self.num_kv_heads)
        if self.kv_layout == "HND":
            token_axes = token_axes[::-1]
        cache = (num_pages, *token_axes, self.head_dim)
        rows = (self.tokens, self.num_kv_heads, self.head_dim)
        kv_dtype = DTYPES[self.kv_dtype or self.dtype]
        arguments: dict[str, Any] = dict(
            key=normal(rng, rows, np.dtype("float32")),
            value=normal(rng, rows, np.dtype("float32")),
            key_cache=normal(rng, cache, kv_dtype),
            value_cache=normal(rng, cache, kv_dtype),
            kv_layout=self.kv_layout,
        )
        for name in ("key", "value"):
            arguments[name] = (arguments[name] * self.size).astype(DTYPES[self.dtype])
        return arguments | self._places(rng, num_pages) | self.options

    def _places(self, rng: np.random.Generator, num_pages: int) -> dict[str, np.ndarray]:
        skipped = rng.random(self.tokens) < (0.4 if self.skips else 0)
        if self.addressing == "slots":
            slots = rng.permutation(num_pages * self.page_size)[: self.tokens]
            return dict(slots=np.where(skipped, -1, slots).astype(np.int32))
        pages = rng.permutation(num_pages)[: self.batch * self.pages_per_seq]
        table = pages.reshape(self.batch, self.pages_per_seq).astype(np.int32)
        capacity = self.pages_per_seq * self.page_size
        if self.addressing == "rows":
            positions = rng.integers(0, max(capacity, 1), self.tokens)
            more = {}
        else:
            flat = rng.permutation(self.batch * capacity)[: self.tokens]
            request_ids, positions = np.divmod(flat, max(capacity, 1))
            # The request of a skipped row is never read.
            more = dict(request_ids=np.where(skipped, 2**31 - 1, request_ids).astype(np.int32))
        positions = np.where(skipped, rng.choice([-1, -7, -(2**31)], self.tokens), positions)
        return dict(page_table=table, positions=positions.astype(np.int32), **more)


CASES = [
    Append("request_ids"),
    Append("rows", tokens=3, addressing="rows"),
    Append("fewer_rows_than_requests", tokens=2, addressing="rows"),
    Append("slots", addressing="slots"),
    Append("slots_skips", addressing="slots", skips=True),
    Append("skips", tokens=12, skips=True),
    Append("hnd", kv_layout="HND", num_kv_heads=3),
    Append("hnd_slots_bfloat16", addressing="slots", kv_layout="HND", dtype="bfloat16"),
    Append("float16", dtype="float16", page_size=1),
    Append("cache_scaled", options=dict(k_scale=0.3, v_scale=3.0)),
    Append("e4m3", dtype="bfloat16", kv_dtype="float8_e4m3fn"),
    Append("e4m3_scaled_hnd", kv_dtype="float8_e4m3fn", kv_layout="HND",
           options=dict(k_scale=0.3, v_scale=3.0)),
    Append("e4m3_saturates", kv_dtype="float8_e4m3fn", size=1e4, skips=True),
    Append("e5m2", dtype="float16", kv_dtype="float8_e5m2", options=dict(k_scale=0.7)),
    Append("e5m2_saturates", kv_dtype="float8_e5m2", size=1e7),
    Append("e5m2_saturates_by_scale", dtype="float16", kv_dtype="float8_e5m2",
           options=dict(k_scale=1e-6, v_scale=np.array(1e-6, np.float32))),
    Append("array_scales", dtype="bfloat16", kv_dtype="float8_e4m3fn", addressing="slots",
           options=dict(k_scale=np.array(0.5, np.float32), v_scale=np.array(2.0, np.float32))),
    Append("batch_0", tokens=0, batch=0),
    Append("tokens_0", tokens=0),
    Append("tokens_0_slots", tokens=0, addressing="slots"),
    Append("full", tokens=36),
]  # fmt: skip


def append(arguments: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The caches after the call, one token at a time."""
    results = []
    for name in ("key", "value"):
        scale = arguments.get(f"{name[0]}_scale")
        cache = arguments[f"{name}_cache"].copy()
        tokens = cache.swapaxes(1, 2) if arguments["kv_layout"] == "HND" else cache
        for row, new in enumerate(arguments[name]):
            place = _place(arguments, row, tokens.shape[1])
            if place is not None:
                tokens[place] = stored(new, cache.dtype, scale)
        results.append(cache)
    return results[0], results[1]


def _place(arguments: dict[str, Any], row: int, page_size: int) -> tuple[int, int] | None:
    """Page and offset of a row; None where it is skipped."""
    slots = arguments.get("slots")
    at = int(arguments["positions"][row] if slots is None else slots[row])
    if at < 0:
        return None
    page, offset = divmod(at, page_size)
    if slots is not None:
        return page, offset
    ids = arguments.get("request_ids")
    return int(arguments["page_table"][row if ids is None else ids[row]][page]), offset


def stored(row: np.ndarray, dtype: np.dtype, scale: Any) -> np.ndarray:
    """row / scale in the cache's dtype, saturated where that is fp8."""
    if scale is None and row.dtype == dtype:
        return row
    row = row.astype(np.float32) / np.float32(1.0 if scale is None else scale)
    if dtype.name in FP8:
        limit = np.float32(ml_dtypes.finfo(dtype).max)
        row = np.clip(row, -limit, limit)
    return row.astype(dtype)


def merge(out_a, lse_a, out_b, lse_b, dtype=np.float64) -> tuple[np.ndarray, np.ndarray]:
    """The joined attention in `dtype`, one row and head at a time."""
    out, lse = np.zeros(out_a.shape, dtype), np.full(lse_a.shape, -np.inf, dtype)
    for place in np.ndindex(lse_a.shape):
        parts = [(o[place].astype(dtype), dtype(s[place]))
                 for o, s in ((out_a, lse_a), (out_b, lse_b)) if s[place] > -np.inf]  # fmt: skip
        if not parts:
            continue
        top = max(s for _, s in parts)
        total = sum(np.exp(s - top) for _, s in parts)
        lse[place] = np.log(total) + top
        out[place] = sum(np.exp(s - top) / total * o for o, s in parts)
    return out, lse


def same_bits(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Equal in dtype, shape and every bit."""
    same = actual.dtype == expected.dtype and actual.shape == expected.shape
    return same and actual.tobytes() == expected.tobytes()
