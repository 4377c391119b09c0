"""The drop-in for JAX's own GPU kernel, held to JAX's reference of it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxattn import _ffi, compat
from tests import compare, inputs, oracle
from tests.inputs import DTYPES, Case, normal
from torch_core import reference

MODULE = "jax.experimental.pallas.ops.gpu.paged_attention"


@pytest.fixture
def original():
    return pytest.importorskip(MODULE, reason=f"this jax has no {MODULE}")


def make(case: Case, soft_cap: float | None = None) -> dict:
    """A call with pages of one head; what must not be read is NaN, or garbage in the table."""
    arguments = case.make()
    rng = np.random.default_rng(1)
    pages, kv_heads = arguments["key_cache"].shape[0], case.num_kv_heads
    live = np.zeros((pages, case.page_size), bool)
    for request, length in enumerate(case.seq_lens):
        for position in range(length):
            page = arguments["page_table"][request, position // case.page_size]
            live[page, position % case.page_size] = True
    caches = []
    for _ in range(2):
        shape = (kv_heads, pages, case.page_size, case.head_dim)
        cache = normal(rng, shape, DTYPES[case.dtype])
        cache[:, ~live] = np.nan
        caches.append(cache)
    call = dict(q=arguments["query"], k_pages=caches[0], v_pages=caches[1])
    call |= dict(block_tables=arguments["page_table"], lengths=arguments["seq_lens"])
    return call if soft_cap is None else call | dict(attn_logits_soft_cap=soft_cap)


def by_oracle(call: dict, dtype=np.float64) -> np.ndarray:
    caches = [np.moveaxis(call[name], 0, 1) for name in ("k_pages", "v_pages")]
    lengths = call["lengths"]
    if lengths is None:
        lengths = np.full(len(call["q"]), call["block_tables"].shape[1] * caches[0].shape[2])
    return oracle.attention(
        call["q"], *caches, call["block_tables"], lengths, kv_layout="HND", sm_scale=1.0,
        soft_cap=call.get("attn_logits_soft_cap"), dtype=dtype,
    )[0]  # fmt: skip


def by_jax(call: dict, original) -> np.ndarray:
    """JAX's reference on gathered keys and values in float32; 0 where the length is 0, as the
    original kernel gives (its reference takes the mean of what it masked)."""
    pages = call["k_pages"].shape[1]
    table = np.where((call["block_tables"] >= 0) & (call["block_tables"] < pages),
                     call["block_tables"], 0)  # fmt: skip
    tokens = []
    for name in ("k_pages", "v_pages"):
        picked = np.moveaxis(call[name].astype(np.float32)[:, table], 0, 3)
        picked = picked.reshape(len(table), -1, *picked.shape[3:])
        live = np.arange(picked.shape[1])[None] < call["lengths"][:, None]
        tokens.append(np.where(live[..., None, None], picked, 0))
    with jax.default_device(jax.devices("cpu")[0]):
        out = original.paged_attention_reference(
            *map(jnp.asarray, (call["q"].astype(np.float32), *tokens, call["lengths"])),
            attn_logits_soft_cap=call.get("attn_logits_soft_cap"),
        )
    return np.where(call["lengths"][:, None, None] > 0, out, 0).astype(np.float64)


def run(call: dict, **more):
    return inputs.run_jax(compat.paged_attention, call, **more)


CASES = [
    (Case("lengths", (5, 1, 17, 24, 64)), None),
    (Case("empty_rows", (5, 0, 16, 0, 8)), None),
    (Case("mqa", (9, 30), num_qo_heads=6, num_kv_heads=1), None),
    (Case("mha", (9, 30), num_qo_heads=3, num_kv_heads=3), None),
    (Case("soft_cap", (9, 30)), 1.5),
    (Case("bfloat16", (9, 30), dtype="bfloat16"), None),
    (Case("float16", (9, 30), dtype="float16", page_size=16), 5.0),
    (Case("batch_0", ()), None),
]


@pytest.mark.parametrize("case, soft_cap", CASES, ids=str)
def test_against_the_reference_of_jax(case, soft_cap, original):
    call = make(case, soft_cap)
    out = run(call)
    assert out.dtype == call["q"].dtype
    compare.check(out, by_oracle(call), by_oracle(call, np.float32))
    if len(call["q"]):
        compare.check(out, by_jax(call, original), by_oracle(call, np.float32))


def test_against_the_original_kernel(original):
    """In Pallas' interpreter, also where a length is 0."""
    call = make(Case("", (5, 0, 16), num_qo_heads=4, num_kv_heads=2, page_size=16, head_dim=16))
    pages = call["k_pages"].shape[1]
    table = call["block_tables"]
    whole = {n: np.nan_to_num(call[n]) for n in ("k_pages", "v_pages")}
    safe = whole | dict(block_tables=np.where((table >= 0) & (table < pages), table, 0))
    arrays = {n: jnp.array(v) for n, v in (call | safe).items()}
    expected = original.paged_attention(
        **arrays, interpret=True, k_splits=1, pages_per_compute_block=1
    )
    np.testing.assert_allclose(run(call), expected, rtol=1e-5, atol=1e-5)


