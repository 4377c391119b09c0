"""From a checked call to XLA: static facts, folding under vmap, refusal of gradients, operands.

One target serves every configuration of a phase on a CPU: static arguments and scales travel as one
int32 operand that the host can read. They are data and not an index into some table, so a program
from JAX's compilation cache stays right in another process.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_core import debug, dispatch, reference
from torch_core.binding import CACHES, Ops, View, with_views
from torch_core.checks import dtype_name
from torch_core.problem import (
    DESCRIBE,
    SCALES,
    AttentionInputs,
    AttentionProblem,
    DecodeProblem,
    describe_prefill,
    pack_options,
    unpack_options,
)

from . import _device, _ffi, _plain, sharding

PLAIN = "plain"
Views = tuple[View, View] | None  # of the key and of the value cache, where they are not arrays
GIVEN = "given "  # marks a scale as the caller gave it
INTEGERS = ("page_table", "seq_lens", "cu_seqlens_q", "layout")


def require_jax(**arrays: Any) -> None:
    """Every array must be JAX's or NumPy's; anything else is left to the checks."""
    for name, array in arrays.items():
        if hasattr(array, "shape") and not isinstance(array, jax.Array | np.ndarray | np.generic):
            kind = f"{type(array).__module__}.{type(array).__name__}"
            raise TypeError(
                f"{name} must be a jax.Array, got {kind} (jaxattn.to_jax takes torch tensors)"
            )


def inference_only(name: str, function: Callable) -> Callable:
    """`function` with a gradient rule that refuses by name."""
    function = jax.custom_jvp(function)

    @function.defjvp
    def _(primals, tangents):
        raise NotImplementedError(
            f"jaxattn.{name} is for inference and has no gradient: pass its arguments through "
            "jax.lax.stop_gradient, or train with another attention"
        )

    return function


def refuse_vmap(name: str, function: Callable, way_out: str) -> Callable:
    """`function` with a batching rule that refuses by name."""
    function = jax.custom_batching.custom_vmap(function)

    @function.def_vmap
    def _(axis_size, in_batched, *args):
        raise NotImplementedError(f"jaxattn.{name} does not take vmap: {way_out}")

    return function


def attend(
    phase: str, inputs: AttentionInputs, *, backend: str, views: Views = None, **options: Any
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Runs a decode or prefill call; `options` are its static arguments. With `views` the caches
    are where those say in key_cache and value_cache (None where both are in key_cache)."""
    require_jax(**inputs._asdict())
    caches = {name: getattr(inputs, name) for name in CACHES}
    if views is not None:
        dtype = dtype_name(inputs.key_cache)
        specs = [dispatch.Spec(view.shape, dtype) for view in views]
        inputs = inputs._replace(**dict(zip(CACHES, specs, strict=True)))
    problem, inputs = DESCRIBE[phase](inputs, **options)
    inputs = inputs._replace(**caches)
    kernel = dispatch.choose(problem, _device.environment(), backend)
    module = dispatch.load(kernel)
    dispatch.require_plan(inputs.plan, problem, _device.multiprocessors(), kernel)
    if not kernel.plans:
        inputs = inputs._replace(plan=None)
    scales = {name: getattr(inputs, name) for name in SCALES}
    if hasattr(module, "scales"):
        # Half-precision arrays would lose digits in products.
        wide = {n: x if isinstance(x, float) else as_float32(x) for n, x in scales.items()}
        scales = module.scales(problem, inputs._replace(**wide))
    scales = {name: as_float32(value) for name, value in scales.items()}
    if _device.count() > 1:
        # A shard may get another kernel, with other scales.
        scales |= {f"{GIVEN}{name}": as_float32(getattr(inputs, name)) for name in SCALES}
    arrays = inputs._replace(**dict.fromkeys(SCALES))
    # In XLA itself only by default: who names the reference gets it.
    plain = backend == "auto" and kernel.name == "reference" and _plain.suits(problem)
    plain = plain and views is None
    results = _attend(problem, PLAIN if plain else kernel.name, views, arrays, scales)
    return results if problem.return_lse else results[0]


