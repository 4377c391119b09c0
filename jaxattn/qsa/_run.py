"""QSA calls inside XLA programs: launch records by either way on a GPU, the reference on a CPU."""

import functools
import hashlib
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import torch_core.qsa
from torch_core import checks, debug
from torch_core.qsa import launch
from torch_core.qsa.launch import inputs_of, names_of
from torch_core.qsa.metadata import host_split
from torch_core.qsa.places import check_places
from torch_core.qsa.plan import Chain, Launch
from torch_core.qsa.problem import METADATA
from torch_core.reference import check_lengths

from .. import _device, _ffi, _launch, _triton, sharding

VIAS = ("auto", "dlpack", "triton")
DLPACK = "qsa_by_dlpack"  # begins the names of targets that no other process can make
FLOATS = ("eps", "sm_scale", "k_scale", "v_scale")
Arrays = dict[str, Any]

logger = logging.getLogger("jaxattn")


def way(via: str) -> str:
    """How a call runs on JAX's device: "reference" on a CPU, "triton" or "dlpack" on a GPU."""
    checks.choice("via", via, VIAS)
    capability = _device.environment().capability
    if not capability:
        return "reference"
    if via == "dlpack" or (failure := _triton.failure(capability)) is None:
        return "dlpack" if via == "dlpack" else "triton"
    if via == "triton":
        raise type(failure)(str(failure)) from failure
    _tell(str(failure))
    return "dlpack"


@functools.cache
def _tell(failure: str) -> None:
    logger.warning("via='auto' is 'dlpack': %s", failure)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """A call that launches kernels."""

    way: str  # "triton" or "dlpack"
    chain: Chain
    wanted: tuple[str, ...]  # of the chain's arrays

    def run(self, arrays: Arrays) -> tuple[jax.Array, ...]:
        """Every launch is a call of its own, or shares one with its neighbours; scratch is among
        the results."""
        arrays = dict(arrays)
        if self.way == "triton":
            capability = _device.environment().capability
            for record in self.chain:
                arrays |= _triton.run(record, arrays, capability)
        else:
            for piece in pieces(self.chain):
                arrays |= _by_torch(piece, arrays)
        return tuple(arrays[name] for name in self.wanted)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A call of torch_core.qsa on a CPU."""

    call: str
    numbers: tuple[tuple[str, int | float], ...]
    results: tuple[tuple[str, tuple[int, ...], str], ...]  # name, shape, dtype
    in_place: tuple[str, ...] = field(default=())  # results that are arguments too

    def run(self, arrays: Arrays) -> tuple[jax.Array, ...]:
        """One target for all numbers: they travel in an operand that the host reads."""
        names, wanted = tuple(arrays), tuple(name for name, _, _ in self.results)
        header = np.array([number for _, number in self.numbers], np.float64).view(np.int32)
        numbers = tuple(name for name, _ in self.numbers)
        values = _ffi.call_made(
            "qsa",
            (self.call, names, numbers, wanted, self.in_place),
            [header, *arrays.values()],
            [_result(shape, dtype) for _, shape, dtype in self.results],
            aliases={1 + names.index(name): wanted.index(name) for name in self.in_place},
        )
        return tuple(values)


_CACHES = sharding.cache_labels("NHD")
_ROWS: dict[str, sharding.Labels] = dict.fromkeys((*METADATA, "counts"), ("rows",))
_HEADS = ("rows", "qo_heads", None)
_LIST = ("rows", None)
# What may be split over a mesh; compressed caches and rings are whole on every device.
SPLITS = dict(
    build_metadata=sharding.Split({}, ((None,),) * len(METADATA)),
    compress=sharding.Split({}, ((None,) * 3, (None,) * 4)),
    select=sharding.Split(_ROWS | dict(index_query=("rows", None, None)), (_LIST, ("rows",))),
    expand=sharding.Split(_ROWS | dict(selected=_LIST), (_LIST, ("rows",))),
    attend=sharding.Split(
        _CACHES | _ROWS | dict(query=_HEADS, gate=_HEADS, token_indices=_LIST),
        (_HEADS, _HEADS[:2]),
    ),
)

Make = Callable[..., Kernels | Reference]  # of arrays and options


def compute(make: Make, call: str, arrays: Arrays, **options: Any) -> tuple[jax.Array, ...]:
    """Runs a checked call; arrays that are None are left out.

    Args:
        make: a function of a module, which says how to run the call on arrays of these shapes.
        options: its static arguments, hashable.
    """
    given = {name: x for name, x in arrays.items() if x is not None}
    return _compute(make, call, tuple(options.items()), given)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _compute(
    make: Make, call: str, options: tuple[tuple[str, Any], ...], arrays: Arrays
) -> tuple[jax.Array, ...]:
    name = f"qsa.{call}"
    split = SPLITS[call]
    if call == "select":
        wanted = len(dict(options)["wanted"])
        split = replace(split, results=split.results[:wanted])
    shard = functools.partial(_shard, make, call, dict(options))
    run = _launch.refuse_vmap(
        name,
        lambda arrays: sharding.partitioned(name, shard, split, arrays),
        "put the rows of all requests into one batch, with cu_seqlens_q",
    )
    return _launch.inference_only(name, run)(arrays)


def _shard(
    make: Make, call: str, options: Arrays, arrays: Arrays, shard: sharding.Shard | None
) -> tuple[jax.Array, ...]:
    """One device's part of a call, or the whole."""
    if shard is None:
        return make(arrays, **options).run(arrays)
    if (parts := shard.count("rows")) > 1 and "num_decodes" in options:
        # Each device has the same share of decoding requests, or all rows are taken for prefill:
        # that chooses kernels, not results.
        count, rest = divmod(options["num_decodes"], parts)
        rows = count * options["decode_query_len"]
        even = not rest and rows == arrays["request_ids"].shape[0]
        options = options | dict(num_decodes=count if even else 0)
    split_pages = call == "attend" and shard.count("pages") > 1
    if split_pages:
        num_pages = arrays["key_cache"].shape[0]
        first = shard.first_page(num_pages)
        table = sharding.local_pages(arrays["page_table"], first, num_pages)
        arrays = arrays | dict(page_table=table)
    results = make(arrays, **options).run(arrays)
    return _launch.merge(*shard.gathered(*results)) if split_pages else results


