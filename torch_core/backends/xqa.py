"""FlashInfer's XQA decode.

Upstream's terms: `q_scale` multiplies query . key together with kv_scale / sqrt(head_dim);
`kv_scale` multiplies the values too, for an fp8 cache only; a window counts keys
(`window_left + 1`); masks are packed; a row without keys is NaN unless sinks are given.
"""

import functools
import math
from typing import Any

import numpy as np
import torch

from .. import build
from ..binding import Binding, Operand, Ops, Scalar, Size
from ..problem import AttentionInputs, DecodeProblem, score_scale

# Upstream's running maximum starts at -1e5. A sink just above it weighs nothing beside any real
# score and turns the 0 / 0 of a row without keys into 0 / inf. Scores below it were lost before.
NO_SINK = -99_000.0


def scales(problem: DecodeProblem, inputs: AttentionInputs) -> dict[str, Any]:
    """Our scales in upstream's terms; numbers stay numbers, arrays of any framework arrays."""
    q_scale = score_scale(problem, inputs) * math.sqrt(problem.head_dim)
    if problem.kv_dtype == "float8_e4m3fn":
        return dict(q_scale=q_scale / inputs.v_scale, kv_scale=inputs.v_scale)
    numbers = dict(q_scale=q_scale, kv_scale=1.0)
    if not (isinstance(inputs.v_scale, float) and inputs.v_scale == 1.0):
        numbers["out_scale"] = inputs.v_scale
    return numbers


def operands(
    problem: DecodeProblem,
    inputs: AttentionInputs,
    scales: dict[str, Any],
    ops: Ops,
    sm_count: int,
    kernel: str,
) -> dict[str, Any]:
    """The call's arrays as the kernel takes them."""
    names = ("query", "key_cache", "value_cache", "page_table", "seq_lens", "sinks")
    arrays = {name: getattr(inputs, name) for name in names} | scales
    if inputs.sinks is None:
        arrays["sinks"] = ops.constant(np.full(problem.num_qo_heads, NO_SINK, np.float32))
    if problem.draft_mask == "packed":
        arrays["draft_mask"] = inputs.draft_mask
    elif problem.q_len > 1:
        arrays |= _draft_operands(problem, inputs, ops)
    return arrays


def _draft_operands(problem: DecodeProblem, inputs: AttentionInputs, ops: Ops) -> dict[str, Any]:
    """Lengths and packed mask, with requests shorter than the draft block made safe: upstream
    would start their block before position 0. They get the length q_len, and their mask is moved
    to where their tokens are."""
    q_len = problem.q_len
    mask = inputs.draft_mask
    if mask is None:
        mask = ops.constant(
            np.broadcast_to(np.tri(q_len, dtype=bool), (problem.batch, q_len, q_len))
        )
    lengths = inputs.seq_lens
    short = (lengths > 0) & (lengths < q_len)
    missing = (ops.where(lengths < q_len, q_len - lengths, 0 * lengths))[:, None, None]
    column = ops.constant(np.arange(q_len, dtype=np.int64).reshape(1, 1, q_len)) + missing
    row = ops.constant(np.arange(q_len, dtype=np.int64).reshape(1, q_len, 1))
    inside = (column < q_len) & (row >= missing)
    index = ops.where(column < q_len, column, 0 * column) + 0 * row
    moved = ops.take(mask, index, 2) & inside
    words = 2 * math.ceil(q_len / 32)
    weights = np.zeros((q_len, words), np.int32)
    weights[np.arange(q_len), np.arange(q_len) // 16] = 1 << (np.arange(q_len) % 16)
    packed = (ops.cast(moved, "int32")[..., None] * ops.constant(weights)).sum(-2)
    return dict(
        seq_lens=ops.where(short, 0 * lengths + q_len, lengths),
        draft_mask=ops.cast(packed, "uint16"),
    )


@functools.lru_cache(maxsize=4096)
def bind(problem: DecodeProblem, sm_count: int, kernel: str, scaled: bool = False) -> Binding:
    """The compiled kernel for a problem on a device of `sm_count` multiprocessors.

    "xqa_fp8" is Hopper's own fp8 kernel. It rounds query and weights to e4m3 and multiplies what
    it masked by 0, so a NaN in a slot that was never written reaches the output.
    """
    fast = kernel == "xqa_fp8"
    sequences = problem.batch * problem.num_kv_heads
    splits = max(1, sm_count * _blocks_per_sm(problem, fast) // sequences)
    # What makes upstream choose these splits.
    told = math.ceil((splits - 0.3) * sequences / 0.75) if fast else splits * sequences
    # Upper bounds of upstream's tiles: query rows of a sequence go in pieces of 16 to 32.
    rows = problem.q_len * problem.group_size
    pieces = max(problem.q_len, math.ceil(rows / 16))
    piece_rows = max(32, 16 * math.ceil(problem.group_size / 16))
    row_bytes = 2 * 64 * math.ceil(problem.head_dim / 64) + 16
    swap = problem.kv_layout == "HND"
    return Binding(
        name="backends.xqa",
        build=key(problem, kernel),
        function=function(*key(problem, kernel)),
        arguments=(
            fast,
            told,
            problem.num_kv_heads,
            problem.window + 1,
            Scalar("q_scale"),
            Operand("out"),
            1.0,  # reciprocal of an fp8 output's scale
            Operand("query"),
            Operand("sinks"),
            Operand("key_cache", swap),
            Operand("value_cache", swap),
            None,  # nvfp4 block scales of the keys
            None,  # and of the values
            Operand("page_table"),
            Size("page_table", 1, problem.page_size),
            Operand("seq_lens"),
            Size("seq_lens", 0),
            Scalar("kv_scale"),
            problem.q_len,
            None,  # prefix sums of ragged draft lengths
            Operand("draft_mask") if problem.q_len > 1 else None,
            Operand("semaphores"),
            Operand("scratch"),
            True,  # programmatic dependent launch
        ),
        scratch=256 if splits == 1 else sequences * splits * pieces * piece_rows * row_bytes + 4096,
        semaphores=sequences * pieces,
    )


def _blocks_per_sm(problem: DecodeProblem, fast: bool) -> int:
    """How many blocks of a sequence's splits run on a multiprocessor at once (measured: H200)."""
    if fast:
        return 3
    return 2 if problem.kv_dtype == "float8_e4m3fn" and problem.head_dim <= 128 else 1


def key(problem: DecodeProblem, kernel: str) -> tuple:
    """What a compiled kernel depends on."""
    window = problem.window_left >= 0
    head = (problem.page_size, problem.head_dim, problem.group_size)
    return (problem.query_dtype, problem.kv_dtype, *head, window, problem.q_len)


def source(
    query: str, cache: str, page_size: int, head_dim: int, group_size: int, window: bool, q_len: int
) -> build.Source:
    """What is built for a key."""
    from flashinfer.jit.xqa import gen_xqa_module  # pyright: ignore[reportMissingImports]

    label = f"FlashInfer XQA ({query} over {cache}, page_size {page_size}, head_dim {head_dim})"
    dtype = getattr(torch, query)
    spec = gen_xqa_module(
        dtype, getattr(torch, cache), page_size, head_dim, group_size, window, dtype, q_len
    )
    return build.Source(spec, label, 10)


@functools.cache
def function(*key: Any) -> Any:
    """The compiled kernel, built where it is not."""
    return build.load(*source(*key)).xqa_wrapper
