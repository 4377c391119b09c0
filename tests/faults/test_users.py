"""Section (f): what users of paged caches in JAX reported and asked for."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jaxattn
import torch_core
from tests import compare, faults, inputs
from tests.inputs import Case

fronts = pytest.mark.parametrize("front", faults.FRONTS)


def paged_attention(q, k_pages, v_pages, block_tables, lengths, *, attn_logits_soft_cap=None):
    """The call of jax.experimental.pallas.ops.gpu.paged_attention (heads first, sm_scale 1)."""
    caches = (pages.swapaxes(0, 1) for pages in (k_pages, v_pages))
    return jaxattn.decode(
        q,
        *caches,
        block_tables,
        lengths,
        sm_scale=1.0,
        soft_cap=attn_logits_soft_cap,
        kv_layout="HND",
    )


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_r79_shim_of_the_jax_gpu_signature(dtype, soft_cap):
    """A three-line shim with jax's own signature equals jax's reference."""
    reference = pytest.importorskip("jax.experimental.pallas.ops.gpu.paged_attention")
    case = Case("r79", (5, 1, 32, 17), dtype=dtype, kv_layout="HND")
    arguments = case.make()
    table = np.random.default_rng(0).permutation(16).reshape(4, 4).astype(np.int32)
    rng = np.random.default_rng(1)
    k_pages, v_pages = (
        jnp.array(inputs.normal(rng, (2, 16, 8, 16), inputs.DTYPES[dtype])) for _ in range(2)
    )
    q, lengths = jnp.array(arguments["query"]), jnp.array(arguments["seq_lens"])
    shim = jax.jit(paged_attention, static_argnames="attn_logits_soft_cap")
    actual = shim(q, k_pages, v_pages, table, lengths, attn_logits_soft_cap=soft_cap)
    # [batch, tokens, num_kv_heads, head_dim]
    k, v = (
        jnp.einsum("hbptd->bpthd", p[:, table]).reshape(4, 32, 2, 16) for p in (k_pages, v_pages)
    )
    expected = reference.paged_attention_reference(q, k, v, lengths, attn_logits_soft_cap=soft_cap)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), np.asarray(expected, np.float32), tolerance, tolerance
    )


LAYERS, PAGES, PAGE_SIZE, HEADS, HEAD_DIM, WIDTH, VOCABULARY = 3, 8, 4, 2, 8, 16, 31
TABLE = np.array([[5, 1, 7, 2, 0, 3]], np.int32)
CACHE = (PAGES, PAGE_SIZE, HEADS, HEAD_DIM)


def weights():
    """A toy model: an embedding, and per layer q, k, v and output projections."""
    rng = np.random.default_rng(4)
    shapes = dict.fromkeys("qkv", (LAYERS, WIDTH, HEADS * HEAD_DIM))
    shapes["o"] = (LAYERS, HEADS * HEAD_DIM, WIDTH)
    layers = {name: rng.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    return rng.normal(size=(VOCABULARY, WIDTH)).astype("f4"), layers


def project(hidden, layer):
    return [(hidden @ layer[name]).reshape(-1, HEADS, HEAD_DIM) for name in "qkv"]


def attend(hidden, layer, caches, table, position):
    """One layer over its paged cache."""
    query, key, value = project(hidden, layer)
    caches = jaxattn.append_kv(key, value, *caches, table, positions=position)
    out = jaxattn.decode(query, *caches, table, position + 1)
    return jnp.tanh(hidden + out.reshape(1, -1) @ layer["o"]), caches


def run_list(hidden, layers, caches, position):
    """A list with one pair of caches a layer."""
    written = []
    for index in range(LAYERS):
        layer = jax.tree.map(lambda array, index=index: array[index], layers)
        hidden, pair = attend(hidden, layer, caches[index], TABLE, position)
        written.append(pair)
    return hidden, written


def run_scan(hidden, layers, caches, position):
    """Stacked caches [layer, page, ...] as scanned inputs and outputs of lax.scan."""

    def body(hidden, scanned):
        layer, pair = scanned
        return attend(hidden, layer, pair, TABLE, position)

    return jax.lax.scan(body, hidden, (layers, caches))


def run_pool(hidden, layers, caches, position):
    """One pool [layer * page, ...] carried by lax.scan, the page table shifted by layer."""

    def body(carry, scanned):
        hidden, pair = carry
        layer, index = scanned
        return attend(hidden, layer, pair, TABLE + index * PAGES, position), None

    indices = jnp.arange(LAYERS, dtype=jnp.int32)
    (hidden, caches), _ = jax.lax.scan(body, (hidden, caches), (layers, indices))
    return hidden, caches


MODELS = {
    "list": (run_list, lambda: [tuple(jnp.zeros(CACHE) for _ in "kv") for _ in range(LAYERS)]),
    "scan": (run_scan, lambda: tuple(jnp.zeros((LAYERS, *CACHE)) for _ in "kv")),
    "pool": (run_pool, lambda: tuple(jnp.zeros((LAYERS * PAGES, *CACHE[1:])) for _ in "kv")),
}


def compiled_step(name):
    """The compiled step (caches, token, position) -> (caches, token, logits), and empty caches."""
    embedding, layers = weights()
    run, make = MODELS[name]

    def step(caches, token, position):
        hidden, caches = run(jnp.asarray(embedding)[token][None], layers, caches, position)
        logits = (hidden @ embedding.T)[0]
        return caches, jnp.argmax(logits).astype(jnp.int32), logits

    caches = make()
    lowered = jax.jit(step, donate_argnums=0).lower(caches, jnp.int32(0), jnp.zeros(1, jnp.int32))
    return lowered.compile(), caches


def without_cache(tokens):
    """Logits of the last token in float64, all keys and values computed anew."""
    embedding, layers = weights()
    hidden = embedding[tokens].astype(np.float64)
    for index in range(LAYERS):
        query, key, value = project(hidden, {name: w[index] for name, w in layers.items()})
        scores = np.einsum("ihd,jhd->hij", query, key) / np.sqrt(HEAD_DIM)
        scores[:, np.triu(np.ones((len(tokens),) * 2, bool), 1)] = -np.inf
        share = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hij,jhd->ihd", share / share.sum(-1, keepdims=True), value)
        hidden = np.tanh(hidden + out.reshape(len(tokens), -1) @ layers["o"][index])
    return hidden[-1] @ embedding.T


@pytest.mark.parametrize("name", MODELS)
def test_r81_cache_updates_survive_the_layers(name):
    """Greedy decode of 20 tokens through 3 layers equals the run without a cache."""
    step, caches = compiled_step(name)
    token, tokens = 3, []
    for position in range(20):
        tokens.append(token)
        caches, chosen, logits = step(caches, jnp.int32(token), jnp.array([position], jnp.int32))
        expected = without_cache(tokens)
        np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)
        token = int(chosen)
        assert token == expected.argmax()
    assert len(set(tokens)) > 5


@pytest.mark.parametrize("name", MODELS)
def test_r82_donated_caches_are_not_copied(name):
    """Compiled HLO of a donated list and of a donated pool has no copy of a cache's size."""
    step, caches = compiled_step(name)
    leaves = jax.tree.leaves(caches)
    text = step.as_text()
    sizes = {int(np.prod(CACHE)), LAYERS * int(np.prod(CACHE))}
    copies = [
        match[0]
        for match in re.finditer(r"= f32\[([\d,]+)\]\S* copy(?:-start)?\(", text)
        if int(np.prod([int(n) for n in match[1].split(",")])) in sizes
    ]
    cache_bytes = sum(leaf.nbytes for leaf in leaves)
    memory = step.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    if name == "scan":
        # XLA slices a layer's cache out of scanned inputs and back: carry one pool instead.
        assert copies
        return
    assert not copies
    assert memory.temp_size_in_bytes < cache_bytes
    pointers = [leaf.unsafe_buffer_pointer() for leaf in leaves]
    for position in range(3):
        caches, *_ = step(caches, jnp.int32(1), jnp.array([position], jnp.int32))
        written = jax.tree.leaves(caches)
        assert [leaf.unsafe_buffer_pointer() for leaf in written] == pointers


