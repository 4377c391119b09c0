"""FlashInfer's own decode and prefill (FA2), and its prefill for Hopper (FA3).

Decode is upstream's tensor-core variant, which it builds from the FA2 prefill kernel. Upstream's
score scale is a number of the host, and positive. It stays head_dim ** -0.5: what ours is beyond
that multiplies the query, or the scores of an e4m3 query by an array. Its lse has base 2.
"""

import functools
import math
from typing import Any

import torch

from .. import build
from ..binding import Binding, Operand, Ops
from ..problem import AttentionInputs, AttentionProblem, score_scale
from . import native_plan

CAUSAL = 1  # upstream's mask modes
ALL = 0


def scales(problem: AttentionProblem, inputs: AttentionInputs) -> dict[str, Any]:
    """Factors of the query (or of an e4m3 query's scores) and of the output; none where it is 1."""
    factor = score_scale(problem, inputs) * math.sqrt(problem.head_dim)
    if isinstance(factor, float) and math.isclose(factor, 1.0, rel_tol=1e-7):
        factor = 1.0
    name = "score_scale" if problem.query_dtype == "float8_e4m3fn" else "query_scale"
    found = {name: factor, "out_scale": inputs.v_scale}
    return {name: x for name, x in found.items() if not (isinstance(x, float) and x == 1.0)}


def operands(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    scales: dict[str, Any],
    ops: Ops,
    sm_count: int,
    kernel: str,
) -> dict[str, Any]:
    """The call's arrays as the kernel takes them."""
    names = ("query", "key_cache", "value_cache", "page_table")
    arrays = {name: getattr(inputs, name) for name in names}
    if "query_scale" in scales:
        product = ops.cast(inputs.query, "float32") * scales["query_scale"]
        arrays["query"] = ops.cast(product, problem.query_dtype)
    if "score_scale" in scales:
        factor = ops.cast(0 * ops.arange(problem.num_kv_heads) + 1, "float32")
        factor = factor * scales["score_scale"]
        # Upstream multiplies what it masked, -inf, too: the sign goes to the query, which is exact.
        sign = ops.where(factor < 0, 0 * factor - 1, 0 * factor + 1)
        sign = ops.where(factor == 0, factor, sign)[:1]
        product = ops.cast(arrays["query"], "float32") * sign[0]
        arrays["query"] = ops.cast(product, problem.query_dtype)
        arrays["score_scale"] = ops.where(factor == 0, factor + 1, sign * factor)
    arrays["plan"] = inputs.plan
    if inputs.plan is None:
        arrays["plan"] = make_plan(problem, inputs, ops, sm_count, kernel)
    return arrays


def make_plan(problem: Any, inputs: AttentionInputs, ops: Ops, sm_count: int, kernel: str) -> Any:
    """The kernel's work lists for these lengths, int32 [plan_size]."""
    if kernel == "native_prefill_fa3":
        layout = native_plan.hopper(problem, sm_count)
        return native_plan.hopper_plan(layout, problem, inputs, ops)
    layout = native_plan.tiled(problem, sm_count)
    return native_plan.tiled_plan(layout, problem, inputs, ops)


def plan_size(problem: Any, sm_count: int, kernel: str) -> int:
    """Length of the plan."""
    make = native_plan.hopper if kernel == "native_prefill_fa3" else native_plan.tiled
    return native_plan.size(make(problem, sm_count).parts)


def stride_unit(problem: AttentionProblem) -> int:
    """Upstream loads rows 16 bytes at a time."""
    return 16 // getattr(torch, problem.kv_dtype).itemsize


@functools.lru_cache(maxsize=4096)
def bind(problem: Any, sm_count: int, kernel: str, scaled: bool) -> Binding:
    """The compiled kernel for a problem on a device of `sm_count` multiprocessors; `scaled`: with
    the operand score_scale."""
    causal = problem.phase == "prefill" and problem.causal
    soft_cap, sm_scale = problem.soft_cap or 0.0, problem.head_dim**-0.5
    if kernel == "native_prefill_fa3":
        layout = native_plan.hopper(problem, sm_count)
        lists = (Operand("page_table"),) * 4  # the kernel reads the plan's own
        scratch = 16
        if problem.query_dtype == "float8_e4m3fn":
            k_scale = Operand("score_scale") if scaled else None
            rest = (None, k_scale, None, sm_scale, 1.0, 1.0, 1.0)
        else:
            rest = (None, None, None, None, soft_cap, sm_scale, 1.0, 0)
    else:
        layout = native_plan.tiled(problem, sm_count)
        parts = layout.parts
        lists = (parts["q_indptr"], parts["kv_indptr"], Operand("page_table"))
        lists = (*lists, parts["last_page_len"])
        scratch = max(layout.scratch, 16)
        rest = (*(None,) * 8, soft_cap, sm_scale, 1.0, 1.0, 0)
    return Binding(
        name="backends.native",
        build=key(problem, kernel),
        function=function(*key(problem, kernel)),
        arguments=(
            Operand("scratch"),
            Operand("plan"),
            layout.info,
            Operand("query"),
            Operand("key_cache"),
            Operand("value_cache"),
            *lists,
            Operand("out"),
            Operand("lse") if problem.return_lse or problem.sinks else None,
            CAUSAL if causal else ALL,
            int(problem.kv_layout == "HND"),
            problem.window,
            False,  # programmatic dependent launch
            *rest,
        ),
        scratch=scratch,
        lse_unit=math.log(2),
        sinks_after=problem.sinks,
        owned=scaled,
    )


def key(problem: Any, kernel: str) -> tuple:
    """What a compiled kernel depends on."""
    version = "fa3" if kernel == "native_prefill_fa3" else "fa2"
    dtypes = (problem.query_dtype, problem.kv_dtype, problem.out_dtype)
    window, capped = problem.window_left >= 0, problem.soft_cap is not None
    return (version, *dtypes, problem.head_dim, window, capped)


def source(
    version: str, query: str, cache: str, out: str, head_dim: int, window: bool, capped: bool
) -> build.Source:
    """What is built for a key."""
    from flashinfer.jit import gen_batch_prefill_module  # pyright: ignore[reportMissingImports]

    label = f"FlashInfer {version.upper()} ({query} over {cache}, head_dim {head_dim})"
    dtypes = [getattr(torch, name) for name in (query, cache, out)]
    no_rotary, half_accumulation = 0, False
    spec = gen_batch_prefill_module(
        version, *dtypes, torch.int32, head_dim, head_dim, no_rotary, window, capped,
        half_accumulation,
    )  # fmt: skip
    return build.Source(spec, label, 85 if version == "fa3" else 25)


@functools.cache
def function(*key: Any) -> Any:
    """The compiled kernel, built where it is not."""
    return build.load(*source(*key)).paged_run
