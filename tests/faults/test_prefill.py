"""Section (c): faults reported for FlashInfer's native prefill."""

import jax
import numpy as np
import pytest

import jaxattn
import torch_core
from tests import compare, faults, inputs, oracle
from tests.inputs import Case

E4M3 = "float8_e4m3fn"
fronts = pytest.mark.parametrize("front", faults.FRONTS)


@fronts
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", ["float32", E4M3])
def test_r36_rows_before_the_first_key_are_empty(front, kv_dtype, kv_layout):
    """UNIFORM: 8 rows over 3 keys see 0, 0, 0, 0, 0, 1, 2 and 3 of them."""
    case = Case("r36", (3, 0, 7), q_lens=(8, 4, 2), kv_dtype=kv_dtype, kv_layout=kv_layout)
    arguments = faults.uniform(case)
    out, lse = faults.attend(front, arguments)
    visible = [range(n) for n in (0, 0, 0, 0, 0, 1, 2, 3)] + [range(0)] * 4 + [range(6), range(7)]
    faults.check_visible(arguments, out, lse, visible)
    assert (lse[:5] == -np.inf).all() and (lse[8:12] == -np.inf).all()


@fronts
def test_r36_decode_rows_before_the_first_key_are_empty(front):
    """The same for decode with q_len 8."""
    arguments = faults.uniform(Case("r36", (3, 0, 9), q_len=8))
    out, lse = faults.attend(front, arguments)
    counts = (0, 0, 0, 0, 0, 1, 2, 3, *[0] * 8, 2, 3, 4, 5, 6, 7, 8, 9)
    faults.check_visible(arguments, out, lse, [range(n) for n in counts])


def one_key(phase, score, head_dim=16, dtype="float32"):
    """A call over one key whose score before sm_scale is `score`."""
    rows = dict(q_len=1) if phase == "decode" else dict(q_lens=(1,))
    arguments = Case("one", (1,), **rows, head_dim=head_dim, dtype=dtype).make()
    arguments["query"][:] = 0
    arguments["query"][..., 0] = score
    page, offset = faults.token_places(arguments, 0)
    arguments["key_cache"][page, offset] = 0
    arguments["key_cache"][page, offset, :, 0] = 1
    return arguments


@fronts
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("score", [-7.0, 0.0, 3.0, 88.0])
def test_r38_lse_of_one_key_is_its_score(front, phase, score):
    """lse is the natural log: one key with score s gives s, not s * log2(e)."""
    out, lse = faults.attend(front, one_key(phase, score), sm_scale=0.5, k_scale=2.0)
    np.testing.assert_allclose(lse, score, rtol=1e-6)
    assert lse.dtype == np.float32 and lse.shape == out.shape[:2]


@fronts
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_r38_lse_counts_keys_and_sinks(front, phase):
    """n equal keys with score s give s + ln n; a sink adds its exp."""
    rows = dict(q_len=1) if phase == "decode" else dict(q_lens=(1,))
    arguments = faults.uniform(Case("r38", (12,), **rows))
    _, lse = faults.attend(front, arguments)
    np.testing.assert_allclose(lse, np.log(12), rtol=1e-6)
    sinks = np.log(np.array([1, 4, 12, 20], np.float32))
    out, lse = faults.attend(front, arguments, sinks=sinks)
    np.testing.assert_allclose(lse[0], np.log([13, 16, 24, 32]), rtol=1e-6)
    np.testing.assert_allclose(out[0].sum(-1), 12 / np.array([13, 16, 24, 32]), rtol=1e-6)


