"""torch_core.qsa, with the result of each kernel held against the reference on the same device and
the same arguments."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import compare, inputs
from tests.torch_core.qsa import cases
from torch_core import qsa
from torch_core.qsa import metadata, reference

MOST_ROWS = 200  # of one attend call that are compared


@contextlib.contextmanager
def checking() -> Iterator[None]:
    """Within, the servers of `cases` make checked calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "qsa", front)
        yield


def raw(array: Tensor) -> Tensor:
    """Bytes, to compare NaN too."""
    return array.contiguous().view(torch.uint8)


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(raw(one), raw(other))


def build_metadata(
    page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, **given: Any
) -> tuple[qsa.Metadata, qsa.Split]:
    """Bit for bit the metadata that plain torch builds."""
    built, split = qsa.build_metadata(page_table, seq_lens, cu_seqlens_q, **given)
    sizes = {n: given[n] for n in ("num_rows", "num_pages", "page_size", "compress_ratio")}
    wanted = metadata.build(page_table, seq_lens, cu_seqlens_q, **sizes)
    for name, ours, theirs in zip(built._fields, built, wanted, strict=True):
        assert torch.equal(ours, theirs), name
    return built, split


def compress(
    index_key: Tensor,
    ring: Tensor,
    compressed_cache: Tensor,
    rows: qsa.Metadata,
    *arrays: Tensor,
    compress_ratio: int,
    decode_query_len: int = 1,
    eps: float = 1e-6,
    **optional: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same ring, keys a rounding apart, and nothing written beside them."""
    wanted_ring, wanted_cache = ring.clone(), compressed_cache.clone()
    options: dict[str, Any] = dict(compress_ratio=compress_ratio, eps=eps, **optional)
    result = qsa.compress(
        index_key,
        ring,
        compressed_cache,
        rows,
        *arrays,
        decode_query_len=decode_query_len,
        **options,
    )
    reference.compress(index_key, wanted_ring, wanted_cache, rows, *arrays, **options)
    assert same(ring, wanted_ring)
    written = torch.zeros(compressed_cache.shape[:2], dtype=torch.bool, device=ring.device)
    written.view(-1)[rows.slots[rows.slots >= 0].long()] = True
    assert torch.equal(raw(compressed_cache)[~written], raw(wanted_cache)[~written])
    ours, theirs = (cache.float()[written] for cache in (compressed_cache, wanted_cache))
    # Rounded before the rotation, to the dtype of the raw keys, and after it.
    before, after = torch.finfo(index_key.dtype).eps, torch.finfo(compressed_cache.dtype).eps
    assert ((ours - theirs).abs() <= after * theirs.abs() + 32 * before).all()
    return result


def select(
    index_query: Tensor,
    compressed_cache: Tensor,
    page_table: Tensor,
    rows: qsa.Metadata,
    *,
    budget: int,
    compress_ratio: int,
    **options: int,
) -> Tensor:
    """The same groups, but for those whose scores are level with the last one kept."""
    arrays = (index_query, compressed_cache, page_table, rows)
    selected = qsa.select(*arrays, budget=budget, compress_ratio=compress_ratio, **options)
    check_selected(*arrays, selected)
    return selected


def check_selected(
    index_query: Tensor,
    compressed_cache: Tensor,
    page_table: Tensor,
    rows: qsa.Metadata,
    selected: Tensor,
) -> None:
    topk = selected.shape[1]
    wanted = reference.select(index_query, compressed_cache, page_table, rows, topk=topk)
    assert torch.equal((selected >= 0).sum(1), (wanted >= 0).sum(1))
    for row in (selected != wanted).any(1).nonzero()[:, 0].tolist():
        count, visible = int((wanted[row] >= 0).sum()), int(rows.visible[row])
        ours, theirs = selected[row, :count].long(), wanted[row, :count].long()
        assert (selected[row, count:] == -1).all() and (ours.diff() > 0).all(), row
        assert ours[0] >= 0 and ours[-1] < visible, row
        pages = page_table[rows.request_ids[row].long(), : -(-visible // compressed_cache.shape[1])]
        keys = raw(compressed_cache)[pages.long()].view(compressed_cache.dtype).flatten(0, 2)
        scores = (index_query[row].double() @ keys[:visible].double().T).relu().sum(0)
        apart = torch.cat((ours[~torch.isin(ours, theirs)], theirs[~torch.isin(theirs, ours)]))
        bar = scores[theirs].min().expand(len(apart))
        torch.testing.assert_close(scores[apart], bar, rtol=2e-5, atol=2e-4)


def expand(selected: Tensor, rows: qsa.Metadata, *, compress_ratio: int) -> tuple[Tensor, Tensor]:
    token_indices, counts = qsa.expand(selected, rows, compress_ratio=compress_ratio)
    wanted = reference.expand(selected, rows.positions, compress_ratio=compress_ratio)
    assert torch.equal(token_indices, wanted[0]) and torch.equal(counts, wanted[1])
    return token_indices, counts


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    rows: qsa.Metadata,
    token_indices: Tensor,
    counts: Tensor,
    *,
    compress_ratio: int,
    gate: Tensor | None = None,
    return_lse: bool = False,
    num_decodes: int = 0,
    decode_query_len: int = 1,
    **scales: float,
) -> Any:
    """As near to float64 as float32 is, and a few roundings."""
    caches = (key_cache, value_cache, page_table)
    result = qsa.attend(
        query,
        *caches,
        rows,
        token_indices,
        counts,
        compress_ratio=compress_ratio,
        gate=gate,
        num_decodes=num_decodes,
        decode_query_len=decode_query_len,
        return_lse=True,
        **scales,
    )
    picked = torch.arange(len(query), device=query.device)
    if len(query) > MOST_ROWS:
        picked = torch.randperm(len(query), device=query.device)[:MOST_ROWS]
    exact, plain = (
        reference.attend(
            query[picked],
            *caches,
            qsa.Metadata(*(array[picked] for array in rows)),
            token_indices[picked],
            counts[picked],
            gate=None if gate is None else gate[picked],
            compute_dtype=dtype,
            out_dtype=dtype,
            **{"sm_scale": query.shape[-1] ** -0.5, **scales},
        )
        for dtype in (torch.float64, torch.float32)
    )
    for name, *three in zip(("out", "lse"), result, exact, plain, strict=True):
        three[0] = three[0][picked]
        compare.check(*map(inputs.to_numpy, three), name)
    return result if return_lse else result[0]


front = SimpleNamespace(
    Metadata=qsa.Metadata,
    ring_rows=qsa.ring_rows,
    rotary_tables=qsa.rotary_tables,
    build_metadata=build_metadata,
    compress=compress,
    select=select,
    expand=expand,
    attend=attend,
    attention=qsa.attention,  # a server asserts that it gives the bits of the others
)
