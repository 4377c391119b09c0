"""What the card takes to launch, and to read what QSA reads in decode, with nothing done to it.

    python tests/bench/bench_floor.py

Keys of 128 bf16 in random pages of 16, as index scores read them; keys and values of 2 x 256 bf16
in groups of 4 tokens at given places, as attention reads 512 of them a row. Every program reads one
tile; the best of several tiles counts. CUDA graphs over more data than the L2 holds.
"""

import functools

import torch
import triton
import triton.language as tl
from timing import graph_us

GROUPS, DIM = 16, 128  # of a page
LIST, KV_HEADS, HEAD_DIM = 2048, 2, 256


@triton.jit
def nothing(out_ptr):
    pass


@triton.jit
def fold(values):
    return tl.sum(tl.sum(values.to(tl.int32), 1), 0)


@triton.jit
def read_keys(cache_ptr, table_ptr, out_ptr, GROUPS: tl.constexpr, DIM: tl.constexpr,
              TILE: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, TILE * GROUPS)
    pages = tl.load(table_ptr + tile * TILE + rows // GROUPS).to(tl.int64)
    offsets = ((pages * GROUPS + rows % GROUPS) * DIM)[:, None] + tl.arange(0, DIM)[None, :]
    keys = tl.load(cache_ptr + offsets, eviction_policy="evict_first")
    tl.store(out_ptr + tile, fold(keys))


@triton.jit
def read_lists(key_ptr, value_ptr, places_ptr, out_ptr, KV_HEADS: tl.constexpr,
               HEAD_DIM: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    places = tl.load(places_ptr + tile * TILE + tl.arange(0, TILE)).to(tl.int64)
    offsets = (places * KV_HEADS + head)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    both = tl.load(key_ptr + offsets) ^ tl.load(value_ptr + offsets)
    tl.store(out_ptr + tl.program_id(0), fold(both))


def random(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device="cuda")


def show(name: str, us: float, size: int = 0) -> None:
    rate = f" ({size / us / 1e6:.2f} TB/s)" if size else ""
    print(f"{name}: {us:.1f} us{rate}", flush=True)


def launches(out: torch.Tensor) -> None:
    for programs in (1, 132):
        us = graph_us([functools.partial(nothing[(programs,)], out)] * 200)
        show(f"a launch of {programs} programs that do nothing", us)


def keys(out: torch.Tensor, requests: int, tokens: int = 131072) -> None:
    pages, sets = tokens // 4 // GROUPS, {32: 2, 8: 4, 1: 30}[requests]
    cache = random(sets * requests * pages, GROUPS, DIM)
    tables = torch.randperm(len(cache), device="cuda").int().view(sets, -1)
    times = []
    for tile, warps in ((2, 2), (4, 4), (8, 4), (8, 8)):
        grid = (requests * pages // tile,)
        sizes = dict(GROUPS=GROUPS, DIM=DIM, TILE=tile, num_warps=warps)
        calls = [functools.partial(read_keys[grid], cache, x, out, **sizes) for x in tables]
        times.append(graph_us(calls * 4))
    show(f"index keys of {requests} x {tokens}", min(times), cache.nbytes // sets)


def lists(out: torch.Tensor, rows: int, tokens: int = 16384) -> None:
    sets = {32: 4, 8: 12, 1: 48}[rows]
    cached = random(2, 128 * tokens, KV_HEADS, HEAD_DIM)
    groups = torch.rand(sets * rows, tokens // 4, device="cuda").topk(LIST // 4).indices
    requests = torch.arange(sets * rows, device="cuda").remainder(128)[:, None]
    first = (groups.sort().values + requests * (tokens // 4)) * 4
    places = (first[:, :, None] + torch.arange(4, device="cuda")).int().view(sets, -1)
    times = []
    for tile, warps in ((16, 4), (32, 4), (64, 8)):
        grid = (rows * LIST // tile * KV_HEADS,)
        sizes = dict(KV_HEADS=KV_HEADS, HEAD_DIM=HEAD_DIM, TILE=tile, num_warps=warps)
        calls = [functools.partial(read_lists[grid], *cached, x, out, **sizes) for x in places]
        times.append(graph_us(calls))
    show(f"keys and values of {rows} lists", min(times), rows * LIST * KV_HEADS * HEAD_DIM * 4)


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    out = torch.zeros(2**20, dtype=torch.int32, device="cuda")
    launches(out)
    for count in (32, 8, 1):
        keys(out, count)
        lists(out, count)


if __name__ == "__main__":
    main()
