"""The smallest ragged calls of every GPU backend, for compute-sanitizer.

Every tensor has an allocation of its own where PYTORCH_NO_CUDA_MEMORY_CACHING=1 is set, so that a
read past its end is one.
"""

import torch

import torch_core

DEVICE = "cuda"
LENGTHS, ROWS = [5, 0, 17, 70], [2, 1, 0, 3]


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def caches(page_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Key cache, value cache, page table and lengths; no page more than is needed, no column more
    than the longest request has, and nothing valid behind a request's pages."""
    counts = [-(-length // page_size) for length in LENGTHS]
    table = torch.full((len(counts), max(counts)), -1)
    used = torch.arange(table.shape[1]) < torch.tensor(counts)[:, None]
    table[used] = torch.arange(sum(counts)).flip(0)
    pair = [torch.randn(sum(counts), page_size, 2, 128, device=DEVICE).to(dtype) for _ in range(2)]
    return *pair, table.int().to(DEVICE), integers(*LENGTHS)


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


def main() -> None:
    for run in (decodes, prefills, appends):
        run()
        torch.cuda.synchronize()
        print(f"{run.__name__}: done", flush=True)


if __name__ == "__main__":
    main()
