"""Writing the paged cache, and joining attentions over parts of it."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import Float, Float32, Int32, Shaped

from torch_core import debug, dispatch, reference
from torch_core.binding import CACHES
from torch_core.kv_cache import has_kernel
from torch_core.problem import AppendInputs, AppendProblem, describe_append, describe_merge

from . import _device, _ffi, _launch, _triton, sharding
from .decode import AnyArray, Scale

SCATTERED_ON_CPU = ("float32", "float16")
SCALES = ("k_scale", "v_scale")
PLACES = ("page_table", "positions", "request_ids", "slots")
# XLA's scatter takes 2.6 to 2.9 us for 64 rows, the kernel 1.9 to 3.0 in bf16 and 3.4 to 4.1 in
# e4m3; from 256 rows on the kernel was faster in both (tests/bench/RESULTS.md).
LAUNCHED_ROWS = 256


def append_kv(
    key: Float[AnyArray, "tokens num_kv_heads head_dim"],
    value: Float[AnyArray, "tokens num_kv_heads head_dim"],
    key_cache: Shaped[AnyArray, "num_pages _ _ head_dim"],
    value_cache: Shaped[AnyArray, "num_pages _ _ head_dim"],
    page_table: Int32[AnyArray, "batch pages_per_seq"] | None = None,
    *,
    positions: Int32[AnyArray, " tokens"] | None = None,
    request_ids: Int32[AnyArray, " tokens"] | None = None,
    slots: Int32[AnyArray, " tokens"] | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    kv_layout: str = "NHD",
) -> tuple[Array, Array]:
    """Writes new tokens and returns the new caches.

    Pure: the caches that were passed keep their values. Donate them to the surrounding jit
    (`donate_argnums`) and XLA writes in place, without a copy. vmap and gradients are refused. Over
    a mesh each device writes to its own KV heads or pages. On a GPU fewer than 256 rows are
    written by XLA's scatter, more by torch_core's kernel where jax-triton works: the same bits.

    Args:
        key, value: [tokens, num_kv_heads, head_dim]; bfloat16, float16 or float32. An fp8 cache
            stores key / k_scale and value / v_scale, saturated; other caches the rows as they are
            where the scale is not given.
        key_cache, value_cache: as in `decode`.
        page_table: int32 [batch, pages_per_seq], with `positions`.
        positions: int32 [tokens], place of each token in its request; a negative one is skipped.
        request_ids: int32 [tokens], request of each row; by default row i is request i.
        slots: int32 [tokens], page * page_size + offset, instead of the three above; a
            negative one is skipped.
        k_scale, v_scale: dequantisation factors that the cache will be read with; default 1.
        kv_layout: "NHD" or "HND".

    Returns:
        (key_cache, value_cache) with the new tokens.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype, while tracing.
        NotImplementedError: vmap or a gradient is asked for.
        jax.errors.JaxRuntimeError: on a CPU, at run time in a jit, a row's place does not exist in
            caches of bfloat16 or fp8; with JAXATTN_DEBUG=1, in caches of any dtype and on a GPU
            too. Not where a mesh splits the pages.

    Caller's contract: no two rows have the same place, and every place that is not negative exists.
    On a CPU a call outside jit checks the second (ValueError), and in a jit caches of bfloat16 and
    fp8 do (see Raises). Elsewhere such a row is dropped: in a jit from caches of float32 and
    float16 and from those whose pages a mesh splits, and on a GPU.
    """
    inputs = AppendInputs(
        key=key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        page_table=page_table,
        positions=positions,
        request_ids=request_ids,
        slots=slots,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    _launch.require_jax(**inputs._asdict())
    problem, inputs = describe_append(inputs, kv_layout=kv_layout)
    places = {name: getattr(inputs, name) for name in PLACES}
    if not _device.environment().capability and all(map(_readable, places.values())):
        host = {name: None if x is None else np.asarray(x) for name, x in places.items()}
        reference.places(problem, inputs._replace(**host))
    scales = [
        None if isinstance(scale, float) and scale == 1.0 else _launch.as_float32(scale)
        for scale in (inputs.k_scale, inputs.v_scale)
    ]
    return append(problem, inputs._replace(k_scale=None, v_scale=None), scales)


def _readable(array: Any) -> bool:
    """Whether this process can look at the values."""
    if isinstance(array, jax.Array) and not isinstance(array, Tracer):
        return array.is_fully_addressable or array.is_fully_replicated
    return not isinstance(array, Tracer)


@functools.partial(jax.jit, static_argnums=0)
def append(problem: AppendProblem, arrays: AppendInputs, scales: list) -> tuple[Array, ...]:
    """The caches with the new rows; without a value cache, key_cache alone."""

    def write(arrays: AppendInputs, scales: list) -> tuple:
        given = arrays._asdict() | dict(zip(SCALES, scales, strict=True))
        rows = (None, "kv_heads", None)
        labels = sharding.cache_labels(problem.kv_layout)
        split = sharding.Split(labels | dict(key=rows, value=rows), tuple(labels.values()))
        if arrays.value_cache is None:  # of heads of both kinds
            split = sharding.Split({}, ((None,) * arrays.key_cache.ndim,))
        return sharding.partitioned(
            "append_kv",
            functools.partial(_shard, problem),
            split,
            {name: x for name, x in given.items() if x is not None},
        )

    call = _launch.refuse_vmap(
        "append_kv", write, "put the caches in one pool, or use jax.lax.scan"
    )
    return _launch.inference_only("append_kv", call)(arrays, scales)


def _shard(problem: AppendProblem, given: dict, shard: sharding.Shard | None) -> tuple:
    """One device's part of a call, or the whole."""
    scales = [given.get(name) for name in SCALES]
    arrays: dict[str, Any] = dict(value=None, value_cache=None)
    arrays |= {name: x for name, x in given.items() if name not in SCALES}
    if shard is not None and shard.count("pages") > 1:
        num_pages = arrays["key_cache"].shape[0]
        page, offset = _places(problem, AppendInputs(**arrays))
        page = sharding.local_pages(page, shard.first_page(num_pages), num_pages)
        arrays = {name: x for name, x in arrays.items() if name not in PLACES}
        arrays["slots"] = jnp.where(page < 0, -1, page * problem.page_size + offset)
    inputs = AppendInputs(**arrays, k_scale=None, v_scale=None)
    write = _writer(inputs)
    if debug.ENABLED and write is not _append_call:
        inputs = _checked(problem, inputs)
    return write(problem, inputs, scales)