def test_no_lengths():
    """None: every page of the table is full."""
    call = make(Case("", (16, 16)))
    call |= dict(lengths=None, block_tables=call["block_tables"][:, :2])
    compare.check(run(call), by_oracle(call), by_oracle(call, np.float32))


def test_signature(original):
    """Names, order and kinds, and defaults but that of no consequence."""
    import inspect

    ours, theirs = (
        [(p.name, p.kind) for p in inspect.signature(f).parameters.values()]
        for f in (compat.paged_attention, original.paged_attention)
    )
    assert ours == theirs
    assert np.isclose(compat.DEFAULT_MASK_VALUE, original.DEFAULT_MASK_VALUE)


def test_pages_are_not_copied():
    """The program holds nothing of their size but the parameters."""
    call = make(Case("", (9, 30), dtype="bfloat16"))
    arrays = {n: jnp.array(v) for n, v in call.items()}
    for name in ("k_pages", "v_pages"):
        arrays[name] = jnp.concatenate([arrays[name]] * 50, 1)
    compiled = jax.jit(lambda arrays: compat.paged_attention(**arrays)).lower(arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < arrays["k_pages"].nbytes // 4
    rows = arrays["k_pages"].size // arrays["k_pages"].shape[-1]
    for line in compiled.as_text().splitlines():
        made = re.match(r"\s*(?:ROOT )?%\S+ = bf16\[([\d,]*)\]\S* (\w+)", line)
        if made and np.prod([int(n) for n in made[1].split(",") if n]) >= rows:
            assert made[2] in ("parameter", "bitcast"), line


def test_wrong_page_ids_are_errors():
    """Also one that would be a page of the next head."""
    call = make(Case("", (9, 30)))
    call["block_tables"][1, 0] = call["k_pages"].shape[1]
    with pytest.raises(Exception, match="page_table must be in"):
        run(call)


def test_vmap_makes_one_batch():
    call = make(Case("", (9, 30, 4)))
    arrays = {n: jnp.array(v) for n, v in call.items()}
    one_by_one = jax.vmap(
        lambda q, t, n: compat.paged_attention(
            q[None], arrays["k_pages"], arrays["v_pages"], t[None], n[None]
        )[0]
    )(arrays["q"], arrays["block_tables"], arrays["lengths"])
    compare.check(np.asarray(one_by_one), by_oracle(call), by_oracle(call, np.float32))


def test_annotations(enforce_annotations):
    run(make(Case("", (9, 30))))


@pytest.mark.gpu
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("page_size", [16, 64])
def test_on_a_gpu(page_size, soft_cap, original):
    """The kernels that `decode` gets, without Python: XQA, and native decode with a soft cap."""
    case = Case("", (5, 1, 0, 300, 640), num_qo_heads=16, num_kv_heads=4, head_dim=128,
                page_size=page_size, dtype="bfloat16")  # fmt: skip
    call = make(case, soft_cap)
    call["q"] = (call["q"].astype(np.float32) * 128**-0.5).astype(call["q"].dtype)
    before = _ffi.python_calls
    out = run(call)
    assert _ffi.python_calls == before
    caches = [np.swapaxes(call[name], 0, 1) for name in ("k_pages", "v_pages")]
    arrays = map(inputs.to_torch, (call["q"], *caches, call["block_tables"], call["lengths"]))
    names = ("query", "key_cache", "value_cache", "page_table", "seq_lens")
    rounded, _ = reference.evaluate(
        "decode", **dict(zip(names, arrays, strict=True)), kv_layout="HND", sm_scale=1.0,
        soft_cap=soft_cap, compute_dtype=torch.bfloat16,
    )  # fmt: skip
    compare.check(out, by_jax(call, original), inputs.to_numpy(rounded))
