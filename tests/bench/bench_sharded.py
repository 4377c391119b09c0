"""Decode on two GPUs against one: layers inside jit over KV heads or batch, and context parallel.

    python tests/bench/bench_sharded.py [heads] [batch] [context]

The same work in total, pages of 64 in random order, random data; results are compared. Figures are
slopes between programs of 64 and 24 layers with a residual add, medians of 7 rounds of 30 queued
steps. Without GPUs it runs tiny shapes on virtual CPU devices, whose figures mean nothing.
"""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[2]))

import jaxattn
from tests.bench.timing import host_us, slope_us

jax.config.update("jax_num_cpu_devices", 2)

PAGE = 64
GPU = jax.default_backend() == "gpu"
LAYERS = (24, 64) if GPU else (2, 4)
CACHE_BYTES = 240e6  # caches smaller than this, which the L2 could hold, are rotated


@dataclass(frozen=True)
class Shape:
    """A decode layer."""

    name: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    dim: int
    dtype: str = "bfloat16"

    @property
    def pages(self) -> int:
        """Of a request; an even number, as they are split over two GPUs."""
        return 2 * -(-self.length // (2 * PAGE))

    @property
    def cache(self) -> tuple[int, int, int, int]:
        return (self.batch * self.pages, PAGE, self.kv_heads, self.dim)

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads} heads of {self.dim}"
        return f"{self.name}, {heads}, {self.batch} x {self.length}, {self.dtype}"


def shapes(part: str) -> list[Shape]:
    if not GPU:
        return [Shape("tiny", 2, 500, 8, 2, 16)]
    large = functools.partial(Shape, "64/8", heads=64, kv_heads=8, dim=128)
    small = functools.partial(Shape, "SmolLM2-135M", heads=9, kv_heads=3, dim=64)
    if part == "context":
        return [large(batch=1, length=1_000_000)]
    found = [large(batch=64, length=8192), large(batch=64, length=8192, dtype="float8_e4m3fn")]
    found.append(large(batch=8, length=8192))
    # Three KV heads do not split over two GPUs.
    return [*found, small(batch=64, length=2048), small(batch=256, length=2048)][
        : 3 if part == "heads" else 5
    ]


# How each part splits query, caches, page table and lengths over the axis "x".
SPLITS = dict(
    heads=(P(None, "x"), P(None, None, "x"), P(), P()),
    batch=(P("x"), P(), P("x"), P("x")),
    context=(P(), P("x"), P(), P()),
)


def arrays(shape: Shape, split: tuple[P, P, P, P], gpus: int) -> SimpleNamespace:
    """The same values on any number of GPUs."""
    mesh = jax.make_mesh((gpus,), ("x",), devices=jax.devices()[:gpus],
                         axis_types=(AxisType.Auto,))  # fmt: skip
    query, cache, table, lengths = (NamedSharding(mesh, spec) for spec in split)
    size = 2 * np.prod(shape.cache) * jnp.dtype(shape.dtype).itemsize
    count = int(max(1, min(8, CACHE_BYTES // size)))
    keys = jax.random.split(jax.random.key(0), 2 * count + 1)
    draw = jax.jit(
        lambda key: jax.random.normal(key, shape.cache, jnp.bfloat16).astype(shape.dtype),
        out_shardings=cache,
    )
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(shape.batch, shape.heads, shape.dim)).astype(np.float32)
    order = rng.permutation(shape.cache[0]).reshape(shape.batch, -1).astype(np.int32)
    made = SimpleNamespace(
        query=jax.device_put(rows.astype(jnp.bfloat16), query),
        caches=[(draw(keys[2 * i]), draw(keys[2 * i + 1])) for i in range(count)],
        table=jax.device_put(order, table),
        lengths=jax.device_put(np.full(shape.batch, shape.length, np.int32), lengths),
    )
    return jax.block_until_ready(made.__dict__) and made


def layers_us(made: SimpleNamespace, layers: int) -> float:
    def step(query, caches, table, lengths):
        for at in range(layers):
            query = query + jaxattn.decode(query, *caches[at % len(caches)], table, lengths)
        return query

    jitted = jax.jit(step, donate_argnums=0, out_shardings=made.query.sharding)
    state = [jnp.copy(made.query)]

    def advance() -> None:
        state[0] = jitted(state[0], made.caches, made.table, made.lengths)
        if not GPU:  # XLA's collectives on a CPU want one run at a time
            jax.block_until_ready(state[0])

    return host_us(advance, lambda: jax.block_until_ready(state[0]), 30 if GPU else 2)


def compared(shape: Shape, split: tuple[P, P, P, P]) -> tuple[float, list[float]]:
    """The largest difference of two GPUs' result from one's, and the times of a layer."""
    results, times = [], []
    for gpus in (1, 2):
        made = arrays(shape, split, gpus)
        call = jax.jit(jaxattn.decode)
        out = call(made.query, *made.caches[0], made.table, made.lengths)
        results.append(np.asarray(out, np.float32))
        times.append(slope_us(functools.partial(layers_us, made), *LAYERS)[0])
    return float(np.abs(results[0] - results[1]).max()), times


def main() -> None:
    print(f"{jax.devices()[:2]}, jax {jax.__version__}")
    for part in sys.argv[1:] or SPLITS:
        print(f"\n{part}\n\n| layer | one GPU us | two GPUs us | speedup | largest difference |")
        print("|---|---|---|---|---|")
        for shape in shapes(part):
            difference, (one, two) = compared(shape, SPLITS[part])
            if difference > 2e-2:
                raise SystemExit(f"{shape}: the results differ by {difference}")
            print(
                f"| {shape} | {one:.1f} | {two:.1f} | {one / two:.2f} | {difference:.1e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
