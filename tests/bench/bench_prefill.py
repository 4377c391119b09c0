"""Prefill and append on a GPU, against FlashInfer's FA3 with its plan, and its append.

    python tests/bench/bench_prefill.py [prefill] [append]

64 query and 8 KV heads of 128, bf16, causal, pages of 64 in random order, random data. Medians of 7
rounds of queued steps.
"""

import functools
import itertools
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import jaxattn
import torch_core
from jaxattn import _triton, kv_cache
from tests.bench.timing import graph_us, host_us, slope_us

HEADS, KV_HEADS, DIM, PAGE = 64, 8, 128, 64
SHAPES = ((4, 1024, 2048), (2, 8192, 8192), (8, 512, 8192))


def arrays(batch: int, rows: int, length: int) -> list[torch.Tensor]:
    """The arguments of prefill by position."""
    made = dict(device="cuda", dtype=torch.bfloat16)
    pages = batch * length // PAGE
    key, value = (torch.randn(pages, PAGE, KV_HEADS, DIM, **made) for _ in range(2))
    table = torch.randperm(pages, device="cuda").int().view(batch, -1)
    lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)
    offsets = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * rows
    query = torch.randn(batch * rows, HEADS, DIM, **made)
    return [query, key, value, table, lengths, offsets]


def jit_us(call: list[torch.Tensor], rows: int) -> float:
    step = jax.jit(functools.partial(jaxattn.prefill, max_seqlen_q=rows))
    given = [jnp.from_dlpack(x) for x in call]
    last: list = [None]

    def advance() -> None:
        last[0] = step(*given)

    return host_us(advance, lambda: jax.block_until_ready(last[0]), 10)


def upstream(call: list[torch.Tensor], version: str):
    """FlashInfer's plan and run, as its users call them: lengths on the host for the plan."""
    import flashinfer

    query, key, value, table, _, offsets = call
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=version)
    batch, pages = table.shape
    indptr = torch.arange(batch + 1, dtype=torch.int32) * pages
    last = torch.full((batch,), PAGE, dtype=torch.int32)
    host_offsets, indices = offsets.cpu(), table.reshape(-1)

    def plan() -> None:
        wrapper.plan(
            host_offsets, indptr, indices, last, HEADS, KV_HEADS, DIM, PAGE, causal=True,
            q_data_type=query.dtype, kv_data_type=key.dtype,
        )  # fmt: skip

    def run() -> torch.Tensor:
        return wrapper.run(query, (key, value))

    return plan, run


