"""A small decoder of two layers: on whole sequences in float64, and on paged caches in JAX."""

from typing import Any

import jax.numpy as jnp
import numpy as np

VOCAB, HEADS, KV_HEADS, MAX_LEN = 64, 4, 2, 128


class Decoder:
    """Attention with residuals, no MLP; a layer's keys depend on what the layer before saw."""

    def __init__(self, head_dim: int = 16, layers: int = 2):
        rng = np.random.default_rng(0)
        self.head_dim = head_dim
        hidden = HEADS * head_dim

        def matrix(rows: int, columns: int, size: float = 1.0) -> np.ndarray:
            return rng.normal(0, size / rows**0.5, (rows, columns))

        self.embedding = rng.normal(size=(VOCAB, hidden))
        self.places = rng.normal(size=(MAX_LEN, hidden))
        kv = KV_HEADS * head_dim
        self.layers = [
            dict(query=matrix(hidden, hidden, 2), key=matrix(hidden, kv), value=matrix(hidden, kv),
                 out=matrix(hidden, hidden, 2))
            for _ in range(layers)
        ]  # fmt: skip
        self.head = matrix(hidden, VOCAB)

    def exact(self, tokens: list[int]) -> np.ndarray:
        """Logits [len(tokens), VOCAB] in float64, dense causal attention."""
        length = len(tokens)
        x = self.embedding[tokens] + self.places[:length]
        for layer in self.layers:
            query = (x @ layer["query"]).reshape(length, HEADS, -1)
            key, value = (
                np.repeat((x @ layer[n]).reshape(length, KV_HEADS, -1), HEADS // KV_HEADS, 1)
                for n in ("key", "value")
            )
            scores = np.einsum("qhd,khd->hqk", query, key) * self.head_dim**-0.5
            scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out = np.einsum("hqk,khd->qhd", weights, value).reshape(length, -1)
            x = x + out @ layer["out"]
        return x @ self.head

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The prompt and `count` tokens more."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.exact(tokens)[-1].argmax()))
        return tokens

    def paged(self, tokens: Any, places: Any, caches: list, attend: Any) -> tuple[Any, list]:
        """Logits [rows, VOCAB] of rows, and the caches; attend(cache, query, key, value) returns
        (out, cache)."""
        dtype = caches[0].dtype
        x = jnp.asarray(self.embedding, dtype)[tokens]
        x += jnp.asarray(self.places, dtype)[jnp.maximum(places, 0)]
        new = []
        for layer, cache in zip(self.layers, caches, strict=True):
            query, key, value = (
                (x @ jnp.asarray(layer[n], dtype)).reshape(len(x), -1, self.head_dim)
                for n in ("query", "key", "value")
            )
            out, cache = attend(cache, query, key, value)
            x = x + out.reshape(x.shape) @ jnp.asarray(layer["out"], dtype)
            new.append(cache)
        return (x @ jnp.asarray(self.head, dtype)).astype(jnp.float32), new
