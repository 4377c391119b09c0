"""The public calls: check, then run the reference on a CPU and the planned kernels on a GPU."""

from typing import Any

import torch
from jaxtyping import Float, Float32, Int32, Shaped
from torch import Tensor

from .. import checks, debug
from ..decode import Scale
from ..launch import require_no_grad, require_out, require_same_device
from . import describe, launch, plan, plan_attend, plan_select, reference
from .metadata import Metadata
from .places import check_places, check_requests, check_rotary, places_of
from .problem import METADATA
from .support import require_attend, require_compress, require_select

WORKSPACE_BYTES = 256 * 2**20


def prepare_query(
    projection: Float[Tensor, "num_rows index_heads index_dim"],
    weight: Float[Tensor, " index_dim"],
    cos: Float[Tensor, "max_positions half"],
    sin: Float[Tensor, "max_positions half"],
    positions: Int32[Tensor, " num_rows"],
    *,
    eps: float = 1e-6,
) -> Float[Tensor, "num_rows index_heads index_dim"]:
    """Index queries from their projection: RMSNorm with weight 1 + w, then rotation.

    Args:
        projection: [num_rows, index_heads, index_dim]; bfloat16, float16 or float32.
        weight: [index_dim], w of the norm; bfloat16, float16 or float32.
        cos, sin: [max_positions, rotary_dim // 2], rotary tables, as in `compress`.
        positions: int32 [num_rows], row of the tables for each query; a negative one is padding.
        eps: of the norm.

    Returns:
        [num_rows, index_heads, index_dim] in the projection's dtype.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype; on a CPU, a position
            without a row in the tables.
        NotImplementedError: a gradient is asked for.

    Caller's contract: the tables have a row for every position. The CPU checks it.

    Source: Qwen4ExpTextQSAIndexer of transformers 5.24.
    """
    eps = describe.describe_query(projection, weight, cos, sin, positions, eps=eps)
    require_same_device(projection=projection, weight=weight, cos=cos, sin=sin, positions=positions)
    require_no_grad("qsa.prepare_query", projection, weight)
    if not launch.uses_kernels(projection):
        check_rotary(cos, positions.clamp(min=0))
    with torch.no_grad():
        return reference.prepare_query(projection, weight, cos, sin, positions, eps)


