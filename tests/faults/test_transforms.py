"""Faults (a), R13 to R18: devices, errors, transforms and configurations."""

import re
import threading

import jax
import jax.numpy as jnp
import jax_tvm_ffi
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxattn
import torch_core
from tests import compare, faults, inputs
from tests.faults.interop import CACHE_NAMES, E4M3, append_arguments, fronts, phases
from tests.inputs import Case


def mesh_of_two():
    return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))


HEADS = dict(
    query=P(None, "x"), key_cache=P(None, None, "x"), value_cache=P(None, None, "x"), sinks=P("x")
)


BATCH = dict(query=P("x"), page_table=P("x"), seq_lens=P("x"), draft_mask=P("x"))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("split", ["heads", "batch"])
@pytest.mark.parametrize("kv_dtype", ["float32", E4M3])
def test_r13_shard_map_of_decode(split, check_vma, kv_dtype):
    """Split over KV heads or over the batch, two devices give the oracle's result."""
    case = Case("r13", (9, 30, 0, 4), q_len=2, draft_mask="bool", sinks=True, kv_dtype=kv_dtype)
    arguments = case.make()
    arrays, static = faults.jax_arrays(arguments)
    specs = HEADS if split == "heads" else BATCH
    out_spec = P(None, "x") if split == "heads" else P("x")
    sharded = jax.shard_map(
        lambda arrays: jaxattn.decode(**arrays, **static, return_lse=True),
        mesh=mesh_of_two(),
        in_specs=({name: specs.get(name, P()) for name in arrays},),
        out_specs=(out_spec, out_spec),
        check_vma=check_vma,
    )
    out, lse = jax.jit(sharded)(arrays)
    assert len(out.devices()) == 2
    compare.check_attention(arguments, np.asarray(out), np.asarray(lse))


@pytest.mark.parametrize("check_vma", [True, False])
def test_r13_shard_map_of_append_and_prefill(check_vma):
    """A chunk appended and attended with the KV heads split over two devices."""
    arguments = Case("r13", (9, 30), q_lens=(3, 5), kv_layout="HND").make()
    arrays, static = faults.jax_arrays(arguments)
    rng = np.random.default_rng(2)
    new = {name: inputs.normal(rng, (8, 2, 16), np.dtype("f4")) for name in ("key", "value")}
    at = faults.positions(arguments)
    places = dict(
        positions=np.array([position for _, position in at], np.int32),
        request_ids=np.array([request for request, _ in at], np.int32),
    )

    def chunk(arrays, new, places):
        names = (*CACHE_NAMES, "page_table")
        caches = jaxattn.append_kv(
            **new, **places, **{name: arrays[name] for name in names}, kv_layout="HND"
        )
        arrays = arrays | dict(zip(CACHE_NAMES, caches, strict=True))
        return jaxattn.prefill(**arrays, **static), caches

    heads = P(None, "x")
    specs = {name: heads if name in ("query", *CACHE_NAMES) else P() for name in arrays}
    sharded = jax.shard_map(
        chunk,
        mesh=mesh_of_two(),
        in_specs=(specs, dict(key=heads, value=heads), dict(positions=P(), request_ids=P())),
        out_specs=(heads, (heads, heads)),
        check_vma=check_vma,
    )
    out, caches = jax.jit(sharded)(arrays, new, places)
    names = (*CACHE_NAMES, "page_table", "kv_layout")
    expected = faults.run(
        "torch", "append_kv", {name: arguments[name] for name in names} | new | places
    )
    assert faults.same_bits(tuple(map(np.asarray, caches)), expected)
    after = arguments | dict(zip(CACHE_NAMES, expected, strict=True))
    compare.check_attention(after, np.asarray(out))


@phases
def test_r13_sharded_operands_of_a_plain_jit(case):
    """NamedSharding operands outside shard_map give the right result."""
    arguments = case.make()
    arrays, static = faults.jax_arrays(arguments)
    mesh = mesh_of_two()
    for specs in (HEADS, BATCH if case.phase == "decode" else HEADS):
        placed = {
            name: jax.device_put(array, NamedSharding(mesh, specs.get(name, P())))
            for name, array in arrays.items()
        }
        out = jax.jit(lambda a: getattr(jaxattn, case.phase)(**a, **static))(placed)
        compare.check_attention(arguments, np.asarray(out))