def _writer(arrays: AppendInputs) -> Callable[[AppendProblem, AppendInputs, list], tuple]:
    """What measures fastest on JAX's device."""
    cache, capability = arrays.key_cache, _device.environment().capability
    if not capability:
        # XLA converts a whole cache of another dtype to scatter into it, and back.
        return _scatter if cache.dtype in SCATTERED_ON_CPU else _append_call
    # Few rows XLA writes as fast or faster. Those without a value cache are still to be joined,
    # which it does within its scatter.
    rows = arrays.key.shape[0]
    many = isinstance(rows, int) and rows >= LAUNCHED_ROWS  # not of a symbolic number
    own = many and arrays.value_cache is not None and has_kernel(cache, capability)
    return _launched if own and _triton.failure(capability) is None else _scatter


def _launched(problem: AppendProblem, arrays: AppendInputs, scales: list) -> tuple:
    """torch_core's kernel, compiled for these shapes, on the caches' own memory."""
    arrays = arrays._replace(**dict(zip(SCALES, scales, strict=True)))
    record = importlib.import_module("torch_core.backends.append").plan(problem, arrays)
    made = _triton.run(record, arrays._asdict(), _device.environment().capability)
    return tuple(made[f"new_{name}"] for name in CACHES)


def _places(problem: AppendProblem, arrays: AppendInputs) -> tuple[Array, Array]:
    """Page, -1 where the place does not exist, and offset in it of each token."""
    places = arrays.positions if arrays.slots is None else arrays.slots
    page, offset = places // problem.page_size, places % problem.page_size
    exists = places >= 0
    if arrays.slots is None:
        requests = arrays.request_ids
        requests = jnp.arange(places.shape[0]) if requests is None else requests
        batch, pages_per_seq = arrays.page_table.shape
        exists &= (page < pages_per_seq) & (requests >= 0) & (requests < batch)
        # A table without entries cannot be read at all, and then nothing exists.
        page = arrays.page_table[requests, page] if arrays.page_table.size else page
        exists &= page >= 0
    return jnp.where(exists, page, -1), offset


def _scatter(problem: AppendProblem, arrays: AppendInputs, scales: list) -> tuple:
    """XLA's own scatter: in place on donated caches, and fused with the conversion of the rows."""
    page, offset = _places(problem, arrays)
    # What lies past the end is dropped.
    page = jnp.where(page < 0, arrays.key_cache.shape[0], page)
    index = (page, offset) if problem.kv_layout == "NHD" else (page, slice(None), offset)
    pairs = ((arrays.key_cache, arrays.key), (arrays.value_cache, arrays.value))
    return tuple(
        cache.at[index].set(_to_cache(new, cache.dtype, scale), mode="drop", unique_indices=True)
        for (cache, new), scale in zip(pairs, scales, strict=True)
        if cache is not None
    )


