"""The bridge: torch functions and compiled kernels as XLA custom calls, without copies.

The only importer of jax_tvm_ffi. A target has no attributes (they leak in jax-tvm-ffi 0.1.3, and a
missing one crashes): what changes between calls travels in operands, and the rest is in the
target's name. Operand and result layouts are row-major, the default of `jax.ffi.ffi_call`:
jax_tvm_ffi reports row-major strides whatever the layout is.

The name of a made target is all that it takes to make it: a kind and literals. So a program that
was exported in one process runs in another (see `restore`).
"""

import ast
import atexit
import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax_tvm_ffi
import numpy as np
import torch
import tvm_ffi
import tvm_ffi.cpp

import torch_core.binding
from torch_core import build, dispatch
from torch_core.binding import Binding, Operand, Part, Scalar, Size, View

from . import _device

# The handler table of jax-tvm-ffi holds this many entries for the whole process.
MAX_TARGETS = 1024
PREFIX = "jaxattn."

logger = logging.getLogger("jaxattn")

_lock = threading.Lock()
_registered: set[tuple[str, str]] = set()
# How often Python ran inside an XLA program: tests assert that a compiled kernel never adds to it.
python_calls = 0


class Handler(NamedTuple):
    """What a made target runs; the fields are arguments of `call`."""

    function: Callable[..., None]
    on_host: Collection[int] = ()


# Kind of a made target -> what makes its handler from literals. Programs keep these names: a kind
# that comes to mean something else gets another one.
MAKERS: dict[str, Callable[..., Handler]] = {}


def call_made(
    kind: str,
    recipe: tuple,
    operands: Sequence[jax.Array | np.ndarray],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    aliases: dict[int, int] | None = None,
    platform: str = "cpu",
) -> Sequence[jax.Array]:
    """`call` of `MAKERS[kind](*recipe)`."""
    function, on_host = MAKERS[kind](*recipe)
    name = f"{PREFIX}{kind}{recipe!r}"
    return call(
        name, function, operands, results, aliases=aliases, platform=platform, on_host=on_host
    )


def restore(name: str, platform: str) -> None:
    """Registers a made target by its name alone. ValueError or ImportError where it cannot."""
    if (name, platform) in _registered:
        return
    kind, bracket, recipe = name.removeprefix(PREFIX).partition("(")
    try:
        arguments = ast.literal_eval(bracket + recipe)
        make = _rebuilt if kind == "kernel" else MAKERS[kind]
        inspect.signature(make).bind(*arguments)
    except (KeyError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(
            f"the program calls {name!r}, which this version of jaxattn cannot make"
        ) from error
    made = make(*arguments)
    if isinstance(made, _Kernel):
        _register_kernel(name, made)
    else:
        _register_python(name, *made, platform=platform)


def call(
    name: str,
    function: Callable[..., None],
    operands: Sequence[jax.Array | np.ndarray],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    aliases: dict[int, int] | None = None,
    platform: str = "cpu",
    on_host: Collection[int] = (),
    captured: bool = False,
) -> Sequence[jax.Array]:
    """Runs `function(*operands, *results)` on torch tensors over XLA's own buffers.

    Args:
        name: identity of the target; one name means one function and one number of operands.
        function: writes the results in place. It must not keep a tensor. On a GPU it runs with
            XLA's stream as torch's current one.
        operands: arrays, traced or not.
        results: shapes and dtypes of the results.
        aliases: operand index -> result index that shares its buffer.
        platform: "cpu" or "gpu".
        on_host: indices of operands that a CPU hands over as NumPy arrays, which is faster.
        captured: lets XLA record the function's launches in a command buffer. It then runs when XLA
            records, not in every step, so all it may do is launch kernels that are loaded already:
            no memory from torch, no copy from the host, no synchronisation, no state.
    """
    _register_python(name, function, on_host, platform=platform, captured=captured)
    return custom_call(name, operands, results, aliases)


def _register_python(
    name: str,
    function: Callable[..., None],
    on_host: Collection[int],
    *,
    platform: str,
    captured: bool = False,
) -> None:
    def callback(stream: int, *buffers: tvm_ffi.Tensor) -> None:
        global python_calls
        python_calls += 1
        if platform == "cpu":
            function(
                *(np.from_dlpack(x) if i in on_host else _tensor(x) for i, x in enumerate(buffers))
            )
        else:
            tensors = list(map(_tensor, buffers))
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, tensors[0].device)):
                function(*tensors)

    order = ["ctx.stream", "args", "rets"]
    _register(name, platform, lambda: callback, order, owned=True, captured=captured)
    _finish_at_exit(platform)


