"""How a call splits over a mesh: every device computes on the part of the arrays that it holds.

Under jit, where XLA's partitioner decides, a call is a `custom_partitioning` with a rule for
Shardy; on a mesh of Explicit axes the shardings are in the types and it is a `shard_map`. Inside
`shard_map` it sees shards already. Which axes of the mesh split what is decided in one place, from
the caches first, since they must not move:

- "kv_heads": the axes that the caches' heads lie on; "qo_heads" follows, and takes more axes where
  one KV head a device is left.
- "pages": the axes that the caches' pages lie on. Page ids stay those of the whole cache. A device
  attends to its own pages, and the parts are merged by their log-sum-exp.
- "rows": requests, or rows, over what axes are left.

All other axes are replicated.

Requests may be split too, `append_kv` stays in place, and donation works as before. What would
gather a cache is refused. Where KV heads are fewer than devices, give the mesh an axis for them and
one for their copies: caches `P(None, None, "kv")`, queries `P(None, ("kv", "copy"))`. In
`shard_map`, name every axis of the mesh. Of `paging` and `speculative`, what moves tokens or pages
takes arrays split over pages on Auto axes only. QSA's compressed caches and rings are whole on
every device. Devices of other processes (`jax.distributed`) are devices like any other.

```python
import jax, jax.numpy as jnp, jaxattn
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((jax.device_count(),), ("x",))
heads = NamedSharding(mesh, P(None, None, "x"))  # P("x") splits the pages instead
key_cache = jnp.zeros((64, 16, 8, 64), jnp.bfloat16, device=heads)
value_cache = jnp.zeros_like(key_cache)
query = jnp.ones((4, 8, 64), jnp.bfloat16, device=NamedSharding(mesh, P()))
page_table = jnp.arange(64, dtype=jnp.int32, device=NamedSharding(mesh, P())).reshape(4, 16)
seq_lens = jnp.array([9, 30, 200, 0], jnp.int32, device=NamedSharding(mesh, P()))
out = jax.jit(jaxattn.decode)(query, key_cache, value_cache, page_table, seq_lens)  # over heads
```
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from . import _device

Axes = tuple[str, ...]
Labels = tuple[str | None, ...]  # what each axis of an array is
Name = str | int  # of an operand, place of a result
Shapes = dict[Name, tuple[int, ...]]
CACHES = ("key_cache", "value_cache")
KEPT = (*CACHES, "compressed_cache", "ring")  # are never moved between devices
UNKNOWN = ("?",)  # no whole axes of the mesh


@dataclass(frozen=True)
class Shard:
    """One device's part of a call, while it is traced."""

    axes: dict[str, Axes]  # of the mesh, by label
    sizes: dict[str, int]  # of the mesh's axes

    def count(self, label: str) -> int:
        return math.prod(self.sizes[axis] for axis in self.axes[label])

    def first_page(self, num_pages: int) -> Array:
        """The first page of this device, which holds `num_pages`."""
        return jax.lax.axis_index(self.axes["pages"]) * num_pages

    def gathered(self, *arrays: Array) -> list[list[Array]]:
        """The arrays of all devices that share the pages, in one order everywhere."""
        parts = jax.lax.all_gather(arrays, self.axes["pages"])
        return [list(part) for part in parts]


Compute = Callable[[dict[str, Any], Shard | None], tuple[Array, ...]]


@dataclass(frozen=True)
class Split:
    """What the axes of a call's arrays are; an array that is not named is replicated."""

    arrays: dict[str, Labels]
    results: tuple[Labels, ...]

    def of(self, name: Name, rank: int) -> Labels:
        known = self.results[name] if isinstance(name, int) else self.arrays.get(name)
        return known or (None,) * rank


def cache_labels(kv_layout: str) -> dict[str, Labels]:
    heads = (None, "kv_heads") if kv_layout == "NHD" else ("kv_heads", None)
    return dict.fromkeys(CACHES, ("pages", *heads, None))