@fronts
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("q_lens", [None, (3, 2, 1)], ids=["decode", "prefill"])
def test_r38_two_halves_merge_to_the_whole(front, dtype, q_lens):
    """SPLIT over two KV halves, joined by merge_states: right for decode and prefill alike."""
    case = Case("r38", (64, 17, 9), q_lens, dtype=dtype, sinks=True, options=dict(causal=False))
    arguments = case.make()
    if q_lens is None:
        del arguments["causal"]
    whole = faults.attend(front, arguments)
    compare.check_attention(arguments, *whole)
    # The first half is a page's multiple; 9 keys leave a second half of one key.
    first = np.array([24, 8, 8], np.int32)
    table = arguments["page_table"]
    late = np.array([np.roll(row, -n // 8) for row, n in zip(table, first, strict=True)])
    parts = [
        faults.attend(front, arguments, seq_lens=first),
        faults.attend(
            front,
            {name: value for name, value in arguments.items() if name != "sinks"},
            seq_lens=arguments["seq_lens"] - first,
            page_table=late,
        ),
    ]
    merged = faults.run(
        front,
        "merge_states",
        dict(out_a=parts[0][0], lse_a=parts[0][1], out_b=parts[1][0], lse_b=parts[1][1]),
    )
    np.testing.assert_allclose(merged[1], whole[1], rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if dtype == "float32" else 2**-6
    merged_out, whole_out = merged[0].astype(np.float32), whole[0].astype(np.float32)
    np.testing.assert_allclose(merged_out, whole_out, rtol=tolerance, atol=tolerance)


@fronts
def test_r38_merging_with_an_empty_part_changes_nothing(front):
    """A part with lse -inf weighs nothing, whatever it holds; two empty parts stay empty."""
    rng = np.random.default_rng(0)
    out = rng.normal(size=(3, 4, 16)).astype(np.float32)
    lse = rng.normal(size=(3, 4)).astype(np.float32)
    empty = np.full_like(lse, -np.inf)
    for fill in (0.0, np.nan, np.inf):
        other = np.full_like(out, fill)
        for order in (1, -1):
            (out_a, lse_a), (out_b, lse_b) = [(out, lse), (other, empty)][::order]
            parts = dict(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
            merged = faults.run(front, "merge_states", parts)
            np.testing.assert_array_equal(merged[0], out)
            np.testing.assert_allclose(merged[1], lse, rtol=1e-6)
        both = dict(out_a=other, lse_a=empty, out_b=other, lse_b=empty)
        merged = faults.run(front, "merge_states", both)
        assert (merged[0] == 0).all() and (merged[1] == -np.inf).all()


@fronts
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_r39_very_low_scores_are_scores(front, phase, dtype):
    """One key with q.k = -524288 at head_dim 128 gives its value, and lse -46341."""
    arguments = one_key(phase, -524288.0, head_dim=128, dtype=dtype)
    out, lse = faults.attend(front, arguments)
    page, offset = faults.token_places(arguments, 0)
    value = arguments["value_cache"][page[0], offset[0]]
    np.testing.assert_array_equal(out[0], np.repeat(value, 2, axis=0))
    np.testing.assert_allclose(lse, -524288 / np.sqrt(128), rtol=1e-6)
    assert np.round(lse).min() == -46341


@fronts
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_r39_very_low_scores_beside_masked_keys(front, phase):
    """Scores of -46341 and lower outweigh masked keys, of padding and of later positions."""
    rows = dict(q_len=3) if phase == "decode" else dict(q_lens=(3, 2))
    arguments = faults.uniform(Case("r39", (5, 40), **rows, head_dim=128))
    arguments["query"][..., 0] = -524288
    for request in range(2):
        page, offset = faults.token_places(arguments, request)
        arguments["key_cache"][page, offset] = 0
        arguments["key_cache"][page, offset, :, 0] = 1
    for window_left in (-1, 1):
        for sm_scale in (128**-0.5, 1e3):
            out, lse = faults.attend(front, arguments, window_left=window_left, sm_scale=sm_scale)
            for row, (_, position) in enumerate(faults.positions(arguments)):
                keys = range(0 if window_left < 0 else position - 1, position + 1)
                expected = np.bincount(np.array(keys), minlength=128) / len(keys)
                np.testing.assert_allclose(out[row], np.tile(expected, (4, 1)), rtol=1e-6)
                expected = np.log(len(keys)) - 524288 * sm_scale
                np.testing.assert_allclose(lse[row], expected, rtol=1e-6)


@fronts
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_r39_many_very_low_scores(front, phase):
    """20 equal keys with a score of -46341 are averaged, next to a normal request, and merge."""
    rows = dict(q_len=1) if phase == "decode" else dict(q_lens=(1, 1))
    arguments = faults.uniform(Case("r39", (20, 5), **rows, head_dim=128))
    arguments["query"][0, :, 0] = -524288
    page, offset = faults.token_places(arguments, 0)
    arguments["key_cache"][page, offset] = 0
    arguments["key_cache"][page, offset, :, 0] = 1
    out, lse = faults.attend(front, arguments)
    expected = np.zeros(128)
    expected[:20] = 1 / 20
    np.testing.assert_allclose(out[0], np.tile(expected, (4, 1)), rtol=1e-6)
    np.testing.assert_allclose(lse[0], np.log(20) - 524288 / np.sqrt(128), rtol=1e-6)
    faults.check_visible(arguments, out[1:], lse[1:], [range(5)])
    halves = [
        faults.attend(front, arguments, seq_lens=np.array([8, 5], np.int32)),
        faults.attend(
            front,
            arguments,
            seq_lens=np.array([12, 0], np.int32),
            page_table=np.roll(arguments["page_table"], -1, axis=1),
        ),
    ]
    parts = dict(out_a=halves[0][0], lse_a=halves[0][1], out_b=halves[1][0], lse_b=halves[1][1])
    merged = faults.run(front, "merge_states", parts)
    # A float32 lse of -46341 has steps of 1/256, and the shares follow.
    np.testing.assert_allclose(merged[0], out, atol=0.05 * 2**-7, rtol=1e-6)


LONG = dict(num_qo_heads=2, num_kv_heads=1, head_dim=8, page_size=64)


@fronts
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("kv_dtype", ["float32", E4M3])
def test_r41_keys_left_of_the_window_do_not_leak(front, phase, kv_dtype):
    """UNIFORM and POISON at length 4096, windows around a tile of 128."""
    q_lens = (5, 1)
    rows = dict(q_len=1) if phase == "decode" else dict(q_lens=q_lens)
    arguments = faults.uniform(Case("r41", (4096, 300), **rows, kv_dtype=kv_dtype, **LONG))
    at = faults.positions(arguments)
    for window_left in (3, 127, 128, 129):
        visible = [range(max(0, p - window_left), p + 1) for _, p in at]
        call = arguments | dict(window_left=window_left)
        clean = faults.attend(front, call)
        faults.check_visible(arguments, *clean, visible)
        for fill in faults.poisons(arguments["key_cache"].dtype):
            poisoned = faults.attend(front, faults.with_unread(call, fill))
            assert faults.same_bits(poisoned, clean), (window_left, fill)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_r41_layers_with_different_windows_in_one_program(phase):
    """Calls of one jit that differ in the window only are neither merged nor mixed up."""
    rows = dict(q_len=2) if phase == "decode" else dict(q_lens=(7, 2))
    arguments = faults.uniform(Case("r41", (40, 9), **rows))
    arrays, static = faults.jax_arrays(arguments)
    windows = (3, -1, 0, 5, 3, 39)

    @jax.jit
    def layers(arrays):
        call = getattr(jaxattn, phase)
        return [call(**arrays, **static, window_left=w, return_lse=True) for w in windows]

    for window_left, (out, lse) in zip(windows, layers(arrays), strict=True):
        first = 64 if window_left < 0 else window_left
        visible = [range(max(0, p - first), p + 1) for _, p in faults.positions(arguments)]
        faults.check_visible(arguments, np.asarray(out), np.asarray(lse), visible)


@fronts
def test_r42_non_causal_window(front):
    """Fewer rows than keys, non-causal with a window: every row equals the oracle."""
    case = Case("r42", (4096,), q_lens=(300,), num_qo_heads=8, head_dim=128, page_size=16)
    arguments = case.make() | dict(causal=False, window_left=333)
    out, lse = faults.attend(front, arguments)
    # The exact answer of the first tile, the last one, and rows between: row i stands at 3796 + i.
    rows = [*range(64), *range(128, 132), *range(290, 300)]
    for row in rows:
        key, value = (
            oracle.tokens(arguments[name], arguments["page_table"][0], 4096, "NHD").astype("f8")
            for name in ("key_cache", "value_cache")
        )
        seen = slice(3796 + row - 333, 4096)
        for head in (0, 7):
            scores = key[seen, head // 4] @ arguments["query"][row, head] / np.sqrt(128)
            weights = np.exp(scores - scores.max())
            exact = weights @ value[seen, head // 4] / weights.sum()
            np.testing.assert_allclose(out[row, head], exact, rtol=1e-4, atol=1e-6)
            exact = np.log(weights.sum()) + scores.max()
            np.testing.assert_allclose(lse[row, head], exact, rtol=1e-6)


@fronts
@pytest.mark.parametrize("window_left", [-1, 0, 3, 9])
def test_r42_non_causal_window_is_exact(front, window_left):
    """UNIFORM: a non-causal row sees from p - window_left to the end of its request."""
    arguments = faults.uniform(Case("r42", (40, 3, 9), q_lens=(9, 5, 9), head_dim=64))
    out, lse = faults.attend(front, arguments, causal=False, window_left=window_left)
    lengths = arguments["seq_lens"].tolist()
    visible = [
        range(0 if window_left < 0 else max(0, position - window_left), lengths[request])
        for request, position in faults.positions(arguments)
    ]
    faults.check_visible(arguments, out, lse, visible)


@fronts
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 112, 128, 136, 256])
@pytest.mark.parametrize("q_lens", [None, (5, 1)], ids=["decode", "prefill"])
def test_r43_odd_head_dims_are_right_or_refused(front, head_dim, q_lens):
    """The CPU is right for every head_dim; a kernel with a list of head_dims refuses the others."""
    arguments = Case("r43", (25, 17), q_lens, head_dim=head_dim).make()
    compare.check_attention(arguments, *faults.attend(front, arguments))
    phase = faults.phase_of(arguments)
    sizes = dict(num_qo_heads=4, num_kv_heads=2, head_dim=head_dim, page_size=16, capability=90)
    explanation = torch_core.explain(phase, **sizes)
    name = "native_decode" if phase == "decode" else "native_prefill_fa3"
    reason = explanation.reasons.get(name, "chosen")
    listed = head_dim in (64, 128, 256)
    assert (f"takes head_dim 64, 128, 256, got {head_dim}" in reason) == (not listed)


@fronts
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", ["float32", E4M3])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_r48_lengths_on_page_boundaries(front, phase, kv_dtype, kv_layout):
    """UNIFORM at one token, one less than a page, a page, one more, and two pages."""
    lengths = (1, 15, 16, 17, 32)
    rows = dict(q_len=1) if phase == "decode" else dict(q_lens=lengths)
    case = Case("r48", lengths, **rows, page_size=16, head_dim=32, kv_dtype=kv_dtype)
    arguments = faults.uniform(case)
    if kv_layout == "HND":
        arguments["kv_layout"] = "HND"
        for name in ("key_cache", "value_cache"):
            arguments[name] = np.ascontiguousarray(arguments[name].swapaxes(1, 2))
    # A table without any spare column: the last page of the longest request is the last entry.
    arguments["page_table"] = arguments["page_table"][:, :2]
    visible = [range(position + 1) for _, position in faults.positions(arguments)]
    faults.check_visible(arguments, *faults.attend(front, arguments), visible)


@fronts
@pytest.mark.parametrize("q_lens", [None, (2, 2, 9)], ids=["decode", "prefill"])
def test_r48_identical_short_requests_give_identical_rows(front, q_lens):
    """Two requests with the same pages and queries, beside a longer one, give the same bits."""
    arguments = Case("r48", (3, 3, 40), q_lens, page_size=16).make()
    rows = 1 if q_lens is None else 2
    arguments["page_table"][1] = arguments["page_table"][0]
    arguments["query"][rows : 2 * rows] = arguments["query"][:rows]
    out, lse = faults.attend(front, arguments)
    assert faults.same_bits((out[:rows], lse[:rows]), (out[rows : 2 * rows], lse[rows : 2 * rows]))
    compare.check_attention(arguments, out, lse)


@pytest.mark.parametrize("chunk", [1, 3, 8])
@fronts
def test_r48_chunked_prefill_equals_one_call(front, chunk):
    """SPLIT: appending and attending chunk by chunk equals one prefill of the whole prompt."""
    whole = Case("r48", (17,), q_lens=(17,), page_size=8, options=dict(window_left=9)).make()
    rng = np.random.default_rng(5)
    key, value = (inputs.normal(rng, (17, 2, 16), np.dtype("f4")) for _ in range(2))
    page, offset = faults.token_places(whole, 0)
    whole["key_cache"][page, offset], whole["value_cache"][page, offset] = key, value
    out, lse = faults.attend(front, whole)
    compare.check_attention(whole, out, lse)
    caches = dict.fromkeys(("key_cache", "value_cache"), np.full((6, 8, 2, 16), np.nan, "f4"))
    for begin in range(0, 17, chunk):
        rows = slice(begin, min(begin + chunk, 17))
        count = rows.stop - begin
        written = faults.run(
            front,
            "append_kv",
            dict(key=key[rows], value=value[rows], page_table=whole["page_table"], **caches),
            positions=np.arange(begin, rows.stop, dtype=np.int32),
            request_ids=np.zeros(count, np.int32),
        )
        caches = dict(zip(caches, written, strict=True))
        piece = whole | caches | dict(query=whole["query"][rows], max_seqlen_q=count)
        piece |= dict(
            seq_lens=np.array([rows.stop], np.int32), cu_seqlens_q=np.array([0, count], np.int32)
        )
        part, part_lse = faults.attend(front, piece)
        np.testing.assert_allclose(part, out[rows], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(part_lse, lse[rows], rtol=1e-5, atol=1e-5)
