"""From a described call to its kernel: choose, allocate, run; and the form torch.compile takes."""

from collections.abc import Sequence
from typing import Any

import torch

from . import binding, debug, dispatch, reference
from .problem import (
    DESCRIBE,
    SCALES,
    AttentionInputs,
    AttentionProblem,
    describe_prefill,
    pack_options,
    unpack_options,
)

_NUM_ARRAYS = AttentionInputs._fields.index("sm_scale")


def attend(
    phase: str, inputs: AttentionInputs, *, out: Any, backend: str, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Runs a decode or prefill call; `options` are its static arguments."""
    problem, inputs = DESCRIBE[phase](inputs, **options)
    require_same_device(**inputs._asdict())
    require_no_grad(phase, *inputs)
    if torch.compiler.is_compiling():
        if out is not None:
            _outputs(problem, inputs.query.device, out)
        result = _compiled(phase, inputs, backend, options)
        if out is None:
            return result
        for target, value in zip(_pair(out), _pair(result), strict=True):
            target.copy_(value)
        return out
    device = inputs.query.device
    kernel = _kernel(problem, device, backend)
    module = dispatch.load(kernel)
    dispatch.require_plan(inputs.plan, problem, dispatch.sm_count(device), kernel)
    result, lse = _outputs(problem, device, out)
    with torch.no_grad():
        debug.check(lambda: reference.check(problem, inputs))
        if hasattr(module, "bind"):
            _require_start("out", result)
            unit = module.stride_unit(problem)
            caches = _kernel_caches(inputs.key_cache, inputs.value_cache, unit)
            inputs = inputs._replace(**dict(zip(binding.CACHES, caches, strict=True)))
            scales = {name: _float32(getattr(inputs, name)) for name in SCALES}
            inputs = inputs._replace(**scales)
            binding.run(module, problem, inputs, result, lse, kernel.name)
        else:
            module.run(problem, inputs, result, lse, kernel.name)
    return result if lse is None else (result, lse)


def make_plan(inputs: AttentionInputs, *, backend: str, **options: Any) -> torch.Tensor:
    """The plan of a prefill's kernel on the device of its lengths, empty where it takes none."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "plan_prefill must be called outside torch.compile: hand its result to the compiled "
            "code"
        )
    problem, inputs = describe_prefill(inputs, **options)
    lengths = {name: getattr(inputs, name) for name in ("seq_lens", "cu_seqlens_q")}
    require_same_device(**lengths)
    device = inputs.seq_lens.device
    kernel = _kernel(problem, device, backend)
    if not kernel.plans:
        return torch.empty(0, dtype=torch.int32, device=device)
    module, ops = dispatch.load(kernel), binding.torch_ops(device)
    return module.make_plan(problem, inputs, ops, dispatch.sm_count(device), kernel.name)


def _kernel(problem: AttentionProblem, device: torch.device, backend: str) -> dispatch.Kernel:
    environment = dispatch.environment(dispatch.device_capability(device))
    return dispatch.choose(problem, environment, backend)


def _kernel_caches(
    key_cache: torch.Tensor, value_cache: torch.Tensor, unit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The caches as kernels read them: whole rows from a multiple of 16 bytes on, with one set of
    strides for both, in 32 bits and multiples of `unit`. ValueError elsewhere."""
    caches = (key_cache, value_cache)
    if not key_cache.numel():
        return caches
    # Strides of axes of size 1 mean nothing, but upstream compares and encodes them.
    first, second = (
        [step if size > 1 else unit for size, step in zip(cache.shape, cache.stride(), strict=True)]
        for cache in caches
    )
    if first != second or first[-1] != 1:
        raise ValueError(
            "value_cache must have the strides of key_cache, with contiguous rows, "
            f"got {value_cache.stride()} beside {key_cache.stride()}"
        )
    if any(step % unit or step >= 2**32 for step in first[:-1]):
        raise ValueError(
            f"key_cache must have strides that are multiples of {unit} below 2**32, "
            f"got {key_cache.stride()}"
        )
    for name, cache in zip(binding.CACHES, caches, strict=True):
        _require_start(name, cache)
    if 1 in key_cache.shape:
        key_cache, value_cache = (cache.as_strided(cache.shape, first) for cache in caches)
    return key_cache, value_cache


def _require_start(name: str, tensor: torch.Tensor) -> None:
    """Kernels load and store 16 bytes at a time."""
    if tensor.data_ptr() % 16:
        raise ValueError(
            f"{name} must start at a multiple of 16 bytes, got {tensor.data_ptr() % 16} past one"
        )


def _float32(scale: Any) -> Any:
    return scale.float() if isinstance(scale, torch.Tensor) else scale


def _outputs(
    problem: AttentionProblem, device: torch.device, out: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensors to write: the caller's, checked, or new ones."""
    wanted: list[tuple] = [("out", problem.out_shape, getattr(torch, problem.out_dtype))]
    if problem.return_lse:
        wanted.append(("out: lse", problem.lse_shape, torch.float32))
    if out is None:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype in wanted]
    else:
        tensors = list(_pair(out))
        if len(tensors) != len(wanted):
            form = "(out, lse)" if problem.return_lse else "one tensor"
            raise ValueError(f"out must be {form}, got {len(tensors)} tensors")
        for tensor, (name, shape, dtype) in zip(tensors, wanted, strict=True):
            require_out(name, tensor, shape, dtype, device)
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    return tensors[0], tensors[1] if problem.return_lse else None


