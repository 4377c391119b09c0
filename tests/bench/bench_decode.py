"""Decode on a GPU: layers inside jit, a grid of shapes against FlashInfer, JAX's Pallas kernel.

    python tests/bench/bench_decode.py [layers] [grid] [pallas]

64 query and 8 KV heads of 128, pages of 64, random pages and data. Grid figures are medians of 15
replays of a CUDA graph; caches smaller than the L2 are rotated. Layer figures are slopes between
programs of 64 and 24 layers with a residual add, medians of 7 rounds of 30 queued steps (2 of large
caches).
"""

import functools
import itertools
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import jaxattn
from tests.bench.timing import graph_us, host_us, slope_us
from torch_core import binding
from torch_core.backends import xqa
from torch_core.problem import AttentionInputs, describe_decode

HEADS, KV_HEADS, DIM, PAGE = 64, 8, 128, 64
DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
POOL_BYTES = 70e9
L2_BYTES = 60e6


@functools.cache
def pool() -> torch.Tensor:
    """Random bytes that are finite and moderate in both dtypes."""
    data = torch.empty(int(POOL_BYTES), dtype=torch.uint8, device="cuda")
    for part in data.split(2**28):
        part.random_(0x20, 0x3F)
    return data


def calls(batch: int, length: int, dtype: str) -> list[AttentionInputs]:
    """As many calls over different memory as it takes to leave the L2."""
    kind = DTYPES[dtype]
    tokens = batch * length
    half = tokens * KV_HEADS * DIM * kind.itemsize
    count = max(1, min(8, int(4 * L2_BYTES // (2 * half))))
    made = []
    for at in range(count):
        key, value = (
            pool()[(2 * at + side) * half :][:half].view(kind).view(-1, PAGE, KV_HEADS, DIM)
            for side in (0, 1)
        )
        table = torch.randperm(tokens // PAGE, device="cuda").int().view(batch, -1)
        lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)
        query = torch.randn(batch, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        made.append(AttentionInputs(query, key, value, table, lengths))
    return made


def xqa_us(made: list[AttentionInputs], *, upstream: bool = False, fp8: bool = False) -> float:
    """XQA as we bind it; or as `upstream` does by itself, told the number of multiprocessors as it
    is; or `fp8`, its kernel for Hopper."""
    launches = []
    for inputs in made:
        problem, inputs = describe_decode(inputs)
        bound = xqa.bind(problem, 132, "xqa")
        if upstream or fp8:
            arguments = (fp8, 132, *bound.arguments[2:])
            scratch = 64 * 2**20
            bound = binding.Binding(
                bound.name, bound.function, arguments, scratch, bound.semaphores
            )
        device = inputs.query.device
        ops, scales = binding.torch_ops(device), dict(q_scale=1.0, kv_scale=1.0)
        tensors = xqa.operands(problem, inputs, scales, ops, 132, "xqa") | dict(
            out=torch.empty_like(inputs.query),
            semaphores=torch.zeros(bound.semaphores, dtype=torch.int32, device=device),
            scratch=torch.empty(bound.scratch, dtype=torch.uint8, device=device),
        )
        launches.append(functools.partial(binding.launch, bound, tensors))
    return graph_us(launches * (16 // len(launches) if len(launches) > 1 else 1))


def native_us(made: list[AttentionInputs]) -> float:
    """FlashInfer's native decode, plan left out."""
    import flashinfer

    launches = []
    for inputs in made:
        workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        batch, pages = inputs.page_table.shape
        indptr = torch.arange(batch + 1, dtype=torch.int32) * pages
        last = torch.full((batch,), PAGE, dtype=torch.int32)
        lists = (indptr, inputs.page_table.reshape(-1), last)
        dtypes = dict(q_data_type=inputs.query.dtype, kv_data_type=inputs.key_cache.dtype)
        wrapper.plan(*lists, HEADS, KV_HEADS, DIM, PAGE, **dtypes)
        caches, out = (inputs.key_cache, inputs.value_cache), torch.empty_like(inputs.query)
        launches.append(functools.partial(wrapper.run, inputs.query, caches, out=out))
    return graph_us(launches * (16 // len(launches) if len(launches) > 1 else 1))


def grid() -> None:
    print("| shape | cache | ours us | TB/s | upstream XQA | native | ours / best | XQA fp8 |")
    print("|---|---|---|---|---|---|---|---|")
    for batch, length in itertools.product((1, 8, 64, 256), (1024, 8192, 32768, 131072)):
        for dtype in DTYPES:
            size = 2 * batch * length * KV_HEADS * DIM * DTYPES[dtype].itemsize
            if size > POOL_BYTES:
                continue
            made = calls(batch, length, dtype)
            ours, upstream = xqa_us(made), xqa_us(made, upstream=True)
            peers = [upstream, native_us(made)]
            fp8 = f"{xqa_us(made, fp8=True):.1f}" if dtype == "e4m3" else ""
            print(
                f"| {batch} x {length} | {dtype} | {ours:.1f} | {size / ours / 1e6:.2f} | "
                f"{peers[0]:.1f} | {peers[1]:.1f} | {ours / min(peers):.2f} | {fp8} |",
                flush=True,
            )


def jax_arrays(batch: int, length: int, dtype: str, layers: int) -> SimpleNamespace:
    """Query, tables and as many caches as it takes to leave the L2, for JAX."""
    kind = jnp.bfloat16 if dtype == "bf16" else jnp.float8_e4m3fn
    shape = (batch * length // PAGE, PAGE, KV_HEADS, DIM)
    size = 2 * batch * length * KV_HEADS * DIM * jnp.dtype(kind).itemsize
    count = max(1, min(layers, int(4 * L2_BYTES // size)))
    keys = jax.random.split(jax.random.key(0), 2 * count + 2)
    draw = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16).astype(kind))
    caches = [(draw(keys[2 * i]), draw(keys[2 * i + 1])) for i in range(count)]
    table = jax.random.permutation(keys[-1], shape[0]).reshape(batch, -1).astype(jnp.int32)
    query = jax.random.normal(keys[-2], (batch, HEADS, DIM), jnp.bfloat16)
    lengths = jnp.full((batch,), length, jnp.int32)
    jax.block_until_ready((query, caches, table, lengths))
    return SimpleNamespace(query=query, caches=caches, table=table, lengths=lengths)


def jit_time(arrays: SimpleNamespace, layer, layers: int) -> float:
    jitted = jax.jit(step_of(layer, layers), donate_argnums=0)
    state = [jnp.copy(arrays.query)]

    def advance() -> None:
        state[0] = jitted(state[0], arrays.caches, arrays.table, arrays.lengths)

    large = arrays.table.size * PAGE > 2**19
    return host_us(advance, lambda: jax.block_until_ready(state[0]), 2 if large else 30)


def torch_time(arrays: SimpleNamespace, layers: int) -> float:
    """The same kernels, with semaphores and scratch made once, in a torch CUDA graph."""
    query, table, lengths = map(torch.from_dlpack, (arrays.query, arrays.table, arrays.lengths))
    caches = [tuple(map(torch.from_dlpack, pair)) for pair in arrays.caches]
    problem, inputs = describe_decode(AttentionInputs(query, *caches[0], table, lengths))
    bound = xqa.bind(problem, 132, "xqa")
    scales = xqa.scales(problem, inputs)
    ops = binding.torch_ops(query.device)
    fixed = xqa.operands(problem, inputs, scales, ops, 132, "xqa") | dict(
        semaphores=torch.zeros(bound.semaphores, dtype=torch.int32, device="cuda"),
        scratch=torch.empty(bound.scratch, dtype=torch.uint8, device="cuda"),
    )
    state = query.clone()

    def step() -> None:
        x = state
        for at in range(layers):
            key, value = caches[at % len(caches)]
            out = torch.empty_like(x)
            tensors = fixed | dict(query=x, key_cache=key, value_cache=value, out=out)
            binding.launch(bound, tensors)
            x = x + out
        state.copy_(x)

    torch.cuda.synchronize()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return host_us(graph.replay, torch.cuda.synchronize)


def layers() -> None:
    print("| batch x length | cache | jit us / layer | torch graph us / layer | ratio |")
    print("|---|---|---|---|---|")
    for batch, length, dtype in ((64, 8192, "bf16"), (8, 1024, "e4m3"), (1, 1024, "bf16")):
        arrays = jax_arrays(batch, length, dtype, 24)
        jit, fixed = slope_us(functools.partial(jit_time, arrays, jaxattn.decode))
        graph, _ = slope_us(functools.partial(torch_time, arrays))
        print(
            f"| {batch} x {length} | {dtype} | {jit:.2f} | {graph:.2f} | {jit / graph:.2f} |",
            flush=True,
        )
    empty = slope_us(functools.partial(jit_time, arrays, lambda query, *_: query * 0.5))[1]
    print(f"\nfixed cost of a jitted step: {fixed:.0f} us, of one of adds only: {empty:.0f} us")
    arrays = jax_arrays(1, 64, "bf16", 1)
    step, adds = queue_us(arrays, jaxattn.decode), queue_us(arrays, lambda query, *_: query * 0.5)
    print(f"until a step of 32 layers is queued: {step:.0f} us, of 32 adds: {adds:.0f} us")


def queue_us(arrays: SimpleNamespace, layer) -> float:
    """Median time until a call of a jitted step of 32 layers returns, the GPU idle before it."""
    step = jax.jit(step_of(layer, 32), donate_argnums=0)
    query, times = jnp.copy(arrays.query), []
    for _ in range(300):
        query = jax.block_until_ready(query)
        start = time.perf_counter()
        query = step(query, arrays.caches, arrays.table, arrays.lengths)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[50:])


def step_of(layer, layers: int):
    def step(query, caches, table, lengths):
        for at in range(layers):
            query = query + layer(query, *caches[at % len(caches)], table, lengths)
        return query

    return step


def pallas() -> None:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    print("| batch x length | ours us | Pallas us (k_splits, pages) | Pallas / ours |")
    print("|---|---|---|---|")
    for batch, length in itertools.product((1, 8, 64, 256), (1024, 8192, 32768, 131072)):
        if 8 * batch * length * KV_HEADS * DIM > POOL_BYTES:  # caches in two layouts
            continue
        arrays = jax_arrays(batch, length, "bf16", 8)
        ours = slope_us(functools.partial(jit_time, arrays, jaxattn.decode), 4, 16)[0]
        arrays.caches = [
            tuple(jnp.transpose(cache, (2, 0, 1, 3)) for cache in pair) for pair in arrays.caches
        ]
        figures = {}
        for splits, pages in itertools.product((4, 16), (1, 2, 8)):
            call = functools.partial(
                paged_attention, k_splits=splits, pages_per_compute_block=pages
            )

            def layer(query, key, value, table, lengths, call=call):
                return call(query * DIM**-0.5, key, value, table, lengths)

            try:
                time_of = functools.partial(jit_time, arrays, layer)
                figures[splits, pages] = slope_us(time_of, 4, 16)[0]
            except Exception as error:  # a setting that its own checks refuse
                print(f"{splits, pages}: {str(error)[:100]}", file=sys.stderr)
        if not figures:
            continue
        best = min(figures, key=figures.get)
        theirs = figures[best]
        print(
            f"| {batch} x {length} | {ours:.1f} | {theirs:.1f} {best} | {theirs / ours:.2f} |",
            flush=True,
        )


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, jax {jax.__version__}")
    parts = dict(layers=layers, grid=grid, pallas=pallas)
    for name in sys.argv[1:] or parts:
        print(f"\n{name}")
        parts[name]()


if __name__ == "__main__":
    main()
