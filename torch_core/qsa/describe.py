"""Checks of QSA calls, on shapes and dtypes only: torch tensors, JAX tracers and shape records pass
through the same functions. Imports neither torch nor jax."""

from typing import Any

from .. import checks
from ..checks import dtype_name
from .problem import METADATA, CompressProblem, QSAProblem, ring_rows

RATIOS = (2, 4, 8)
FLOATS = (*checks.HALF, "float32")
E4M3 = "float8_e4m3fn"


def describe_metadata(
    page_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any,
    *,
    num_rows: int,
    num_pages: int,
    page_size: int,
    compress_ratio: int,
    num_decodes: int | None = None,
    decode_query_len: int | None = None,
) -> QSAProblem:
    """Checks a build_metadata call. A split that is not known is one without decodes."""
    shapes = checks.Shapes()
    shapes.check("page_table", page_table, ("int32",), ("num_requests", "pages_per_seq"))
    shapes.check("seq_lens", seq_lens, ("int32",), ("num_requests",))
    shapes.check("cu_seqlens_q", cu_seqlens_q, ("int32",), (shapes["num_requests"] + 1,))
    shapes.sizes["num_rows"] = checks.integer("num_rows", num_rows, 0)
    shapes.sizes["num_pages"] = checks.integer("num_pages", num_pages, 0)
    ratio = _ratio(compress_ratio)
    page_size = _page_size("page_size", checks.integer("page_size", page_size, 1), ratio)
    _check_range(shapes, page_size, ratio)
    return QSAProblem(
        **_sizes(shapes, "num_rows", "num_requests", "pages_per_seq", "num_pages"),
        **_split(
            shapes,
            0 if num_decodes is None else num_decodes,
            1 if decode_query_len is None else decode_query_len,
        ),
        page_size=page_size,
        compress_ratio=ratio,
    )


def describe_compress(
    index_key: Any,
    ring: Any,
    compressed_cache: Any,
    metadata: Any,
    seq_lens: Any,
    weight: Any,
    cos: Any,
    sin: Any,
    *,
    compress_ratio: int,
    decode_query_len: int = 1,
    eps: float = 1e-6,
    ring_ids: Any = None,
    rotary_positions: Any = None,
) -> CompressProblem:
    """Checks a compress call."""
    shapes = checks.Shapes()
    ratio = _ratio(compress_ratio)
    decode_query_len = checks.integer("decode_query_len", decode_query_len, 1)
    shapes.check("index_key", index_key, FLOATS, ("num_rows", "index_dim"))
    key_dtype = dtype_name(index_key)
    shapes.check("ring", ring, (key_dtype,), ("num_rings", "ring_rows", "index_dim"))
    least = ring_rows(ratio, decode_query_len - 1)
    if shapes["ring_rows"] % ratio or shapes["ring_rows"] < least:
        raise ValueError(
            f"ring must have a multiple of compress_ratio = {ratio} rows a request, and at least "
            f"{least} for decode_query_len = {decode_query_len}, got {shapes['ring_rows']}"
        )
    axes = ("num_pages", "groups_per_page", 1, "index_dim")
    shapes.check("compressed_cache", compressed_cache, (key_dtype, E4M3), axes)
    if shapes["index_dim"] < 1:
        raise ValueError(f"index_key must have index_dim >= 1, got {list(index_key.shape)}")
    _check_metadata(shapes, metadata)
    shapes.check("seq_lens", seq_lens, ("int32",), ("num_requests",))
    shapes.check("weight", weight, FLOATS, ("index_dim",))
    _check_tables(shapes, cos, sin)
    if ring_ids is not None:
        shapes.check("ring_ids", ring_ids, ("int32",), ("num_requests",))
    elif shapes["num_rings"] < shapes["num_requests"]:
        raise ValueError(
            f"ring must have a ring for each of {shapes['num_requests']} requests, or ring_ids be "
            f"given, got {shapes['num_rings']}"
        )
    if rotary_positions is not None:
        shapes.check("rotary_positions", rotary_positions, ("int32",), ("num_rows",))
    if not isinstance(eps := checks.scale("eps", eps), float):
        raise TypeError("eps must be a Python number, got an array")
    return CompressProblem(
        num_rows=shapes["num_rows"],
        compress_ratio=ratio,
        ring_shape=tuple(ring.shape),
        cache_shape=tuple(compressed_cache.shape),
        max_positions=shapes["max_positions"],
        rotary_dim=2 * shapes["rotary_dim / 2"],
        key_dtype=key_dtype,
        index_dtype=dtype_name(compressed_cache),
        weight_dtype=dtype_name(weight),
        rotary_dtype=dtype_name(cos),
        eps=eps,
        ring_ids=ring_ids is not None,
        rotary_positions=rotary_positions is not None,
    )


