"""A compiled kernel and the order of its arguments, as data that torch and JAX both launch from."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from . import build, dispatch
from .problem import AttentionInputs, AttentionProblem


@dataclass(frozen=True)
class Operand:
    """A tensor of the call, by name; `swap` exchanges its axes 1 and 2 (strides only)."""

    name: str
    swap: bool = False


@dataclass(frozen=True)
class Size:
    """`times` x the size of one axis of a tensor of the call."""

    name: str
    axis: int
    times: int = 1


@dataclass(frozen=True)
class Part:
    """`length` elements of a vector of the call, from `start` on; no copy."""

    name: str
    start: int
    length: int


@dataclass(frozen=True)
class View:
    """A cache [num_pages, page_size, num_kv_heads, head_dim] in the memory of a tensor of the call,
    as shape, strides and offset in elements; no copy."""

    name: str
    shape: tuple[int, int, int, int]
    strides: tuple[int, ...]
    offset: int = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class Scalar:
    """A scale, by name: upstream takes a number and an optional tensor that overrides it."""

    name: str


@dataclass(frozen=True)
class Binding:
    """A compiled function, which may be a build.PerDevice, and, in its own order, what each
    argument is: an Operand, a Size, a Part, a View, a Scalar or a constant. `name` is that of its
    module, whose `function(*build)` it is. `scratch` bytes need no initial value; `semaphores` are
    32-bit zeros, left zero, and belong to one launch at a time; `lse_unit` is that of the kernel's
    lse in natural logarithms. `sinks_after`: the kernel knows no sinks, and the result is corrected
    by way of its lse. `owned`: the function asks for tensors that it could keep."""

    name: str
    function: Any
    arguments: tuple[Any, ...]
    scratch: int
    semaphores: int = 0
    lse_unit: float = 1.0
    sinks_after: bool = False
    owned: bool = False
    build: tuple = ()


CACHES = ("key_cache", "value_cache")


def with_views(binding: Binding, views: tuple[View, View]) -> Binding:
    """The same launch with both caches read by way of views. For the layout "NHD"."""
    places: dict[str, View] = dict(zip(CACHES, views, strict=True))
    arguments = [places.get(x.name, x) if isinstance(x, Operand) else x for x in binding.arguments]
    return dataclasses.replace(binding, arguments=tuple(arguments))


def run(
    module: Any,
    problem: AttentionProblem,
    inputs: AttentionInputs,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    kernel: str,
) -> None:
    """Runs a backend's bound kernel on torch's current stream; nothing synchronises."""
    if not problem.num_rows:
        return
    device = out.device
    sm_count = dispatch.sm_count(device)
    numbers = module.scales(problem, inputs)
    numbers = {name: _on_device(value, device) for name, value in numbers.items()}
    binding = module.bind(problem, sm_count, kernel, "score_scale" in numbers)
    out_scale = numbers.pop("out_scale", None)
    wanted_lse = lse
    if binding.sinks_after and lse is None:
        lse = torch.empty(problem.lse_shape, dtype=torch.float32, device=device)
    tensors = dict(
        out=out,
        lse=lse,
        semaphores=torch.zeros(binding.semaphores, dtype=torch.int32, device=device),
        scratch=torch.empty(binding.scratch, dtype=torch.uint8, device=device),
    )
    operands = module.operands(problem, inputs, numbers, torch_ops(device), sm_count, kernel)
    for name, operand in operands.items():
        if isinstance(operand, torch.Tensor) and name not in CACHES:
            operand = operand.contiguous()
            # Kernels load 16 bytes at a time.
            operands[name] = operand.clone() if operand.data_ptr() % 16 else operand
    launch(binding, tensors | operands)
    if isinstance(out_scale, torch.Tensor):
        # In float32: a 0-d tensor would be rounded to out's dtype first.
        torch.mul(out.float(), out_scale, out=out)
    elif out_scale is not None:
        out.mul_(out_scale)
    if lse is not None:
        lse.mul_(binding.lse_unit)
    if binding.sinks_after and lse is not None:
        # A row without keys stays 0, also beside a sink of -inf.
        share = torch.where(lse == -torch.inf, 0, torch.sigmoid(lse - inputs.sinks))
        out.mul_(share[..., None])
        if wanted_lse is not None:
            torch.logaddexp(lse, inputs.sinks.expand_as(lse), out=wanted_lse)


def _on_device(scale: float | torch.Tensor, device: torch.device) -> float | torch.Tensor:
    """A scale as a kernel reads it; one in host memory becomes a number."""
    if not isinstance(scale, torch.Tensor) or scale.device == device:
        return scale
    return scale.item()


def launch(binding: Binding, tensors: dict[str, Any]) -> None:
    """Calls the kernel on torch tensors, on torch's current stream."""
    values: list[Any] = []
    for argument in binding.arguments:
        if isinstance(argument, Operand):
            tensor = tensors[argument.name]
            values.append(tensor.transpose(1, 2) if argument.swap else tensor)
        elif isinstance(argument, Size):
            values.append(tensors[argument.name].shape[argument.axis] * argument.times)
        elif isinstance(argument, Part):
            values.append(tensors[argument.name].narrow(0, argument.start, argument.length))
        elif isinstance(argument, View):
            values.append(argument.of(tensors[argument.name]))
        elif isinstance(argument, Scalar):
            value = tensors[argument.name]
            values += [1.0, value] if isinstance(value, torch.Tensor) else [value, None]
        else:
            values.append(argument)
    device = tensors["out"].device
    with torch.cuda.device(device if device.type == "cuda" else -1):
        build.on_device(binding.function, device.index)(*values)


class Ops(NamedTuple):
    """The few array operations that a backend prepares operands with, for one framework."""

    where: Callable[[Any, Any, Any], Any]
    cast: Callable[[Any, str], Any]
    take: Callable[[Any, Any, int], Any]  # along an axis, index of the array's rank
    constant: Callable[[np.ndarray], Any]
    arange: Callable[[int], Any]  # int32
    concatenate: Callable[..., Any]  # of a list, along axis 0 by default
    cumsum: Callable[[Any], Any]  # of a vector, its dtype kept
    argsort: Callable[[Any], Any]  # of a vector, rising, stable
    search: Callable[[Any, Any], Any]  # for each of the second, how many of the first are not above


def torch_ops(device: torch.device) -> Ops:
    """Ops on torch tensors of one device."""
    return Ops(
        where=torch.where,
        cast=lambda array, dtype: array.to(getattr(torch, dtype)),
        take=torch.take_along_dim,
        constant=lambda array: _constant(array.tobytes(), str(array.dtype), array.shape, device),
        arange=lambda count: torch.arange(count, dtype=torch.int32, device=device),
        concatenate=torch.concatenate,
        cumsum=lambda vector: vector.cumsum(0, dtype=vector.dtype),
        argsort=lambda vector: vector.argsort(stable=True),
        search=lambda ends, values: torch.searchsorted(ends, values, right=True),
    )


_constants: dict[tuple, torch.Tensor] = {}


def _constant(
    data: bytes, dtype: str, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """A tensor of fixed content, made once per device: a copy from the host cannot be captured."""
    key = (data, dtype, shape, device)
    if key in _constants:
        return _constants[key]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("call once with these shapes before capturing a CUDA graph")
    array = np.frombuffer(data, dtype).reshape(shape).copy()
    tensor = torch.from_numpy(array).to(device)
    if type(tensor) is torch.Tensor:  # not one of a fake mode
        _constants[key] = tensor
    return tensor
