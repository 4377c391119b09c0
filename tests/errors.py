"""The wrong calls that both packages refuse, what they must say, and where sources raise."""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from .inputs import DTYPES, Case

DECODE = Case("decode", (5, 9), sinks=True, q_len=2, draft_mask="bool")
PREFILL = Case("prefill", (5, 9), q_lens=(2, 3))
# An error inside the bridge; JAX's fast path for a compiled call reports it as a ValueError.
AT_RUN_TIME = (jax.errors.JaxRuntimeError, ValueError)
CACHE_AXES = "[num_pages, page_size, num_kv_heads, head_dim]"
CACHE_DTYPES = "bfloat16 or float16 or float32 or float8_e4m3fn or float8_e5m2"
ENTRIES = "[0, 2147483647], got"


@dataclass(frozen=True)
class Front:
    """One package, and how it takes NumPy arrays."""

    package: ModuleType
    array: Callable[[np.ndarray], Any]

    def call(self, function: str, arguments: dict[str, Any]) -> Any:
        convert = self.array
        given = {k: convert(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
        return getattr(self.package, function)(**given)


@dataclass(frozen=True)
class Wrong:
    """A valid call, changed: a callable gives the new value from the old one."""

    name: str
    function: str
    changes: dict[str, Any]
    error: type[Exception]
    message: str  # the message starts with this
    at_run_time: bool = False  # needs an array's values: jaxattn raises late

    def __str__(self) -> str:
        return f"{self.function}-{self.name}"

    def run(self, front: Front) -> Any:
        arguments = valid(self.function)
        for name, change in self.changes.items():
            arguments[name] = change(arguments[name]) if callable(change) else change
        return front.call(self.function, arguments)


def valid(function: str) -> dict[str, Any]:
    """NumPy arguments of a right call."""
    if function in ("decode", "prefill"):
        return (DECODE if function == "decode" else PREFILL).make()
    rng = np.random.default_rng(0)
    if function == "merge_states":
        rows = rng.normal(size=(3, 4, 16)).astype(np.float32)
        return dict(out_a=rows, lse_a=rows[..., 0], out_b=rows + 1, lse_b=rows[..., 1])
    cache = rng.normal(size=(6, 8, 2, 16)).astype(np.float32)
    return dict(
        key=cache[0, :2],
        value=cache[1, :2],
        key_cache=cache,
        value_cache=cache + 1,
        page_table=np.array([[3, 0], [5, 1]], np.int32),
        positions=np.array([4, 9], np.int32),
    )


def cast(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: array.astype(DTYPES.get(dtype, dtype))


def first(value: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Overwrites the first entry."""

    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array.flat[0] = value
        return array

    return change


def longer(array: np.ndarray) -> np.ndarray:
    return np.concatenate([array, array[:1]])


def deeper(array: np.ndarray) -> np.ndarray:
    return array[None]


def without(axis: int) -> Callable[[np.ndarray], np.ndarray]:
    """No entries on an axis."""
    return lambda array: array[(slice(None),) * axis + (slice(0),)]


SHARED = [
    Wrong("query_none", "decode", dict(query=None), TypeError,
          "query must be an array, got NoneType"),
    Wrong("page_table_list", "prefill", dict(page_table=[[0]]), TypeError,
          "page_table must be an array, got list"),
    Wrong("query_dtype", "decode", dict(query=cast("int32")), TypeError,
          "query must be bfloat16 or float16 or float32 or float8_e4m3fn [num_rows, num_qo_heads, "
          "head_dim], got int32 [4, 4, 16]"),
    Wrong("key_cache_dtype", "decode", dict(key_cache=cast("int8")), TypeError,
          f"key_cache must be {CACHE_DTYPES} {CACHE_AXES} = [num_pages, page_size, num_kv_heads, "
          "16], got int8 [6, 8, 2, 16]"),
    Wrong("caches_differ", "decode", dict(value_cache=cast("float16")), TypeError,
          f"value_cache must be float32 {CACHE_AXES} = [6, 8, 2, 16], got float16 [6, 8, 2, 16]"),
    Wrong("page_table_int64", "decode", dict(page_table=cast("int64")), TypeError,
          "page_table must be int32 [batch, pages_per_seq], got int64 [2, 3]"),
    Wrong("seq_lens_int64", "prefill", dict(seq_lens=cast("int64")), TypeError,
          "seq_lens must be int32 [batch] = [2], got int64 [2]"),
    Wrong("seq_lens_size", "decode", dict(seq_lens=longer), ValueError,
          "seq_lens must be int32 [batch] = [2], got int32 [3]"),
    Wrong("query_rank", "prefill", dict(query=deeper), ValueError,
          "query must be bfloat16 or float16 or float32 or float8_e4m3fn [num_rows, num_qo_heads, "
          "head_dim], got float32 [1, 5, 4, 16]"),
    Wrong("cu_seqlens_q_size", "prefill", dict(cu_seqlens_q=longer), ValueError,
          "cu_seqlens_q must be int32 [3], got int32 [4]"),
    Wrong("sinks_dtype", "decode", dict(sinks=cast("float16")), TypeError,
          "sinks must be float32 [num_qo_heads] = [4], got float16 [4]"),
    Wrong("draft_mask_dtype", "decode", dict(draft_mask=cast("int32")), TypeError,
          "draft_mask must be bool or uint16 [batch, 2, 2] = [2, 2, 2], got int32 [2, 2, 2]"),
    Wrong("draft_mask_packed_size", "decode", dict(draft_mask=np.zeros((2, 2, 1), np.uint16)),
          ValueError,
          "draft_mask must be uint16 [batch, 2, 2] = [2, 2, 2], got uint16 [2, 2, 1]"),
    Wrong("page_size_0", "decode", dict(key_cache=without(1), value_cache=without(1)), ValueError,
          "key_cache must have page_size >= 1, got [6, 0, 2, 16]"),
    Wrong("num_kv_heads_0", "append_kv",
          dict.fromkeys(("key_cache", "value_cache"), without(2)), ValueError,
          "key_cache must have num_kv_heads >= 1, got [6, 8, 0, 16]"),
    Wrong("head_dim_0", "prefill",
          dict.fromkeys(("query", "key_cache", "value_cache"), lambda a: a[..., :0]), ValueError,
          "key_cache must have head_dim >= 1, got [6, 8, 2, 0]"),
    Wrong("kv_layout", "decode", dict(kv_layout="DHN"), ValueError,
          "kv_layout must be one of 'NHD', 'HND', got 'DHN'"),
    Wrong("backend", "decode", dict(backend="xla"), ValueError,
          "backend must be one of 'auto', 'trtllm_gen', 'xqa'"),
    Wrong("fmha_v2", "decode", dict(backend="fmha_v2"), ValueError,
          "backend 'fmha_v2' is not offered: it lets NaN of slots that were never written reach"),
    Wrong("xqa_fp8", "decode", dict(backend="xqa_fp8"), ValueError,
          "backend 'xqa_fp8' is not offered: it lets NaN of slots that were never written reach"),
    Wrong("backend_list", "decode", dict(backend=["auto"]), ValueError,
          "backend must be one of 'auto', 'trtllm_gen', 'xqa'"),
    Wrong("backend_without_gpu", "decode", dict(backend="xqa", draft_mask=None),
          NotImplementedError,
          "backend 'xqa' cannot run this decode: needs capability 90, 100, 120 to 129, this device "
          "has none (CPU)"),
    Wrong("backend_of_other_phase", "decode", dict(backend="native_prefill_fa2"),
          NotImplementedError,
          "backend 'native_prefill_fa2' cannot run this decode: it has no decode kernel"),
    Wrong("q_len_float", "decode", dict(q_len=2.0), TypeError,
          "q_len must be a Python int known before the call, got float"),
    Wrong("q_len_bool", "decode", dict(q_len=True), TypeError,
          "q_len must be a Python int known before the call, got bool"),
    Wrong("q_len_0", "decode", dict(q_len=0), ValueError,
          "q_len must be in [1, 2147483647], got 0"),
    Wrong("window_left", "prefill", dict(window_left=-2), ValueError,
          "window_left must be in [-1, 2147483647], got -2"),
    Wrong("max_seqlen_q_none", "prefill", dict(max_seqlen_q=None), TypeError,
          "max_seqlen_q must be a Python int known before the call, got NoneType"),
    Wrong("max_seqlen_q_negative", "prefill", dict(max_seqlen_q=-1), ValueError,
          f"max_seqlen_q must be in {ENTRIES} -1"),
    Wrong("return_lse", "decode", dict(return_lse=1), TypeError,
          "return_lse must be True or False, got 1"),
    Wrong("causal", "prefill", dict(causal=None), TypeError,
          "causal must be True or False, got None"),
    Wrong("batch_invariant", "prefill", dict(batch_invariant="no"), TypeError,
          "batch_invariant must be True or False, got 'no'"),
    Wrong("k_scale_0", "decode", dict(k_scale=0.0), ValueError,
          "k_scale must be a positive finite float32 number, got 0.0"),
    Wrong("k_scale_above_float", "decode", dict(k_scale=10**400), ValueError,
          "k_scale must be a positive finite float32 number, got 1000"),
    Wrong("k_scale_above_float32", "decode", dict(k_scale=1e300), ValueError,
          "k_scale must be a positive finite float32 number"),
    Wrong("k_scale_below_float32", "append_kv", dict(k_scale=1e-300), ValueError,
          "k_scale must be a positive finite float32 number"),
    Wrong("v_scale_nan", "append_kv", dict(v_scale=float("nan")), ValueError,
          "v_scale must be a positive finite float32 number, got nan"),
    Wrong("sm_scale_inf", "prefill", dict(sm_scale=float("inf")), ValueError,
          "sm_scale must be a finite float32 number, got inf"),
    Wrong("soft_cap_0", "decode", dict(soft_cap=0), ValueError,
          "soft_cap must be a positive finite float32 number, got 0"),
    Wrong("soft_cap_array", "decode", dict(soft_cap=np.zeros((), "float32")), TypeError,
          "soft_cap must be a Python number or None, got an array"),
    Wrong("q_scale_int_array", "decode", dict(q_scale=np.ones((), "int32")), TypeError,
          "q_scale must be a number or a 0-d float array, got int32"),
    Wrong("k_scale_1d", "append_kv", dict(k_scale=np.ones(1, "float32")), ValueError,
          "k_scale must be a number or a 0-d array, got shape [1]"),
    Wrong("v_scale_text", "prefill", dict(v_scale="1"), TypeError,
          "v_scale must be a number or a 0-d float array, got str"),
    Wrong("heads", "prefill", dict(query=lambda a: a[:, :3]), ValueError,
          "query must have a positive multiple of num_kv_heads = 2 heads, got 3"),
    Wrong("no_heads", "prefill", dict(query=without(1)), ValueError,
          "query must have a positive multiple of num_kv_heads = 2 heads, got 0"),
    Wrong("fp8_query", "prefill", dict(query=cast("float8_e4m3fn")), TypeError,
          "key_cache must have the query's dtype float8_e4m3fn, got float32"),
    Wrong("dtype_pair", "decode", dict(query=cast("bfloat16")), TypeError,
          "key_cache must have the query's dtype bfloat16 or be float8_e4m3fn or float8_e5m2, "
          "got float32"),
    Wrong("query_rows", "decode", dict(query=longer), ValueError,
          "query must have batch * q_len = 2 * 2 rows, got 5"),
    Wrong("plan", "prefill", dict(plan=1), TypeError, "plan must be an array, got int"),
    Wrong("plan_size", "prefill", dict(plan=np.zeros(3, np.int32)), ValueError,
          "plan must be int32 [0], made by plan_prefill for a call of these shapes and options "
          "(reference), got [3]"),
    Wrong("seq_lens_high", "decode", dict(seq_lens=first(25)), ValueError,
          "seq_lens must be in [0, pages_per_seq * page_size = 24], got 9 to 25", True),
    Wrong("seq_lens_low", "prefill", dict(seq_lens=first(-1)), ValueError,
          "seq_lens must be in [0, pages_per_seq * page_size = 24], got -1 to 9", True),
    Wrong("page_high", "decode", dict(page_table=first(6)), ValueError,
          "page_table must be in [0, num_pages = 6), got ", True),
    Wrong("page_low", "prefill", dict(page_table=first(-1)), ValueError,
          "page_table must be in [0, num_pages = 6), got -1 to ", True),
    Wrong("cu_seqlens_q_start", "prefill", dict(cu_seqlens_q=first(1)), ValueError,
          "cu_seqlens_q must rise from 0 to at most the query's 5 rows, got [1, 2, 5]", True),
    Wrong("cu_seqlens_q_end", "prefill", dict(cu_seqlens_q=np.array([0, 2, 6], np.int32)),
          ValueError,
          "cu_seqlens_q must rise from 0 to at most the query's 5 rows, got [0, 2, 6]", True),
    Wrong("cu_seqlens_q_falls", "prefill", dict(cu_seqlens_q=np.array([0, 4, 3], np.int32)),
          ValueError,
          "cu_seqlens_q must rise from 0 to at most the query's 5 rows, got [0, 4, 3]", True),
    Wrong("max_seqlen_q_low", "prefill", dict(max_seqlen_q=2), ValueError,
          "max_seqlen_q must be at least the longest query, 3, got 2", True),
    Wrong("key_dtype", "append_kv", dict.fromkeys(("key", "value"), cast("bfloat16")), TypeError,
          "key must have the cache's dtype float32, got bfloat16"),
    Wrong("value_size", "append_kv", dict(value=longer), ValueError,
          "value must be float32 [tokens, num_kv_heads, head_dim] = [2, 2, 16], got float32 "
          "[3, 2, 16]"),
    Wrong("slots_and_positions", "append_kv", dict(slots=np.zeros(2, np.int32)), ValueError,
          "slots must come without page_table, positions and request_ids"),
    Wrong("no_place", "append_kv", dict(positions=None), ValueError,
          "positions and page_table must be given, or slots instead of both"),
    Wrong("positions_dtype", "append_kv", dict(positions=cast("int64")), TypeError,
          "positions must be int32 [tokens] = [2], got int64 [2]"),
    Wrong("request_ids_missing", "append_kv",
          dict(key=longer, value=longer, positions=longer), ValueError,
          "request_ids must be given for more tokens (3) than requests (2)"),
    Wrong("request_ids_size", "append_kv", dict(request_ids=np.zeros(3, np.int32)), ValueError,
          "request_ids must be int32 [tokens] = [2], got int32 [3]"),
    Wrong("request_ids_high", "append_kv", dict(request_ids=np.array([0, 2], np.int32)), ValueError,
          "request_ids must be in [0, batch = 2), got 0 to 2", True),
    Wrong("positions_high", "append_kv", dict(positions=first(16)), ValueError,
          "positions must be in [0, pages_per_seq * page_size = 16), got 9 to 16", True),
    Wrong("append_page", "append_kv", dict(page_table=first(-5)), ValueError,
          "page_table must be in [0, num_pages = 6), got -5 to 1", True),
    Wrong("slots_high", "append_kv",
          dict(page_table=None, positions=None, slots=np.array([48, 3], np.int32)), ValueError,
          "slots must be in [0, num_pages * page_size = 48), got 3 to 48", True),
    Wrong("lse_dtype", "merge_states", dict(lse_b=cast("float16")), TypeError,
          "lse_b must be float32 [rows, num_qo_heads] = [3, 4], got float16 [3, 4]"),
    Wrong("out_b_dtype", "merge_states", dict(out_b=cast("bfloat16")), TypeError,
          "out_b must be float32 [rows, num_qo_heads, head_dim] = [3, 4, 16], got bfloat16 "
          "[3, 4, 16]"),
    Wrong("lse_a_size", "merge_states", dict(lse_a=longer), ValueError,
          "lse_a must be float32 [rows, num_qo_heads] = [3, 4], got float32 [4, 4]"),
]  # fmt: skip


def raise_statements(path: Path) -> dict[int, tuple[int, int]]:
    """The first and last line of each `raise` in a file."""
    tree = ast.parse(path.read_text())
    return {
        node.lineno: (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
    }


def raised_at(error: BaseException) -> set[tuple[str, int]]:
    """File and line of each frame that an exception, or one that it replaced, left by raising."""
    places: set[tuple[str, int]] = set()
    current: BaseException | None = error
    while current is not None:
        frames = inspect.getinnerframes(current.__traceback__) if current.__traceback__ else []
        places |= {(str(Path(frame.filename).resolve()), frame.lineno) for frame in frames}
        current = current.__context__
    return places


def uncovered(package: ModuleType, triggers: list[Callable[[], Any]]) -> list[str]:
    """The `raise` statements of a package that no trigger reaches, as file:line."""
    reached: set[tuple[str, int]] = set()
    for trigger in triggers:
        try:
            trigger()
        except Exception as error:
            reached |= raised_at(error)
    missing = []
    root = Path(package.__file__).resolve().parent
    for path in sorted(root.rglob("*.py")):
        for start, end in raise_statements(path).values():
            if not any((str(path), line) in reached for line in range(start, end + 1)):
                missing.append(f"{path.relative_to(root)}:{start}")
    return missing
