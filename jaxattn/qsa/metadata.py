"""Row metadata of a step."""

from typing import Any

import numpy as np
from jax.core import Tracer
from jaxtyping import Int32

from torch_core.qsa import Metadata, Split, describe, plan
from torch_core.qsa.metadata import host_split, split_of
from torch_core.qsa.problem import METADATA

from .. import _launch
from ..decode import AnyArray
from . import _run


def build_metadata(
    page_table: Int32[AnyArray, "num_requests pages_per_seq"],
    seq_lens: Int32[AnyArray, " num_requests"],
    cu_seqlens_q: Int32[AnyArray, " num_requests+1"],
    *,
    num_rows: int,
    num_pages: int,
    page_size: int,
    compress_ratio: int,
    num_decodes: int | None = None,
    decode_query_len: int | None = None,
    max_decode_query_len: int = 1,
    via: str = "auto",
) -> tuple[Metadata, Split]:
    """Describes each row of a step, once for all layers.

    Row i of a request with n rows stands at position p = seq_len - n + i and sees
    min((p + 1) // compress_ratio, seq_len // compress_ratio) groups.

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
            `split_batch`. Without them cu_seqlens_q must be NumPy's, or a concrete array on the
            CPU, and is split here.
        max_decode_query_len: rows up to which a request decodes, for that split.
        via: "auto", "triton" or "dlpack".

    Returns:
        (Metadata, Split): int32 arrays [num_rows], and Python ints: they choose kernels, so hand
        them to the calls of the same trace and do not return them from a jit. Where the offsets
        are traced or on a GPU, num_prefill_tokens counts padding rows too.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype, while tracing; decoding
            requests of different numbers of rows.
        NotImplementedError: vmap or a gradient is asked for.
        jax.errors.JaxRuntimeError: on a CPU, at run time, lengths or traced offsets break the
            contract.

    Caller's contract: cu_seqlens_q rises from 0 to at most num_rows and agrees with num_decodes and
    decode_query_len; seq_lens are in [0, pages_per_seq * page_size]. The CPU checks that, a GPU
    under JAXATTN_DEBUG=1.

    Source: visible groups as in Qwen4ExpTextQSAIndexer of transformers 5.24.
    """
    given: dict[str, Any] = dict(
        num_rows=num_rows, num_pages=num_pages, page_size=page_size, compress_ratio=compress_ratio
    )
    arrays = dict(page_table=page_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q)
    counts: dict[str, Any] = dict(num_decodes=num_decodes, decode_query_len=decode_query_len)
    describe.describe_metadata(**arrays, **given, **counts)
    _launch.require_jax(**arrays)
    way = _run.way(via)
    split = None
    if _on_host(cu_seqlens_q):
        offsets = np.asarray(cu_seqlens_q).tolist()
        split = host_split(offsets, num_rows, num_decodes, decode_query_len, max_decode_query_len)
        num_decodes, decode_query_len = split[:2]
    if num_decodes is None or decode_query_len is None:
        raise ValueError(
            "num_decodes and decode_query_len must be given for offsets that are traced or on a "
            "GPU: take them from qsa.split_batch(...) of the host's offsets"
        )
    counts = dict(num_decodes=num_decodes, decode_query_len=decode_query_len)
    problem = describe.describe_metadata(**arrays, **given, **counts)
    if way != "reference":
        numbers = dict(num_rows=num_rows, page_size=page_size, **counts)
        arrays = _run.checked("build_metadata", arrays, **numbers)
    metadata = Metadata(*_run.compute(_make, "build_metadata", arrays, way=way, **given, **counts))
    return metadata, split or split_of(problem)


def _make(arrays: dict[str, Any], *, way: str, **numbers: int) -> _run.Kernels | _run.Reference:
    problem = describe.describe_metadata(**arrays, **numbers)
    if way == "reference":
        results = tuple((name, (problem.num_rows,), "int32") for name in METADATA)
        pairs = tuple(numbers.items())
        return _run.Reference(call="build_metadata", numbers=pairs, results=results)
    return _run.Kernels(way=way, chain=plan.plan_metadata(problem), wanted=METADATA)


def _on_host(array: Any) -> bool:
    if isinstance(array, np.ndarray):
        return True
    if isinstance(array, Tracer) or not (array.is_fully_addressable or array.is_fully_replicated):
        return False
    return all(device.platform == "cpu" for device in array.devices())
