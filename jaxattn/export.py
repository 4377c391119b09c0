"""jax.export of functions that call jaxattn: run in another process what this one traced.

Programs run in a fresh process, on a GPU of the same kind and with the same versions, or are
refused there by name. QSA on a GPU needs `via="triton"`.

```python
import jax, jax.numpy as jnp, jaxattn

cache = jnp.ones((64, 16, 2, 64), jnp.bfloat16)
table, lens = jnp.arange(64, dtype=jnp.int32).reshape(4, 16), jnp.full(4, 9, jnp.int32)
arguments = (jnp.ones((4, 8, 64), jnp.bfloat16), cache, cache, table, lens)
data = jaxattn.export.export(jax.jit(jaxattn.decode))(*arguments).serialize()  # needs flatbuffers
out = jaxattn.export.deserialize(data).call(*arguments)  # in any process
```
"""

import functools
import re
import struct
from collections.abc import Callable
from typing import Any

import jax

from . import _ffi, _triton
from .qsa import _run


def export(function: Any) -> Callable[..., jax.export.Exported]:
    """Exports a jitted function as jax.export.export does, with jaxattn's calls allowed in it.

    Symbolic shapes (jax.export.symbolic_shape) work on a CPU.

    Args:
        function: of jax.jit; its calls may be any of jaxattn's.

    Returns:
        A function of the arguments (arrays or jax.ShapeDtypeStruct) that returns a
        jax.export.Exported; its `serialize()` gives the bytes for `deserialize`. It holds no
        kernels but Triton's: others are built where it is read, or found built. Bytes need the
        package flatbuffers.

    Raises:
        TypeError: the function is not jitted.
        ValueError: the program has a call that no other process can make: QSA with via="dlpack".
        NotImplementedError: a call is split over a mesh of Auto axes, which JAX does by a callback
            of this process. Use Explicit axes or shard_map.
    """
    if not hasattr(function, "trace"):
        raise TypeError(f"function must be one of jax.jit, got {type(function).__name__}")

    @functools.wraps(function)
    def exported(*args: Any, **kwargs: Any) -> jax.export.Exported:
        function.trace(*args, **kwargs)  # registers the targets
        known = {_triton.TARGET, *(name for name, _ in _ffi._registered)}
        allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in known]
        try:
            made = jax.export.export(function, disabled_checks=allowed)(*args, **kwargs)
            made.mlir_module()
        except NotImplementedError as error:
            if "host_callbacks" not in str(error):
                raise
            raise NotImplementedError(
                "a program whose jaxattn calls are split over a mesh of Auto axes cannot be "
                "exported: use a mesh of Explicit axes, or jax.shard_map"
            ) from error
        for name in _targets(made):
            if name.startswith(f"{_ffi.PREFIX}{_run.DLPACK}"):
                raise ValueError(
                    "a program with QSA calls of via='dlpack' cannot be exported: its kernels are "
                    "launched by this process. Use via='triton'"
                )
        return made

    return exported


def deserialize(data: bytes | bytearray) -> jax.export.Exported:
    """Reads what `export` made, as jax.export.deserialize does, and makes what its calls need here.

    Args:
        data: of `export(...)(...).serialize()`, in a process with the same version of jaxattn; on a
            GPU, of FlashInfer too, and with the same kind of GPU.

    Returns:
        jax.export.Exported, to `call`.

    Raises:
        ValueError: no such bytes, or the program was exported by another version, or for another
            device.
        TypeError: data is no bytes.
        ImportError, RuntimeError: a kernel that the program calls cannot be loaded or built here.
    """
    if not isinstance(data, bytes | bytearray):
        raise TypeError(f"data must be bytes, got {type(data).__name__}")
    try:
        exported = jax.export.deserialize(bytearray(data))
    except (struct.error, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"data must be the bytes of a serialized program: {error}") from error
    _prepare(exported)
    return exported


def _prepare(exported: jax.export.Exported) -> None:
    """Makes the targets of a program in this process; raises as `deserialize`."""
    names = _targets(exported)
    if names and len(exported.platforms) != 1:
        raise ValueError(f"the program must be for one platform, got {exported.platforms}")
    for name in names:
        if name == _triton.TARGET:
            _triton.load()  # registers it
        else:
            _ffi.restore(name, "cpu" if exported.platforms == ("cpu",) else "gpu")


def _targets(exported: jax.export.Exported) -> list[str]:
    """The targets of a program that JAX itself does not know."""
    found = re.findall(r'custom_call @(?:"([^"]*)"|([\w.$]+))\(', exported.mlir_module())
    names = {quoted or plain for quoted, plain in found}
    return sorted(name for name in names if name.startswith((_ffi.PREFIX, _triton.TARGET)))
