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
# score and turns the 0 / 0 of a row without keys into 0 / inf. Scores below it were lost before,
# as `decode` says.
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
    if problem.q_len > 1:
        arrays |= _draft_operands(problem, inputs, ops)
    return arrays


def _draft_operands(problem: DecodeProblem, inputs: AttentionInputs, ops: Ops) -> dict[str, Any]:
    """Lengths, prefix sums of query lengths and packed mask, with each request as two: its rows
    before position 0, over no keys, and the others. Upstream would start a block longer than its
    request before position 0; for most requests the first of the two has no rows and costs nothing.
    """
    batch, q_len = problem.batch, problem.q_len
    words = np.arange(2 * math.ceil(q_len / 32), dtype=np.int32)
    lengths = inputs.seq_lens
    missing = (q_len - lengths).clip(0)
    if inputs.draft_mask is None:
        # Row i sees i + 1 tokens of its block, less those that are missing.
        seen = np.arange(1, q_len + 1, dtype=np.int32)[None, :, None] - 16 * words
        seen = (ops.constant(seen) - missing[:, None, None]).clip(0, 16)
        packed = (1 << seen) - 1
    else:
        # Upstream's columns end at the request's last token.
        column = np.broadcast_to(np.arange(q_len), (1, q_len, q_len))
        column = ops.constant(column) + missing[:, None, None]
        place = column.clip(0, q_len - 1)
        if problem.draft_mask == "packed":
            bits = ops.take(ops.cast(inputs.draft_mask, "int32"), place // 16, 2)
            mask = ((bits >> (place % 16)) & 1) == 1
        else:
            mask = ops.take(inputs.draft_mask, place, 2)
        mask = mask & (column < q_len)
        weights = np.zeros((q_len, len(words)), np.int32)
        weights[np.arange(q_len), np.arange(q_len) // 16] = 1 << (np.arange(q_len) % 16)
        packed = (ops.cast(mask, "int32")[..., None] * ops.constant(weights)).sum(-2)
    ends = np.arange(2 * batch + 1, dtype=np.int32) // 2 * q_len
    second = ops.constant(np.array([0, 1], np.int32))
    moved = (missing[:, None] * second).reshape(-1)
    table = ops.concatenate([inputs.page_table[:, None]] * 2, 1)
    return dict(
        seq_lens=(lengths[:, None] * second).reshape(-1),
        page_table=table.reshape(2 * batch, -1),
        cu_seqlens_q=ops.constant(ends) + ops.concatenate([moved, 0 * moved[:1]]),
        draft_mask=ops.cast(packed, "uint16"),
    )


def stride_unit(problem: DecodeProblem) -> int:
    """Upstream counts the strides of a cache in rows: it divides them by head_dim."""
    return problem.head_dim


@functools.lru_cache(maxsize=4096)
def bind(problem: DecodeProblem, sm_count: int, kernel: str, scaled: bool = False) -> Binding:
    """The compiled kernel for a problem on a device of `sm_count` multiprocessors."""
    sequences = problem.batch * problem.num_kv_heads
    splits = max(1, sm_count * _blocks_per_sm(problem) // sequences)
    drafts = problem.q_len > 1
    sequences *= 2 if drafts else 1
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
            False,  # not Hopper's fp8 kernel
            splits * sequences,  # multiprocessors, of which upstream makes these splits
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
            Operand("cu_seqlens_q") if drafts else None,
            Operand("draft_mask") if drafts else None,
            Operand("semaphores"),
            Operand("scratch"),
            True,  # programmatic dependent launch
        ),
        scratch=256 if splits == 1 else sequences * splits * pieces * piece_rows * row_bytes + 4096,
        semaphores=sequences * pieces,
    )


def _blocks_per_sm(problem: DecodeProblem) -> int:
    """How many blocks of a sequence's splits run on a multiprocessor at once (measured: H200)."""
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
def function(*key: Any) -> build.PerDevice:
    """The kernel, built where it is not."""
    return build.PerDevice(source(*key), "xqa_wrapper")