@phases
def test_r13_on_the_second_device_alone(case):
    """Operands on device 1 give a result on device 1, interleaved with device 0."""
    arguments = case.make()
    arrays, static = faults.jax_arrays(arguments)
    call = jax.jit(lambda arrays: getattr(jaxattn, case.phase)(**arrays, **static))
    for device in (jax.devices()[1], jax.devices()[0], jax.devices()[1]):
        out = call(jax.device_put(arrays, device))
        assert out.devices() == {device}
        compare.check_attention(arguments, np.asarray(out))


def test_r13_handing_over_a_sharded_array_is_an_error():
    """to_torch of an array on two devices names the number of devices."""
    array = jax.device_put(jnp.zeros((4, 4)), NamedSharding(mesh_of_two(), P("x")))
    with pytest.raises(ValueError, match="array must lie on one device, got 2"):
        jaxattn.to_torch(array)


def test_r13_an_error_on_one_device_surfaces():
    """A wrong length in one shard fails the call with our message; the next call works."""
    arguments = Case("r13", (9, 30)).make()
    arrays, static = faults.jax_arrays(arguments)
    sharded = jax.jit(
        jax.shard_map(
            lambda arrays: jaxattn.decode(**arrays, **static),
            mesh=mesh_of_two(),
            in_specs=({name: BATCH.get(name, P()) for name in arrays},),
            out_specs=P("x"),
        )
    )
    for wrong in ([9, 999], [999, 30]):
        with pytest.raises(faults.RUNTIME_ERRORS["jax"], match=r"seq_lens must be in .*999"):
            jax.block_until_ready(sharded(arrays | dict(seq_lens=jnp.array(wrong, jnp.int32))))
        compare.check_attention(arguments, np.asarray(sharded(arrays)))


def _zeros(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


TRACE_MISTAKES = [
    (dict(query=_zeros(4, 4)), ValueError, r"query must be .* got float32 \[4, 4\]"),
    (dict(query=_zeros(4, 4, 8)), ValueError, r"key_cache must be .*head_dim\] = .*8\]"),
    (dict(query=_zeros(5, 4, 16)), ValueError, r"query must have batch \* q_len = 4 \* 1 rows"),
    (dict(query=_zeros(4, 3, 16)), ValueError, r"query must have a positive multiple"),
    (dict(value_cache=_zeros(2, 8, 2, 16)), ValueError, r"value_cache must be .*got .*\[2, 8, 2"),
    (dict(page_table=_zeros(3, 5, dtype="int32")), ValueError, r"seq_lens must be int32 \[batch\]"),
    (dict(seq_lens=_zeros(4, 1, dtype="int32")), ValueError, r"seq_lens must be int32 \[batch\]"),
    (dict(sinks=_zeros(3)), ValueError, r"sinks must be float32 \[num_qo_heads\] = \[4\]"),
    (dict(sinks=_zeros(4, dtype="bfloat16")), TypeError, r"sinks must be float32"),
    (dict(draft_mask=_zeros(4, 2, 2, dtype="bool")), ValueError, r"draft_mask must be bool"),
    (dict(query=_zeros(4, 4, 16, dtype="bfloat16")), TypeError, r"key_cache must have the query's"),
    (dict(query=_zeros(4, 4, 16, dtype=E4M3)), TypeError, r"key_cache must have the query's dtype"),
    (dict(q_len=0), ValueError, r"q_len must be in \[1, "),
    (dict(q_len=2.0), TypeError, r"q_len must be a Python int"),
    (dict(kv_layout="NDH"), ValueError, r"kv_layout must be one of 'NHD', 'HND', got 'NDH'"),
    (dict(kv_layout="HND"), ValueError, r"query must have a positive multiple of num_kv_heads = 8"),
    (dict(return_lse=1), TypeError, r"return_lse must be True or False, got 1"),
    (dict(backend="fast"), ValueError, r"backend must be one of 'auto'"),
    (dict(sinks=None, draft_mask="tree"), TypeError, r"draft_mask must be an array, got str"),
]


@pytest.mark.parametrize("change, error, message", TRACE_MISTAKES)
def test_r15_mistakes_are_python_errors_while_tracing(change, error, message):
    """Shapes, dtypes and options are checked before anything is compiled."""
    arrays, static = faults.jax_arrays(Case("r15", (9, 30, 0, 4)).make())
    specs = {name: _zeros(*a.shape, dtype=a.dtype) for name, a in arrays.items()}
    arguments = specs | static | change
    specs = {k: v for k, v in arguments.items() if isinstance(v, jax.ShapeDtypeStruct)}
    static = {k: v for k, v in arguments.items() if k not in specs}
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda specs: jaxattn.decode(**specs, **static), specs)


