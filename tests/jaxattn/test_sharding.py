"""Calls on arrays that lie over a mesh of virtual CPU devices, and over two processes.

Programs with collectives are waited for one by one: XLA's own collectives on a CPU can wait for
each other where many runs are in flight.
"""

import functools
import math
import re
import socket
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey

import jaxattn
from jaxattn import qsa, sharding
from tests import compare, faults, kv_model
from tests.inputs import Case
from tests.jaxattn.qsa.front import same
from tests.jaxattn.qsa.model import Model, decode_offsets

CACHES = ("key_cache", "value_cache")
KINDS = (AxisType.Auto, AxisType.Explicit)
COLLECTIVES = r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
EIGHT = Case("eight", (9, 30, 0, 4, 17, 8, 2, 40), num_qo_heads=16, num_kv_heads=8, sinks=True)
DRAFTS = replace(EIGHT, name="drafts", kv_layout="HND", q_len=2, draft_mask="bool",
                 kv_dtype="float8_e4m3fn", options=dict(k_scale=0.3, v_scale=0.7))  # fmt: skip
PREFILL = replace(EIGHT, name="prefill", q_lens=(3, 3, 0, 2, 1, 1, 1, 5), dtype="bfloat16")
FEW = replace(EIGHT, name="few", num_kv_heads=2)
# XLA's partitioner wraps what a callback raises.
REFUSED = (NotImplementedError, jax.errors.JaxRuntimeError)

