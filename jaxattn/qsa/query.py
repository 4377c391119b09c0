"""Index queries and rotary tables, plain jnp."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int32

import torch_core.qsa
from torch_core.qsa import describe

from .. import _launch
from ..decode import AnyArray


def rotary_tables(
    max_positions: int, rotary_dim: int, theta: float, device: Any = None
) -> tuple[Float32[Array, "max_positions half"], Float32[Array, "max_positions half"]]:
    """Rotary tables of the angles position * theta ** (-2 i / rotary_dim), in radians.

    They have the bits that torch_core computes on a CPU.

    Args:
        max_positions: rows of the tables, 0 or more.
        rotary_dim: dims that are rotated, an even number of 2 or more.
        theta: base of the angles, a positive Python number.
        device: where the tables lie, a jax.Device or sharding; default: JAX's default device.

    Returns:
        (cos, sin), float32 [max_positions, rotary_dim // 2] each.

    Raises:
        ValueError, TypeError: an argument is no such Python number.

    Source: the default rotary embedding of transformers 5.24.
    """
    tables = torch_core.qsa.rotary_tables(max_positions, rotary_dim, theta)
    cos, sin = (jax.device_put(jnp.asarray(table.numpy()), device) for table in tables)
    return cos, sin


def prepare_query(
    projection: Float[AnyArray, "num_rows index_heads index_dim"],
    weight: Float[AnyArray, " index_dim"],
    cos: Float[AnyArray, "max_positions half"],
    sin: Float[AnyArray, "max_positions half"],
    positions: Int32[AnyArray, " num_rows"],
    *,
    eps: float = 1e-6,
) -> Float[Array, "num_rows index_heads index_dim"]:
    """Index queries from their projection: RMSNorm with weight 1 + w, then rotation.

    Plain jnp, so XLA fuses it with its neighbours, and vmap works; a gradient is refused. Equals
    torch_core's to a rounding.

    Args:
        projection: [num_rows, index_heads, index_dim]; bfloat16, float16 or float32.
        weight: [index_dim], w of the norm; bfloat16, float16 or float32.
        cos, sin: [max_positions, rotary_dim // 2], rotary tables, as in `compress`.
        positions: int32 [num_rows], row of the tables for each query; a negative one is padding.
        eps: of the norm.

    Returns:
        [num_rows, index_heads, index_dim] in the projection's dtype.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype, while tracing.
        NotImplementedError: a gradient is asked for.

    Caller's contract: the tables have a row for every position. This is not checked.

    Source: Qwen4ExpTextQSAIndexer of transformers 5.24.
    """
    eps = describe.describe_query(projection, weight, cos, sin, positions, eps=eps)
    arrays = (projection, weight, cos, sin, positions)
    names = ("projection", "weight", "cos", "sin", "positions")
    _launch.require_jax(**dict(zip(names, arrays, strict=True)))
    return _prepared(eps, *map(jnp.asarray, arrays))


@functools.partial(jax.jit, static_argnums=0)
def _prepared(eps: float, *arrays: Array) -> Array:
    def prepare(projection, weight, cos, sin, positions):
        kind = jnp.finfo(projection.dtype)
        wide = projection.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + np.float32(eps))
        normed = wide * scale * (1 + weight.astype(jnp.float32))
        # A cast there and back would be left out by XLA.
        x = jax.lax.reduce_precision(normed, kind.nexp, kind.nmant)
        place = jnp.clip(positions, 0, max(len(cos) - 1, 0))
        cos, sin = (table[place, None].astype(jnp.float32) for table in (cos, sin))
        half = cos.shape[-1]
        first, second, rest = jnp.split(x, (half, 2 * half), -1)
        rotated = (first * cos - second * sin, second * cos + first * sin, rest)
        return jnp.concatenate(rotated, -1).astype(projection.dtype)

    return _launch.inference_only("qsa.prepare_query", prepare)(*arrays)