def partitioned(
    name: str, compute: Compute, split: Split, arrays: dict[str, Any]
) -> tuple[Array, ...]:
    """`compute(arrays, None)`, or on each device `compute(its parts, shard)`.

    Args:
        name: of the call, for messages.
        compute: a pure function of arrays by name; returns a tuple, one array for each of
            split.results.
        split: what may be split.
        arrays: the whole arrays, traced or not.
    """
    names, values = tuple(arrays), tuple(arrays.values())

    def whole(*values: Any) -> tuple[Array, ...]:
        return compute(dict(zip(names, values, strict=True)), None)

    # Inside shard_map arrays are shards already. Axes that it leaves automatic are not used.
    manual = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
    if manual or _device.count() == 1 or not all(map(np.size, values)):
        return whole(*values)
    call = _Call(name, compute, split, names)
    mesh = _explicit_mesh(values)
    if mesh is not None:
        return call.in_shard_map(mesh, values)
    # A jit of its own keeps constants out of the function, which must have none.
    function = custom_partitioning(jax.jit(whole))
    function.def_partition(call.partition, sharding_rule=call.rule, decode_shardings=False)
    return function(*values)


@dataclass(frozen=True)
class _Call:
    name: str
    compute: Compute
    split: Split
    names: tuple[str, ...]

    def partition(self, mesh: Mesh, given: Any, results: Any) -> tuple:
        """The callback of custom_partitioning."""
        if mesh.empty:  # shardings that name devices only
            mesh = Mesh(np.array(given[0].sharding._device_assignment), ("devices",))
        arrays = dict(zip(self.names, given, strict=True)) | dict(enumerate(results))
        axes = self._resolve(
            dict(mesh.shape),
            {name: x.shape for name, x in arrays.items()},
            {name: _axes_of(x.sharding, x.shape, mesh) for name, x in arrays.items()},
        )
        specs = [self._spec(name, len(x.shape), axes) for name, x in arrays.items()]
        shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
        count = len(self.names)
        return mesh, self._local(axes, dict(mesh.shape)), shardings[count:], shardings[:count]

    def in_shard_map(self, mesh: Any, values: tuple) -> tuple[Array, ...]:
        """The call where types tell the shardings."""
        arrays = dict(zip(self.names, values, strict=True))
        found: dict[Name, tuple[Axes, ...]] = {
            name: tuple(
                () if axes is None else axes if isinstance(axes, tuple) else (axes,)
                for axes in _padded(jax.typeof(x).sharding.spec, np.ndim(x))
            )
            for name, x in arrays.items()
        }
        shapes: Shapes = {name: np.shape(x) for name, x in arrays.items()}
        axes = self._resolve(dict(mesh.shape), shapes, found)
        in_specs = tuple(self._spec(name, np.ndim(x), axes) for name, x in arrays.items())
        out_specs = tuple(
            self._spec(at, len(labels), axes) for at, labels in enumerate(self.split.results)
        )
        placed = [
            jax.sharding.reshard(x, NamedSharding(mesh, spec))
            for x, spec in zip(values, in_specs, strict=True)
        ]
        local = self._local(axes, dict(mesh.shape))
        return jax.shard_map(
            local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )(*placed)

    def rule(self, mesh: Mesh, operands: list, results: list) -> tuple[str, dict[str, int]]:
        """Which axes belong together, for Shardy's propagation; of arrays by their MLIR types."""
        types: dict[Name, Any] = dict(zip(self.names, operands, strict=True))
        types |= dict(enumerate(results))
        shapes: Shapes = {name: tuple(x.shape) for name, x in types.items()}
        extents = _extents(self.split, shapes)
        linked = "kv_heads" in extents and _aligned(extents["kv_heads"], tuple(mesh.shape.values()))
        fresh = itertools.count()
        sizes: dict[str, int] = {}

        def factor(label: str | None, size: int) -> str:
            if label is None:
                return f"u{next(fresh)}"
            whole = "kv_heads" if label == "qo_heads" and linked else label
            if (times := size // extents[whole]) == 1:
                return whole
            inner = "group" if label == "qo_heads" else "repeat"
            if extents[whole] == 1:
                return inner
            sizes[inner] = times
            return f"({whole} {inner})"

        spelled = [
            " ".join(itertools.starmap(factor, zip(self.split.of(name, len(x)), x, strict=True)))
            for name, x in shapes.items()
        ]
        count = len(self.names)
        return f"{', '.join(spelled[:count])} -> {', '.join(spelled[count:])}", sizes

    def _local(self, axes: dict[str, Axes], sizes: dict[str, int]) -> Callable:
        shard = Shard(axes, sizes)
        return lambda *values: self.compute(dict(zip(self.names, values, strict=True)), shard)

    def _spec(self, name: Name, rank: int, axes: dict[str, Axes]) -> PartitionSpec:
        labels = self.split.of(name, rank)
        return PartitionSpec(*(axes.get(label or "") or None for label in labels))

    def _resolve(
        self,
        sizes: dict[str, int],
        shapes: Shapes,
        found: dict[Name, tuple[Axes, ...]],
    ) -> dict[str, Axes]:
        """The axes of the mesh that split each label."""
        extents = _extents(self.split, shapes)
        axes: dict[str, Axes] = dict.fromkeys(("kv_heads", "pages", "qo_heads", "rows"), ())

        def seen(label: str, names: Any) -> Iterator[Axes]:
            for name in names:
                for at, each in enumerate(self.split.of(name, len(shapes[name]))):
                    if each == label:
                        yield found[name][at]

        def fitting(candidates: Iterator[Axes], extent: int) -> Axes:
            """The first candidate's leading free axes that divide the extent."""
            taken = {axis for used in axes.values() for axis in used}
            for candidate in candidates:
                kept: list[str] = []
                for axis in candidate:
                    whole = math.prod(sizes.get(each, 1) for each in (*kept, axis))
                    if axis in taken or axis not in sizes or extent % whole:
                        break
                    kept.append(axis)
                if kept:
                    return tuple(kept)
            return ()

        caches = [name for name in CACHES if name in shapes]
        for label in ("kv_heads", "pages"):
            if label in extents:
                axes[label] = fitting(seen(label, caches), extents[label])
        if "qo_heads" in extents:
            base = axes["kv_heads"]
            kv_heads = extents["kv_heads"] // math.prod(sizes[axis] for axis in base)
            more = (each[len(base) :] for each in seen("qo_heads", shapes) if _leads(base, each))
            group = extents["qo_heads"] // extents["kv_heads"]
            axes["qo_heads"] = base + (fitting(more, group) if kv_heads == 1 else ())
        if "rows" in extents:
            axes["rows"] = fitting(seen("rows", shapes), extents["rows"])
        for name in (name for name in KEPT if name in shapes):
            labels = self.split.of(name, len(shapes[name]))
            kept = tuple(axes.get(label or "", ()) for label in labels)
            if any(one and one != other for one, other in zip(found[name], kept, strict=True)):
                advice = (
                    f"split it as {_spelled(kept)} (jax.device_put, or "
                    "jax.lax.with_sharding_constraint)"
                    if any(kept)
                    else "split its KV heads or its pages where the call can be split over them, "
                    "or make the call in jax.shard_map"
                )
                raise NotImplementedError(
                    f"jaxattn.{self.name} would gather {name} {list(shapes[name])}, split over "
                    f"the mesh's axes {_spelled(found[name])}, on every device: {advice}"
                )
        return axes


def local_pages(page_table: Array, first_page: Array, num_pages: int) -> Array:
    """A page table in terms of a device that holds pages first_page to first_page + num_pages;
    -1 for the pages of others."""
    local = page_table - first_page
    return jnp.where((local >= 0) & (local < num_pages), local, -1)


def packed_pages(page_table: Array, seq_lens: Array, page_size: int) -> tuple[Array, Array]:
    """The mapped pages of each request moved to the front, and how many tokens they hold.

    Attention of a row that sees all of its request does not depend on the order of tokens; a page
    that is not full stays the last one."""
    start = jnp.arange(page_table.shape[1], dtype=jnp.int32) * page_size
    tokens = jnp.clip(seq_lens[:, None] - start, 0, page_size)
    own = (page_table >= 0) & (tokens > 0)
    place = jnp.where(own, jnp.cumsum(own, 1, dtype=jnp.int32) - 1, page_table.shape[1])
    row = jnp.arange(page_table.shape[0], dtype=jnp.int32)[:, None]
    packed = jnp.zeros_like(page_table).at[row, place].set(page_table, mode="drop")
    return packed, jnp.where(own, tokens, 0).sum(1, dtype=jnp.int32)


def _extents(split: Split, shapes: Shapes) -> dict[str, int]:
    """The size of each label: that of requests is the least, where others have rows for each."""
    extents: dict[str, int] = {}
    for name, shape in shapes.items():
        for label, size in zip(split.of(name, len(shape)), shape, strict=True):
            if label is not None:
                extents[label] = min(size, extents.get(label, size))
    return extents


def _aligned(heads: int, sizes: tuple[int, ...]) -> bool:
    """Whether no axis of the mesh, in any order, would split both KV heads and their groups: Shardy
    would cut such an axis in two."""
    for order in itertools.permutations(sizes):
        parts = 1
        for size in order:
            if parts < heads and heads % (parts * size):
                return False
            parts *= size
    return heads > 1


def _spelled(axes: tuple[Axes, ...]) -> str:
    return str(PartitionSpec(*(each or None for each in axes)))


def _leads(base: Axes, axes: Axes) -> bool:
    return axes[: len(base)] == base


def _padded(spec: PartitionSpec, rank: int) -> tuple:
    return (*spec, *(None,) * (rank - len(spec)))


def _axes_of(sharding: Any, shape: tuple[int, ...], mesh: Mesh) -> tuple[Axes, ...]:
    """The axes of the mesh that split each axis of an array, the major one first; UNKNOWN where
    they are not whole axes of the mesh."""
    if sharding is None or sharding.is_fully_replicated:
        return ((),) * len(shape)
    try:
        indices = sharding.devices_indices_map(shape)
    except ValueError:  # does not divide the shape
        return (UNKNOWN,) * len(shape)
    grid = mesh.devices
    starts = np.array([[index.start or 0 for index in indices[device]] for device in grid.flat])
    return tuple(
        _axes_of_axis(starts[:, at].reshape(grid.shape), mesh.axis_names)
        for at in range(len(shape))
    )


def _axes_of_axis(starts: np.ndarray, names: Axes) -> Axes:
    """The same for one axis, from where each device's part of it starts."""
    if not starts.any():
        return ()
    blocks = starts // starts[starts > 0].min()
    strides = {}
    for at, name in enumerate(names):
        unit = [0] * starts.ndim
        unit[at] = min(1, starts.shape[at] - 1)
        if (stride := int(blocks[tuple(unit)])) > 0:
            strides[name] = (stride, at)
    ordered = sorted(strides, key=lambda name: -strides[name][0])
    coordinates = np.indices(starts.shape)
    expected, size = np.zeros_like(blocks), 1
    for name in reversed(ordered):
        at = strides[name][1]
        expected = expected + coordinates[at] * size
        size *= starts.shape[at]
    return tuple(ordered) if np.array_equal(expected, blocks) else UNKNOWN


def _explicit_mesh(values: tuple) -> Any:
    """The mesh of the arrays' types, where they tell shardings."""
    for value in values:
        mesh = jax.typeof(value).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None
