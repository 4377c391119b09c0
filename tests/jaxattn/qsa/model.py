"""A small model of QSA layers in JAX, and its state: one pool of pages for all layers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxattn
from jaxattn import qsa

State = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    layers: int = 2
    requests: int = 3
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    index_heads: int = 2
    index_dim: int = 16
    compress_ratio: int = 4
    budget: int = 16
    page_size: int = 16
    pages_per_seq: int = 6
    num_draft: int = 0
    dtype: str = "float32"
    via: str = "auto"

    @property
    def pages(self) -> int:
        """Of one layer."""
        return 1 + self.requests * self.pages_per_seq

    def state(self, *, seed: int = 0) -> State:
        """Caches of random tokens, rings, and the page table of layer 0."""
        keys = jax.random.split(jax.random.key(seed), 4)

        def normal(at: int, *shape: int) -> jax.Array:
            return jax.random.normal(keys[at], shape, self.dtype)

        pages = self.layers * self.pages
        kv = (pages, self.page_size, self.num_kv_heads, self.head_dim)
        rows = qsa.ring_rows(self.compress_ratio, self.num_draft)
        table = jax.random.permutation(keys[3], self.requests * self.pages_per_seq) + 1
        return dict(
            key_cache=normal(0, *kv),
            value_cache=normal(1, *kv),
            compressed_cache=normal(
                2, pages, self.page_size // self.compress_ratio, 1, self.index_dim
            ),
            ring=jnp.zeros((self.layers * self.requests, rows, self.index_dim), self.dtype),
            page_table=table.reshape(self.requests, self.pages_per_seq).astype(jnp.int32),
        )

    def constants(self) -> dict[str, jax.Array]:
        cos, sin = qsa.rotary_tables(self.pages_per_seq * self.page_size, 8, 1e4)
        weight = jnp.linspace(-0.1, 0.1, self.index_dim).astype(self.dtype)
        return dict(cos=cos, sin=sin, weight=weight)

    def step(
        self, x: jax.Array, state: State, seq_lens: Any, cu_seqlens_q: Any, *, scan: bool = False,
        **decodes: int,
    ) -> tuple[jax.Array, State]:  # fmt: skip
        """x [rows, num_qo_heads * head_dim] through all layers; keys are made of x."""
        table = state["page_table"]
        metadata, split = qsa.build_metadata(
            table, seq_lens, cu_seqlens_q, num_rows=x.shape[0],
            num_pages=self.layers * self.pages, page_size=self.page_size,
            compress_ratio=self.compress_ratio, via=self.via, **decodes,
        )  # fmt: skip
        constants = self.constants()

        def layer(carry: tuple[jax.Array, State], at: Any) -> tuple[tuple[jax.Array, State], None]:
            x, state = carry
            rows = x.shape[0]
            shift = jnp.asarray(at * self.pages, jnp.int32)
            query = x.reshape(rows, self.num_qo_heads, self.head_dim)
            key = query[:, : self.num_kv_heads] * 0.5
            own = table + shift
            key_cache, value_cache = jaxattn.append_kv(
                key, key * 2, state["key_cache"], state["value_cache"], own,
                positions=metadata.positions, request_ids=metadata.request_ids,
            )  # fmt: skip
            index = x[:, : self.index_heads * self.index_dim]
            groups_per_page = self.page_size // self.compress_ratio
            slots = metadata.slots
            slots = jnp.where(slots >= 0, slots + shift * groups_per_page, -1)
            result, ring, compressed_cache = qsa.attention(
                query,
                index.reshape(rows, self.index_heads, self.index_dim),
                index[:, : self.index_dim],
                key_cache,
                value_cache,
                state["compressed_cache"],
                state["ring"],
                own,
                seq_lens,
                metadata._replace(slots=slots),
                constants["weight"],
                constants["cos"],
                constants["sin"],
                budget=self.budget,
                compress_ratio=self.compress_ratio,
                ring_ids=jnp.arange(self.requests, dtype=jnp.int32) + at * self.requests,
                num_decodes=split.num_decodes,
                decode_query_len=split.decode_query_len,
                via=self.via,
            )
            state = state | dict(
                key_cache=key_cache,
                value_cache=value_cache,
                compressed_cache=compressed_cache,
                ring=ring,
            )
            return (x + result.reshape(x.shape).astype(x.dtype), state), None

        carry = (x, state)
        if scan:
            return jax.lax.scan(layer, carry, jnp.arange(self.layers, dtype=jnp.int32))[0]
        for at in range(self.layers):
            carry, _ = layer(carry, at)
        return carry

    def rows(self, count: int, seed: int = 0) -> jax.Array:
        shape = (count, self.num_qo_heads * self.head_dim)
        return jax.random.normal(jax.random.key(100 + seed), shape, self.dtype)


def decode_offsets(model: Model) -> np.ndarray:
    return np.arange(model.requests + 1, dtype=np.int32)