def compress(
    index_key: Float[Tensor, "num_rows index_dim"],
    ring: Float[Tensor, "num_rings ring_rows index_dim"],
    compressed_cache: Shaped[Tensor, "num_pages groups_per_page 1 index_dim"],
    metadata: Metadata,
    seq_lens: Int32[Tensor, " num_requests"],
    weight: Float[Tensor, " index_dim"],
    cos: Float[Tensor, "max_positions half"],
    sin: Float[Tensor, "max_positions half"],
    *,
    compress_ratio: int,
    decode_query_len: int = 1,
    eps: float = 1e-6,
    ring_ids: Int32[Tensor, " num_requests"] | None = None,
    rotary_positions: Int32[Tensor, " num_rows"] | None = None,
) -> tuple[
    Float[Tensor, "num_rings ring_rows index_dim"],
    Shaped[Tensor, "num_pages groups_per_page 1 index_dim"],
]:
    """Writes the keys of the groups that this step completes, and keeps the raw keys of unfinished
    groups, in place.

    The key of a group is the float32 mean of its raw keys, rounded to their dtype, then RMSNorm
    with weight 1 + w, then rotary embedding (NeoX halves) at the group's first position.

    Args:
        index_key: [num_rows, index_dim], raw keys: the projection's output. bfloat16, float16 or
            float32.
        ring: [num_rings, ring_rows, index_dim], in the dtype of index_key. The raw key at position
            p lies in row p % ring_rows. See `ring_rows` for how many rows drafts need.
        compressed_cache: [num_pages, page_size // compress_ratio, 1, index_dim], in the dtype of
            index_key or float8_e4m3fn (saturated, without a scale).
        metadata: of this step.
        seq_lens: int32 [num_requests], as in `build_metadata`.
        weight: [index_dim], w of the norm; bfloat16, float16 or float32.
        cos, sin: [max_positions, rotary_dim // 2], rotary tables of one dtype, bfloat16, float16 or
            float32; see `rotary_tables`.
        compress_ratio: tokens of a group.
        decode_query_len: rows of a decoding request, drafts included: checks the ring's size.
        eps: of the norm.
        ring_ids: int32 [num_requests], ring of each request; by default request i has ring i.
        rotary_positions: int32 [num_rows], row of the tables for the group that each row completes;
            by default the position of the group's first token. Entries of other rows are not read.

    Returns:
        (ring, compressed_cache), the tensors that were passed.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype; on a CPU, a row that
            breaks the second part of the contract.
        NotImplementedError: no kernel for these sizes or dtypes, or a gradient is asked for.

    Caller's contract: the raw keys of an unfinished group before this step are in the ring: earlier
    steps wrote them. Second, the metadata is of these caches and requests, the ring of each request
    that has rows exists, and tables have a row for every rotary position. The CPU checks that, a
    GPU under JAXATTN_DEBUG=1: without it, what belongs to a ring or slot that does not exist is not
    written.

    Source: Qwen4ExpTextQSAIndexer of transformers 5.24.
    """
    arrays: dict[str, Any] = dict(
        index_key=index_key,
        ring=ring,
        compressed_cache=compressed_cache,
        metadata=metadata,
        seq_lens=seq_lens,
        weight=weight,
        cos=cos,
        sin=sin,
    )
    optional: dict[str, Any] = dict(ring_ids=ring_ids, rotary_positions=rotary_positions)
    problem = describe.describe_compress(
        **arrays,
        **optional,
        compress_ratio=compress_ratio,
        decode_query_len=decode_query_len,
        eps=eps,
    )
    flat = _flat(arrays) | optional
    require_same_device(**flat)
    require_no_grad("qsa.compress", *flat.values())
    _require_caches(ring=ring, compressed_cache=compressed_cache)
    with torch.no_grad():

        def check() -> None:
            given = (metadata, seq_lens, cos, ring_ids, rotary_positions)
            check_places(*given, **places_of(problem))

        if not launch.uses_kernels(index_key):
            check()
            reference.compress(
                **arrays, **optional, compress_ratio=problem.compress_ratio, eps=problem.eps
            )
        else:
            require_compress(problem)
            debug.check(check)
            launch.run(plan.plan_compress(problem), flat)
    return ring, compressed_cache


