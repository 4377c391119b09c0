"""What is known of the target device while tracing."""

import functools

import jax

from torch_core import dispatch


@functools.cache
def _capability() -> int:
    if jax.default_backend() != "gpu":
        return 0
    major, minor = map(int, jax.devices()[0].compute_capability.split("."))
    return major * 10 + minor


@functools.cache
def multiprocessors() -> int:
    """Multiprocessors of JAX's default GPU."""
    return jax.devices()[0].core_count


def environment() -> dispatch.Environment:
    """The environment of JAX's default device."""
    return dispatch.environment(_capability())
