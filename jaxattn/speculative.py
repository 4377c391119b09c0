"""Speculative decoding: which drafts see which, which are accepted, and what then moves.

A verify step runs `q_len` rows for each request, packed as `decode` takes them: row 0 is the token
picked last, which is in no cache yet, and the others are drafts that continue it, as a chain or as
a tree. Row i lies at position seq_lens + i of its request, seq_lens without the step. `decode` gets
seq_lens + q_len, or 0 for an empty slot, and the page table must have room for that
(`paging.alloc`). Where a request has fewer drafts, the rest are rows too, which no other sees; they
are written into the caches. After the step, seq_lens grows by the rows that `accept` kept
(`paging.append`); what rejected drafts left in the caches is never seen, and the next step writes
over it.

QSA takes chains, and needs nothing else where its rings have `qsa.ring_rows(compress_ratio,
num_draft)` rows.

A step of a server, with `jaxattn.paging`:

```python
import jax, jax.numpy as jnp, jaxattn
from jaxattn import paging, speculative

sizes = dict(num_pages=64, page_size=16)
pool = paging.PagePool.empty(**sizes, batch=4, pages_per_seq=8)  # four empty slots
cache = jaxattn.PagedKVCache.zeros(*sizes.values(), 2, 64, dtype=jnp.bfloat16)
pool, ok = paging.append(pool, jnp.array([20, 7, 0, 0], jnp.int32))  # two prompts join
pool, ok, copies = paging.fork(pool, jnp.array([-1, -1, 0, -1], jnp.int32))  # slot 2 is slot 0's
cache = cache.copy_pages(*copies)


@jax.jit  # a verify step: the last token of each request and two drafts for the place after it
def verify(cache, pool, tokens, query, key, value):
    rows = jnp.where(pool.seq_lens > 0, 3, 0)
    pool, ok = paging.alloc(pool, pool.seq_lens + rows)
    rows = jnp.where(ok, rows, 0)  # who got no page waits for a later step
    mask = speculative.tree_mask(jnp.array([[-1, 0, 0]] * 4, jnp.int32), rows)
    positions = pool.seq_lens[:, None] + jnp.arange(3, dtype=jnp.int32)
    places = dict(
        positions=jnp.where(rows[:, None] > 0, positions, -1).reshape(-1),
        request_ids=jnp.repeat(jnp.arange(4, dtype=jnp.int32), 3),
    )
    cache = cache.append_kv(key, value, pool.page_table, **places)
    lengths = jnp.where(rows > 0, pool.seq_lens + rows, 0)
    out = cache.decode(query, pool.page_table, lengths, q_len=3, draft_mask=mask)
    targets = jnp.argmax(out[:, 0], -1).astype(jnp.int32).reshape(4, 3)  # in place of a model
    accepted = speculative.accept(tokens, targets, mask)
    cache = speculative.compact(cache, pool.page_table, pool.seq_lens, accepted.rows)
    pool, _ = paging.append(pool, accepted.counts)  # row 0 and the accepted drafts
    return out, cache, pool, accepted.next_tokens


tokens = jnp.zeros((4, 3), jnp.int32)
query, key = jnp.ones((12, 8, 64), jnp.bfloat16), jnp.ones((12, 2, 64), jnp.bfloat16)
out, cache, pool, next_tokens = verify(cache, pool, tokens, query, key, key)
pool = paging.free(pool, jnp.array([False, True, False, False]))
```
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float32, Int32

from torch_core import checks
from torch_core.qsa import Metadata

from . import _launch
from .decode import AnyArray
from .paged_cache import PagedKVCache


class Accepted(NamedTuple):
    """What a verify step leaves of each request.

    Fields:
        counts: int32 [batch], rows to keep: row 0 and the accepted drafts; 0 without rows.
        rows: int32 [batch, q_len], those rows in their order, then -1.
        next_tokens: int32 [batch], what the model picked after the last of them; -1 without rows.
    """

    counts: Any
    rows: Any
    next_tokens: Any


def chain_mask(
    lengths: Int32[AnyArray, " batch"], *, q_len: int
) -> Bool[Array, "batch {q_len} {q_len}"]:
    """The draft mask of chains, also of different lengths: a row sees itself and those before it.

    Where all requests have q_len rows it is what `decode` does without a mask.

    Args:
        lengths: int32 [batch], rows of each request, row 0 included; the rest is padding, which
            sees no row of the step and is seen by none. 0: a slot without a request.
        q_len: rows of the step, a Python int.

    Returns:
        bool [batch, q_len, q_len] for `decode(draft_mask=...)` and `accept`.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype, while tracing.
    """
    checks.Shapes().check("lengths", lengths, ("int32",), ("batch",))
    _launch.require_jax(lengths=lengths)
    checks.integer("q_len", q_len, 1)
    row = jnp.arange(q_len)
    real = row < jnp.asarray(lengths)[:, None]
    return (row[:, None] >= row) & real[:, :, None]


def tree_mask(
    parents: Int32[AnyArray, "batch q_len"], lengths: Int32[AnyArray, " batch"] | None = None
) -> Bool[Array, "batch q_len q_len"]:
    """The draft mask of token trees: a row sees itself and its ancestors.

    A row stands `mask.sum(-1) - 1` tokens after row 0: add that to seq_lens for its rotary
    position, while its keys are written at seq_lens + its row.

        parents -1 0 0 1:  1 0 0 0      rows 1 and 2 continue row 0, row 3 continues row 1
                           1 1 0 0
                           1 0 1 0
                           1 1 0 1

    Args:
        parents: int32 [batch, q_len], the row that each row continues, an earlier one; that of row
            0 is not read.
        lengths: int32 [batch], rows of each request as in `chain_mask`; default: all.

    Returns:
        bool [batch, q_len, q_len] for `decode(draft_mask=...)` and `accept`.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype, while tracing.

    Caller's contract: parents come before their children. NumPy's arrays are checked.
    """
    shapes = checks.Shapes()
    shapes.check("parents", parents, ("int32",), ("batch", "q_len"))
    batch, q_len = parents.shape
    checks.integer("q_len", q_len, 1)
    if lengths is None:
        lengths = np.full(batch, q_len, np.int32)
    shapes.check("lengths", lengths, ("int32",), ("batch",))
    _launch.require_jax(parents=parents, lengths=lengths)
    if isinstance(parents, np.ndarray) and isinstance(lengths, np.ndarray):
        wrong = (parents < 0) | (parents >= np.arange(q_len))
        wrong &= np.arange(q_len) < lengths[:, None]
        wrong[:, 0] = False
        if wrong.any():
            request, row = np.argwhere(wrong)[0]
            raise ValueError(
                f"parents must be earlier rows: that of row {row} must be in [0, {row}), got "
                f"{parents[request, row]} in request {request}"
            )
    return _tree_mask(parents, lengths)


def accept(
    tokens: Int32[AnyArray, "batch q_len"],
    targets: Int32[AnyArray, "batch q_len"],
    draft_mask: Bool[AnyArray, "batch q_len q_len"],
) -> Accepted:
    """Accepts the drafts that the model itself would have picked.

    A draft is accepted where its token is the target of the row that it continues, and that row is
    accepted too. Of several accepted paths the longest is kept, of equal ones that which ends in
    the lowest row. With greedy targets the kept tokens are those of decoding one by one.

    Args:
        tokens: int32 [batch, q_len], the step's tokens: row 0, then drafts.
        targets: int32 [batch, q_len], the token that the model picks after each row, for example
            the argmax of its logits.
        draft_mask: of `chain_mask` or `tree_mask`, as `decode` got it.

    Returns:
        Accepted: counts for `paging.append`, rows for `compact`, next_tokens for the next step.

    Raises:
        ValueError, TypeError: an argument of wrong shape or dtype, while tracing.
    """
    shapes = checks.Shapes()
    shapes.check("tokens", tokens, ("int32",), ("batch", "q_len"))
    checks.integer("q_len", shapes["q_len"], 1)
    shapes.check("targets", targets, ("int32",), ("batch", "q_len"))
    shapes.check("draft_mask", draft_mask, ("bool",), ("batch", "q_len", "q_len"))
    _launch.require_jax(tokens=tokens, targets=targets, draft_mask=draft_mask)
    return _accept(tokens, targets, draft_mask)


def accept_sampled(
    key: Array,
    tokens: Int32[AnyArray, "batch q_len"],
    draft_probs: Float32[AnyArray, "batch drafts vocab"],
    target_probs: Float32[AnyArray, "batch q_len vocab"],
    lengths: Int32[AnyArray, " batch"],
) -> Accepted:
    """Accepts drafts of a chain at random, so that tokens have the model's own distribution.

    Draft i is accepted with probability min(1, target_probs / draft_probs) of its token. After the
    first rejected one the next token is drawn from max(0, target_probs - draft_probs), normalised;
    after the last accepted one, from target_probs.

    Args:
        key: a key of jax.random.
        tokens: int32 [batch, q_len], the step's tokens: row 0, then drafts.
        draft_probs: float32 [batch, q_len - 1, vocab], what each draft was drawn from; one-hot for
            a draft that was not drawn.
        target_probs: float32 [batch, q_len, vocab], the model's probabilities after each row.
        lengths: int32 [batch], rows of each request, as in `chain_mask`.

    Returns:
        Accepted, as `accept` returns it.

    Raises:
        ValueError, TypeError: an argument of wrong shape or dtype, while tracing.

    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023),
    algorithm 1.
    """
    shapes = checks.Shapes()
    shapes.check("tokens", tokens, ("int32",), ("batch", "q_len"))
    checks.integer("q_len", shapes["q_len"], 1)
    shapes.check("target_probs", target_probs, ("float32",), ("batch", "q_len", "vocab"))
    checks.integer("vocab", shapes["vocab"], 1)
    axes = ("batch", shapes["q_len"] - 1, "vocab")
    shapes.check("draft_probs", draft_probs, ("float32",), axes)
    shapes.check("lengths", lengths, ("int32",), ("batch",))
    arrays = dict(tokens=tokens, draft_probs=draft_probs, target_probs=target_probs)
    _launch.require_jax(**arrays, lengths=lengths)
    return _accept_sampled(key, *map(jnp.asarray, (*arrays.values(), lengths)))


def compact(
    cache: PagedKVCache,
    page_table: Int32[AnyArray, "batch pages_per_seq"],
    seq_lens: Int32[AnyArray, " batch"],
    rows: Int32[AnyArray, "batch q_len"],
) -> PagedKVCache:
    """Moves the tokens of accepted rows to where a sequence has them.

    That of rows[b, k] goes from position seq_lens[b] + rows[b, k] to seq_lens[b] + k. Chains need
    no move.

    Args:
        cache: of one layer; in place if donated.
        page_table: int32 [batch, pages_per_seq].
        seq_lens: int32 [batch], tokens of each request before the verify step.
        rows: of `accept`.

    Returns:
        The new cache; nothing but accepted rows has changed.

    Raises:
        ValueError, TypeError: an argument of wrong shape or dtype, while tracing.
    """
    if not isinstance(cache, PagedKVCache):
        raise TypeError(f"cache must be a PagedKVCache, got {type(cache).__name__}")
    shapes = checks.Shapes()
    shapes.check("page_table", page_table, ("int32",), ("batch", "pages_per_seq"))
    shapes.check("seq_lens", seq_lens, ("int32",), ("batch",))
    shapes.check("rows", rows, ("int32",), ("batch", "q_len"))
    _launch.require_jax(page_table=page_table, seq_lens=seq_lens, rows=rows)
    return _compact(cache, page_table, seq_lens, rows)


def reuse_selection(
    selected: Int32[AnyArray, "num_requests topk"],
    positions: Int32[AnyArray, " num_requests"],
    metadata: Metadata,
    *,
    compress_ratio: int,
    num_draft: int,
) -> Int32[Array, "num_rows width"]:
    """QSA's selection for rows shortly after one that has been selected for, without new scores.

    Such a row gets the groups of its request's selection, and those that were completed since: its
    own unfinished group begins after them, so without them it would not see the tokens before it.

    Args:
        selected: int32 [num_requests, topk] of `qsa.select`, one row of each request.
        positions: int32 [num_requests], where that row stands in its request.
        metadata: of the rows to serve, at most num_draft tokens later: other rows of the same step,
            or those of a later step.
        compress_ratio: tokens of a group.
        num_draft: how much later a row may stand, a Python int.

    Returns:
        int32 [num_rows, topk + ceil(num_draft / compress_ratio)] for `qsa.expand`.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype, while tracing.
    """
    shapes = checks.Shapes()
    shapes.check("selected", selected, ("int32",), ("num_requests", "topk"))
    shapes.check("positions", positions, ("int32",), ("num_requests",))
    ratio = checks.integer("compress_ratio", compress_ratio, 1)
    extra = -(-checks.integer("num_draft", num_draft, 0) // ratio)
    _launch.require_jax(selected=selected, positions=positions)
    if not isinstance(metadata, Metadata):
        raise TypeError(f"metadata must be a qsa.Metadata, got {type(metadata).__name__}")
    for name, array in metadata._asdict().items():
        shapes.check(f"metadata.{name}", array, ("int32",), ("num_rows",))
        _launch.require_jax(**{f"metadata.{name}": array})
    return _reuse(extra, ratio, selected, positions, metadata)


@jax.jit
def _tree_mask(parents: Array, lengths: Array) -> Array:
    q_len = parents.shape[1]
    row = jnp.arange(q_len)
    itself = row[:, None] == row
    # What lies outside [0, row) is no parent, whatever a traced array holds.
    continues = (parents[..., None] == row) & (row[:, None] > row)
    seen = itself | continues  # [batch, q_len, q_len]
    for _ in range(max(q_len - 1, 1).bit_length()):  # ancestors up to 1, 2, 4, ... steps away
        steps = seen.astype(jnp.float32)
        seen = jnp.einsum("bij,bjk->bik", steps, steps) > 0
    return seen & (row < jnp.asarray(lengths)[:, None])[..., None]


@jax.jit
def _accept(tokens: Array, targets: Array, draft_mask: Array) -> Accepted:
    q_len = tokens.shape[1]
    row = jnp.arange(q_len, dtype=jnp.int32)
    before = draft_mask & (row[:, None] > row)
    parent = jnp.max(jnp.where(before, row, -1), axis=2)  # the nearest ancestor
    wanted = jnp.take_along_axis(jnp.asarray(targets), jnp.maximum(parent, 0), axis=1)
    right = (tokens == wanted) | (parent < 0)
    # Every path begins at row 0, which a padding row does not see.
    accepted = draft_mask[:, :, 0] & jnp.all(right[:, None] | ~draft_mask, axis=2)
    depths = jnp.sum(draft_mask, axis=2, dtype=jnp.int32)
    lengths = jnp.where(accepted, depths, 0)
    last = jnp.argmax(lengths, axis=1)[:, None]
    counts = jnp.take_along_axis(lengths, last, axis=1)[:, 0]
    path = jnp.take_along_axis(draft_mask, last[..., None], axis=1)[:, 0]
    rows = jnp.sort(jnp.where(path, row, q_len), axis=1)
    rows = jnp.where(row < counts[:, None], rows, -1)
    picked = jnp.take_along_axis(jnp.asarray(targets), last, axis=1)[:, 0]
    return Accepted(counts, rows, jnp.where(counts > 0, picked, -1))


@jax.jit
def _accept_sampled(
    key: Array, tokens: Array, draft_probs: Array, target_probs: Array, lengths: Array
) -> Accepted:
    q_len = tokens.shape[1]
    key_accept, key_next = jax.random.split(key)
    row = jnp.arange(q_len, dtype=jnp.int32)
    drafts = tokens[:, 1:, None]
    drawn, wanted = (
        jnp.take_along_axis(probs, drafts, axis=2)[..., 0]
        for probs in (draft_probs, target_probs[:, :-1])
    )
    # wanted / drawn may be 0 / 0.
    kept = jax.random.uniform(key_accept, drawn.shape, drawn.dtype) * drawn < wanted
    kept &= row[1:] < lengths[:, None]
    more = jnp.sum(jnp.cumprod(kept.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    last = more[:, None, None]  # row of the last accepted token
    left = jnp.take_along_axis(target_probs, last, axis=1)[:, 0]
    padded = jnp.pad(draft_probs, ((0, 0), (0, 1), (0, 0)))
    rejected = (more + 1 < lengths)[:, None]
    refused = jnp.where(rejected, jnp.take_along_axis(padded, last, axis=1)[:, 0], 0)
    # Rounding can leave nothing where both distributions are equal; then either serves.
    rest = jnp.maximum(left - refused, 0)
    rest = jnp.where(jnp.sum(rest, axis=1, keepdims=True) > 0, rest, left)
    picked = jax.random.categorical(key_next, jnp.log(rest)).astype(jnp.int32)
    counts = jnp.where(lengths > 0, more + 1, 0)
    rows = jnp.where(row < counts[:, None], row, -1)
    return Accepted(counts, rows, jnp.where(counts > 0, picked, -1))


@jax.jit
def _compact(cache: PagedKVCache, page_table: Array, seq_lens: Array, rows: Array) -> PagedKVCache:
    batch, q_len = rows.shape
    step = jnp.arange(q_len, dtype=jnp.int32)
    source = jnp.asarray(seq_lens)[:, None] + jnp.maximum(rows, 0)
    page = jnp.clip(source // cache.page_size, 0, page_table.shape[1] - 1)
    page = jnp.take_along_axis(jnp.asarray(page_table), page, axis=1).reshape(-1)
    offset = (source % cache.page_size).reshape(-1)
    index = (page, offset) if cache.kv_layout == "NHD" else (page, slice(None), offset)
    moves = (rows >= 0) & (rows != step)
    moved = [array[index] for array in (cache.key_cache, cache.value_cache)]
    if cache.dtype.itemsize == 1:
        moved = [array.astype(jnp.bfloat16) for array in moved]  # holds every fp8 number
    # The bits are those of the cache already: no scale.
    plain = replace(cache, k_scale=None, v_scale=None).append_kv(
        moved[0],
        moved[1],
        page_table,
        positions=jnp.where(moves, seq_lens[:, None] + step, -1).reshape(-1),
        request_ids=jnp.repeat(jnp.arange(batch, dtype=jnp.int32), q_len),
    )
    return replace(cache, key_cache=plain.key_cache, value_cache=plain.value_cache)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _reuse(extra: int, ratio: int, selected: Array, positions: Array, metadata: Metadata) -> Array:
    request = jnp.maximum(metadata.request_ids, 0)
    groups = jnp.pad(selected, ((0, 0), (0, extra)), constant_values=-1)[request]
    held = jnp.sum(groups >= 0, axis=1, keepdims=True, dtype=jnp.int32)
    column = jnp.arange(groups.shape[1], dtype=jnp.int32) - held
    since = ((positions + 1) // ratio)[request][:, None] + column
    new = (column >= 0) & (column < extra) & (since < jnp.asarray(metadata.visible)[:, None])
    groups = jnp.where(new, since, groups)
    return jnp.where((metadata.request_ids >= 0)[:, None], groups, -1)
