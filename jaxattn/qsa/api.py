"""The public calls: check, then launch kernels on a GPU and run the reference on a CPU."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int32, Shaped

from torch_core import checks
from torch_core.qsa import Metadata, describe, plan, plan_attend, plan_select
from torch_core.qsa.api import WORKSPACE_BYTES
from torch_core.qsa.places import places_of
from torch_core.qsa.problem import METADATA
from torch_core.qsa.support import require_attend, require_compress, require_select

from .. import _launch
from ..decode import AnyArray, Scale
from . import _run

SCALES = ("sm_scale", "k_scale", "v_scale")


def compress(
    index_key: Float[AnyArray, "num_rows index_dim"],
    ring: Float[AnyArray, "num_rings ring_rows index_dim"],
    compressed_cache: Shaped[AnyArray, "num_pages groups_per_page 1 index_dim"],
    metadata: Metadata,
    seq_lens: Int32[AnyArray, " num_requests"],
    weight: Float[AnyArray, " index_dim"],
    cos: Float[AnyArray, "max_positions half"],
    sin: Float[AnyArray, "max_positions half"],
    *,
    compress_ratio: int,
    decode_query_len: int = 1,
    eps: float = 1e-6,
    ring_ids: Int32[AnyArray, " num_requests"] | None = None,
    rotary_positions: Int32[AnyArray, " num_rows"] | None = None,
    via: str = "auto",
) -> tuple[
    Float[Array, "num_rings ring_rows index_dim"],
    Shaped[Array, "num_pages groups_per_page 1 index_dim"],
]:
    """Writes the keys of the groups that this step completes, and keeps the raw keys of unfinished
    groups.

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
        eps: of the norm, a Python number.
        ring_ids: int32 [num_requests], ring of each request; by default request i has ring i.
        rotary_positions: int32 [num_rows], row of the tables for the group that each row completes;
            by default the position of the group's first token. Entries of other rows are not read.
        via: "auto", "triton" or "dlpack".

    Returns:
        (ring, compressed_cache), new arrays: the memory of the donated ones, or copies.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype, while tracing.
        NotImplementedError: no kernel for these sizes or dtypes, or vmap or a gradient asked for.
        jax.errors.JaxRuntimeError: on a CPU, at run time, a row breaks the second part of the
            contract.

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
        ring_ids=ring_ids,
        rotary_positions=rotary_positions,
    )
    options = dict(compress_ratio=compress_ratio, decode_query_len=decode_query_len)
    problem = describe.describe_compress(**arrays, **options, eps=eps)
    flat = _flat(arrays)
    way = _run.way(via)
    if way != "reference":
        flat = _run.checked("compress", flat, **places_of(problem))
    new_ring, new_cache = _run.compute(
        _make_compress, "compress", flat, way=way, eps=problem.eps, **options
    )
    return new_ring, new_cache


def _make_compress(
    arrays: dict[str, Any], *, way: str, eps: float, **options: int
) -> _run.Kernels | _run.Reference:
    problem = describe.describe_compress(**_run.nested(arrays), **options, eps=eps)
    if way == "reference":
        return _run.Reference(
            call="compress",
            numbers=(*options.items(), ("eps", problem.eps)),
            results=(
                ("ring", problem.ring_shape, problem.key_dtype),
                ("compressed_cache", problem.cache_shape, problem.index_dtype),
            ),
            in_place=("ring", "compressed_cache"),
        )
    require_compress(problem)
    wanted = ("new_ring", "new_compressed_cache")
    return _run.Kernels(way=way, chain=plan.plan_compress(problem), wanted=wanted)


