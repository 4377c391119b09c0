"""The caches of one layer with what is needed to read them."""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32, Shaped

from torch_core import checks

from . import paging
from .decode import AnyArray, Scale, decode
from .kv_cache import append_kv
from .prefill import prefill


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class PagedKVCache:
    """The caches of one layer and how to read them; a model holds a list of these.

    A pytree: donate it to the surrounding jit. Its methods are `append_kv`, `decode` and `prefill`
    with the caches, layout and scales filled in.

    Fields:
        key_cache, value_cache: [num_pages, page_size, num_kv_heads, head_dim] in "NHD", [num_pages,
            num_kv_heads, page_size, head_dim] in "HND".
        k_scale, v_scale: dequantisation factors, numbers or 0-d float arrays; None is 1.
        kv_layout: "NHD" or "HND", static in jit.
    """

    key_cache: Any
    value_cache: Any
    k_scale: Any = None
    v_scale: Any = None
    kv_layout: str = field(default="NHD", metadata=dict(static=True))

    @classmethod
    def zeros(
        cls,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: Any,
        kv_layout: str = "NHD",
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
    ) -> "PagedKVCache":
        """Caches of zeros.

        Args:
            num_pages, page_size, num_kv_heads, head_dim: the sizes.
            dtype: bfloat16, float16, float32, float8_e4m3fn or float8_e5m2.
            kv_layout: "NHD" or "HND".
            k_scale, v_scale: dequantisation factors, numbers or 0-d float arrays; default 1.

        Returns:
            A PagedKVCache.

        Raises:
            ValueError, TypeError: a wrong size, dtype, layout or scale.
        """
        sizes = dict(
            num_pages=num_pages, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
        for name, size in sizes.items():
            checks.integer(name, size, 1)
        checks.choice("kv_layout", kv_layout, checks.KV_LAYOUTS)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            checks.scale(name, 1.0 if scale is None else scale)
        if not any(dtype == jnp.dtype(name) for name in checks.CACHE_DTYPES):
            raise TypeError(f"dtype must be {' or '.join(checks.CACHE_DTYPES)}, got {dtype!r}")
        tokens = (page_size, num_kv_heads) if kv_layout == "NHD" else (num_kv_heads, page_size)
        shape = (num_pages, *tokens, head_dim)
        new = functools.partial(jnp.zeros, shape, dtype)
        return cls(new(), new(), k_scale, v_scale, kv_layout)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.key_cache.shape[1 if self.kv_layout == "NHD" else 2]

    @property
    def dtype(self) -> Any:
        """The dtype of the caches, NumPy's."""
        return self.key_cache.dtype

    def append_kv(
        self,
        key: Float[AnyArray, "tokens num_kv_heads head_dim"],
        value: Float[AnyArray, "tokens num_kv_heads head_dim"],
        page_table: Int32[AnyArray, "batch pages_per_seq"] | None = None,
        **places: Any,
    ) -> "PagedKVCache":
        """The cache with new tokens; arguments and errors of `jaxattn.append_kv`."""
        caches = append_kv(
            key, value, self.key_cache, self.value_cache, page_table, **places, **self._options()
        )
        return self._with(*caches)

    def decode(
        self,
        query: Shaped[AnyArray, "rows num_qo_heads head_dim"],
        page_table: Int32[AnyArray, "batch pages_per_seq"],
        seq_lens: Int32[AnyArray, " batch"],
        **options: Any,
    ) -> Any:
        """`jaxattn.decode` on this cache; its other arguments, results and errors."""
        paged = (self.key_cache, self.value_cache, page_table, seq_lens)
        return decode(query, *paged, **options, **self._options())

    def prefill(
        self,
        query: Shaped[AnyArray, "total_q num_qo_heads head_dim"],
        page_table: Int32[AnyArray, "batch pages_per_seq"],
        seq_lens: Int32[AnyArray, " batch"],
        cu_seqlens_q: Int32[AnyArray, " batch+1"],
        **options: Any,
    ) -> Any:
        """`jaxattn.prefill` on this cache; its other arguments, results and errors."""
        paged = (self.key_cache, self.value_cache, page_table, seq_lens, cu_seqlens_q)
        return prefill(query, *paged, **options, **self._options())

    def copy_pages(
        self, source: Int32[AnyArray, " copies"], target: Int32[AnyArray, " copies"]
    ) -> "PagedKVCache":
        """The cache after `paging.copy_pages` of both arrays."""
        caches = (self.key_cache, self.value_cache)
        return self._with(*(paging.copy_pages(cache, source, target) for cache in caches))

    def _options(self) -> dict[str, Any]:
        return dict(k_scale=self.k_scale, v_scale=self.v_scale, kv_layout=self.kv_layout)

    def _with(self, key_cache: Array, value_cache: Array) -> "PagedKVCache":
        return replace(self, key_cache=key_cache, value_cache=value_cache)
