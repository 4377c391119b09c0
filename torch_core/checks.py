"""Argument rules on shapes and dtypes. Imports neither torch nor jax, so that the same rules run on
torch tensors, JAX tracers and shape records."""

import math
import numbers
import operator
from typing import Any

FP8 = ("float8_e4m3fn", "float8_e5m2")
HALF = ("bfloat16", "float16")
QUERY_DTYPES = (*HALF, "float32", "float8_e4m3fn")
CACHE_DTYPES = (*HALF, "float32", *FP8)
KV_LAYOUTS = ("NHD", "HND")
INT32_MAX = 2**31 - 1
# The normal range of float32, which kernels compute in.
FLOAT32_MAX = 2.0**128 - 2.0**104
FLOAT32_TINY = 2.0**-126


def dtype_name(array: Any) -> str:
    """The dtype as torch, NumPy and JAX all spell it ("bfloat16")."""
    return str(array.dtype).removeprefix("torch.")


class Shapes:
    """Checks arrays against named axes; an axis keeps the size it was first seen with."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes

    def __getitem__(self, axis: str) -> int:
        return self.sizes[axis]

    def check(self, name: str, array: Any, dtypes: tuple[str, ...], axes: tuple) -> None:
        """`axes`: axis names and fixed sizes. TypeError on kind or dtype, ValueError on shape."""
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise TypeError(f"{name} must be an array, got {type(array).__name__}")
        if dtype_name(array) not in dtypes or len(array.shape) != len(axes):
            wrong_dtype = dtype_name(array) not in dtypes
            raise (TypeError if wrong_dtype else ValueError)(
                self._message(name, array, dtypes, axes)
            )
        for axis, size in zip(axes, array.shape, strict=True):
            expected = self.sizes.setdefault(axis, size) if isinstance(axis, str) else axis
            if size != expected:
                raise ValueError(self._message(name, array, dtypes, axes))

    def _message(self, name: str, array: Any, dtypes: tuple[str, ...], axes: tuple) -> str:
        known = [self.sizes.get(axis, axis) for axis in axes]
        sizes = f" = [{', '.join(map(str, known))}]" if known != list(axes) else ""
        return (
            f"{name} must be {' or '.join(dtypes)} [{', '.join(map(str, axes))}]{sizes}, "
            f"got {dtype_name(array)} {list(array.shape)}"
        )


def integer(name: str, value: Any, minimum: int, maximum: int = INT32_MAX) -> int:
    """A host integer in [minimum, maximum]; anything with `__index__` but bool."""
    try:
        if isinstance(value, bool):
            raise TypeError
        # A traced array raises its own TypeError subclass here; ours names the argument.
        result = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be a Python int known before the call, got {type(value).__name__}"
        ) from None
    if not minimum <= result <= maximum:
        raise ValueError(f"{name} must be in [{minimum}, {maximum}], got {result}")
    return result


def flag(name: str, value: Any) -> bool:
    """A Python bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """One of the allowed words."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def heads(name: str, num_heads: int, num_kv_heads: int) -> None:
    """Raises ValueError unless KV heads share out the heads of the array `name`."""
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{name} must have a positive multiple of num_kv_heads = {num_kv_heads} heads, got "
            f"{num_heads}"
        )


def scale(name: str, value: Any, *, positive: bool = True) -> Any:
    """A Python number (returned as float) or a 0-d floating array (returned as it is)."""
    number = _number(value)
    if number is not None:
        if not abs(number) <= FLOAT32_MAX or (positive and number < FLOAT32_TINY):
            kind = "a positive finite" if positive else "a finite"
            raise ValueError(f"{name} must be {kind} float32 number, got {value!r}")
        return number
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if not dtype_name(value).startswith(("float", "bfloat")) or dtype_name(value) in FP8:
            raise TypeError(
                f"{name} must be a number or a 0-d float array, got {dtype_name(value)}"
            )
        if len(value.shape) != 0:
            raise ValueError(
                f"{name} must be a number or a 0-d array, got shape {list(value.shape)}"
            )
        return value
    raise TypeError(f"{name} must be a number or a 0-d float array, got {type(value).__name__}")


def _number(value: Any) -> float | None:
    """A real number, or a 0-d NumPy array of one, as float; None for anything else."""
    if isinstance(value, bool):
        return None
    # Before any question about attributes: torch.compile cannot ask a symbolic number.
    if isinstance(value, int | float | numbers.Real):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return _number(value.item())
    return None


def cache_shapes(shapes: Shapes, key_cache: Any, value_cache: Any, kv_layout: str) -> None:
    """Checks both caches and binds num_pages, page_size, num_kv_heads and head_dim."""
    choice("kv_layout", kv_layout, KV_LAYOUTS)
    token_axes = (
        ("page_size", "num_kv_heads") if kv_layout == "NHD" else ("num_kv_heads", "page_size")
    )
    axes = ("num_pages", *token_axes, "head_dim")
    shapes.check("key_cache", key_cache, CACHE_DTYPES, axes)
    shapes.check("value_cache", value_cache, (dtype_name(key_cache),), axes)
    for axis in ("page_size", "num_kv_heads", "head_dim"):
        if shapes[axis] < 1:
            raise ValueError(f"key_cache must have {axis} >= 1, got {list(key_cache.shape)}")