DECODE, PREFILL = Case("decode", (9, 30)), Case("prefill", (9, 30), q_lens=(3, 5))


RUNTIME_MISTAKES = [
    (DECODE, dict(seq_lens=[9, 41]), r"seq_lens must be in \[0, .* = 40\], got 9 to 41"),
    (DECODE, dict(seq_lens=[-3, 30]), r"seq_lens must be in \[0, .*got -3 to 30"),
    (DECODE, dict(page_table=[[9, 1, 0, 0, 0]] * 2), r"page_table must be in \[0, .*9\)"),
    (DECODE, dict(page_table=[[0, -1, 0, 0, 0]] * 2), r"page_table must be in .*got -1"),
    (PREFILL, dict(page_table=[[9, 1, 0, 0, 0]] * 2), r"page_table must be in .* 9\)"),
    (PREFILL, dict(cu_seqlens_q=[1, 3, 8]), r"cu_seqlens_q must rise from 0"),
    (PREFILL, dict(cu_seqlens_q=[0, 5, 3]), r"cu_seqlens_q must rise from 0"),
    (PREFILL, dict(cu_seqlens_q=[0, 3, 9]), r"at most the query's 8 rows"),
    (PREFILL, dict(cu_seqlens_q=[0, 2, 8]), r"max_seqlen_q must be at least the longest query, 6"),
]


@fronts
@pytest.mark.parametrize("case, change, message", RUNTIME_MISTAKES)
def test_r15_wrong_values_keep_our_message(front, case, change, message):
    """Values out of range surface with our text, and the next call works."""
    arguments = case.make()
    change = {name: np.array(value, np.int32) for name, value in change.items()}
    for _ in range(2):
        with pytest.raises(faults.RUNTIME_ERRORS[front], match=message):
            faults.attend(front, arguments | change)
        compare.check_attention(arguments, *faults.attend(front, arguments))


@fronts
@pytest.mark.parametrize(
    "change, message",
    [
        (dict(slots=[32]), r"slots must be in \[0, num_pages \* page_size = 32\), got 32 to 32"),
        (dict(positions=[16]), r"positions must be in \[0, pages_per_seq \* page_size = 16\)"),
        (dict(positions=[0], request_ids=[2]), r"request_ids must be in \[0, batch = 2\), got 2"),
        (dict(positions=[0], request_ids=[-1]), r"request_ids must be in .*got -1"),
        (dict(positions=[8]), r"page_table must be in \[0, num_pages = 4\), got 7"),
    ],
)
def test_r15_append_to_a_wrong_place_keeps_our_message(front, change, message):
    """The same for append_kv; the caches of the failed call keep their values. Inside jit, XLA's
    scatter drops the row and writes nowhere else."""
    arguments = append_arguments()
    arguments |= {name: arguments[name][:1] for name in ("key", "value")}
    good = dict(arguments, slots=np.array([3], np.int32))
    del arguments["slots"]
    if "slots" not in change:
        arguments["page_table"] = np.array([[2, 7], [3, 0]], np.int32)
    arguments |= {name: np.array(value, np.int32) for name, value in change.items()}
    before = [arguments[name].copy() for name in CACHE_NAMES]
    with pytest.raises(ValueError, match=message):
        if front == "torch":
            faults.run(front, "append_kv", arguments)
        else:
            arrays, static = faults.jax_arrays(arguments)
            jaxattn.append_kv(**arrays, **static)
    if front == "jax":
        assert faults.same_bits(faults.run("jax", "append_kv", arguments), tuple(before))
    assert all(faults.same_bits(arguments[n], b) for n, b in zip(CACHE_NAMES, before, strict=True))
    written = faults.run(front, "append_kv", good)
    np.testing.assert_array_equal(written[0][0, 3], good["key"][0])