def make_plan(inputs: AttentionInputs, *, backend: str, **options: Any) -> jax.Array:
    """The plan of a prefill's kernel, empty where it takes none."""
    require_jax(seq_lens=inputs.seq_lens, cu_seqlens_q=inputs.cu_seqlens_q)
    problem, inputs = describe_prefill(inputs, **options)
    kernel = dispatch.choose(problem, _device.environment(), backend)
    if not kernel.plans:
        return jnp.zeros(0, jnp.int32)
    return _plan(problem, kernel.name, inputs.seq_lens, inputs.cu_seqlens_q)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _plan(problem: AttentionProblem, backend: str, seq_lens, cu_seqlens_q) -> jax.Array:
    inputs = AttentionInputs(*[None] * 4, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q)
    module = dispatch.load(dispatch.find("prefill", backend))
    return module.make_plan(problem, inputs, _OPS, _device.multiprocessors(), backend)


def as_float32(scale: Any) -> Any:
    """A number as a constant, an array as it is, both float32."""
    return np.float32(scale) if isinstance(scale, float) else jnp.asarray(scale, jnp.float32)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _attend(
    problem: AttentionProblem, backend: str, views: Views, arrays: AttentionInputs, scales: dict
):
    call = functools.partial(_split, problem, backend, views)
    if problem.phase == "decode":
        call = _folding(call, problem, backend, views)
    else:
        call = refuse_vmap("prefill", call, "pack the requests into one call with cu_seqlens_q")
    return inference_only(problem.phase, call)(arrays, scales)


def _folding(call: Callable, problem: AttentionProblem, backend: str, views: Views) -> Callable:
    """`call` with a batching rule that makes one larger batch of all."""
    call = jax.custom_batching.custom_vmap(call)

    @call.def_vmap
    def _(size, batched, arrays, scales):
        arrays_batched, scales_batched = batched
        if any(scales_batched.values()) or arrays_batched.sinks:
            raise NotImplementedError(
                "jaxattn.decode under vmap takes sinks and scales that are the same for every "
                "element: call it once for each instead, for example with jax.lax.map"
            )

        def merged(name: str) -> jax.Array | None:
            array = getattr(arrays, name)
            if array is None:
                return None
            if not getattr(arrays_batched, name):
                array = jnp.broadcast_to(array, (size, *array.shape))
            return array.reshape(size * array.shape[1], *array.shape[2:])

        names = ["query", "page_table", "seq_lens", "draft_mask"]
        num_pages = problem.num_pages
        if arrays_batched.key_cache or arrays_batched.value_cache:
            if views is not None:
                raise NotImplementedError("vmap must leave these caches as they are: map the rest")
            names += ["key_cache", "value_cache"]
        folded = arrays._replace(**{name: merged(name) for name in names})
        if "key_cache" in names:
            first_page = jnp.repeat(jnp.arange(size, dtype=jnp.int32) * num_pages, problem.batch)
            # An id outside its own pool must not become one of a neighbour's.
            own = (folded.page_table >= 0) & (folded.page_table < problem.num_pages)
            page_table = jnp.where(own, folded.page_table + first_page[:, None], -1)
            folded = folded._replace(page_table=page_table)
            num_pages *= size
        larger = dataclasses.replace(
            problem,
            batch=size * problem.batch,
            num_rows=size * problem.num_rows,
            num_pages=num_pages,
        )
        results = _attend(larger, backend, views, folded, scales)
        rows = (size, problem.num_rows)
        return tuple(r.reshape(*rows, *r.shape[1:]) for r in results), (True,) * len(results)

    return call


def _split(
    problem: AttentionProblem, backend: str, views: Views, arrays: AttentionInputs, scales: dict
):
    """The call, split over a mesh as its arrays are."""
    rows = "rows" if problem.phase == "decode" else None
    out = (rows, "qo_heads", None)
    labels = sharding.cache_labels(problem.kv_layout) | dict(
        query=out,
        page_table=(rows, None),
        seq_lens=(rows,),
        sinks=("qo_heads",),
        draft_mask=(rows, None, None),
    )
    if views is not None:  # they are of whole caches
        labels, out = {}, (None, None, None)
    given = {name: x for name, x in arrays._asdict().items() if x is not None}
    return sharding.partitioned(
        problem.phase,
        functools.partial(_shard, problem, backend, views, _device.environment()),
        sharding.Split(labels, (out, out[:2]) if problem.return_lse else (out,)),
        given | {f"own {name}": x for name, x in scales.items()},
    )