def require_out(
    name: str, tensor: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Checks a tensor that the caller gives for a result."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if (tuple(tensor.shape), tensor.dtype, tensor.device) != (tuple(shape), dtype, device):
        error = TypeError if tensor.dtype != dtype else ValueError
        raise error(
            f"{name} must be {_short(dtype)} {list(shape)} on {device}, "
            f"got {_short(tensor.dtype)} {list(tensor.shape)} on {tensor.device}"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def require_same_device(**tensors: Any) -> None:
    """Every array must be a torch tensor on the first one's device."""
    device = None
    for name, tensor in tensors.items():
        # In this order: torch.compile cannot ask a symbolic number for attributes.
        if tensor is None or isinstance(tensor, int | float) or not hasattr(tensor, "shape"):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        device = device or tensor.device
        # A 0-d tensor may stay on the CPU, as torch's own operators allow.
        if tensor.device != device and tensor.ndim:
            raise ValueError(f"{name} must be on {device} like the others, got {tensor.device}")


def require_no_grad(name: str, *values: Any) -> None:
    """The kernels have no backward pass; a silent zero gradient would be worse than an error."""
    if torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in values
    ):
        raise NotImplementedError(
            f"torch_core.{name} is for inference and has no gradient: call it under "
            "torch.inference_mode() or torch.no_grad()"
        )


def _pair(value: Any) -> tuple:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _compiled(phase: str, inputs: AttentionInputs, backend: str, options: dict[str, Any]) -> Any:
    """A checked call as one opaque operator."""
    arrays, scales = list(inputs[:_NUM_ARRAYS]), inputs[_NUM_ARRAYS:]
    tensors = [scale if isinstance(scale, torch.Tensor) else None for scale in scales]
    numbers = [1.0 if isinstance(scale, torch.Tensor) else scale for scale in scales]
    integers, soft_cap = pack_options(options)
    result = _attention_op(phase, arrays, tensors, numbers, integers, soft_cap, backend)
    return result if options["return_lse"] else result[0]


def _unpacked(phase, arrays, tensors, numbers, integers, soft_cap):
    """Undoes the packing of `_compiled`."""
    pairs = zip(tensors, numbers, strict=True)
    scales = [number if tensor is None else tensor for tensor, number in pairs]
    return AttentionInputs(*arrays, *scales), unpack_options(phase, integers, soft_cap)


@torch.library.custom_op("torch_core::attention", mutates_args=())
def _attention_op(
    phase: str,
    arrays: Sequence[torch.Tensor | None],
    tensors: Sequence[torch.Tensor | None],
    numbers: Sequence[float],
    integers: Sequence[int],
    soft_cap: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, options = _unpacked(phase, arrays, tensors, numbers, integers, soft_cap)
    result = _pair(attend(phase, inputs, out=None, backend=backend, **options))
    lse = result[1] if options["return_lse"] else result[0].new_empty(0, dtype=torch.float32)
    return result[0], lse


@_attention_op.register_fake
def _(phase, arrays, tensors, numbers, integers, soft_cap, backend):
    inputs, options = _unpacked(phase, arrays, tensors, numbers, integers, soft_cap)
    problem, _ = DESCRIBE[phase](inputs, **options)
    query = inputs.query
    return (
        query.new_empty(problem.out_shape, dtype=getattr(torch, problem.out_dtype)),
        query.new_empty(problem.lse_shape if problem.return_lse else (0,), dtype=torch.float32),
    )
