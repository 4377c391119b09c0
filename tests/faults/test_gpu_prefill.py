"""Section (c) on a GPU: faults reported for FlashInfer's native prefill, on every kernel."""

import dataclasses

import jax
import numpy as np
import pytest
import torch

import jaxattn
import torch_core
from tests import faults, inputs, oracle
from tests.faults import gpu
from tests.faults.hanging import answer
from torch_core.backends import native

pytestmark = pytest.mark.gpu

PREFILL = [gpu.FA3, gpu.FA3_E4M3, gpu.FA2, gpu.FA2_E4M3]
WITH_LSE = [gpu.DECODE, gpu.DECODE_E4M3, *PREFILL]


@pytest.mark.parametrize("tokens", [255, 256, 257, 1024])
@pytest.mark.parametrize("query", ["bf16", "e4m3"])
def test_r35_around_257_tokens(query, tokens):
    """A window with a bfloat16 query, and an e4m3 query without one, are right and end."""
    assert answer(f"r35_{query}_{tokens}") == "right"


@pytest.mark.parametrize("front", faults.FRONTS)
def test_r35_a_window_with_an_e4m3_query_is_refused(front):
    """Refused before any launch, with what to do instead."""
    sizes = dict(num_qo_heads=64, num_kv_heads=8, page_size=32)
    arguments = gpu.FA3_E4M3.case((257,), (257,), **sizes).make() | dict(window_left=511)
    for backend in ("auto", "native_prefill_fa3"):
        with pytest.raises(NotImplementedError, match="use a bfloat16 query"):
            gpu.run(front, "prefill", arguments, backend=backend)


@gpu.calls(PREFILL)
def test_r36_rows_before_the_first_key_are_empty(front, path):
    """UNIFORM: 8 rows over 3 keys see 0, 0, 0, 0, 0, 1, 2 and 3 of them; 200 over 3 likewise."""
    arguments = faults.uniform(path.case((3, 0, 7, 300, 3), (8, 4, 2, 5, 200), extra_rows=2))
    visible = [range(max(0, position + 1)) for _, position in faults.positions(arguments)]
    assert [len(keys) for keys in visible[:12]] == [0, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 0]
    out, lse = gpu.attend(front, path, arguments)
    gpu.check_visible(arguments, out, lse, [*visible, range(0), range(0)])
    assert (out[:5] == 0).all() and (lse[:5] == -np.inf).all()


def one_key(path, score, keys=1):
    """A call over equal keys whose score before sm_scale is `score`."""
    arguments = faults.uniform(path.case((keys,)))
    arguments["query"][..., 0] = score
    page, offset = faults.token_places(arguments, 0)
    arguments["key_cache"][page, offset] = 0
    arguments["key_cache"][page, offset, :, 0] = 1
    return arguments


@gpu.calls(WITH_LSE, from_jax=[gpu.DECODE, gpu.FA3])
def test_r38_lse_is_the_natural_log(front, path):
    """One key with score s gives s, not s * log2(e); twelve give s + ln 12, and sinks count."""
    for score in (-7.0, 0.0, 3.0, 88.0):
        arguments = one_key(path, score)
        _, lse = gpu.attend(front, path, arguments)
        np.testing.assert_allclose(lse, score / np.sqrt(128), rtol=4e-6, atol=1e-6)
    arguments = one_key(path, 3.0, keys=12)
    _, lse = gpu.attend(front, path, arguments, sm_scale=2 * 128**-0.5)
    score = 6 / np.sqrt(128)
    np.testing.assert_allclose(lse, score + np.log(12), rtol=4e-6)
    sinks = np.linspace(-2, 4, 16).astype(np.float32)
    out, lse = gpu.attend(front, path, arguments, sm_scale=2 * 128**-0.5, sinks=sinks)
    total = 12 * np.exp(score) + np.exp(sinks)
    np.testing.assert_allclose(lse[0], np.log(total), rtol=1e-5)
    share = 12 * np.exp(score) / total
    np.testing.assert_allclose(out[0].astype(np.float32).sum(-1), share, rtol=2**-6)


