"""Faults reported in this field, as tests; each test is named after its row of the list.

UNIFORM: the query is 0 and the values are one-hot, so the output is the mask. POISON: what must not
be read is filled with NaN, inf or large numbers. SPLIT: one call equals the same work in pieces.
"""

import functools
import itertools
from typing import Any

import jax
import ml_dtypes
import numpy as np

import jaxattn
import torch_core
from tests import inputs
from tests.inputs import Case

FRONTS = ("torch", "jax")
# JAX raises the one on a program's first call and the other from its C++ fast path.
RUNTIME_ERRORS = {"torch": ValueError, "jax": (jax.errors.JaxRuntimeError, ValueError)}


@functools.cache
def jitted(name: str, static: tuple) -> Any:
    """jaxattn's function `name` under jit, every array traced; one jit per static configuration."""
    return jax.jit(lambda arrays: getattr(jaxattn, name)(**arrays, **dict(static)))


def run(front: str, name: str, arguments: dict[str, Any], **more: Any) -> Any:
    """Calls `name` of torch_core or, inside jit, of jaxattn on NumPy arguments."""
    arguments = arguments | more
    if front == "torch":
        return inputs.run_torch(getattr(torch_core, name), arguments)
    arrays = {key: inputs.to_jax(v) for key, v in arguments.items() if isinstance(v, np.ndarray)}
    static = tuple(sorted((key, v) for key, v in arguments.items() if key not in arrays))
    return inputs._map(np.asarray, jitted(name, static)(arrays))


def attend(front: str, arguments: dict[str, Any], **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """out and lse of a decode or prefill call."""
    return run(front, phase_of(arguments), arguments, return_lse=True, **more)


def phase_of(arguments: dict[str, Any]) -> str:
    return "prefill" if "cu_seqlens_q" in arguments else "decode"


def jax_arrays(arguments: dict[str, Any]) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """The arguments that are arrays, and the others."""
    arrays = {key: inputs.to_jax(v) for key, v in arguments.items() if isinstance(v, np.ndarray)}
    return arrays, {key: v for key, v in arguments.items() if key not in arrays}


def row_lengths(arguments: dict[str, Any]) -> list[int]:
    """Query rows of each request."""
    if "cu_seqlens_q" in arguments:
        return np.diff(arguments["cu_seqlens_q"]).tolist()
    return [arguments["q_len"]] * len(arguments["seq_lens"])


def positions(arguments: dict[str, Any]) -> list[tuple[int, int]]:
    """(request, position) of each query row."""
    pairs = zip(arguments["seq_lens"].tolist(), row_lengths(arguments), strict=True)
    return [
        (request, length - rows + row)
        for request, (length, rows) in enumerate(pairs)
        for row in range(rows)
    ]


def nhd(cache: np.ndarray, kv_layout: str) -> np.ndarray:
    """A view of the cache as [page, token, head, dim]."""
    return cache if kv_layout == "NHD" else cache.swapaxes(1, 2)


def token_places(arguments: dict[str, Any], request: int) -> tuple[np.ndarray, np.ndarray]:
    """(page, offset) of each cached token of a request."""
    cache = nhd(arguments["key_cache"], arguments["kv_layout"])
    at = np.arange(arguments["seq_lens"][request])
    return arguments["page_table"][request, at // cache.shape[1]], at % cache.shape[1]


def uniform(case: Case) -> dict[str, Any]:
    """The call with query 0 and value one-hot at position % head_dim."""
    arguments = case.make()
    arguments["query"][:] = 0
    values = nhd(arguments["value_cache"], case.kv_layout)
    values[:] = 0
    for request, length in enumerate(case.seq_lens):
        page, offset = token_places(arguments, request)
        values[page, offset, :, np.arange(length) % case.head_dim] = 1
    return arguments


def check_visible(
    arguments: dict[str, Any], out: np.ndarray, lse: np.ndarray, visible: list[range]
) -> None:
    """Asserts that row i of a UNIFORM call sees exactly the keys visible[i]."""
    assert len(out) == len(visible)
    head_dim = out.shape[-1]
    for row, keys in enumerate(visible):
        expected = np.bincount(np.array(keys, int) % head_dim, minlength=head_dim)
        expected = expected / max(len(keys), 1)
        tolerance = max(1e-6, float(ml_dtypes.finfo(out.dtype).eps))
        np.testing.assert_allclose(
            out[row].astype(np.float64),
            np.broadcast_to(expected, out[row].shape),
            rtol=tolerance,
            err_msg=f"row {row}",
        )
        log = np.log(len(keys)) if keys else -np.inf
        np.testing.assert_allclose(lse[row], log, rtol=1e-6, atol=1e-6, err_msg=f"row {row}")


def visible_tokens(arguments: dict[str, Any]) -> np.ndarray:
    """bool [num_pages, page_size]: cached tokens that some query row sees."""
    cache = nhd(arguments["key_cache"], arguments["kv_layout"])
    seen = np.zeros(cache.shape[:2], bool)
    window, causal = arguments.get("window_left", -1), arguments.get("causal", True)
    for request, position in positions(arguments):
        page, offset = token_places(arguments, request)
        at = np.arange(len(page))
        keep = at <= position if causal else at >= 0
        if window >= 0:
            keep &= at >= position - window
        seen[page[keep], offset[keep]] = True
    return seen


def poisons(dtype: np.dtype) -> list[float]:
    """NaN, inf and 3e4 as far as the dtype has them."""
    return [np.nan, np.inf, -np.inf, min(3e4, float(ml_dtypes.finfo(dtype).max))]


def with_unread(
    arguments: dict[str, Any],
    fill: float,
    caches: tuple[str, ...] = ("key_cache", "value_cache"),
) -> dict[str, Any]:
    """The call with every cached token that no row sees set to `fill`."""
    unread = ~visible_tokens(arguments)
    changed = dict(arguments)
    for name in caches:
        changed[name] = arguments[name].copy()
        nhd(changed[name], arguments["kv_layout"])[unread] = fill
    return changed


def with_null_page(arguments: dict[str, Any]) -> dict[str, Any]:
    """The call with a page 0 that is nobody's, and padded table entries that name it."""
    changed = dict(arguments)
    for name in ("key_cache", "value_cache"):
        cache = arguments[name]
        changed[name] = np.concatenate([np.zeros_like(cache[:1]), cache])
    page_size = nhd(arguments["key_cache"], arguments["kv_layout"]).shape[1]
    first = np.arange(arguments["page_table"].shape[1]) * page_size
    used = first < arguments["seq_lens"][:, None]
    changed["page_table"] = np.where(used, arguments["page_table"] + 1, 0).astype(np.int32)
    return changed


def one_by_one(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """A call for each request."""
    calls = []
    bounds = itertools.pairwise(np.cumsum([0, *row_lengths(arguments)]).tolist())
    for request, (begin, end) in enumerate(bounds):
        call = arguments | {
            name: arguments[name][request : request + 1]
            for name in ("page_table", "seq_lens", "draft_mask")
            if name in arguments
        }
        call["query"] = arguments["query"][begin:end]
        if "cu_seqlens_q" in arguments:
            call["cu_seqlens_q"] = np.array([0, end - begin], np.int32)
        calls.append(call)
    return calls


def same_bits(actual: Any, expected: Any) -> bool:
    """Whether two results (arrays or tuples of them) are equal bit by bit."""
    if isinstance(actual, tuple):
        return all(same_bits(a, b) for a, b in zip(actual, expected, strict=True))
    return actual.dtype == expected.dtype and actual.tobytes() == expected.tobytes()
