"""Greedy decode of a toy attention layer with torch_core: a CUDA graph on a GPU, a loop on a CPU.

    python examples/torch_decode.py [--steps 32]

The loop is what a serving engine does for each token: append the new key and value, attend,
advance. On a GPU the step is captured once and replayed; lengths live in a tensor, so a replay
follows them.
"""

import argparse
import time
from typing import Any

import torch

import torch_core

BATCH, NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 32, 4, 128
PAGE_SIZE, PAGES_PER_SEQ = 64, 16


def make_step(device: torch.device):
    """The state of a batch, and a function that advances it by one token."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (BATCH * PAGES_PER_SEQ, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    key_cache = torch.zeros(shape, dtype=dtype, device=device)
    value_cache = torch.zeros_like(key_cache)
    page_table = torch.randperm(BATCH * PAGES_PER_SEQ, device=device).int().view(BATCH, -1)
    seq_lens = torch.zeros(BATCH, dtype=torch.int32, device=device)
    hidden = torch.randn(BATCH, NUM_QO_HEADS, HEAD_DIM, dtype=dtype, device=device)

    def step() -> None:
        seq_lens.add_(1)
        key = hidden[:, :: NUM_QO_HEADS // NUM_KV_HEADS]
        slots = page_table.gather(1, ((seq_lens - 1) // PAGE_SIZE).long()[:, None])[:, 0]
        slots = (slots * PAGE_SIZE + (seq_lens - 1) % PAGE_SIZE).long()
        # torch_core.append_kv reads its places on the host; a graph needs them on the device.
        key_cache.view(-1, NUM_KV_HEADS, HEAD_DIM)[slots] = key
        value_cache.view(-1, NUM_KV_HEADS, HEAD_DIM)[slots] = key
        out: Any  # without return_lse, one tensor
        out = torch_core.decode(hidden, key_cache, value_cache, page_table, seq_lens)
        hidden.copy_(torch.nn.functional.rms_norm(hidden + out, (HEAD_DIM,)))

    return step, seq_lens, hidden


def main() -> None:
    parser = argparse.ArgumentParser(description="Greedy decode with torch_core.")
    parser.add_argument("--steps", type=int, default=32)
    steps = parser.parse_args().steps
    if not 1 <= steps < PAGE_SIZE * PAGES_PER_SEQ:
        parser.error(f"--steps must be between 1 and {PAGE_SIZE * PAGES_PER_SEQ - 1}, got {steps}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    advance, seq_lens, hidden = make_step(device)
    if device.type == "cuda":
        step, graph = advance, torch.cuda.CUDAGraph()
        step()  # builds or loads the kernel
        seq_lens.zero_()
        with torch.cuda.graph(graph):
            step()
        advance = graph.replay
    start = time.perf_counter()
    for _ in range(steps):
        advance()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    print(
        f"{device.type}: {BATCH} requests at {seq_lens.tolist()} tokens, "
        f"{seconds / steps * 1e6:.0f} us a step, |hidden| {hidden.float().norm():.3f}"
    )


if __name__ == "__main__":
    main()
