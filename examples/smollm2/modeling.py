"""A Llama-family decoder (Llama, SmolLM2, Qwen3 dense) in Flax NNX on jaxattn's paged attention.

Every forward pass reads a packed batch: one row is one token of one request, and `Batch` says
which token of which request, and in which pages of the cache that request lives. There is one
model for prefill and decode; `Batch.cu_seqlens_q` tells them apart.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import jaxattn

Ints = Any  # an int32 array of JAX or NumPy

Cache = jaxattn.PagedKVCache  # of one layer
Caches = list[Cache]
Rope = tuple[Array, Array]  # cosine and sine [rows, 1, head_dim // 2]


@dataclass(frozen=True)
class Config:
    """The sizes of a decoder; `rope_frequencies` holds head_dim // 2 radians per position."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope_frequencies: tuple[float, ...]
    tied_head: bool = True
    qk_norm: bool = False
    dtype: str = "float32"


class Batch(NamedTuple):
    """Where the rows of a forward pass belong."""

    positions: Ints  # [rows], of the token in its request; -1 marks a padding row
    page_table: Ints  # [batch, pages_per_seq]
    seq_lens: Ints  # [batch], tokens in the cache once this pass has added its own
    request_ids: Ints | None = None  # [rows]; None: row i is the one new token of request i
    cu_seqlens_q: Ints | None = None  # [batch + 1], first row of each request; None: decode


class Sampling(NamedTuple):
    """How to pick a token: temperature 0 is greedy; top_p 1 keeps the whole vocabulary."""

    temperature: float = 0.0
    top_p: float = 1.0


GREEDY = Sampling()


def linear(features_in: int, features_out: int, config: Config, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        features_in,
        features_out,
        use_bias=False,
        dtype=config.dtype,
        param_dtype=config.dtype,
        rngs=rngs,
    )


def rms_norm(features: int, config: Config, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        features,
        epsilon=config.rms_norm_eps,
        dtype=config.dtype,
        param_dtype=config.dtype,
        rngs=rngs,
    )


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Applies rotary embedding to x [rows, heads, head_dim], the two halves forming the pairs."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        heads = config.num_qo_heads + 2 * config.num_kv_heads
        self.qkv = linear(config.hidden_size, heads * config.head_dim, config, rngs)
        self.out = linear(config.num_qo_heads * config.head_dim, config.hidden_size, config, rngs)
        if config.qk_norm:
            self.query_norm = rms_norm(config.head_dim, config, rngs)
            self.key_norm = rms_norm(config.head_dim, config, rngs)

    def __call__(
        self, x: Array, rope: Rope, batch: Batch, cache: Cache, backend: str
    ) -> tuple[Array, Cache]:
        rows, config = x.shape[0], self.config
        heads = self.qkv(x).reshape(rows, -1, config.head_dim)
        key_start, value_start = config.num_qo_heads, config.num_qo_heads + config.num_kv_heads
        query, key, value = jnp.split(heads, [key_start, value_start], axis=1)
        if config.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, *rope), rotate(key, *rope)
        places = dict(positions=batch.positions, request_ids=batch.request_ids)
        cache = cache.append_kv(key, value, batch.page_table, **places)
        paged = (query, batch.page_table, batch.seq_lens)
        if batch.cu_seqlens_q is None:
            out = cache.decode(*paged, backend=backend)
        else:
            # No request has more rows than the pass. Decode and prefill have kernels of their own:
            # only the reference is a name for both.
            backend = backend if backend == "reference" else "auto"
            out = cache.prefill(*paged, batch.cu_seqlens_q, max_seqlen_q=rows, backend=backend)
        return self.out(out.reshape(rows, -1)), cache