@functools.cache
def _finish_at_exit(platform: str) -> None:
    """Lets dispatched programs end before Python does: a callback that came later would abort the
    process. Programs of one thread run in order; what other threads left is waited for as far as
    its results or its callbacks are seen."""

    def finish() -> None:
        with contextlib.suppress(Exception):  # of a program, or of a device that is lost
            for device in jax.local_devices(backend=platform):
                # A loop, as what is cheap runs at once and not in order.
                wait = jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda _, x: x @ x, x))
                jax.block_until_ready(wait(jax.device_put(np.ones((2, 2), np.float32), device)))
            jax.block_until_ready(jax.live_arrays(platform))
        seen = -1
        while seen != python_calls:
            seen = python_calls
            time.sleep(0.02)

    atexit.register(finish)


def _tensor(buffer: tvm_ffi.Tensor) -> torch.Tensor:
    # From the capsule itself: torch's way through the object takes twice as long.
    return torch.from_dlpack(buffer.__dlpack__())


def call_kernel(
    binding: Binding,
    operands: dict[str, Any],
    results: dict[str, jax.ShapeDtypeStruct],
    *,
    aliases: dict[str, str] | None = None,
) -> dict[str, jax.Array]:
    """Launches a compiled kernel on a GPU without Python, capturable in a command buffer.

    Args:
        binding: the kernel; its arguments name operands and results.
        operands, results: by name, as `call` takes them.
        aliases: name of an operand -> name of the result that shares its buffer.
    """
    order = [*operands, *results]
    indices = {
        order.index(operand): list(results).index(result)
        for operand, result in (aliases or {}).items()
    }
    arrays, kinds = list(operands.values()), list(results.values())
    kernel = _Kernel(binding, tuple(order))
    kind = "launch" if adapter() is None else "kernel"
    name = f"{PREFIX}{kind}{kernel.recipe()!r}"
    if kind == "launch":
        _register_python(name, kernel.launch, (), platform="gpu")
    else:
        _register_kernel(name, kernel)
    private = [i for i, operand in enumerate(order) if operand == "semaphores"]
    values = custom_call(name, arrays, kinds, indices, private=private)
    return dict(zip(results, values, strict=True))


class _Kernel(NamedTuple):
    """A bound kernel and the order of a call's operands and results."""

    binding: Binding
    order: tuple[str, ...]

    def recipe(self) -> tuple:
        """What `_rebuilt` takes. The device is part of it: sizes of scratch and plan follow from
        its multiprocessors."""
        binding = self.binding
        arguments = tuple(
            (type(argument).__name__, *dataclasses.astuple(argument))
            if isinstance(argument, tuple(_ARGUMENTS.values()))
            else ("constant", argument)
            for argument in binding.arguments
        )
        return (_here(), binding.name, binding.build, self.order, arguments, binding.owned)

    def launch(self, *tensors: torch.Tensor) -> None:
        torch_core.binding.launch(self.binding, dict(zip(self.order, tensors, strict=True)))


_ARGUMENTS = {kind.__name__: kind for kind in (Operand, Size, Part, View, Scalar)}


def _here() -> tuple[int, int, str]:
    """Capability, multiprocessors and version of FlashInfer, which kernels depend on."""
    capability = _device.environment().capability
    return capability, _device.multiprocessors(), dispatch.version("flashinfer-python")


def _rebuilt(
    device: tuple, name: str, build: tuple, order: tuple, arguments: tuple, owned: bool
) -> _Kernel:
    """Undoes `_Kernel.recipe`, on the same kind of device."""
    if device != _here():
        wanted, here = (
            f"capability {capability}, {count} multiprocessors and FlashInfer {version or 'none'}"
            for capability, count, version in (device, _here())
        )
        raise ValueError(f"the program was exported for {wanted}; this process has {here}")
    module = {kernel.module: kernel for kernel in dispatch.TABLE}[name].module
    function = importlib.import_module(f"torch_core.{module}").function(*build)
    values = tuple(
        _ARGUMENTS[kind](*fields) if kind in _ARGUMENTS else fields[0]
        for kind, *fields in arguments
    )
    # Scratch and semaphores are operands of the program already.
    return _Kernel(Binding(name, function, values, 0, owned=owned, build=build), order)


