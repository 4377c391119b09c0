"""The plainest decode as XLA operations, for a CPU: a callback into torch between two layers costs
more there than attention over a small cache. Wrong lengths and page ids go to the reference, which
says what is wrong."""

import jax
import jax.numpy as jnp
from jax import Array

from torch_core.problem import AttentionInputs, AttentionProblem, DecodeProblem

# Elements of a gathered cache, which has the size of the whole page table. Measured: up to about
# this size the gather costs less than a callback.
MAX_ELEMENTS = 2**20


def suits(problem: AttentionProblem) -> bool:
    """Whether `decode` below computes this problem."""
    tokens = problem.batch * problem.pages_per_seq * problem.page_size
    return (
        isinstance(problem, DecodeProblem)
        and problem.q_len == 1
        and problem.causal
        and problem.window_left < 0
        and problem.soft_cap is None
        and problem.kv_dtype == problem.query_dtype == "float32"
        and not (problem.sinks or problem.return_lse or problem.batch_invariant)
        and isinstance(tokens, int)  # not a symbol of jax.export
        and 0 < tokens * problem.num_kv_heads * problem.head_dim <= MAX_ELEMENTS
        and problem.num_pages > 0
    )


def valid(problem: AttentionProblem, arrays: AttentionInputs) -> Array:
    """bool []: lengths and the page ids that they use are in range."""
    lengths, pages = arrays.seq_lens, arrays.page_table
    used = jnp.arange(problem.pages_per_seq)[None] * problem.page_size < lengths[:, None]
    in_range = (pages >= 0) & (pages < problem.num_pages)
    capacity = problem.pages_per_seq * problem.page_size
    return jnp.all((lengths >= 0) & (lengths <= capacity)) & jnp.all(in_range | ~used)


def decode(problem: AttentionProblem, arrays: AttentionInputs, scales: dict) -> Array:
    """softmax(query . key * scale) value for one row of each request."""
    tokens = problem.pages_per_seq * problem.page_size
    heads = (problem.num_kv_heads, problem.group_size)
    pages = jnp.clip(arrays.page_table, 0, problem.num_pages - 1)

    def gathered(cache: Array) -> Array:  # [batch, tokens, num_kv_heads, head_dim]
        picked = cache[pages]
        if problem.kv_layout == "HND":
            picked = jnp.swapaxes(picked, 2, 3)
        return picked.reshape(problem.batch, tokens, problem.num_kv_heads, problem.head_dim)

    seen = jnp.arange(tokens)[None] < arrays.seq_lens[:, None]  # [batch, tokens]
    key, value = gathered(arrays.key_cache), gathered(arrays.value_cache)
    # A slot past the length may hold NaN, and 0 * NaN is NaN.
    value = jnp.where(seen[:, :, None, None], value, 0)
    query = arrays.query.reshape(problem.batch, *heads, problem.head_dim)
    precision = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bhgd,bthd->bhgt", query, key, precision=precision)
    scores = scores * (scales["sm_scale"] * scales["k_scale"])
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0, top))
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    out = jnp.einsum("bhgt,bthd->bhgd", weights, value, precision=precision)
    return (out * scales["v_scale"]).reshape(problem.out_shape)