both_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def mesh_of(kind, **sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def over_heads(axis, kv_layout="NHD", query_axis=None):
    cache = P(None, None, axis) if kv_layout == "NHD" else P(None, axis)
    query_axis = query_axis or axis
    return dict(query=P(None, query_axis), sinks=P(query_axis)) | dict.fromkeys(CACHES, cache)


def over_batch(axis):
    return dict(query=P(axis), page_table=P(axis), seq_lens=P(axis), draft_mask=P(axis))


def over_pages(axis):
    return dict.fromkeys(CACHES, P(axis))


def placed(arrays, mesh, specs):
    return {
        name: jax.device_put(array, NamedSharding(mesh, specs.get(name, P())))
        for name, array in arrays.items()
    }


def compiled(function, *args, **options):
    """The function for these arguments, and the collectives in its program, none of which moves as
    much as half of one of the caches."""
    program = jax.jit(function, **options).lower(*args).compile()
    text = program.as_text()
    paths = jax.tree_util.tree_flatten_with_path(args)[0]
    caches = [array.size for path, array in paths if path[-1] in map(DictKey, CACHES)]
    moved = re.findall(rf"= \(?\w+\[([\d,]+)\].* (?:{COLLECTIVES})(?:-start)?\(", text)
    largest = max((math.prod(map(int, shape.split(","))) for shape in moved), default=0)
    assert largest < min(caches) / 2, f"{largest} elements of {caches} cross devices"
    return program, set(re.findall(COLLECTIVES, text))


def check(case, mesh, specs, **more):
    """A call against the oracle; returns its collectives and the spec of its output."""
    arguments = case.make()
    arrays, static = faults.jax_arrays(arguments)
    call = functools.partial(getattr(jaxattn, case.phase), **static, return_lse=True, **more)
    given = placed(arrays, mesh, specs)
    program, collectives = compiled(lambda arrays: call(**arrays), given)
    out, lse = program(given)
    compare.check_attention(arguments, np.asarray(out), np.asarray(lse))
    return collectives, out.sharding.spec


def whole_pages(case, parts):
    """The case with a number of pages that can be split."""
    missing = -case.make()["key_cache"].shape[0] % parts
    return replace(case, extra_pages=case.extra_pages + missing)


@both_kinds
@pytest.mark.parametrize("query", ["split", "whole"])
@pytest.mark.parametrize("case", [EIGHT, DRAFTS, PREFILL], ids=str)
def test_over_kv_heads(case, query, kind):
    """Nothing crosses devices, whether the query comes split or not."""
    specs = over_heads("x", case.kv_layout)
    if query == "whole":
        del specs["query"]
    collectives, spec = check(case, mesh_of(kind, x=8), specs)
    assert not collectives and spec[1] == "x"


@both_kinds
@pytest.mark.parametrize("case", [EIGHT, replace(DRAFTS, kv_layout="NHD")], ids=str)
def test_over_batch(case, kind):
    collectives, spec = check(case, mesh_of(kind, x=8), over_batch("x"))
    assert not collectives and spec[0] == "x"


@both_kinds
def test_over_batch_and_heads(kind):
    specs = over_batch("a") | over_heads("b") | dict(query=P("a", "b"))
    collectives, spec = check(EIGHT, mesh_of(kind, a=2, b=4), specs)
    assert not collectives and tuple(spec)[:2] == ("a", "b")


@both_kinds
def test_fewer_kv_heads_than_devices(kind):
    """Two KV heads on eight devices: each on four devices, which share its query heads."""
    mesh = mesh_of(kind, kv=2, copy=4)
    collectives, spec = check(FEW, mesh, over_heads("kv", query_axis=("kv", "copy")))
    assert not collectives and spec[1] == ("kv", "copy")


@both_kinds
def test_one_kv_head(kind):
    case = replace(EIGHT, num_kv_heads=1)
    collectives, spec = check(case, mesh_of(kind, x=8), dict(query=P(None, "x"), sinks=P("x")))
    assert not collectives and spec[1] == "x"


@both_kinds
def test_heads_that_do_not_fit_the_mesh_stay_whole(kind):
    """Two replicated KV heads and split queries on one axis of eight: right, caches not moved."""
    collectives, _ = check(FEW, mesh_of(kind, x=8), dict(query=P(None, "x")))
    assert collectives <= {"all-gather"}


@both_kinds
@pytest.mark.parametrize("specs", [{}, over_batch("x")], ids=["whole", "batch"])
def test_context_parallel_decode(specs, kind):
    """Pages over four devices: only outputs, lse and small arrays cross them."""
    case = whole_pages(replace(EIGHT, sinks=not specs), 4)
    mesh = mesh_of(kind, x=4)
    collectives, _ = check(case, mesh, over_pages("x") | specs)
    assert collectives <= {"all-gather"}


def test_context_parallel_and_heads():
    case = whole_pages(replace(EIGHT, kv_dtype="float8_e4m3fn"), 4)
    specs = over_heads("h") | dict.fromkeys(CACHES, P("p", None, "h"))
    collectives, spec = check(case, mesh_of(AxisType.Auto, p=4, h=2), specs)
    assert collectives == {"all-gather"} and spec[1] == "h"


ORDERED = dict(window=replace(EIGHT, options=dict(window_left=3)), drafts=replace(EIGHT, q_len=2),
               prefill=replace(PREFILL, dtype="float32"))  # fmt: skip


@both_kinds
@pytest.mark.parametrize("name", ORDERED)
def test_context_parallel_refusals(name, kind):
    """Calls in which the order of pages counts say so."""
    case = whole_pages(ORDERED[name], 4)
    message = rf"jaxattn\.{case.phase} over caches whose pages .* needs decode"
    with pytest.raises(REFUSED, match=message):
        check(case, mesh_of(kind, x=4), over_pages("x"))


@both_kinds
def test_a_cache_that_would_be_gathered_is_refused(kind):
    message = (
        r"jaxattn\.decode would gather key_cache \[\d+, 8, 8, 16\], split "
        r"over the mesh's axes P\(None, None, None, 'x'\)"
    )
    with pytest.raises(REFUSED, match=message):
        check(EIGHT, mesh_of(kind, x=8), dict(key_cache=P(None, None, None, "x")))
    mixed = over_heads("x") | dict(key_cache=P(None, None, "x", "y"))
    with pytest.raises(REFUSED, match=r"split it as P\(None, None, 'x', None\)"):
        check(EIGHT, mesh_of(kind, x=4, y=2), mixed)


APPENDS = [
    kv_model.Append("float32", num_kv_heads=8, skips=True),
    kv_model.Append("bfloat16", num_kv_heads=8, dtype="bfloat16", addressing="slots", skips=True),
    kv_model.Append("hnd", num_kv_heads=8, kv_layout="HND", addressing="rows", tokens=2),
    kv_model.Append("e4m3_hnd", num_kv_heads=8, kv_dtype="float8_e4m3fn", kv_layout="HND",
                    options=dict(k_scale=0.3, v_scale=3.0)),
]  # fmt: skip


@both_kinds
@pytest.mark.parametrize("split", ["heads", "pages"])
@pytest.mark.parametrize("case", APPENDS, ids=str)
def test_append_kv_in_place(case, split, kind):
    """Every device writes its part into the donated memory."""
    case = replace(case, batch=2)  # 8 pages
    arguments = case.make()
    arrays, static = faults.jax_arrays(arguments)
    specs = over_heads("x", case.kv_layout) if split == "heads" else over_pages("x")
    rows = P(None, "x") if split == "heads" else P()
    given = placed(arrays, mesh_of(kind, x=8), specs | dict(key=rows, value=rows))
    caches = {name: given.pop(name) for name in CACHES}
    program, collectives = compiled(
        lambda caches, rest: jaxattn.append_kv(**caches, **rest, **static),
        caches, given, donate_argnums=0,
    )  # fmt: skip
    assert not collectives
    shape = list(arguments["key_cache"].shape)
    shape[{"pages": 0, "heads": 2 if case.kv_layout == "NHD" else 1}[split]] //= 8
    assert not re.search(rf"\[{','.join(map(str, shape))}\]\S* copy", program.as_text())
    before = [pointers(caches[name]) for name in CACHES]
    results = program(caches, given)
    assert [pointers(cache) for cache in results] == before
    for cache, expected in zip(results, kv_model.append(arguments), strict=True):
        assert faults.same_bits(np.asarray(cache), expected)


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@both_kinds
def test_steps_of_a_scan(kind):
    """Append and decode in a donated loop, a layer's projections between them."""
    case = kv_model.Append("", tokens=2, batch=2, num_kv_heads=8, head_dim=8, addressing="rows")
    arrays, _ = faults.jax_arrays(case.make())
    mesh = mesh_of(kind, x=8)
    query = jax.random.normal(jax.random.key(0), (2, 8, 8))

    def steps(query, key_cache, value_cache, page_table):
        def body(carry, length):
            query, *caches = carry
            lengths = jnp.full(2, length, jnp.int32)
            caches = jaxattn.append_kv(query, query + 1, *caches, page_table, positions=lengths)
            query = query + jaxattn.decode(query, *caches, page_table, lengths + 1)
            return (query, *caches), None

        carry = (query, key_cache, value_cache)
        return jax.lax.scan(body, carry, jnp.arange(6, dtype=jnp.int32))[0]

    def start():
        return dict(query=query, page_table=arrays["page_table"],
                    **{name: jnp.copy(arrays[name]) for name in CACHES})  # fmt: skip

    given = placed(start(), mesh, over_heads("x"))
    donated = ("key_cache", "value_cache")
    program = jax.jit(steps, donate_argnames=donated).lower(**given).compile()
    assert not re.search(COLLECTIVES, program.as_text())
    for actual, expected in zip(program(**given), jax.jit(steps)(**start()), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("manual", ["all", "heads"])
def test_inside_shard_map(manual):
    """With every axis of the mesh manual, or with the partitioner left to split the batch."""
    arguments = EIGHT.make()
    arrays, static = faults.jax_arrays(arguments)
    mesh = mesh_of(AxisType.Auto, b=2, h=4)
    heads = over_heads("h")
    if manual == "all":
        heads |= over_batch("b") | dict(query=P("b", "h"))
    out_spec = P("b", "h") if manual == "all" else P(None, "h")
    call = jax.shard_map(
        lambda arrays: jaxattn.decode(**arrays, **static, return_lse=True),
        mesh=mesh, in_specs=({name: heads.get(name, P()) for name in arrays},),
        out_specs=out_spec, axis_names={"b", "h"} if manual == "all" else {"h"},
    )  # fmt: skip
    specs = over_batch("b") | over_heads("h") | dict(query=P("b", "h"))
    given = placed(arrays, mesh, specs)
    program, collectives = compiled(call, given)
    out, lse = program(given)
    assert manual == "heads" or not collectives
    compare.check_attention(arguments, np.asarray(out), np.asarray(lse))


def test_shardings_without_a_mesh():
    """Shardings that name devices only, as older code makes them."""
    mesh, specs = mesh_of(AxisType.Auto, x=8), over_heads("x")

    def nameless(name, array):
        named = NamedSharding(mesh, specs.get(name, P()))
        return GSPMDSharding(mesh._flat_devices_tuple, named._to_xla_hlo_sharding(array.ndim))

    arguments = EIGHT.make()
    arrays, static = faults.jax_arrays(arguments)
    given = {name: jax.device_put(x, nameless(name, x)) for name, x in arrays.items()}
    program, collectives = compiled(lambda arrays: jaxattn.decode(**arrays, **static), given)
    assert not collectives
    compare.check_attention(arguments, np.asarray(program(given)))


def test_vmap_over_layers_of_split_caches():
    arguments = EIGHT.make()
    arrays, static = faults.jax_arrays(arguments)
    given = placed(arrays, mesh_of(AxisType.Auto, x=8), over_heads("x"))
    queries = jnp.stack([given["query"], given["query"]])
    call = jax.vmap(lambda query: jaxattn.decode(**given | dict(query=query), **static))
    for out in np.asarray(jax.jit(call)(queries)):
        compare.check_attention(arguments, out)


def test_many_runs_in_flight():
    """Callbacks of eight devices at once, and of several runs, do not wait for each other."""
    arguments = replace(EIGHT, kv_dtype="float8_e4m3fn").make()
    arrays, static = faults.jax_arrays(arguments)
    given = placed(arrays, mesh_of(AxisType.Auto, x=8), over_heads("x"))
    call = jax.jit(lambda arrays: jaxattn.decode(**arrays, **static))
    for out in [call(given) for _ in range(50)]:
        last = np.asarray(out)
    compare.check_attention(arguments, last)


def test_eager_calls():
    """Outside jit too; a place that does not exist is still named."""
    arguments = kv_model.Append("", num_kv_heads=8, batch=2).make()
    arrays, static = faults.jax_arrays(arguments)
    rows = P(None, "x")
    given = placed(arrays, mesh_of(AxisType.Auto, x=8),
                   over_heads("x") | dict(key=rows, value=rows))  # fmt: skip
    for cache, expected in zip(jaxattn.append_kv(**given, **static), kv_model.append(arguments),
                               strict=True):  # fmt: skip
        assert faults.same_bits(np.asarray(cache), expected)
    with pytest.raises(ValueError, match="positions must "):
        jaxattn.append_kv(**given | dict(positions=given["positions"] + 1000), **static)


def test_a_wrong_length_on_one_device_is_named():
    arguments = EIGHT.make()
    arrays, static = faults.jax_arrays(arguments)
    wrong = arrays["seq_lens"].at[6].set(999)
    given = placed(arrays | dict(seq_lens=wrong), mesh_of(AxisType.Auto, x=8), over_batch("x"))
    with pytest.raises(faults.RUNTIME_ERRORS["jax"], match=r"seq_lens must be in .*999"):
        jax.block_until_ready(jax.jit(lambda a: jaxattn.decode(**a, **static))(given))


MODEL = Model(layers=1, requests=8, num_qo_heads=16, num_kv_heads=8, pages_per_seq=3)
QSA_SPECS = dict(
    heads=(over_heads("x"), {"collective-permute"}),  # the model makes keys of its queries
    rows=(dict(x=P("x")), {"all-gather"}),
    pages=(over_pages("x"), {"all-gather"}),
)


@pytest.mark.parametrize(
    "split, kind",
    [("heads", AxisType.Auto), ("rows", AxisType.Auto), ("pages", AxisType.Auto),
     ("heads", AxisType.Explicit)],
)  # fmt: skip
def test_qsa_step(split, kind):
    """append_kv and all calls of a QSA layer in one jitted step, rings and caches donated."""
    specs, allowed = QSA_SPECS[split]
    model = replace(MODEL, requests=5) if split == "pages" else MODEL  # 16 pages
    count = model.requests
    lengths = jnp.array([33, 40, 5, 1, 17, 48, 2, 9][:count], jnp.int32)
    step = functools.partial(model.step, cu_seqlens_q=decode_offsets(model), num_decodes=count,
                             decode_query_len=1)  # fmt: skip
    x = model.rows(count)
    expected = jax.jit(step)(x, model.state(), lengths)
    mesh = mesh_of(kind, x=8)
    state = placed(model.state(), mesh, specs)
    x, lengths = (
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in ((x, specs.get("x", P())), (lengths, P()))
    )
    program, collectives = compiled(step, x, state, lengths, donate_argnums=1)
    kept = {name: pointers(state[name]) for name in (*CACHES, "ring", "compressed_cache")}
    out, state = jax.block_until_ready(program(x, state, lengths))
    if kind == AxisType.Auto:
        assert collectives <= allowed
    for name, before in kept.items():
        assert pointers(state[name]) == before
        assert same(state[name], expected[1][name])
    np.testing.assert_allclose(out, expected[0], rtol=2e-6, atol=2e-6)


def test_qsa_selection_does_not_depend_on_the_split():
    """The groups of the whole sequence, whatever devices hold the pages; attend merges by lse."""
    model = replace(MODEL, requests=5)
    rng = np.random.default_rng(0)
    state, lengths = model.state(), jnp.array([33, 40, 5, 48, 17], jnp.int32)
    sizes = dict(num_pages=16, page_size=16, compress_ratio=4)
    metadata, split = qsa.build_metadata(
        state["page_table"], lengths, decode_offsets(model), num_rows=5, **sizes
    )
    options = dict(compress_ratio=4, num_decodes=split.num_decodes)
    index = jnp.array(rng.normal(size=(5, 2, 16)), jnp.float32)
    query, gate = jnp.array(rng.normal(size=(2, 5, 16, 16)), jnp.float32)

    def run(index, query, gate, state, metadata):
        selected = qsa.select(index, state["compressed_cache"], state["page_table"], metadata,
                              budget=16, **options)  # fmt: skip
        tokens, counts = qsa.expand(selected, metadata, compress_ratio=4)
        result = qsa.attend(
            query, state["key_cache"], state["value_cache"], state["page_table"], metadata,
            tokens, counts, gate=gate, return_lse=True, **options,
        )  # fmt: skip
        return selected, tokens, counts, result

    expected = jax.jit(run)(index, query, gate, state, metadata)
    mesh = mesh_of(AxisType.Auto, p=4, r=2)
    given = placed(state, mesh, over_pages("p"))
    whole = NamedSharding(mesh, P())
    rest = jax.device_put((index, query, gate, metadata), whole)
    selected, tokens, counts, (out, lse) = jax.block_until_ready(
        jax.jit(run)(*rest[:3], given, rest[3])
    )
    assert same(selected, expected[0]) and same(tokens, expected[1]) and same(counts, expected[2])
    np.testing.assert_allclose(out, expected[3][0], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, expected[3][1], rtol=2e-6)


@pytest.mark.parametrize("name, call", [("compressed_cache", "select"), ("ring", "compress")])
def test_qsa_refuses_split_index_keys(name, call):
    """They are small, and whole on every device."""
    model = replace(MODEL, requests=8 if name == "ring" else 5)
    count = model.requests
    step = functools.partial(model.step, cu_seqlens_q=decode_offsets(model), num_decodes=count,
                             decode_query_len=1)  # fmt: skip
    state = placed(model.state(), mesh_of(AxisType.Explicit, x=8), {name: P("x")})
    with pytest.raises(NotImplementedError, match=rf"jaxattn\.qsa\.\w+ would gather {name} "):
        step(model.rows(count), state, jnp.ones(count, jnp.int32))


SPLITS = [(8, (2, 4), True), (2, (8,), False), (4, (2, 4), False), (1, (8,), False),
          (16, (2,), True), (6, (2,), True), (6, (4,), False)]  # fmt: skip


@pytest.mark.parametrize("heads, sizes, expected", SPLITS)
def test_heads_and_queries_are_linked_where_no_axis_is_cut(heads, sizes, expected):
    assert sharding._aligned(heads, sizes) is expected


PROCESS = """
import sys
import jax
import jax.numpy as jnp
import numpy as np

process, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, process)

from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey
import jaxattn
from tests import compare, faults, kv_model
from tests.jaxattn.test_sharding import EIGHT, over_heads, over_pages, whole_pages

mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))


def placed(arrays, specs):
    shardings = {name: NamedSharding(mesh, specs.get(name, P())) for name in arrays}
    return {
        name: jax.make_array_from_callback(x.shape, shardings[name], np.asarray(x).__getitem__)
        for name, x in arrays.items()
    }


def fetched(array):
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(array)
    return np.asarray(whole.addressable_data(0))


for case, specs in ((EIGHT, over_heads("x")), (whole_pages(EIGHT, 4), over_pages("x"))):
    arguments = case.make()
    arrays, static = faults.jax_arrays(arguments)
    given = placed(arrays, specs)
    call = jax.jit(lambda a: jaxattn.decode(**a, **static, return_lse=True))
    compare.check_attention(arguments, *map(fetched, call(given)))
arguments = kv_model.Append("", num_kv_heads=8).make()
arrays, static = faults.jax_arrays(arguments)
rows = P(None, "x")
given = placed(arrays, over_heads("x") | dict(key=rows, value=rows))
for cache, expected in zip(jaxattn.append_kv(**given, **static), kv_model.append(arguments)):
    assert np.array_equal(fetched(cache), expected)
print("done")
"""


def test_two_processes():
    """jax.distributed: four devices in two processes, over KV heads and over pages."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    root = faults.__file__.rsplit("/tests/", 1)[0]
    command = [sys.executable, "-c", PROCESS]
    processes = [
        subprocess.Popen([*command, str(at), str(port)], cwd=root, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for at in range(2)
    ]  # fmt: skip
    try:
        for process in processes:
            output, errors = process.communicate(timeout=120)
            assert output.endswith("done\n"), errors
    finally:
        for process in processes:
            process.kill()