def select(
    index_query: Float[AnyArray, "num_rows index_heads index_dim"],
    compressed_cache: Shaped[AnyArray, "num_pages groups_per_page 1 index_dim"],
    page_table: Int32[AnyArray, "num_requests pages_per_seq"],
    metadata: Metadata,
    *,
    budget: int,
    compress_ratio: int,
    num_decodes: int = 0,
    decode_query_len: int = 1,
    workspace_bytes: int = WORKSPACE_BYTES,
    via: str = "auto",
) -> Int32[Array, "num_rows topk"]:
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
        via: "auto", "triton" or "dlpack".

    Returns:
        int32 [num_rows, topk]: groups in rising order, then -1.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype, while tracing.
        NotImplementedError: no kernel for these sizes or dtypes, or vmap or a gradient asked for.

    Caller's contract: the metadata is of this page table; the CPU checks that, at run time.

    Source: Qwen4ExpTextQSAIndexer of transformers 5.24.
    """
    (selected,) = _select(
        dict(
            index_query=index_query,
            compressed_cache=compressed_cache,
            page_table=page_table,
            metadata=metadata,
        ),
        workspace_bytes,
        via,
        wanted=("selected",),
        budget=budget,
        compress_ratio=compress_ratio,
        num_decodes=num_decodes,
        decode_query_len=decode_query_len,
    )
    return selected


def _select(
    arrays: dict[str, Any],
    workspace_bytes: int,
    via: str,
    *,
    wanted: tuple[str, ...],
    **options: int,
) -> tuple[Array, ...]:
    """`wanted`: ("selected",), or ("token_indices", "counts") without a second launch on a GPU."""
    problem = describe.describe_select(**arrays, **options)
    workspace_bytes = checks.integer("workspace_bytes", workspace_bytes, 0, 2**63 - 1)
    flat = _flat(arrays)
    way = _run.way(via)
    asked = wanted if way != "reference" else ("selected",)
    results = _run.compute(
        _make_select,
        "select",
        flat,
        way=way,
        workspace_bytes=workspace_bytes,
        wanted=asked,
        **options,
    )
    if asked == wanted:
        return results
    return expand(results[0], arrays["metadata"], compress_ratio=problem.compress_ratio)


def _make_select(
    arrays: dict[str, Any],
    *,
    way: str,
    workspace_bytes: int,
    wanted: tuple[str, ...],
    **options: int,
) -> _run.Kernels | _run.Reference:
    problem = describe.describe_select(**_run.nested(arrays), **options)
    if way == "reference":
        return _run.Reference(
            call="select",
            numbers=tuple(options.items()),
            results=(("selected", (problem.num_rows, problem.topk), "int32"),),
        )
    require_select(problem)
    tokens = wanted != ("selected",)
    chain = plan_select.plan_select(problem, workspace_bytes, tokens=tokens)
    return _run.Kernels(way=way, chain=chain, wanted=wanted)


def expand(
    selected: Int32[AnyArray, "num_rows topk"],
    metadata: Metadata,
    *,
    compress_ratio: int,
    via: str = "auto",
) -> tuple[Int32[Array, "num_rows num_selected"], Int32[Array, " num_rows"]]:
    """Turns selected groups into tokens, and adds the tokens of the row's unfinished group.

    Args:
        selected: int32 [num_rows, topk] of `select`. Draft rows may reuse that of an earlier row.
        metadata: of this step.
        compress_ratio: tokens of a group.
        via: "auto", "triton" or "dlpack".

    Returns:
        token_indices int32 [num_rows, topk * compress_ratio + compress_ratio - 1]: places in the
        row's request, those of rank i in columns i * compress_ratio and on, then the unfinished
        group's up to the row's own, then -1; and counts int32 [num_rows] of valid entries.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype, while tracing.
        NotImplementedError: vmap or a gradient is asked for.

    Source: Qwen4ExpTextQSAIndexer of transformers 5.24.
    """
    problem = describe.describe_expand(selected, metadata, compress_ratio=compress_ratio)
    flat = _flat(dict(selected=selected, metadata=metadata))
    token_indices, counts = _run.compute(
        _make_expand, "expand", flat, way=_run.way(via), compress_ratio=problem.compress_ratio
    )
    return token_indices, counts


def _make_expand(
    arrays: dict[str, Any], *, way: str, compress_ratio: int
) -> _run.Kernels | _run.Reference:
    problem = describe.describe_expand(**_run.nested(arrays), compress_ratio=compress_ratio)
    if way == "reference":
        return _run.Reference(
            call="expand",
            numbers=(("compress_ratio", problem.compress_ratio),),
            results=(
                ("token_indices", (problem.num_rows, problem.num_selected), "int32"),
                ("counts", (problem.num_rows,), "int32"),
            ),
        )
    wanted = ("token_indices", "counts")
    return _run.Kernels(way=way, chain=plan_select.plan_expand(problem), wanted=wanted)


def attend(
    query: Float[AnyArray, "num_rows num_qo_heads head_dim"],
    key_cache: Shaped[AnyArray, "num_pages page_size num_kv_heads head_dim"],
    value_cache: Shaped[AnyArray, "num_pages page_size num_kv_heads head_dim"],
    page_table: Int32[AnyArray, "num_requests pages_per_seq"],
    metadata: Metadata,
    token_indices: Int32[AnyArray, "num_rows num_selected"],
    counts: Int32[AnyArray, " num_rows"],
    *,
    compress_ratio: int,
    sm_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    gate: Float[AnyArray, "num_rows num_qo_heads head_dim"] | None = None,
    num_decodes: int = 0,
    decode_query_len: int = 1,
    return_lse: bool = False,
    via: str = "auto",
) -> (
    Float[Array, "num_rows num_qo_heads head_dim"]
    | tuple[Float[Array, "num_rows num_qo_heads head_dim"], Float32[Array, "num_rows num_qo_heads"]]
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
        sm_scale: default head_dim ** -0.5. Scales are numbers or 0-d arrays, traced or not.
        k_scale, v_scale: dequantisation factors of the caches; default 1.
        gate: [num_rows, num_qo_heads, head_dim], before the sigmoid; the query's dtype or float32.
        num_decodes, decode_query_len: from the Split; they choose kernels, not results.
        return_lse: also return the log-sum-exp of the scores.
        via: "auto", "triton" or "dlpack".

    Returns:
        out in the query's dtype, and with return_lse also lse float32 [num_rows, num_qo_heads],
        natural log. A row without a valid entry gives 0 and -inf.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype, while tracing.
        NotImplementedError: no kernel for these sizes or dtypes, or vmap or a gradient asked for.

    Caller's contract: the metadata is of this page table; the CPU checks that, at run time.

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
        gate=gate,
    )
    options = dict(
        compress_ratio=compress_ratio, num_decodes=num_decodes, decode_query_len=decode_query_len
    )
    _, scales = describe.describe_attend(
        **arrays, **options, sm_scale=sm_scale, k_scale=k_scale, v_scale=v_scale
    )
    return_lse = checks.flag("return_lse", return_lse)
    flat = _flat(arrays | scales)
    way = _run.way(via)
    numbers = ()
    if way == "reference":
        numbers = tuple((name, x) for name, x in scales.items() if isinstance(x, float))
        flat = {name: array for name, array in flat.items() if name not in dict(numbers)}
    else:
        flat |= {name: _one_element(scale) for name, scale in scales.items()}
    out, lse = _run.compute(_make_attend, "attend", flat, way=way, scales=numbers, **options)
    return (out, lse) if return_lse else out


def _make_attend(
    arrays: dict[str, Any], *, way: str, scales: tuple[tuple[str, float], ...], **options: int
) -> _run.Kernels | _run.Reference:
    described = {name: x for name, x in arrays.items() if name not in SCALES}
    problem, _ = describe.describe_attend(**_run.nested(described), **options)
    if way == "reference":
        return _run.Reference(
            call="attend",
            numbers=(*options.items(), *scales),
            results=(
                ("out", tuple(arrays["query"].shape), problem.query_dtype),
                ("lse", tuple(arrays["query"].shape[:2]), "float32"),
            ),
        )
    require_attend(problem)
    chain = plan_attend.plan_attend(problem, gate="gate" in arrays)
    return _run.Kernels(way=way, chain=chain, wanted=("out", "lse"))


def attention(
    query: Float[AnyArray, "num_rows num_qo_heads head_dim"],
    index_query: Float[AnyArray, "num_rows index_heads index_dim"],
    index_key: Float[AnyArray, "num_rows index_dim"],
    key_cache: Shaped[AnyArray, "num_pages page_size num_kv_heads head_dim"],
    value_cache: Shaped[AnyArray, "num_pages page_size num_kv_heads head_dim"],
    compressed_cache: Shaped[AnyArray, "num_pages groups_per_page 1 index_dim"],
    ring: Float[AnyArray, "num_rings ring_rows index_dim"],
    page_table: Int32[AnyArray, "num_requests pages_per_seq"],
    seq_lens: Int32[AnyArray, " num_requests"],
    metadata: Metadata,
    weight: Float[AnyArray, " index_dim"],
    cos: Float[AnyArray, "max_positions half"],
    sin: Float[AnyArray, "max_positions half"],
    *,
    budget: int,
    compress_ratio: int,
    eps: float = 1e-6,
    ring_ids: Int32[AnyArray, " num_requests"] | None = None,
    rotary_positions: Int32[AnyArray, " num_rows"] | None = None,
    sm_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    gate: Float[AnyArray, "num_rows num_qo_heads head_dim"] | None = None,
    num_decodes: int = 0,
    decode_query_len: int = 1,
    workspace_bytes: int = WORKSPACE_BYTES,
    return_lse: bool = False,
    via: str = "auto",
) -> tuple[
    Float[Array, "num_rows num_qo_heads head_dim"]
    | tuple[
        Float[Array, "num_rows num_qo_heads head_dim"], Float32[Array, "num_rows num_qo_heads"]
    ],
    Float[Array, "num_rings ring_rows index_dim"],
    Shaped[Array, "num_pages groups_per_page 1 index_dim"],
]:
    """One layer's step: `compress`, `select`, `expand` and `attend`, with their arguments.

    The step's keys and values must be in their caches: call `append_kv` before.

    Args:
        query, key_cache, value_cache, sm_scale, k_scale, v_scale, gate, return_lse: as in `attend`.
        index_query, budget, workspace_bytes: as in `select`.
        index_key, ring, compressed_cache, seq_lens, weight, cos, sin, eps, ring_ids,
            rotary_positions: as in `compress`.
        page_table, metadata, compress_ratio, num_decodes, decode_query_len, via: as in all.

    Returns:
        (result, ring, compressed_cache): what `attend` returns, and what `compress` returns.

    Raises, and Caller's contract: as those calls.
    """
    describe.check_pages(key_cache, value_cache, compressed_cache, compress_ratio)
    decodes = dict(num_decodes=num_decodes, decode_query_len=decode_query_len)
    ring, compressed_cache = compress(
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
        via=via,
    )
    token_indices, counts = _select(
        dict(
            index_query=index_query,
            compressed_cache=compressed_cache,
            page_table=page_table,
            metadata=metadata,
        ),
        workspace_bytes,
        via,
        wanted=("token_indices", "counts"),
        budget=budget,
        compress_ratio=compress_ratio,
        **decodes,
    )
    result = attend(
        query,
        key_cache,
        value_cache,
        page_table,
        metadata,
        token_indices,
        counts,
        compress_ratio=compress_ratio,
        sm_scale=sm_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        gate=gate,
        return_lse=return_lse,
        via=via,
        **decodes,
    )
    return result, ring, compressed_cache


def _flat(arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays by name, those of the metadata among them; each must be JAX's or NumPy's."""
    flat = dict(arrays)
    flat |= dict(zip(METADATA, flat.pop("metadata"), strict=True))
    _launch.require_jax(**flat)
    return flat


def _one_element(scale: Any) -> Any:
    """A scale as kernels take it: float32 [1]."""
    if isinstance(scale, float):
        return np.full(1, scale, np.float32)
    return jnp.reshape(jnp.asarray(scale, jnp.float32), 1)