@fronts
def test_r15_calls_from_8_threads(front):
    """8 threads x 300 calls, each thread with its own lengths and now and then a failing call."""
    cases = [Case("r15", (3 + thread, 40 - thread, 9)) for thread in range(8)]
    table = np.arange(18, dtype=np.int32).reshape(3, 6)
    base = cases[0].make() | dict(page_table=table)
    base |= {
        name: inputs.normal(np.random.default_rng(1), (18, 8, 2, 16), np.dtype("f4"))
        for name in CACHE_NAMES
    }
    calls = [base | dict(seq_lens=np.array(case.seq_lens, np.int32)) for case in cases]
    expected = [faults.attend(front, call) for call in calls]
    for call, result in zip(calls, expected, strict=True):
        compare.check_attention(call, *result)
    wrong, failures = base | dict(seq_lens=np.array([1, 1, 49], np.int32)), []

    def work(thread):
        try:
            for step in range(300):
                if step % 10 == thread:
                    with pytest.raises(faults.RUNTIME_ERRORS[front], match="seq_lens must be in"):
                        faults.attend(front, wrong)
                assert faults.same_bits(faults.attend(front, calls[thread]), expected[thread])
        except BaseException as failure:
            failures.append((thread, failure))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


VMAP = Case("r17", (9, 30, 0), q_len=2, draft_mask="bool")


@pytest.mark.parametrize(
    "mapped",
    [
        ("query",),
        ("seq_lens",),
        ("query", "page_table", "seq_lens", "draft_mask"),
        ("key_cache",),
        ("query", "key_cache", "value_cache", "page_table", "seq_lens"),
    ],
    ids="-".join,
)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_r17_vmap_of_decode_equals_stacked_calls(mapped, kv_layout):
    """vmap folds any set of mapped arrays, caches among them."""
    case = Case("r17", (9, 30, 0), q_len=2, draft_mask="bool", kv_layout=kv_layout)
    calls = [case.make(seed) for seed in range(3)]
    lengths = [(9, 30, 0), (1, 24, 7), (0, 2, 30)]
    for call, seq_lens in zip(calls, lengths, strict=True):
        call["seq_lens"] = np.array(seq_lens, np.int32)
        call["page_table"] = np.random.default_rng(seq_lens[0]).permutation(12).reshape(3, 4)
        call["page_table"] = (call["page_table"] % 9).astype(np.int32)
    calls = [calls[0] | {name: call[name] for name in mapped} for call in calls]
    arrays, static = faults.jax_arrays(calls[0])
    arrays |= {name: jnp.stack([call[name] for call in calls]) for name in mapped}
    axes = ({name: 0 if name in mapped else None for name in arrays},)
    function = jax.vmap(lambda a: jaxattn.decode(**a, **static, return_lse=True), in_axes=axes)
    for out, lse in (function(arrays), jax.jit(function)(arrays)):
        for call, call_out, call_lse in zip(calls, out, lse, strict=True):
            compare.check_attention(call, np.asarray(call_out), np.asarray(call_lse))


def test_r17_nested_vmap_of_decode():
    """vmap of vmap, the caches mapped by the outer one, equals the calls apart."""
    arguments = Case("r17", (9, 30)).make()
    arrays, static = faults.jax_arrays(arguments)
    queries = jnp.stack(
        [jnp.stack([arrays["query"] * (1 + (i + 2 * j) / 8) for i in range(2)]) for j in range(3)]
    )
    keys = jnp.stack([arrays["key_cache"] * (1 + j / 8) for j in range(3)])

    def call(query, key_cache):
        return jaxattn.decode(**arrays | dict(query=query, key_cache=key_cache), **static)

    out = jax.vmap(jax.vmap(call, in_axes=(0, None)))(queries, keys)
    for j in range(3):
        for i in range(2):
            single = dict(query=np.asarray(queries[j, i]), key_cache=np.asarray(keys[j]))
            compare.check_attention(arguments | single, np.asarray(out[j, i]))


