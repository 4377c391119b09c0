"""The smallest ragged calls of every GPU backend, or of QSA, for compute-sanitizer.

Every tensor has an allocation of its own where PYTORCH_NO_CUDA_MEMORY_CACHING=1 is set, so that a
read past its end is one.
"""

import sys
from typing import Any

import torch

import torch_core
from torch_core import qsa
from torch_core.qsa import plan_attend

DEVICE = "cuda"
LENGTHS, ROWS = [5, 0, 17, 70], [2, 1, 0, 3]


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def caches(
    page_size: int, dtype: torch.dtype, lengths: list[int] = LENGTHS
) -> tuple[torch.Tensor, ...]:
    """Key cache, value cache, page table and lengths; no page more than is needed, no column more
    than the longest request has, and nothing valid behind a request's pages."""
    counts = [-(-length // page_size) for length in lengths]
    table = torch.full((len(counts), max(counts)), -1)
    used = torch.arange(table.shape[1]) < torch.tensor(counts)[:, None]
    table[used] = torch.arange(sum(counts)).flip(0)
    pair = [torch.randn(sum(counts), page_size, 2, 128, device=DEVICE).to(dtype) for _ in range(2)]
    return *pair, table.int().to(DEVICE), integers(*lengths)


def query(rows: int) -> torch.Tensor:
    return torch.randn(rows, 16, 128, device=DEVICE).bfloat16()


def decodes() -> None:
    bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn
    for dtype in (bf16, e4m3):
        paged = caches(64, dtype)
        torch_core.decode(query(4), *paged, backend="xqa")
        torch_core.decode(query(16), *paged, q_len=4, backend="xqa")
        torch_core.decode(query(4), *paged, window_left=9, backend="xqa")
        torch_core.decode(query(4), *caches(16, dtype), return_lse=True, backend="native_decode")


def prefills() -> None:
    offsets = integers(0, *torch.tensor(ROWS).cumsum(0).tolist())
    rows = dict(cu_seqlens_q=offsets, max_seqlen_q=max(ROWS), return_lse=True)
    paged = caches(16, torch.bfloat16)
    for backend in ("native_prefill_fa2", "native_prefill_fa3"):
        torch_core.prefill(query(sum(ROWS) + 1), *paged, **rows, backend=backend)
    e4m3 = caches(16, torch.float8_e4m3fn)
    torch_core.prefill(query(sum(ROWS)), *e4m3, **rows, backend="native_prefill_fa2")
    fp8_query = query(sum(ROWS)).to(torch.float8_e4m3fn)
    torch_core.prefill(fp8_query, *e4m3, **rows, backend="native_prefill_fa3")


def appends() -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        key_cache, value_cache, table, lengths = caches(16, dtype)
        new = torch.randn(4, 2, 128, device=DEVICE).bfloat16()
        places = dict(positions=lengths - 1)  # -1 is skipped
        torch_core.append_kv(new, new, key_cache, value_cache, table, **places, k_scale=0.5)
        # The last slot, a skipped one, and one that does not exist.
        slots = integers(len(key_cache) * 16 - 1, -1, 0, len(key_cache) * 16)
        torch_core.append_kv(new, new, key_cache, value_cache, slots=slots)


RATIO, INDEX_DIM = 4, 40


def step(
    rows: list[int],
    dtype: torch.dtype,
    *,
    decodes: int = 0,
    padding: int = 0,
    lengths: list[int] = LENGTHS,
    budget: int = 16,
    **options: Any,
) -> None:
    """One QSA step of requests with these rows, whole and call by call. Tables and caches end where
    the last request does."""
    key_cache, value_cache, table, seq_lens = caches(16, dtype, lengths)
    num_rows, query_len = sum(rows) + padding, rows[0] if decodes else 1
    counts = dict(num_decodes=decodes, decode_query_len=query_len)
    pages = dict(num_pages=len(key_cache), page_size=16, compress_ratio=RATIO)
    offsets = integers(0, *torch.tensor(rows).cumsum(0).tolist())
    metadata, _ = qsa.build_metadata(table, seq_lens, offsets, num_rows=num_rows, **pages, **counts)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).bfloat16()

    ring = normal(len(rows), qsa.ring_rows(RATIO, 2), INDEX_DIM)
    keys = normal(len(key_cache), 16 // RATIO, 1, INDEX_DIM).to(dtype)
    last_place = max(lengths) // RATIO * RATIO - RATIO
    tables = qsa.rotary_tables(last_place + 1, 16, 1e4, DEVICE)
    places = (metadata.positions - RATIO + 1).clamp(min=0)
    indexer = (normal(num_rows, 4, INDEX_DIM), normal(num_rows, INDEX_DIM))
    queries, gate = query(num_rows), query(num_rows)
    qsa.attention(
        queries, *indexer, key_cache, value_cache, keys, ring, table, seq_lens, metadata,
        normal(INDEX_DIM), *tables, budget=budget, compress_ratio=RATIO, gate=gate,
        ring_ids=integers(*reversed(range(len(rows)))), rotary_positions=places, return_lse=True,
        **counts, **options,
    )  # fmt: skip
    qsa.compress(
        indexer[1], ring, keys, metadata, seq_lens, normal(INDEX_DIM), *tables,
        compress_ratio=RATIO, decode_query_len=query_len,
    )  # fmt: skip
    selected = qsa.select(
        indexer[0], keys, table, metadata, budget=budget, compress_ratio=RATIO, **counts, **options
    )
    lists = qsa.expand(selected, metadata, compress_ratio=RATIO)
    paged = (key_cache, value_cache, table)
    qsa.attend(queries, *paged, metadata, *lists, compress_ratio=RATIO, **counts)


BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def qsa_decodes() -> None:
    """Rows that score, and rows that keep all and are split; drafts, those of an empty request
    too."""
    for dtype in (BF16, E4M3):
        step([1] * 4, dtype, decodes=4)
    step([3] * 4, BF16, decodes=4)
    step([3] * 4, BF16, decodes=4, budget=128, padding=1)


def qsa_prefills() -> None:
    """Chunks with and without a prefix, an empty request, rows that see no group, padding rows."""
    for dtype in (BF16, E4M3):
        step([5, 1, 0, 9], dtype, padding=2)
    step([1, 1, 0, 9], BF16, decodes=2)
    step([1, 1, 2, 9], BF16, decodes=2, padding=1, workspace_bytes=0)


def qsa_tiles() -> None:
    """Tiles of 8 rows, of which the last holds one; tiles that leave their rows to single walks."""
    usual, plan_attend.TILED_ROWS = plan_attend.TILED_ROWS, 1
    for dtype in (BF16, E4M3):
        step([5, 1, 0, 9], dtype, padding=2)
    step([0, 0, 0, 1], BF16)
    step([1, 0, 1, 17], BF16, lengths=[17, 0, 17, 600])
    plan_attend.TILED_ROWS = usual


PARTS = {
    "backends": (decodes, prefills, appends),
    "qsa": (qsa_decodes, qsa_prefills, qsa_tiles),
}


def main(part: str) -> None:
    for run in PARTS[part]:
        run()
        torch.cuda.synchronize()
        print(f"{run.__name__}: done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