def _shard(
    problem: AttentionProblem,
    backend: str,
    views: Views,
    environment: dispatch.Environment,
    arrays: dict[str, Any],
    shard: sharding.Shard | None,
) -> tuple[jax.Array, ...]:
    """One device's part of a call, or the whole."""
    own = {name.removeprefix("own "): x for name, x in arrays.items() if name.startswith("own ")}
    given = {name: own.pop(f"{GIVEN}{name}", None) for name in SCALES}
    arrays = {name: x for name, x in arrays.items() if name in AttentionInputs._fields}
    inputs = AttentionInputs(**dict.fromkeys(CACHES) | arrays, **dict.fromkeys(SCALES))
    if shard is None or views is not None:
        return _call(problem, backend, views, inputs, own)
    split_pages = shard.count("pages") > 1
    options = static_options(problem)
    if split_pages:
        _require_any_order(problem)
        inputs = _of_own_pages(problem, inputs, shard)
        options |= dict(return_lse=True)
    local, described = DESCRIBE[problem.phase](inputs._replace(plan=None, **given), **options)
    if backend != PLAIN or split_pages:
        kernel = dispatch.find(problem.phase, "reference" if backend == PLAIN else backend)
        if dispatch.refusal(kernel, local, environment) is not None:
            kernel = dispatch.choose(local, environment)
            module = dispatch.load(kernel)
            own = module.scales(local, described) if hasattr(module, "scales") else given
            own = {name: as_float32(scale) for name, scale in own.items()}
        backend = kernel.name
    if local != problem:
        inputs = inputs._replace(plan=None)  # it is for the whole
    results = _call(local, backend, None, inputs, own)
    if split_pages:
        results = merge(*shard.gathered(*results))
    return results[: 1 + problem.return_lse]


def _require_any_order(problem: AttentionProblem) -> None:
    """Refuses calls whose rows do not see all of their request: the order of pages counts there."""
    if isinstance(problem, DecodeProblem) and problem.causal and problem.q_len == 1:
        if problem.window_left < 0:
            return
    raise NotImplementedError(
        f"jaxattn.{problem.phase} over caches whose pages are split over devices needs decode with "
        "q_len 1, no draft_mask and no window: split the caches over KV heads for this call"
    )


def _of_own_pages(
    problem: AttentionProblem, inputs: AttentionInputs, shard: sharding.Shard
) -> AttentionInputs:
    """The call on the pages that this device holds."""
    num_pages = inputs.key_cache.shape[0]
    first = shard.first_page(num_pages)
    table = sharding.local_pages(inputs.page_table, first, num_pages)
    table, lengths = sharding.packed_pages(table, inputs.seq_lens, problem.page_size)
    inputs = inputs._replace(page_table=table, seq_lens=lengths)
    if inputs.sinks is not None:  # they count once
        inputs = inputs._replace(sinks=jnp.where(first == 0, inputs.sinks, -jnp.inf))
    return inputs


def _call(
    problem: AttentionProblem, backend: str, views: Views, arrays: AttentionInputs, scales: dict
):
    """The custom call of one kernel."""
    if backend == PLAIN:
        if not _plain.suits(problem):  # grown by vmap
            return _call(problem, "reference", views, arrays, scales)
        return (
            jax.lax.cond(
                _plain.valid(problem, arrays),
                lambda: _plain.decode(problem, arrays, scales),
                lambda: _call(problem, "reference", views, arrays, scales)[0],
            ),
        )
    if debug.ENABLED and backend != "reference":
        arrays = _checked(problem, views, arrays, scales)
    module = dispatch.load(dispatch.find(problem.phase, backend))
    if hasattr(module, "bind"):
        return _call_kernel(module, problem, backend, arrays, scales, views)
    names, operands = _operands(problem, views, arrays, scales)
    results = [jax.ShapeDtypeStruct(problem.out_shape, jnp.dtype(problem.out_dtype))]
    if problem.return_lse:
        results.append(jax.ShapeDtypeStruct(problem.lse_shape, jnp.float32))
    recipe = (backend, names, len(results))
    return tuple(
        _ffi.call_made(problem.phase, recipe, operands, results, platform=_device.platform())
    )