MAKERS["launch"] = lambda device, name, build, order, arguments, owned: Handler(
    _rebuilt(device, name, build, order, arguments, owned).launch
)


def _register_kernel(name: str, kernel: _Kernel) -> None:
    binding, order = kernel
    make = functools.partial(_adapted, binding, order)
    _register(name, "gpu", make, ["args", "rets"], captured=True, owned=binding.owned)


def _adapted(binding: Binding, order: tuple[str, ...]) -> tvm_ffi.Function:
    """The kernel as a function of the call's operands and results, in XLA's order."""
    spec: list[int] = []
    constants: list[Any] = []
    layouts: list[int] = []

    def constant(value: Any) -> list[int]:
        constants.append(value)
        return [0, len(constants) - 1, 0, 0]

    for argument in binding.arguments:
        if isinstance(argument, Operand):
            spec += [2 if argument.swap else 1, order.index(argument.name), 0, 0]
        elif isinstance(argument, Size):
            spec += [3, order.index(argument.name), argument.axis, argument.times]
        elif isinstance(argument, Part):
            spec += [4, order.index(argument.name), argument.start, argument.length]
        elif isinstance(argument, View):
            spec += [5, order.index(argument.name), argument.offset, len(layouts)]
            layouts += [*argument.shape, *argument.strides]
        elif isinstance(argument, Scalar):
            spec += [*constant(1.0), 1, order.index(argument.name), 0, 0]
        else:
            spec += constant(argument)
    functions = {gpu: build.on_device(binding.function, gpu) for gpu in _device.gpus()}
    return adapter().adapt(list(functions), list(functions.values()), spec, constants, layouts)


@functools.cache
def adapter() -> Any:
    """The adapter; built once per machine, in a few seconds, and kept in TVM-FFI's cache. None
    where it cannot be built: kernels are then launched by Python, uncaptured."""
    source = pathlib.Path(__file__).with_name("adapter.cpp")
    try:
        return tvm_ffi.cpp.load(name="jaxattn_adapter", cpp_files=[str(source)])
    except Exception as error:
        logger.warning(
            "the C++ adapter could not be built, so kernels are launched by Python, which is "
            "slower under jit (it needs a C++ compiler and ninja): %s",
            str(error).strip().splitlines()[-1:],
        )
        return None


def kernel_calls() -> int:
    """How often the adapter launched a kernel, recordings of a command buffer included."""
    return adapter().calls()


def _register(
    name: str,
    platform: str,
    make: Callable[[], Callable[..., None]],
    order: list[str],
    *,
    owned: bool = False,
    captured: bool = False,
) -> None:
    with _lock:
        if (name, platform) in _registered:
            return
        if jax_tvm_ffi.registered_count() >= MAX_TARGETS:
            raise RuntimeError(
                f"jaxattn cannot register {name!r}: the process has used all {MAX_TARGETS} entries "
                "of jax-tvm-ffi's handler table"
            )
        jax_tvm_ffi.register_ffi_target(
            name,
            tvm_ffi.convert(make()),
            order,
            platform=platform,
            pass_owned_tensor=owned,
            allow_cuda_graph=captured,
        )
        _registered.add((name, platform))


def custom_call(
    name: str,
    operands: Sequence[jax.Array | np.ndarray],
    results: Sequence[jax.ShapeDtypeStruct],
    aliases: dict[int, int] | None,
    *,
    private: Collection[int] = (),
    **attributes: bytes,
) -> Sequence[jax.Array]:
    """A call of a target that is registered with XLA.

    The barriers keep it apart from slices and updates of slices around it. XLA:GPU of jax 0.11
    fuses them into one, which forgets the aliases, so that a result holds only what the call wrote;
    fails where a result is what a slice is written into; and is not captured in a command buffer.
    Operands that are made for this call alone are `private`: a barrier would keep XLA from making
    those of all calls at once."""
    call = jax.ffi.ffi_call(name, results, input_output_aliases=aliases)
    operands = [
        operand if index in private else jax.lax.optimization_barrier(operand)
        for index, operand in enumerate(operands)
    ]
    values = jax.lax.optimization_barrier(call(*operands, **attributes))
    # Inside shard_map a result varies over every mesh axis that an operand varies over.
    axes = tuple(set().union(*map(_varying_axes, operands)))
    return [jax.lax.pcast(value, axes, to="varying") for value in values] if axes else values


def _varying_axes(operand: jax.Array | np.ndarray) -> frozenset[str]:
    kind = jax.typeof(operand)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma
