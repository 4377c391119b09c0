"""The ragged-paged-attention convention, held to upstream's references of it."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import tvm_ffi
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxattn import _ffi, rpa
from tests import compare, inputs, kv_model
from tests.rpa import (
    BATCHES,
    GOLDEN,
    GOLDEN_BATCHES,
    MIXED,
    Batch,
    by_jax,
    by_oracle,
    digest,
    on_gpu,
    random_batch,
    split,
    updated_cache,
)
from torch_core import binding, reference
from torch_core.binding import Binding, Operand, View

run = functools.partial(inputs.run_jax, rpa.ragged_paged_attention)
# Splitting is for GPUs; here it is tried on every second batch, and the mixed one runs both ways.
SPLITS = [(batch, index % 2 == 1) for index, batch in enumerate(BATCHES)] + [(MIXED, True)]


def check(call, out, cache) -> None:
    """Both results against the float64 oracle; the cache bit by bit."""
    exact, plain = by_oracle(call), by_oracle(call, np.float32)
    compare.check(out, exact, plain)
    assert out.dtype == call["queries"].dtype
    assert kv_model.same_bits(cache, updated_cache(call))


@pytest.fixture
def jax_reference():
    """jax's reference of the convention's second version, which has the same attention."""
    module = "jax.experimental.pallas.ops.tpu.ragged_paged_attention"
    reason = f"this jax has no {module}"
    return pytest.importorskip(module, reason=reason).ref_ragged_paged_attention


@pytest.mark.parametrize("batch, splits", SPLITS, ids=str)
def test_against_the_oracle(batch, splits, monkeypatch):
    monkeypatch.setattr(rpa, "splits", lambda: splits)
    call = batch.make()
    check(call, *run(call))


@pytest.mark.parametrize("seed", range(4))
def test_random_batches(seed, monkeypatch):
    monkeypatch.setattr(rpa, "splits", lambda: seed % 2 == 1)
    call = random_batch(seed).make(seed)
    check(call, *run(call))


@pytest.mark.parametrize("seed", range(3))
def test_random_batches_against_the_reference_of_jax(seed, jax_reference):
    """Of one geometry: the reference is traced anew for every shape, which takes seconds."""
    batch = replace(
        random_batch(seed), num_q_heads=4, num_kv_heads=2, head_dim=32, page_size=16, width=32
    )
    call = batch.make(seed)
    out, _ = run(call)
    compare.check(out, by_jax(call, jax_reference), by_oracle(call, np.float32))


@pytest.mark.parametrize("batch", GOLDEN_BATCHES, ids=str)
def test_against_what_tpu_inference_answered(batch):
    """The third version's own reference, recorded: scales, masks and the layout it writes."""
    answers = np.load(GOLDEN)
    call = batch.make()
    out, cache = run(call)
    assert digest(cache) == str(answers[f"{batch}.cache"])
    if f"{batch}.out" in answers:
        golden = answers[f"{batch}.out"]
        plain = by_oracle(call, np.float32)[: len(golden)]
        compare.check(out[: len(golden)], golden.astype(np.float64), plain)
    assert not out[sum(batch.q_lens) :].any()


@pytest.mark.parametrize(
    "batch",
    [Batch("decodes", (1, 1, 1), (7, 16, 1)), Batch("idle", (1, 0, 1), (7, 3, 9), extra_rows=4)],
    ids=str,
)
def test_only_decodes(batch, monkeypatch):
    """max_seqlen_q=1 calls no prefill, whatever rows and sequences are not live."""
    monkeypatch.setattr(
        rpa._launch, "attend", lambda phase, *a, attend=rpa._launch.attend, **options: (
            pytest.fail("prefill") if phase == "prefill" else attend(phase, *a, **options)
        )
    )  # fmt: skip
    call = batch.make()
    check(call, *run(call, max_seqlen_q=1))


def test_a_cache_that_is_not_updated():
    """update_kv_cache=False attends to what is there, and ignores keys and values."""
    call = MIXED.make()
    call = call | dict(kv_cache=updated_cache(call))
    expected, cache = run(call)
    call |= dict(keys=call["keys"] * np.nan, values=call["values"] * np.nan)
    out, kept = run(call, update_kv_cache=False)
    assert np.array_equal(out, expected)
    assert kv_model.same_bits(kept, cache)


