"""jaxattn.qsa for tests that are written for torch_core.qsa: torch tensors in and out, each call
inside jit, and what JAX returns written to the tensors that torch would have changed in place."""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch

import jaxattn
from tests.torch_core.qsa import cases
from torch_core import qsa

IN_JIT = ("compress", "select", "expand", "attend", "attention", "prepare_query")


def to_jax(value: Any) -> Any:
    """Tensors as copies in JAX, also those of the metadata."""
    if isinstance(value, torch.Tensor):
        return jaxattn.to_jax(value.detach().clone(memory_format=torch.contiguous_format))
    return qsa.Metadata(*map(to_jax, value)) if isinstance(value, qsa.Metadata) else value


def to_torch(value: Any) -> Any:
    """Arrays as tensors, in tuples too."""
    if isinstance(value, jax.Array):
        # XLA's host memory may go with the array.
        return jaxattn.to_torch(value).clone()
    if isinstance(value, qsa.Metadata):
        return qsa.Metadata(*map(to_torch, value))
    return tuple(map(to_torch, value)) if type(value) is tuple else value


def named(call: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument by its name."""
    names = list(inspect.signature(getattr(qsa, call)).parameters)
    return dict(zip(names, args, strict=False)) | kwargs


@functools.cache
def jitted(call: str, static: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(lambda arrays: getattr(jaxattn.qsa, call)(**arrays, **dict(static)))


def run(call: str, arguments: dict[str, Any], via: str) -> Any:
    """One call in jit; numbers are static."""
    arrays = {k: to_jax(v) for k, v in arguments.items() if isinstance(v, torch.Tensor | tuple)}
    static = {k: v for k, v in arguments.items() if k not in arrays}
    static |= {} if call == "prepare_query" else {"via": via}
    return jitted(call, tuple(sorted(static.items())))(arrays)


def front(via: str = "auto") -> Any:
    """What stands in for the module torch_core.qsa."""

    def in_jit(call: str, *args: Any, **kwargs: Any) -> Any:
        arguments = named(call, args, kwargs)
        returned = run(call, arguments, via)
        if call not in ("compress", "attention"):
            return to_torch(returned)
        result, new_ring, new_cache = returned if call == "attention" else (None, *returned)
        for name, new in (("ring", new_ring), ("compressed_cache", new_cache)):
            arguments[name].copy_(jaxattn.to_torch(new))
        if call == "attention":
            return to_torch(result)
        return arguments["ring"], arguments["compressed_cache"]

    def build_metadata(page_table: Any, seq_lens: Any, cu_seqlens_q: Any, **kwargs: Any) -> Any:
        if kwargs.get("num_decodes") is None:
            arrays = (page_table, seq_lens, cu_seqlens_q)
            return to_torch(jaxattn.qsa.build_metadata(*map(to_jax, arrays), **kwargs, via=via))
        splits = []

        def traced(*arrays: jax.Array) -> Any:
            metadata, split = jaxattn.qsa.build_metadata(*arrays, **kwargs, via=via)
            splits.append(split)
            return metadata

        metadata = jax.jit(traced)(*map(to_jax, (page_table, seq_lens, cu_seqlens_q)))
        return to_torch(metadata), splits[0]

    others = {name: getattr(qsa, name) for name in ("Metadata", "Split", "ring_rows")}
    calls = {call: functools.partial(in_jit, call) for call in IN_JIT}
    return SimpleNamespace(
        **calls,
        **others,
        build_metadata=build_metadata,
        split_batch=jaxattn.qsa.split_batch,
        rotary_tables=qsa.rotary_tables,
    )


@contextlib.contextmanager
def through_jax(*modules: Any, via: str = "auto") -> Iterator[None]:
    """Within, these test modules and the servers of `cases` call jaxattn."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (cases, *modules):
            patch.setattr(module, "qsa", front(via))
        yield


def bits(array: Any) -> np.ndarray:
    """Bytes, to compare NaN too."""
    if isinstance(array, torch.Tensor):
        return array.detach().cpu().contiguous().view(torch.uint8).numpy()
    return np.ascontiguousarray(array).view(np.uint8)


def same(one: Any, other: Any) -> bool:
    return np.array_equal(bits(one), bits(other))