def _reference(
    call: str,
    names: tuple[str, ...],
    numbers: tuple[str, ...],
    wanted: tuple[str, ...],
    in_place: tuple[str, ...],
    header: np.ndarray,
    *tensors: torch.Tensor,
) -> None:
    """The other side of `Reference.run`; results in place share their argument's memory."""
    results = dict(zip(wanted, tensors[len(names) :], strict=True))
    arguments: Arrays = dict(zip(names, tensors[: len(names)], strict=True))
    arguments |= {name: results[name] for name in in_place}
    for name, number in zip(numbers, header.view(np.float64).tolist(), strict=True):
        arguments[name] = number if name in FLOATS else int(number)
    if METADATA[0] in arguments:
        arguments["metadata"] = torch_core.qsa.Metadata(*(arguments.pop(n) for n in METADATA))
    if call == "attend":
        arguments["return_lse"] = True
    returned = getattr(torch_core.qsa, call)(**arguments)
    if call == "build_metadata":
        returned = returned[0]
    elif not isinstance(returned, tuple):
        returned = (returned,)
    for name, value in zip(wanted, returned, strict=True):
        if name not in in_place:
            results[name].copy_(value)


def nested(arrays: Arrays) -> Arrays:
    """The arrays with those of the metadata in one record, as checks take them."""
    rest = {name: x for name, x in arrays.items() if name not in METADATA}
    return rest | dict(metadata=torch_core.qsa.Metadata(*(arrays[name] for name in METADATA)))


_ffi.MAKERS["qsa"] = lambda call, names, numbers, wanted, in_place: _ffi.Handler(
    functools.partial(_reference, call, names, numbers, wanted, in_place), (0,)
)


def _check_steps(
    page_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor, *,
    page_size: int, **counts: int,
) -> None:  # fmt: skip
    check_lengths(seq_lens.tolist(), page_table.shape[1] * page_size)
    host_split(cu_seqlens_q.tolist(), **counts, max_decode_query_len=1)


def _check_places(
    request_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    cos: torch.Tensor,
    ring_ids: torch.Tensor | None = None,
    rotary_positions: torch.Tensor | None = None,
    **numbers: int,
) -> None:
    metadata = torch_core.qsa.Metadata(request_ids, positions, None, slots)
    check_places(metadata, seq_lens, cos, ring_ids, rotary_positions, **numbers)


