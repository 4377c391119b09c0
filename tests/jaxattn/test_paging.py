"""The page allocator against a model in Python, and PagedKVCache against the plain calls."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxattn
from jaxattn import PagedKVCache, paging
from tests import compare, inputs, kv_model
from tests.jaxattn.qsa.model import Model

BATCH, PAGES_PER_SEQ, PAGE_SIZE, NUM_PAGES = 6, 5, 4, 17
MAX_LEN = PAGES_PER_SEQ * PAGE_SIZE
STEPS = 10_000


def ints(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def empty(**sizes: int) -> paging.PagePool:
    defaults = dict(
        num_pages=NUM_PAGES, page_size=PAGE_SIZE, batch=BATCH, pages_per_seq=PAGES_PER_SEQ
    )
    return paging.PagePool.empty(**defaults | sizes)


class Page:
    """A page of the model; its tokens are those of whoever wrote them."""

    def __init__(self):
        self.tokens = [0] * PAGE_SIZE


class Slots:
    """The allocator in Python: each slot has a list of pages and a length."""

    def __init__(self):
        self.pages: list[list[Page]] = [[] for _ in range(BATCH)]
        self.lengths = [0] * BATCH
        self.written = 0

    def serve(self, needs: list[int]) -> list[bool]:
        """In order; from the first that does not fit, none gets a page."""
        left = NUM_PAGES - len({page for pages in self.pages for page in pages})
        served = []
        for need in needs:
            left -= need
            served.append(need == 0 or left >= 0)
        return served

    def alloc(self, lengths: list[int]) -> list[bool]:
        valid = [0 <= length <= MAX_LEN for length in lengths]
        needs = [
            max(0, -(-length // PAGE_SIZE) - len(pages)) if fits else 0
            for length, pages, fits in zip(lengths, self.pages, valid, strict=True)
        ]
        served = self.serve(needs)
        for pages, need, one in zip(self.pages, needs, served, strict=True):
            pages += [Page() for _ in range(need if one else 0)]
        return [a and b for a, b in zip(valid, served, strict=True)]

    def append(self, counts: list[int]) -> list[bool]:
        ok = self.alloc([
            n + count if count >= 0 else -1 for n, count in zip(self.lengths, counts, strict=True)
        ])  # fmt: skip
        for slot in range(BATCH):
            for _ in range(counts[slot] if ok[slot] else 0):
                page, offset = divmod(self.lengths[slot], PAGE_SIZE)
                self.written += 1
                self.pages[slot][page].tokens[offset] = self.written
                self.lengths[slot] += 1
        return ok

    def fork(self, parents: list[int], lengths: list[int]) -> list[bool]:
        before, lengths_before = [list(pages) for pages in self.pages], list(self.lengths)
        valid = [
            0 <= p < BATCH and not before[slot] and 0 <= lengths[slot] <= lengths_before[p]
            for slot, p in enumerate(parents)
        ]
        partial = [int(v and n % PAGE_SIZE > 0) for v, n in zip(valid, lengths, strict=True)]
        served = self.serve(partial)
        for slot, p in enumerate(parents):
            if valid[slot] and served[slot]:
                full = lengths[slot] // PAGE_SIZE
                self.pages[slot] = before[p][:full]
                self.lengths[slot] = lengths[slot]
                if partial[slot]:
                    self.pages[slot].append(Page())
                    self.pages[slot][-1].tokens = list(before[p][full].tokens)
        return [p == -1 or (v and s) for p, v, s in zip(parents, valid, served, strict=True)]

    def free(self, done: list[bool]) -> list[bool]:
        for slot in np.flatnonzero(done):
            self.pages[slot], self.lengths[slot] = [], 0
        return [True] * BATCH


def operation(pool, memory, written, kind, arguments):
    """One step of the allocator, and tokens written as the caches would get them: `memory` is
    [num_pages, page_size], `written` the last token."""
    nothing = paging.PageCopies(jnp.full(BATCH, -1, jnp.int32), jnp.full(BATCH, -1, jnp.int32))
    first, second = arguments

    def fork(pool):
        return paging.fork(pool, first, second)

    calls = (
        lambda pool: (*paging.alloc(pool, first), nothing),
        lambda pool: (*paging.append(pool, first), nothing),
        fork,
        lambda pool: (paging.free(pool, first > 0), jnp.ones(BATCH, bool), nothing),
    )
    before = pool.seq_lens
    pool, ok, copies = jax.lax.switch(kind, calls, pool)
    memory = paging.copy_pages(memory, *copies)
    new = jnp.where(kind == 1, pool.seq_lens - before, 0)
    column = jnp.arange(MAX_LEN, dtype=jnp.int32)
    writes = (column >= before[:, None]) & (column < (before + new)[:, None])
    tokens = written + jnp.cumsum(writes.reshape(-1), dtype=jnp.int32).reshape(writes.shape)
    page = jnp.where(writes, pool.page_table[:, column // PAGE_SIZE], NUM_PAGES)
    memory = memory.at[page, column % PAGE_SIZE].set(tokens, mode="drop")
    return pool, memory, written + jnp.sum(new), ok


def random_operations(seed: int):
    """Kinds [steps] and arguments [steps, 2, batch]; short requests, and now and then nonsense."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice(4, STEPS, p=[0.15, 0.45, 0.2, 0.2]).astype(np.int32)
    few = rng.random((STEPS, BATCH)) < 0.4
    odd = rng.random((STEPS, BATCH)) < 0.02
    nonsense = rng.choice([-1, -(2**31), 2**31 - 1, MAX_LEN + 1, BATCH], (STEPS, BATCH))
    by_kind = (
        rng.integers(0, MAX_LEN + 1, (STEPS, BATCH)),
        rng.integers(0, 8, (STEPS, BATCH)),
        rng.integers(0, BATCH, (STEPS, BATCH)),
        rng.integers(0, 2, (STEPS, BATCH)),
    )
    idle = (0, 0, -1, 0)
    choices = [np.where(few, x, n) for x, n in zip(by_kind, idle, strict=True)]
    first = np.choose(kinds[:, None], choices)
    first = np.where(odd & (kinds < 3)[:, None], nonsense, first)
    second = rng.integers(0, MAX_LEN // 2, (STEPS, BATCH))
    second = np.where(odd, nonsense, second)
    return kinds, np.stack([first, second], 1).astype(np.int32)


def test_random_steps_equal_the_model():
    """10,000 steps in one scan: every table, length, count and token as the model has them."""
    kinds, arguments = random_operations(seed=0)

    def body(carry, step):
        *carry, ok = operation(*carry, *step)
        return carry, (carry[0], carry[1], ok, carry[0].num_free)

    start = (empty(), jnp.zeros((NUM_PAGES, PAGE_SIZE), jnp.int32), jnp.int32(0))
    _, states = jax.jit(lambda xs: jax.lax.scan(body, list(start), xs))((kinds, arguments))
    pools, memories, oks, frees = jax.tree.map(np.asarray, states)
    model, refused, shared = Slots(), 0, 0
    ids: dict[Page, int] = {}
    for step in range(STEPS):
        first, second = arguments[step].tolist()
        kind = ("alloc", "append", "fork", "free")[kinds[step]]
        given = {"fork": (first, second), "free": ([x > 0 for x in first],)}.get(kind, (first,))
        ok = getattr(model, kind)(*given)
        table, memory = pools.page_table[step], memories[step]
        assert oks[step].tolist() == ok, (step, kind, given)
        assert pools.seq_lens[step].tolist() == model.lengths
        owned = {page for pages in model.pages for page in pages}
        ids = {page: ids[page] for page in owned & ids.keys()}
        for slot, pages in enumerate(model.pages):
            assert (table[slot, len(pages) :] == -1).all()
            for page, at in zip(pages, table[slot], strict=False):
                assert ids.setdefault(page, int(at)) == at, f"step {step}: another page"
            tokens = [token for page in pages for token in page.tokens][: model.lengths[slot]]
            assert memory[table[slot, : len(pages)]].reshape(-1)[: len(tokens)].tolist() == tokens
        assert len(set(ids.values())) == len(ids), f"step {step}: a page twice"
        counts = np.bincount(table[table >= 0], minlength=NUM_PAGES)
        assert pools.ref_counts[step].tolist() == counts.tolist()
        assert frees[step] == NUM_PAGES - len(owned)
        refused += ok.count(False)
        shared += bool((counts > 1).any())
    assert refused > 1000 and shared > 1000, "the steps must fill the pool and share pages"


def test_out_of_pages():
    """Requests are served in order; one that gets nothing stays as it was, others go on."""
    pool, ok = paging.append(empty(num_pages=3, batch=4), ints(4, 5, 4, 0))
    assert ok.tolist() == [True, True, False, True]
    assert pool.seq_lens.tolist() == [4, 5, 0, 0] and pool.num_free == 0
    pool, ok = paging.append(pool, ints(1, 3, 1, 0))
    assert ok.tolist() == [False, True, False, True], "page 1 of request 1 has room for 3 more"
    pool = paging.free(pool, jnp.array([False, True, False, False]))
    pool, ok = paging.append(pool, ints(1, 0, 9, 0))
    assert ok.tolist() == [True, True, False, True] and pool.num_free == 1
    pool, ok, copies = paging.fork(pool, ints(-1, 0, 0, 0), ints(0, 1, 4, 2))
    assert ok.tolist() == [True, True, True, False], "no page for the second copy"
    assert copies.source.tolist() == [-1, pool.page_table[0, 0], -1, -1]
    assert pool.ref_counts.tolist().count(2) == 1


def test_one_program_without_copies_of_the_state():
    """Other lengths do not compile; a step in jit equals the call; donated state is reused."""
    traces = []

    def step(pool, counts):
        traces.append(1)
        pool, ok = paging.append(pool, counts)
        return paging.free(pool, ~ok)

    jitted, pool = jax.jit(step, donate_argnums=0), empty()
    for counts in (ints(1, 2, 3, 4, 5, 0), ints(1, 1, 1, 1, 1, 25), ints(3, 0, 3, 0, 3, 0)):
        expected = step(pool, counts)
        pool = jitted(pool, counts)
        jax.tree.map(np.testing.assert_array_equal, pool, expected)
    assert len(traces) == 4


def test_vmap_and_x64():
    """Two pools as one, and with 64-bit types on: the same int32 results."""
    calls = (ints(1, 2, 3, 4, 5, 0), ints(9, 9, 9, 20, 9, 9))

    @jax.jit
    def work(counts):
        pool, ok = paging.append(empty(), counts)
        pool, more, copies = paging.fork(pool, ints(-1, -1, -1, -1, -1, 1), ints(0, 0, 0, 0, 0, 2))
        return paging.free(pool, ~ok), more, copies, pool.num_free

    expected = [work(counts) for counts in calls]
    both = jax.vmap(work)(jnp.stack(calls))
    for index, one in enumerate(expected):
        jax.tree.map(lambda x, y, i=index: np.testing.assert_array_equal(x[i], y), both, one)
    with jax.enable_x64(True):
        wide = work(calls[0])
    for x, y in zip(jax.tree.leaves(wide), jax.tree.leaves(expected[0]), strict=True):
        assert kv_model.same_bits(np.asarray(x), np.asarray(y))


def test_shard_map():
    """Each device has its own pool and caches."""

    def work(counts, parents, cache):
        pool, ok = paging.append(empty(num_pages=7, batch=3, pages_per_seq=3), counts)
        pool, _, copies = paging.fork(pool, parents)
        return paging.free(pool, counts == 3), ok, cache.copy_pages(*copies)

    rows = np.arange(14 * 4 * 8, dtype=np.float32).reshape(14, 4, 1, 8)
    arguments = (ints(5, 0, 3, 2, 0, 1), ints(-1, 0, -1, -1, 2, -1), PagedKVCache(rows, -rows))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    sharded = jax.jit(jax.shard_map(work, mesh=mesh, in_specs=spec, out_specs=spec))
    halves = [jax.tree.map(lambda x, i=i: np.split(x, 2)[i], arguments) for i in range(2)]
    one, other = (jax.jit(work)(*half) for half in halves)
    both = jax.tree.map(lambda *x: np.concatenate(x), one, other)
    jax.tree.map(np.testing.assert_array_equal, sharded(*arguments), both)


gpu = pytest.mark.gpu


@pytest.mark.parametrize(
    ("kv_layout", "dtype"),
    [
        ("HND", "bfloat16"),
        ("NHD", "float8_e4m3fn"),
        pytest.param("NHD", "bfloat16", marks=gpu),
        pytest.param("HND", "float8_e4m3fn", marks=gpu),
    ],
)
def test_forked_requests_go_their_own_way(kv_layout, dtype):
    """A prefix of two and a half pages, forked twice, then different tokens in each request: every
    request attends to what it alone would have."""
    rng, batch, page_size, length = np.random.default_rng(0), 4, 16, 40
    scales = dict(k_scale=0.5, v_scale=2.0)
    pool = empty(num_pages=13, page_size=page_size, batch=batch)
    cache = PagedKVCache.zeros(13, page_size, 2, 64, dtype=dtype, kv_layout=kv_layout, **scales)
    # What was never written may be NaN.
    cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if jnp.ndim(x) else x, cache)

    def rows(count):
        return rng.normal(size=(2, count, 2, 64)).astype(ml_dtypes.bfloat16)

    @functools.partial(jax.jit, donate_argnums=0)
    def add(cache, pool, new, counts):
        before, each = pool.seq_lens, new.shape[1] // batch
        pool, ok = paging.append(pool, counts)
        request = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), each)
        offset = jnp.tile(jnp.arange(each, dtype=jnp.int32), batch)
        positions = jnp.where(offset < counts[request], before[request] + offset, -1)
        places = dict(positions=positions, request_ids=request)
        return cache.append_kv(*new, pool.page_table, **places), pool, ok.all()

    prompt = rows(batch * length)
    cache, pool, ok = add(cache, pool, prompt, ints(0, length, 0, 0))
    assert ok
    pool, ok, copies = paging.fork(pool, ints(1, -1, 1, -1), ints(40, 0, 33, 0))
    cache = jax.jit(PagedKVCache.copy_pages, donate_argnums=0)(cache, *copies)
    assert ok.all() and pool.ref_counts.max() == 3 and pool.num_free == 13 - 5
    first = prompt[:, length : 2 * length]
    have = [[first], [first], [first[:, :33]]]
    for _ in range(9):
        new = rows(batch)
        cache, pool, ok = add(cache, pool, new, ints(1, 1, 1, 0))
        assert ok
        for request, parts in enumerate(have):
            parts.append(new[:, request, None])
    assert pool.seq_lens.tolist() == [49, 49, 42, 0]
    query = rows(2 * batch)[0].reshape(batch, 4, 64)
    out = jax.jit(PagedKVCache.decode)(cache, query, pool.page_table, pool.seq_lens)
    whole = np.zeros((2, batch, 64, 2, 64), inputs.DTYPES[dtype])
    for request, parts in enumerate(have):
        tokens = np.concatenate(parts, 1)
        for target, new, scale in zip(whole, tokens, scales.values(), strict=True):
            target[request, : len(new)] = kv_model.stored(new, target.dtype, scale)
    alone = dict(
        query=query,
        key_cache=whole[0],
        value_cache=whole[1],
        page_table=np.arange(batch, dtype=np.int32)[:, None],
        seq_lens=np.asarray(pool.seq_lens),
    )
    compare.check_attention(alone | scales, np.asarray(out))


