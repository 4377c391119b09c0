"""Many decode steps: memory stays flat, and outputs right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattn
from tests import compare
from tests.faults import gpu
from tests.inputs import Case

CASE = Case("soak", (1000,) * 4, num_qo_heads=16, num_kv_heads=2, head_dim=128, page_size=64,
            dtype="bfloat16")  # fmt: skip
LAYERS, POOL = 2, 32


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def device_bytes() -> int:
    stats = jax.devices()[0].memory_stats()
    return stats["bytes_in_use"] if stats else 0


def step(longest, query, key, value, caches, page_table, seq_lens):
    """The new token of each request into the caches of each layer, then attention."""
    outs, written = [], []
    for key_cache, value_cache in caches:
        pair = jaxattn.append_kv(
            key, value, key_cache, value_cache, page_table, positions=seq_lens - 1
        )
        outs.append(jaxattn.decode(query, *pair, page_table, seq_lens))
        query, written = outs[-1], [*written, pair]
    return outs, written, seq_lens % longest + 1


@pytest.mark.parametrize(
    "steps, longest",
    [
        pytest.param(500, 60, id="cpu"),
        pytest.param(100_000, 1000, id="gpu", marks=pytest.mark.gpu),
    ],
)
def test_soak(steps, longest, request):
    on_gpu = request.node.get_closest_marker("gpu") is not None
    if not on_gpu and jax.default_backend() != "cpu":
        pytest.skip("needs JAX on a CPU")
    arguments = CASE.make()
    pools = [jax.random.normal(jax.random.key(i), (POOL, 4, heads, 128), jnp.bfloat16)
             for i, heads in enumerate((16, 2, 2))]  # fmt: skip
    pools = [list(pool) for pool in pools]
    names = ("key_cache", "value_cache")
    caches = [tuple(jnp.array(arguments[name]) for name in names) for _ in range(LAYERS)]
    page_table = jnp.asarray(arguments["page_table"])
    seq_lens = jnp.array([1, longest // 4, longest // 2, longest], jnp.int32)
    jitted = jax.jit(functools.partial(step, longest), donate_argnames="caches")
    checked = set(np.random.default_rng(0).integers(0, steps, 20 if on_gpu else 5).tolist())
    memory = None
    for number in range(steps):
        rows = [pool[number % POOL] for pool in pools]
        lengths = np.asarray(seq_lens) if number in checked else None
        outs, caches, seq_lens = jitted(*rows, caches, page_table, seq_lens)
        if number in checked:
            queries = [rows[0], *outs[:-1]]
            for query, out, pair in zip(queries, outs, caches, strict=True):
                call = arguments | dict(
                    zip(names, map(np.asarray, pair), strict=True),
                    query=np.asarray(query),
                    seq_lens=lengths,
                )
                check = gpu.check if on_gpu else compare.check_attention
                check(call, np.asarray(out))
        if number % 500 == 499:  # no endless queue
            jax.block_until_ready(seq_lens)
        if number == steps // 10:
            jax.block_until_ready(seq_lens)
            memory = device_bytes(), resident_bytes()
    jax.block_until_ready(seq_lens)
    assert memory is not None
    assert device_bytes() <= memory[0] + 2**20
    assert resident_bytes() <= memory[1] + 2**25