def select(
    index_query: Float[Tensor, "num_rows index_heads index_dim"],
    compressed_cache: Shaped[Tensor, "num_pages groups_per_page 1 index_dim"],
    page_table: Int32[Tensor, "num_requests pages_per_seq"],
    metadata: Metadata,
    *,
    budget: int,
    compress_ratio: int,
    num_decodes: int = 0,
    decode_query_len: int = 1,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> Int32[Tensor, "num_rows topk"]:
    """Picks the groups that each row attends to.

    score[g] = sum over heads of relu(index_query . key[g]), float32; the min(topk, visible) groups
    of highest score, topk = budget // compress_ratio. Of equal scores the lowest group wins. A
    product that is NaN counts as 0: keys that were never written rank lowest.

    Args:
        index_query: [num_rows, index_heads, index_dim]; see `prepare_query`.
        compressed_cache: [num_pages, page_size // compress_ratio, 1, index_dim], in the query's
            dtype or float8_e4m3fn.
        page_table: int32 [num_requests, pages_per_seq].
        metadata: of this step.
        budget: tokens to keep per row, a multiple of compress_ratio.
        compress_ratio: tokens of a group.
        num_decodes, decode_query_len: from the Split; they choose kernels, not results.
        workspace_bytes: bound on scratch memory; a smaller one than one row needs still works.

    Returns:
        int32 [num_rows, topk]: groups in rising order, then -1.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype.
        NotImplementedError: no kernel for these sizes or dtypes, or a gradient is asked for.

    Caller's contract: the metadata is of this page table; the CPU checks that.

    Source: Qwen4ExpTextQSAIndexer of transformers 5.24.
    """
    return _select(
        dict(
            index_query=index_query,
            compressed_cache=compressed_cache,
            page_table=page_table,
            metadata=metadata,
        ),
        workspace_bytes,
        tokens=False,
        budget=budget,
        compress_ratio=compress_ratio,
        num_decodes=num_decodes,
        decode_query_len=decode_query_len,
    )["selected"]


def _select(
    arrays: dict[str, Any], workspace_bytes: int, *, tokens: bool, **options: int
) -> dict[str, Tensor]:
    """`selected`, and with `tokens` also token_indices and counts."""
    problem = describe.describe_select(**arrays, **options)
    workspace_bytes = checks.integer("workspace_bytes", workspace_bytes, 0, 2**63 - 1)
    flat = _flat(arrays)
    require_same_device(**flat)
    require_no_grad("qsa.select", *flat.values())
    _require_caches(compressed_cache=flat["compressed_cache"])
    with torch.no_grad():
        if launch.uses_kernels(flat["index_query"]):
            require_select(problem)
            return launch.run(
                plan_select.plan_select(problem, workspace_bytes, tokens=tokens), flat
            )
        check_requests(arrays["metadata"], len(arrays["page_table"]))
        result = dict(selected=reference.select(**arrays, topk=problem.topk))
        if tokens:
            result["token_indices"], result["counts"] = reference.expand(
                result["selected"], flat["positions"], compress_ratio=problem.compress_ratio
            )
        return result


def expand(
    selected: Int32[Tensor, "num_rows topk"], metadata: Metadata, *, compress_ratio: int
) -> tuple[Int32[Tensor, "num_rows num_selected"], Int32[Tensor, " num_rows"]]:
    """Turns selected groups into tokens, and adds the tokens of the row's unfinished group.

    Args:
        selected: int32 [num_rows, topk] of `select`. Draft rows may reuse that of an earlier row.
        metadata: of this step.
        compress_ratio: tokens of a group.

    Returns:
        token_indices int32 [num_rows, topk * compress_ratio + compress_ratio - 1]: places in the
        row's request, those of rank i in columns i * compress_ratio and on, then the unfinished
        group's up to the row's own, then -1; and counts int32 [num_rows] of valid entries.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype.

    Source: Qwen4ExpTextQSAIndexer of transformers 5.24.
    """
    problem = describe.describe_expand(selected, metadata, compress_ratio=compress_ratio)
    flat = _flat(dict(selected=selected, metadata=metadata))
    require_same_device(**flat)
    if not launch.uses_kernels(selected):
        return reference.expand(selected, metadata.positions, compress_ratio=problem.compress_ratio)
    expanded = launch.run(plan_select.plan_expand(problem), flat)
    return expanded["token_indices"], expanded["counts"]


def attend(
    query: Float[Tensor, "num_rows num_qo_heads head_dim"],
    key_cache: Shaped[Tensor, "num_pages page_size num_kv_heads head_dim"],
    value_cache: Shaped[Tensor, "num_pages page_size num_kv_heads head_dim"],
    page_table: Int32[Tensor, "num_requests pages_per_seq"],
    metadata: Metadata,
    token_indices: Int32[Tensor, "num_rows num_selected"],
    counts: Int32[Tensor, " num_rows"],
    *,
    compress_ratio: int,
    sm_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    gate: Float[Tensor, "num_rows num_qo_heads head_dim"] | None = None,
    num_decodes: int = 0,
    decode_query_len: int = 1,
    return_lse: bool = False,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
) -> (
    Float[Tensor, "num_rows num_qo_heads head_dim"]
    | tuple[
        Float[Tensor, "num_rows num_qo_heads head_dim"], Float32[Tensor, "num_rows num_qo_heads"]
    ]
):
    """Attends each row to its listed tokens.

    out = softmax(query . key * sm_scale * k_scale) value * v_scale, in float32; with a gate the
    result is rounded to the output's dtype and multiplied by sigmoid(gate).

    Args:
        query: [num_rows, num_qo_heads, head_dim]; bfloat16, float16 or float32.
        key_cache, value_cache: [num_pages, page_size, num_kv_heads, head_dim], in the query's dtype
            or float8_e4m3fn.
        page_table: int32 [num_requests, pages_per_seq].
        metadata: of this step.
        token_indices, counts: of `expand`. Entries past the count are not read; one that is out of
            range or on a page that is not mapped is left out.
        compress_ratio: tokens of a group.
        sm_scale: default head_dim ** -0.5. Scales are numbers or 0-d arrays.
        k_scale, v_scale: dequantisation factors of the caches; default 1.
        gate: [num_rows, num_qo_heads, head_dim], before the sigmoid; the query's dtype or float32.
        num_decodes, decode_query_len: from the Split; they choose kernels, not results.
        return_lse: also return the log-sum-exp of the scores.
        out: tensor, or (out, lse) with return_lse, to write the result to; no part of an argument.

    Returns:
        out in the query's dtype, and with return_lse also lse float32 [num_rows, num_qo_heads],
        natural log. A row without a valid entry gives 0 and -inf.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype.
        NotImplementedError: no kernel for these sizes or dtypes, or a gradient is asked for.

    Caller's contract: the metadata is of this page table; the CPU checks that.

    Source: Qwen4ExpTextAttention of transformers 5.24.
    """
    arrays: dict[str, Any] = dict(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        page_table=page_table,
        metadata=metadata,
        token_indices=token_indices,
        counts=counts,
    )
    problem, scales = describe.describe_attend(
        **arrays,
        compress_ratio=compress_ratio,
        sm_scale=sm_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        gate=gate,
        num_decodes=num_decodes,
        decode_query_len=decode_query_len,
    )
    return_lse = checks.flag("return_lse", return_lse)
    flat = _flat(arrays) | dict(gate=gate)
    require_same_device(**flat, **scales)
    require_no_grad("qsa.attend", *flat.values(), *scales.values())
    _require_caches(key_cache=key_cache, value_cache=value_cache)
    memory = _memory(query, return_lse, out)
    with torch.no_grad():
        if not launch.uses_kernels(query):
            check_requests(metadata, len(page_table))
            numbers: dict[str, Any] = {name: float(scale) for name, scale in scales.items()}
            result: dict[str, Tensor] = {}
            result["out"], result["lse"] = reference.attend(**arrays, gate=gate, **numbers)
        else:
            require_attend(problem)
            chain = plan_attend.plan_attend(problem, gate=gate is not None)
            numbers = {name: launch.scalar(scale, query.device) for name, scale in scales.items()}
            direct = {name: x for name, x in memory.items() if launch.starts_right(x)}
            result = launch.run(chain, flat | numbers, direct)
        for name, target in memory.items():
            if target is not result[name]:
                target.copy_(result[name])
                result[name] = target
    return (result["out"], result["lse"]) if return_lse else result["out"]


def attention(
    query: Float[Tensor, "num_rows num_qo_heads head_dim"],
    index_query: Float[Tensor, "num_rows index_heads index_dim"],
    index_key: Float[Tensor, "num_rows index_dim"],
    key_cache: Shaped[Tensor, "num_pages page_size num_kv_heads head_dim"],
    value_cache: Shaped[Tensor, "num_pages page_size num_kv_heads head_dim"],
    compressed_cache: Shaped[Tensor, "num_pages groups_per_page 1 index_dim"],
    ring: Float[Tensor, "num_rings ring_rows index_dim"],
    page_table: Int32[Tensor, "num_requests pages_per_seq"],
    seq_lens: Int32[Tensor, " num_requests"],
    metadata: Metadata,
    weight: Float[Tensor, " index_dim"],
    cos: Float[Tensor, "max_positions half"],
    sin: Float[Tensor, "max_positions half"],
    *,
    budget: int,
    compress_ratio: int,
    eps: float = 1e-6,
    ring_ids: Int32[Tensor, " num_requests"] | None = None,
    rotary_positions: Int32[Tensor, " num_rows"] | None = None,
    sm_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    gate: Float[Tensor, "num_rows num_qo_heads head_dim"] | None = None,
    num_decodes: int = 0,
    decode_query_len: int = 1,
    workspace_bytes: int = WORKSPACE_BYTES,
    return_lse: bool = False,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
) -> (
    Float[Tensor, "num_rows num_qo_heads head_dim"]
    | tuple[
        Float[Tensor, "num_rows num_qo_heads head_dim"], Float32[Tensor, "num_rows num_qo_heads"]
    ]
):
    """One layer's step: `compress`, `select`, `expand` and `attend`, with their arguments.

    Writes `ring` and `compressed_cache` in place. The step's keys and values must be in their
    caches: call `append_kv` before.

    Args:
        query, key_cache, value_cache, sm_scale, k_scale, v_scale, gate, return_lse, out: as in
            `attend`.
        index_query, budget, workspace_bytes: as in `select`.
        index_key, ring, compressed_cache, seq_lens, weight, cos, sin, eps, ring_ids,
            rotary_positions: as in `compress`.
        page_table, metadata, compress_ratio, num_decodes, decode_query_len: as in all.

    Returns:
        What `attend` returns.

    Raises, and Caller's contract: as those calls.
    """
    describe.check_pages(key_cache, value_cache, compressed_cache, compress_ratio)
    decodes = dict(num_decodes=num_decodes, decode_query_len=decode_query_len)
    compress(
        index_key,
        ring,
        compressed_cache,
        metadata,
        seq_lens,
        weight,
        cos,
        sin,
        compress_ratio=compress_ratio,
        decode_query_len=decode_query_len,
        eps=eps,
        ring_ids=ring_ids,
        rotary_positions=rotary_positions,
    )
    selected = _select(
        dict(
            index_query=index_query,
            compressed_cache=compressed_cache,
            page_table=page_table,
            metadata=metadata,
        ),
        workspace_bytes,
        tokens=True,
        budget=budget,
        compress_ratio=compress_ratio,
        **decodes,
    )
    return attend(
        query,
        key_cache,
        value_cache,
        page_table,
        metadata,
        selected["token_indices"],
        selected["counts"],
        compress_ratio=compress_ratio,
        sm_scale=sm_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        gate=gate,
        return_lse=return_lse,
        out=out,
        **decodes,
    )


def _flat(arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays by name, those of the metadata among them."""
    flat = dict(arrays)
    return flat | dict(zip(METADATA, flat.pop("metadata"), strict=True))


def _require_caches(**caches: Tensor) -> None:
    """Caches are not copied behind the caller's back."""
    for name, cache in caches.items():
        if not cache.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {list(cache.stride())}")
        if launch.uses_kernels(cache) and cache.data_ptr() % 16:
            raise ValueError(f"{name} must start at a multiple of 16 bytes")


def _memory(query: Tensor, return_lse: bool, out: Any) -> dict[str, Tensor]:
    """The caller's tensors for the results, checked."""
    if out is None:
        return {}
    names = ("out", "lse") if return_lse else ("out",)
    tensors = tuple(out) if isinstance(out, tuple | list) else (out,)
    if len(tensors) != len(names):
        form = "(out, lse)" if return_lse else "one tensor"
        raise ValueError(f"out must be {form}, got {len(tensors)} tensors")
    memory: dict[str, Tensor] = dict(zip(names, tensors, strict=True))
    require_out("out", memory["out"], query.shape, query.dtype, query.device)
    if return_lse:
        require_out("out: lse", memory["lse"], query.shape[:2], torch.float32, query.device)
    return memory