def describe_query(
    projection: Any, weight: Any, cos: Any, sin: Any, positions: Any, *, eps: float = 1e-6
) -> float:
    """Checks a prepare_query call; returns eps."""
    shapes = checks.Shapes()
    axes = ("num_rows", "index_heads", "index_dim")
    shapes.check("projection", projection, FLOATS, axes)
    shapes.check("weight", weight, FLOATS, ("index_dim",))
    _check_tables(shapes, cos, sin)
    shapes.check("positions", positions, ("int32",), ("num_rows",))
    if not isinstance(eps := checks.scale("eps", eps), float):
        raise TypeError("eps must be a Python number, got an array")
    return eps


def describe_select(
    index_query: Any,
    compressed_cache: Any,
    page_table: Any,
    metadata: Any,
    *,
    budget: int,
    compress_ratio: int,
    num_decodes: int = 0,
    decode_query_len: int = 1,
) -> QSAProblem:
    """Checks a select call."""
    shapes = checks.Shapes()
    ratio = _ratio(compress_ratio)
    shapes.check("index_query", index_query, FLOATS, ("num_rows", "index_heads", "index_dim"))
    for axis in ("index_heads", "index_dim"):
        if shapes[axis] < 1:
            raise ValueError(f"index_query must have {axis} >= 1, got {list(index_query.shape)}")
    query_dtype = dtype_name(index_query)
    axes = ("num_pages", "groups_per_page", 1, "index_dim")
    shapes.check("compressed_cache", compressed_cache, (query_dtype, E4M3), axes)
    if shapes["groups_per_page"] < 1:
        raise ValueError(
            f"compressed_cache must have groups_per_page >= 1, got {list(compressed_cache.shape)}"
        )
    shapes.check("page_table", page_table, ("int32",), ("num_requests", "pages_per_seq"))
    _check_metadata(shapes, metadata)
    page_size = shapes["groups_per_page"] * ratio
    _check_range(shapes, page_size, ratio)
    return QSAProblem(
        **_sizes(shapes, "num_rows", "num_requests", "index_heads", "index_dim"),
        **_sizes(shapes, "pages_per_seq", "num_pages"),
        **_split(shapes, num_decodes, decode_query_len),
        compress_ratio=ratio,
        topk=_topk(budget, ratio),
        page_size=page_size,
        query_dtype=query_dtype,
        index_dtype=dtype_name(compressed_cache),
    )


def describe_expand(selected: Any, metadata: Any, *, compress_ratio: int) -> QSAProblem:
    """Checks an expand call."""
    shapes = checks.Shapes()
    ratio = _ratio(compress_ratio)
    shapes.check("selected", selected, ("int32",), ("num_rows", "topk"))
    _topk(shapes["topk"] * ratio, ratio)
    _check_metadata(shapes, metadata)
    return QSAProblem(
        **_sizes(shapes, "num_rows", "topk"),
        num_requests=0,
        compress_ratio=ratio,
        page_size=ratio,
        pages_per_seq=checks.INT32_MAX // ratio,  # no page table bounds the groups
        num_pages=0,
    )


def describe_attend(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    page_table: Any,
    metadata: Any,
    token_indices: Any,
    counts: Any,
    *,
    compress_ratio: int,
    sm_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    gate: Any = None,
    num_decodes: int = 0,
    decode_query_len: int = 1,
) -> tuple[QSAProblem, dict[str, Any]]:
    """Checks an attend call; returns its problem and its scales by name."""
    shapes = checks.Shapes()
    ratio = _ratio(compress_ratio)
    axes = ("num_rows", "num_qo_heads", "head_dim")
    shapes.check("query", query, FLOATS, axes)
    query_dtype = dtype_name(query)
    checks.cache_shapes(shapes, key_cache, value_cache, "NHD")
    kv_dtype = dtype_name(key_cache)
    if kv_dtype not in (query_dtype, E4M3):
        raise TypeError(
            f"key_cache must have the query's dtype {query_dtype} or be {E4M3}, got {kv_dtype}"
        )
    checks.heads("query", shapes["num_qo_heads"], shapes["num_kv_heads"])
    page_size = _page_size("key_cache", shapes["page_size"], ratio)
    shapes.check("page_table", page_table, ("int32",), ("num_requests", "pages_per_seq"))
    _check_range(shapes, page_size, ratio)
    _check_metadata(shapes, metadata)
    width = "budget + compress_ratio - 1"
    shapes.check("token_indices", token_indices, ("int32",), ("num_rows", width))
    if (shapes[width] + 1) % ratio or shapes[width] < 2 * ratio - 1:
        raise ValueError(
            f"token_indices must have budget + compress_ratio - 1 columns, budget a positive "
            f"multiple of compress_ratio = {ratio}, got {shapes[width]}"
        )
    shapes.check("counts", counts, ("int32",), ("num_rows",))
    if gate is not None:
        shapes.check("gate", gate, (query_dtype, "float32"), axes)
    if sm_scale is None:
        sm_scale = shapes["head_dim"] ** -0.5
    scales = dict(
        sm_scale=checks.scale("sm_scale", sm_scale, positive=False),
        k_scale=checks.scale("k_scale", 1.0 if k_scale is None else k_scale),
        v_scale=checks.scale("v_scale", 1.0 if v_scale is None else v_scale),
    )
    problem = QSAProblem(
        **_sizes(shapes, *axes, "num_kv_heads", "num_requests", "pages_per_seq", "num_pages"),
        **_split(shapes, num_decodes, decode_query_len),
        compress_ratio=ratio,
        topk=(shapes[width] + 1) // ratio - 1,
        page_size=page_size,
        query_dtype=query_dtype,
        kv_dtype=kv_dtype,
    )
    return problem, scales