@pytest.mark.parametrize("offset", [0, 2, -1])
@pytest.mark.parametrize("element", [0, 1])
def test_r17_vmap_does_not_let_page_ids_cross_elements(element, offset):
    """A page id out of range is an error under vmap too, not a page of the next element."""
    case = Case("r17", (9, 30))
    calls = [case.make(seed) for seed in range(2)]
    arrays, static = faults.jax_arrays(calls[0])
    arrays = {name: jnp.stack([call[name] for call in calls]) for name in arrays}
    num_pages = arrays["key_cache"].shape[1]
    wrong = -1 if offset < 0 else num_pages + offset
    table = arrays["page_table"].at[element, 0, 0].set(wrong)
    function = jax.jit(jax.vmap(lambda arrays: jaxattn.decode(**arrays, **static)))
    function(arrays).block_until_ready()
    with pytest.raises(faults.RUNTIME_ERRORS["jax"], match="page_table must be in"):
        function(arrays | dict(page_table=table)).block_until_ready()


def test_r17_vmap_of_the_others_names_the_way_out():
    """prefill, append_kv and mapped scales or sinks refuse vmap; merge_states takes it."""
    arrays, static = faults.jax_arrays(Case("r17", (9, 30), q_lens=(3, 5)).make())
    queries = jnp.stack([arrays["query"]] * 2)
    with pytest.raises(NotImplementedError, match=r"jaxattn.prefill does not take vmap: pack the"):
        jax.vmap(lambda query: jaxattn.prefill(**arrays | dict(query=query), **static))(queries)
    append, append_static = faults.jax_arrays(append_arguments())
    with pytest.raises(NotImplementedError, match=r"jaxattn.append_kv does not take vmap: put the"):
        jax.vmap(lambda key: jaxattn.append_kv(**append | dict(key=key), **append_static))(
            jnp.stack([append["key"]] * 2)
        )
    arrays, static = faults.jax_arrays(Case("r17", (9, 30)).make())
    for name, values in (("sm_scale", jnp.ones(2)), ("sinks", jnp.ones((2, 4)))):
        with pytest.raises(NotImplementedError, match=r"jaxattn.decode under vmap .*jax.lax.map"):
            jax.vmap(lambda value, name=name: jaxattn.decode(**arrays, **static, **{name: value}))(
                values
            )
    rng = np.random.default_rng(0)
    out_a, out_b = (jnp.array(rng.normal(size=(2, 3, 4, 8)), jnp.float32) for _ in range(2))
    lse_a, lse_b = (jnp.array(rng.normal(size=(2, 3, 4)), jnp.float32) for _ in range(2))
    merged = jax.vmap(jaxattn.merge_states)(out_a, lse_a, out_b, lse_b)
    for index in range(2):
        single = jaxattn.merge_states(out_a[index], lse_a[index], out_b[index], lse_b[index])
        np.testing.assert_allclose(merged[0][index], single[0], rtol=1e-6)
        np.testing.assert_allclose(merged[1][index], single[1], rtol=1e-6)


def test_r17_lax_map_is_a_way_out_of_vmap():
    """What the messages advise works: jax.lax.map over a scale and over prefill."""
    arguments = Case("r17", (9, 30)).make()
    arrays, static = faults.jax_arrays(arguments)
    out = jax.lax.map(
        lambda s: jaxattn.decode(**arrays, **static, sm_scale=s), jnp.array([0.5, 2.0])
    )
    for scale, result in zip((0.5, 2.0), out, strict=True):
        compare.check_attention(arguments | dict(sm_scale=scale), np.asarray(result))


@pytest.mark.parametrize("name", ["decode", "prefill", "append_kv", "merge_states"])
def test_r17_gradients_are_refused_by_name(name):
    """grad, jvp and grad under jit or vmap say that the op is for inference."""
    if name == "merge_states":
        arguments = dict(
            out_a=np.ones((3, 4, 8), "f4"),
            lse_a=np.ones((3, 4), "f4"),
            out_b=np.ones((3, 4, 8), "f4"),
            lse_b=np.ones((3, 4), "f4"),
        )
    elif name == "append_kv":
        arguments = append_arguments()
    else:
        arguments = Case("r17", (9, 30), (3, 5) if name == "prefill" else None).make()
    arrays, static = faults.jax_arrays(arguments)
    first = next(iter(arrays))

    def loss(array):
        result = getattr(jaxattn, name)(**arrays | {first: array}, **static)
        return jax.tree.leaves(result)[0].sum()

    x = arrays[first]
    message = rf"jaxattn.{name} is for inference and has no gradient.*stop_gradient"
    for attempt in (
        lambda: jax.grad(loss)(x),
        lambda: jax.jit(jax.grad(loss))(x),
        lambda: jax.jvp(loss, (x,), (x,)),
    ):
        with pytest.raises(NotImplementedError, match=message):
            attempt()
    gradient = jax.grad(lambda x: (x * loss(jax.lax.stop_gradient(x))).sum())(x)
    np.testing.assert_allclose(gradient, np.full(x.shape, loss(x)), rtol=1e-5)


