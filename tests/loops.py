"""The loops of JAX, one beside the other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def run(kind: str, body: Callable, carry: tuple[Any, ...], steps: int, count: Any) -> tuple:
    """`steps` times body(index, carry). "scan" knows their number; "while_loop" reads it in
    `count`, which is traced. (JAX makes a scan of a fori_loop to a Python number.)"""
    if kind == "scan":
        indices = jnp.arange(steps, dtype=jnp.int32)
        return jax.lax.scan(lambda carry, index: (body(index, carry), None), carry, indices)[0]
    state = jax.lax.while_loop(
        lambda state: state[0] < count,
        lambda state: (state[0] + 1, *body(state[0], state[1:])),
        (jnp.int32(0), *carry),
    )
    return state[1:]
