"""Draft masks, acceptance and what follows, against loops and against decoding one by one."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxattn import PagedKVCache, paging, qsa, speculative
from tests import inputs, kv_model
from tests.jaxattn.qsa.model import Model
from tests.jaxattn.spec_model import VOCAB, Decoder

ROUNDS, DEPTH = 6, 3
REQUESTS = DEPTH + 1  # in each round, every accept length from 0 to DEPTH
CHAIN = [-1, 0, 1, 2]
# Right tokens along 0 2 5 7, along 0 1 4 6, along 0 3 8 9 and along 0 1 3 5.
TREES = [
    ([-1, 0, 0, 0, 1, 2, 4, 5, 3, 8], [2, 5, 7]),
    ([-1, 0, 0, 0, 1, 2, 4, 5, 3, 8], [1, 4, 6]),
    ([-1, 0, 0, 0, 1, 2, 4, 5, 3, 8], [3, 8, 9]),
    ([-1, 0, 0, 1, 1, 3, 3, 2, 2, 7], [1, 3, 5]),
]


def ints(*values) -> np.ndarray:
    return np.array(values, np.int32)


def ancestors(parents: list[int]) -> np.ndarray:
    """bool [rows, rows] by walking up from each row."""
    mask = np.zeros((len(parents), len(parents)), bool)
    for row in range(len(parents)):
        at = row
        while at >= 0:
            mask[row, at] = True
            at = parents[at] if at else -1
    return mask


def random_parents(rng: np.random.Generator, q_len: int) -> list[int]:
    return [-1, *(int(rng.integers(0, row)) for row in range(1, q_len))]


@pytest.mark.parametrize("q_len", [1, 2, 4, 9, 40])
def test_masks(q_len):
    """Chains and trees of any length, traced or not."""
    rng = np.random.default_rng(q_len)
    trees = [random_parents(rng, q_len) for _ in range(5)] + [list(range(-1, q_len - 1))]
    whole = np.stack([ancestors(parents) for parents in trees])
    parents = ints(*trees)
    assert np.array_equal(speculative.tree_mask(parents), whole)
    lengths = rng.integers(0, q_len + 1, 6).astype(np.int32)
    real = np.arange(q_len) < lengths[:, None]
    assert np.array_equal(speculative.tree_mask(parents, lengths), whole & real[..., None])
    parents[:, 0] = 7  # is not read
    parents = np.where(real, parents, 10**9).astype(np.int32)  # nor is padding
    for mask in (speculative.tree_mask, jax.jit(speculative.tree_mask)):
        assert np.array_equal(mask(parents, lengths), whole & real[..., None])
    chain = np.tri(q_len, dtype=bool) & real[..., None]
    assert np.array_equal(speculative.chain_mask(lengths, q_len=q_len), chain)
    jitted = jax.jit(functools.partial(speculative.chain_mask, q_len=q_len))
    assert np.array_equal(jitted(lengths), chain)


def accept_loop(parents, length, tokens, targets):
    """Path of accepted rows and next token of one request: the longest path, of equal ones that
    which ends in the lowest row."""
    paths: dict[int, list[int]] = {}
    for row in range(length):
        if row == 0:
            paths[0] = [0]
        elif parents[row] in paths and tokens[row] == targets[parents[row]]:
            paths[row] = [*paths[parents[row]], row]
    if not paths:
        return [], -1
    end = max(sorted(paths), key=lambda row: len(paths[row]))
    return paths[end], targets[end]


@pytest.mark.parametrize("vocab", [1, 2, 5])
def test_accept_equals_loop(vocab):
    """Random trees over few tokens: several branches are right at once."""
    rng, batch, q_len = np.random.default_rng(vocab), 300, 8
    trees = [random_parents(rng, q_len) for _ in range(batch - 40)] + [list(range(-1, 7))] * 40
    lengths = rng.integers(0, q_len + 1, batch).astype(np.int32)
    tokens, targets = rng.integers(0, vocab, (2, batch, q_len)).astype(np.int32)
    mask = speculative.tree_mask(ints(*trees), lengths)
    with jax.enable_x64(vocab == 5):
        result = jax.jit(speculative.accept)(tokens, targets, mask)
    assert {x.dtype.name for x in result} == {"int32"}
    for request, parents in enumerate(trees):
        one = lengths[request], tokens[request].tolist(), targets[request].tolist()
        path, token = accept_loop(parents, *one)
        assert result.counts[request] == len(path)
        assert result.rows[request].tolist() == path + [-1] * (q_len - len(path))
        assert result.next_tokens[request] == token


def test_rows_that_do_not_continue_row_0_are_not_accepted():
    """A traced array of parents that are no rows: 2 and 3 hang together, but on nothing."""
    mask = jax.jit(speculative.tree_mask)(ints([-1, 0, 5, 2]))
    assert mask[0].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    for token in (3, 4):
        result = speculative.accept(ints([4, token, 3, 3]), ints([3, 7, 3, 3]), mask)
        assert result.counts.tolist() == [2 if token == 3 else 1]
        assert result.next_tokens.tolist() == [7 if token == 3 else 3]


def near(found: np.ndarray, expected: float) -> bool:
    """Whether the share of True is within 5 standard deviations of its expectation."""
    return abs(found.mean() - expected) <= 5 * (expected * (1 - expected) / found.size) ** 0.5


def test_accepted_samples_have_the_models_distribution():
    """Every pair of the first two tokens comes as often as the model alone would draw it."""
    rng, batch, vocab = np.random.default_rng(0), 40_000, 4
    target = rng.dirichlet(np.ones(vocab), (3, vocab)).astype(np.float32)  # by row, last token
    draft = rng.dirichlet(np.ones(vocab), (2, vocab)).astype(np.float32)
    draft[0, 0, 2] = 0
    draft[0, 0] /= draft[0, 0].sum()
    target[0, 0, 1] = 0
    target[0, 0] /= target[0, 0].sum()
    keys = jax.random.split(jax.random.key(0), 3)
    tokens = [jnp.zeros(batch, jnp.int32)]
    for row in range(2):
        logits = jnp.log(draft[row])[tokens[-1]]
        tokens.append(jax.random.categorical(keys[row], logits).astype(jnp.int32))
    probs = [jnp.stack([p[row][t] for row, t in enumerate(tokens[: len(p)])], 1)
             for p in (draft, target)]  # fmt: skip
    step = jnp.stack(tokens, 1)
    lengths = ints(*[3, 2] * (batch // 2 - 1), 1, 0)
    result = speculative.accept_sampled(keys[2], step, *probs, lengths)
    counts, rows, following = map(np.asarray, result)
    assert np.array_equal(rows, np.where(np.arange(3) < counts[:, None], np.arange(3), -1))
    assert (counts <= lengths).all() and counts[-2:].tolist() == [1, 0] and following[-1] == -1
    step = np.asarray(step)
    first = np.where(counts > 1, step[:, 1], following)[:-2]
    accepted = np.minimum(draft[0, 0], target[0, 0]).sum()
    assert near(counts[:-2] > 1, accepted)
    for token in range(vocab):
        assert near(first == token, target[0, 0, token])
        # Where the first draft was accepted, the next token is the model's too.
        second = np.where(counts > 2, step[:, 2], following)[:-2]
        chosen = (counts[:-2] > 1) & (first == token)
        for after in range(vocab if chosen.any() else 0):
            assert near(second[chosen] == after, target[1, token, after])


def test_accepted_samples_at_the_ends():
    """Equal distributions accept everything, disjoint ones nothing."""
    one = jnp.tile(jnp.array([0.5, 0.5, 0, 0]), (8, 4, 1))
    tokens, lengths = jnp.zeros((8, 4), jnp.int32), jnp.full(8, 4, jnp.int32)
    accept = jax.jit(speculative.accept_sampled)
    same = accept(jax.random.key(1), tokens, one[:, :3], one, lengths)
    assert same.counts.tolist() == [4] * 8 and (same.next_tokens < 2).all()
    other = accept(jax.random.key(1), tokens, one[:, :3], one[..., ::-1], lengths)
    assert other.counts.tolist() == [1] * 8 and (other.next_tokens >= 2).all()


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_compact_moves_rows(kv_layout, dtype):
    """Every bit of both caches, also over the ends of pages; scales are left alone."""
    rng, page_size = np.random.default_rng(0), 4
    shape = (13, page_size, 2, 8) if kv_layout == "NHD" else (13, 2, page_size, 8)
    arrays = [inputs.normal(rng, shape, inputs.DTYPES[dtype]) for _ in range(2)]
    table = rng.permutation(13)[:12].reshape(4, 3).astype(np.int32)
    seq_lens = ints(0, 3, 6, 2)
    table[3] = -1
    rows = ints([0, 2, 5, -1, -1, -1], [0, 1, 3, 4, 5, -1], [0, 1, 2, 3, 4, 5], [-1] * 6)
    cache = PagedKVCache(*map(jnp.array, arrays), 0.5, None, kv_layout)
    moved = jax.jit(speculative.compact, donate_argnums=0)(cache, table, seq_lens, rows)
    for array, result in zip(arrays, (moved.key_cache, moved.value_cache), strict=True):
        expected = array.copy()
        at = (lambda a: a) if kv_layout == "NHD" else (lambda a: a.swapaxes(1, 2))
        for request in range(3):
            for k, row in enumerate(rows[request][rows[request] >= 0]):
                (p0, o0), (p1, o1) = (divmod(seq_lens[request] + i, page_size) for i in (row, k))
                at(expected)[table[request, p1], o1] = at(array)[table[request, p0], o0]
        assert kv_model.same_bits(np.asarray(result), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compact_works_in_place(dtype):
    """Donated caches keep their memory, and nothing of their size is made."""
    cache = PagedKVCache.zeros(512, 16, 2, 64, dtype=dtype)
    arguments = (ints([0, 1], [2, 3]), ints(9, 12), ints([0, 2, 5], [0, 1, -1]))
    compiled = jax.jit(speculative.compact, donate_argnums=0).lower(cache, *arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < cache.key_cache.nbytes // 8
    before = cache.key_cache.unsafe_buffer_pointer()
    assert compiled(cache, *arguments).key_cache.unsafe_buffer_pointer() == before


def drafted(truth, at, parents, right, accepted, rng):
    """Tokens of one verify step from position `at`: `accepted` rows along `right` continue the
    sequence, all others are wrong."""
    wrong = lambda t: int((t + rng.integers(1, VOCAB)) % VOCAB)  # noqa: E731
    depths = ancestors(parents).sum(1) - 1
    tokens = [truth[at]] + [wrong(truth[at + d]) for d in depths[1:]]
    for row in right[:accepted]:
        tokens[row] = truth[at + depths[row]]
    return tokens


def check_rounds(plans, lengths, *, dtype="float32", kv_layout="NHD", page_size=4, head_dim=16):
    """Six verify rounds for four requests and an empty slot; in each round, each accept length.

    plans: parents and the rows of right tokens of each request; lengths: rows of each request and
    round [ROUNDS, REQUESTS]. Targets are the model's own where it computes in float32.
    """
    rng, model, q_len = np.random.default_rng(0), Decoder(head_dim), len(plans[0][0])
    batch, pages_per_seq = REQUESTS + 1, -(-72 // page_size)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (5, 4, 11, 1)]
    truths = [model.greedy(prompt, ROUNDS * REQUESTS + DEPTH + 2) for prompt in prompts]
    exact = [model.exact(truth) for truth in truths]
    sizes = dict(num_pages=4 * pages_per_seq, page_size=page_size)
    pool = paging.PagePool.empty(**sizes, batch=batch, pages_per_seq=pages_per_seq)
    new = functools.partial(PagedKVCache.zeros, *sizes.values(), 2, head_dim, dtype=dtype)
    caches = [new(kv_layout=kv_layout) for _ in model.layers]
    caches = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), caches)
    traces = []

    @functools.partial(jax.jit, donate_argnums=0)
    def prefill(caches, pool, tokens, counts):
        pool, _ = paging.append(pool, counts)
        offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
        request = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), counts,
                             total_repeat_length=len(tokens))  # fmt: skip
        positions = jnp.arange(len(tokens), dtype=jnp.int32) - offsets[request]

        def attend(cache, query, key, value):
            places = dict(positions=positions, request_ids=request)
            cache = cache.append_kv(key, value, pool.page_table, **places)
            paged = (pool.page_table, pool.seq_lens, offsets)
            return cache.prefill(query, *paged, max_seqlen_q=11), cache

        return *model.paged(tokens, positions, caches, attend), pool

    @functools.partial(jax.jit, donate_argnums=0)
    def verify(caches, pool, tokens, parents, rows, known):
        traces.append(1)
        running = rows > 0
        lens = jnp.where(running, pool.seq_lens + q_len, 0)
        pool, ok = paging.alloc(pool, lens)
        mask = speculative.tree_mask(parents, rows)
        if plans[0][0] == CHAIN:
            mask = speculative.chain_mask(rows, q_len=q_len)
        row = jnp.arange(q_len, dtype=jnp.int32)
        positions = jnp.where(running[:, None], pool.seq_lens[:, None] + row, -1).reshape(-1)
        depths = jnp.sum(mask, -1, dtype=jnp.int32) - 1
        places = (pool.seq_lens[:, None] + depths).reshape(-1)
        request = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), q_len)

        def attend(cache, query, key, value):
            where = dict(positions=positions, request_ids=request)
            cache = cache.append_kv(key, value, pool.page_table, **where)
            options = dict(q_len=q_len, draft_mask=mask)
            return cache.decode(query, pool.page_table, lens, **options), cache

        logits, caches = model.paged(tokens.reshape(-1), places, caches, attend)
        logits = logits.reshape(batch, q_len, VOCAB)
        targets = jnp.argmax(logits, -1).astype(jnp.int32)
        if dtype != "float32":
            targets = jnp.take_along_axis(known, jnp.maximum(depths, 0), 1)
        accepted = speculative.accept(tokens, targets, mask)
        paged = (pool.page_table, pool.seq_lens, accepted.rows)
        caches = [speculative.compact(cache, *paged) for cache in caches]
        pool, _ = paging.append(pool, accepted.counts)
        return caches, pool, accepted, logits, ok.all()

    packed = ints(*(token for prompt in prompts for token in prompt))
    _, caches, pool = prefill(caches, pool, packed, ints(*map(len, prompts), 0))
    done = list(map(len, prompts))  # the token at this place was picked, and is in no cache yet
    eps = float(ml_dtypes.finfo(dtype).eps)
    seen = set()
    for turn in range(ROUNDS):
        wanted = [min((request + turn) % REQUESTS, lengths[turn][request] - 1)
                  for request in range(REQUESTS)]  # fmt: skip
        tokens = [
            drafted(truth, at, *plan, count, rng)
            for truth, at, plan, count in zip(truths, done, plans, wanted, strict=True)
        ]
        known = [truth[at + 1 : at + DEPTH + 2] for truth, at in zip(truths, done, strict=True)]
        arguments = (
            ints(*tokens, [0] * q_len),
            ints(*(parents for parents, _ in plans), [-1] * q_len),
            ints(*lengths[turn], 0),
            ints(*known, [0] * (DEPTH + 1)),
        )
        caches, pool, accepted, logits, ok = verify(caches, pool, *arguments)
        assert ok and accepted.counts.tolist() == [1 + n for n in wanted] + [0]
        for request, (at, count) in enumerate(zip(done, wanted, strict=True)):
            assert accepted.next_tokens[request] == truths[request][at + count + 1]
            rows = np.asarray(accepted.rows)[request, : count + 1]
            found = np.asarray(logits, np.float64)[request, rows]
            expected = exact[request][at : at + count + 1]
            assert np.abs(found - expected).max() <= 500 * eps * np.abs(expected).max()
            done[request] += count + 1
            seen.add((request, count))
        assert pool.seq_lens.tolist() == [*done, 0]
    assert len(traces) == 1
    return seen


EVERY = {(request, count) for request in range(REQUESTS) for count in range(DEPTH + 1)}
WHOLE = [[DEPTH + 1] * REQUESTS] * ROUNDS
GPU = dict(dtype="bfloat16", page_size=16, head_dim=64)
on_gpu = functools.partial(pytest.param, marks=pytest.mark.gpu)


@pytest.mark.parametrize("options", [
    pytest.param(dict(kv_layout="HND"), id="hnd"),
    on_gpu(GPU, id="gpu"),
])  # fmt: skip
def test_chain_rounds(options):
    """Tokens and logits of decoding one by one, after each accept length in each request."""
    assert check_rounds([(CHAIN, [1, 2, 3])] * REQUESTS, WHOLE, **options) == EVERY


@pytest.mark.parametrize("options", [pytest.param({}, id="nhd"), on_gpu(GPU, id="gpu")])
def test_ragged_chain_rounds(options):
    """1 to 4 rows a request; padding rows have places in the caches too."""
    lengths = [[1 + (request * 3 + turn) % 4 for request in range(REQUESTS)]
               for turn in range(ROUNDS)]  # fmt: skip
    assert len(check_rounds([(CHAIN, [1, 2, 3])] * REQUESTS, lengths, **options)) > 8


@pytest.mark.parametrize("options", [
    pytest.param({}, id="nhd"),
    on_gpu(GPU, id="gpu"),
    on_gpu(GPU | dict(kv_layout="HND"), id="gpu-hnd"),
])  # fmt: skip
def test_tree_rounds(options):
    """Trees of ten rows, another path for each request; accepted tokens move together."""
    assert check_rounds(TREES, [[10] * REQUESTS] * ROUNDS, **options) == EVERY


@pytest.mark.parametrize("via", ["auto", on_gpu("triton"), on_gpu("dlpack")])
def test_qsa_chain_rounds(via):
    """Rings, compressed keys and outputs after each accept length, against one row a step."""
    on_device = {} if via == "auto" else dict(head_dim=64, dtype="bfloat16", via=via)
    model = Model(requests=REQUESTS, num_draft=DEPTH, pages_per_seq=5, **on_device)
    q_len, start = DEPTH + 1, ints(18, 19, 20, 37)
    count = ROUNDS * q_len
    truth = model.rows(REQUESTS * count).reshape(REQUESTS, count, -1)
    steps = [
        jax.jit(functools.partial(
            model.step, cu_seqlens_q=np.arange(REQUESTS + 1, dtype=np.int32) * rows,
            num_decodes=REQUESTS, decode_query_len=rows,
        ))
        for rows in (1, q_len)
    ]  # fmt: skip
    state, expected = model.state(), []
    for place in range(count):
        out, state = steps[0](truth[:, place], state, start + place + 1)
        expected.append(np.asarray(out, np.float32))
    expected = np.stack(expected, 1)
    alone, state, done = state, model.state(), np.zeros(REQUESTS, np.int32)
    for turn in range(ROUNDS):
        wanted = np.array([(request + turn) % REQUESTS for request in range(REQUESTS)])
        x = np.array(model.rows(REQUESTS * q_len, 50 + turn)).reshape(REQUESTS, q_len, -1)
        for request, kept in enumerate(1 + wanted):
            at = done[request]
            x[request, :kept] = truth[request, at : at + kept]
        out, state = steps[1](x.reshape(REQUESTS * q_len, -1), state, start + done + q_len)
        out = np.asarray(out, np.float32).reshape(x.shape)
        eps = float(ml_dtypes.finfo(model.dtype).eps)
        for request, kept in enumerate(1 + wanted):
            found, right = out[request, :kept], expected[request, done[request] :][:kept]
            assert np.abs(found - right).max() <= 32 * eps * np.abs(right).max()
        done += 1 + wanted.astype(np.int32)
    table, groups_per_page = np.asarray(state["page_table"]), model.page_size // 4
    for request, length in enumerate(start + done):
        groups = np.arange(length // 4)
        places = table[request, groups // groups_per_page], groups % groups_per_page
        caches = [np.asarray(s["compressed_cache"], np.float32)[places] for s in (state, alone)]
        assert np.array_equal(*caches), request


def metadata_of(positions, requests, ratio):
    visible = [0 if request < 0 else (at + 1) // ratio
               for request, at in zip(requests, positions, strict=True)]  # fmt: skip
    return qsa.Metadata(*(ints(*x) for x in (requests, positions, visible, [-1] * len(requests))))


def test_reused_selection_by_hand():
    """Ratio 2, rows up to 3 tokens later: groups that were completed since are added."""
    selected = ints([0, -1, -1], [1, 4, 6])  # of positions 4 and 13: 2 and 7 groups are complete
    metadata = metadata_of([4, 5, 6, 7, -1, 13, 14, 15, 16], [0, 0, 0, 0, -1, 1, 1, 1, 1], 2)
    options = dict(compress_ratio=2, num_draft=3)
    reused = speculative.reuse_selection(selected, ints(4, 13), metadata, **options)
    assert reused.tolist() == [
        [0, -1, -1, -1, -1], [0, 2, -1, -1, -1], [0, 2, -1, -1, -1], [0, 2, 3, -1, -1], [-1] * 5,
        [1, 4, 6, -1, -1], [1, 4, 6, -1, -1], [1, 4, 6, 7, -1], [1, 4, 6, 7, -1],
    ]  # fmt: skip


@pytest.mark.parametrize("ratio", [2, 4])
def test_reused_selection_keeps_every_token(ratio):
    """A budget for all groups: row 0's selection gives each draft row the tokens that its own
    selection would; a small one: its groups, and every token since."""
    rng, q_len, page_size = np.random.default_rng(ratio), 11, 16
    starts = [0, 1, 6, 7, 8, 30, 31, 63]
    batch = len(starts)
    lengths = ints(*(start + q_len for start in starts))
    table = rng.permutation(batch * 5).reshape(batch, 5).astype(np.int32)
    offsets = np.arange(batch + 1, dtype=np.int32) * q_len
    sizes = dict(num_pages=batch * 5, page_size=page_size, compress_ratio=ratio)
    counts = dict(num_decodes=batch, decode_query_len=q_len)
    metadata, _ = qsa.build_metadata(table, lengths, offsets, num_rows=batch * q_len, **sizes,
                                     **counts)  # fmt: skip
    query = inputs.normal(rng, (batch * q_len, 2, 16), np.dtype("float32"))
    keys = inputs.normal(rng, (batch * 5, page_size // ratio, 1, 16), np.dtype("float32"))
    first = qsa.Metadata(*(x[::q_len] for x in metadata))
    for budget in (128, 2 * ratio):
        options = dict(budget=budget, compress_ratio=ratio)
        chosen = qsa.select(query[::q_len], keys, table, first, **options)
        positions = ints(*starts)
        reused = speculative.reuse_selection(
            chosen, positions, metadata, compress_ratio=ratio, num_draft=q_len - 1
        )
        tokens, number = qsa.expand(reused, metadata, compress_ratio=ratio)
        own = qsa.select(query, keys, table, metadata, **options)
        wanted, wanted_number = qsa.expand(own, metadata, compress_ratio=ratio)
        for row in range(batch * q_len):
            request, later = divmod(row, q_len)
            found = np.asarray(tokens)[row, : number[row]].tolist()
            if budget == 128:
                assert found == np.asarray(wanted)[row, : wanted_number[row]].tolist()
            groups = [int(g) for g in chosen[request] if g >= 0]
            since = (starts[request] + 1) // ratio * ratio
            expected = [g * ratio + i for g in groups for i in range(ratio)]
            assert found == expected + list(range(since, starts[request] + later + 1))


MASK = np.ones((2, 3, 3), bool)
TOKENS = np.zeros((2, 3), np.int32)
PROBS = np.ones((2, 3, 5), np.float32)
CACHE = PagedKVCache.zeros(2, 2, 1, 4, dtype="float32")
WRONG = [
    ("lengths", lambda: speculative.chain_mask(TOKENS, q_len=3), ValueError,
     "lengths must be int32 [batch], got int32 [2, 3]"),
    ("q_len", lambda: speculative.chain_mask(ints(1), q_len=0), ValueError, "q_len must be in [1"),
    ("parents", lambda: speculative.tree_mask(MASK), TypeError,
     "parents must be int32 [batch, q_len], got bool [2, 3, 3]"),
    ("no_rows", lambda: speculative.tree_mask(TOKENS[:, :0]), ValueError, "q_len must be in [1"),
    ("tree_lengths", lambda: speculative.tree_mask(TOKENS, ints(1)), ValueError,
     "lengths must be int32 [batch] = [2], got int32 [1]"),
    ("later_parent", lambda: speculative.tree_mask(ints([-1, 0, 0], [-1, 0, 2])), ValueError,
     "parents must be earlier rows: that of row 2 must be in [0, 2), got 2 in request 1"),
    ("tokens", lambda: speculative.accept([1], TOKENS, MASK), TypeError,
     "tokens must be an array, got list"),
    ("no_tokens", lambda: speculative.accept(TOKENS[:, :0], TOKENS[:, :0], MASK[:, :0, :0]),
     ValueError, "q_len must be in [1"),
    ("vocab", lambda: speculative.accept_sampled(
        jax.random.key(0), TOKENS, PROBS[:, 1:, :0], PROBS[..., :0], ints(3, 3)), ValueError,
     "vocab must be in [1"),
    ("metadata", lambda: speculative.reuse_selection(
        TOKENS, ints(1, 1), None, compress_ratio=2, num_draft=1), TypeError,
     "metadata must be a qsa.Metadata, got NoneType"),
    ("targets", lambda: speculative.accept(TOKENS, TOKENS.astype(np.int64), MASK), TypeError,
     "targets must be int32 [batch, q_len] = [2, 3], got int64 [2, 3]"),
    ("mask", lambda: speculative.accept(TOKENS, TOKENS, MASK[:, :2]), ValueError,
     "draft_mask must be bool [batch, q_len, q_len] = [2, 3, 3], got bool [2, 2, 3]"),
    ("draft_probs", lambda: speculative.accept_sampled(
        jax.random.key(0), TOKENS, PROBS, PROBS, ints(3, 3)), ValueError,
     "draft_probs must be float32 [batch, 2, vocab] = [2, 2, 5], got float32 [2, 3, 5]"),
    ("cache", lambda: speculative.compact((1, 2), TOKENS, ints(1, 1), TOKENS), TypeError,
     "cache must be a PagedKVCache, got tuple"),
    ("rows", lambda: speculative.compact(CACHE, TOKENS, ints(1, 1), TOKENS[:1]), ValueError,
     "rows must be int32 [batch, q_len] = [2, q_len], got int32 [1, 3]"),
    ("selected", lambda: speculative.reuse_selection(
        TOKENS, ints(1), metadata_of([0], [0], 2), compress_ratio=2, num_draft=1), ValueError,
     "positions must be int32 [num_requests] = [2], got int32 [1]"),
    ("num_draft", lambda: speculative.reuse_selection(
        TOKENS, ints(1, 1), metadata_of([0], [0], 2), compress_ratio=2, num_draft=-1), ValueError,
     "num_draft must be in [0"),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong[0])
def test_errors(wrong):
    _, call, error, message = wrong
    with pytest.raises(error, match="^" + re.escape(message)):
        call()


def test_annotations_hold(enforce_annotations):
    """Every call once, with annotations checked."""
    mask = speculative.chain_mask(ints(1, 3), q_len=3)
    assert np.array_equal(mask, speculative.tree_mask(ints([-1, 0, 1], [-1, 0, 1]), ints(1, 3)))
    accepted = speculative.accept(TOKENS, TOKENS, mask)
    speculative.accept_sampled(jax.random.key(0), TOKENS, PROBS[:, 1:], PROBS, ints(1, 3))
    speculative.compact(CACHE, TOKENS[:, :2], ints(0, 0), accepted.rows)
    speculative.reuse_selection(
        TOKENS, ints(1, 1), metadata_of([0], [0], 2), compress_ratio=2, num_draft=1
    )
