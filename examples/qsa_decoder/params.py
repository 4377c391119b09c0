"""Loads weights of transformers' modules into those of modeling.py."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import torch
from flax import nnx
from modeling import Config


def config_of(
    text: Any,
    *,
    context_length: int,
    num_layers: int = 1,
    intermediate_size: int = 0,
    dtype: str = "float32",
) -> Config:
    """The sizes in a `Qwen4ExpTextConfig`, of which a plain decoder takes only the attention's."""
    if text.rope_parameters["rope_type"] != "default":
        raise ValueError(f"rope_type must be 'default', got {text.rope_parameters['rope_type']!r}")
    factor = text.rope_parameters.get("partial_rotary_factor", 1.0)
    return Config(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_qo_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        index_heads=text.indexer_n_heads,
        index_dim=text.indexer_head_dim,
        rotary_dim=int(text.head_dim * factor),
        rope_theta=text.rope_parameters["rope_theta"],
        compress_ratio=text.indexer_compress_ratio,
        budget=text.indexer_budget,
        context_length=context_length,
        rms_norm_eps=text.rms_norm_eps,
        dtype=dtype,
    )


def load(module: nnx.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Fills an `Attention`, a `Layer` or a `Decoder` from a `state_dict`, in the module's dtype.

    Attention, MLP and norms are named as in `Qwen4ExpTextAttention`, `Qwen4ExpTextMLP` and
    `Qwen4ExpTextRMSNorm`; a layer's parts input_layernorm, self_attn, post_attention_layernorm and
    mlp, a decoder's embed_tokens, layers, norm and lm_head, as those of Llama.

    Raises:
        ValueError: a weight is missing, has another shape, or has no place in the module.
    """
    left = dict(weights)
    for path, param in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        name = ".".join(map(str, path))
        if name not in left:
            raise ValueError(f"the weights must have {name!r}")
        weight = left.pop(name).detach().float().cpu().numpy()
        old = param[...]
        if weight.shape != old.shape:
            raise ValueError(f"{name} must be {list(old.shape)}, got {list(weight.shape)}")
        param[...] = jnp.asarray(weight.astype(old.dtype))
    if left:
        raise ValueError(f"the module has no place for {sorted(left)}")
