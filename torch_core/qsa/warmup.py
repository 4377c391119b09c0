"""Compiles ahead what a server's limits can reach."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from .. import checks
from ..checks import dtype_name
from ..dispatch import Spec
from . import describe, launch, plan, plan_attend, plan_select
from .api import WORKSPACE_BYTES
from .metadata import Metadata
from .problem import METADATA, CompressProblem, QSAProblem
from .support import require_attend, require_compress, require_select

# Classes of sizes change at most at these numbers of rows and at powers of two.
_EXACT_ROWS = 512


_INTEGERS = (
    "page_table", "seq_lens", "cu_seqlens_q", *METADATA, "ring_ids", "rotary_positions",
    "selected", "token_indices", "counts",
)  # fmt: skip


def warmup(
    key_cache: Tensor,
    compressed_cache: Tensor,
    ring: Tensor,
    weight: Tensor,
    cos: Tensor,
    *,
    num_qo_heads: int,
    index_heads: int,
    budget: int,
    pages_per_seq: int,
    max_requests: int,
    max_rows: int,
    max_draft: int = 0,
    eps: float = 1e-6,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> int:
    """Compiles every kernel that steps within these limits can reach, without launching one.

    Args:
        key_cache, compressed_cache, ring, weight, cos: arrays as the calls will get them: their
            shapes, dtypes and device count, not their values. Queries have the ring's dtype, gates
            too.
        num_qo_heads, index_heads: of the queries.
        budget, eps, workspace_bytes: as the calls will get them.
        pages_per_seq: columns of the page table.
        max_requests, max_rows: of one step.
        max_draft: drafts of a decoding request: it has 1 to 1 + max_draft rows. Steps of decoding
            requests alone may attend to selections wider by up to max_draft / compress_ratio
            groups, rounded up: those of `jaxattn.speculative.reuse_selection`.

    Returns:
        How many kernels were compiled: 0 on a CPU, and when called again.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype.
        NotImplementedError: no kernel for these sizes or dtypes.
    """
    wanted = reachable(
        key_cache,
        compressed_cache,
        ring,
        weight,
        cos,
        num_qo_heads=num_qo_heads,
        index_heads=index_heads,
        budget=budget,
        pages_per_seq=pages_per_seq,
        max_requests=max_requests,
        max_rows=max_rows,
        max_draft=max_draft,
        eps=eps,
        workspace_bytes=workspace_bytes,
    )
    if not launch.uses_kernels(key_cache):
        return 0
    with launch.on_device(key_cache.device):
        return sum(map(launch.compile_ahead, sorted(wanted, key=repr)))


def reachable(
    key_cache: Any,
    compressed_cache: Any,
    ring: Any,
    weight: Any,
    cos: Any,
    *,
    num_qo_heads: int,
    index_heads: int,
    budget: int,
    pages_per_seq: int,
    max_requests: int,
    max_rows: int,
    max_draft: int,
    eps: float,
    workspace_bytes: int,
) -> set[launch.Specialization]:
    """The kernels that steps within the limits of a `warmup` call use."""
    max_requests = checks.integer("max_requests", max_requests, 1)
    max_rows = checks.integer("max_rows", max_rows, 1)
    max_draft = checks.integer("max_draft", max_draft, 0)
    workspace_bytes = checks.integer("workspace_bytes", workspace_bytes, 0, 2**63 - 1)
    of_row = _describe(
        key_cache,
        compressed_cache,
        ring,
        weight,
        cos,
        num_qo_heads=num_qo_heads,
        index_heads=index_heads,
        budget=budget,
        pages_per_seq=pages_per_seq,
        decode_query_len=1 + max_draft,
        eps=eps,
    )
    # A selection that serves drafts too is wider by the groups that they may complete.
    ratio, topk = of_row.select.compress_ratio, of_row.select.topk
    reused = range(topk + 1, topk + 1 - (-max_draft // ratio))
    chains = [plan.plan_metadata(of_row.select)]
    for width in (topk, *reused):
        chains.append(plan_select.plan_expand(replace(of_row.expand, topk=width)))
    for flags in range(4):
        options = dict(ring_ids=bool(flags & 1), rotary_positions=bool(flags & 2))
        chains.append(plan.plan_compress(replace(of_row.compress, **options)))
    dtypes = dict.fromkeys(_INTEGERS, "int32")
    dtypes |= dict.fromkeys(("index_key", "ring", "query", "index_query", "gate"), dtype_name(ring))
    dtypes |= dict.fromkeys(("key_cache", "value_cache"), dtype_name(key_cache))
    dtypes |= dict.fromkeys(("cos", "sin"), dtype_name(cos))
    dtypes |= dict.fromkeys(("sm_scale", "k_scale", "v_scale"), "float32")
    dtypes |= dict(weight=dtype_name(weight), compressed_cache=dtype_name(compressed_cache))
    found: set[launch.Specialization] = set()
    for chain in chains:
        found |= launch.specializations(chain, dtypes)
    for fields in _batches(max_requests, max_rows, 1 + max_draft):
        select, attend = replace(of_row.select, **fields), replace(of_row.attend, **fields)
        widths = (topk,) if attend.num_prefill_rows else (topk, *reused)
        for flag in (False, True):
            chain = plan_select.plan_select(select, workspace_bytes, tokens=flag)
            found |= launch.specializations(chain, dtypes)
            for width in widths:
                chain = plan_attend.plan_attend(replace(attend, topk=width), gate=flag)
                found |= launch.specializations(chain, dtypes)
    return found


class _Problems(NamedTuple):
    compress: CompressProblem
    select: QSAProblem
    expand: QSAProblem
    attend: QSAProblem


def _describe(
    key_cache: Any,
    compressed_cache: Any,
    ring: Any,
    weight: Any,
    cos: Any,
    *,
    num_qo_heads: int,
    index_heads: int,
    budget: int,
    pages_per_seq: int,
    decode_query_len: int,
    eps: float,
) -> _Problems:
    """The problems of a step of one row, checked like the calls' own."""
    shapes = checks.Shapes()
    checks.cache_shapes(shapes, key_cache, key_cache, "NHD")
    axes = ("num_pages", "groups_per_page", 1, "index_dim")
    shapes.check("compressed_cache", compressed_cache, (*describe.FLOATS, describe.E4M3), axes)
    shapes.check("ring", ring, describe.FLOATS, ("num_rings", "ring_rows", "index_dim"))
    page_size, groups = shapes["page_size"], shapes["groups_per_page"]
    ratio = page_size // max(groups, 1)
    if not ratio:
        raise ValueError(
            f"compressed_cache must have page_size / compress_ratio groups a page, got {groups} "
            f"for page_size {page_size}"
        )
    describe.check_pages(key_cache, key_cache, compressed_cache, ratio)
    sizes = dict(num_qo_heads=num_qo_heads, index_heads=index_heads, pages_per_seq=pages_per_seq)
    shapes.sizes |= {name: checks.integer(name, value, 1) for name, value in sizes.items()}

    def spec(*axes: str | int, dtype: str = "int32") -> Spec:
        return Spec(tuple(shapes[a] if isinstance(a, str) else a for a in axes), dtype)

    row, page_table, dtype = spec(1), spec(1, "pages_per_seq"), dtype_name(ring)
    metadata = Metadata(row, row, row, row)
    compress = describe.describe_compress(
        spec(1, "index_dim", dtype=dtype),
        ring,
        compressed_cache,
        metadata,
        row,
        weight,
        cos,
        cos,
        compress_ratio=ratio,
        decode_query_len=decode_query_len,
        eps=eps,
        ring_ids=row,
    )
    select = describe.describe_select(
        spec(1, "index_heads", "index_dim", dtype=dtype),
        compressed_cache,
        page_table,
        metadata,
        budget=budget,
        compress_ratio=ratio,
    )
    expand = describe.describe_expand(spec(1, select.topk), metadata, compress_ratio=ratio)
    attend, _ = describe.describe_attend(
        spec(1, "num_qo_heads", "head_dim", dtype=dtype),
        key_cache,
        key_cache,
        page_table,
        metadata,
        spec(1, select.num_selected),
        row,
        compress_ratio=ratio,
    )
    require_compress(compress)
    require_select(select)
    require_attend(attend)
    return _Problems(compress, select, expand, attend)


def _batches(max_requests: int, max_rows: int, max_query_len: int) -> Iterator[dict[str, int]]:
    """Batches of every class: all decode batches, alone and with the least and the most prefill,
    and prefill alone."""
    powers = {(1 << bit) + near for bit in range(31) for near in (-1, 0, 1)}
    sizes = powers | set(range(1, _EXACT_ROWS + 1)) | {max_rows}
    for rows in sorted(size for size in sizes if 0 < size <= max_rows):
        yield dict(num_rows=rows, num_requests=1, num_decodes=0, decode_query_len=1)
    for query_len in range(1, max_query_len + 1):
        for decodes in range(1, min(max_requests, max_rows // query_len) + 1):
            rows = decodes * query_len
            prefills = {0}
            if decodes < max_requests:
                prefills |= {min(1, max_rows - rows), max_rows - rows}
            for prefill in sorted(prefills):
                yield dict(
                    num_rows=rows + prefill,
                    num_requests=decodes + (prefill > 0),
                    num_decodes=decodes,
                    decode_query_len=query_len,
                )