def prefill() -> None:
    """`plan` is FlashInfer's on the host, its copy to the device waited for; lengths are there."""
    print("| requests x rows over keys | jit us | TFLOP/s | kernel alone us | our plan us "
          "| FA3 run us | FA3 plan us | queued plan + run us | jit / (plan + run) |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    wait = torch.cuda.synchronize
    for batch, rows, length in SHAPES:
        call = arrays(batch, rows, length)
        plan, run = upstream(call, "fa3")

        def both(plan=plan, run=run) -> None:
            plan()
            run()

        def waited(plan=plan) -> None:
            plan()
            torch.cuda.synchronize()

        both()
        ours = torch_core.prefill(*call, max_seqlen_q=rows)
        torch.testing.assert_close(ours, run(), rtol=2e-2, atol=2e-2)
        lists = torch_core.plan_prefill(*call, max_seqlen_q=rows)
        fixed = functools.partial(torch_core.prefill, *call, max_seqlen_q=rows, plan=lists)
        making = functools.partial(torch_core.plan_prefill, *call, max_seqlen_q=rows)
        ours, bare, made = jit_us(call, rows), graph_us([fixed] * 4), graph_us([making] * 4)
        queued = host_us(both, wait, 10)
        theirs, planned = graph_us([run] * 4), host_us(waited, wait, 10)
        work = 4 * HEADS * DIM * batch * rows * (length - rows / 2)
        print(
            f"| {batch} x {rows} over {length} | {ours:.0f} | {work / ours / 1e6:.0f} | {bare:.0f} "
            f"| {made:.0f} | {theirs:.0f} | {planned:.0f} | {queued:.0f} "
            f"| {ours / (planned + theirs):.2f} |",
            flush=True,
        )


def append_us(cache: list[torch.Tensor], rest: list[torch.Tensor], by: str, **scales) -> float:
    """A call inside a donating jit, as a slope, by our kernel or by XLA's scatter."""
    arrays = [jnp.from_dlpack(x) for x in rest]
    caches = [jnp.copy(jnp.from_dlpack(x)) for x in cache]

    def step(caches, key, value, table, positions, request, layers):
        for _ in range(layers):
            caches = jaxattn.append_kv(
                key, value, *caches, table, positions=positions, request_ids=request, **scales
            )
            key, value = value, key  # or the calls would be one
        return caches

    def time_of(layers: int) -> float:
        nonlocal caches
        jitted = jax.jit(functools.partial(step, layers=layers), donate_argnums=0)
        launched = _triton.TARGET in jitted.lower(caches, *arrays).as_text()
        assert launched == (by == "kernel")

        def advance() -> None:
            nonlocal caches
            caches = jitted(caches, *arrays)

        return host_us(advance, lambda: jax.block_until_ready(caches), 20)

    jax.clear_caches()
    missing = mock.patch.object(_triton, "failure", lambda _: ImportError("left out"))
    launched = mock.patch.object(kv_cache, "LAUNCHED_ROWS", 0)
    with launched if by == "kernel" else missing:
        # Long enough that the device, and not the host, is waited for.
        time, _ = slope_us(time_of, 32, 96)
    jax.clear_caches()
    return time


def append() -> None:
    """From JAX by both ways in a donating jit; from torch, and FlashInfer's, in a CUDA graph."""
    import flashinfer

    print(
        "| tokens | cache | jax, own kernel us | jax, XLA scatter us | torch us | FlashInfer us |"
    )
    print("|---|---|---|---|---|---|")
    for tokens, dtype in (
        (1, "bf16"),
        *itertools.product((64, 256, 512, 1024, 8192), ("bf16", "e4m3")),
    ):
        kind = dict(bf16=torch.bfloat16, e4m3=torch.float8_e4m3fn)[dtype]
        pages, batch = 8192, min(tokens, 64)
        cache = [torch.zeros(pages, PAGE, KV_HEADS, DIM, device="cuda").to(kind) for _ in range(2)]
        new = [torch.randn(tokens, KV_HEADS, DIM, device="cuda").bfloat16() for _ in range(2)]
        table = torch.randperm(pages, device="cuda").int().view(batch, -1)
        request = torch.arange(tokens, device="cuda", dtype=torch.int32) % batch
        positions = torch.arange(tokens, device="cuda", dtype=torch.int32) // batch
        scales = dict(k_scale=0.5, v_scale=0.25) if dtype == "e4m3" else {}
        ours = functools.partial(
            torch_core.append_kv, *new, *cache, table,
            positions=positions, request_ids=request, **scales,
        )  # fmt: skip
        theirs = float("nan")
        if dtype == "bf16":
            indptr = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * table.shape[1]
            last = torch.full((batch,), PAGE, device="cuda", dtype=torch.int32)
            theirs = graph_us([functools.partial(
                flashinfer.append_paged_kv_cache, *new, request, positions, tuple(cache),
                table.reshape(-1), indptr, last,
            )] * 16)  # fmt: skip
        rest = [*new, table, positions, request]
        times = [append_us(cache, rest, by, **scales) for by in ("kernel", "scatter")]
        times += [graph_us([ours] * 16), theirs]
        print(f"| {tokens} | {dtype} | {' | '.join(f'{us:.1f}' for us in times)} |", flush=True)


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, jax {jax.__version__}")
    parts = dict(prefill=prefill, append=append)
    for name in sys.argv[1:] or parts:
        print(f"\n{name}")
        parts[name]()


if __name__ == "__main__":
    main()