def test_lengths_are_not_baked_in():
    """One program for other lengths, pages and numbers of live sequences."""
    traces = []

    @jax.jit
    def call_of(arrays):
        traces.append(1)
        return rpa.ragged_paged_attention(**arrays, sm_scale=0.1)

    calls = [Batch("", q, kv).make(seed) for seed, (q, kv) in enumerate(
        [((1, 4, 2), (9, 20, 2)), ((4, 1, 2), (17, 20, 16)), ((6, 1, 0), (24, 8, 0))]
    )]  # fmt: skip
    pages = max(call["kv_cache"].shape[0] for call in calls)
    for call in calls:
        cache = call["kv_cache"]
        more = np.zeros((pages - len(cache), *cache.shape[1:]), cache.dtype)
        call |= dict(kv_cache=np.concatenate([cache, more]), sm_scale=0.1)
        arrays = {n: jnp.array(v) for n, v in call.items() if isinstance(v, np.ndarray)}
        check(call, *map(np.asarray, call_of(arrays)))
    assert len(traces) == 1


def test_numpy_arrays():
    """As constants of a program, and outside jit."""
    call = MIXED.make()
    check(call, *map(np.asarray, rpa.ragged_paged_attention(**call)))
    queries = call["queries"]
    attend = jax.jit(lambda x: rpa.ragged_paged_attention(**call | dict(queries=x)))
    check(call, *map(np.asarray, attend(queries)))


def test_no_pages():
    """Nothing is live, so nothing is read."""
    call = Batch("none_live", (), ()).make()
    call |= dict(kv_cache=call["kv_cache"][:0])
    out, cache = run(call)
    assert not out.any() and cache.shape == call["kv_cache"].shape


def test_traced_scales():
    call = replace(MIXED, options=dict(k_scale=0.5, v_scale=2.0)).make()
    scales = {name: np.float32(call[name]).reshape(()) for name in ("sm_scale", "k_scale")}
    check(call, *run(call | scales))


@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_a_donated_cache_is_not_copied(kv_dtype, num_kv_heads):
    """Written in place: the same memory, and no temporary or conversion of its size."""
    dtype = "float32" if kv_dtype == "float32" else "bfloat16"
    batch = replace(MIXED, dtype=dtype, kv_dtype=kv_dtype, num_kv_heads=num_kv_heads)
    call = batch.make()
    arrays = {n: jnp.array(v) for n, v in call.items() if isinstance(v, np.ndarray)}
    shape = (512, *arrays["kv_cache"].shape[1:])
    cache = jnp.zeros(shape, kv_dtype).at[: len(arrays["kv_cache"])].set(arrays.pop("kv_cache"))

    def step(cache, arrays):
        return rpa.ragged_paged_attention(kv_cache=cache, **arrays, sm_scale=call["sm_scale"])

    compiled = jax.jit(step, donate_argnums=0).lower(cache, arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < cache.nbytes // 4
    combined = f"[{shape[0]},{shape[1]},"
    made = [x for x in compiled.as_text().splitlines() if combined in x.split("(")[0]]
    assert made
    assert not [x for x in made if re.search(r"\b(copy|convert|bitcast-convert)\(", x)]
    pointer = cache.unsafe_buffer_pointer()
    out, written = compiled(cache, arrays)
    assert cache.is_deleted() and written.unsafe_buffer_pointer() == pointer
    call = call | dict(kv_cache=np.asarray(written))
    compare.check(np.asarray(out), by_oracle(call), by_oracle(call, np.float32))


def test_the_adapter_makes_the_views():
    """Key and value heads of a combined cache, by pointer, shape and strides; like torch's."""
    if _ffi.adapter() is None:
        pytest.skip("needs a C++ compiler and ninja")
    seen = []

    def kernel(*views):
        seen.extend((tuple(x.shape), tuple(x.strides), x.data_ptr()) for x in views)

    operands = (Operand("value_cache"), Operand("key_cache"))
    bound = Binding("stub", tvm_ffi.convert(kernel), operands, 0)
    shape, strides = (3, 4, 2, 5), (192, 48, 16, 1)
    views = (View("key_cache", shape, strides), View("key_cache", shape, strides, 8))
    bound = binding.with_views(bound, views)
    cache = torch.randn(3, 4, 3, 2, 8).to(torch.bfloat16)
    _ffi._adapted(bound, ("key_cache",))(tvm_ffi.from_dlpack(cache))
    binding.launch(bound, dict(key_cache=cache, out=cache))
    flat = cache.view(3, 4, 6, 8)
    expected = [flat[:, :, odd:4:2, :5] for odd in (1, 0)]
    assert seen == 2 * [(tuple(x.shape), x.stride(), x.data_ptr()) for x in expected]


def valid() -> dict:
    return {n: jnp.array(v) if isinstance(v, np.ndarray) else v for n, v in MIXED.make().items()}


def test_arguments_for_tpus_are_ignored():
    tuning = dict.fromkeys(rpa.TPU_ONLY, 3) | dict(mask_value=-2.38e38, q_scale=2.0)
    call = valid()
    results = [rpa.ragged_paged_attention(**call | more) for more in ({}, tuning)]
    for plain, tuned in zip(*results, strict=True):
        assert np.array_equal(plain, tuned, equal_nan=True)


def test_transforms_are_refused():
    call = valid()
    queries = call.pop("queries")
    attend = lambda x: rpa.ragged_paged_attention(x, **call)[0]  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"rpa\.ragged_paged_attention does not take vm"):
        jax.vmap(attend)(queries[None])
    with pytest.raises(NotImplementedError, match=r"rpa\.ragged_paged_attention is for inference"):
        jax.grad(lambda x: attend(x).sum())(queries)