def test_forked_qsa_request():
    """Rings and compressed caches are copied like pages: the child continues as its parent does."""
    model = Model(layers=1, requests=3)
    state, lengths = model.state(), ints(37, 0, 0)
    pool = empty(num_pages=model.pages, page_size=16, batch=3, pages_per_seq=6)
    pool, _ = paging.append(pool, lengths)
    step = jax.jit(
        functools.partial(
            model.step, cu_seqlens_q=np.arange(4, dtype=np.int32), num_decodes=3, decode_query_len=1
        )
    )
    # A ring whose rows differ, of a group with two of its four tokens.
    state |= dict(ring=jax.random.normal(jax.random.key(5), state["ring"].shape))
    parents = ints(-1, 0, -1)
    pool, _, copies = paging.fork(pool, parents)
    names = ("key_cache", "value_cache", "compressed_cache")
    state |= {name: paging.copy_pages(state[name], *copies) for name in names}
    slots = jnp.where(parents >= 0, jnp.arange(3, dtype=jnp.int32), -1)
    state["ring"] = paging.copy_pages(state["ring"], parents, slots)
    for seed in range(6):
        pool, _ = paging.append(pool, ints(1, 1, 0))
        state["page_table"] = pool.page_table
        x = jnp.tile(model.rows(1, seed), (3, 1))
        out, state = step(x, state, pool.seq_lens)
        np.testing.assert_array_equal(out[0], out[1])
    assert pool.seq_lens.tolist() == [43, 43, 0] and pool.page_table[0, 2] != pool.page_table[1, 2]


