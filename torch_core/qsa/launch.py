"""Launches the plans' records on torch tensors."""

import functools
import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import device_capability
from .plan import Chain, Launch


@functools.cache
def load(kernel: str) -> Any:
    """The Triton function of "file:function", or of "package.module:function"."""
    file, function = kernel.split(":")
    try:
        module = importlib.import_module(file if "." in file else f"{__package__}.kernels.{file}")
    except ImportError as error:
        raise ImportError("QSA on a GPU needs triton: pip install 'jaxattn[cuda]'") from error
    return getattr(module, function)


def uses_kernels(array: Tensor) -> bool:
    """Whether a call on such arrays runs kernels, not the reference."""
    return array.device.type != "cpu"


def run(
    chain: Chain, arrays: Mapping[str, Tensor | None], out: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Launches the records in order on torch's current stream; returns every array by name. `out`:
    memory for outputs of these names. Arrays that are None are left out."""
    arrays = {name: array for name, array in arrays.items() if array is not None}
    device = next(iter(arrays.values())).device
    in_place = {names_of(old)[1] for launch in chain for old, _ in launch.aliases}
    for name in arrays.keys() - in_place:
        arrays[name] = _ready(arrays[name])
    with on_device(device):
        for launch in chain:
            # Before the outputs: one may have the name of an earlier launch's output that this
            # launch reads.
            pointers = {parameter: arrays[name] for parameter, name in inputs_of(launch)}
            memory = dict(out or {})
            memory |= {new: arrays[names_of(old)[1]] for old, new in launch.aliases}
            for name, shape, dtype in launch.outputs:
                if name not in memory:
                    dtype = getattr(torch, dtype)
                    memory[name] = torch.empty(shape, dtype=dtype, device=device)
                arrays[name] = pointers[f"{name}_ptr"] = memory[name]
            if all(launch.grid):
                load(launch.kernel)[launch.grid](**_arguments(pointers, launch))
    return arrays


def on_device(device: torch.device) -> torch.cuda.device:
    """Makes a GPU the one that Triton launches on."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def starts_right(array: Tensor) -> bool:
    """Contiguous from a multiple of 16 bytes: for another start Triton compiles another kernel."""
    return array.is_contiguous() and array.data_ptr() % 16 == 0


def _ready(array: Tensor) -> Tensor:
    return array if starts_right(array) else array.clone(memory_format=torch.contiguous_format)


def scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """A number as a float32 array of one element on the device."""
    if not isinstance(value, float | int):
        return value.to(device, torch.float32).reshape(1)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.full((1,), value, device=device)
    return _constant(value, device)


@functools.lru_cache(maxsize=256)
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.full((1,), value, device=device)


class Specialization(NamedTuple):
    """What a compiled kernel depends on."""

    kernel: str
    pointers: tuple[tuple[str, str], ...]  # parameter, dtype
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int
    overlaps: bool = False


def specializations(chain: Chain, dtypes: Mapping[str, str]) -> set[Specialization]:
    """Those of a chain on arrays of these dtypes."""
    known, found = dict(dtypes), set()
    for launch in chain:
        pointers = {parameter: known[name] for parameter, name in inputs_of(launch)}
        for name, _, dtype in launch.outputs:
            known[name] = pointers[f"{name}_ptr"] = dtype
        found.add(
            Specialization(
                launch.kernel,
                tuple(pointers.items()),
                launch.constants,
                launch.num_warps,
                launch.num_stages,
                launch.overlaps,
            )
        )
    return found


def compile_ahead(wanted: Specialization) -> bool:
    """Compiles and loads a kernel without a launch; whether it was new to this process."""
    from triton.runtime.jit import MockTensor

    kernel = load(wanted.kernel)
    before = _count(kernel)
    mocks = {name: MockTensor(getattr(torch, dtype)) for name, dtype in wanted.pointers}
    compiled = kernel.warmup(grid=(1,), **_arguments(mocks, wanted))
    compiled.run  # noqa: B018 - loads the binary, which a stream capture could not
    return _count(kernel) > before


def _count(kernel: Any) -> int:
    return sum(len(caches[0]) for caches in kernel.device_caches.values())


def names_of(entry: str) -> tuple[str, str]:
    """Parameter, without `_ptr`, and array of an input."""
    parameter, _, array = entry.partition("=")
    return parameter, array or parameter


def inputs_of(launch: Launch) -> list[tuple[str, str]]:
    """Parameter and array of each input."""
    return [(f"{parameter}_ptr", name) for parameter, name in map(names_of, launch.inputs)]


def _arguments(pointers: Mapping[str, Any], launch: Launch | Specialization) -> dict[str, Any]:
    """Keyword arguments of a kernel, in one order: Triton's cache key is made from their text."""
    options = dict(launch.constants)
    options |= {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    # Programmatic dependent launch. Under the interpreter there is no GPU.
    if "OVERLAPS" in options and (capability := device_capability()):
        options["OVERLAPS"] = capability >= 90
        options["launch_pdl"] = launch.overlaps and options["OVERLAPS"]
    return {**pointers, **options}
