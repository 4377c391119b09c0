"""What kernels know about each row of a step, and how a step splits into decode and prefill."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Int32
from torch import Tensor

from .. import checks, debug
from ..launch import require_same_device
from ..reference import check_lengths
from . import describe, launch, plan
from .problem import METADATA, QSAProblem


class Metadata(NamedTuple):
    """What kernels know about each row: int32 [num_rows] each.

    A padding row is -1 in all of them but `visible`, where it is 0.

    Fields:
        request_ids: request of the row.
        positions: place of its token in the request, from 0.
        visible: complete groups at or before it.
        slots: place in the compressed cache, page * groups_per_page + offset, of the group that it
            completes; -1 where it completes none.
    """

    request_ids: Any
    positions: Any
    visible: Any
    slots: Any


class Split(NamedTuple):
    """How a step splits into decode and prefill: Python ints. The decoding requests come first.

    Fields:
        num_decodes: decoding requests.
        decode_query_len: rows of each of them, drafts included; 1 in a `split_batch` without any.
        num_decode_tokens: rows of the decoding requests, num_decodes * decode_query_len.
        num_prefills: the other requests, those without rows among them.
        num_prefill_tokens: rows of the other requests; see `build_metadata` for padding.
    """

    num_decodes: int
    decode_query_len: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int


def split_batch(cu_seqlens_q: Sequence[int], max_decode_query_len: int = 1) -> Split:
    """The split of a batch from host-side offsets.

    The first requests of 1 to `max_decode_query_len` rows decode; the first other one and all after
    it prefill.

    Args:
        cu_seqlens_q: num_requests + 1 host integers, prefix sums of the requests' rows.
        max_decode_query_len: rows up to which a request decodes, drafts included.

    Returns:
        The Split. No request decodes: num_decodes 0 and decode_query_len 1.

    Raises:
        ValueError: offsets that do not rise from 0, or decoding requests of different numbers of
            rows.
        TypeError: an offset is no integer.
    """
    most = checks.integer("max_decode_query_len", max_decode_query_len, 0)
    if not isinstance(cu_seqlens_q, Iterable):
        raise TypeError(
            f"cu_seqlens_q must be a sequence of integers, got {type(cu_seqlens_q).__name__}"
        )
    offsets = [checks.integer(f"cu_seqlens_q[{i}]", x, 0) for i, x in enumerate(cu_seqlens_q)]
    lengths = [end - begin for begin, end in itertools.pairwise(offsets)]
    if not offsets or offsets[0] or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens_q must rise from 0, got {offsets}")
    num_decodes = 0
    while num_decodes < len(lengths) and 0 < lengths[num_decodes] <= most:
        num_decodes += 1
    return make_split(lengths, num_decodes)


def make_split(lengths: Sequence[int], num_decodes: int) -> Split:
    """The split of requests with these numbers of rows, of which the first decode."""
    decodes = lengths[:num_decodes]
    if num_decodes and min(decodes) != max(decodes):
        raise ValueError(
            "QSA decode rows must form a uniform request batch: every decoding request needs the "
            f"same number of rows, got {min(decodes)} and {max(decodes)}"
        )
    rows = sum(decodes)
    return Split(
        num_decodes=num_decodes,
        decode_query_len=decodes[0] if num_decodes else 1,
        num_decode_tokens=rows,
        num_prefills=len(lengths) - num_decodes,
        num_prefill_tokens=sum(lengths) - rows,
    )


def build(
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    num_rows: int,
    compress_ratio: int,
    page_size: int,
    num_pages: int,
) -> Metadata:
    """The metadata of a step, on the device of its arrays and without a synchronisation."""
    num_requests, pages_per_seq = page_table.shape
    groups_per_page = page_size // compress_ratio
    rows = torch.arange(num_rows, device=page_table.device)
    if not num_requests:
        empty = torch.full_like(rows, -1, dtype=torch.int32)
        return Metadata(empty, empty.clone(), torch.zeros_like(empty), empty.clone())
    ends, lengths = cu_seqlens_q[1:].long(), seq_lens.long()
    request = torch.searchsorted(ends, rows, right=True)
    live = request < num_requests
    request = request.clamp(max=num_requests - 1)
    position = lengths[request] - ends[request] + rows
    live &= position >= 0
    visible = torch.minimum((position + 1) // compress_ratio, lengths[request] // compress_ratio)
    visible = visible.clamp(min=0, max=pages_per_seq * groups_per_page)
    page = torch.full_like(rows, -1)
    if pages_per_seq:
        logical = position // page_size
        page = page_table[request, logical.clamp(0, pages_per_seq - 1)].long()
        page = page.masked_fill(logical >= pages_per_seq, -1)
    slot = page * groups_per_page + position % page_size // compress_ratio
    writes = live & ((position + 1) % compress_ratio == 0) & (page >= 0) & (page < num_pages)
    return Metadata(
        torch.where(live, request, -1).int(),
        torch.where(live, position, -1).int(),
        torch.where(live, visible, 0).int(),
        torch.where(writes, slot, -1).int(),
    )


def build_metadata(
    page_table: Int32[Tensor, "num_requests pages_per_seq"],
    seq_lens: Int32[Tensor, " num_requests"],
    cu_seqlens_q: Int32[Tensor, " num_requests_plus_1"],
    *,
    num_rows: int,
    num_pages: int,
    page_size: int,
    compress_ratio: int,
    num_decodes: int | None = None,
    decode_query_len: int | None = None,
    max_decode_query_len: int = 1,
) -> tuple[Metadata, Split]:
    """Describes each row of a step, once for all layers.

    Row i of a request with n rows stands at position p = seq_len - n + i and sees
    min((p + 1) // compress_ratio, seq_len // compress_ratio) groups. A row with p < 0, of a request
    shorter than its rows, is padding.

    Args:
        page_table: int32 [num_requests, pages_per_seq], shared by all caches. An entry outside
            [0, num_pages) is not mapped.
        seq_lens: int32 [num_requests], tokens of each request, this step's included.
        cu_seqlens_q: int32 [num_requests + 1], prefix sums of the requests' rows. Decoding requests
            come first.
        num_rows: rows of the step; those past cu_seqlens_q[-1] are padding.
        num_pages: pages of the caches.
        page_size: tokens of a page, a multiple of compress_ratio.
        compress_ratio: tokens of a group: 2, 4 or 8.
        num_decodes, decode_query_len: the decoding requests and the rows of each, from
            `split_batch`. Without them cu_seqlens_q must be on the CPU and is split here.
        max_decode_query_len: rows up to which a request decodes, for that split.

    Returns:
        (Metadata, Split): int32 arrays [num_rows], and Python ints. Where the offsets are on a GPU,
        num_prefill_tokens counts padding rows too.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype; decoding requests of
            different numbers of rows; on a CPU, lengths or offsets that break the contract.

    Caller's contract: cu_seqlens_q rises from 0 to at most num_rows and agrees with num_decodes and
    decode_query_len; seq_lens are in [0, pages_per_seq * page_size]. The CPU checks that, a GPU
    under JAXATTN_DEBUG=1.

    Source: visible groups as in Qwen4ExpTextQSAIndexer of transformers 5.24.
    """
    require_same_device(page_table=page_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q)
    given: dict[str, Any] = dict(
        num_rows=num_rows, num_pages=num_pages, page_size=page_size, compress_ratio=compress_ratio
    )
    arrays = dict(page_table=page_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q)
    counts: dict[str, Any] = dict(num_decodes=num_decodes, decode_query_len=decode_query_len)
    problem = describe.describe_metadata(**arrays, **given, **counts)

    def checked_split() -> Split:
        check_lengths(seq_lens.tolist(), page_table.shape[1] * page_size)
        offsets, most = cu_seqlens_q.tolist(), max_decode_query_len
        return host_split(offsets, num_rows, **counts, max_decode_query_len=most)

    if not launch.uses_kernels(page_table):
        split = checked_split()
        return build(**arrays, **given), split
    if num_decodes is None or decode_query_len is None:
        raise ValueError(
            "num_decodes and decode_query_len must be given for arrays on a GPU: take them from "
            "qsa.split_batch(...) of the host's offsets"
        )
    debug.check(checked_split)
    built = launch.run(plan.plan_metadata(problem), arrays)
    return Metadata(*(built[name] for name in METADATA)), split_of(problem)


def split_of(problem: QSAProblem) -> Split:
    """The split of a batch whose lengths are not known here: padding rows count as prefill."""
    return Split(
        num_decodes=problem.num_decodes,
        decode_query_len=problem.decode_query_len,
        num_decode_tokens=problem.num_decode_rows,
        num_prefills=problem.num_prefills,
        num_prefill_tokens=problem.num_prefill_rows,
    )


def host_split(
    offsets: list[int],
    num_rows: int,
    num_decodes: int | None,
    decode_query_len: int | None,
    max_decode_query_len: int,
) -> Split:
    """The split of checked offsets; ValueError where they disagree with what is given."""
    lengths = [end - begin for begin, end in itertools.pairwise(offsets)]
    if offsets[0] != 0 or offsets[-1] > num_rows or min(lengths, default=0) < 0:
        raise ValueError(
            f"cu_seqlens_q must rise from 0 to at most num_rows = {num_rows}, got {offsets}"
        )
    if num_decodes is None:
        split = split_batch(offsets, max_decode_query_len)
    else:
        split = make_split(lengths, num_decodes)
    if decode_query_len is not None and split.num_decodes:
        if split.decode_query_len != decode_query_len:
            raise ValueError(
                "QSA decode rows must form a uniform request batch of decode_query_len = "
                f"{decode_query_len} rows each, got {split.decode_query_len}"
            )
    return split
