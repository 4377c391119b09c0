"""Serves a toy model with torch_core: prefill, then steps as a CUDA graph, or a loop on a CPU.

    python examples/torch_decode.py [--steps 32]

What a serving engine does: the prompts run as one packed batch, then each step appends a key and a
value for every request, attends and advances. On a GPU the step is captured once and replayed;
lengths live in a tensor, so a replay follows them.
"""

import argparse
import time
from typing import Any

import torch

import torch_core

PROMPTS = (1, 5, 17, 64, 65, 100, 128, 200)  # tokens of each request's prompt
LAYERS, NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 32, 4, 128
PAGE_SIZE, PAGES_PER_SEQ = 64, 16
MAX_STEPS = PAGE_SIZE * PAGES_PER_SEQ - max(PROMPTS)


class ToyModel:
    """Attention layers without weights, and the state of a batch: caches, lengths, newest rows."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        batch = len(PROMPTS)
        shape = (LAYERS, 2, batch * PAGES_PER_SEQ, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
        self.caches = torch.zeros(shape, dtype=dtype, device=device)
        self.page_table = torch.randperm(batch * PAGES_PER_SEQ, device=device).int().view(batch, -1)
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.hidden = torch.zeros(batch, NUM_QO_HEADS, HEAD_DIM, dtype=dtype, device=device)

    def forward(self, hidden: torch.Tensor, attention: Any, **places: Any) -> torch.Tensor:
        """hidden [rows, NUM_QO_HEADS, HEAD_DIM] through all layers; `places` says where rows go."""
        group_size = NUM_QO_HEADS // NUM_KV_HEADS
        for key_cache, value_cache in self.caches:
            key, value = hidden[:, ::group_size], hidden[:, 1::group_size]
            paged = (key_cache, value_cache, self.page_table)
            torch_core.append_kv(key, value, *paged, **places)
            out = attention(hidden, *paged, self.seq_lens)
            hidden = torch.nn.functional.rms_norm(hidden + out, (HEAD_DIM,))
        return hidden

    def prefill(self, prompts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Runs prompts [total, NUM_QO_HEADS, HEAD_DIM], packed; lengths int32 [batch], on a CPU."""
        device = prompts.device
        ends = lengths.cumsum(0, dtype=torch.int32)
        request_ids = torch.arange(len(lengths)).repeat_interleave(lengths).int()
        positions = torch.arange(len(prompts)).int() - (ends - lengths)[request_ids]
        cu_seqlens_q = torch.nn.functional.pad(ends, (1, 0)).to(device)
        self.seq_lens.copy_(lengths)
        sizes: Any = dict(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=int(lengths.max()))
        key_cache, value_cache = self.caches[0]
        paged = (key_cache, value_cache, self.page_table, self.seq_lens)
        plan = torch_core.plan_prefill(prompts, *paged, **sizes)  # one for all layers

        def attention(*arguments: torch.Tensor) -> Any:
            return torch_core.prefill(*arguments, **sizes, plan=plan)

        places = dict(positions=positions.to(device), request_ids=request_ids.to(device))
        rows = self.forward(prompts, attention, **places)
        self.hidden.copy_(rows[(ends - 1).to(device)])
        return rows

    def step(self) -> None:
        """One token for each request: the newest rows are the next input."""
        self.seq_lens.add_(1)
        places = dict(positions=self.seq_lens - 1)
        self.hidden.copy_(self.forward(self.hidden, torch_core.decode, **places))

    def capture(self) -> torch.cuda.CUDAGraph:
        """The step as a CUDA graph; replay() advances the same state."""
        state = [(tensor, tensor.clone()) for tensor in (self.seq_lens, self.hidden)]
        self.step()  # builds or loads the kernels
        for tensor, before in state:
            tensor.copy_(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph


def timed(run: Any, device: torch.device) -> float:
    """Seconds of a call, its work on the device included."""
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves a toy model with torch_core.")
    parser.add_argument("--steps", type=int, default=32)
    steps = parser.parse_args().steps
    if not 1 <= steps <= MAX_STEPS:
        parser.error(f"--steps must be between 1 and {MAX_STEPS}, got {steps}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = ToyModel(device, dtype)
    prompts = torch.randn(sum(PROMPTS), NUM_QO_HEADS, HEAD_DIM, dtype=dtype, device=device)
    lengths = torch.tensor(PROMPTS, dtype=torch.int32)
    model.prefill(prompts, lengths)  # builds or loads the kernels
    prompt_rate = len(prompts) / timed(lambda: model.prefill(prompts, lengths), device)
    advance = model.capture().replay if device.type == "cuda" else model.step
    seconds = timed(lambda: [advance() for _ in range(steps)], device)
    print(f"{device.type}: {len(PROMPTS)} requests at {model.seq_lens.tolist()} tokens")
    print(
        f"prompt {prompt_rate:.0f} tokens/s, decode {len(PROMPTS) * steps / seconds:.0f} tokens/s "
        f"({seconds / steps * 1e6:.0f} us a step), |hidden| {model.hidden.float().norm():.3f}"
    )


if __name__ == "__main__":
    main()
