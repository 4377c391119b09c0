"""Ragged paged attention in the calling convention of JAX serving code on TPUs.

That code keeps keys and values in one cache: in a page, each token has its heads in turns, key head
i as head 2 * i and value head i as 2 * i + 1. Kernels take strides, so both are read where they
lie, and the cache is never copied.

```python
import jax, jax.numpy as jnp
from jaxattn import rpa

# pages, tokens, 2 * heads / packing, packing, head_dim
kv_cache = jnp.zeros((64, 16, 2, 2, 128), jnp.bfloat16)
rows = [jnp.ones((10, heads, 128), jnp.bfloat16) for heads in (8, 2, 2)]  # queries, keys, values
kv_lens = jnp.array([30, 9, 0], jnp.int32)  # new tokens included; the third place is free
cu_q_lens = jnp.array([0, 1, 10, 10], jnp.int32)  # a decode, then a prefill of 9 tokens
page_indices = jnp.arange(12, dtype=jnp.int32)  # 4 pages a sequence
distribution = jnp.array([1, 1, 2], jnp.int32)  # ends of decodes, prefills and all
step = jax.jit(rpa.ragged_paged_attention, donate_argnames="kv_cache")
out, kv_cache = step(*rows, kv_cache, kv_lens, page_indices, cu_q_lens, distribution)
```
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32, Shaped

from torch_core import checks
from torch_core.binding import View
from torch_core.checks import dtype_name
from torch_core.problem import AppendInputs, AppendProblem, AttentionInputs

from . import _device, _launch, kv_cache
from .decode import AnyArray, Scale

# What the convention has for TPUs: block sizes, memory limits and debugging.
TPU_ONLY = (
    *("chunk_prefill_size", "d_block_sizes", "p_block_sizes", "m_block_sizes"),
    *("num_kv_pages_per_block", "num_queries_per_block", "vmem_limit_bytes"),
    *("debug_mode", "disable_bounds_checks", "disable_semaphore_checks", "skip_kv_mask"),
)
# A masked score must weigh nothing, as it does in our kernels.
LARGEST_MASK_VALUE = -1e4


def ragged_paged_attention(
    queries: Float[AnyArray, "tokens num_q_heads head_dim"],
    keys: Shaped[AnyArray, "tokens num_kv_heads head_dim"],
    values: Shaped[AnyArray, "tokens num_kv_heads head_dim"],
    kv_cache: Shaped[AnyArray, "num_pages page_size ..."],
    kv_lens: Int32[AnyArray, " num_seqs"],
    page_indices: Int32[AnyArray, " num_page_indices"],
    cu_q_lens: Int32[AnyArray, " num_seqs+1"],
    distribution: Int32[AnyArray, "3"],
    *,
    use_causal_mask: bool = True,
    update_kv_cache: bool = True,
    sm_scale: Scale = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    q_scale: float | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    max_seqlen_q: int | None = None,
    **tpu_only: Any,
) -> tuple[Array, Array]:
    """Writes new tokens into a combined cache and attends them to it, decodes and prefills mixed.

    Sequence i has rows cu_q_lens[i] to cu_q_lens[i + 1] of queries, keys and values: its last
    tokens, at positions up to kv_lens[i] - 1. Pure: donate kv_cache to the surrounding jit, and it
    is written in place. vmap and gradients are refused.

    How it runs: rows of sequences with one row (decodes) go to the kernel that `decode` gets, the
    rest to that of `prefill`. Which those are is found on the device, so a step always launches
    both; with max_seqlen_q=1 only the first, and on a CPU only the second, which is right for
    every batch. Over a mesh, call it in shard_map: under jit, a split kv_cache is refused.

    Args:
        queries: [tokens, num_q_heads, head_dim]; bfloat16, float16 or float32.
        keys, values: [tokens, num_kv_heads, head_dim] in the cache's dtype: for an fp8 cache the
            caller has divided them by k_scale and v_scale.
        kv_cache: [num_pages, page_size, heads / packing, packing, width] or [num_pages, page_size,
            heads, width], in the queries' dtype or fp8; heads is at least 2 * num_kv_heads and
            width at least head_dim (TPUs pad to 128). New rows get zeros there; where head_dim
            does not divide width, what is there must be finite.
        kv_lens: int32 [num_seqs], tokens of each sequence, the new ones included.
        page_indices: int32 [num_seqs * pages_per_seq]; entries past a sequence's pages may hold
            anything.
        cu_q_lens: int32 [num_seqs + 1], prefix sums of the query lengths; a length may be 0.
        distribution: int32 [3], ends of the decodes, of the prefills and of all: only the last, the
            number of live sequences, is used. What the arrays hold past it is not looked at.
        use_causal_mask: False lets rows see all keys of their sequence.
        update_kv_cache: False leaves the cache as it is: keys and values are already in it.
        sm_scale: multiplies query . key. The convention's default is 1, not head_dim ** -0.5.
        sliding_window: keys that a row sees, its own included; None is all.
        soft_cap: scores become soft_cap * tanh(scores / soft_cap).
        mask_value: the convention's score of a masked key, at most -1e4; here such a key weighs 0.
        q_scale: the convention rounds queries / q_scale to the cache's dtype. Here queries are not
            rounded, and the scale cancels.
        k_scale, v_scale: dequantisation factors of the cache.
        max_seqlen_q: upper bound on the query lengths, a Python int: an addition to the convention.
            1 says that all sequences are decodes. Default: the number of tokens.
        tpu_only: what tunes and debugs TPU kernels (`TPU_ONLY`), ignored.

    Returns:
        (out, kv_cache): out [tokens, num_q_heads, head_dim] in the queries' dtype, 0 in rows past
        the live sequences; the cache with the new rows.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype, while tracing.
        NotImplementedError: no kernel runs this call, or vmap or a gradient is asked for.
        jax.errors.JaxRuntimeError (or ValueError, JAX's fast path): on a CPU, at run time, page
            ids or lengths out of range. It speaks of page_table (page_indices), seq_lens (kv_lens)
            and cu_seqlens_q (cu_q_lens), as `prefill` does.

    Caller's contract: kv_lens[i] is at least the number of rows of a live sequence i, its pages
    exist, and max_seqlen_q holds.

    Source: tpu-inference 0.32, kernels/ragged_paged_attention/v3. Its variant for head_dim 64, with
    key and value in one row of 128, has the same memory: kv_cache.reshape(num_pages, page_size, -1,
    64).
    """
    for name in tpu_only:
        if name not in TPU_ONLY:
            raise TypeError(f"ragged_paged_attention got an unexpected argument {name!r}")
    arrays = _Arrays(
        queries, keys, values, kv_cache, kv_lens, page_indices, cu_q_lens, distribution
    )
    _launch.require_jax(**arrays._asdict())
    _check_shapes(arrays)
    checks.flag("use_causal_mask", use_causal_mask)
    if sliding_window is not None:
        checks.integer("sliding_window", sliding_window, 1)
        if not use_causal_mask:
            raise ValueError("sliding_window must come with use_causal_mask=True")
    check_mask_value(mask_value)
    if q_scale is not None:
        checks.scale("q_scale", q_scale)
    tokens = queries.shape[0]
    bound = tokens if max_seqlen_q is None else checks.integer("max_seqlen_q", max_seqlen_q, 0)
    options = dict(
        window_left=-1 if sliding_window is None else sliding_window - 1,
        soft_cap=soft_cap,
        causal=use_causal_mask,
        max_seqlen_q=min(bound, tokens),
        update=checks.flag("update_kv_cache", update_kv_cache),
    )
    scales = dict(sm_scale=sm_scale, k_scale=k_scale, v_scale=v_scale)
    for name, value in scales.items():
        if value is not None or name == "sm_scale":  # None is no default of the convention's
            scales[name] = checks.scale(name, value, positive=name != "sm_scale")
    # Traced: a number among them stays a constant of the kernel.
    traced = {name: value for name, value in scales.items() if hasattr(value, "shape")}
    fixed = {name: value for name, value in scales.items() if name not in traced}
    call = functools.partial(_run, options, fixed)
    name = "rpa.ragged_paged_attention"
    call = _launch.refuse_vmap(name, call, "pack the sequences into one call with cu_q_lens")
    return _launch.inference_only(name, call)(arrays, traced)


class _Arrays(NamedTuple):
    queries: Any
    keys: Any
    values: Any
    kv_cache: Any
    kv_lens: Any
    page_indices: Any
    cu_q_lens: Any
    distribution: Any


def check_mask_value(value: Any) -> None:
    """Refuses a mask value that would let masked keys count."""
    if value is None or value == -math.inf:
        return
    if checks.scale("mask_value", value, positive=False) > LARGEST_MASK_VALUE:
        raise ValueError(
            f"mask_value must be at most {LARGEST_MASK_VALUE:g}, so that a masked key weighs 0, "
            f"got {value!r}"
        )


def _check_shapes(arrays: _Arrays) -> None:
    shapes = checks.Shapes()
    axes = ("tokens", "num_q_heads", "head_dim")
    shapes.check("queries", arrays.queries, (*checks.HALF, "float32"), axes)
    axes = ("num_pages", "page_size", "combined_heads", "width")
    if len(getattr(arrays.kv_cache, "shape", ())) == 5:
        axes = ("num_pages", "page_size", "packed_heads", "packing", "width")
    shapes.check("kv_cache", arrays.kv_cache, checks.CACHE_DTYPES, axes)
    dtype = dtype_name(arrays.kv_cache)
    if dtype not in checks.FP8 and dtype != dtype_name(arrays.queries):
        raise TypeError(
            f"kv_cache must have the queries' dtype {dtype_name(arrays.queries)} or be "
            f"{' or '.join(checks.FP8)}, got {dtype}"
        )
    for name in ("keys", "values"):
        array = getattr(arrays, name)
        shapes.check(name, array, (dtype,), ("tokens", "num_kv_heads", "head_dim"))
    kv_heads = shapes["num_kv_heads"]
    checks.heads("queries", shapes["num_q_heads"], kv_heads)
    combined, width = math.prod(arrays.kv_cache.shape[2:-1]), shapes["width"]
    if shapes["page_size"] < 1 or combined < 2 * kv_heads or not 1 <= shapes["head_dim"] <= width:
        raise ValueError(
            f"kv_cache must have pages of 1 token or more, with 2 * {kv_heads} heads or more of "
            f"head_dim {shapes['head_dim']} or more, got {list(arrays.kv_cache.shape)}"
        )
    shapes.check("kv_lens", arrays.kv_lens, ("int32",), ("num_seqs",))
    num_seqs = shapes["num_seqs"]
    shapes.check("page_indices", arrays.page_indices, ("int32",), ("num_page_indices",))
    count = shapes["num_page_indices"]
    if count % num_seqs if num_seqs else count:
        raise ValueError(
            f"page_indices must have a multiple of num_seqs = {num_seqs} entries, got {count}"
        )
    shapes.check("cu_q_lens", arrays.cu_q_lens, ("int32",), (num_seqs + 1,))
    shapes.check("distribution", arrays.distribution, ("int32",), (3,))


class _Rows(NamedTuple):
    """What each row of the queries belongs to."""

    request: Any  # int32 [tokens], 0 in rows of no sequence
    position: Any  # int32 [tokens], -1 in those


def _run(options: Mapping[str, Any], fixed: dict, arrays: _Arrays, traced: dict) -> tuple:
    arrays = _Arrays(*map(jnp.asarray, arrays))
    num_seqs = arrays.kv_lens.shape[0]
    table = jnp.reshape(arrays.page_indices, (num_seqs, -1)) if num_seqs else None
    cache = arrays.kv_cache
    if table is None or not arrays.queries.size:
        return jnp.zeros(arrays.queries.shape, arrays.queries.dtype), cache
    # Past the live sequences the arrays may hold anything.
    live = arrays.distribution[2]
    seq_lens = jnp.where(jnp.arange(num_seqs) < live, arrays.kv_lens, 0)
    end = arrays.cu_q_lens[jnp.clip(live, 0, num_seqs)]
    offsets = jnp.where(jnp.arange(num_seqs + 1) < live, arrays.cu_q_lens, end)
    rows = _rows(arrays.queries.shape[0], seq_lens, offsets)
    if options["update"]:
        cache = _append(cache, arrays, table, rows)
    scales = fixed | traced
    out = _attend(options, scales, arrays, cache, table, seq_lens, offsets, rows)
    return out, cache


def _rows(tokens: int, seq_lens: Any, offsets: Any) -> _Rows:
    row = jnp.arange(tokens, dtype=jnp.int32)
    # XLA fuses the comparison with the sum.
    request = (offsets[None, 1:] <= row[:, None]).sum(-1, dtype=jnp.int32)
    belongs = request < seq_lens.shape[0]
    request = jnp.where(belongs, request, 0)
    position = seq_lens[request] - offsets[request + 1] + row
    return _Rows(request, jnp.where(belongs, position, -1))


def _append(cache: Any, arrays: _Arrays, table: Any, rows: _Rows) -> Any:
    """The new rows in the cache, with zeros where a row is wider than the heads."""
    both = jnp.stack([arrays.keys, arrays.values], 2)  # [tokens, num_kv_heads, 2, head_dim]
    both = both.reshape(both.shape[0], -1, both.shape[-1])
    heads, width = math.prod(cache.shape[2:-1]), cache.shape[-1]
    both = jnp.pad(both, [(0, 0), (0, heads - both.shape[1]), (0, width - both.shape[2])])
    inputs = AppendInputs(
        # The cache keeps its shape: XLA may copy one whose axes of size 1 come and go.
        key=both.reshape(-1, *cache.shape[2:]),
        value=None,
        key_cache=cache,
        value_cache=None,
        page_table=table,
        positions=rows.position,
        request_ids=rows.request,
        k_scale=None,
        v_scale=None,
    )
    return kv_cache.append(AppendProblem(cache.shape[1], "NHD"), inputs, [None, None])[0]


def _attend(options, scales, arrays, cache, table, seq_lens, offsets, rows: _Rows) -> Any:
    tokens, _, head_dim = arrays.queries.shape
    num_seqs, num_kv_heads = seq_lens.shape[0], arrays.keys.shape[1]
    query, width = arrays.queries, cache.shape[-1]
    if width % head_dim:
        # XQA counts strides in heads.
        query = jnp.pad(query, [(0, 0), (0, 0), (0, width - head_dim)])
    row = math.prod(cache.shape[2:])
    shape = (*cache.shape[:2], num_kv_heads, query.shape[-1])
    strides = (cache.shape[1] * row, row, 2 * width, 1)
    views = tuple(View("key_cache", shape, strides, offset) for offset in (0, width))
    shared = dict(window_left=options["window_left"], soft_cap=options["soft_cap"])
    shared |= dict(backend="auto", views=views)

    def decode(count: int, lengths: Any) -> Any:
        """The first `count` rows, each with its own sequence of this length."""
        request = rows.request[:count]
        inputs = AttentionInputs(query[:count], cache, None, table[request], lengths, **scales)
        return _launch.attend("decode", inputs, **shared)

    def prefill(lengths: Any) -> Any:
        inputs = AttentionInputs(query, cache, None, table, lengths, offsets, **scales)
        bounds = dict(max_seqlen_q=options["max_seqlen_q"], causal=options["causal"])
        return _launch.attend("prefill", inputs, **bounds, **shared)

    if options["max_seqlen_q"] <= 1:
        out = decode(tokens, rows.position + 1)
    elif not splits():
        out = prefill(seq_lens)
    else:
        count = min(tokens, num_seqs)
        alone = (offsets[1:] - offsets[:-1] == 1) & (offsets[:-1] < count)
        lengths = jnp.where(alone[rows.request[:count]], rows.position[:count] + 1, 0)
        out = prefill(jnp.where(alone, 0, seq_lens))
        # Not written into the rows of `out`: XLA:GPU of jax 0.11 fuses that with the kernel's call,
        # and fails.
        rest = (0, tokens - count)
        first = jnp.pad(decode(count, lengths), (rest, (0, 0), (0, 0)))
        out = jnp.where(jnp.pad(lengths > 0, rest)[:, None, None], first, out)
    return out[..., :head_dim]


def splits() -> bool:
    """Whether decodes of a mixed batch go to a kernel of their own. On a CPU the reference takes
    every sequence by itself anyway."""
    return _device.environment().capability > 0