@pytest.mark.parametrize("name", ["decode", "prefill", "append_kv"])
def test_r17_torch_gradients_are_refused_by_name(name):
    """torch refuses a tensor that requires a gradient, and runs under no_grad."""
    if name == "append_kv":
        arguments = append_arguments()
    else:
        arguments = Case("r17", (9, 30), (3, 5) if name == "prefill" else None).make()
    tensors = {key: inputs.to_torch(value) for key, value in arguments.items()}
    first = next(iter(tensors))
    tensors[first].requires_grad_()
    message = rf"torch_core.{name} is for inference and has no gradient.*no_grad"
    with pytest.raises(NotImplementedError, match=message):
        getattr(torch_core, name)(**tensors)
    with torch.no_grad():
        result = getattr(torch_core, name)(**tensors)
    assert not any(tensor.requires_grad for tensor in jax.tree.leaves(result))


@phases
def test_r17_export_needs_the_documented_check(case):
    """jax.export refuses the custom call by name; with its check disabled the export runs."""
    arguments = case.make()
    arrays, static = faults.jax_arrays(arguments)
    call = jax.jit(lambda arrays: getattr(jaxattn, case.phase)(**arrays, **static))
    with pytest.raises(ValueError, match=rf"custom_call @.?jaxattn.{case.phase}"):
        jax.export.export(call)(arrays)
    target = re.search(r'custom_call @"?(jaxattn[^"]*)"', call.lower(arrays).as_text())[1]
    allowed = [jax.export.DisabledSafetyCheck.custom_call(target)]
    exported = jax.export.export(call, disabled_checks=allowed)(arrays)
    compare.check_attention(arguments, np.asarray(jax.jit(exported.call)(arrays)))


def static_configurations(count):
    """Distinct (page_size, head_dim, window_left, soft_cap, sm_scale, phase, layout)."""
    for index in range(count):
        yield dict(
            phase=("decode", "prefill")[index % 2],
            page_size=1 + index % 7,
            head_dim=8 * (1 + index % 3),
            window_left=index % 301 - 1,
            soft_cap=(None, 1.0 + index)[index % 5 % 2],
            sm_scale=0.01 + index / 500,
            kv_layout=("NHD", "HND")[index % 11 % 2],
        )


def configured(configuration):
    """The NumPy arguments of a tiny call with that configuration."""
    options = {
        k: v for k, v in configuration.items() if k in ("window_left", "soft_cap", "sm_scale")
    }
    return Case(
        "r18",
        (5,),
        q_lens=(3,) if configuration["phase"] == "prefill" else None,
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim=configuration["head_dim"],
        page_size=configuration["page_size"],
        kv_layout=configuration["kv_layout"],
        extra_pages=0,
        options=options,
    ).make()


def test_r18_1100_configurations_add_no_targets():
    """1100 distinct static configurations are traced, 300 of them run, all on two targets."""
    for phase in ("decode", "prefill"):
        faults.run("jax", phase, configured(next(static_configurations(1)) | dict(phase=phase)))
    before = jax_tvm_ffi.registered_count()
    calls = [(c["phase"], configured(c)) for c in static_configurations(1100)]
    seen = set()
    for begin in range(0, 1100, 50):
        block = calls[begin : begin + 50]
        split = [faults.jax_arrays(arguments) for _, arguments in block]
        operands = [arrays for arrays, _ in split]
        for (phase, _), (arrays, static) in zip(block, split, strict=True):
            seen.add((phase, str(static), str({n: a.shape for n, a in arrays.items()})))

        def program(operands, block=block, split=split):
            return [
                getattr(jaxattn, phase)(**arrays, **static)
                for (phase, _), arrays, (_, static) in zip(block, operands, split, strict=True)
            ]

        if begin >= 300:
            jax.eval_shape(program, operands)
            continue
        for (_, arguments), result in zip(block, jax.jit(program)(operands), strict=True):
            compare.check_attention(arguments, np.asarray(result))
    assert len(seen) == 1100
    assert jax_tvm_ffi.registered_count() == before
