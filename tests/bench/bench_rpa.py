"""The adapters of jaxattn.rpa and jaxattn.compat on a GPU, against `decode` and `prefill` on caches
of their own layout.

    python tests/bench/bench_rpa.py

64 query and 8 KV heads of 128, bf16, pages of 64 in random order. Medians of 7 rounds of queued
steps of one jit, writes included, caches donated; `direct` is append_kv with `decode` (where every
sequence has one row) or `prefill`. "split" runs decodes and the rest by kernels of their own, which
is the default on a GPU; "together" runs all by prefill.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import jaxattn
from jaxattn import compat, rpa
from tests.bench.timing import host_us

HEADS, KV_HEADS, DIM, PAGE = 64, 8, 128, 64
SCALE = DIM**-0.5
# Decodes, rows of one prefill, keys of each.
SHAPES = ((1, 0, 8192), (64, 0, 8192), (64, 512, 8192), (8, 2048, 8192), (256, 256, 2048))


def draw(decodes: int, rows: int, length: int) -> tuple[list[Any], jax.Array, jax.Array]:
    """Rows, lengths and pages; keys and values of a cache."""
    keys = jax.random.split(jax.random.key(0), 5)
    batch, tokens = decodes + (rows > 0), decodes + rows
    pages = batch * length // PAGE
    new = [
        jax.random.normal(key, (tokens, heads, DIM), jnp.bfloat16)
        for key, heads in zip(keys, (HEADS, KV_HEADS, KV_HEADS), strict=False)
    ]
    lengths = jnp.full(batch, length, jnp.int32)
    table = jax.random.permutation(keys[3], pages).astype(jnp.int32).reshape(batch, -1)
    offsets = np.cumsum([0, *[1] * decodes, *([rows] if rows else [])])
    cache = jax.random.normal(keys[4], (pages, PAGE, 2, KV_HEADS, DIM), jnp.bfloat16)
    arrays = [*new, lengths, table, jnp.array(offsets, jnp.int32)]
    return arrays, cache[:, :, 0], cache[:, :, 1]


def time_us(step: Any, caches: list, arrays: list) -> tuple[float, jax.Array]:
    """Time of a step, and its first result."""
    jitted = jax.jit(step, donate_argnums=0)
    out, caches = jitted([jnp.copy(cache) for cache in caches], *arrays)
    state = [out, caches]

    def advance() -> None:
        state[:] = jitted(state[1], *arrays)

    return host_us(advance, lambda: jax.block_until_ready(state[0]), 10), out


def main() -> None:
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    print("| decodes + prefill rows, keys | direct us | rpa split us | together us | "
          "max_seqlen_q=1 us | compat us |")  # fmt: skip
    print("|---|---|---|---|---|---|")
    for decodes, rows, length in SHAPES:
        arrays, key_cache, value_cache = draw(decodes, rows, length)
        batch = decodes + (rows > 0)
        distribution = jnp.array([decodes, decodes, batch], jnp.int32)

        def direct(caches, query, key, value, lengths, table, offsets, rows=rows):
            row = jnp.arange(len(query), dtype=jnp.int32)
            request = (offsets[None, 1:] <= row[:, None]).sum(-1, dtype=jnp.int32)
            places = dict(positions=lengths[request] - offsets[request + 1] + row)
            caches = jaxattn.append_kv(key, value, *caches, table, request_ids=request, **places)
            if rows:
                bound = dict(max_seqlen_q=rows)
                return jaxattn.prefill(query, *caches, table, lengths, offsets, **bound), caches
            return jaxattn.decode(query, *caches, table, lengths), caches

        def by_rpa(
            caches, query, key, value, lengths, table, offsets, limit=None, live=distribution
        ):
            table = table.reshape(-1)
            out, cache = rpa.ragged_paged_attention(
                query, key, value, caches[0], lengths, table, offsets, live,
                sm_scale=SCALE, max_seqlen_q=limit,
            )  # fmt: skip
            return out, [cache]

        def only_decodes(*arguments, by_rpa=by_rpa):
            return by_rpa(*arguments, limit=1)

        def by_compat(caches, query, key, value, lengths, table, offsets):
            query = (query * SCALE).astype(query.dtype)
            return compat.paged_attention(query, *caches, table, lengths), caches

        combined = jnp.stack([key_cache, value_cache], 3)  # [..., KV_HEADS, 2, DIM]
        heads_first = [jnp.moveaxis(cache, 2, 0) for cache in (key_cache, value_cache)]
        times, outs = [], []
        for step, caches, split in (
            (direct, [key_cache, value_cache], True),
            (by_rpa, [combined], True),
            (by_rpa, [combined], False),
            *(() if rows else ((only_decodes, [combined], True), (by_compat, heads_first, True))),
        ):
            rpa.splits = lambda split=split: split
            jax.clear_caches()  # or what was traced for the other way would run again
            time, out = time_us(step, caches, arrays)
            times.append(time)
            outs.append(out)
        for out in outs[1:4]:  # the last has written nothing
            np.testing.assert_allclose(
                np.asarray(out, np.float32), np.asarray(outs[0], np.float32), rtol=0.05, atol=0.02
            )
        cells = [f"{time:.0f}" for time in times] + ["-"] * (5 - len(times))
        print(f"| {decodes} + {rows}, {length} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
