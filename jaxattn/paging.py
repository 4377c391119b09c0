"""A page allocator for a running batch, as pure functions.

All of them have fixed shapes, for jit, scan and while_loop, and none waits for the device. A batch
has a fixed number of slots, one request each; requests join by `append` (or `fork`) to an empty
slot and leave by `free`. Where pages run out, `ok` says so and that request is as it was.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32, Shaped

from torch_core import checks

from . import _launch
from .decode import AnyArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, kw_only=True)
class PagePool:
    """Which request owns which pages; begin with `PagePool.empty`.

    A page that no request owns is free: there is no other list that could disagree. A page with
    several owners is full of tokens that all of them have, so nothing is written to it again.

    Fields:
        page_table: int32 [batch, pages_per_seq], -1 where a request has no page.
        seq_lens: int32 [batch], tokens of each request.
        ref_counts: int32 [num_pages], how many requests own each page.
        page_size: tokens of a page, a Python int and static in jit.
    """

    page_table: Any
    seq_lens: Any
    ref_counts: Any
    page_size: int = field(metadata=dict(static=True))

    @classmethod
    def empty(cls, *, num_pages: int, page_size: int, batch: int, pages_per_seq: int) -> "PagePool":
        """A pool whose pages are all free.

        Args:
            num_pages: pages of the caches.
            page_size: tokens of a page.
            batch: slots for requests.
            pages_per_seq: most pages of a request.

        Returns:
            The PagePool; each slot is empty.

        Raises:
            ValueError, TypeError: a size is no Python int of 1 or more, or a request could have
                more tokens than int32 counts.
        """
        sizes = dict(
            num_pages=num_pages, page_size=page_size, batch=batch, pages_per_seq=pages_per_seq
        )
        for name, size in sizes.items():
            checks.integer(name, size, 1)
        checks.integer("pages_per_seq * page_size", pages_per_seq * page_size, 1, 2**31 - 1)
        return cls(
            page_table=jnp.full((batch, pages_per_seq), -1, jnp.int32),
            seq_lens=jnp.zeros(batch, jnp.int32),
            ref_counts=jnp.zeros(num_pages, jnp.int32),
            page_size=page_size,
        )

    @property
    def num_free(self) -> Int32[Array, ""]:
        """Pages that no request owns."""
        return jnp.sum(self.ref_counts == 0, dtype=jnp.int32)

    @property
    def max_len(self) -> int:
        """Most tokens of a request."""
        return self.page_table.shape[1] * self.page_size


class PageCopies(NamedTuple):
    """Pages whose content a fork needs twice: `target` becomes a copy of `source`.

    Fields:
        source, target: int32 [batch], pages; -1 where there is none.
    """

    source: Int32[Array, " batch"]
    target: Int32[Array, " batch"]


def alloc(
    pool: PagePool, lengths: Int32[AnyArray, " batch"]
) -> tuple[PagePool, Bool[Array, " batch"]]:
    """Gives each request the pages that `lengths` tokens need, beyond those it has.

    Reserves room: `seq_lens` stays. Ask for seq_lens + q_len before a verify step with drafts, and
    for the longest a request may become where it must not run out of pages later.

    Args:
        pool: the state.
        lengths: int32 [batch], tokens to have room for; no more than a request has room for changes
            nothing.

    Returns:
        (pool, ok), ok bool [batch]: whether the request has that room. Requests are served in
        their order: from the first that does not fit, none gets a new page. A length below 0 or
        above `pool.max_len` is not ok.

    Raises:
        ValueError, TypeError: lengths of wrong shape or dtype, while tracing.
    """
    _check(pool, "int32", lengths=lengths)
    return _alloc(pool, lengths)


def append(
    pool: PagePool, counts: Int32[AnyArray, " batch"]
) -> tuple[PagePool, Bool[Array, " batch"]]:
    """Makes each request longer by `counts` tokens, with new pages where they are needed.

    The new tokens of request b stand at positions seq_lens[b] (of the old pool) and on; write them
    with `append_kv` and the new page table.

    Args:
        pool: the state.
        counts: int32 [batch], new tokens; 0 for a request that gets none. For a new request it is
            the length of its prompt, or of the part that is prefilled first.

    Returns:
        (pool, ok), ok bool [batch]: where False, the request is as it was. See `alloc`.

    Raises:
        ValueError, TypeError: counts of wrong shape or dtype, while tracing.
    """
    _check(pool, "int32", counts=counts)
    return _append(pool, counts)


def fork(
    pool: PagePool,
    parents: Int32[AnyArray, " batch"],
    lengths: Int32[AnyArray, " batch"] | None = None,
) -> tuple[PagePool, Bool[Array, " batch"], PageCopies]:
    """Starts requests in empty slots with the first tokens of other requests.

    Full pages are shared. Of a page that is not full the new request gets its own copy: hand the
    copies to `PagedKVCache.copy_pages` (and `copy_pages`) before the next token is written.

    Args:
        pool: the state.
        parents: int32 [batch], for each slot the request whose tokens it starts with, or -1 where
            nothing happens. Parents are looked up in the pool as it was before the call.
        lengths: int32 [batch], tokens to start with; default: all that the parent has.

    Returns:
        (pool, ok, copies). ok bool [batch] is False where the slot is as it was: it was not empty,
        the parent does not exist or has fewer tokens, or no page was free for the copy.

    Raises:
        ValueError, TypeError: parents or lengths of wrong shape or dtype, while tracing.
    """
    _check(pool, "int32", parents=parents)
    if lengths is not None:
        _check(pool, "int32", lengths=lengths)
    return _fork(pool, parents, lengths)


def free(pool: PagePool, done: Bool[AnyArray, " batch"]) -> PagePool:
    """Empties slots. A page is free again once no request owns it.

    Args:
        pool: the state.
        done: bool [batch], slots to empty; an empty one stays empty.

    Returns:
        The new pool.

    Raises:
        ValueError, TypeError: done of wrong shape or dtype, while tracing.
    """
    _check(pool, "bool", done=done)
    return _free(pool, done)


def copy_pages(
    array: Shaped[AnyArray, "num_pages ..."],
    source: Int32[AnyArray, " copies"],
    target: Int32[AnyArray, " copies"],
) -> Shaped[Array, "num_pages ..."]:
    """Copies array[source[i]] to array[target[i]]; in place, but for the copied pages, if donated.

    For every array on the pool's pages, such as QSA's compressed cache. The ring of a forked
    request is copied in the same way, from the parent's ring to its own.

    Args:
        array: pages on its first axis.
        source, target: int32 [copies]; a negative target is skipped.

    Returns:
        The new array. On a CPU, XLA converts a whole array of bfloat16 or fp8 to write to it.

    Raises:
        ValueError, TypeError: an argument of wrong kind, shape or dtype, while tracing.

    Caller's contract: sources exist, and no page is a target twice.
    """
    shapes = checks.Shapes()
    shapes.check("source", source, ("int32",), ("copies",))
    shapes.check("target", target, ("int32",), ("copies",))
    _launch.require_jax(array=array, source=source, target=target)
    if not getattr(array, "ndim", 0) or not array.shape[0]:
        raise ValueError(f"array must have pages on its first axis, got shape {jnp.shape(array)}")
    return _copy_pages(array, source, target)


def _check(pool: Any, dtype: str, **arrays: Any) -> None:
    if not isinstance(pool, PagePool):
        raise TypeError(f"pool must be a PagePool, got {type(pool).__name__}")
    shapes = checks.Shapes(batch=pool.page_table.shape[0])
    for name, array in arrays.items():
        shapes.check(name, array, (dtype,), ("batch",))
    _launch.require_jax(**arrays)


def _take(pool: PagePool, need: Array) -> tuple[Array, Array, Array]:
    """Serves requests that need some free pages each, in their order.

    Returns which of them got theirs, bool [batch]; the first of each in the list of free pages,
    int32 [batch]; and the free pages, int32 [num_pages], in rising order.
    """
    num_pages = pool.ref_counts.shape[0]
    is_free = pool.ref_counts == 0
    rank = jnp.cumsum(is_free, dtype=jnp.int32) - 1
    ends = jnp.cumsum(need, dtype=jnp.int32)
    granted = (need == 0) | (ends <= rank[-1] + 1)
    ids = jnp.arange(num_pages, dtype=jnp.int32)
    free_pages = jnp.zeros_like(ids).at[jnp.where(is_free, rank, num_pages)].set(ids, mode="drop")
    return granted, ends - need, free_pages


def _owned(pool: PagePool) -> Array:
    """int32 [batch], pages of each request; they are the first entries of its table."""
    return jnp.sum(pool.page_table >= 0, axis=1, dtype=jnp.int32)


def _shared(pool: PagePool, pages: Array, change: int) -> Array:
    """ref_counts after pages of any shape got or lost an owner each; a negative page is skipped."""
    index = jnp.where(pages >= 0, pages, pool.ref_counts.shape[0])
    return pool.ref_counts.at[index].add(jnp.int32(change), mode="drop")


@jax.jit
def _alloc(pool: PagePool, lengths: Array) -> tuple[PagePool, Array]:
    valid = (lengths >= 0) & (lengths <= pool.max_len)
    owned = _owned(pool)
    pages = lengths // pool.page_size + (lengths % pool.page_size > 0)
    need = jnp.where(valid, jnp.maximum(pages - owned, 0), 0)
    granted, first, free_pages = _take(pool, need)
    column = jnp.arange(pool.page_table.shape[1], dtype=jnp.int32)[None] - owned[:, None]
    takes = granted[:, None] & (column >= 0) & (column < need[:, None])
    new = free_pages[jnp.where(takes, first[:, None] + column, 0)]
    pool = replace(
        pool,
        page_table=jnp.where(takes, new, pool.page_table),
        ref_counts=_shared(pool, jnp.where(takes, new, -1), 1),
    )
    return pool, valid & granted


@jax.jit
def _append(pool: PagePool, counts: Array) -> tuple[PagePool, Array]:
    valid = (counts >= 0) & (counts <= pool.max_len - pool.seq_lens)
    lengths = jnp.where(valid, pool.seq_lens + counts, -1)
    pool, ok = _alloc(pool, lengths)
    return replace(pool, seq_lens=jnp.where(ok, lengths, pool.seq_lens)), ok


@jax.jit
def _fork(
    pool: PagePool, parents: Array, lengths: Array | None
) -> tuple[PagePool, Array, PageCopies]:
    batch, pages_per_seq = pool.page_table.shape
    parent = jnp.clip(parents, 0, batch - 1)
    most = pool.seq_lens[parent]
    wanted = most if lengths is None else lengths
    valid = (parents == parent) & (wanted >= 0) & (wanted <= most) & (_owned(pool) == 0)
    full, rest = wanted // pool.page_size, wanted % pool.page_size
    need = (valid & (rest > 0)).astype(jnp.int32)
    granted, first, free_pages = _take(pool, need)
    valid &= granted
    copied = valid & (need == 1)
    last = jnp.clip(full, 0, pages_per_seq - 1)
    pages = pool.page_table[parent]
    source = jnp.where(copied, jnp.take_along_axis(pages, last[:, None], 1)[:, 0], -1)
    target = jnp.where(copied, free_pages[jnp.where(copied, first, 0)], -1)
    column = jnp.arange(pages_per_seq, dtype=jnp.int32)[None]
    own = jnp.where(column == full[:, None], target[:, None], pages)
    own = jnp.where(valid[:, None] & (column <= full[:, None]), own, -1)
    pool = replace(
        pool,
        page_table=jnp.where(valid[:, None], own, pool.page_table),
        seq_lens=jnp.where(valid, wanted, pool.seq_lens),
        ref_counts=_shared(pool, own, 1),
    )
    return pool, valid | (parents == -1), PageCopies(source, target)


@jax.jit
def _free(pool: PagePool, done: Array) -> PagePool:
    done = jnp.asarray(done)
    return replace(
        pool,
        page_table=jnp.where(done[:, None], -1, pool.page_table),
        seq_lens=jnp.where(done, 0, pool.seq_lens),
        ref_counts=_shared(pool, jnp.where(done[:, None], pool.page_table, -1), -1),
    )


@jax.jit
def _copy_pages(array: Array, source: Array, target: Array) -> Array:
    array, target = jnp.asarray(array), jnp.asarray(target)
    index = jnp.where(target >= 0, target, array.shape[0])
    return array.at[index].set(array[jnp.maximum(source, 0)], mode="drop")