def _checked(
    problem: AttentionProblem, views: Views, arrays: AttentionInputs, scales: dict
) -> AttentionInputs:
    """The arrays, after a check of lengths, offsets and page ids that fails the program. Every
    kernel takes the page table, and so is launched after it."""
    names, operands = _operands(problem, views, arrays, scales)
    table = jax.ShapeDtypeStruct(arrays.page_table.shape, jnp.int32)
    recipe = (problem.phase, names)
    (checked,) = _ffi.call_made("check", recipe, operands, [table], platform=_device.platform())
    return arrays._replace(page_table=checked)


def _operands(
    problem: AttentionProblem, views: Views, arrays: AttentionInputs, scales: dict
) -> tuple:
    """What `_received` takes: the names of the arrays; static arguments and scales as one int32
    operand, and the arrays, the last of which describes the views."""
    names = tuple(name for name, array in arrays._asdict().items() if array is not None)
    integers, soft_cap = pack_options(static_options(problem))
    floats = jnp.stack([np.float32(soft_cap), *(scales.get(name, 1) for name in SCALES)])
    bits = jax.lax.bitcast_convert_type(floats, jnp.int32)
    header = jnp.concatenate([np.array(integers, np.int32), bits])
    operands = [header, *(getattr(arrays, name) for name in names)]
    if views is not None:
        layout = [x for view in views for x in (*view.shape, *view.strides, view.offset)]
        names, operands = (*names, "layout"), [*operands, np.array(layout, np.int32)]
    return names, operands


_OPS = Ops(
    where=jnp.where,
    cast=lambda array, dtype: array.astype(dtype),
    take=jnp.take_along_axis,
    constant=jnp.asarray,
    arange=lambda count: jnp.arange(count, dtype=jnp.int32),
    concatenate=jnp.concatenate,
    cumsum=lambda vector: jnp.cumsum(vector, dtype=vector.dtype),
    argsort=jnp.argsort,
    # XLA fuses the comparison with the sum.
    search=lambda ends, values: (ends[None, :] <= values[:, None]).sum(-1, dtype=jnp.int32),
)


def _call_kernel(
    module: Any,
    problem: Any,
    backend: str,
    arrays: AttentionInputs,
    scales: dict,
    views: Views = None,
) -> tuple[jax.Array, ...]:
    """The launch of a compiled kernel: its scratch is a result, its semaphores start at zero."""
    if not isinstance(problem.batch + problem.num_rows + problem.pages_per_seq, int):
        raise NotImplementedError(
            f"jaxattn.{problem.phase} on a GPU needs shapes of known numbers, got a batch of "
            f"{problem.batch}: jax.export takes one program for each shape"
        )
    results = dict(out=jax.ShapeDtypeStruct(problem.out_shape, jnp.dtype(problem.out_dtype)))
    if problem.return_lse:
        results["lse"] = jax.ShapeDtypeStruct(problem.lse_shape, jnp.float32)
    wanted = tuple(results)
    if not problem.num_rows:
        return tuple(jnp.zeros(result.shape, result.dtype) for result in results.values())
    sm_count = _device.multiprocessors()
    binding = module.bind(problem, sm_count, backend, "score_scale" in scales)
    scales = dict(scales)
    out_scale = scales.pop("out_scale", None)
    operands = module.operands(problem, arrays, scales, _OPS, sm_count, backend)
    if views is not None:
        binding = with_views(binding, views)
    if arrays.value_cache is None:
        del operands["value_cache"]
    if binding.sinks_after:
        results["lse"] = jax.ShapeDtypeStruct(problem.lse_shape, jnp.float32)
    results["scratch"] = jax.ShapeDtypeStruct((binding.scratch,), jnp.uint8)
    aliases = {}
    if binding.semaphores:
        operands["semaphores"] = jnp.zeros(binding.semaphores, jnp.int32)
        results["semaphores_left"] = jax.ShapeDtypeStruct((binding.semaphores,), jnp.int32)
        aliases["semaphores"] = "semaphores_left"
    values = _ffi.call_kernel(binding, operands, results, aliases=aliases)
    if out_scale is not None:
        values["out"] = (values["out"] * out_scale).astype(results["out"].dtype)
    if "lse" in values:
        values["lse"] *= binding.lse_unit
    if binding.sinks_after:
        # A row without keys stays 0, also beside a sink of -inf.
        share = jax.nn.sigmoid(values["lse"] - arrays.sinks)
        share = jnp.where(values["lse"] == -jnp.inf, 0, share)
        values["out"] = (values["out"] * share[..., None]).astype(results["out"].dtype)
        values["lse"] = jnp.logaddexp(values["lse"], arrays.sinks)
    return tuple(values[name] for name in wanted)


