"""How near a result must be to the float64 oracle."""

from typing import Any

import ml_dtypes
import numpy as np

from . import oracle

ROUNDINGS = 4


def check_attention(
    arguments: dict[str, Any], out: np.ndarray, lse: np.ndarray | None = None
) -> None:
    """Asserts that (out, lse) answers the call `arguments`: maximum and mean error at most twice
    that of the same maths in float32, plus a few roundings of the output dtype."""
    exact_out, exact_lse = oracle.attention(**arguments)
    plain_out, plain_lse = oracle.attention(**arguments, dtype=np.float32)
    check(out, exact_out, plain_out, "out")
    if lse is not None:
        assert lse.dtype == np.float32
        check(lse, exact_lse, plain_lse, "lse")


def check(actual: np.ndarray, exact: np.ndarray, plain: np.ndarray, label: str = "result") -> None:
    """Asserts that `actual` is as near to `exact` as `plain`, computed simply, is."""
    assert actual.shape == exact.shape, f"{label}: shape {actual.shape} for {exact.shape}"
    if not exact.size:
        return
    value = actual.astype(np.float64)
    finite = np.isfinite(exact)
    assert np.array_equal(np.isfinite(value), finite), f"{label}: NaN or inf at other places"
    assert np.array_equal(value[~finite], exact[~finite], equal_nan=True), (
        f"{label}: other NaN or inf"
    )
    if not finite.any():
        return
    exact = exact[finite]
    error = np.abs(value[finite] - exact)
    plain_error = np.abs(plain.astype(np.float64)[finite] - exact)
    rounding = ROUNDINGS * float(ml_dtypes.finfo(actual.dtype).eps)
    size = np.abs(exact)
    for name, reduce in (("largest", np.max), ("mean", np.mean)):
        bound = 2 * reduce(plain_error) + rounding * max(reduce(size), 1e-30)
        assert reduce(error) <= bound, (
            f"{label}: {name} error {reduce(error):.3g} above {bound:.3g}"
        )
