"""Frozen, hashable descriptions of a call, built from checked arguments. Imports neither torch nor
jax: both front ends describe their calls with the same functions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from . import checks
from .checks import dtype_name


class AttentionInputs(NamedTuple):
    """The arrays and numbers of one checked call, in the order kernels take them."""

    query: Any
    key_cache: Any
    value_cache: Any
    page_table: Any
    seq_lens: Any
    cu_seqlens_q: Any = None
    sinks: Any = None
    draft_mask: Any = None
    plan: Any = None
    sm_scale: Any = None
    q_scale: Any = 1.0
    k_scale: Any = 1.0
    v_scale: Any = 1.0


SCALES = ("sm_scale", "q_scale", "k_scale", "v_scale")


class AppendInputs(NamedTuple):
    """The arrays and numbers of one checked append_kv call."""

    key: Any
    value: Any
    key_cache: Any
    value_cache: Any
    page_table: Any = None
    positions: Any = None
    request_ids: Any = None
    slots: Any = None
    k_scale: Any = 1.0
    v_scale: Any = 1.0


@dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """What decode and prefill calls have in common."""

    phase: ClassVar[str]
    query_dtype: str
    kv_dtype: str
    batch: int
    num_rows: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    pages_per_seq: int
    kv_layout: str = "NHD"
    window_left: int = -1
    soft_cap: float | None = None
    sinks: bool = False
    return_lse: bool = False
    batch_invariant: bool = False

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def window(self) -> int:
        """window_left, no larger than the page table: kernels add to it in 32 bits."""
        return min(self.window_left, self.pages_per_seq * self.page_size)

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return (self.num_rows, self.num_qo_heads, self.head_dim)

    @property
    def out_dtype(self) -> str:
        """The query's dtype; an e4m3 query gives bfloat16."""
        return "bfloat16" if self.query_dtype in checks.FP8 else self.query_dtype

    @property
    def lse_shape(self) -> tuple[int, int]:
        return (self.num_rows, self.num_qo_heads)


@dataclass(frozen=True, kw_only=True)
class DecodeProblem(AttentionProblem):
    """A decode call: `q_len` query rows for each request."""

    q_len: int = 1
    draft_mask: str | None = None  # None (causal), "bool" or "packed"

    phase = "decode"

    @property
    def causal(self) -> bool:
        return self.draft_mask is None


@dataclass(frozen=True, kw_only=True)
class PrefillProblem(AttentionProblem):
    """A prefill call: ragged query rows, packed by cu_seqlens_q."""

    max_seqlen_q: int
    causal: bool = True

    phase = "prefill"


@dataclass(frozen=True)
class AppendProblem:
    """An append_kv call."""

    page_size: int
    kv_layout: str