def test_over_a_mesh():
    """In shard_map, as its callers have it, over KV heads; under jit a split cache is refused."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("heads",))
    call = replace(MIXED, dtype="bfloat16").make()
    arrays = [jnp.array(x) for x in call.values() if isinstance(x, np.ndarray)]
    attend = functools.partial(rpa.ragged_paged_attention, sm_scale=call["sm_scale"])
    rows, cache = P(None, "heads"), P(None, None, "heads")
    specs = (rows, rows, rows, cache, *[P()] * 4)
    split_call = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=(rows, cache))
    check(call, *map(np.asarray, jax.jit(split_call)(*arrays)))
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]
    # XLA wraps what its partitioner raises.
    refused = (NotImplementedError, jax.errors.JaxRuntimeError)
    with pytest.raises(refused, match="would gather key_cache"):
        jax.jit(attend)(*placed)


def test_annotations(enforce_annotations):
    for batch in (MIXED, Batch("four_axes", (1, 5), (20, 9), five_axes=False)):
        run(batch.make())


GPU = [
    replace(MIXED, kv_lens=(700, 16, 5, 300), num_q_heads=16, head_dim=128),
    Batch("decodes", (1,) * 20, tuple(range(1, 3000, 150)), num_q_heads=16, head_dim=128),
    Batch("head_64_of_128", (1, 50, 1), (999, 300, 64), num_q_heads=8),
    Batch("odd_head_dim", (1, 50), (200, 90), head_dim=80),
    Batch("soft_cap", (1, 50), (200, 90), 16, head_dim=128, options=dict(soft_cap=1.5)),
    Batch("window", (1, 50), (500, 90), 16, head_dim=128, options=dict(sliding_window=33)),
    Batch("e4m3", (1, 50), (500, 90), 8, 1, head_dim=128, kv_dtype="float8_e4m3fn",
          options=dict(k_scale=0.5, v_scale=2.0)),
    *map(random_batch, range(6, 12)),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [None, 1], ids=["mixed", "decodes"])
@pytest.mark.parametrize("batch", GPU, ids=str)
def test_on_a_gpu(batch, limit, jax_reference):
    """Kernels on strided views of the combined cache, without Python and without a copy of it."""
    if limit and max(batch.q_lens) > 1:
        batch = replace(batch, q_lens=tuple(min(n, 1) for n in batch.q_lens))
    call = on_gpu(batch).make()
    before = _ffi.python_calls
    out, cache = run(call, max_seqlen_q=limit)
    assert _ffi.python_calls == before
    assert kv_model.same_bits(cache, updated_cache(call))
    compare.check(out, by_jax(call, jax_reference), by_rounding(call))


def by_rounding(call) -> np.ndarray:
    """The output with all arithmetic in bfloat16, as near as a kernel must be."""
    whole = {n: inputs.to_torch(v) for n, v in split(call, updated_cache(call)).items()}
    rounded, _ = reference.evaluate(
        "prefill", **whole, max_seqlen_q=len(call["queries"]), compute_dtype=torch.bfloat16
    )
    return inputs.to_numpy(rounded)


@pytest.mark.gpu
def test_a_donated_cache_on_a_gpu():
    """In place over steps, and no result of the cache's size but itself."""
    call = on_gpu(replace(MIXED, head_dim=128)).make()
    arrays = {n: jnp.array(v) for n, v in call.items() if isinstance(v, np.ndarray)}
    cache = jnp.concatenate([arrays.pop("kv_cache")] * 40)

    def step(cache, arrays):
        return rpa.ragged_paged_attention(kv_cache=cache, **arrays, sm_scale=0.1)

    compiled = jax.jit(step, donate_argnums=0).lower(cache, arrays).compile()
    text = compiled.as_text()
    sized = f"[{cache.shape[0]},{cache.shape[1]},"
    copies = [x for x in text.splitlines() if re.search(r" copy(-start)?\(", x) and sized in x]
    assert sized in text and not copies
    pointer = cache.unsafe_buffer_pointer()
    for _ in range(3):
        _, cache = compiled(cache, arrays)
    assert cache.unsafe_buffer_pointer() == pointer
    assert split(call, np.asarray(cache))["key_cache"].shape[0] == cache.shape[0]
