"""Which kernel a call gets. The only place that names a kernel: a kernel is one row of TABLE."""

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import checks
from .problem import (
    AttentionInputs,
    AttentionProblem,
    DecodeProblem,
    PrefillProblem,
    describe_decode,
    describe_prefill,
)

NVFP4 = "nvfp4"  # packed 4-bit cache with block scales; a word of the table, not a torch dtype
_SAME = {(dtype, dtype) for dtype in checks.HALF}
_E4M3_KV = {(dtype, "float8_e4m3fn") for dtype in checks.HALF}
_E5M2_KV = {(dtype, "float8_e5m2") for dtype in checks.HALF}
_E4M3 = {("float8_e4m3fn", "float8_e4m3fn")}
_NVFP4_KV = {(dtype, NVFP4) for dtype in (*checks.HALF, "float8_e4m3fn")}


@dataclass(frozen=True)
class Environment:
    """What a machine offers. `capability` is major * 10 + minor, 0 on a CPU."""

    capability: int
    flashinfer: bool = False
    cubins: bool = False


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One row: what a kernel can do. None in a column means anything."""

    name: str
    phase: str
    module: str  # its backend file, below torch_core
    entry: str  # the upstream function
    capabilities: tuple[tuple[int, int], ...] | None  # inclusive ranges
    head_dims: tuple[int, ...] | None
    page_sizes: tuple[int, ...] | None
    dtypes: frozenset[tuple[str, str]]  # (query, cache)
    nvfp4: tuple[tuple[int, int], ...] = ()  # capabilities that read an nvfp4 cache
    lse: bool
    soft_cap: bool
    window: bool
    sinks: bool
    drafts: bool = False  # q_len > 1
    non_causal: bool = True
    host_plan: bool
    cubins: bool = False
    batch_invariant: bool = True
    last_resort: tuple[tuple[int, int], ...] = ()  # capabilities where "auto" tries others first
    rules: tuple[Callable[[Any, Environment], str | None], ...] = ()


def _wide_heads(problem: DecodeProblem, environment: Environment) -> str | None:
    if problem.head_dim > 256 and (problem.q_len > 1 or problem.group_size > 16):
        return "head_dim above 256 takes q_len 1 and at most 16 query heads a KV head"
    return None


def _window_over_drafts(problem: DecodeProblem, environment: Environment) -> str | None:
    if problem.draft_mask is not None and problem.window_left >= 0:
        return "a window with a draft mask takes linear drafts only"
    return None


def _mask_of_one(problem: DecodeProblem, environment: Environment) -> str | None:
    if problem.draft_mask is not None and problem.q_len == 1:
        return "takes a draft mask with q_len above 1 only"
    return None


def _window_hangs(problem: PrefillProblem, environment: Environment) -> str | None:
    if (
        problem.window_left >= 0
        and problem.query_dtype in checks.FP8
        and environment.capability == 90
    ):
        return "a window with an e4m3 query can hang on SM90; use a bfloat16 query"
    return None


def _causal_window(problem: PrefillProblem, environment: Environment) -> str | None:
    if problem.window_left >= 0 and not problem.causal:
        return "a window takes causal=True"
    return None


def _half_on_sm12x(problem: PrefillProblem, environment: Environment) -> str | None:
    if problem.query_dtype in checks.FP8 and environment.capability >= 120:
        return "an e4m3 query takes capability 90"
    return None


_TRTLLM_GEN: dict[str, Any] = dict(
    module="backends.trtllm_gen",
    capabilities=((100, 100), (103, 103)),
    head_dims=(64, 128, 256),
    page_sizes=(16, 32, 64),
    dtypes=frozenset(_SAME | _E4M3_KV | _E4M3 | _NVFP4_KV),
    nvfp4=((100, 100), (103, 103)),
    lse=True,
    soft_cap=False,
    window=True,
    sinks=True,
    host_plan=False,
    cubins=True,
    batch_invariant=False,
)
_NATIVE: dict[str, Any] = dict(
    head_dims=(64, 128, 256),
    page_sizes=None,
    lse=True,
    soft_cap=True,
    window=True,
    sinks=False,  # upstream takes them as a variant of its kernel, which no backend builds yet
    host_plan=True,
)
_REFERENCE: dict[str, Any] = dict(
    name="reference",
    module="reference",
    entry="torch",
    capabilities=None,
    head_dims=None,
    page_sizes=None,
    dtypes=frozenset(
        (query, cache)
        for query in checks.QUERY_DTYPES
        for cache in (query, *checks.FP8)
        if query not in checks.FP8 or query == cache
    ),
    lse=True,
    soft_cap=True,
    window=True,
    sinks=True,
    drafts=True,
    host_plan=False,
)

# In order of preference within a phase. Limits: FlashInfer 0.7.4's source; the order: measured on
# an H200 (native decode is never faster than XQA there; fmha_v2 equals FA3 and needs no plan).
TABLE: tuple[Kernel, ...] = (
    Kernel(
        name="trtllm_gen",
        phase="decode",
        entry="flashinfer.decode.trtllm_batch_decode_with_kv_cache",
        drafts=True,
        **_TRTLLM_GEN,
    ),
    Kernel(
        name="xqa",
        phase="decode",
        module="backends.xqa",
        entry="flashinfer.xqa.xqa",
        capabilities=((90, 90), (100, 100), (120, 129)),
        last_resort=((120, 129),),
        head_dims=tuple(range(16, 513, 16)),
        page_sizes=(16, 32, 64, 128),
        dtypes=frozenset(_SAME | _E4M3_KV | {pair for pair in _NVFP4_KV if pair[0] in checks.HALF}),
        nvfp4=((120, 129),),
        lse=False,
        soft_cap=False,
        window=True,
        sinks=True,
        drafts=True,
        host_plan=False,
        batch_invariant=False,
        rules=(_wide_heads, _window_over_drafts, _mask_of_one),
    ),
    Kernel(
        name="native_decode",
        phase="decode",
        module="backends.native_decode",
        entry="flashinfer.BatchDecodeWithPagedKVCacheWrapper",
        capabilities=((75, 999),),
        dtypes=frozenset(_SAME | _E4M3_KV | _E5M2_KV),
        **_NATIVE,
    ),
    Kernel(
        name="trtllm_gen",
        phase="prefill",
        entry="flashinfer.prefill.trtllm_batch_context_with_kv_cache",
        **_TRTLLM_GEN,
    ),
    Kernel(
        name="fmha_v2",
        phase="prefill",
        module="backends.fmha_v2",
        entry="flashinfer.prefill.trtllm_fmha_v2_prefill",
        capabilities=((90, 90), (120, 129)),
        last_resort=((120, 129),),
        head_dims=(64, 128, 256),
        page_sizes=(16, 32, 64, 128),
        dtypes=frozenset(_SAME | _E4M3),
        lse=True,
        soft_cap=True,
        window=True,
        sinks=True,
        host_plan=False,
        rules=(_window_hangs, _causal_window, _half_on_sm12x),
    ),
    Kernel(
        name="native_prefill_fa3",
        phase="prefill",
        module="backends.native_prefill",
        entry='flashinfer.BatchPrefillWithPagedKVCacheWrapper(backend="fa3")',
        capabilities=((90, 90),),
        dtypes=frozenset(_SAME | _E4M3),
        rules=(_window_hangs,),
        **_NATIVE,
    ),
    Kernel(
        name="native_prefill_fa2",
        phase="prefill",
        module="backends.native_prefill",
        entry='flashinfer.BatchPrefillWithPagedKVCacheWrapper(backend="fa2")',
        capabilities=((75, 999),),
        dtypes=frozenset(_SAME | _E4M3_KV),
        **_NATIVE,
    ),
    Kernel(phase="decode", **_REFERENCE),
    Kernel(phase="prefill", **_REFERENCE),
)
BACKENDS = ("auto", *dict.fromkeys(kernel.name for kernel in TABLE))


@dataclass(frozen=True)
class Explanation:
    """`kernel` is the chosen row or None; `reasons` says why each other row of the phase is not."""

    kernel: Kernel | None
    reasons: dict[str, str]

    def __str__(self) -> str:
        chosen = [f"{self.kernel.name}: chosen"] if self.kernel else ["no kernel"]
        return "\n".join(chosen + [f"{name}: {reason}" for name, reason in self.reasons.items()])


def _within(value: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(low <= value <= high for low, high in ranges)


def _spell(ranges: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(
        f"{low}" if low == high else f"{low}+" if high == 999 else f"{low} to {high}"
        for low, high in ranges
    )


def refusal(kernel: Kernel, problem: AttentionProblem, environment: Environment) -> str | None:
    """Why `kernel` cannot run `problem` in `environment`, or None."""
    pair = (problem.query_dtype, problem.kv_dtype)
    capability = environment.capability
    drafts = isinstance(problem, DecodeProblem) and problem.q_len > 1
    limits = (
        (
            kernel.capabilities is None or _within(capability, kernel.capabilities),
            f"needs capability {_spell(kernel.capabilities or ())}, this device has "
            f"{capability or 'none (CPU)'}",
        ),
        (pair in kernel.dtypes, f"takes no {pair[0]} query with a {pair[1]} cache"),
        (
            problem.kv_dtype != NVFP4 or _within(capability, kernel.nvfp4),
            f"reads an nvfp4 cache on capability {_spell(kernel.nvfp4)} only",
        ),
        (
            kernel.head_dims is None or problem.head_dim in kernel.head_dims,
            f"takes head_dim {_brief(kernel.head_dims)}, got {problem.head_dim}",
        ),
        (
            kernel.page_sizes is None or problem.page_size in kernel.page_sizes,
            f"takes page_size {_brief(kernel.page_sizes)}, got {problem.page_size}",
        ),
        (kernel.lse or not problem.return_lse, "cannot return lse"),
        (kernel.soft_cap or problem.soft_cap is None, "has no soft cap"),
        (kernel.window or problem.window_left < 0, "has no window"),
        (kernel.sinks or not problem.sinks, "has no sinks"),
        (kernel.drafts or not drafts, "takes q_len 1 only"),
        (
            kernel.batch_invariant or not problem.batch_invariant,
            "its result depends on the rest of the batch (batch_invariant was asked for)",
        ),
    )
    for holds, reason in limits:
        if not holds:
            return reason
    for rule in kernel.rules:
        if (reason := rule(problem, environment)) is not None:
            return reason
    return _missing(kernel, environment)


def _missing(kernel: Kernel, environment: Environment) -> str | None:
    """What the installation lacks for a kernel that the call itself would suit."""
    if not _has_module(kernel.module):
        return f"not implemented yet: torch_core has no {kernel.module}"
    if kernel.entry.startswith("flashinfer") and not environment.flashinfer:
        return "needs FlashInfer: pip install 'jaxattn[cuda]'"
    if kernel.cubins and not environment.cubins:
        return "needs prebuilt kernels: pip install flashinfer-cubin"
    return None


def _brief(values: tuple[int, ...] | None) -> str:
    values = values or ()
    if len(values) > 6:
        return f"{values[0]} to {values[-1]} in steps of {values[1] - values[0]}"
    return ", ".join(map(str, values))


@functools.cache
def _has_module(module: str) -> bool:
    return importlib.util.find_spec(f"torch_core.{module}") is not None


def explain_problem(
    problem: AttentionProblem, environment: Environment, backend: str = "auto"
) -> Explanation:
    """The choice for a described call, and the reason against every other row."""
    checks.choice("backend", backend, BACKENDS)
    rows = [kernel for kernel in TABLE if kernel.phase == problem.phase]
    rows.sort(key=lambda kernel: _within(environment.capability, kernel.last_resort))
    chosen, reasons = None, {}
    for kernel in rows:
        reason = refusal(kernel, problem, environment)
        if reason is None and backend not in ("auto", kernel.name):
            reason = f"backend={backend!r} was asked for"
        elif (
            reason is None
            and backend == "auto"
            and kernel.name == "reference"
            and environment.capability
        ):
            reason = "used on a GPU only when asked for by name"
        elif reason is None and chosen is not None:
            reason = f"{chosen.name} comes first"
        if reason is None:
            chosen = kernel
        else:
            reasons[kernel.name] = reason
    return Explanation(chosen, reasons)


def choose(problem: AttentionProblem, environment: Environment, backend: str = "auto") -> Kernel:
    """The row that runs the call; fixed before any launch. NotImplementedError where none can."""
    return _choose(problem, environment, checks.choice("backend", backend, BACKENDS))


@functools.lru_cache(maxsize=4096)
def _choose(problem: AttentionProblem, environment: Environment, backend: str) -> Kernel:
    explanation = explain_problem(problem, environment, backend)
    if explanation.kernel is not None:
        return explanation.kernel
    if backend != "auto":
        reason = explanation.reasons.get(backend, f"it has no {problem.phase} kernel")
        raise NotImplementedError(f"backend {backend!r} cannot run this {problem.phase}: {reason}")
    reasons = "\n".join(f"{name}: {reason}" for name, reason in explanation.reasons.items())
    raise NotImplementedError(f"no kernel runs this {problem.phase}:\n{reasons}")


@functools.cache
def find(phase: str, name: str) -> Kernel:
    """The row of a kernel by phase and name."""
    return next(kernel for kernel in TABLE if (kernel.phase, kernel.name) == (phase, name))


@functools.cache
def load(kernel: Kernel) -> Any:
    """The module whose `run(problem, inputs, out, lse, workspace)` is the kernel."""
    return importlib.import_module(f"torch_core.{kernel.module}")


@functools.cache
def environment(capability: int) -> Environment:
    """This machine, with a device of the given capability (0: the CPU)."""
    return Environment(
        capability=capability,
        flashinfer=importlib.util.find_spec("flashinfer") is not None,
        cubins=importlib.util.find_spec("flashinfer_cubin") is not None,
    )


class Spec(NamedTuple):
    """Shape and dtype of an argument that does not exist yet."""

    shape: tuple[int, ...]
    dtype: str


def explain(
    phase: str,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    query_dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    kv_layout: str = "NHD",
    q_len: int = 1,
    causal: bool = True,
    window_left: int = -1,
    soft_cap: float | None = None,
    sinks: bool = False,
    draft_mask: bool = False,
    return_lse: bool = False,
    batch_invariant: bool = False,
    capability: int | None = None,
    backend: str = "auto",
) -> Explanation:
    """Says which kernel a call gets, and why not each other one. Launches nothing.

    Args:
        phase: "decode" or "prefill"; the two are asked separately.
        num_qo_heads, num_kv_heads, head_dim, page_size: the geometry.
        query_dtype: dtype of the query, "bfloat16" by default.
        kv_dtype: dtype of the caches, by default the query's; "nvfp4" may be asked about.
        q_len, draft_mask: decode only: query rows per request, and whether a mask comes with them.
        causal: prefill only.
        sinks: whether sinks are given.
        kv_layout, window_left, soft_cap, return_lse, batch_invariant, backend: as in the call.
        capability: `major * 10 + minor` of the device, 0 for a CPU; by default this machine's.

    Returns:
        Explanation: `kernel` (a row of TABLE, or None) and `reasons` (kernel name -> text).

    Raises:
        ValueError, TypeError: an argument that no call accepts.
    """
    checks.choice("phase", phase, ("decode", "prefill"))
    for name, value in (
        ("num_qo_heads", num_qo_heads),
        ("num_kv_heads", num_kv_heads),
        ("head_dim", head_dim),
        ("page_size", page_size),
    ):
        checks.integer(name, value, 1)
    checks.integer("q_len", q_len, 1)
    kv_dtype = kv_dtype or query_dtype
    cache_dtype = "float8_e4m3fn" if kv_dtype == NVFP4 else kv_dtype
    tokens = (page_size, num_kv_heads) if kv_layout == "NHD" else (num_kv_heads, page_size)
    cache = Spec((1, *tokens, head_dim), cache_dtype)
    inputs = AttentionInputs(
        query=Spec((q_len, num_qo_heads, head_dim), query_dtype),
        key_cache=cache,
        value_cache=cache,
        page_table=Spec((1, 1), "int32"),
        seq_lens=Spec((1,), "int32"),
        sinks=Spec((num_qo_heads,), "float32") if sinks else None,
    )
    options: dict[str, Any] = dict(
        kv_layout=kv_layout,
        window_left=window_left,
        soft_cap=soft_cap,
        return_lse=return_lse,
        batch_invariant=batch_invariant,
    )
    problem: AttentionProblem
    if phase == "decode":
        mask = Spec((1, q_len, q_len), "bool") if draft_mask else None
        problem, _ = describe_decode(inputs._replace(draft_mask=mask), q_len=q_len, **options)
    else:
        inputs = inputs._replace(cu_seqlens_q=Spec((2,), "int32"))
        problem, _ = describe_prefill(inputs, max_seqlen_q=q_len, causal=causal, **options)
    problem = dataclasses.replace(problem, kv_dtype=kv_dtype)
    if capability is None:
        capability = device_capability()
    return explain_problem(problem, environment(capability), backend)


def supported(phase: str, **arguments: Any) -> bool:
    """Whether some kernel runs a call; takes the arguments of `explain`.

    Args:
        phase: "decode" or "prefill".

    Returns:
        bool; False also for arguments that no call accepts.

    Raises:
        Nothing on their account.
    """
    try:
        return explain(phase, **arguments).kernel is not None
    except (ValueError, TypeError):
        return False


def device_capability(device: torch.device | None = None) -> int:
    """`major * 10 + minor` of a CUDA device (default: the current one), 0 without one."""
    if (device is not None and device.type != "cuda") or not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def matrix() -> str:
    """TABLE as a Markdown table."""
    columns = {
        "kernel": lambda k: k.name,
        "phase": lambda k: k.phase,
        "capability": lambda k: "any" if k.capabilities is None else _spell(k.capabilities),
        "head_dim": lambda k: "any" if k.head_dims is None else _brief(k.head_dims),
        "page_size": lambda k: "any" if k.page_sizes is None else _brief(k.page_sizes),
        "query/cache": lambda k: _spell_dtypes(k.dtypes),
        "lse": lambda k: _mark(k.lse),
        "soft cap": lambda k: _mark(k.soft_cap),
        "window": lambda k: _mark(k.window),
        "sinks": lambda k: _mark(k.sinks),
        "drafts": lambda k: _mark(k.drafts) if k.phase == "decode" else "",
        "host plan": lambda k: _mark(k.host_plan),
        "status": lambda k: "works" if _has_module(k.module) else "to come",
    }
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[str(spell(kernel)) for spell in columns.values()] for kernel in TABLE]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _mark(value: bool) -> str:
    return "yes" if value else "no"


def _spell_dtypes(dtypes: frozenset[tuple[str, str]]) -> str:
    """The pairs by query dtype, in short words: "bf16 f16 / same, e4m3"."""
    short = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", NVFP4: NVFP4}
    short |= {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
    caches: dict[str, list[str]] = {}
    for query in short:
        names = [
            "same" if cache == query else short[cache]
            for cache in short
            if (query, cache) in dtypes
        ]
        if names:
            caches.setdefault(", ".join(names), []).append(short[query])
    return "; ".join(f"{' '.join(queries)} / {names}" for names, queries in caches.items())
