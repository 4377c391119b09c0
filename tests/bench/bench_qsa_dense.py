"""A QSA decode step on a GPU, metadata to gated output, beside dense attention (XQA) on the same
caches, and the memory that the step allocates.

    python tests/bench/bench_qsa_dense.py

Qwen3.8-Flash-Next: 24 query and 2 KV heads of 256, indexer of 4 heads of 128, ratio 4, budget 2048,
pages of 64 in random order, bf16. Medians of CUDA graphs; the caches are larger than the L2.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch_core
from tests.bench.timing import graph_us
from torch_core import qsa

SIZES = [(32, 131072), (8, 131072), (1, 131072), (1, 2**20), (32, 8192)]
PAGE, RATIO = 64, 4


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def times_of(requests: int, tokens: int) -> tuple[float, float, float]:
    """(QSA, dense) in us and the memory of a QSA step beside its results, in MB."""
    pages = requests * tokens // PAGE
    kv = [normal(pages, PAGE, 2, 256) for _ in range(2)]
    groups, ring = (
        normal(pages, PAGE // RATIO, 1, 128),
        normal(requests, qsa.ring_rows(RATIO, 0), 128),
    )
    table = torch.randperm(pages, device="cuda").int().view(requests, -1)
    lengths = torch.full((requests,), tokens, dtype=torch.int32, device="cuda")
    offsets = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    query, gate = normal(requests, 24, 256), normal(requests, 24, 256)
    index = normal(requests, 4, 128), normal(requests, 128)
    weight = normal(128)
    cos, sin = (x.cuda() for x in qsa.rotary_tables(tokens, rotary_dim=64, theta=1e7))
    sizes = dict(num_rows=requests, num_pages=pages, page_size=PAGE, compress_ratio=RATIO)
    sizes |= dict(num_decodes=requests, decode_query_len=1)

    def sparse() -> torch.Tensor:
        metadata = qsa.build_metadata(table, lengths, offsets, **sizes)[0]
        return qsa.attention(
            query, *index, *kv, groups, ring, table, lengths, metadata, weight, cos, sin,
            budget=2048, compress_ratio=RATIO, num_decodes=requests, gate=gate,
        )  # fmt: skip

    def dense() -> torch.Tensor:
        return torch_core.decode(query, *kv, table, lengths, backend="xqa")

    sparse()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sparse()
    memory = torch.cuda.max_memory_allocated() - before
    return graph_us([sparse]), graph_us([dense]), memory / 1e6


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print("| requests x tokens | QSA us | dense XQA us | dense / QSA | memory of a step MB |")
    print("|---|---|---|---|---|")
    for requests, tokens in SIZES:
        sparse, dense, memory = times_of(requests, tokens)
        print(
            f"| {requests} x {tokens} | {sparse:.1f} | {dense:.1f} | {dense / sparse:.1f} | "
            f"{memory:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
