"""A decoder in Flax NNX whose attention is QSA, on paged caches, for inference.

The attention layer is transformers' `Qwen4ExpTextAttention`, parameter for parameter: norms of
queries and keys, partial rotary embedding, an output gate and the indexer. Around it is a plain
decoder. One row of a pass is one token of one request, and `Batch` says which; there is one model
for chunked prefill and decode. With `Mode.sparse` off the same weights attend densely.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import jaxattn
from jaxattn import qsa

Ints = Any  # an int32 array of JAX or NumPy


@dataclass(frozen=True, kw_only=True)
class Config:
    """The sizes of a decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    index_heads: int
    index_dim: int
    rotary_dim: int  # columns of a head that turn, in attention and in the indexer
    rope_theta: float
    compress_ratio: int  # tokens of a group
    budget: int  # tokens that a row attends to, besides those of its unfinished group
    context_length: int
    rms_norm_eps: float = 1e-6
    dtype: str = "float32"


class Batch(NamedTuple):
    """Where the rows of a pass belong. Decoding requests come first and have one row each."""

    page_table: Ints  # [requests, pages_per_seq]
    seq_lens: Ints  # [requests], tokens in the cache once this pass has added its own
    cu_seqlens_q: Ints  # [requests + 1], first row of each; rows past the last are padding


@dataclass(frozen=True, kw_only=True)
class Mode:
    """What a pass is compiled for."""

    num_decodes: int  # requests that decode; the others prefill
    sparse: bool = True  # False: every row attends to its whole context
    via: str = "auto"  # as in jaxattn.qsa


class Cache(NamedTuple):
    """What one layer remembers."""

    key: Array  # [num_pages, page_size, num_kv_heads, head_dim]
    value: Array
    index_key: Array  # [num_pages, page_size // compress_ratio, 1, index_dim], of finished groups
    ring: Array  # [requests, ring_rows, index_dim], raw index keys of unfinished groups


class Step(NamedTuple):
    """What the layers of one pass share."""

    batch: Batch
    mode: Mode
    metadata: qsa.Metadata
    cos: Array  # [context_length, rotary_dim // 2]
    sin: Array


class Linear(nnx.Module):
    """x times a matrix that lies as torch's do; weights are 0 until `params.load` fills them."""

    def __init__(self, features_in: int, features_out: int, config: Config):
        self.weight = nnx.Param(jnp.zeros((features_out, features_in), config.dtype))

    def __call__(self, x: Array) -> Array:
        return x @ self.weight[...].T


class Embedding(nnx.Module):
    def __init__(self, config: Config):
        self.weight = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), config.dtype))

    def __call__(self, tokens: Ints) -> Array:
        return self.weight[...][jnp.asarray(tokens)]


class RMSNorm(nnx.Module):
    """x / rms(x) * (1 + weight), in float32."""

    def __init__(self, features: int, config: Config):
        self.eps = config.rms_norm_eps
        self.weight = nnx.Param(jnp.zeros(features, config.dtype))

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps)
        return (wide * scale * (1 + self.weight[...].astype(jnp.float32))).astype(x.dtype)

    def rotated(self, x: Array, step: Step) -> Array:
        """Norm and rotary embedding of heads [rows, heads, features]."""
        positions = step.metadata.positions
        return qsa.prepare_query(x, self.weight[...], step.cos, step.sin, positions, eps=self.eps)


class Indexer(nnx.Module):
    """Makes the queries that look for groups, and the raw keys that groups are made of."""

    def __init__(self, config: Config):
        heads = config.index_heads + 1
        self.index_qk_proj = Linear(config.hidden_size, heads * config.index_dim, config)
        self.q_layernorm = RMSNorm(config.index_dim, config)
        self.k_layernorm = RMSNorm(config.index_dim, config)  # of a finished group's mean

    def __call__(self, x: Array, step: Step) -> tuple[Array, Array]:
        index_dim = len(self.q_layernorm.weight[...])
        heads = self.index_qk_proj(x).reshape(len(x), -1, index_dim)
        return self.q_layernorm.rotated(heads[:, :-1], step), heads[:, -1]


