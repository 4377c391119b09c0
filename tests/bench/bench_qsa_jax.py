"""A QSA decode layer inside jax.jit on a GPU, by both ways, beside the same kernels in a torch
CUDA graph and beside plain JAX.

    python tests/bench/bench_qsa_jax.py [requests] [tokens]

Qwen3.8-Flash-Next: 24 query and 2 KV heads of 256, indexer of 4 heads of 128, ratio 4, budget 2048,
pages of 64 in random order, bf16; by default 32 requests of 131072 tokens. A layer is compress,
select, attend and a residual add; layers rotate over three sets of caches. Figures are slopes
between programs of 64 and 24 layers (plain JAX: of 6 and 2), medians of rounds of queued steps.
Plain JAX gathers all keys of the index, takes lax.top_k of the scores and gathers the tokens.
Results are checked first: by both ways the bits of torch_core, plain JAX within bf16's rounding.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxattn import qsa
from tests.bench.timing import slope_us
from torch_core import qsa as torch_qsa

START = time.perf_counter()
HEADS, KV_HEADS, DIM, INDEX_HEADS, INDEX_DIM = 24, 2, 256, 4, 128
RATIO, BUDGET, PAGE, SETS = 4, 2048, 64, 3
TOPK, GROUPS_PER_PAGE = BUDGET // RATIO, PAGE // RATIO
BARS = dict(triton=1.05, dlpack=1.10)
State = dict[str, Any]


def arrays_of(requests: int, tokens: int) -> tuple[State, list[State], State]:
    """What all layers share; caches, which are read only; rings and compressed caches."""
    pages = requests * tokens // PAGE
    keys = iter(jax.random.split(jax.random.key(0), 6 * SETS + 4))

    @functools.partial(jax.jit, static_argnums=1)
    def normal(key, shape):
        return jax.random.normal(key, shape, jnp.bfloat16)

    cos, sin = qsa.rotary_tables(tokens, 64, 1e7)
    shared = dict(
        page_table=jax.random.permutation(next(keys), pages).reshape(requests, -1).astype("int32"),
        seq_lens=jnp.full(requests, tokens, jnp.int32),
        weight=normal(next(keys), (INDEX_DIM,)) / 8,
        cos=cos,
        sin=sin,
    )
    caches, changed = [], []
    for _ in range(SETS):
        kv = (pages, PAGE, KV_HEADS, DIM)
        caches.append(dict(key_cache=normal(next(keys), kv), value_cache=normal(next(keys), kv)))
        compressed_cache = normal(next(keys), (pages, GROUPS_PER_PAGE, 1, INDEX_DIM))
        ring = normal(next(keys), (requests, RATIO, INDEX_DIM))
        changed.append(dict(ring=ring, compressed_cache=compressed_cache))
    return jax.block_until_ready((shared, caches, changed))


def inputs_of(x: Any) -> dict[str, Any]:
    """Projections of a layer, for both frameworks: parts of its input."""
    index = x[:, :2].reshape(len(x), INDEX_HEADS, INDEX_DIM)
    return dict(query=x, index_query=index, index_key=x[:, 2, :INDEX_DIM])


def jax_step(via: str, layers: int) -> Callable:
    def step(x, changed, shared, caches):
        requests = len(x)
        counts = dict(num_decodes=requests, decode_query_len=1)
        metadata, _ = qsa.build_metadata(
            shared["page_table"], shared["seq_lens"], np.arange(requests + 1, dtype=np.int32),
            num_rows=requests, num_pages=len(caches[0]["key_cache"]), page_size=PAGE,
            compress_ratio=RATIO, via=via, **counts,
        )  # fmt: skip
        changed = list(changed)
        for at in range(layers):
            out, ring, compressed_cache = qsa.attention(
                **inputs_of(x), **caches[at % SETS], **changed[at % SETS], **shared,
                metadata=metadata, budget=BUDGET, compress_ratio=RATIO, via=via, **counts,
            )  # fmt: skip
            changed[at % SETS] = dict(ring=ring, compressed_cache=compressed_cache)
            x = x + out
        return x, changed

    return jax.jit(step, donate_argnums=(0, 1))


def torch_step(layers: int, x, changed, shared, caches) -> torch.Tensor:
    requests = len(x)
    counts = dict(num_decodes=requests, decode_query_len=1)
    offsets = torch.arange(requests + 1, dtype=torch.int32, device=x.device)
    metadata, _ = torch_qsa.build_metadata(
        shared["page_table"], shared["seq_lens"], offsets, num_rows=requests,
        num_pages=len(caches[0]["key_cache"]), page_size=PAGE, compress_ratio=RATIO, **counts,
    )  # fmt: skip
    for at in range(layers):
        given = {name: part.contiguous() for name, part in inputs_of(x).items()}
        out = torch_qsa.attention(
            **given, **caches[at % SETS], **changed[at % SETS], **shared,
            metadata=metadata, budget=BUDGET, compress_ratio=RATIO, **counts,
        )  # fmt: skip
        x = x + out
    return x


def plain_layer(x, shared, caches, compressed_cache):
    """Selection and attention in JAX's own operations; the whole of a request is visible."""
    given, requests = inputs_of(x), len(x)
    keys = compressed_cache[shared["page_table"]].reshape(requests, -1, INDEX_DIM)
    scores = jnp.einsum("rhd,rgd->rhg", given["index_query"], keys,
                        preferred_element_type=jnp.float32)  # fmt: skip
    _, groups = jax.lax.top_k(jax.nn.relu(scores).sum(1), TOPK)
    tokens = (groups[..., None] * RATIO + jnp.arange(RATIO)).reshape(requests, -1)
    page = jnp.take_along_axis(shared["page_table"], tokens // PAGE, axis=1)
    key, value = (caches[n][page, tokens % PAGE] for n in ("key_cache", "value_cache"))
    query = x.reshape(requests, KV_HEADS, -1, DIM)
    scores = jnp.einsum("rhgd,rthd->rhgt", query, key, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores * DIM**-0.5, -1)
    out = jnp.einsum("rhgt,rthd->rhgd", weights.astype(x.dtype), value,
                     preferred_element_type=jnp.float32)  # fmt: skip
    return out.reshape(x.shape).astype(x.dtype)


def plain_step(layers: int) -> Callable:
    def step(x, changed, shared, caches):
        for at in range(layers):
            cache = changed[at % SETS]["compressed_cache"]
            x = x + plain_layer(x, shared, caches[at % SETS], cache)
        return x, changed

    return jax.jit(step, donate_argnums=(0, 1))


def queued_us(step: Callable, wait: Callable, seconds: float) -> float:
    """Median over 5 rounds of the time of a step, `seconds` in all."""
    step()
    wait()
    start = time.perf_counter()
    step()
    wait()
    count = max(3, min(30, int(seconds / 5 / (time.perf_counter() - start))))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        times.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(times)


def copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def to_torch(tree: Any) -> Any:
    return jax.tree.map(torch.from_dlpack, tree)


def jax_time(step_of: Callable, x, changed, shared, caches, layers: int) -> float:
    jitted = step_of(layers)
    state = [copied(x), copied(changed)]

    def step() -> None:
        state[:] = jitted(*state, shared, caches)

    return queued_us(step, lambda: jax.block_until_ready(state), 3.0)


def torch_time(x, changed, shared, caches, layers: int) -> float:
    x, changed, shared, caches = to_torch((copied(x), copied(changed), shared, caches))
    state = x.clone()

    def step() -> None:
        state.copy_(torch_step(layers, state, changed, shared, caches))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return queued_us(graph.replay, torch.cuda.synchronize, 3.0)


def check(x, changed, shared, caches) -> None:
    """Three layers by every way."""
    copy = to_torch((copied(x), copied(changed), shared, caches))
    expected = torch_step(SETS, *copy)
    torch.cuda.synchronize()
    wanted = expected.view(torch.int16).cpu().numpy()
    for via in BARS:
        out, after = jax_step(via, SETS)(copied(x), copied(changed), shared, caches)
        assert np.array_equal(np.asarray(out).view(np.int16), wanted), f"{via}: other bits"
        for ours, theirs in zip(after, copy[1], strict=True):
            for name, array in ours.items():
                host = theirs[name].view(torch.int16).cpu().numpy()
                assert np.array_equal(np.asarray(array).view(np.int16), host), f"{via}: {name}"
        del out, after
    # Plain JAX writes no keys, so it gets the caches of after the step, one layer long.
    first = torch_step(1, *to_torch((copied(x), copied(changed))), *copy[2:])
    torch.cuda.synchronize()
    after = jax_step("triton", 1)(copied(x), copied(changed), shared, caches)[1]
    plain = x + plain_layer(x, shared, caches[0], after[0]["compressed_cache"])
    plain, first = np.asarray(plain, np.float32), first.float().cpu().numpy()
    error = np.abs(plain - first)
    # Scores a rounding apart exchange groups at the bar, each worth one weight in 2048.
    assert np.median(error) < 0.01 and error.mean() < 0.02, f"plain JAX is off by {error.max():.3f}"
    print(f"right: equal bits by both ways; plain JAX within {error.mean():.1e} on average")


def main() -> None:
    requests, tokens = map(int, (*sys.argv[1:], *("32", "131072")[len(sys.argv) - 1 :]))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, jax {jax.__version__}")
    shared, caches, changed = arrays_of(requests, tokens)
    x = jax.random.normal(jax.random.key(1), (requests, HEADS, DIM), jnp.bfloat16)
    state = (x, changed, shared, caches)
    check(*state)
    graph, _ = slope_us(functools.partial(torch_time, *state))
    keys = requests * tokens / RATIO * INDEX_DIM * 2
    values = requests * BUDGET * KV_HEADS * DIM * 2 * 2
    print(f"{requests} x {tokens}, bf16; us per layer; {keys / 1e6:.0f} MB of index keys and "
          f"{values / 1e6:.0f} MB of keys and values read per layer")  # fmt: skip
    print("| way | us / layer | fixed us | / torch graph | TB/s | bar |")
    print("|---|---|---|---|---|---|")

    def line(name: str, us: float, fixed: float | None, bar: str) -> None:
        rate = (keys + values) / us / 1e6
        rest = "" if fixed is None else f"{fixed:.0f}"
        print(f"| {name} | {us:.1f} | {rest} | {us / graph:.3f} | {rate:.2f} | {bar} |", flush=True)

    line("torch CUDA graph", graph, None, "")
    figures = {}
    for via, bar in BARS.items():
        step_of = functools.partial(jax_step, via)
        figures[via], fixed = slope_us(functools.partial(jax_time, step_of, *state))
        line(f'via="{via}"', figures[via], fixed, f"<= {bar}: {figures[via] / graph <= bar}")
    plain, fixed = slope_us(functools.partial(jax_time, plain_step, *state), 2, 6)
    ratio = plain / figures["triton"]
    line("plain JAX", plain, fixed, f">= 10 times triton: {ratio:.1f}")
    print(f"{time.perf_counter() - START:.0f} s in all")


if __name__ == "__main__":
    main()
