"""jaxattn.qsa under jit, scan, while_loop, donation, shard_map, vmap and grad, on a CPU."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxattn import qsa
from tests.jaxattn.qsa.front import same, to_jax
from tests.jaxattn.qsa.model import Model, decode_offsets
from tests.torch_core.qsa import errors
from torch_core import qsa as torch_qsa

MODEL = Model()
DECODES = dict(num_decodes=3, decode_query_len=1)
CALLS = ("build_metadata", "compress", "select", "expand", "attend", "attention")


def arguments_of(call: str) -> dict:
    return {name: to_jax(value) for name, value in errors.valid(call).items()}


def equal(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(same(a, b) for a, b in pairs)


def stepped(model: Model, **options):
    """A jitted decode step, and how often it was traced."""
    traces = []

    def step(x, state, seq_lens):
        traces.append(1)
        return model.step(x, state, seq_lens, decode_offsets(model), **options)

    return step, traces


def test_other_lengths_compile_nothing():
    """Two steps of the same shapes, against calls that are not in jit."""
    step, traces = stepped(MODEL, **DECODES)
    jitted = jax.jit(step)
    for seq_lens in ([1, 40, 7], [64, 2, 96]):
        lengths = jnp.array(seq_lens, jnp.int32)
        x, state = MODEL.rows(3, seq_lens[0]), MODEL.state(seed=seq_lens[0])
        actual = jitted(x, state, lengths)
        assert equal(actual, MODEL.step(x, state, lengths, decode_offsets(MODEL)))
    assert len(traces) == 1


def test_scan_over_layers():
    """One pool of pages for all layers."""
    x, state, lengths = MODEL.rows(3), MODEL.state(), jnp.array([33, 64, 5], jnp.int32)
    step, _ = stepped(MODEL, **DECODES)
    scanned, _ = stepped(MODEL, scan=True, **DECODES)
    assert equal(jax.jit(scanned)(x, state, lengths), jax.jit(step)(x, state, lengths))


@pytest.mark.parametrize("num_draft", [0, 3])
def test_while_loop_over_steps(num_draft):
    """Twenty decode steps with carried caches; drafts are all accepted."""
    model = Model(num_draft=num_draft, layers=1)
    length = 1 + num_draft
    counts = dict(num_decodes=3, decode_query_len=length)
    offsets = decode_offsets(model) * length
    step = functools.partial(model.step, cu_seqlens_q=offsets, **counts)
    x, state, lengths = model.rows(3 * length), model.state(), jnp.array([5, 4, 16], jnp.int32)

    def body(carry):
        index, x, state, lengths = carry
        x, state = step(x, state, lengths)
        return index + 1, x / 2, state, lengths + length

    loop = jax.jit(
        lambda *carry: jax.lax.while_loop(lambda c: c[0] < 20, body, (jnp.int32(0), *carry))
    )
    _, *actual = loop(x, state, lengths)
    jitted = jax.jit(step)
    for _ in range(20):
        x, state = jitted(x, state, lengths)
        x, lengths = x / 2, lengths + length
    assert equal(actual, [x, state, lengths])


def test_mixed_batch():
    """Two decodes with drafts, a chunk and an empty request, in one call and one by one."""
    model = Model(requests=4, num_draft=1, layers=1)
    state, x = model.state(), model.rows(4 + 21)
    lengths = np.array([9, 40, 30, 0], np.int32)
    offsets = np.array([0, 2, 4, 25, 25], np.int32)
    assert qsa.split_batch(offsets, 2)[:2] == (2, 2)
    jitted = jax.jit(
        lambda x, state, lengths: model.step(x, state, lengths, offsets, max_decode_query_len=2)
    )
    out, _ = jitted(x, state, lengths)
    for request, (begin, end) in enumerate(itertools.pairwise(offsets)):
        only = np.clip(offsets, begin, end) - begin
        alone = lengths * (np.arange(4) == request)
        part, _ = model.step(
            x[begin:end], state, alone.astype(np.int32), only.astype(np.int32),
            num_decodes=0, decode_query_len=1,
        )  # fmt: skip
        np.testing.assert_allclose(out[begin:end], part, rtol=1e-5, atol=1e-5)


def test_donated_caches_are_not_copied():
    """Ring and compressed cache are written in place: the same memory, no copy in the program."""
    arguments = arguments_of("attention")
    caches = [arguments.pop("ring"), arguments.pop("compressed_cache")]
    caches = [jnp.tile(cache, (64,) + (1,) * (cache.ndim - 1)) for cache in caches]
    big = {name: jnp.tile(arguments[name], (64, 1, 1, 1)) for name in ("key_cache", "value_cache")}
    arguments |= big
    static = {n: arguments.pop(n) for n in ("budget", "compress_ratio")}

    def call(ring, compressed_cache, arguments):
        return qsa.attention(
            ring=ring, compressed_cache=compressed_cache, **arguments, **static, via="auto"
        )

    compiled = jax.jit(call, donate_argnums=(0, 1)).lower(*caches, arguments).compile()
    shapes = [",".join(map(str, cache.shape)) for cache in caches]
    for line in compiled.as_text().splitlines():
        made = line.split(" = ")[-1]
        if any(f"[{shape}]" in made.split("(")[0] for shape in shapes):
            assert not re.search(r"\b(copy|convert)\(", line), line
    before = [cache.unsafe_buffer_pointer() for cache in caches]
    _, *results = compiled(*caches, arguments)
    assert [result.unsafe_buffer_pointer() for result in results] == before
    assert all(cache.is_deleted() for cache in caches)


def test_caches_that_are_not_donated_keep_their_values():
    arguments = arguments_of("compress")
    before = {name: np.array(arguments[name]) for name in ("ring", "compressed_cache")}
    ring, _ = jax.jit(functools.partial(qsa.compress, compress_ratio=4))(
        **{name: x for name, x in arguments.items() if name != "compress_ratio"}
    )
    assert np.asarray(ring).any()
    for name, array in before.items():
        assert np.array_equal(arguments[name], array)


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, jnp.float32, "traced"])
def test_scales_of_every_kind(kind):
    """Numbers, NumPy's, arrays and traced arrays."""
    arguments = arguments_of("attend")
    expected = torch_qsa.attend(**errors.valid("attend"), sm_scale=0.5, v_scale=0.25)
    if kind == "traced":
        out = jax.jit(lambda one, two: qsa.attend(**arguments, sm_scale=one, v_scale=two))(
            jnp.float32(0.5), jnp.float32(0.25)
        )
    else:
        out = qsa.attend(**arguments, sm_scale=kind(0.5), v_scale=kind(0.25))
    assert same(out, expected)


