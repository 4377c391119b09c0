"""Section (b) on a GPU: faults reported for XQA and trtllm-gen decode, on every kernel.

tests/torch_core/test_xqa.py has XQA's own rows R20, R21, R27 and R32.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxattn
import torch_core
from tests import faults, inputs
from tests.faults import gpu
from tests.faults.hanging import answer
from tests.faults.test_decode import CELLS

pytestmark = pytest.mark.gpu

BF16 = inputs.DTYPES["bfloat16"]


@gpu.calls([gpu.XQA, *gpu.NATIVE])
def test_r20_rows_without_keys_do_not_touch_the_others(front, path):
    """Rows of length 0 give 0 and -inf; the others keep the bits of a call without them."""
    lengths = (5, 1, 17, 120, 64)
    arguments = path.case((*lengths, 0, 0, 0)).make()
    arguments["query"][5:] = np.nan
    out, lse = gpu.attend(front, path, arguments)
    assert (out[5:] == 0).all() and (lse is None or (lse[5:] == -np.inf).all())
    alone = {name: arguments[name][:5] for name in ("query", "page_table", "seq_lens")}
    if path.phase == "prefill":
        alone |= dict(cu_seqlens_q=arguments["cu_seqlens_q"][:6])
    rest = gpu.attend(front, path, arguments | alone)
    assert gpu.same_bits((out[:5], None if lse is None else lse[:5]), rest)
    gpu.check(arguments | alone, *rest)
    empty = gpu.attend(front, path, arguments, seq_lens=np.zeros(8, np.int32))
    assert (empty[0] == 0).all() and (lse is None or (empty[1] == -np.inf).all())


@gpu.calls([gpu.XQA_E4M3, *gpu.PATHS[2:]])
def test_r21_unused_slots_never_reach_the_output(front, path):
    """POISON in page tails, unused pages and page 0, in both caches and in one of them."""
    case = path.case((4, 13, 16, 17, 0, 200), (1, 5, 16, 3, 0, 40))
    arguments = faults.with_null_page(case.make())
    clean = gpu.attend(front, path, gpu.poisoned(arguments, 0.0))
    gpu.check(arguments, *clean)
    both = ("key_cache", "value_cache")
    fills = faults.poisons(arguments["key_cache"].dtype)
    if front == "jax":
        fills = fills[:1]
    runs = [*((both, fill) for fill in fills), (both[:1], np.nan), (both[1:], np.nan)]
    for poisoned, fill in runs:
        call = gpu.poisoned(gpu.poisoned(arguments, 0.0), fill, poisoned)
        assert gpu.same_bits(gpu.attend(front, path, call), clean), (poisoned, fill)


@pytest.mark.parametrize("part", ["torch", "torch_lse", "jax"])
def test_r22_scratch_full_of_ones_and_changing_batches(part):
    """decode(64) -> prefill -> decode(1) -> decode(64), long and split, over memory that held 0xFF:
    every result is that of its first run, and nothing hangs."""
    assert answer(f"r22_{part}") == "right"


SCALES = dict(q_scale=2.0, k_scale=0.25, v_scale=0.5)


@gpu.calls(gpu.PATHS)
@pytest.mark.parametrize("form", ["number", "array"])
def test_r23_scales_apply_once(front, path, form):
    """Scaled calls equal attention over the dequantised cache; only an e4m3 query has a scale."""
    arguments = path.case((9, 30, 200), (3, 1, 20)).make()
    # An array is traced under jit.
    scales = SCALES if form == "number" else {k: np.array(v, "f4") for k, v in SCALES.items()}
    results = gpu.attend(front, path, arguments, **scales)
    gpu.check(arguments | SCALES, *results)
    if path.dtype != gpu.E4M3 and (front, form) != ("jax", "number"):
        without = {name: scale for name, scale in scales.items() if name != "q_scale"}
        assert gpu.same_bits(results, gpu.attend(front, path, arguments, **without))


@gpu.calls(gpu.PATHS, from_jax=[])
def test_r23_scales_of_one_key(front, path):
    """One key: out is v_scale times its value, and lse its score with every scale once."""
    arguments = path.case((1,)).make()
    arguments["query"][:] = 0
    arguments["query"][..., 0] = 3
    page, offset = faults.token_places(arguments, 0)
    arguments["key_cache"][page, offset] = 0
    arguments["key_cache"][page, offset, :, 0] = -4
    out, lse = gpu.attend(front, path, arguments, **SCALES)
    value = arguments["value_cache"][page, offset].astype(np.float32) * 0.5
    np.testing.assert_array_equal(out.astype(np.float32), np.repeat(value, 8, axis=1))
    if lse is not None:
        q_scale = 2 if path.dtype == gpu.E4M3 else 1
        np.testing.assert_allclose(lse, -12 * q_scale * 0.25 / np.sqrt(128), rtol=4e-6)


@gpu.calls([gpu.XQA, gpu.XQA_E4M3, *gpu.NATIVE])
def test_r24_window_is_exact_per_row(front, path):
    """UNIFORM: every row sees exactly its own min(p + 1, window_left + 1) newest keys."""
    for lengths, windows in (((3, 4, 5, 6, 9), (0, 1, 4, 9)), ((1024, 1025, 1100), (1023,))):
        arguments = faults.uniform(path.case(lengths, (4,) * len(lengths)))
        for window_left in windows[-1:] if front == "jax" else windows:
            results = gpu.attend(front, path, arguments, window_left=window_left)
            gpu.check_visible(arguments, *results, gpu.window_of(arguments, window_left))


@gpu.calls([gpu.XQA, *gpu.NATIVE])
def test_r24_largest_window_is_no_window(front, path):
    """UNIFORM: window_left of 2**31 - 1 equals no window, in rows before position 0 too."""
    arguments = faults.uniform(path.case((3, 9, 300), (8, 2, 5)))
    results = gpu.attend(front, path, arguments, window_left=2**31 - 1)
    gpu.check_visible(arguments, *results, gpu.window_of(arguments, 2**31 - 1))


@pytest.mark.parametrize("head_dim, q_len", [(128, 4), (256, 8)])
@gpu.calls([gpu.XQA_E4M3])
def test_r24_window_of_drafts_is_each_row_s_own(front, path, head_dim, q_len):
    """UNIFORM: the query rows of a request have a window each, in short requests and past a tile. A
    window that does not reach over the draft block is refused."""
    short, long = (1, 2, 3, 4, 5, 6, 9), (1024, 1025, 1026, 1027, 1100)
    for lengths, windows in ((short, (q_len, q_len - 1)), (long, (1023,))):
        arguments = faults.uniform(path.case(lengths, q_len=q_len, head_dim=head_dim))
        with pytest.raises(NotImplementedError, match="window_left of at least q_len - 1"):
            gpu.attend(front, path, arguments, window_left=q_len - 2)
        for window_left in windows:
            out, _ = gpu.attend(front, path, arguments, window_left=window_left)
            gpu.check_visible(arguments, out, None, gpu.window_of(arguments, window_left))


@gpu.calls([gpu.DECODE, gpu.FA3, gpu.FA2])
def test_r26_200_runs_with_changing_lengths_and_scales(front, path):
    """Lengths and a scale made on the device right before the call: the lse of a UNIFORM call says
    what the lengths were."""
    arguments = faults.uniform(path.case((120,) * 4))
    if front == "torch":
        tensors = gpu.on_device(arguments)
        ones, function = torch.ones_like(tensors["seq_lens"]), getattr(torch_core, path.phase)
        lses = [
            function(
                **tensors | dict(seq_lens=(ones * (step % 100)).cumsum(0).clamp(max=110).int() + 1),
                k_scale=torch.rand((), device=gpu.DEVICE) + 1,
                backend=path.backend,
                return_lse=True,
            )[1]
            for step in range(200)
        ]
    else:
        arrays, _ = faults.jax_arrays(arguments)
        static = dict(gpu.static_of(path))

        @jax.jit
        def run(arrays, step):
            lengths = jnp.minimum(jnp.cumsum(jnp.zeros(4, jnp.int32) + step % 100), 110) + 1
            return getattr(jaxattn, path.phase)(
                **arrays | dict(seq_lens=lengths), **static, k_scale=1 / (1 + step)
            )[1]

        lses = [run(arrays, jnp.int32(step)) for step in range(200)]
    for step, lse in enumerate(lses):
        lengths = np.minimum(np.arange(1, 5) * (step % 100), 110) + 1
        expected = np.broadcast_to(np.log(lengths)[:, None], (4, 16))
        np.testing.assert_allclose(inputs.to_numpy(lse), expected, rtol=4e-6, atol=4e-6)


HIGH = [32767, 32768, 65535, 65590]


@pytest.mark.parametrize("front", faults.FRONTS)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", gpu.E4M3])
def test_r27_page_ids_past_32_bits(front, kv_dtype):
    """append_kv, decode and prefill over pages past 2^31 and 2^32 elements equal the first ones."""
    shape = (65_600, 64, 8, 128)
    new = np.random.default_rng(0).normal(size=(2, 250, 8, 128)).astype(BF16)
    query = np.random.default_rng(1).normal(size=(250, 64, 128)).astype(BF16)
    tables = {
        name: np.array([pages], np.int32) for name, pages in (("low", range(4)), ("high", HIGH))
    }
    places = dict(positions=np.arange(250, dtype=np.int32), request_ids=np.zeros(250, np.int32))
    lens, offsets = np.array([250], np.int32), np.array([0, 250], np.int32)
    calls = [("decode", "xqa", {}), ("decode", "native_decode", dict(return_lse=True))]
    calls += [("prefill", "native_prefill_fa2", {})]
    calls += [("prefill", "native_prefill_fa3", {})] * (kv_dtype == "bfloat16")
    package, convert = torch_core, lambda array: inputs.to_torch(array, gpu.DEVICE)
    if front == "jax":
        package, convert = jaxattn, inputs.to_jax
        caches = [jnp.zeros(shape, kv_dtype) for _ in "kv"]
    else:
        kind = getattr(torch, kv_dtype)
        caches = [torch.empty(shape, dtype=kind, device=gpu.DEVICE) for _ in "kv"]
    append = package.append_kv
    if front == "jax":
        append = jax.jit(append, donate_argnums=(2, 3))
    key, value, query, lens, offsets = map(convert, (*new, query, lens, offsets))
    places = {name: convert(array) for name, array in places.items()}
    for table in tables.values():
        caches = append(key, value, *caches, convert(table), **places)
    results = {}
    for name, table in tables.items():
        for phase, backend, more in calls:
            rows = dict(cu_seqlens_q=offsets, max_seqlen_q=250) if phase == "prefill" else {}
            result = getattr(package, phase)(
                query[:1] if phase == "decode" else query,
                *caches, convert(table), lens, **rows, **more, backend=backend,
            )  # fmt: skip
            results[name, backend] = inputs.to_numpy(gpu.first(result))
    del caches
    if front == "torch":
        torch.cuda.empty_cache()
    for _, backend, _ in calls:
        assert results["low", backend].any()
        assert faults.same_bits(results["low", backend], results["high", backend]), backend
    key, value = (
        np.pad(x.astype(inputs.DTYPES[kv_dtype]), ((0, 6), (0, 0), (0, 0))).reshape(4, 64, 8, 128)
        for x in new
    )
    call = dict(
        query=inputs.to_numpy(query)[:1], key_cache=key, value_cache=value, q_len=1,
        page_table=tables["low"], seq_lens=np.array([250], np.int32), kv_layout="NHD",
    )  # fmt: skip
    gpu.check(call, results["high", "xqa"])


def cell_arguments(phase, cell):
    head_dim, group, page_size, q_len = cell
    return gpu.Path("r29", phase, "auto").case(
        (9, 17), (q_len, q_len), num_qo_heads=group, num_kv_heads=1, head_dim=head_dim,
        page_size=page_size, q_len=q_len if phase == "decode" else 1, extra_pages=1,
    )  # fmt: skip


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_r29_what_is_not_supported_is_refused_before_launch(phase):
    """Cells that `supported` denies raise and name the argument and what is allowed."""
    refused = 0
    for index, cell in enumerate(CELLS[::11]):
        head_dim, group, page_size, q_len = cell
        sizes = dict(num_qo_heads=group, num_kv_heads=1, head_dim=head_dim, page_size=page_size)
        if torch_core.supported(phase, **sizes, q_len=q_len):
            continue
        refused += 1
        arguments = cell_arguments(phase, cell).make()
        fronts = faults.FRONTS if index % 10 == 0 else ("torch",)
        for front in fronts:
            with pytest.raises(NotImplementedError, match="no kernel runs this") as error:
                gpu.run(front, phase, arguments)
            text = str(error.value)
            assert f"got {head_dim}" in text or f"got {page_size}" in text or "q_len" in text
    assert refused


@pytest.mark.parametrize("path", gpu.NATIVE, ids=str)
def test_r29_any_page_size_and_group_is_right(path):
    """Cells that need no new module: all groups and page sizes at head_dim 128."""
    pages = (1, 8, 16, 32, 64, 128, 256, 24, 48, 5)
    for group, page_size in zip((1, 2, 3, 5, 6, 7, 8, 12, 16, 32), pages, strict=True):
        sizes = dict(num_qo_heads=2 * group, page_size=page_size, extra_pages=1)
        arguments = path.case((9, 170), (5, 8), **sizes).make()
        gpu.check(arguments, *gpu.attend("torch", path, arguments))


# Modules that tests/torch_core/test_xqa.py needs too.
@pytest.mark.parametrize(
    "head_dim, group, page_size", [(80, 6, 16), (112, 16, 32), (128, 8, 64), (96, 7, 128)]
)
@gpu.calls([gpu.XQA, gpu.XQA_E4M3], from_jax=[gpu.XQA, gpu.XQA_E4M3])
def test_r29_r43_head_dims_groups_and_pages_of_xqa(front, path, head_dim, group, page_size):
    """Every page size that XQA takes, with odd head sizes and groups, which it alone takes."""
    sizes = dict(num_qo_heads=2 * group, head_dim=head_dim, page_size=page_size, extra_pages=1)
    arguments = path.case((9, 170, page_size, 0), **sizes).make()
    gpu.check(arguments, *gpu.attend(front, path, arguments))


@gpu.calls([gpu.FA3, gpu.FA2, gpu.FA2_E4M3], from_jax=[gpu.FA3])
@pytest.mark.parametrize("q_lens", [(0, 0, 0, 2), (1, 3, 0, 4)])
def test_r30_ragged_drafts_equal_single_calls(front, path, q_lens):
    """SPLIT: ragged draft lengths, 0 among them, equal the requests one by one."""
    arguments = path.case((7, 13, 9, 300), q_lens).make()
    out, lse = gpu.attend(front, path, arguments, batch_invariant=True)
    gpu.check(arguments, out, lse)
    gpu.check(arguments, *gpu.attend(front, path, arguments))
    if front == "torch":
        pieces = [
            gpu.attend(front, path, call, batch_invariant=True)
            for call in faults.one_by_one(arguments)
        ]
        assert faults.same_bits(out, np.concatenate([piece[0] for piece in pieces]))
        assert faults.same_bits(lse, np.concatenate([piece[1] for piece in pieces]))


@gpu.calls([gpu.XQA, gpu.XQA_E4M3])
def test_r30_drafts_longer_than_their_request(front, path):
    """Four draft rows over 0 to 4 tokens and over more: rows before position 0 give 0."""
    arguments = path.case((0, 1, 2, 3, 4, 5, 300), q_len=4).make()
    gpu.check(arguments, *gpu.attend(front, path, arguments))
    uniform = faults.uniform(path.case((0, 1, 2, 3, 4, 5, 300), q_len=4))
    visible = [range(position + 1) for _, position in faults.positions(uniform)]
    gpu.check_visible(uniform, gpu.attend(front, path, uniform)[0], None, visible)


@gpu.calls([gpu.XQA, *gpu.NATIVE], from_jax=[gpu.FA3])
def test_r31_bounds_do_not_change_the_result(front, path):
    """max_seqlen_q of the maximum, twice and a million, and a wider page table."""
    arguments = path.case((250, 17), (5, 3)).make()
    exact = gpu.attend(front, path, arguments)
    gpu.check(arguments, *exact)
    for bound in (10, 10**6) if path.phase == "prefill" else ():
        assert gpu.same_bits(gpu.attend(front, path, arguments, max_seqlen_q=bound), exact)
    table = np.pad(arguments["page_table"], ((0, 0), (0, 2000)), constant_values=-1)
    gpu.check(arguments, *gpu.attend(front, path, arguments, page_table=table))


@pytest.mark.parametrize("path", [gpu.XQA, gpu.DECODE], ids=str)
def test_r32_a_window_over_many_splits(path):
    """UNIFORM: of 32768 keys the last 129 count, the same bits in 50 runs of one program."""
    arguments = faults.uniform(path.case((32768,)))
    arrays, static = faults.jax_arrays(arguments | dict(window_left=128, backend=path.backend))

    @jax.jit
    def repeat(arrays):
        def body(query, _):
            result = jaxattn.decode(**arrays | dict(query=query), **static, return_lse=path.lse)
            # The next call waits for this one: its output has no NaN, and 0 times it is 0.
            return (query + 0 * gpu.first(result)).astype(query.dtype), gpu.first(result)

        return jax.lax.scan(body, arrays["query"], length=50)[1]

    outs = np.asarray(repeat(arrays))
    gpu.check_visible(arguments, outs[0], None, [range(32768 - 129, 32768)])
    assert all(faults.same_bits(out, outs[0]) for out in outs)


@pytest.mark.parametrize("front", faults.FRONTS)
def test_r33_lse_of_16384_rows_of_64_heads(front):
    """More rows x heads of lse than any fixed workspace: all 256 copies of a batch agree."""
    small = gpu.DECODE.case(range(64), num_qo_heads=64, num_kv_heads=8).make()
    large = gpu.repeated(small, 256)
    out, lse = gpu.attend(front, gpu.DECODE, large)
    gpu.check(small, out[:64], lse[:64])
    assert (out.view(np.uint16).reshape(256, -1) == out[:64].view(np.uint16).reshape(-1)).all()
    assert (lse.reshape(256, -1) == lse[:64].reshape(-1)).all()


@pytest.mark.parametrize("path", [gpu.XQA, gpu.XQA_E4M3, *gpu.NATIVE, gpu.FA2_E4M3], ids=str)
def test_r34_odd_groups_pages_and_pool_views(path):
    """Group 7, pages of 24 and 48 (refused by XQA), a base pointer one page on, and pools of both
    caches."""
    odd = [dict(num_qo_heads=7, num_kv_heads=1, page_size=page) for page in (24, 48)]
    if path.backend == "xqa":
        for changes in odd:
            with pytest.raises(NotImplementedError, match="takes page_size 16, 32, 64, 128, got"):
                gpu.attend("torch", path, path.case((300, 17), **changes).make())
        odd = [dict(num_qo_heads=7, num_kv_heads=1, page_size=128, head_dim=96)]
    for changes in ({}, *odd):
        arguments = path.case((300, 17, 64), (30, 3, 1), **changes).make()
        tensors = gpu.on_device(arguments)
        function = getattr(torch_core, path.phase)
        expected = function(**tensors, backend=path.backend)
        gpu.check(arguments, inputs.to_numpy(expected))
        key, value = tensors["key_cache"], tensors["value_cache"]
        shifted = [gpu.stack([cache, cache], 0).flatten(0, 1)[1:] for cache in (key, value)]
        shifted = [cache[len(key) - 1 :] for cache in shifted]
        pool = gpu.stack([key, value], 1)
        by_layer = gpu.stack([value, key, value, key, value], 1)
        for pair in (shifted, (pool[:, 0], pool[:, 1]), (by_layer[:, 3], by_layer[:, 4])):
            view = dict(zip(("key_cache", "value_cache"), pair, strict=True))
            assert torch.equal(function(**tensors | view, backend=path.backend), expected)


@pytest.mark.parametrize("front", faults.FRONTS)
@pytest.mark.parametrize("path", [gpu.XQA, gpu.DECODE], ids=str)
def test_r45_decode_of_a_batch_past_65535(front, path):
    """A grid axis ends at 65535: every row of 70016 requests is right, or the call raises."""
    small = path.case(range(64), num_qo_heads=8, num_kv_heads=1).make()
    try:
        out, lse = gpu.attend(front, path, gpu.repeated(small, 1094))
    except Exception as error:
        # A launch error is not sticky: what comes next must work.
        assert "70016" in str(error) or "batch" in str(error) or "CUDA" in str(error).upper(), error
    else:
        assert (out.view(np.uint16).reshape(1094, -1) == out[:64].view(np.uint16).reshape(-1)).all()
        gpu.check(small, out[:64], None if lse is None else lse[:64])
    gpu.check(small, *gpu.attend(front, path, small))
