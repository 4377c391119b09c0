"""One decode call as two calls over the halves of its keys, and states to merge."""

from typing import Any

import numpy as np

from . import compare, kv_model, oracle
from .inputs import DTYPES, Case, normal

CASES = [
    Case("lengths", (5, 1, 17, 24, 64)),
    Case("empty_rows", (5, 0, 17, 3)),
    Case("sinks", (9, 30, 0, 2), sinks=True),
    Case("soft_cap_hnd", (9, 30), kv_layout="HND", options=dict(soft_cap=1.5)),
    Case("bfloat16", (9, 30, 4), dtype="bfloat16"),
    Case("e4m3_cache", (9, 30), dtype="bfloat16", kv_dtype="float8_e4m3fn",
         options=dict(k_scale=0.25, v_scale=0.5)),
]  # fmt: skip


def halves(case: Case) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The call, and the same over its first pages and over the rest; sinks in the first only."""
    whole = case.make()
    size, pages = case.page_size, whole["page_table"].shape[1]
    cut = np.array([-(-length // size) // 2 for length in case.seq_lens], np.int32)
    first = whole | dict(seq_lens=np.minimum(whole["seq_lens"], cut * size))
    table = np.full_like(whole["page_table"], -1)
    for request, skip in enumerate(cut):
        table[request, : pages - skip] = whole["page_table"][request, skip:]
    last = whole | dict(page_table=table, seq_lens=whole["seq_lens"] - first["seq_lens"])
    last.pop("sinks", None)
    return whole, [first, last]


def states(part_a: tuple, part_b: tuple) -> dict[str, np.ndarray]:
    return dict(out_a=part_a[0], lse_a=part_a[1], out_b=part_b[0], lse_b=part_b[1])


def check(whole: dict[str, Any], merged: tuple[np.ndarray, np.ndarray]) -> None:
    """The merged result against the oracle; each part may have rounded once more."""
    exact = oracle.attention(**whole)
    for actual, right in zip(merged, exact, strict=True):
        plain = right.astype(actual.dtype).astype(np.float64)
        compare.check(actual, right, plain)


def random_states(dtype: str, rows: int = 6, heads: int = 3, seed: int = 0) -> dict[str, Any]:
    """States of every kind: far apart, equal, one or both parts without keys and full of NaN."""
    rng = np.random.default_rng(seed)
    outs = [normal(rng, (rows, heads, 8), DTYPES[dtype]) for _ in range(2)]
    lses = [rng.normal(size=(rows, heads)).astype(np.float32) * 30 for _ in range(2)]
    if rows >= 5:
        lses[0][1], lses[1][2], lses[0][3], lses[1][3] = (-np.inf,) * 4
        lses[0][4] = lses[1][4]
    for out, lse in zip(outs, lses, strict=True):
        out[lse == -np.inf] = np.nan
    return dict(out_a=outs[0], lse_a=lses[0], out_b=outs[1], lse_b=lses[1])


def check_merge(arguments: dict[str, np.ndarray], out: np.ndarray, lse: np.ndarray) -> None:
    """The result of merge_states against the loop in float64."""
    exact = kv_model.merge(**arguments)
    plain = kv_model.merge(**arguments, dtype=np.float32)
    for actual, right, simple in zip((out, lse), exact, plain, strict=True):
        compare.check(actual, right, simple)