def test_copied_pages_are_written_in_place():
    """Donated caches keep their memory, and nothing of their size is made."""
    cache = PagedKVCache.zeros(512, 16, 2, 64, dtype="float32")
    compiled = jax.jit(PagedKVCache.copy_pages, donate_argnums=0)
    compiled = compiled.lower(cache, ints(3, -1), ints(5, -1)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < cache.key_cache.nbytes // 8
    assert not re.search(r"f32\[512,16,2,64\]\S* copy\(", compiled.as_text())
    before = cache.key_cache.unsafe_buffer_pointer()
    assert compiled(cache, ints(3, -1), ints(5, -1)).key_cache.unsafe_buffer_pointer() == before


CASES = [
    inputs.Case("plain", (5, 17, 0)),
    inputs.Case("hnd_scaled", (9, 30), dtype="bfloat16", kv_dtype="float8_e4m3fn", kv_layout="HND",
                options=dict(k_scale=0.25, v_scale=0.5)),
    inputs.Case("chunks", (25, 17), q_lens=(5, 17), kv_layout="HND"),
    inputs.Case("chunks_scaled", (25, 9), q_lens=(5, 1), dtype="float16", kv_dtype="float8_e5m2",
                options=dict(k_scale=np.float32(0.25), v_scale=0.5)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cache_passes_its_layout_and_scales_on(case):
    """decode, prefill and append_kv as the plain calls, bit for bit, inside jit."""
    arguments = {name: inputs.to_jax(x) for name, x in case.make().items()}
    expected = getattr(jaxattn, case.phase)(**arguments)
    names = ("key_cache", "value_cache", "k_scale", "v_scale", "kv_layout")
    given = {name: arguments.pop(name) for name in names if name in arguments}
    cache = PagedKVCache(**given)
    assert cache.page_size == 8 and cache.dtype == given["key_cache"].dtype
    static = {n: arguments.pop(n) for n in ("q_len", "max_seqlen_q") if n in arguments}
    call = functools.partial(getattr(PagedKVCache, case.phase), **static)
    assert np.array_equal(jax.jit(lambda c, a: call(c, **a))(cache, arguments), expected)
    table, query = arguments["page_table"], arguments["query"]
    key, positions = query[: len(table), :2], arguments["seq_lens"] - 1
    results = jax.jit(PagedKVCache.append_kv)(cache, key, key + 1, table, positions=positions)
    caches = jaxattn.append_kv(key, key + 1, **given, page_table=table, positions=positions)
    for actual, wanted in zip((results.key_cache, results.value_cache), caches, strict=True):
        assert kv_model.same_bits(np.asarray(actual), np.asarray(wanted))
    assert results.kv_layout == cache.kv_layout


def test_steps_with_scales_compile_once():
    """A number as scale comes back as an array, and the next step takes it."""
    traces = []

    @functools.partial(jax.jit, donate_argnums=0)
    def step(caches, positions):
        traces.append(1)
        key, table = jnp.ones((2, 1, 8)), jnp.arange(4, dtype=jnp.int32).reshape(2, 2)
        caches = [cache.append_kv(key, key, table, positions=positions) for cache in caches]
        return caches, caches[1].decode(jnp.ones((2, 1, 8)), table, positions + 1)

    new = functools.partial(PagedKVCache.zeros, 4, 4, 1, 8, dtype="float8_e4m3fn")
    caches = [new(k_scale=0.5), new(v_scale=2.0)]
    for position in range(3):
        caches, out = step(caches, jnp.full(2, position, jnp.int32))
        np.testing.assert_array_equal(out, jnp.ones((2, 1, 8)))
    assert len(traces) == 1 and float(np.float32(caches[0].key_cache[0, 0, 0, 0])) == 2.0


POOL = empty()
WRONG = [
    ("batch", lambda: empty(batch=0), ValueError, "batch must be in [1, "),
    ("pages", lambda: empty(num_pages=2.5), TypeError, "num_pages must be a Python int known"),
    ("tokens", lambda: empty(page_size=2**20, pages_per_seq=4096), ValueError,
     "pages_per_seq * page_size must be in [1, "),
    ("pool", lambda: paging.free(None, jnp.ones(6, bool)), TypeError,
     "pool must be a PagePool, got NoneType"),
    ("lengths", lambda: paging.alloc(POOL, ints(1, 2)), ValueError,
     "lengths must be int32 [batch] = [6], got int32 [2]"),
    ("counts", lambda: paging.append(POOL, jnp.ones(6)), TypeError,
     "counts must be int32 [batch] = [6], got float32 [6]"),
    ("list", lambda: paging.append(POOL, [1] * 6), TypeError, "counts must be an array, got list"),
    ("parents", lambda: paging.fork(POOL, np.zeros(6, np.int64)), TypeError,
     "parents must be int32 [batch] = [6], got int64 [6]"),
    ("fork_lengths", lambda: paging.fork(POOL, ints(*[-1] * 6), ints(1)), ValueError,
     "lengths must be int32 [batch] = [6], got int32 [1]"),
    ("done", lambda: paging.free(POOL, ints(*[0] * 6)), TypeError,
     "done must be bool [batch] = [6], got int32 [6]"),
    ("source", lambda: paging.copy_pages(jnp.ones(3), jnp.ones(2), ints(1, 2)), TypeError,
     "source must be int32 [copies], got float32 [2]"),
    ("target", lambda: paging.copy_pages(jnp.ones(3), ints(0), ints(1, 2)), ValueError,
     "target must be int32 [copies] = [1], got int32 [2]"),
    ("array", lambda: paging.copy_pages(jnp.float32(3), ints(0), ints(1)), ValueError,
     "array must have pages on its first axis, got shape ()"),
    ("no_pages", lambda: paging.copy_pages(jnp.ones((0, 3)), ints(0), ints(1)), ValueError,
     "array must have pages on its first axis, got shape (0, 3)"),
    ("dtype", lambda: PagedKVCache.zeros(4, 4, 1, 8, dtype="int8"), TypeError,
     "dtype must be bfloat16 or float16 or float32 or float8_e4m3fn or float8_e5m2, got 'int8'"),
    ("layout", lambda: PagedKVCache.zeros(4, 4, 1, 8, dtype="float32", kv_layout="HDN"),
     ValueError, "kv_layout must be"),
    ("size", lambda: PagedKVCache.zeros(4, 0, 1, 8, dtype="float32"), ValueError,
     "page_size must be in [1, "),
    ("scale", lambda: PagedKVCache.zeros(4, 4, 1, 8, dtype="float32", v_scale=-1), ValueError,
     "v_scale must be a positive finite"),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong[0])
def test_errors(wrong):
    _, call, error, message = wrong
    with pytest.raises(error, match="^" + re.escape(message)):
        call()


def test_annotations_hold(enforce_annotations):
    """Every call once, with annotations checked."""
    pool, _ = paging.alloc(empty(), ints(1, 2, 3, 4, 5, 0))
    pool, _ = paging.append(pool, ints(1, 2, 3, 4, 5, 0))
    pool, _, copies = paging.fork(pool, ints(-1, -1, -1, -1, -1, 0))
    cache = PagedKVCache.zeros(NUM_PAGES, PAGE_SIZE, 1, 8, dtype=jnp.float32)
    cache = cache.copy_pages(*copies)
    paging.free(pool, jnp.ones(BATCH, bool))
    assert dataclasses.replace(cache, k_scale=1.0).k_scale == 1.0
