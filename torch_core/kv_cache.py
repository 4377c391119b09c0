"""Writing the paged cache, and joining attentions over parts of it."""

import importlib
from typing import Any

import torch
from jaxtyping import Float, Float32, Int32, Shaped
from torch import Tensor

from . import debug, dispatch, launch, reference
from .decode import Scale
from .problem import AppendInputs, describe_append, describe_merge


def append_kv(
    key: Float[Tensor, "tokens num_kv_heads head_dim"],
    value: Float[Tensor, "tokens num_kv_heads head_dim"],
    key_cache: Shaped[Tensor, "num_pages _ _ head_dim"],
    value_cache: Shaped[Tensor, "num_pages _ _ head_dim"],
    page_table: Int32[Tensor, "batch pages_per_seq"] | None = None,
    *,
    positions: Int32[Tensor, " tokens"] | None = None,
    request_ids: Int32[Tensor, " tokens"] | None = None,
    slots: Int32[Tensor, " tokens"] | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    kv_layout: str = "NHD",
) -> tuple[Shaped[Tensor, "num_pages _ _ head_dim"], Shaped[Tensor, "num_pages _ _ head_dim"]]:
    """Writes new tokens into the caches, in place, and returns the caches.

    Args:
        key, value: [tokens, num_kv_heads, head_dim]; bfloat16, float16 or float32. An fp8 cache
            stores key / k_scale and value / v_scale, saturated; other caches the rows as they are
            where the scale is not given.
        key_cache, value_cache: as in `decode`; they must not share memory.
        page_table: int32 [batch, pages_per_seq], with `positions`.
        positions: int32 [tokens], place of each token in its request; a negative one is skipped.
        request_ids: int32 [tokens], request of each row; by default row i is request i.
        slots: int32 [tokens], page * page_size + offset, instead of the three above; a
            negative one is skipped.
        k_scale, v_scale: dequantisation factors that the cache will be read with; default 1.
        kv_layout: "NHD" or "HND".

    Returns:
        (key_cache, value_cache), the tensors that were passed.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype.

    Caller's contract: no two rows have the same place, and every place that is not negative exists.
    The CPU checks the second.
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
    problem, inputs = describe_append(inputs, kv_layout=kv_layout)
    launch.require_same_device(**inputs._asdict())
    launch.require_no_grad("append_kv", *inputs)
    if torch.compiler.is_compiling():
        _append_op(*inputs[:-2], *_split(inputs.k_scale), *_split(inputs.v_scale), kv_layout)
    else:
        _require_own_memory(key_cache, value_cache)
        inputs = _apart(inputs)
        with torch.no_grad():
            debug.check(lambda: reference.places(problem, inputs))
            _append(inputs)(problem, inputs)
    return key_cache, value_cache


def _append(inputs: AppendInputs) -> Any:
    """What writes: on a GPU a kernel."""
    if has_kernel(inputs.key_cache, dispatch.device_capability(inputs.key_cache.device)):
        return importlib.import_module("torch_core.backends.append").run
    return reference.append


def has_kernel(cache: Any, capability: int) -> bool:
    """Whether our kernel writes to such a cache: fp8 rows are made from capability 89 on."""
    return capability >= (89 if cache.dtype.itemsize == 1 else 75)


def _apart(inputs: AppendInputs) -> AppendInputs:
    """The new rows copied where they may lie in a cache that is written."""
    key, value, *caches = (x.untyped_storage().data_ptr() for x in inputs[:4])
    if key in caches or value in caches:
        inputs = inputs._replace(key=inputs.key.clone(), value=inputs.value.clone())
    return inputs


def _require_own_memory(key_cache: Tensor, value_cache: Tensor) -> None:
    """ValueError where a write to one place would show at another. Strided views are not looked
    into: keys and values that take turns in a pool are apart although their ranges overlap."""
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if any(n > 1 and step == 0 for n, step in zip(cache.shape, cache.stride(), strict=True)):
            raise ValueError(f"{name} must not be an expanded tensor, got strides {cache.stride()}")
    first, second = sorted((key_cache, value_cache), key=lambda cache: cache.data_ptr())
    apart = second.data_ptr() - first.data_ptr()
    whole = first.is_contiguous() and second.is_contiguous()
    if first.numel() and (apart == 0 or (whole and apart < first.numel() * first.element_size())):
        raise ValueError("value_cache must not share its memory with key_cache")


def _split(scale: float | Tensor) -> tuple[float, Tensor | None]:
    return (1.0, scale) if isinstance(scale, Tensor) else (scale, None)


@torch.library.custom_op("torch_core::append_kv", mutates_args=("key_cache", "value_cache"))
def _append_op(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor | None,
    positions: Tensor | None,
    request_ids: Tensor | None,
    slots: Tensor | None,
    k_scale: float,
    k_scale_array: Tensor | None,
    v_scale: float,
    v_scale_array: Tensor | None,
    kv_layout: str,
) -> None:
    append_kv(
        key,
        value,
        key_cache,
        value_cache,
        page_table,
        positions=positions,
        request_ids=request_ids,
        slots=slots,
        k_scale=k_scale if k_scale_array is None else k_scale_array,
        v_scale=v_scale if v_scale_array is None else v_scale_array,
        kv_layout=kv_layout,
    )


def merge_states(
    out_a: Float[Tensor, "rows num_qo_heads head_dim"],
    lse_a: Float32[Tensor, "rows num_qo_heads"],
    out_b: Float[Tensor, "rows num_qo_heads head_dim"],
    lse_b: Float32[Tensor, "rows num_qo_heads"],
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Float[Tensor, "rows num_qo_heads head_dim"], Float32[Tensor, "rows num_qo_heads"]]:
    """Joins two attentions of the same rows over disjoint keys.

    out = (exp(lse_a) out_a + exp(lse_b) out_b) / (exp(lse_a) + exp(lse_b)), computed in float32.
    Give sinks to one of the parts only: its lse then carries them.

    Args:
        out_a, out_b: [rows, num_qo_heads, head_dim], of one dtype.
        lse_a, lse_b: float32 [rows, num_qo_heads], natural log; -inf is a part without keys, whose
            output may hold anything.
        out: (out, lse) tensors to write the result to.

    Returns:
        out in the dtype of out_a, and lse float32.

    Raises:
        ValueError, TypeError: an argument of wrong shape or dtype.

    Source: Ye et al., "FlashInfer" (2025), section 2.2, attention states.
    """
    describe_merge(out_a, lse_a, out_b, lse_b)
    launch.require_same_device(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    launch.require_no_grad("merge_states", out_a, lse_a, out_b, lse_b)
    if out is not None:
        if not isinstance(out, tuple | list) or len(out) != 2:
            raise TypeError(f"out must be (out, lse), got {type(out).__name__}")
        launch.require_out("out", out[0], out_a.shape, out_a.dtype, out_a.device)
        launch.require_out("out: lse", out[1], lse_a.shape, lse_a.dtype, lse_a.device)
    with torch.no_grad():
        merged = reference.merge(out_a, lse_a, out_b, lse_b)
        if out is None:
            return merged
        for target, result in zip(out, merged, strict=True):
            target.copy_(result)
    return out[0], out[1]
