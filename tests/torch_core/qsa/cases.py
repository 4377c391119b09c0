"""Small QSA models: what a server keeps between steps, and how it makes one."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torch_core
from torch_core import qsa


@dataclass(frozen=True, kw_only=True)
class Sizes:
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    index_heads: int = 4
    index_dim: int = 16
    rotary_dim: int = 8
    compress_ratio: int = 4
    budget: int = 16
    page_size: int = 16
    pages_per_seq: int = 8
    num_draft: int = 0
    dtype: str = "float32"
    kv_dtype: str = ""  # default: dtype
    index_dtype: str = ""  # default: dtype

    @property
    def topk(self) -> int:
        return self.budget // self.compress_ratio


PER_TOKEN = ("query", "gate", "key", "value", "index_query", "index_key")


def random_tokens(sizes: Sizes, length: int, seed: int = 0) -> dict[str, Tensor]:
    """What the projections of a layer give for one request's tokens; queries and keys are taken as
    already rotated."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(length, *shape, generator=generator).to(getattr(torch, sizes.dtype))

    heads, kv_heads = (sizes.num_qo_heads, sizes.head_dim), (sizes.num_kv_heads, sizes.head_dim)
    return dict(
        query=normal(*heads),
        gate=normal(*heads),
        key=normal(*kv_heads),
        value=normal(*kv_heads),
        index_query=normal(sizes.index_heads, sizes.index_dim),
        index_key=normal(sizes.index_dim),
    )


