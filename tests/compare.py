"""How near a result must be to the float64 oracle."""

from typing import Any

import ml_dtypes
import numpy as np

from . import oracle

# How many roundings of the output dtype an error may be, beside that of float32 maths.
ROUNDINGS = {"largest": 4, "mean": 1}
DRAWS = 32


def check_attention(
    arguments: dict[str, Any], out: np.ndarray, lse: np.ndarray | None = None
) -> None:
    """Asserts that (out, lse) answers the call `arguments`: maximum and mean error at most twice
    that of the same maths in float32, plus a few roundings of the output dtype.

    Of few numbers, float32 maths may be near the exact one by chance: a result that is not as near
    is held against DRAWS other ways too in which float32 might have rounded."""
    exact = oracle.attention(**arguments)
    assert lse is None or lse.dtype == np.float32
    results = [("out", out)] if lse is None else [("out", out), ("lse", lse)]

    def hold(plain: list[tuple[np.ndarray, np.ndarray]]) -> None:
        for i, (label, actual) in enumerate(results):
            check(actual, exact[i], [values[i] for values in plain], label)

    plain = [oracle.attention(**arguments, dtype=np.float32)]
    try:
        hold(plain)
    except AssertionError:
        noise = [np.random.default_rng(seed) for seed in range(DRAWS)]
        hold(plain + [oracle.attention(**arguments, dtype=np.float32, noise=x) for x in noise])


def check(
    actual: np.ndarray,
    exact: np.ndarray,
    plain: np.ndarray | list[np.ndarray],
    label: str = "result",
) -> None:
    """Asserts that `actual` is as near to `exact` as `plain`, computed simply, is; of several, as
    the farthest."""
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
    plain = plain if isinstance(plain, list) else [plain]
    plain_errors = [np.abs(values.astype(np.float64)[finite] - exact) for values in plain]
    rounding = float(ml_dtypes.finfo(actual.dtype).eps)
    size = np.abs(exact)
    for name, reduce in (("largest", np.max), ("mean", np.mean)):
        bound = 2 * max(map(reduce, plain_errors))
        bound += ROUNDINGS[name] * rounding * max(reduce(size), 1e-30)
        assert reduce(error) <= bound, (
            f"{label}: {name} error {reduce(error):.3g} above {bound:.3g}"
        )