def static_options(problem: AttentionProblem) -> dict[str, Any]:
    """The keyword arguments that `problem` was described with."""
    names = ["kv_layout", "window_left", "soft_cap", "return_lse", "batch_invariant"]
    names += ["q_len"] if problem.phase == "decode" else ["max_seqlen_q", "causal"]
    return {name: getattr(problem, name) for name in names}


def _run(phase: str, backend: str, names: tuple[str, ...], *tensors: Any) -> None:
    """The other side of `_call`, on torch tensors."""
    problem, inputs, results = _received(phase, names, tensors)
    module = dispatch.load(dispatch.find(phase, backend))
    out, lse = results if problem.return_lse else (*results, None)
    module.run(problem, inputs, out, lse, backend)


def _check(phase: str, names: tuple[str, ...], *tensors: Any) -> None:
    """The other side of `_checked`."""
    problem, inputs, (checked,) = _received(phase, names, tensors)
    reference.check(problem, inputs)
    checked.copy_(inputs.page_table)


def _received(phase: str, names: tuple[str, ...], tensors: tuple) -> tuple[Any, Any, tuple]:
    """Problem, inputs and results of a call that was checked when it was traced."""
    header, *rest = tensors
    inputs, results = dict(zip(names, rest, strict=False)), rest[len(names) :]
    if (layout := inputs.pop("layout", None)) is not None:
        inputs |= _viewed(layout.tolist(), inputs)
    header = header if isinstance(header, np.ndarray) else header.cpu().numpy()
    described = tuple((x.shape, x.dtype) for x in inputs.values())
    fixed, scales = header[: -len(SCALES)], header[-len(SCALES) :].view(np.float32).tolist()
    problem = _described(phase, tuple(inputs), described, fixed.tobytes())
    inputs |= dict(zip(SCALES, scales, strict=True))
    return problem, AttentionInputs(**inputs), tuple(results)


def _viewed(layout: list[int], inputs: dict[str, Any]) -> dict[str, Any]:
    """Both caches by the views that `_operands` described."""
    caches = {}
    for at, name in zip((0, 9), CACHES, strict=True):
        pages, tokens, heads, dim, *strides, offset = layout[at : at + 9]
        view = View(name, (pages, tokens, heads, dim), tuple(strides), offset)
        caches[name] = view.of(inputs.get(name, inputs["key_cache"]))
    return caches


def _handler(phase: str, backend: str, names: tuple[str, ...], num_results: int) -> _ffi.Handler:
    on_host = {0, *(1 + names.index(name) for name in INTEGERS if name in names)}
    return _ffi.Handler(functools.partial(_run, phase, backend, names), on_host)


_ffi.MAKERS["decode"] = functools.partial(_handler, "decode")
_ffi.MAKERS["prefill"] = functools.partial(_handler, "prefill")
_ffi.MAKERS["check"] = lambda phase, names: _ffi.Handler(
    functools.partial(_check, phase, names), (0,)
)


@functools.lru_cache(maxsize=4096)
def _described(phase: str, names: tuple, arrays: tuple, header: bytes) -> Any:
    *integers, soft_cap = np.frombuffer(header, np.int32)
    specs = {name: dispatch.Spec(*spec) for name, spec in zip(names, arrays, strict=True)}
    options = unpack_options(phase, list(map(int, integers)), float(soft_cap.view(np.float32)))
    return DESCRIBE[phase](AttentionInputs(**specs), **options)[0]


def merge(outs: Sequence[jax.Array], lses: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Joins attentions of the same rows over disjoint keys; see `merge_states`."""
    top = functools.reduce(jnp.maximum, lses)
    shift = jnp.where(top == -jnp.inf, 0, top)
    weights = [jnp.exp(lse - shift) for lse in lses]
    total = functools.reduce(jnp.add, weights)
    merged = jnp.zeros(outs[0].shape, jnp.float32)
    for out, weight in zip(outs, weights, strict=True):
        share = (weight / jnp.where(total == 0, 1, total))[..., None]
        # A part that saw no key weighs 0, whatever its output holds.
        merged += jnp.where(share == 0, 0, out.astype(jnp.float32) * share)
    return merged.astype(outs[0].dtype), jnp.log(total) + shift