def _append_call(problem: AppendProblem, arrays: AppendInputs, scales: list) -> tuple:
    """torch_core's append on the caches' own memory."""
    names = [name for name, array in arrays._asdict().items() if array is not None]
    factors = jnp.stack([np.float32(1) if scale is None else scale for scale in scales])
    caches = {name: getattr(arrays, name) for name in CACHES if name in names}
    recipe = (tuple(names), problem.kv_layout)
    results = [jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches.values()]
    aliases = {names.index(name): result for result, name in enumerate(caches)}
    return tuple(
        _ffi.call_made(
            "append_kv",
            recipe,
            [*(getattr(arrays, name) for name in names), factors],
            results,
            aliases=aliases,
        )
    )


def _run(names: tuple[str, ...], kv_layout: str, *tensors: Any) -> None:
    """The other side of `_append_call`, on torch tensors; the results share the caches' memory."""
    arrays, scales, caches = tensors[: len(names)], tensors[len(names)], tensors[len(names) + 1 :]
    inputs = dict(value=None, value_cache=None) | dict(zip(names, arrays, strict=True))
    inputs |= zip((name for name in CACHES if name in names), caches, strict=True)
    k_scale, v_scale = scales.tolist()
    problem = AppendProblem(caches[0].shape[1 if kv_layout == "NHD" else 2], kv_layout)
    reference.append(problem, AppendInputs(**inputs, k_scale=k_scale, v_scale=v_scale))


def _checked(problem: AppendProblem, arrays: AppendInputs) -> AppendInputs:
    """The arrays, after a check of the places that fails the program."""
    names = tuple(name for name in PLACES if getattr(arrays, name) is not None)
    wanted = "positions" if arrays.slots is None else "slots"
    places = getattr(arrays, wanted)
    (checked,) = _ffi.call_made(
        "check_append",
        (names, wanted),
        [
            np.array([arrays.key_cache.shape[0], problem.page_size], np.int32),
            *(getattr(arrays, name) for name in names),
        ],
        [jax.ShapeDtypeStruct(places.shape, jnp.int32)],
        platform=_device.platform(),
    )
    return arrays._replace(**{wanted: checked})


def _check(names: tuple[str, ...], wanted: str, sizes: Any, *tensors: Any) -> None:
    """The other side of `_checked`."""
    num_pages, page_size = sizes.tolist()
    *arrays, checked = tensors
    places = dict(zip(names, arrays, strict=True))
    cache = dispatch.Spec((num_pages,), "")
    inputs = AppendInputs(None, None, key_cache=cache, value_cache=cache, **places)
    reference.places(AppendProblem(page_size, "NHD"), inputs)
    checked.copy_(places[wanted])


_ffi.MAKERS["append_kv"] = lambda names, kv_layout: _ffi.Handler(
    functools.partial(_run, names, kv_layout)
)
_ffi.MAKERS["check_append"] = lambda names, wanted: _ffi.Handler(
    functools.partial(_check, names, wanted)
)


def _to_cache(rows: Array, dtype: Any, scale: Array | None) -> Array:
    """rows / scale in the cache's dtype; fp8 saturates. No scale is 1."""
    if scale is not None:
        # XLA would turn a division by one number into a product with its rounded inverse.
        divisor = jax.lax.optimization_barrier(jnp.full(rows.shape, scale))
        rows = rows.astype(jnp.float32) / divisor
    if jnp.dtype(dtype).itemsize == 1:
        limit = float(jnp.finfo(dtype).max)
        rows = jnp.clip(rows, -limit, limit)
    return rows.astype(dtype)


def merge_states(
    out_a: Float[AnyArray, "rows num_qo_heads head_dim"],
    lse_a: Float32[AnyArray, "rows num_qo_heads"],
    out_b: Float[AnyArray, "rows num_qo_heads head_dim"],
    lse_b: Float32[AnyArray, "rows num_qo_heads"],
) -> tuple[Array, Array]:
    """Joins two attentions of the same rows over disjoint keys.

    out = (exp(lse_a) out_a + exp(lse_b) out_b) / (exp(lse_a) + exp(lse_b)), computed in float32.
    Give sinks to one of the parts only: its lse then carries them. Plain jnp, so XLA fuses it with
    its neighbours, and vmap works; a gradient is refused like everywhere.

    Args:
        out_a, out_b: [rows, num_qo_heads, head_dim], of one dtype.
        lse_a, lse_b: float32 [rows, num_qo_heads], natural log; -inf is a part without keys, whose
            output may hold anything.

    Returns:
        out in the dtype of out_a, and lse float32.

    Raises:
        ValueError, TypeError: an argument of wrong shape or dtype, while tracing.

    Source: Ye et al., "FlashInfer" (2025), section 2.2, attention states.
    """
    _launch.require_jax(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    describe_merge(out_a, lse_a, out_b, lse_b)
    return _merge(out_a, lse_a, out_b, lse_b)


@jax.jit
def _merge(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    def merge(out_a, lse_a, out_b, lse_b):
        return _launch.merge((out_a, out_b), (lse_a, lse_b))

    return _launch.inference_only("merge_states", merge)(out_a, lse_a, out_b, lse_b)