def _describe_attention(
    inputs: AttentionInputs,
    shapes: checks.Shapes,
    *,
    kv_layout: str = "NHD",
    window_left: int = -1,
    soft_cap: float | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> tuple[dict[str, Any], AttentionInputs]:
    """The fields that both phases share, and the inputs with their numbers filled in."""
    query_axes = ("num_rows", "num_qo_heads", "head_dim")
    shapes.check("query", inputs.query, checks.QUERY_DTYPES, query_axes)
    checks.cache_shapes(shapes, inputs.key_cache, inputs.value_cache, kv_layout)
    shapes.check("page_table", inputs.page_table, ("int32",), ("batch", "pages_per_seq"))
    shapes.check("seq_lens", inputs.seq_lens, ("int32",), ("batch",))
    if inputs.sinks is not None:
        shapes.check("sinks", inputs.sinks, ("float32",), ("num_qo_heads",))
    query_dtype, kv_dtype = dtype_name(inputs.query), dtype_name(inputs.key_cache)
    check_dtype_pair("key_cache", query_dtype, kv_dtype)
    checks.heads("query", shapes["num_qo_heads"], shapes["num_kv_heads"])
    if soft_cap is not None and not isinstance(
        soft_cap := checks.scale("soft_cap", soft_cap), float
    ):
        raise TypeError("soft_cap must be a Python number or None, got an array")
    sm_scale = shapes["head_dim"] ** -0.5 if inputs.sm_scale is None else inputs.sm_scale
    inputs = inputs._replace(sm_scale=checks.scale("sm_scale", sm_scale, positive=False))
    inputs = _with_scales(inputs, "q_scale", "k_scale", "v_scale")
    fields = dict(
        query_dtype=query_dtype,
        kv_dtype=kv_dtype,
        **{axis: shapes[axis] for axis in (*query_axes, "batch", "num_kv_heads", "num_pages")},
        page_size=shapes["page_size"],
        pages_per_seq=shapes["pages_per_seq"],
        kv_layout=kv_layout,
        window_left=checks.integer("window_left", window_left, -1),
        soft_cap=soft_cap,
        sinks=inputs.sinks is not None,
        return_lse=checks.flag("return_lse", return_lse),
        batch_invariant=checks.flag("batch_invariant", batch_invariant),
    )
    return fields, inputs


def score_scale(problem: AttentionProblem, inputs: AttentionInputs) -> Any:
    """What multiplies query . key: q_scale belongs to an e4m3 query only."""
    scale = inputs.sm_scale * inputs.k_scale
    return scale * inputs.q_scale if problem.query_dtype == "float8_e4m3fn" else scale


def check_dtype_pair(name: str, query_dtype: str, kv_dtype: str) -> None:
    """Raises TypeError, naming `name`, for a cache that no call has beside such a query."""
    more = () if query_dtype in checks.FP8 else checks.FP8
    if kv_dtype not in (query_dtype, *more):
        others = f" or be {' or '.join(more)}" if more else ""
        raise TypeError(f"{name} must have the query's dtype {query_dtype}{others}, got {kv_dtype}")


def describe_decode(
    inputs: AttentionInputs, *, q_len: int = 1, **options: Any
) -> tuple[DecodeProblem, AttentionInputs]:
    """Checks a decode call; returns its problem and its inputs with defaults filled in."""
    q_len = checks.integer("q_len", q_len, 1)
    shapes = checks.Shapes()
    fields, inputs = _describe_attention(inputs, shapes, **options)
    if shapes["num_rows"] != shapes["batch"] * q_len:
        raise ValueError(
            f"query must have batch * q_len = {shapes['batch']} * {q_len} rows, "
            f"got {shapes['num_rows']}"
        )
    mask = inputs.draft_mask
    kind = None
    if mask is not None:
        kind = "packed" if hasattr(mask, "dtype") and dtype_name(mask) == "uint16" else "bool"
        last = q_len if kind == "bool" else 2 * math.ceil(q_len / 32)
        dtypes = ("bool", "uint16") if kind == "bool" else ("uint16",)
        shapes.check("draft_mask", mask, dtypes, ("batch", q_len, last))
    return DecodeProblem(**fields, q_len=q_len, draft_mask=kind), inputs


def describe_prefill(
    inputs: AttentionInputs, *, max_seqlen_q: int, causal: bool = True, **options: Any
) -> tuple[PrefillProblem, AttentionInputs]:
    """Checks a prefill call; returns its problem and its inputs with defaults filled in."""
    shapes = checks.Shapes()
    fields, inputs = _describe_attention(inputs, shapes, **options)
    shapes.check("cu_seqlens_q", inputs.cu_seqlens_q, ("int32",), (shapes["batch"] + 1,))
    if inputs.plan is not None:
        shapes.check("plan", inputs.plan, ("int32",), ("plan_size",))
    max_seqlen_q = checks.integer("max_seqlen_q", max_seqlen_q, 0)
    causal = checks.flag("causal", causal)
    return PrefillProblem(**fields, max_seqlen_q=max_seqlen_q, causal=causal), inputs


DESCRIBE: dict[str, Callable[..., tuple[Any, AttentionInputs]]] = {
    "decode": describe_decode,
    "prefill": describe_prefill,
}


def pack_options(options: dict[str, Any]) -> tuple[list[int], float]:
    """The static arguments of a decode or prefill call as integers and the soft cap (0: none): the
    form that crosses torch.compile and the bridge to JAX without a name for each configuration."""
    decode = "q_len" in options
    integers = [
        options["q_len"] if decode else options["max_seqlen_q"],
        decode or options["causal"],
        checks.KV_LAYOUTS.index(options["kv_layout"]),
        options["window_left"],
        options["return_lse"],
        options["batch_invariant"],
    ]
    return [int(value) for value in integers], options["soft_cap"] or 0.0


def unpack_options(phase: str, integers: Sequence[int], soft_cap: float) -> dict[str, Any]:
    """Undoes `pack_options`."""
    max_rows, causal, kv_layout, window_left, return_lse, batch_invariant = integers
    rows = (
        dict(q_len=max_rows)
        if phase == "decode"
        else dict(max_seqlen_q=max_rows, causal=bool(causal))
    )
    return dict(
        **rows,
        kv_layout=checks.KV_LAYOUTS[kv_layout],
        window_left=window_left,
        soft_cap=soft_cap or None,
        return_lse=bool(return_lse),
        batch_invariant=bool(batch_invariant),
    )


def describe_append(inputs: AppendInputs, *, kv_layout: str) -> tuple[AppendProblem, AppendInputs]:
    """Checks an append_kv call; returns its problem and its inputs with defaults filled in."""
    shapes = checks.Shapes()
    checks.cache_shapes(shapes, inputs.key_cache, inputs.value_cache, kv_layout)
    axes = ("tokens", "num_kv_heads", "head_dim")
    shapes.check("key", inputs.key, (*checks.HALF, "float32"), axes)
    key_dtype, kv_dtype = dtype_name(inputs.key), dtype_name(inputs.key_cache)
    shapes.check("value", inputs.value, (key_dtype,), axes)
    if kv_dtype not in (*checks.FP8, key_dtype):
        raise TypeError(f"key must have the cache's dtype {kv_dtype}, got {key_dtype}")
    if inputs.slots is not None:
        if any(array is not None for array in inputs[4:7]):
            raise ValueError("slots must come without page_table, positions and request_ids")
        shapes.check("slots", inputs.slots, ("int32",), ("tokens",))
    else:
        if inputs.page_table is None or inputs.positions is None:
            raise ValueError("positions and page_table must be given, or slots instead of both")
        shapes.check("page_table", inputs.page_table, ("int32",), ("batch", "pages_per_seq"))
        shapes.check("positions", inputs.positions, ("int32",), ("tokens",))
        if inputs.request_ids is not None:
            shapes.check("request_ids", inputs.request_ids, ("int32",), ("tokens",))
        elif shapes["tokens"] > shapes["batch"]:
            raise ValueError(
                f"request_ids must be given for more tokens ({shapes['tokens']}) than requests "
                f"({shapes['batch']}): by default row i belongs to request i"
            )
    inputs = _with_scales(inputs, "k_scale", "v_scale")
    return AppendProblem(shapes["page_size"], kv_layout), inputs


def _with_scales(inputs: Any, *names: str) -> Any:
    """The inputs with checked scales; one that is not given is 1."""
    values = {name: getattr(inputs, name) for name in names}
    return inputs._replace(
        **{name: checks.scale(name, 1.0 if v is None else v) for name, v in values.items()}
    )


def describe_merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> None:
    """Checks the arrays of a merge_states call."""
    shapes = checks.Shapes()
    axes = ("rows", "num_qo_heads", "head_dim")
    shapes.check("out_a", out_a, (*checks.HALF, "float32"), axes)
    shapes.check("lse_a", lse_a, ("float32",), axes[:2])
    shapes.check("out_b", out_b, (dtype_name(out_a),), axes)
    shapes.check("lse_b", lse_b, ("float32",), axes[:2])