class Attention(nnx.Module):
    def __init__(self, config: Config):
        self.config = config
        hidden, dim = config.hidden_size, config.head_dim
        # Each head has its query and then its gate.
        self.q_proj = Linear(hidden, config.num_qo_heads * 2 * dim, config)
        self.k_proj = Linear(hidden, config.num_kv_heads * dim, config)
        self.v_proj = Linear(hidden, config.num_kv_heads * dim, config)
        self.o_proj = Linear(config.num_qo_heads * dim, hidden, config)
        self.q_norm = RMSNorm(dim, config)
        self.k_norm = RMSNorm(dim, config)
        self.indexer = Indexer(config)

    def __call__(self, x: Array, step: Step, cache: Cache) -> tuple[Array, Cache]:
        rows, dim = len(x), self.config.head_dim
        query, gate = jnp.split(self.q_proj(x).reshape(rows, -1, 2 * dim), 2, axis=-1)
        query = self.q_norm.rotated(query, step)
        key = self.k_norm.rotated(self.k_proj(x).reshape(rows, -1, dim), step)
        key_cache, value_cache = jaxattn.append_kv(
            key,
            self.v_proj(x).reshape(rows, -1, dim),
            cache.key,
            cache.value,
            step.batch.page_table,
            positions=step.metadata.positions,
            request_ids=step.metadata.request_ids,
        )
        cache = cache._replace(key=key_cache, value=value_cache)
        if step.mode.sparse:
            out, cache = self.sparse(x, query, gate, step, cache)
        else:
            out = self.dense(query, gate, step, cache)
        return self.o_proj(out.reshape(rows, -1)), cache

    def sparse(
        self, x: Array, query: Array, gate: Array, step: Step, cache: Cache
    ) -> tuple[Array, Cache]:
        index_query, index_key = self.indexer(x, step)
        norm = self.indexer.k_layernorm
        out: Any  # without return_lse, one array
        out, ring, compressed_cache = qsa.attention(
            query,
            index_query,
            index_key,
            cache.key,
            cache.value,
            cache.index_key,
            cache.ring,
            step.batch.page_table,
            step.batch.seq_lens,
            step.metadata,
            norm.weight[...],
            step.cos,
            step.sin,
            budget=self.config.budget,
            compress_ratio=self.config.compress_ratio,
            eps=norm.eps,
            gate=gate,
            num_decodes=step.mode.num_decodes,
            via=step.mode.via,
        )
        return out, cache._replace(index_key=compressed_cache, ring=ring)

    def dense(self, query: Array, gate: Array, step: Step, cache: Cache) -> Array:
        batch, rows = step.batch, len(query)
        paged = (query, cache.key, cache.value, batch.page_table, batch.seq_lens)
        out: Any
        if step.mode.num_decodes == rows:
            out = jaxattn.decode(*paged)
        else:
            out = jaxattn.prefill(*paged, batch.cu_seqlens_q, max_seqlen_q=rows)
        return (out * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(query.dtype)


class MLP(nnx.Module):
    def __init__(self, config: Config):
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, config)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, config)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self, config: Config):
        self.input_layernorm = RMSNorm(config.hidden_size, config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config)
        self.mlp = MLP(config)

    def __call__(self, x: Array, step: Step, cache: Cache) -> tuple[Array, Cache]:
        out, cache = self.self_attn(self.input_layernorm(x), step, cache)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Decoder(nnx.Module):
    def __init__(self, config: Config):
        self.config = config
        self.embed_tokens = Embedding(config)
        self.layers = nnx.List([Layer(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, config)
        self.tables = nnx.Variable(rotary_tables(config))  # an argument of the compiled pass

    def __call__(
        self, tokens: Ints, batch: Batch, caches: list[Cache], mode: Mode
    ) -> tuple[Array, list[Cache]]:
        """Returns the last layer's output [rows, hidden_size] for tokens [rows], and the caches."""
        step = begin_step(self.config, self.tables[...], batch, caches[0], mode, len(tokens))
        x, new_caches = self.embed_tokens(tokens), []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, step, cache)
            new_caches.append(cache)
        return x, new_caches

    def logits(self, x: Array) -> Array:
        """Scores of the next token [rows, vocab_size], float32, from the output of `__call__`."""
        return self.lm_head(self.norm(x)).astype(jnp.float32)


def rotary_tables(config: Config) -> Array:
    """Cosine and sine [2, context_length, rotary_dim // 2], float32."""
    tables = qsa.rotary_tables(config.context_length, config.rotary_dim, config.rope_theta)
    return jnp.stack(tables)


def begin_step(
    config: Config, tables: Array, batch: Batch, cache: Cache, mode: Mode, rows: int
) -> Step:
    """Describes the rows of a pass, once for all layers; `cache` is that of any layer."""
    num_pages, page_size = cache.key.shape[:2]
    metadata, _ = qsa.build_metadata(
        *batch,
        num_rows=rows,
        num_pages=num_pages,
        page_size=page_size,
        compress_ratio=config.compress_ratio,
        num_decodes=mode.num_decodes,
        decode_query_len=1,
        via=mode.via,
    )
    return Step(batch, mode, metadata, tables[0], tables[1])


def init_caches(config: Config, num_pages: int, page_size: int, requests: int) -> list[Cache]:
    """Empty caches of all layers; page_size is a multiple of the ratio."""
    kv = (num_pages, page_size, config.num_kv_heads, config.head_dim)
    index_key = (num_pages, page_size // config.compress_ratio, 1, config.index_dim)
    ring = (requests, qsa.ring_rows(config.compress_ratio, 0), config.index_dim)
    new = partial(jnp.zeros, dtype=config.dtype)
    return [Cache(new(kv), new(kv), new(index_key), new(ring)) for _ in range(config.num_layers)]


class Engine:
    """A model's compiled pass: a chunk of prompts, or one more token for each request."""

    def __init__(self, model: Decoder, *, sparse: bool = True, via: str = "auto"):
        self.config = model.config
        graph, self.state = nnx.split(model)

        def run(state, caches, tokens, batch, num_decodes):
            model = nnx.merge(graph, state)
            mode = Mode(num_decodes=num_decodes, sparse=sparse, via=via)
            x, caches = model(tokens, batch, caches, mode)
            last = jnp.maximum(jnp.asarray(batch.cu_seqlens_q)[1:] - 1, 0)
            return model.logits(x[last]), caches

        self.run = jax.jit(run, static_argnames="num_decodes", donate_argnames="caches")

    def __call__(
        self, caches: list[Cache], tokens: Ints, batch: Batch, num_decodes: int
    ) -> tuple[Array, list[Cache]]:
        """Runs tokens [rows]; returns the logits [requests, vocab_size] after each request's last
        row, which mean nothing where it has none, and the new caches: those given are consumed."""
        return self.run(self.state, caches, tokens, batch, num_decodes)

    def compile(self, *arguments: Any) -> Any:
        """Compiles what a call with these arguments will run, and returns it."""
        return self.run.lower(self.state, *arguments).compile()
