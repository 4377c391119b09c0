"""Which kernel a call gets, out of the rows of TABLE."""

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from . import checks
from .problem import (
    AttentionInputs,
    AttentionProblem,
    DecodeProblem,
    check_dtype_pair,
    describe_decode,
    describe_prefill,
)
from .table import LEFT_OUT
from .table import NVFP4 as NVFP4
from .table import TABLE as TABLE
from .table import Environment as Environment
from .table import Kernel as Kernel

BACKENDS = ("auto", *dict.fromkeys(kernel.name for kernel in TABLE))


@dataclass(frozen=True)
class Explanation:
    """`kernel` is the chosen row or None; `reasons` says why each other row of the phase is not."""

    kernel: Kernel | None
    reasons: dict[str, str]

    def __str__(self) -> str:
        chosen = f"{self.kernel.name}: chosen" if self.kernel else "no kernel"
        lines = [f"{name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join([chosen, *lines])


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


def _check_backend(backend: str) -> str:
    if isinstance(backend, str) and backend in LEFT_OUT:
        raise ValueError(f"backend {backend!r} is not offered: {LEFT_OUT[backend]}")
    return checks.choice("backend", backend, BACKENDS)


def explain_problem(
    problem: AttentionProblem, environment: Environment, backend: str = "auto"
) -> Explanation:
    """The choice for a described call, and the reason against every other row."""
    _check_backend(backend)
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
    return _choose(problem, environment, _check_backend(backend))


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
    """The module whose `run(problem, inputs, out, lse, name of the row)` is the kernel."""
    return importlib.import_module(f"torch_core.{kernel.module}")


def require_plan(plan: Any, problem: AttentionProblem, sm_count: int, kernel: Kernel) -> None:
    """Checks the size of a plan that the caller gives."""
    if plan is None:
        return
    wanted = load(kernel).plan_size(problem, sm_count, kernel.name) if kernel.plans else 0
    if plan.shape[0] != wanted:
        raise ValueError(
            f"plan must be int32 [{wanted}], made by plan_prefill for a call of these shapes and "
            f"options ({kernel.name}), got [{plan.shape[0]}]"
        )


@functools.cache
def version(distribution: str) -> str:
    """The installed version of a distribution, "" without it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


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
    query_dtype: Any = "bfloat16",
    kv_dtype: Any = None,
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
        query_dtype: dtype of the query, of torch, NumPy or JAX or by name; "bfloat16" by default.
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
    problem = describe_call(
        phase,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        query_dtype=query_dtype,
        kv_dtype=kv_dtype,
        kv_layout=kv_layout,
        q_len=q_len,
        causal=causal,
        window_left=window_left,
        soft_cap=soft_cap,
        sinks=sinks,
        draft_mask=draft_mask,
        return_lse=return_lse,
        batch_invariant=batch_invariant,
    )
    if capability is None:
        capability = device_capability()
    capability = checks.integer("capability", capability, 0)
    return explain_problem(problem, environment(capability), backend)


def describe_call(
    phase: str,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    query_dtype: Any = "bfloat16",
    kv_dtype: Any = None,
    kv_layout: str = "NHD",
    q_len: int = 1,
    causal: bool = True,
    window_left: int = -1,
    soft_cap: float | None = None,
    sinks: bool = False,
    draft_mask: bool = False,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> AttentionProblem:
    """The problem of a call by its parameters, with one request; the arguments of `explain`."""
    checks.choice("phase", phase, ("decode", "prefill"))
    for name, value in (
        ("num_qo_heads", num_qo_heads),
        ("num_kv_heads", num_kv_heads),
        ("head_dim", head_dim),
        ("page_size", page_size),
    ):
        checks.integer(name, value, 1)
    checks.integer("q_len", q_len, 1)
    checks.flag("causal", causal)
    checks.flag("sinks", sinks)
    checks.flag("draft_mask", draft_mask)
    query_dtype = _dtype("query_dtype", query_dtype, checks.QUERY_DTYPES)
    kv_dtype = query_dtype if kv_dtype is None else kv_dtype
    kv_dtype = _dtype("kv_dtype", kv_dtype, (*checks.CACHE_DTYPES, NVFP4))
    cache_dtype = "float8_e4m3fn" if kv_dtype == NVFP4 else kv_dtype
    check_dtype_pair("kv_dtype", query_dtype, cache_dtype)
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
    return dataclasses.replace(problem, kv_dtype=kv_dtype)


def _dtype(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """The name of a dtype of torch, NumPy or JAX, or given as a name, out of those allowed."""
    word = str(value).removeprefix("torch.")
    if not isinstance(value, str) and not str(value).startswith("torch."):
        try:
            if value is None:  # float64 to NumPy
                raise TypeError
            word = np.dtype(value).name
        except TypeError:
            raise TypeError(f"{name} must be a dtype or its name, got {value!r}") from None
    return checks.choice(name, word, allowed)


def supported(phase: str, **arguments: Any) -> bool:
    """Whether some kernel runs a call; takes the arguments of `explain`.

    Args:
        phase: "decode" or "prefill".

    Returns:
        bool; False also for arguments that no call accepts.

    Raises:
        TypeError: an argument is missing or unknown.
    """
    # A misspelled argument is an error, not an unsupported call.
    inspect.signature(explain).bind(phase, **arguments)
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


def sm_count(device: torch.device | None = None) -> int:
    """Multiprocessors of a CUDA device (default: the current one), 0 without one."""
    if (device is not None and device.type != "cuda") or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


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
        "plan": lambda k: _mark(k.plans),
        "status": lambda k: k.status,
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