def test_r81_while_loop_and_scan_over_steps():
    """The whole greedy loop inside one jit gives the tokens of the step-by-step run."""
    embedding, layers = weights()

    def step(state, position):
        caches, token = state
        hidden, caches = run_pool(
            jnp.asarray(embedding)[token][None], layers, caches, position[None]
        )
        chosen = jnp.argmax((hidden @ embedding.T)[0]).astype(jnp.int32)
        return (caches, chosen), token

    first = (MODELS["pool"][1](), jnp.int32(3))
    steps = jnp.arange(20, dtype=jnp.int32)
    (_, last), tokens = jax.jit(lambda state: jax.lax.scan(step, state, steps))(first)
    tokens = tokens.tolist()
    for position in range(19):
        assert without_cache(tokens[: position + 1]).argmax() == tokens[position + 1]

    def body(state):
        position, inner = state
        return position + 1, step(inner, position)[0]

    looped = jax.jit(lambda s: jax.lax.while_loop(lambda s: s[0] < 20, body, (jnp.int32(0), s)))
    assert looped(first)[1][1] == last


@st.composite
def random_calls(draw):
    """A call that is right or wrong in one way, and the name of the wrong argument or None."""
    batch = draw(st.integers(0, 3))
    prefill = draw(st.booleans())
    q_len = draw(st.integers(1, 4))
    kv_heads = draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3fn"]))
    kv_dtypes = [dtype, "float8_e4m3fn"] + (["float8_e5m2"] if dtype != "float8_e4m3fn" else [])
    causal = draw(st.booleans())
    options = dict(
        window_left=draw(st.sampled_from([-1, -1, 0, 3, 100])),
        soft_cap=draw(st.sampled_from([None, None, 2.0])),
        k_scale=draw(st.sampled_from([None, 0.5])),
        v_scale=draw(st.sampled_from([None, 2.0])),
    )
    case = Case(
        "r88",
        tuple(draw(st.lists(st.integers(0, 20), min_size=batch, max_size=batch))),
        q_lens=tuple(draw(st.lists(st.integers(0, 6), min_size=batch, max_size=batch)))
        if prefill
        else None,
        q_len=q_len,
        num_kv_heads=kv_heads,
        num_qo_heads=kv_heads * draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([1, 3, 8, 24])),
        page_size=draw(st.sampled_from([1, 3, 8, 16])),
        dtype=dtype,
        kv_dtype=draw(st.sampled_from(kv_dtypes)),
        kv_layout=draw(st.sampled_from(["NHD", "HND"])),
        sinks=draw(st.booleans()),
        draft_mask=None if prefill else draw(st.sampled_from([None, "bool", "packed"])),
        extra_rows=draw(st.integers(0, 2)) if prefill else 0,
        options=options | (dict(causal=causal) if prefill else {}),
    )
    arguments = case.make(draw(st.integers(0, 1000)))
    wrong = draw(st.sampled_from([None, None, None, *WRONG]))
    if wrong is not None:
        arguments |= WRONG[wrong](arguments)
    return arguments, wrong


