"""Drop-in for JAX's own GPU kernel of paged attention, which is deprecated."""

from typing import cast

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32, Shaped

from torch_core import checks
from torch_core.binding import View
from torch_core.problem import AttentionInputs

from . import _launch
from .decode import AnyArray
from .rpa import check_mask_value

DEFAULT_MASK_VALUE = -0.7 * checks.FLOAT32_MAX


def paged_attention(
    q: Shaped[AnyArray, "batch num_heads head_dim"],
    k_pages: Shaped[AnyArray, "num_kv_heads num_pages page_size head_dim"],
    v_pages: Shaped[AnyArray, "num_kv_heads num_pages page_size head_dim"],
    block_tables: Int32[AnyArray, "batch pages_per_seq"],
    lengths: Int32[AnyArray, " batch"] | None,
    k_scales_pages: None = None,
    v_scales_pages: None = None,
    *,
    block_h: int = 16,
    pages_per_compute_block: int = 8,
    k_splits: int = 16,
    num_warps: int = 8,
    num_stages: int = 2,
    interpret: bool = False,
    debug: bool = False,
    mask_value: float = DEFAULT_MASK_VALUE,
    attn_logits_soft_cap: float | None = None,
) -> Array:
    """Decodes over pages of one head each, in place of JAX's deprecated kernel.

    The signature is that of jax.experimental.pallas.ops.gpu.paged_attention.paged_attention. Scores
    are query . key, not scaled: scale q. Kernels take strides, so the pages are read where they
    lie. vmap may map what is not pages; over a mesh, call it in shard_map.

    Args:
        q: [batch, num_heads, head_dim]; num_heads is a multiple of num_kv_heads.
        k_pages, v_pages: [num_kv_heads, num_pages, page_size, head_dim], in q's dtype.
        block_tables: int32 [batch, pages_per_seq]; entries past a length may hold anything.
        lengths: int32 [batch], or None: all pages are full.
        k_scales_pages, v_scales_pages: quantised pages are refused; `decode` has fp8 caches.
        block_h, pages_per_compute_block, k_splits, num_warps, num_stages, interpret, debug: tuned
            the original, ignored.
        mask_value: the original's score of a masked key, at most -1e4; here such a key weighs 0.
        attn_logits_soft_cap: scores become cap * tanh(scores / cap).

    Returns:
        [batch, num_heads, head_dim] in q's dtype; 0 where the length is 0.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype, while tracing.
        NotImplementedError: scales are given, no kernel runs this call, or a gradient is asked for.
        jax.errors.JaxRuntimeError (or ValueError, JAX's fast path): on a CPU, at run time, page
            ids or lengths out of range. It speaks of page_table (block_tables) and seq_lens
            (lengths), as `decode` does.

    Caller's contract: as in `decode`.
    """
    for name, scales in (("k_scales_pages", k_scales_pages), ("v_scales_pages", v_scales_pages)):
        if scales is not None:
            raise NotImplementedError(
                f"{name} must be None: pages with a scale for each token are not supported; "
                "jaxattn.decode takes fp8 caches with one scale"
            )
    if attn_logits_soft_cap is not None:
        checks.scale("attn_logits_soft_cap", attn_logits_soft_cap)
    check_mask_value(mask_value)
    arrays = dict(q=q, k_pages=k_pages, v_pages=v_pages, block_tables=block_tables, lengths=lengths)
    _launch.require_jax(**arrays)
    shapes = checks.Shapes()
    shapes.check("q", q, (*checks.HALF, "float32"), ("batch", "num_heads", "head_dim"))
    dtype = (checks.dtype_name(q),)
    axes = ("num_kv_heads", "num_pages", "page_size", "head_dim")
    shapes.check("k_pages", k_pages, dtype, axes)
    shapes.check("v_pages", v_pages, dtype, axes)
    shapes.check("block_tables", block_tables, ("int32",), ("batch", "pages_per_seq"))
    if lengths is not None:
        shapes.check("lengths", lengths, ("int32",), ("batch",))
    batch, heads, head_dim = q.shape
    kv_heads, num_pages, page_size, _ = k_pages.shape
    checks.heads("q", heads, kv_heads)
    if lengths is None:
        lengths = jnp.full(batch, block_tables.shape[1] * page_size, jnp.int32)
    # Kernels count the strides of a head in 32 bits.
    if num_pages * page_size * head_dim > checks.INT32_MAX:
        raise ValueError(
            f"k_pages must have fewer than 2**31 elements a head, got {list(k_pages.shape)}"
        )
    shape = (num_pages, page_size, kv_heads, head_dim)
    strides = (page_size * head_dim, head_dim, num_pages * page_size * head_dim, 1)
    inputs = AttentionInputs(q, k_pages, v_pages, block_tables, lengths, sm_scale=1.0)
    views = (View("key_cache", shape, strides), View("value_cache", shape, strides))
    soft_cap = attn_logits_soft_cap
    out = _launch.attend("decode", inputs, backend="auto", views=views, soft_cap=soft_cap)
    return cast(Array, out)
