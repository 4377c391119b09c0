"""A decoder with weights made by hand that looks up what followed a word, and contexts to search.

It is an induction head. Each of 64 tokens has a code, orthogonal to the others. Layer 0 attends to
the token before, by rotary embedding alone, and writes its code beside the own one. Layer 1 looks
for the token whose predecessor has the code of the current one, and copies that token's code to
where the head reads its answer. Indexers do the same as their attention. MLPs add nothing.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
from flax import nnx
from modeling import Config, Decoder
from params import load

CODE = 64  # tokens, and columns of a code
KEYS = 16  # the first tokens: they are needles only, never hay
OWN, PREVIOUS, ANSWER = (slice(i * CODE, (i + 1) * CODE) for i in range(3))  # of a hidden state
HIDDEN_SIZE = 3 * CODE
ROTARY_DIM = 64  # of a head's columns the first ROTARY_DIM turn,
CONTENT = slice(ROTARY_DIM, ROTARY_DIM + CODE)  # and these hold a code
ROPE_THETA = 1e4
# Norm weights w: factors (1 + w)**2 of the scores. The neighbours of the token before score 3%
# less; after e ** difference nothing of them may be left.
SHARPNESS = 5.0


class Context(NamedTuple):
    """A sequence of tokens, where its needles lie, and what follows each."""

    tokens: np.ndarray  # [length]
    places: np.ndarray  # [needles]
    keys: np.ndarray  # [needles], the token at the place: the question
    answers: np.ndarray  # [needles], the token after it


def make_context(length: int, needles: int, rng: np.random.Generator) -> Context:
    """Random tokens with needles at even depths, the first near the start, the last at the end."""
    tokens = rng.integers(KEYS, CODE, length).astype(np.int32)
    places = np.linspace(0.01, 1, needles) * (length - 2)
    places = places.astype(np.int32)
    keys = rng.permutation(KEYS)[:needles].astype(np.int32)
    tokens[places] = keys
    return Context(tokens, places, keys, tokens[places + 1])


def make_model(config: Config) -> Decoder:
    """The decoder described above, of two layers and of any number of heads."""
    model = Decoder(config)
    weights = {
        ".".join(map(str, path)): torch.zeros(param.shape)
        for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    # Hadamard's matrix: orthogonal rows of 1 and -1.
    codes = functools.reduce(torch.kron, [torch.tensor([[1.0, 1.0], [1.0, -1.0]])] * 6)
    weights["embed_tokens.weight"][:, OWN] = codes
    weights["lm_head.weight"][:, ANSWER] = codes
    same = torch.eye(CODE)
    # Every code begins with a 1, so the first column of the hidden state stands for a constant.
    here = torch.zeros(CODE, CODE)
    here[: ROTARY_DIM // 2, 0] = 1
    before = torch.zeros(CODE, CODE)  # the same, turned back by one position
    angles = ROPE_THETA ** -(torch.arange(0, ROTARY_DIM, 2) / ROTARY_DIM)
    before[:ROTARY_DIM, 0] = torch.cat([angles.cos(), -angles.sin()])
    turning = slice(0, ROTARY_DIM)
    _set_layer(weights, 0, config, turning, before, here, here, OWN, PREVIOUS)
    _set_layer(weights, 1, config, CONTENT, same, same, same, PREVIOUS, ANSWER)
    load(model, weights)
    return model


def _set_layer(
    weights: dict[str, torch.Tensor],
    layer: int,
    config: Config,
    columns: slice,
    query: torch.Tensor,
    index_query: torch.Tensor,
    key: torch.Tensor,
    key_from: slice,
    out_to: slice,
) -> None:
    """Fills `columns` of all heads' queries from the own code, of keys from the `key_from` code,
    and sends the own code of the attended token to `out_to`. All heads do the same."""
    attention = f"layers.{layer}.self_attn"

    def heads(name: str, size: int) -> torch.Tensor:
        """A projection's weight as [heads, size, hidden_size]."""
        return weights[f"{attention}.{name}.weight"].view(-1, size, HIDDEN_SIZE)

    dim = config.head_dim
    heads("q_proj", 2 * dim)[:, columns, OWN] = query  # the gate stays 0: it halves the output
    heads("k_proj", dim)[:, columns, key_from] = key
    heads("v_proj", dim)[:, :CODE, OWN] = torch.eye(CODE)
    index = heads("indexer.index_qk_proj", config.index_dim)
    index[:-1, columns, OWN] = index_query
    index[-1, columns, key_from] = key
    out = weights[f"{attention}.o_proj.weight"].view(HIDDEN_SIZE, -1, dim)
    out[out_to, :, :CODE] = torch.eye(CODE)[:, None] * 2 / config.num_qo_heads
    for norm in ("q_norm", "k_norm"):
        weights[f"{attention}.{norm}.weight"].fill_(SHARPNESS)
