"""The plainest CPU decode, which XLA computes: the same answers and the same errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattn
from jaxattn import _plain
from tests import compare, inputs
from tests.inputs import Case

CASE = Case("plain", (5, 0, 17, 64), num_qo_heads=6, head_dim=24)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("poison", [0, np.nan, np.inf, 3e4])
def test_equals_oracle_and_reads_nothing_else(kv_layout, poison):
    """Every slot that no token fills holds the poison."""
    case = Case("plain", CASE.seq_lens, num_qo_heads=6, head_dim=24, kv_layout=kv_layout)
    arguments = case.make() | dict(k_scale=0.5, v_scale=3.0)
    used = np.zeros((len(arguments["key_cache"]), case.page_size), bool)
    for request, length in enumerate(case.seq_lens):
        at = np.arange(length)
        used[arguments["page_table"][request, at // case.page_size], at % case.page_size] = True
    for name in ("key_cache", "value_cache"):
        tokens = arguments[name] if kv_layout == "NHD" else arguments[name].swapaxes(1, 2)
        tokens[~used] = poison
    out = inputs.run_jax(jaxattn.decode, arguments)
    compare.check_attention(arguments, out)


def test_only_by_default_and_within_its_size():
    """Named, or over a wide page table, the reference runs, in a custom call."""

    def lowered(arguments, **more):
        arrays = {n: inputs.to_jax(v) for n, v in arguments.items() if isinstance(v, np.ndarray)}
        call = jax.jit(lambda a: jaxattn.decode(**a, **more))
        return call.lower(arrays).as_text()

    arguments = CASE.make()
    assert "stablehlo.case" in lowered(arguments)
    assert "stablehlo.case" not in lowered(arguments, backend="reference")
    wide = _plain.MAX_ELEMENTS // (4 * 8 * 2 * 24) + 1
    arguments["page_table"] = np.zeros((4, wide), np.int32)
    assert "stablehlo.case" not in lowered(arguments)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(seq_lens=[5, 0, 17, 73]), r"seq_lens must be in \[0, .* = 72\], got 0 to 73"),
        (dict(seq_lens=[5, -1, 17, 64]), r"seq_lens must be in \[0, .* = 72\], got -1 to 64"),
        (dict(page=99), r"page_table must be in \[0, num_pages = 15\), got 0 to 99"),
        (dict(page=-1), r"page_table must be in \[0, num_pages = 15\), got -1 to"),
    ],
)
def test_wrong_values_reach_the_reference(change, message):
    """The branch that is not taken otherwise raises its error; the next call is right."""
    arguments = CASE.make()
    wrong = {name: np.copy(v) if isinstance(v, np.ndarray) else v for name, v in arguments.items()}
    if "page" in change:
        wrong["page_table"][0, 0] = change["page"]
    else:
        wrong["seq_lens"] = np.array(change["seq_lens"], np.int32)
    call = jax.jit(jaxattn.decode, static_argnames=("q_len", "kv_layout"))
    arrays = jax.tree.map(inputs.to_jax, (arguments, wrong))
    for _ in range(2):
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
            jax.block_until_ready(call(**arrays[1]))
        compare.check_attention(arguments, np.asarray(call(**arrays[0])))


def test_vmap_grows_out_of_it():
    """A folded batch too large for it falls back, with the same numbers."""
    arguments = CASE.make()
    count = _plain.MAX_ELEMENTS // (4 * 9 * 8 * 2 * 24) + 1
    arrays = {n: inputs.to_jax(v) for n, v in arguments.items() if isinstance(v, np.ndarray)}
    queries = jnp.stack([arrays["query"] * (1 + at) for at in range(count)])
    mapped = jax.vmap(lambda query: jaxattn.decode(**arrays | dict(query=query)))(queries)
    one = jaxattn.decode(**arrays | dict(query=queries[3]))
    np.testing.assert_allclose(mapped[3], one, rtol=2e-5, atol=1e-5)