class Server:
    """Caches and rings of some requests whose tokens are known ahead. Page 0 is the null page that
    pads every page table; whatever no request has written holds `fill`."""

    def __init__(
        self,
        sizes: Sizes,
        tokens: list[dict[str, Tensor]],
        *,
        weight: Tensor | None = None,
        tables: tuple[Tensor, Tensor] | None = None,
        fill: float = float("nan"),
        seed: int = 0,
        device: str = "cpu",
        **attend: Any,
    ) -> None:
        self.sizes, self.attend = sizes, attend
        self.tokens = [{name: x.to(device) for name, x in one.items()} for one in tokens]
        self.lengths = [0] * len(tokens)
        generator = torch.Generator().manual_seed(seed)
        num_pages = 1 + len(tokens) * sizes.pages_per_seq
        pages = torch.randperm(num_pages - 1, generator=generator).int() + 1
        self.page_table = pages.view(len(tokens), sizes.pages_per_seq)
        dtype = getattr(torch, sizes.dtype)
        kv_dtype = getattr(torch, sizes.kv_dtype or sizes.dtype)
        index_dtype = getattr(torch, sizes.index_dtype or sizes.dtype)
        rows = qsa.ring_rows(sizes.compress_ratio, sizes.num_draft)
        groups = sizes.page_size // sizes.compress_ratio
        kv = (num_pages, sizes.page_size, sizes.num_kv_heads, sizes.head_dim)
        self.key_cache = torch.full(kv, fill, dtype=torch.float32).to(kv_dtype)
        self.value_cache = self.key_cache.clone()
        self.compressed_cache = torch.full(
            (num_pages, groups, 1, sizes.index_dim), fill, dtype=torch.float32
        ).to(index_dtype)
        self.ring = torch.full((len(tokens), rows, sizes.index_dim), fill, dtype=dtype)
        noise = torch.linspace(-1, 1, sizes.index_dim).sin() / 8
        self.weight = noise.to(dtype) if weight is None else weight
        capacity = sizes.pages_per_seq * sizes.page_size
        self.tables = tables or qsa.rotary_tables(capacity, sizes.rotary_dim, 1e4)
        self.device = torch.device(device)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        self.tables = tuple(table.to(device) for table in self.tables)

    def mapped_pages(self, request: int, length: int) -> Tensor:
        """The page table's row with the null page where no token lies."""
        pages = torch.arange(self.sizes.pages_per_seq, device=self.device)
        return torch.where(pages * self.sizes.page_size < length, self.page_table[request], 0)

    def step(
        self,
        takes: list[tuple[int, int]],
        *,
        num_decodes: int = 0,
        padding: int = 0,
        **options: Any,
    ) -> dict[str, Any]:
        """One step: for each (request, rows) its next tokens. Returns what the calls gave, and
        `rows`, the slice of each request. The whole-step call must agree with the single ones."""
        sizes = self.sizes
        slices, begin, ends = {}, 0, []
        for request, rows in takes:
            slices[request] = slice(begin, begin + rows)
            begin += rows
            self.lengths[request] += rows
            ends.append(self.lengths[request])
        requests = [request for request, _ in takes]
        arrays = {
            name: torch.cat(
                [self.tokens[r][name][self.lengths[r] - n : self.lengths[r]] for r, n in takes]
                + [torch.full_like(self.tokens[0][name][:padding], float("nan"))]
            )
            for name in PER_TOKEN
        }
        page_table = torch.stack(
            [self.mapped_pages(r, end) for r, end in zip(requests, ends, strict=True)]
        )
        seq_lens, offsets, ring_ids = (
            torch.tensor(values, dtype=torch.int32, device=self.device)
            for values in (ends, [0, *(slices[r].stop for r in requests)], requests)
        )
        decodes = dict(num_decodes=num_decodes, decode_query_len=takes[0][1] if num_decodes else 1)
        metadata, split = qsa.build_metadata(
            page_table,
            seq_lens,
            offsets,
            num_rows=begin + padding,
            num_pages=len(self.key_cache),
            page_size=sizes.page_size,
            compress_ratio=sizes.compress_ratio,
            **decodes,
        )
        scales = {name: self.attend[name] for name in ("k_scale", "v_scale") if name in self.attend}
        torch_core.append_kv(
            arrays["key"][:begin],
            arrays["value"][:begin],
            self.key_cache,
            self.value_cache,
            page_table,
            positions=metadata.positions[:begin],
            request_ids=metadata.request_ids[:begin],
            **scales,
        )
        indexer = dict(compress_ratio=sizes.compress_ratio, ring_ids=ring_ids)
        whole = qsa.attention(
            arrays["query"],
            arrays["index_query"],
            arrays["index_key"],
            self.key_cache,
            self.value_cache,
            self.compressed_cache.clone(),
            self.ring.clone(),
            page_table,
            seq_lens,
            metadata,
            self.weight,
            *self.tables,
            budget=sizes.budget,
            gate=arrays["gate"],
            return_lse=True,
            **indexer,
            **decodes,
            **self.attend,
            **options,
        )
        qsa.compress(
            arrays["index_key"],
            self.ring,
            self.compressed_cache,
            metadata,
            seq_lens,
            self.weight,
            *self.tables,
            decode_query_len=split.decode_query_len,
            **indexer,
            **options,
        )
        selected = qsa.select(
            arrays["index_query"],
            self.compressed_cache,
            page_table,
            metadata,
            budget=sizes.budget,
            compress_ratio=sizes.compress_ratio,
            **decodes,
        )
        token_indices, counts = qsa.expand(selected, metadata, compress_ratio=sizes.compress_ratio)
        out, lse = qsa.attend(
            arrays["query"],
            self.key_cache,
            self.value_cache,
            page_table,
            metadata,
            token_indices,
            counts,
            compress_ratio=sizes.compress_ratio,
            gate=arrays["gate"],
            return_lse=True,
            **decodes,
            **self.attend,
        )
        assert torch.equal(whole[0], out) and torch.equal(whole[1], lse)
        return dict(
            metadata=metadata,
            split=split,
            selected=selected,
            token_indices=token_indices,
            counts=counts,
            out=out,
            lse=lse,
            rows=slices,
        )

    def keys(self, request: int) -> Tensor:
        """The compressed keys of the request's complete groups."""
        groups = self.compressed_cache[self.page_table[request].long()].flatten(0, 1)[:, 0]
        return groups[: self.lengths[request] // self.sizes.compress_ratio]


def run(server: Server, request: int, pieces: list[int], **options: Any) -> dict[str, Tensor]:
    """Steps of one request alone, with these numbers of rows; the rows' results joined."""
    steps = [server.step([(request, rows)], **options) for rows in pieces]
    names = ("selected", "token_indices", "counts", "out", "lse")
    return {name: torch.cat([step[name] for step in steps]) for name in names}


def sets(token_indices: Tensor, counts: Tensor) -> list[set[int]]:
    """The tokens of each row, which must be distinct, with only -1 behind them."""
    result = []
    for row, count in zip(token_indices.tolist(), counts.tolist(), strict=True):
        assert len(set(row[:count])) == count and min(row[:count], default=0) >= 0
        assert set(row[count:]) <= {-1}
        result.append(set(row[:count]))
    return result