WRONG = {
    "query": lambda a: dict(query=a["query"][:, 0]),
    "value_cache": lambda a: dict(value_cache=a["value_cache"][1:]),
    "page_table": lambda a: dict(page_table=a["page_table"].astype(np.int16)),
    "seq_lens": lambda a: dict(seq_lens=np.append(a["seq_lens"], 1).astype(np.int32)),
    "window_left": lambda a: dict(window_left=-2),
    "soft_cap": lambda a: dict(soft_cap=-1.0),
    "k_scale": lambda a: dict(k_scale=0.0),
    "kv_layout": lambda a: dict(kv_layout="HDN"),
    "sinks": lambda a: dict(sinks=np.zeros(a["query"].shape[1] + 1, np.float32)),
}


@given(random_calls())
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_r88_a_call_is_right_or_refused(call):
    """Random calls have two outcomes: the oracle's result, or an error naming the argument."""
    arguments, wrong = call
    for front in faults.FRONTS:
        if wrong is None:
            compare.check_attention(arguments, *faults.attend(front, arguments))
        else:
            with pytest.raises((ValueError, TypeError), match=rf"\b{wrong}\b.*must"):
                faults.attend(front, arguments)


def test_r88_one_table_serves_decode_and_prefill():
    """The same page table and lengths drive append, prefill and decode of a mixed batch."""
    arguments = Case("r88", (9, 30, 4), q_lens=(1, 1, 1)).make()
    prefill = faults.attend("torch", arguments)
    decode = {k: v for k, v in arguments.items() if k not in ("cu_seqlens_q", "max_seqlen_q")}
    for front in faults.FRONTS:
        out, lse = faults.attend(front, decode, q_len=1)
        np.testing.assert_allclose(out, prefill[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, prefill[1], rtol=1e-5)
    for phase in ("decode", "prefill"):
        assert torch_core.supported(phase, num_qo_heads=4, num_kv_heads=2, head_dim=16, page_size=8)