class MLP(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.gate_up = linear(config.hidden_size, 2 * config.intermediate_size, config, rngs)
        self.down = linear(config.intermediate_size, config.hidden_size, config, rngs)

    def __call__(self, x: Array) -> Array:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(nnx.silu(gate) * up)


class Layer(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention_norm = rms_norm(config.hidden_size, config, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = rms_norm(config.hidden_size, config, rngs)
        self.mlp = MLP(config, rngs)

    def __call__(
        self, x: Array, rope: Rope, batch: Batch, cache: Cache, backend: str
    ) -> tuple[Array, Cache]:
        out, cache = self.attention(self.attention_norm(x), rope, batch, cache, backend)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), cache


class Decoder(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=config.dtype,
            param_dtype=config.dtype,
            rngs=rngs,
        )
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_layers)])
        self.norm = rms_norm(config.hidden_size, config, rngs)
        if not config.tied_head:
            self.head = linear(config.hidden_size, config.vocab_size, config, rngs)

    def __call__(
        self, tokens: Ints, batch: Batch, caches: Caches, backend: str = "auto"
    ) -> tuple[Array, Caches]:
        """Returns the last layer's output [rows, hidden_size] for tokens [rows], and the caches."""
        frequencies = jnp.array(self.config.rope_frequencies, jnp.float32)
        angles = batch.positions[:, None, None] * frequencies  # [rows, 1, head_dim // 2]
        rope = jnp.cos(angles), jnp.sin(angles)
        x = self.embed(jnp.asarray(tokens))
        new_caches = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, rope, batch, cache, backend)
            new_caches.append(cache)
        return x, new_caches

    def logits(self, x: Array) -> Array:
        """Scores of the next token [rows, vocab_size] in float32 from the output of `__call__`."""
        x = self.norm(x)
        if not self.config.tied_head:
            return self.head(x).astype(jnp.float32)
        # With the table on the left XLA's CPU code reads it row by row; `x @ table.T` is slower.
        return (self.embed.embedding[...] @ x.T).T.astype(jnp.float32)


def init_caches(config: Config, num_pages: int, page_size: int) -> Caches:
    sizes = (num_pages, page_size, config.num_kv_heads, config.head_dim)
    return [Cache.zeros(*sizes, dtype=config.dtype) for _ in range(config.num_layers)]


def sample(logits: Array, key: Array, sampling: Sampling) -> Array:
    """Picks a token [batch] from logits [batch, vocab_size].

    Top-p keeps the most likely tokens up to and including the one at which their probabilities
    (after the temperature) add up to `top_p`.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_p == 1:
        return jax.random.categorical(key, logits).astype(jnp.int32)
    order = jnp.argsort(logits, axis=-1, descending=True)
    logits = jnp.take_along_axis(logits, order, axis=-1)
    probs = jax.nn.softmax(logits, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    # The first token stays whatever the rounding of `before` does.
    kept = (before < sampling.top_p).at[:, 0].set(True)
    choice = jax.random.categorical(key, jnp.where(kept, logits, -jnp.inf))
    return jnp.take_along_axis(order, choice[:, None], axis=-1)[:, 0].astype(jnp.int32)


class Engine:
    """A model's compiled step: one chunk of prompts, or one more token for each request."""

    def __init__(self, model: Decoder, sampling: Sampling = GREEDY, backend: str = "auto"):
        self.config = model.config
        # jax.jit reads a plain tree of arrays three times faster than the module they come from:
        # 2 ms less for each token.
        graph, self.state = nnx.split(model)

        def step(state, caches, tokens, batch, key, count):
            model = nnx.merge(graph, state)
            x, caches = model(tokens, batch, caches, backend)
            if batch.cu_seqlens_q is not None:
                x = x[jnp.maximum(batch.cu_seqlens_q[1:] - 1, 0)]
            key = jax.random.fold_in(key, count)
            return sample(model.logits(x), key, sampling), caches

        self.step = jax.jit(step, donate_argnames="caches")

    def __call__(
        self, caches: Caches, tokens: Ints, batch: Batch, key: Array, count: Ints
    ) -> tuple[Array, Caches]:
        """Runs `tokens` [rows] and picks a token [batch] after the last row of each request.

        The token of a request is meaningless where its prompt does not end in this chunk, and
        where it has no row. `key` and the number of the step, `count`, seed the choice. The
        caches given are consumed; go on with those returned.
        """
        return self.step(self.state, caches, tokens, batch, key, count)

    def compile(self, *arguments):
        """Compiles what a call with these arguments will run, and returns it."""
        return self.step.lower(self.state, *arguments).compile()
