"""Section (b): faults reported for XQA and trtllm-gen decode."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattn
import torch_core
from tests import compare, faults, inputs
from tests.inputs import Case

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
CACHES = [
    dict(dtype="float32", kv_layout="NHD"),
    dict(dtype="bfloat16", kv_layout="HND"),
    dict(dtype="bfloat16", kv_dtype=E4M3, kv_layout="NHD"),
    dict(dtype=E4M3, kv_layout="HND"),
    dict(dtype="float16", kv_dtype=E5M2, kv_layout="HND"),
]
caches = pytest.mark.parametrize("cache", CACHES, ids=lambda c: "-".join(c.values()))
fronts = pytest.mark.parametrize("front", faults.FRONTS)


@fronts
@caches
def test_r20_empty_decode_rows_do_not_touch_the_others(front, cache):
    """Rows of length 0 give 0 and -inf; the others equal a call without them bit by bit."""
    lengths = (5, 1, 17, 300, 64)
    case = Case("r20", (*lengths, 0, 0, 0), page_size=16, **cache)
    arguments = case.make()
    arguments["query"][5:] = np.nan
    out, lse = faults.attend(front, arguments)
    assert (out[5:] == 0).all() and (lse[5:] == -np.inf).all()
    first = arguments | {name: arguments[name][:5] for name in ("query", "page_table", "seq_lens")}
    assert faults.same_bits((out[:5], lse[:5]), faults.attend(front, first))
    compare.check_attention(first, out[:5], lse[:5])


@fronts
@pytest.mark.parametrize("q_lens", [None, (1, 2, 3)], ids=["decode", "prefill"])
def test_r20_all_rows_empty(front, q_lens):
    """A batch of empty requests over a cache of NaN gives 0 and -inf."""
    arguments = Case("r20", (0, 0, 0), q_lens=q_lens).make()
    arguments = faults.with_unread(arguments, np.nan)
    out, lse = faults.attend(front, arguments)
    assert (out == 0).all() and (lse == -np.inf).all()


@fronts
def test_r20_empty_prefill_rows_do_not_touch_the_others(front):
    """The same for prefill, with padding rows of NaN behind."""
    case = Case("r20", (5, 17, 0, 30, 0), q_lens=(2, 17, 3, 1, 0), extra_rows=3)
    arguments = case.make()
    arguments["query"][19:22] = np.nan
    arguments["query"][23:] = np.nan
    out, lse = faults.attend(front, arguments)
    for rows in (slice(19, 22), slice(23, None)):
        assert (out[rows] == 0).all() and (lse[rows] == -np.inf).all()
    pieces = [faults.attend(front, call) for call in faults.one_by_one(arguments)]
    assert faults.same_bits(out[:23], np.concatenate([piece[0] for piece in pieces]))
    assert faults.same_bits(lse[:23], np.concatenate([piece[1] for piece in pieces]))


@fronts
@caches
@pytest.mark.parametrize("window_left", [-1, 4])
@pytest.mark.parametrize("q_lens", [None, (1, 5, 16, 3)], ids=["decode", "prefill"])
def test_r21_unread_cache_never_reaches_the_output(front, cache, window_left, q_lens):
    """POISON in page tails, unused pages, page 0 and left of the window leaves every bit."""
    options = dict(window_left=window_left)
    case = Case("r21", (1, 13, 16, 17), q_lens, page_size=16, options=options, **cache)
    arguments = faults.with_null_page(case.make())
    clean = faults.attend(front, faults.with_unread(arguments, 0.0))
    compare.check_attention(arguments, *clean)
    fills = faults.poisons(arguments["key_cache"].dtype)
    both = ("key_cache", "value_cache")
    runs = [*((both, fill) for fill in fills), (both[:1], np.nan), (both[1:], np.nan)]
    for poisoned, fill in runs:
        call = faults.with_unread(faults.with_unread(arguments, 0.0), fill, poisoned)
        assert faults.same_bits(faults.attend(front, call), clean), (poisoned, fill)


@fronts
@pytest.mark.parametrize("draft_mask", [None, "bool"])
def test_r21_unread_cache_never_reaches_draft_rows(front, draft_mask):
    """POISON for several query rows a request, some of them before position 0."""
    case = Case("r21", (9, 16, 2, 0, 17), q_len=3, page_size=16, draft_mask=draft_mask)
    arguments = faults.with_null_page(case.make())
    if draft_mask:
        arguments["draft_mask"] |= np.eye(3, dtype=bool)
    clean = faults.attend(front, faults.with_unread(arguments, 0.0))
    for fill in faults.poisons(arguments["key_cache"].dtype):
        call = faults.with_unread(arguments, fill)
        assert faults.same_bits(faults.attend(front, call), clean), fill


def dequantised(arguments, q_scale, k_scale, v_scale):
    """The same call in float32 without scales."""
    plain = {name: v for name, v in arguments.items() if not name.endswith("_scale")}
    for name, scale in (("query", q_scale), ("key_cache", k_scale), ("value_cache", v_scale)):
        plain[name] = plain[name].astype(np.float32) * np.float32(scale)
    return plain


SCALES = dict(q_scale=2.0, k_scale=0.25, v_scale=0.5)


@fronts
@pytest.mark.parametrize("form", ["number", "array"])
@pytest.mark.parametrize("dtypes", [("bfloat16", E4M3), (E4M3, E4M3), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("q_lens", [None, (3, 1)], ids=["decode", "prefill"])
def test_r23_scales_apply_once(front, form, dtypes, q_lens):
    """Scaled calls equal attention over the dequantised cache; a bfloat16 query has no scale."""
    arguments = Case("r23", (9, 30), q_lens, dtype=dtypes[0], kv_dtype=dtypes[1]).make()
    scales = SCALES if form == "number" else {k: np.array(v, "f4") for k, v in SCALES.items()}
    out, lse = faults.attend(front, arguments, **scales)
    q_scale = 2.0 if dtypes[0] == E4M3 else 1.0
    compare.check_attention(dequantised(arguments, q_scale, 0.25, 0.5), out, lse)
    if dtypes[0] != E4M3:
        without = {name: scale for name, scale in scales.items() if name != "q_scale"}
        assert faults.same_bits((out, lse), faults.attend(front, arguments, **without))


def test_r23_scales_closed_over_traced_and_numbers_agree():
    """A Python number, a constant 0-d array and a traced scale give the same bits in jit."""
    arrays, static = faults.jax_arrays(Case("r23", (9, 30), dtype="bfloat16", kv_dtype=E4M3).make())
    constants = {name: jnp.float32(value) for name, value in SCALES.items()}
    traced = jax.jit(lambda scales: jaxattn.decode(**arrays, **static, **scales))
    results = [
        jax.jit(lambda: jaxattn.decode(**arrays, **static, **SCALES))(),
        jax.jit(lambda: jaxattn.decode(**arrays, **static, **constants))(),
        traced(SCALES),
        jaxattn.decode(**arrays, **static, **SCALES),
    ]
    for result in results:
        assert faults.same_bits(np.asarray(result), np.asarray(results[0]))
    other = np.asarray(traced(SCALES | dict(v_scale=1.0)))
    np.testing.assert_array_equal(
        other.astype(np.float32), 2 * np.asarray(results[0]).astype(np.float32)
    )


@fronts
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_r23_append_and_decode_agree_on_scales(front, kv_layout):
    """Tokens appended with scales read back as themselves with the same scales."""
    case = Case("r23", (9, 3), dtype="bfloat16", kv_dtype=E4M3, kv_layout=kv_layout)
    arguments = case.make()
    rng = np.random.default_rng(1)
    # Multiples of 1/16 below 1: exact in e4m3 after division by a power of two.
    exact = rng.integers(-15, 16, (2, 2, 2, 16)).astype(np.float32) / 16
    key, value = exact.astype(inputs.DTYPES["bfloat16"])
    names = ("key_cache", "value_cache", "page_table", "kv_layout")
    written = faults.run(
        front,
        "append_kv",
        {name: arguments[name] for name in names} | dict(key=key, value=value),
        positions=arguments["seq_lens"] - 1,
        k_scale=0.25,
        v_scale=0.5,
    )
    for cache, scale, new in zip(written, (0.25, 0.5), exact, strict=True):
        for request in range(2):
            page, offset = faults.token_places(arguments, request)
            stored = faults.nhd(cache, kv_layout)[page[-1], offset[-1]].astype(np.float32)
            np.testing.assert_array_equal(stored * scale, new[request])


@fronts
@pytest.mark.parametrize("kv_dtype", ["float32", E4M3])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_r24_window_is_exact_per_row(front, kv_dtype, kv_layout, q_len, phase):
    """UNIFORM: each row sees exactly its own min(p + 1, window_left + 1) newest keys."""
    lengths = (3, 4, 5, 6, 9)
    rows = dict(q_len=q_len) if phase == "decode" else dict(q_lens=(q_len,) * 5)
    case = Case("r24", lengths, **rows, kv_dtype=kv_dtype, kv_layout=kv_layout, page_size=4)
    arguments = faults.uniform(case)
    for window_left in (0, 1, 4, 8, 9):
        visible = [
            range(max(0, position - window_left), position + 1)
            for _, position in faults.positions(arguments)
        ]
        faults.check_visible(
            arguments, *faults.attend(front, arguments, window_left=window_left), visible
        )


@fronts
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_r24_window_1023_over_8_rows(front, phase):
    """UNIFORM at the size of the silent fault: head_dim 256, bfloat16 query, fp8 cache."""
    lengths = (1024, 1025, 1030, 1031, 1032, 1100)
    rows = dict(q_len=8) if phase == "decode" else dict(q_lens=(8,) * 6)
    sizes = dict(num_qo_heads=2, num_kv_heads=1, head_dim=256, page_size=64)
    case = Case("r24", lengths, **rows, dtype="bfloat16", kv_dtype=E4M3, **sizes)
    arguments = faults.uniform(case)
    visible = [
        range(max(0, length - 8 + row - 1023), length - 8 + row + 1)
        for length in lengths
        for row in range(8)
    ]
    assert [len(keys) for keys in visible[:8]] == list(range(1017, 1025))
    faults.check_visible(arguments, *faults.attend(front, arguments, window_left=1023), visible)


@fronts
@pytest.mark.parametrize("causal", [True, False])
def test_r24_largest_window_is_no_window(front, causal):
    """window_left of 2**31 - 1 equals no window, in rows before position 0 too."""
    case = Case("r24", (3, 9), q_lens=(8, 2), options=dict(causal=causal))
    arguments = case.make()
    wide = faults.attend(front, arguments, window_left=2**31 - 1)
    assert faults.same_bits(wide, faults.attend(front, arguments))
    decode = Case("r24", (3, 9), q_len=5).make()
    wide = faults.attend(front, decode, window_left=2**31 - 1)
    assert faults.same_bits(wide, faults.attend(front, decode))


HEAD_DIMS = (64, 80, 128, 192, 256, 512)
GROUPS = (1, 2, 3, 5, 6, 7, 8, 12, 16, 32)
PAGE_SIZES = (1, 8, 16, 32, 64, 128, 256)
Q_LENS = (1, 2, 5, 8)
CELLS = list(itertools.product(HEAD_DIMS, GROUPS, PAGE_SIZES, Q_LENS))


@fronts
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_r29_shapes_are_right(front, phase):
    """Random cells of the grid head_dim x group x page x q_len equal the oracle."""
    assert all(
        torch_core.supported(
            phase,
            num_qo_heads=group,
            num_kv_heads=1,
            head_dim=head_dim,
            page_size=page_size,
            q_len=q_len,
            capability=0,
        )
        for head_dim, group, page_size, q_len in CELLS
    )
    for seed, cell in enumerate(random.Random(front + phase).sample(CELLS, 8)):
        head_dim, group, page_size, q_len = cell
        kv_heads = 1 + seed % 2
        sizes = dict(
            num_qo_heads=group * kv_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            extra_pages=1,
        )
        rows = dict(q_len=q_len) if phase == "decode" else dict(q_lens=(q_len, q_len))
        arguments = Case("r29", (9, 17), **rows, **sizes).make(seed)
        compare.check_attention(arguments, *faults.attend(front, arguments))


@pytest.mark.parametrize("capability", [90, 100, 120])
def test_r29_refusals_name_the_argument(capability):
    """A limit that a cell breaks is the reason against a kernel, with what is allowed."""
    for head_dim, group, page_size, q_len in CELLS:
        arguments = dict(
            num_qo_heads=group,
            num_kv_heads=1,
            head_dim=head_dim,
            page_size=page_size,
            q_len=q_len,
            capability=capability,
        )
        for phase in ("decode", "prefill"):
            explanation = torch_core.explain(phase, **arguments)
            chosen = explanation.kernel
            assert torch_core.supported(phase, **arguments) == (chosen is not None)
            if phase == "decode" and page_size not in (16, 32, 64, 128):
                assert chosen is None or chosen.page_sizes is None
            if chosen is not None and chosen.head_dims is not None:
                assert head_dim in chosen.head_dims
            if phase == "decode" and capability != 100 and page_size in (1, 8, 256):
                reason = explanation.reasons["xqa"]
                assert "page_size 16, 32, 64, 128" in reason and f"got {page_size}" in reason


@pytest.mark.parametrize(
    "change", [dict(num_qo_heads=5, num_kv_heads=2), dict(num_qo_heads=3, num_kv_heads=4)]
)
@pytest.mark.parametrize("q_lens", [None, (3, 1)], ids=["decode", "prefill"])
@fronts
def test_r29_supported_agrees_with_the_call(front, q_lens, change):
    """A group that is not whole is a ValueError naming the query, and not supported."""
    arguments = Case("r29", (9, 17), q_lens, **change).make()
    phase = faults.phase_of(arguments)
    assert not torch_core.supported(phase, **change, head_dim=16, page_size=8)
    with pytest.raises(ValueError, match=r"query must have a positive multiple of num_kv_heads"):
        faults.attend(front, arguments)


@fronts
@pytest.mark.parametrize("backend", ["xqa", "trtllm_gen", "native_decode", "native_prefill_fa2"])
def test_r29_a_kernel_that_cannot_run_is_refused_by_name(front, backend):
    """backend= of a GPU kernel on a CPU raises before any launch and says why."""
    arguments = Case("r29", (9, 17)).make()
    with pytest.raises(NotImplementedError, match=rf"backend '{backend}' cannot run this decode: "):
        faults.attend(front, arguments, backend=backend)
    with pytest.raises(ValueError, match=r"backend must be one of 'auto', .*'xqa'"):
        faults.attend(front, arguments, backend="xpa")


@fronts
@caches
@pytest.mark.parametrize("q_lens", [(0, 0, 0, 2), (1, 3, 0, 4), (0, 1, 0, 0)])
def test_r30_ragged_drafts_equal_single_calls(front, cache, q_lens):
    """SPLIT: ragged draft lengths, 0 among them, equal the requests one by one."""
    arguments = Case("r30", (7, 13, 9, 30), q_lens, **cache).make()
    out, lse = faults.attend(front, arguments)
    compare.check_attention(arguments, out, lse)
    pieces = [faults.attend(front, call) for call in faults.one_by_one(arguments)]
    assert faults.same_bits(out, np.concatenate([piece[0] for piece in pieces]))
    assert faults.same_bits(lse, np.concatenate([piece[1] for piece in pieces]))


PREFILL_ONLY = ("cu_seqlens_q", "max_seqlen_q")


@fronts
@pytest.mark.parametrize("at", ["before", "after"])
def test_r30_blocks_with_fewer_new_tokens(front, at):
    """2, 0, 3 and 1 new tokens in blocks of 3, with other rows before or after them, equal prefill
    of the new rows alone."""
    block, rows = 3, (2, 0, 3, 1)
    arguments = Case("r30", (7, 13, 9, 30), rows).make()
    expected = faults.attend(front, arguments)
    new = np.zeros((4, block), bool)
    for request, count in enumerate(rows):
        new[request, block - count :] = True
        new[request] = new[request, :: 1 if at == "before" else -1]
    new = new.reshape(-1)
    query = np.full((4 * block, *arguments["query"].shape[1:]), 3.0, np.float32)
    query[new] = arguments["query"]
    padded = {name: v for name, v in arguments.items() if name not in PREFILL_ONLY}
    padded |= dict(query=query, q_len=block)
    if at == "after":
        padded["seq_lens"] = arguments["seq_lens"] + (block - np.array(rows, np.int32))
        padded["page_table"] = np.where(padded["page_table"] < 0, 0, padded["page_table"])
        padded["page_table"] %= len(arguments["key_cache"])
    for actual, right in zip(faults.attend(front, padded), expected, strict=True):
        np.testing.assert_allclose(actual[new], right, rtol=1e-5, atol=1e-6)


@fronts
def test_r30_uniform_drafts_equal_prefill_and_single_calls(front):
    """decode with q_len 3 equals prefill of three rows each, and the requests one by one."""
    decode = Case("r30", (7, 2, 0, 30), q_len=3, options=dict(window_left=5)).make()
    result = faults.attend(front, decode)
    compare.check_attention(decode, *result)
    prefill = {name: value for name, value in decode.items() if name != "q_len"}
    prefill |= dict(cu_seqlens_q=np.arange(5, dtype=np.int32) * 3, max_seqlen_q=3)
    pieces = [faults.attend(front, call) for call in faults.one_by_one(decode)]
    singles = tuple(map(np.concatenate, zip(*pieces, strict=True)))
    for other in (faults.attend(front, prefill), singles):
        for actual, expected in zip(other, result, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@fronts
def test_r31_bounds_do_not_change_the_result(front):
    """max_seqlen_q of the maximum, twice and a million, and a wider page table, give one result."""
    arguments = Case("r31", (25, 17), q_lens=(5, 3)).make()
    exact = faults.attend(front, arguments)
    compare.check_attention(arguments, *exact)
    for bound in (10, 10**6, 2**31 - 1):
        assert faults.same_bits(faults.attend(front, arguments, max_seqlen_q=bound), exact)
    for phase_arguments in (arguments, Case("r31", (25, 17)).make()):
        exact = faults.attend(front, phase_arguments)
        table = np.pad(phase_arguments["page_table"], ((0, 0), (0, 40)), constant_values=-1)
        assert faults.same_bits(faults.attend(front, phase_arguments, page_table=table), exact)


@fronts
@pytest.mark.parametrize("bound", [0, 1, 4])
def test_r31_too_small_a_bound_is_an_error(front, bound):
    """max_seqlen_q below the longest query is refused on a CPU, and the next call works."""
    arguments = Case("r31", (25, 17), q_lens=(5, 3)).make()
    message = f"max_seqlen_q must be at least the longest query, 5, got {bound}"
    with pytest.raises(faults.RUNTIME_ERRORS[front], match=message):
        faults.attend(front, arguments, max_seqlen_q=bound)
    compare.check_attention(arguments, *faults.attend(front, arguments))


@fronts
@pytest.mark.parametrize("q_lens", [None, (5, 3)], ids=["decode", "prefill"])
def test_r31_lengths_beyond_the_page_table_are_an_error(front, q_lens):
    """seq_lens above pages_per_seq * page_size or below 0 are refused; at the limit they work."""
    arguments = Case("r31", (25, 32), q_lens).make()
    full = arguments | dict(page_table=arguments["page_table"][:, :4])
    compare.check_attention(full, *faults.attend(front, full))
    for wrong in ([25, 33], [-1, 32]):
        with pytest.raises(faults.RUNTIME_ERRORS[front], match=r"seq_lens must be in \[0, .* 32\]"):
            faults.attend(front, full, seq_lens=np.array(wrong, np.int32))
    compare.check_attention(full, *faults.attend(front, full))
