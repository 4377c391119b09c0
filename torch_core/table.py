"""The kernels, as data: one row each. Limits: FlashInfer 0.7.4's source. The order within a phase
is that of preference, measured on an H200."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import checks
from .problem import AttentionProblem, DecodeProblem, PrefillProblem

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
    plans: bool = False  # takes a plan; a call without one makes its own, on the device
    cubins: bool = False
    batch_invariant: bool = True
    last_resort: tuple[tuple[int, int], ...] = ()  # capabilities where "auto" tries others first
    status: str = "works"
    rules: tuple[Callable[[Any, Environment], str | None], ...] = ()


def _wide_drafts(problem: DecodeProblem, environment: Environment) -> str | None:
    if problem.head_dim > 256 and problem.q_len > 1:
        return "head_dim above 256 takes q_len 1 only"
    return None


def _query_tile(problem: DecodeProblem, environment: Environment) -> str | None:
    # The kernel keeps a KV head's query rows, padded to 64, 128, 256 or 512 elements, in 16 KiB,
    # and does not compile where they are more. Of drafts it takes 32 rows at a time.
    most = 2**13 // max(64, 1 << (problem.head_dim - 1).bit_length())
    if problem.q_len == 1 and problem.group_size > most:
        return (
            f"takes at most {most} query heads a KV head with head_dim {problem.head_dim}, "
            f"got {problem.group_size}"
        )
    return None


def _window_within_drafts(problem: DecodeProblem, environment: Environment) -> str | None:
    if 0 <= problem.window_left < problem.q_len - 1:
        return "a window takes window_left of at least q_len - 1"
    return None


def _many_requests(problem: DecodeProblem, environment: Environment) -> str | None:
    # Requests with drafts go to the kernel as two each.
    most = 2**16 - 1 if problem.q_len == 1 else 2**15 - 1
    if problem.batch > most:
        return f"takes a batch of at most {most}, got {problem.batch}"
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


def _address_space(problem: AttentionProblem, environment: Environment) -> str | None:
    tokens = problem.batch * problem.pages_per_seq * problem.page_size
    query = problem.num_rows * problem.num_qo_heads * problem.head_dim
    if max(tokens, query) >= 2**32:
        return "counts the tokens of a page table and the elements of a query in 32 bits"
    return None


def _causal_window(problem: PrefillProblem, environment: Environment) -> str | None:
    if problem.window_left >= 0 and not problem.causal:
        return "is wrong for a window with causal=False (flashinfer#4972)"
    return None


def _uncapped_e4m3(problem: PrefillProblem, environment: Environment) -> str | None:
    if problem.soft_cap is not None and problem.query_dtype in checks.FP8:
        return "ignores a soft cap with an e4m3 query; use a bfloat16 query"
    return None


def _linear_drafts(problem: DecodeProblem, environment: Environment) -> str | None:
    return None if problem.causal else "takes no draft mask"


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
    cubins=True,
    batch_invariant=False,
    status="not run on hardware",
)
_NATIVE: dict[str, Any] = dict(
    head_dims=(64, 128, 256),
    page_sizes=None,
    lse=True,
    soft_cap=True,
    window=True,
    sinks=True,
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
)

# XQA before native decode, which is a few percent faster on some large bf16 caches but takes a plan
# of over 100 us.
TABLE: tuple[Kernel, ...] = (
    Kernel(
        name="trtllm_gen",
        phase="decode",
        entry="flashinfer.decode.trtllm_batch_decode_with_kv_cache",
        drafts=True,
        rules=(_linear_drafts,),
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
        batch_invariant=False,
        status="works; run on 90",
        rules=(
            _wide_drafts,
            _query_tile,
            _window_over_drafts,
            _window_within_drafts,
            _mask_of_one,
            _many_requests,
        ),
    ),
    Kernel(
        name="native_decode",
        phase="decode",
        module="backends.native",
        entry="flashinfer.BatchDecodeWithPagedKVCacheWrapper",
        capabilities=((80, 999),),
        dtypes=frozenset(_SAME | _E4M3_KV | _E5M2_KV),
        status="works; run on 90",
        rules=(_address_space,),
        **_NATIVE,
    ),
    Kernel(
        name="trtllm_gen",
        phase="prefill",
        entry="flashinfer.prefill.trtllm_batch_context_with_kv_cache",
        **_TRTLLM_GEN,
    ),
    Kernel(
        name="native_prefill_fa3",
        phase="prefill",
        module="backends.native",
        entry='flashinfer.BatchPrefillWithPagedKVCacheWrapper(backend="fa3")',
        capabilities=((90, 90),),
        dtypes=frozenset(_SAME | _E4M3),
        plans=True,
        rules=(_window_hangs, _uncapped_e4m3),
        **_NATIVE,
    ),
    Kernel(
        name="native_prefill_fa2",
        phase="prefill",
        module="backends.native",
        entry='flashinfer.BatchPrefillWithPagedKVCacheWrapper(backend="fa2")',
        plans=True,
        status="works; run on 90",
        rules=(_causal_window, _address_space),
        capabilities=((80, 999),),
        dtypes=frozenset(_SAME | _E4M3_KV),
        **_NATIVE,
    ),
    Kernel(phase="decode", **_REFERENCE),
    Kernel(phase="prefill", **_REFERENCE),
)

# Kernels of FlashInfer that have no row, by the names that people ask for.
LEFT_OUT = {
    "fmha_v2": "it lets NaN of slots that were never written reach the output, leaves rows without "
    "keys unwritten, and wants keys and values in one allocation; native_prefill_fa3, with a plan "
    "made on the device, takes about as long",
    "xqa_fp8": "it lets NaN of slots that were never written reach the output, leaves rows without "
    "keys unwritten, and is about ten times less exact; xqa takes e4m3 caches",
}