@gpu.calls([gpu.DECODE, gpu.FA3, gpu.FA2, gpu.FA2_E4M3], from_jax=[gpu.DECODE, gpu.FA3])
def test_r38_two_halves_merge_to_the_whole(front, path):
    """SPLIT over two KV halves, joined by merge_states."""
    arguments = path.case((640, 170, 17), (3, 2, 1)).make()
    if path.phase == "prefill":
        arguments["causal"] = False
    cut = np.array([320, 80, 16], np.int32)
    first = gpu.attend(front, path, arguments, seq_lens=cut)
    table = [np.roll(row, -n // 16) for row, n in zip(arguments["page_table"], cut, strict=True)]
    last = gpu.attend(
        front, path, arguments, seq_lens=arguments["seq_lens"] - cut, page_table=np.array(table)
    )
    parts = dict(out_a=first[0], lse_a=first[1], out_b=last[0], lse_b=last[1])
    merged = gpu.run(front, "merge_states", parts)
    gpu.check(arguments, *merged)
    # FA2 sums the weights that it rounded to bfloat16.
    near = 1e-4 if path.backend == "native_prefill_fa3" else 2.0**-8
    np.testing.assert_allclose(merged[1], oracle.attention(**arguments)[1], rtol=0, atol=near)


@gpu.calls([gpu.XQA, gpu.XQA_E4M3, gpu.DECODE, gpu.FA3, gpu.FA2, gpu.FA2_E4M3])
def test_r39_very_low_scores_are_scores(front, path):
    """q . k = -524288: one key gives its value, 20 equal ones their mean, and lse -46341."""
    for keys in (300,) if front == "jax" else (1, 20, 300):
        out, lse = gpu.attend(front, path, one_key(path, -524288.0, keys))
        expected = np.bincount(np.arange(keys) % 128, minlength=128) / keys
        np.testing.assert_allclose(
            out[0].astype(np.float64), np.tile(expected, (16, 1)), rtol=2**-7
        )
        if lse is not None:
            np.testing.assert_allclose(lse, -524288 / np.sqrt(128) + np.log(keys), rtol=1e-6)


def test_r39_low_scores_beside_normal_ones():
    """A row of low scores in a prefill with others, behind causal masks, and over two splits."""
    for path in (gpu.DECODE, gpu.FA3, gpu.FA2):
        arguments = faults.uniform(path.case((300, 40, 20_000), (3, 2, 1)))
        arguments["query"][..., 0] = -524288
        for request in (0, 2):
            page, offset = faults.token_places(arguments, request)
            arguments["key_cache"][page, offset] = 0
            arguments["key_cache"][page, offset, :, 0] = 1
        page, offset = faults.token_places(arguments, 1)
        arguments["key_cache"][page, offset] = 0
        out, _ = gpu.attend("torch", path, arguments)
        visible = [range(position + 1) for _, position in faults.positions(arguments)]
        gpu.check_visible(arguments, out, None, visible)


@gpu.calls([gpu.XQA, gpu.XQA_E4M3, *gpu.NATIVE], from_jax=[])
def test_r41_keys_left_of_the_window_do_not_leak(front, path):
    """UNIFORM and POISON at length 4096, windows around a tile of 128."""
    arguments = faults.uniform(path.case((4096, 300), (5, 1)))
    for window_left in (3, 127, 128, 129):
        call = arguments | dict(window_left=window_left)
        clean = gpu.attend(front, path, call)
        gpu.check_visible(arguments, *clean, gpu.window_of(arguments, window_left))
        fill = faults.poisons(arguments["key_cache"].dtype)[-1]
        assert gpu.same_bits(gpu.attend(front, path, faults.with_unread(call, fill)), clean)


@pytest.mark.parametrize("path", [gpu.XQA, *gpu.NATIVE], ids=str)
def test_r41_layers_with_different_windows_in_one_program(path):
    """Calls of one jit that differ in the window only are neither merged nor mixed up."""
    arguments = faults.uniform(path.case((400, 9), (7, 2)))
    arrays, static = faults.jax_arrays(arguments | dict(backend=path.backend, return_lse=path.lse))
    windows = (3, -1, 0, 200, 3)

    @jax.jit
    def layers(arrays):
        call = getattr(jaxattn, path.phase)
        return [gpu.first(call(**arrays, **static, window_left=w)) for w in windows]

    for window_left, out in zip(windows, layers(arrays), strict=True):
        visible = gpu.window_of(arguments, 10**6 if window_left < 0 else window_left)
        gpu.check_visible(arguments, np.asarray(out), None, visible)


@pytest.mark.parametrize("path", [gpu.FA3, gpu.FA2], ids=str)
def test_r42_non_causal_window(path):
    """Fewer rows than keys, non-causal with a window: every row sees from p - window to the end,
    or the call is refused with the reason."""
    sizes = dict(num_qo_heads=8, options=dict(causal=False, window_left=333))
    case = path.case((4096, 9, 40), (300, 9, 5), **sizes)
    arguments = faults.uniform(case)
    try:
        out, lse = gpu.attend("torch", path, arguments)
    except NotImplementedError as error:
        assert "window" in str(error)
        return
    lengths = arguments["seq_lens"].tolist()
    visible = [range(max(0, p - 333), lengths[r]) for r, p in faults.positions(arguments)]
    gpu.check_visible(arguments, out, lse, visible)
    small = path.case((600, 9), (70, 9), **sizes).make()
    gpu.check(small, *gpu.attend("torch", path, small))


@pytest.mark.parametrize("front", faults.FRONTS)
@pytest.mark.parametrize("head_dim", [72, 80, 96, 112, 136])
def test_r43_odd_head_dims_are_refused(front, head_dim):
    """By the native kernels, so wherever lse is asked for, and by XQA but for multiples of 16
    (tests/faults/test_gpu_decode.py): the call names head_dim and what is allowed."""
    message = f"takes head_dim 64, 128, 256, got {head_dim}"
    for path in (gpu.DECODE, gpu.FA3, gpu.FA2):
        arguments = path.case((25, 17), (5, 1), head_dim=head_dim).make()
        for backend in ("auto", path.backend):
            with pytest.raises(NotImplementedError, match=message):
                gpu.run(front, path.phase, arguments, backend=backend, return_lse=True)
    if head_dim % 16:
        arguments = gpu.XQA.case((25, 17), head_dim=head_dim).make()
        with pytest.raises(
            NotImplementedError, match="takes head_dim 16 to 512 in steps of 16, got"
        ):
            gpu.run(front, "decode", arguments)


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["split", "whole"])
@gpu.calls([gpu.DECODE, gpu.FA3, gpu.FA2], from_jax=[gpu.DECODE, gpu.FA3, gpu.FA2])
def test_r44_a_short_batch_after_a_long_one(front, path, batch_invariant):
    """One recorded program: 64 long requests, then three short ones among empty ones, then the
    long ones again: the plan of each run is its own."""
    long = [700 + 3 * n for n in range(64)]
    rows = (20,) * 3 + (2,) * 61
    arguments = path.case(long, rows, options=dict(batch_invariant=batch_invariant)).make()
    short = np.array([130, 17, 20] + [0] * 61, np.int32)
    runs = [arguments["seq_lens"], short, arguments["seq_lens"], short]
    if front == "torch":
        results = replayed(path, arguments, runs)
    else:
        results = [gpu.attend(front, path, arguments, seq_lens=lengths) for lengths in runs]
    assert gpu.same_bits(results[0], results[2]) and gpu.same_bits(results[1], results[3])
    call = arguments | dict(seq_lens=short)
    gpu.check(call, *results[1])
    fresh = gpu.attend("torch", path, arguments)
    for actual, expected in zip(results[0], fresh, strict=True):
        np.testing.assert_array_equal(actual, expected)


def replayed(path, arguments, runs):
    """out and lse of a CUDA graph for each of the lengths in turn."""
    tensors = gpu.on_device(arguments) | dict(backend=path.backend, return_lse=True)
    function = getattr(torch_core, path.phase)
    function(**tensors)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = function(**tensors)
    results = []
    for lengths in runs:
        tensors["seq_lens"].copy_(torch.from_numpy(lengths))
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        results.append(tuple(map(inputs.to_numpy, outs)))
    return results


@pytest.mark.parametrize("total", [65535, 65536, 70000])
@pytest.mark.parametrize("path", [gpu.FA3, gpu.FA2], ids=str)
def test_r45_more_rows_than_a_grid_axis_has_blocks(path, total):
    """One extend of 65535 tokens and more: the first, the 65536th and the last rows are right."""
    sizes = dict(num_qo_heads=1, num_kv_heads=1, extra_pages=0)
    arguments = path.case((total,), (total,), **sizes).make()
    fronts = faults.FRONTS if total == 70000 else ("torch",)
    for front in fronts:
        out, lse = gpu.attend(front, path, arguments)
        for last in {3, 32769, 65536, total} - {65536 if total < 65536 else 0}:
            rows = slice(last - 3, last)
            part = arguments | dict(
                query=arguments["query"][rows],
                seq_lens=np.array([last], np.int32),
                cu_seqlens_q=np.array([0, 3], np.int32),
            )
            gpu.check(part, out[rows], lse[rows])


@pytest.mark.parametrize("path", [gpu.DECODE, gpu.FA3, gpu.FA2], ids=str)
def test_r47_many_requests_do_not_overflow_the_scratch(path):
    """512 requests of one token, and 128 of 577, 32 / 2 heads of 256: all copies agree."""
    sizes = dict(num_qo_heads=32, head_dim=256)
    for lengths, times in (((1, 577, 3000, 40), 128), ((577,) * 2, 64)):
        small = path.case(lengths, **sizes).make()
        out, lse = gpu.attend("torch", path, gpu.repeated(small, times))
        count = len(lengths)
        for start in range(0, count * times, count):
            part = slice(start, start + count)
            assert faults.same_bits((out[part], lse[part]), (out[:count], lse[:count])), start
        gpu.check(small, out[:count], lse[:count])
    if path.phase == "prefill":
        one = faults.uniform(path.case((577,), (577,), **sizes))
        many = one | dict(
            query=np.zeros((128 * 577, *one["query"].shape[1:]), one["query"].dtype),
            page_table=np.tile(one["page_table"], (128, 1)),
            seq_lens=np.tile(one["seq_lens"], 128),
            cu_seqlens_q=np.arange(129, dtype=np.int32) * 577,
        )
        out, lse = gpu.attend("torch", path, many)
        visible = [range(position + 1) for _, position in faults.positions(one)]
        gpu.check_visible(one, out[:577], lse[:577], visible)
        assert (lse.reshape(128, -1) == lse[:577].reshape(-1)).all()
        assert (out.view(np.uint16).reshape(128, -1) == out[:577].view(np.uint16).reshape(-1)).all()


@gpu.calls([dataclasses.replace(gpu.XQA, page_size=16), gpu.DECODE, *PREFILL], [gpu.FA3])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_r48_lengths_on_page_boundaries(front, path, kv_layout):
    """UNIFORM at one token, one less than a page, a page, one more, and two pages, with a table
    that has no spare column."""
    lengths = (1, 15, 16, 17, 32)
    arguments = faults.uniform(path.case(lengths, lengths, kv_layout=kv_layout))
    arguments["page_table"] = arguments["page_table"][:, :2]
    visible = [range(position + 1) for _, position in faults.positions(arguments)]
    gpu.check_visible(arguments, *gpu.attend(front, path, arguments), visible)


@pytest.mark.parametrize("path", [gpu.XQA, gpu.DECODE, *PREFILL], ids=str)
def test_r48_identical_short_requests_give_identical_rows(path):
    """Two requests with the same pages and queries, beside a longer one, give the same bits."""
    arguments = path.case((3, 3, 400), (2, 2, 9)).make()
    rows = 1 if path.phase == "decode" else 2
    arguments["page_table"][1] = arguments["page_table"][0]
    arguments["query"][rows : 2 * rows] = arguments["query"][:rows]
    out, lse = gpu.attend("torch", path, arguments)
    assert faults.same_bits(out[:rows], out[rows : 2 * rows])
    assert lse is None or faults.same_bits(lse[:rows], lse[rows : 2 * rows])
    gpu.check(arguments, out, lse)


@gpu.calls([gpu.FA2_E4M3])
def test_r49_a_bfloat16_query_over_an_e4m3_cache(front, path):
    """The default takes FA2 and is right; over an e5m2 cache it is refused with the reasons."""
    arguments = path.case((300, 17), (40, 3)).make() | dict(k_scale=0.5, v_scale=2.0)
    results = gpu.run(front, "prefill", arguments, return_lse=True)
    gpu.check(arguments, *results)
    other = path.case((300, 17), (40, 3), kv_dtype=gpu.E5M2).make()
    with pytest.raises(NotImplementedError, match="takes no bfloat16 query with a float8_e5m2"):
        gpu.run(front, "prefill", other)


@pytest.mark.parametrize("front", faults.FRONTS)
def test_r49_a_failed_build_is_a_readable_error(front, monkeypatch):
    """What the compiler says reaches the caller as it is, and the next call works."""
    arguments = gpu.FA3.case((31, 17), (7, 3)).make()

    def fails(*configuration):
        raise RuntimeError(f"nvcc could not compile {configuration[0]}")

    with monkeypatch.context() as patch:
        patch.setattr(native, "function", fails)
        native.bind.cache_clear()
        with pytest.raises(RuntimeError, match="nvcc could not compile fa3"):
            gpu.run(front, "prefill", arguments, backend=gpu.FA3.backend)
    gpu.check(arguments, gpu.run(front, "prefill", arguments, backend=gpu.FA3.backend))