def test_x64():
    """With 64-bit types on: the same bits, and 64-bit arrays are refused."""
    expected = {call: getattr(qsa, call)(**arguments_of(call)) for call in CALLS}
    with jax.enable_x64(True):
        for call in CALLS:
            arguments = arguments_of(call)
            assert equal(getattr(qsa, call)(**arguments), expected[call])
        arguments = arguments_of("select")
        wide = arguments["page_table"].astype(jnp.int64)
        with pytest.raises(TypeError, match=r"^page_table must be int32 .*, got int64 \[2, 2\]"):
            qsa.select(**arguments | dict(page_table=wide))


def test_shard_map_over_requests():
    """Each device serves its own requests from its own pages."""
    model = Model(layers=1, requests=2)
    step = functools.partial(
        model.step, cu_seqlens_q=decode_offsets(model), num_decodes=2, decode_query_len=1
    )
    states = [model.state(seed=seed) for seed in range(2)]
    both = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *states)
    x, lengths = model.rows(4), jnp.array([33, 64, 5, 70], jnp.int32)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec))
    actual = sharded(x, both, lengths)
    parts = [step(x[2 * i : 2 * i + 2], states[i], lengths[2 * i : 2 * i + 2]) for i in range(2)]
    assert equal(actual, jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts))


@pytest.mark.parametrize("call", CALLS)
def test_vmap_is_refused(call):
    arguments = arguments_of(call)
    name = {"expand": "selected", "compress": "index_key"}.get(call, "page_table")
    array = arguments.pop(name)
    batched = jax.vmap(lambda array: getattr(qsa, call)(**{name: array}, **arguments))
    # A whole step is refused at its first call.
    first = "expand" if call == "attention" and name == "selected" else call
    first = "select" if call == "attention" else first
    with pytest.raises(NotImplementedError, match=rf"^jaxattn\.qsa\.{first} does not take vmap"):
        batched(jnp.stack([array, array]))


@pytest.mark.parametrize(
    "call, name",
    [("compress", "index_key"), ("select", "index_query"), ("attend", "query"),
     ("attention", "query"), ("prepare_query", "projection")],
)  # fmt: skip
def test_gradients_are_refused(call, name):
    arguments = arguments_of(call)
    array = arguments.pop(name)

    def loss(array):
        leaves = jax.tree.leaves(getattr(qsa, call)(**{name: array}, **arguments))
        return leaves[0].astype(jnp.float32).sum()

    first = "attend" if call == "attention" else call
    with pytest.raises(NotImplementedError, match=rf"^jaxattn\.qsa\.{first} is for inference"):
        jax.grad(loss)(array)


def test_rotary_tables_have_torchs_bits():
    for ours, theirs in zip(qsa.rotary_tables(99, 64, 1e7), torch_qsa.rotary_tables(99, 64, 1e7),
                            strict=True):  # fmt: skip
        assert same(ours, theirs) and ours.dtype == jnp.float32


def test_annotations(enforce_annotations):
    for call in (*CALLS, "prepare_query"):
        getattr(qsa, call)(**arguments_of(call))


def test_one_target_serves_every_configuration():
    """On a CPU: other budgets, ratios and scales add no target."""
    from jaxattn import _ffi

    qsa.attention(**arguments_of("attention"))
    before = len(_ffi._registered)
    for budget in (4, 12, 16, 20):
        qsa.attention(**arguments_of("attention") | dict(budget=budget, sm_scale=1 / budget))
    assert len(_ffi._registered) == before


def test_errors_of_values_at_run_time():
    """Traced offsets that break the contract: torch's message, and the next call works."""
    arguments = arguments_of("build_metadata") | dict(num_decodes=1, decode_query_len=1)
    offsets = arguments.pop("cu_seqlens_q")
    call = jax.jit(lambda offsets: qsa.build_metadata(cu_seqlens_q=offsets, **arguments)[0])
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="cu_seqlens_q must rise"):
        jax.block_until_ready(call(jnp.array([0, 3, 2], jnp.int32)))
    assert torch.equal(torch.from_numpy(np.array(call(offsets).positions)),
                       torch.tensor([20, 4, 5, -1], dtype=torch.int32))  # fmt: skip
