"""From a described call to its kernel: choose, allocate, run; and the form torch.compile takes."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from . import dispatch
from .problem import DESCRIBE, AttentionInputs, AttentionProblem, pack_options, unpack_options

_NUM_ARRAYS = AttentionInputs._fields.index("sm_scale")


def attend(
    phase: str, inputs: AttentionInputs, *, out: Any, backend: str, plan: Any = None, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Runs a decode or prefill call; `options` are its static arguments."""
    if torch.compiler.is_compiling():
        result = _compiled(phase, inputs, backend, options)
        if out is None:
            return result
        for target, value in zip(_pair(out), _pair(result), strict=True):
            target.copy_(value)
        return out
    problem, inputs = DESCRIBE[phase](inputs, **options)
    require_same_device(**inputs._asdict())
    require_no_grad(phase, inputs.query, inputs.key_cache, inputs.value_cache)
    kernel = dispatch.choose(
        problem, dispatch.environment(dispatch.device_capability(inputs.query.device)), backend
    )
    if plan is not None:
        raise ValueError(f"plan must be None: kernel {kernel.name!r} needs no plan")
    result, lse = _outputs(problem, inputs.query.device, out)
    with torch.no_grad():
        dispatch.load(kernel).run(problem, inputs, result, lse, None)
    return result if lse is None else (result, lse)


def _outputs(
    problem: AttentionProblem, device: torch.device, out: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensors to write: the caller's, checked, or new ones."""
    wanted: list[tuple] = [("out", problem.out_shape, getattr(torch, problem.out_dtype))]
    if problem.return_lse:
        wanted.append(("lse", problem.lse_shape, torch.float32))
    if out is None:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype in wanted]
    else:
        tensors = list(_pair(out))
        if len(tensors) != len(wanted):
            form = "(out, lse)" if problem.return_lse else "one tensor"
            raise ValueError(f"out must be {form}, got {len(tensors)} tensors")
        for tensor, (name, shape, dtype) in zip(tensors, wanted, strict=True):
            require_out(name, tensor, shape, dtype, device)
    return tensors[0], tensors[1] if problem.return_lse else None


def require_out(
    name: str, tensor: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Checks a tensor that the caller gives for a result."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"out: {name} must be a tensor, got {type(tensor).__name__}")
    if (tuple(tensor.shape), tensor.dtype, tensor.device) != (tuple(shape), dtype, device):
        error = TypeError if tensor.dtype != dtype else ValueError
        raise error(
            f"out: {name} must be {dtype} {list(shape)} on {device}, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )


def require_same_device(**tensors: Any) -> None:
    """Every array must be a torch tensor on the first one's device."""
    device = None
    for name, tensor in tensors.items():
        if not hasattr(tensor, "shape"):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        device = device or tensor.device
        # A 0-d tensor may stay on the CPU, as torch's own operators allow.
        if tensor.device != device and tensor.ndim:
            raise ValueError(f"{name} must be on {device} like the others, got {tensor.device}")


def require_no_grad(name: str, *tensors: torch.Tensor) -> None:
    """The kernels have no backward pass; a silent zero gradient would be worse than an error."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise NotImplementedError(
            f"torch_core.{name} is for inference and has no gradient: call it under "
            "torch.inference_mode() or torch.no_grad()"
        )


def _pair(value: Any) -> tuple:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _compiled(phase: str, inputs: AttentionInputs, backend: str, options: dict[str, Any]) -> Any:
    """The call as one opaque operator, whose checks run when torch.compile first meets it."""
    arrays, scales = list(inputs[:_NUM_ARRAYS]), inputs[_NUM_ARRAYS:]
    tensors = [scale if isinstance(scale, torch.Tensor) else None for scale in scales]
    # NaN stands for "not given", which a list of floats cannot hold.
    numbers = [math.nan if s is None or isinstance(s, torch.Tensor) else float(s) for s in scales]
    integers, soft_cap = pack_options(options)
    result = _attention_op(phase, arrays, tensors, numbers, integers, soft_cap, backend)
    return result if options["return_lse"] else result[0]


def _unpacked(phase, arrays, tensors, numbers, integers, soft_cap):
    """Undoes the packing of `_compiled`."""
    scales = [
        tensor if tensor is not None else None if math.isnan(number) else number
        for tensor, number in zip(tensors, numbers, strict=True)
    ]
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