def check_pages(
    key_cache: Any, value_cache: Any, compressed_cache: Any, compress_ratio: int
) -> None:
    """All caches of a step have the same pages."""
    shapes = checks.Shapes()
    ratio = _ratio(compress_ratio)
    checks.cache_shapes(shapes, key_cache, value_cache, "NHD")
    page_size = _page_size("key_cache", shapes["page_size"], ratio)
    axes = ("num_pages", page_size // ratio, 1, "index_dim")
    shapes.check("compressed_cache", compressed_cache, (*FLOATS, E4M3), axes)


def _sizes(shapes: checks.Shapes, *axes: str) -> dict[str, Any]:
    return {axis: shapes[axis] for axis in axes}


def _ratio(compress_ratio: Any) -> int:
    ratio = checks.integer("compress_ratio", compress_ratio, 1)
    if ratio not in RATIOS:
        raise ValueError(f"compress_ratio must be one of {RATIOS}, got {ratio}")
    return ratio


def _page_size(name: str, page_size: int, ratio: int) -> int:
    if page_size % ratio:
        raise ValueError(
            f"{name} must have pages of a multiple of compress_ratio = {ratio} tokens, "
            f"got {page_size}"
        )
    return page_size


def _topk(budget: Any, ratio: int) -> int:
    budget = checks.integer("budget", budget, 1)
    if budget % ratio:
        raise ValueError(f"budget must be a multiple of compress_ratio = {ratio}, got {budget}")
    return budget // ratio


def _split(shapes: checks.Shapes, num_decodes: Any, decode_query_len: Any) -> dict[str, Any]:
    num_decodes = checks.integer("num_decodes", num_decodes, 0)
    decode_query_len = checks.integer("decode_query_len", decode_query_len, 1)
    if num_decodes > shapes["num_requests"]:
        raise ValueError(
            f"num_decodes must be at most num_requests = {shapes['num_requests']}, "
            f"got {num_decodes}"
        )
    if num_decodes * decode_query_len > shapes["num_rows"]:
        raise ValueError(
            "QSA decode rows must form a uniform request batch: num_decodes * decode_query_len = "
            f"{num_decodes * decode_query_len} rows do not fit into {shapes['num_rows']}"
        )
    return dict(num_decodes=num_decodes, decode_query_len=decode_query_len)


def _check_range(shapes: checks.Shapes, page_size: int, ratio: int) -> None:
    """Slots and token indices are int32."""
    slots, tokens = shapes["num_pages"] * (page_size // ratio), shapes["pages_per_seq"] * page_size
    if slots > checks.INT32_MAX:
        raise ValueError(f"num_pages must give at most 2^31 - 1 groups, got {slots}")
    if tokens > checks.INT32_MAX:
        raise ValueError(f"page_table must give at most 2^31 - 1 tokens a request, got {tokens}")


def _check_metadata(shapes: checks.Shapes, metadata: Any) -> None:
    if getattr(metadata, "_fields", None) != METADATA:
        raise TypeError(
            f"metadata must be what build_metadata returns, got {type(metadata).__name__}"
        )
    for name, array in zip(METADATA, metadata, strict=True):
        shapes.check(f"metadata.{name}", array, ("int32",), ("num_rows",))


def _check_tables(shapes: checks.Shapes, cos: Any, sin: Any) -> None:
    shapes.check("cos", cos, FLOATS, ("max_positions", "rotary_dim / 2"))
    shapes.check("sin", sin, (dtype_name(cos),), ("max_positions", "rotary_dim / 2"))
    if not 1 <= shapes["rotary_dim / 2"] <= shapes["index_dim"] // 2:
        raise ValueError(
            f"cos must have 1 to index_dim / 2 = {shapes['index_dim'] // 2} columns, "
            f"got {shapes['rotary_dim / 2']}"
        )
