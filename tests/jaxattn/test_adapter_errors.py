"""Every message of jaxattn.rpa and jaxattn.compat: what triggers it, and what it says."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxattn
from jaxattn import compat, rpa
from tests import errors
from tests.inputs import Case
from tests.rpa import MIXED

from .test_compat import make


def wrong(function, valid: dict, changes: dict):
    """A call with these arguments changed; a function is applied to the valid one."""
    call = {n: jnp.array(v) if isinstance(v, np.ndarray) else v for n, v in valid.items()}
    changes = {n: f(call.get(n)) if callable(f) else f for n, f in changes.items()}
    return jax.block_until_ready(function(**call | changes))


OF_RPA = [
    ("queries", dict(queries=lambda x: x[0]), ValueError,
     "queries must be bfloat16 or float16 or float32 [tokens, num_q_heads, head_dim], got float32"),
    ("queries_dtype", dict(queries=lambda x: x.astype(jnp.int32)), TypeError, "queries must be"),
    ("groups", dict(queries=lambda x: x[:, :3]), ValueError,
     "queries must have a positive multiple of num_kv_heads = 2 heads, got 3"),
    ("keys", dict(keys=lambda x: x[:3]), ValueError, "keys must be float32 [tokens, num_kv_heads"),
    ("keys_dtype", dict(keys=lambda x: x.astype(jnp.bfloat16)), TypeError, "keys must be float32"),
    ("values", dict(values=lambda x: x[:, :1]), ValueError, "values must be float32"),
    ("cache_dtype", dict(kv_cache=lambda x: x.astype(jnp.bfloat16)), TypeError,
     "kv_cache must have the queries' dtype float32 or be float8_e4m3fn or float8_e5m2, got bf"),
    ("cache_rank", dict(kv_cache=lambda x: x[0, 0]), ValueError, "kv_cache must be"),
    ("cache_heads", dict(kv_cache=lambda x: x[:, :, :3]), ValueError,
     "kv_cache must have pages of 1 token or more, with 2 * 2 heads or more of head_dim 64 or mor"),
    ("cache_width", dict(kv_cache=lambda x: x[..., :32]), ValueError, "kv_cache must have pages"),
    ("cache_page", dict(kv_cache=lambda x: x[:, :0]), ValueError, "kv_cache must have pages"),
    ("kv_lens", dict(kv_lens=lambda x: x.astype(jnp.uint32)), TypeError, "kv_lens must be int32"),
    ("page_indices", dict(page_indices=lambda x: x[1:]), ValueError,
     "page_indices must have a multiple of num_seqs = 5 entries, got 24"),
    ("page_table", dict(page_indices=lambda x: x.reshape(5, -1)), ValueError,
     "page_indices must be int32 [num_page_indices]"),
    ("cu_q_lens", dict(cu_q_lens=lambda x: x[1:]), ValueError, "cu_q_lens must be int32 [6]"),
    ("distribution", dict(distribution=lambda x: x[:1]), ValueError, "distribution must be int32"),
    ("torch", dict(kv_lens=lambda x: torch.zeros(5, dtype=torch.int32)), TypeError,
     "kv_lens must be a jax.Array, got torch.Tensor"),
    ("window", dict(sliding_window=0), ValueError, "sliding_window must be in [1,"),
    ("window_kind", dict(sliding_window=2.0), TypeError, "sliding_window must be a Python int"),
    ("window_mask", dict(sliding_window=3, use_causal_mask=False), ValueError,
     "sliding_window must come with use_causal_mask=True"),
    ("mask_value", dict(mask_value=-1.0), ValueError,
     "mask_value must be at most -10000, so that a masked key weighs 0, got -1.0"),
    ("soft_cap", dict(soft_cap=0.0), ValueError, "soft_cap must be a positive finite"),
    ("sm_scale", dict(sm_scale="x"), TypeError, "sm_scale must be a number"),
    ("no_sm_scale", dict(sm_scale=None), TypeError, "sm_scale must be a number"),
    ("q_scale", dict(q_scale=0.0), ValueError, "q_scale must be a positive"),
    ("k_scale", dict(k_scale=-1.0), ValueError, "k_scale must be a positive"),
    ("causal", dict(use_causal_mask=1), TypeError, "use_causal_mask must be True or False"),
    ("update", dict(update_kv_cache=None), TypeError, "update_kv_cache must be True or False"),
    ("max_seqlen_q", dict(max_seqlen_q=-1), ValueError, "max_seqlen_q must be in [0,"),
    ("max_seqlen_q_low", dict(max_seqlen_q=4), Exception,
     "max_seqlen_q must be at least the longest query, 9, got 4"),
    ("unknown", dict(window=3), TypeError,
     "ragged_paged_attention got an unexpected argument 'window'"),
]  # fmt: skip


OF_COMPAT = [
    ("q", dict(q=lambda x: x[0]), ValueError, "q must be bfloat16 or float16 or float32 [bat"),
    ("q_heads", dict(q=lambda x: x[:, :3]), ValueError,
     "q must have a positive multiple of num_kv_heads = 2 heads, got 3"),
    ("k_dtype", dict(k_pages=lambda x: x.astype(jnp.int8)), TypeError, "k_pages must be float32"),
    ("v_shape", dict(v_pages=lambda x: x[:, 1:]), ValueError, "v_pages must be float32 [num_"),
    ("tables", dict(block_tables=lambda x: x[1:]), ValueError, "block_tables must be int32 [b"),
    ("lengths", dict(lengths=lambda x: x.astype(jnp.float32)), TypeError, "lengths must be int32"),
    ("lengths_kind", dict(lengths=[1, 2]), TypeError, "lengths must be an array, got list"),
    ("scales", dict(k_scales_pages=lambda _: jnp.ones(3)), NotImplementedError,
     "k_scales_pages must be None: pages with a scale for each token are not supported"),
    ("v_scales", dict(v_scales_pages=lambda _: jnp.ones(3)), NotImplementedError,
     "v_scales_pages must be None"),
    ("mask_value", dict(mask_value=0.0), ValueError, "mask_value must be at most -10000"),
    ("cap", dict(attn_logits_soft_cap=-1.0), ValueError,
     "attn_logits_soft_cap must be a positive finite"),
]  # fmt: skip


def too_large():
    """A pool whose heads are 2**31 elements apart, by shape alone."""
    call = {n: jnp.array(v) for n, v in make(Case("", (9, 30))).items()}
    pages = jax.ShapeDtypeStruct((2, 2**24, 8, 16), jnp.float32)
    call |= dict(k_pages=pages, v_pages=pages)
    return jax.eval_shape(compat.paged_attention, **call)


CALLS = [
    pytest.param(lambda f=function, v=valid, c=row[1]: wrong(f, v(), c), *row[2:], id=row[0])
    for function, valid, rows in (
        (rpa.ragged_paged_attention, MIXED.make, OF_RPA),
        (compat.paged_attention, lambda: make(Case("", (9, 30))), OF_COMPAT),
    )
    for row in rows
]
CALLS.append(
    pytest.param(
        too_large, ValueError, "k_pages must have fewer than 2**31 elements a head, got [2, 16777",
        id="size",
    )
)  # fmt: skip


@pytest.mark.parametrize("trigger, kind, message", CALLS)
def test_messages(trigger, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        trigger()


def test_every_raise_is_triggered():
    missing = errors.uncovered(jaxattn, [row.values[0] for row in CALLS])
    assert not [place for place in missing if place.startswith(("rpa.py", "compat.py"))]