CHECKS = {"build_metadata": _check_steps, "compress": _check_places}


def checked(call: str, arrays: Arrays, **numbers: int) -> Arrays:
    """The arrays; under JAXATTN_DEBUG=1 after a check of a call that launches kernels, which reads
    `seq_lens`."""
    if not debug.ENABLED:
        return arrays
    wanted = inspect.signature(CHECKS[call]).parameters
    given = {name: arrays[name] for name in wanted if arrays.get(name) is not None}
    lengths = arrays["seq_lens"]
    (passed,) = _ffi.call_made(
        "qsa_check",
        (call, tuple(given), tuple(numbers)),
        [np.array(list(numbers.values()), np.int32), *given.values(), lengths],
        [_result(lengths.shape, "int32")],
        platform=_device.platform(),
    )
    return arrays | dict(seq_lens=passed)


def _check(call: str, names: tuple[str, ...], numbers: tuple[str, ...], *tensors: Any) -> None:
    """The other side of `checked`."""
    header, *arrays, lengths, passed = tensors
    given = zip(names, arrays, strict=True), zip(numbers, header.tolist(), strict=True)
    CHECKS[call](**dict(given[0]), **dict(given[1]))
    passed.copy_(lengths)


_ffi.MAKERS["qsa_check"] = lambda call, names, numbers: _ffi.Handler(
    functools.partial(_check, call, names, numbers)
)


def _result(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def pieces(chain: Chain) -> Iterator[Chain]:
    """The chain cut where a name of new memory comes again, so that scratch may be reused."""
    piece: list[Launch] = []
    made: set[str] = set()
    for record in chain:
        in_place = {new for _, new in record.aliases}
        new = {name for name, _, _ in record.outputs} - in_place
        if new & made:
            assert not record.overlaps, f"{record.kernel} overlaps a launch of another call"
            yield tuple(piece)
            piece, made = [], set()
        piece.append(record)
        made |= new
    if piece:
        yield tuple(piece)


def _by_torch(piece: Chain, arrays: Arrays) -> Arrays:
    """The arrays that torch_core's launcher makes or changes in one call."""
    operands: Arrays = {}
    results: dict[str, jax.ShapeDtypeStruct] = {}
    aliases: dict[str, str] = {}  # operand -> result
    held: dict[str, str] = {}  # array -> result that is its memory
    for record in piece:
        for _, name in inputs_of(record):
            if name not in held:
                operands[name] = arrays[name]
        sources = {new: names_of(old)[1] for old, new in record.aliases}
        for name, shape, dtype in record.outputs:
            source = sources.get(name)
            if source in held:
                held[name] = held[source]
                continue
            if source is not None:
                aliases[source] = name
            results[name], held[name] = _result(shape, dtype), name
    for wanted in launch.specializations(piece, {n: str(x.dtype) for n, x in operands.items()}):
        load_kernel(wanted)
    names, made = list(operands), list(results)

    def launched(*tensors: torch.Tensor) -> None:
        given = dict(zip(names, tensors[: len(names)], strict=True))
        launch.run(piece, given, dict(zip(made, tensors[len(names) :], strict=True)))

    values = _ffi.call(
        f"jaxattn.{DLPACK}.{_identity(piece, tuple(names))}",
        launched,
        list(operands.values()),
        list(results.values()),
        aliases={names.index(old): made.index(new) for old, new in aliases.items()},
        platform="gpu",
        captured=True,
    )
    memory = dict(zip(made, values, strict=True))
    return {name: memory[result] for name, result in held.items()}


@functools.lru_cache(maxsize=4096)
def _identity(piece: Chain, names: tuple[str, ...]) -> str:
    """What tells a piece from others, the same in every process."""
    kernels = "+".join(record.kernel for record in piece)
    return f"{kernels}.{hashlib.sha256(repr((piece, names)).encode()).hexdigest()[:32]}"


@functools.lru_cache(maxsize=2**14)
def load_kernel(wanted: launch.Specialization) -> None:
    """Compiles a kernel for torch and loads it on this process's GPUs, as no capture could."""
    for gpu in _device.gpus():
        with launch.on_device(torch.device("cuda", gpu)):
            launch.compile_ahead(wanted)
