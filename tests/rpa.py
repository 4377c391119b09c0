"""Random batches in the ragged-paged-attention convention, and what upstream answers.

    python -m tests.rpa

writes `GOLDEN` anew: the answers of tpu-inference's own reference to `GOLDEN_BATCHES`. It needs
that package's tpu_inference/kernels on the path (0.32.0, without its dependencies), and is no
dependency of the tests.
"""

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import oracle
from .inputs import DTYPES, normal

GOLDEN = Path(__file__).with_name("rpa_golden.npz")
PACKED = {"float32": 1, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 4, "float8_e5m2": 4}


@dataclass(frozen=True)
class Batch:
    """A call by its parameters; `make` draws its arrays."""

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    width: int = 128
    page_size: int = 8
    dtype: str = "float32"
    kv_dtype: str | None = None
    five_axes: bool = True
    extra_rows: int = 2
    extra_seqs: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def make(self, seed: int = 0) -> dict[str, Any]:
        """The arguments of the call as NumPy arrays. Whatever must not be read is NaN or garbage:
        slots without a token, spare heads and ends of rows, entries past the live sequences."""
        rng = np.random.default_rng(seed)
        live, num_seqs = len(self.q_lens), len(self.q_lens) + self.extra_seqs
        counts = [-(-length // self.page_size) for length in self.kv_lens]
        num_pages, pages_per_seq = sum(counts) + 3, max(counts, default=0) + 1
        pages = rng.permutation(num_pages)
        table = rng.choice([-1, num_pages, 2**31 - 1], (num_seqs, pages_per_seq)).astype(np.int32)
        dtype, kv_dtype = DTYPES[self.dtype], DTYPES[self.kv_dtype or self.dtype]
        packing = PACKED[kv_dtype.name]
        combined = -(-2 * self.num_kv_heads // packing) * packing
        cache = np.full((num_pages, self.page_size, combined, self.width), np.nan, kv_dtype)
        whole = self.width % self.head_dim == 0
        for request, count in enumerate(counts):
            table[request, :count], pages = pages[:count], pages[count:]
            for position in range(self.kv_lens[request] - self.q_lens[request]):
                page = table[request, position // self.page_size]
                row = cache[page, position % self.page_size]
                if not whole:
                    row[:] = 0
                shape = (2 * self.num_kv_heads, self.head_dim)
                row[: shape[0], : shape[1]] = normal(rng, shape, kv_dtype)
        rows = sum(self.q_lens) + self.extra_rows
        new = (rows, self.num_kv_heads, self.head_dim)
        garbage = rng.integers(-(2**31), 2**31, self.extra_seqs)
        if self.five_axes:
            cache = cache.reshape(*cache.shape[:2], combined // packing, packing, self.width)
        ones = [length == 1 for length in self.q_lens]
        decodes = ones.index(False) if False in ones else live
        return dict(
            queries=normal(rng, (rows, self.num_q_heads, self.head_dim), dtype),
            keys=normal(rng, new, kv_dtype),
            values=normal(rng, new, kv_dtype),
            kv_cache=cache,
            kv_lens=np.array([*self.kv_lens, *garbage], np.int32),
            page_indices=table.reshape(-1),
            cu_q_lens=np.array([*np.cumsum([0, *self.q_lens]), *garbage], np.int32),
            distribution=np.array([decodes, decodes, live], np.int32),
            **dict(sm_scale=self.head_dim**-0.5) | self.options,
        )


def updated_cache(call: dict[str, Any]) -> np.ndarray:
    """The cache after the call, token by token."""
    cache = call["kv_cache"].copy()
    flat = cache.reshape(*cache.shape[:2], -1, cache.shape[-1])
    if not call.get("update_kv_cache", True):
        return cache
    table = call["page_indices"].reshape(len(call["kv_lens"]), -1)
    heads, head_dim = call["keys"].shape[1:]
    for request in range(int(call["distribution"][2])):
        begin, end = call["cu_q_lens"][request : request + 2]
        for row in range(begin, end):
            position = call["kv_lens"][request] - end + row
            place = flat[table[request, position // flat.shape[1]], position % flat.shape[1]]
            place[:] = 0
            for head in range(heads):
                place[2 * head, :head_dim] = call["keys"][row, head]
                place[2 * head + 1, :head_dim] = call["values"][row, head]
    return cache


def split(call: dict[str, Any], cache: np.ndarray) -> dict[str, Any]:
    """The call as one of `jaxattn.prefill` over the updated cache; live sequences only."""
    live = int(call["distribution"][2])
    kv_heads, head_dim = call["keys"].shape[1:]
    flat = cache.reshape(*cache.shape[:2], -1, cache.shape[-1])[..., :head_dim]
    window = call.get("sliding_window")
    options = {n: call[n] for n in ("sm_scale", "soft_cap", "k_scale", "v_scale") if n in call}
    return dict(
        query=call["queries"],
        key_cache=flat[:, :, 0 : 2 * kv_heads : 2],
        value_cache=flat[:, :, 1 : 2 * kv_heads : 2],
        page_table=call["page_indices"].reshape(len(call["kv_lens"]), -1)[:live],
        seq_lens=call["kv_lens"][:live],
        cu_seqlens_q=call["cu_q_lens"][: live + 1],
        window_left=-1 if window is None else window - 1,
        causal=call.get("use_causal_mask", True),
        **options,
    )


def by_oracle(call: dict[str, Any], dtype: Any = np.float64) -> np.ndarray:
    """The output by tests/oracle.py, with zeros in rows past the live sequences."""
    return oracle.attention(**split(call, updated_cache(call)), dtype=dtype)[0]


def by_jax(call: dict[str, Any], reference: Any) -> np.ndarray:
    """The output by jax's own reference of the convention's second version (which reads a cache
    that is already written), in float32 on a CPU."""
    live = int(call["distribution"][2])
    whole = split(call, updated_cache(call))
    out = np.zeros(call["queries"].shape, np.float64)
    rows = int(call["cu_q_lens"][live])
    if rows:
        pages = np.stack([whole["key_cache"], whole["value_cache"]], 3)
        pages = pages.reshape(*pages.shape[:2], -1, pages.shape[-1]).astype(np.float32)
        rest = (whole["seq_lens"], whole["page_table"], whole["cu_seqlens_q"])
        rest = (*rest, np.array([live], np.int32))
        names = ("sm_scale", "soft_cap", "sliding_window", "k_scale", "v_scale")
        options = {name: call[name] for name in names if name in call}
        with jax.default_device(jax.devices("cpu")[0]):
            # The lengths as constants: it takes them apart in Python.
            attend = jax.jit(lambda query, pages: reference(query, pages, *rest, **options))
            out[:rows] = attend(call["queries"].astype(np.float32), pages)
    return out


MIXED = Batch("mixed", (1, 1, 5, 9), (7, 16, 5, 25))
BATCHES = [
    MIXED,
    Batch("decodes", (1, 1, 1), (7, 16, 1)),
    Batch("prefills", (4, 9), (4, 20)),
    Batch("page_boundaries", (1, 8, 1, 3, 16), (8, 8, 9, 24, 16)),
    Batch("empty", (1, 0, 3, 0), (7, 0, 9, 5)),
    Batch("none_live", (), ()),
    Batch("mqa", (1, 5), (20, 9), num_q_heads=6, num_kv_heads=1),
    Batch("four_axes", (1, 5), (20, 9), five_axes=False, width=64),
    Batch("odd_head_dim", (1, 5), (20, 9), head_dim=80),
    Batch("soft_cap", (1, 5), (20, 9), options=dict(soft_cap=1.5)),
    Batch("window_4", (1, 5, 1), (20, 9, 3), options=dict(sliding_window=4)),
    Batch("window_1", (1, 5), (20, 9), options=dict(sliding_window=1)),
    Batch("not_causal", (1, 5), (20, 9), options=dict(use_causal_mask=False)),
    Batch("bfloat16", (1, 5), (20, 9), dtype="bfloat16"),
    Batch("float16_window", (1, 5), (20, 9), dtype="float16", options=dict(sliding_window=7)),
    Batch("e4m3", (1, 5), (20, 9), num_q_heads=2, num_kv_heads=1, dtype="bfloat16",
          kv_dtype="float8_e4m3fn", options=dict(k_scale=0.5, v_scale=2.0, q_scale=0.25)),
    Batch("e5m2", (1, 5), (20, 9), num_kv_heads=4, dtype="float16", kv_dtype="float8_e5m2",
          options=dict(k_scale=0.5, v_scale=2.0)),
]  # fmt: skip
GOLDEN_BATCHES = [
    MIXED,
    Batch("not_causal", (1, 5), (20, 9), options=dict(use_causal_mask=False)),
    Batch("capped_window", (1, 5, 1), (20, 9, 3), num_kv_heads=1, width=128,
          options=dict(soft_cap=1.5, sliding_window=4)),
    Batch("odd_head_dim", (5, 1), (9, 20), head_dim=80, num_q_heads=2, num_kv_heads=1),
    Batch("scales", (1, 5), (20, 9), options=dict(k_scale=0.5, v_scale=2.0)),
    Batch("e4m3", (1, 5), (20, 9), num_kv_heads=1, kv_dtype="float8_e4m3fn"),
]  # fmt: skip


def random_batch(seed: int) -> Batch:
    """Any mix of sizes, lengths and options."""
    rng = np.random.default_rng(seed)
    pick = lambda *values: values[int(rng.integers(len(values)))]  # noqa: E731
    q_lens = [pick(0, 1, 1, 6) for _ in range(pick(1, 3, 5))]
    kv_lens = [q + pick(0, 13) for q in q_lens]
    kv_heads, dtype = pick(1, 2, 3), pick("float32", "bfloat16", "float16")
    return Batch(
        f"random_{seed}",
        tuple(q_lens),
        tuple(kv_lens),
        num_q_heads=kv_heads * pick(1, 2, 5),
        num_kv_heads=kv_heads,
        head_dim=pick(32, 64, 128),
        page_size=pick(4, 8, 16),
        dtype=dtype,
        kv_dtype=pick(None, "float8_e4m3fn"),
        five_axes=pick(True, False),
        extra_rows=pick(0, 3),
        extra_seqs=pick(0, 2),
        options=pick({}, dict(soft_cap=2.0)) | pick({}, dict(sliding_window=pick(1, 5, 17))),
    )


def on_gpu(batch: Batch) -> Batch:
    """The batch with a dtype and sizes that kernels take."""
    dtype = "bfloat16" if batch.dtype == "float32" else batch.dtype
    return replace(batch, dtype=dtype, page_size=16, head_dim=max(batch.head_dim, 64))


def digest(array: np.ndarray) -> str:
    """Of the bits, any NaN like any other."""
    wide = array.astype(np.float32)
    return hashlib.sha256(np.where(np.isnan(wide), np.float32(np.nan), wide).tobytes()).hexdigest()


def write_golden() -> None:
    from tpu_inference.kernels.ragged_paged_attention.v3 import (  # pyright: ignore[reportMissingImports]
        kernel,
    )

    answers = {}
    for batch in GOLDEN_BATCHES:
        call = batch.make()
        arrays = {name: jnp.asarray(v) for name, v in call.items() if isinstance(v, np.ndarray)}
        out, cache = kernel.ref_ragged_paged_attention(**call | arrays, out_dtype=jnp.float32)
        if batch.kv_dtype is None:  # upstream rounds weights to the cache's dtype
            answers[f"{batch.name}.out"] = np.asarray(out)
        answers[f"{batch.name}.cache"] = digest(np.asarray(cache))
    np.savez_compressed(GOLDEN, **answers)


if __name__ == "__main__":
    write_golden()
