"""Faults (a) on a GPU, R1 to R7: streams, hand-over, capture, layouts and dtypes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

import jaxattn
import torch_core
from jaxattn import _ffi, interop
from tests import faults, inputs, loops
from tests.faults import gpu
from tests.faults.gpu import bits, first, jitted, static_of
from tests.faults.interop import CACHE_NAMES

pytestmark = pytest.mark.gpu

LENGTHS, ROWS = (5, 1, 17, 300, 64, 0), (5, 1, 3, 30, 1, 0)
paths = pytest.mark.parametrize("path", [gpu.XQA_E4M3, *gpu.NATIVE, gpu.FA2_E4M3], ids=str)


def test_r1_a_callback_runs_on_the_stream_of_xla():
    """Torch operations in a callback are ordered with the matmuls around it; outside of it torch
    is back on its own stream."""
    before = torch.cuda.current_stream()
    streams = []

    def double(x, out):
        streams.append(torch.cuda.current_stream().cuda_stream)
        out.copy_(x * 2)

    @jax.jit
    def program(x, weights):
        for _ in range(10):
            x = jnp.tanh(x @ weights)
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        doubled = _ffi.call("tests.r1.double", double, [x], [shape], platform="gpu")[0]
        return x, doubled * 2

    weights = jax.random.normal(jax.random.key(0), (4096, 4096)) / 32
    for seed in range(20):
        x, result = program(jax.random.normal(jax.random.key(seed), (4096, 4096)), weights)
        assert jnp.array_equal(result, x * 4)
    assert len(streams) == 20
    assert before.cuda_stream not in streams
    assert torch.cuda.current_stream() == before


@pytest.mark.parametrize("path", [gpu.XQA, *gpu.NATIVE], ids=str)
def test_r1_torch_calls_follow_their_stream_after_jax(path):
    """After a JAX program, a torch call in a side stream waits for that stream's work only."""
    arguments = path.case(LENGTHS, ROWS).make()
    jax.block_until_ready(jitted(path)(faults.jax_arrays(arguments)[0]))
    tensors = gpu.on_device(arguments) | dict(backend=path.backend)
    function = getattr(torch_core, path.phase)
    late = torch.zeros_like(tensors["query"])
    big = torch.randn(4096, 4096, device=gpu.DEVICE)
    expected = function(**tensors)
    side = torch.cuda.Stream()
    for _ in range(10):
        late.zero_()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):
                torch.mm(big, big)
            late.copy_(tensors["query"])
            out = function(**tensors | dict(query=late))
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(out, expected)


@paths
def test_r1_r26_operands_computed_right_before(path):
    """Query, lengths, page table and scale made by the same program: no stale read in 50 runs."""
    arguments = path.case(LENGTHS, ROWS).make()
    arrays, _ = faults.jax_arrays(arguments)
    num_pages = len(arguments["key_cache"])
    weights = jax.random.normal(jax.random.key(0), (128, 128), jnp.bfloat16) / 8
    call = getattr(jaxattn, path.phase)
    static = dict(static_of(path))

    @jax.jit
    def program(arrays, step):
        query = arrays["query"]
        for _ in range(4):
            query = jnp.tanh(query @ weights)
        made = dict(
            query=query,
            seq_lens=jnp.cumsum(jnp.ones_like(arrays["seq_lens"])) * (step % 40) + 30,
            page_table=(jnp.indices(arrays["page_table"].shape)[1].astype(jnp.int32) * 7 + step)
            % num_pages,
            k_scale=jnp.float32(1) / (1 + step),
        )
        return made, first(call(**arrays | made, **static)) * 2

    again = jax.jit(lambda arrays: first(call(**arrays, **static)) * 2)
    for step in range(50):
        made, result = program(arrays, jnp.int32(step))
        jax.block_until_ready(made)
        assert np.array_equal(bits(result), bits(again(arrays | made)))


def long_work(x):
    for _ in range(4):
        x = x @ x / 64
    return x


def after(work, x):
    """x, but not before `work` is done."""
    return x + jnp.minimum(jnp.abs(jnp.nan_to_num(work).sum()), 0).astype(x.dtype)


def test_r2_caches_filled_by_torch_in_a_side_stream():
    """JAX reads a cache that torch writes late, in another stream that is current."""
    case = gpu.XQA.case((300, 17))
    arrays, static = faults.jax_arrays(case.make())
    call = jax.jit(functools.partial(jaxattn.decode, **static))
    big = torch.randn(4096, 4096, device=gpu.DEVICE)
    side = torch.cuda.Stream()
    for seed in range(50):
        values = case.make(seed % 5)
        expected = call(**arrays | {name: inputs.to_jax(values[name]) for name in CACHE_NAMES})
        sources = [inputs.to_torch(values[name], gpu.DEVICE) for name in CACHE_NAMES]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            targets = [torch.full_like(source, torch.nan) for source in sources]
            long_work(big)
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            caches = dict(zip(CACHE_NAMES, map(jaxattn.to_jax, targets), strict=True))
            out = call(**arrays | caches)
        assert np.array_equal(bits(out), bits(expected)), seed
        side.synchronize()


def test_r2_a_tensor_dropped_while_jax_still_reads_it():
    """The memory of a tensor that was handed over is not recycled under a running program."""
    arguments = gpu.XQA.case((300, 17)).make()
    arrays, static = faults.jax_arrays(arguments)
    big = jax.random.normal(jax.random.key(0), (4096, 4096))

    @jax.jit
    def late(arrays, big):
        query = after(long_work(long_work(big)), arrays["query"])
        return jaxattn.decode(**arrays | dict(query=query), **static)

    expected = bits(late(arrays, big))
    for _ in range(20):
        tensors = [inputs.to_torch(arguments[name], gpu.DEVICE) for name in CACHE_NAMES]
        torch.cuda.synchronize()
        caches = dict(zip(CACHE_NAMES, map(jaxattn.to_jax, tensors), strict=True))
        out = late(arrays | caches, big)
        shape, dtype = tensors[0].shape, tensors[0].dtype
        del tensors, caches
        for _ in range(8):
            torch.full(shape, torch.nan, dtype=dtype, device=gpu.DEVICE)
        assert np.array_equal(bits(out), expected)


def test_r2_caches_made_by_jax_for_torch():
    """torch reads a cache that JAX is still computing, and whose array is dropped."""
    arguments = gpu.XQA.case((300, 17)).make()
    tensors = gpu.on_device(arguments)
    expected = torch_core.decode(**tensors)
    key_cache = jnp.asarray(arguments["key_cache"])
    big = jax.random.normal(jax.random.key(0), (4096, 4096))
    late = jax.jit(lambda big, x: after(long_work(big), x))
    for _ in range(50):
        tensor = jaxattn.to_torch(late(big, key_cache))
        assert torch.equal(torch_core.decode(**tensors | dict(key_cache=tensor)), expected)


def test_r2_handing_over_shares_memory():
    """to_jax aliases, as its docstring says; a copy taken in JAX is its own."""
    tensor = torch.ones(1 << 20, device=gpu.DEVICE)
    array = jaxattn.to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    copy = jax.block_until_ready(jnp.copy(array))
    tensor.zero_()
    torch.cuda.synchronize()
    assert copy.min() == 1 and array.max() == 0


@pytest.mark.parametrize("loop", ["scan", "while_loop"])
@pytest.mark.parametrize("path", [gpu.XQA_E4M3, *gpu.NATIVE], ids=str)
def test_r3_captured_in_loops(path, loop):
    """64 steps with matmuls between, command buffers of any size: the lengths and the page table of
    each step count, and a second run replays with others."""
    steps = 64
    arguments = path.case((300, 17, 64), (30, 5, 1)).make()
    arrays, _ = faults.jax_arrays(arguments)
    arrays["page_table"] = jnp.arange(3 * 32, dtype=jnp.int32).reshape(3, 32) % len(
        arguments["key_cache"]
    )
    call, static = getattr(jaxattn, path.phase), dict(static_of(path))
    weights = jax.random.normal(jax.random.key(0), (128, 128), jnp.bfloat16) / 8

    query = arrays["query"]
    queries = jax.random.normal(jax.random.key(1), (steps, *query.shape), jnp.float32)
    queries = queries.astype(query.dtype)

    # Queries are given, since what a program computes XLA may compute twice, and round otherwise.
    def run(queries, noise, seq_lens, table, count):
        def body(index, carry):
            noise, seq_lens, table, outs = carry
            now = arrays | dict(query=queries[index], seq_lens=seq_lens, page_table=table)
            out = first(call(**now, **static))
            noise = jnp.tanh((noise + out) @ weights)
            outs = outs.at[index].set(out)
            return noise, (seq_lens * 3 + 1) % 400, jnp.roll(table, 1, 1), outs

        carry = (noise, seq_lens, table, jnp.zeros((steps, *noise.shape), noise.dtype))
        return loops.run(loop, body, carry, steps, count)

    noise, table = jnp.zeros(query.shape, jnp.bfloat16), arrays["page_table"]
    given = [
        (queries, noise, arrays["seq_lens"] + shift, table[::-1] if shift else table, steps)
        for shift in (0, 50)
    ]
    compiled = (
        jax.jit(run).lower(*given[0]).compile(compiler_options={"xla_gpu_graph_min_graph_size": 1})
    )
    single = jax.jit(lambda arrays: first(call(**arrays, **static)))
    before = _ffi.kernel_calls()
    results = jax.block_until_ready([compiled(*one) for one in given])
    assert _ffi.kernel_calls() - before < steps
    for (_, _, seq_lens, table, _), (*_, outs) in zip(given, results, strict=True):
        for index in range(steps):
            now = arrays | dict(query=queries[index], seq_lens=seq_lens, page_table=table)
            assert np.array_equal(bits(outs[index]), bits(single(now))), index
            seq_lens, table = (seq_lens * 3 + 1) % 400, jnp.roll(table, 1, 1)


def column_major(array):
    """The same array with reversed strides."""
    layout = Layout(tuple(range(array.ndim))[::-1])
    return jax.device_put(array, Format(layout, SingleDeviceSharding(jax.devices()[0])))


@pytest.mark.parametrize("path", gpu.AUTO, ids=str)
def test_r5_jit_operands_of_any_layout(path):
    """Column-major operands, and operands made by transposes inside jit, are read right."""
    arguments = path.case(LENGTHS, ROWS).make()
    arrays, _ = faults.jax_arrays(arguments)
    expected = bits(first(jitted(path)(arrays)))
    columns = {name: column_major(array) for name, array in arrays.items()}
    assert np.array_equal(bits(first(jax.jit(lambda a: jitted(path)(a))(columns))), expected)
    turned = {name: jnp.asarray(np.asarray(array).T) for name, array in arrays.items()}
    transposed = jax.jit(lambda a: first(jitted(path)({name: x.T for name, x in a.items()})).T)
    assert np.array_equal(bits(transposed(turned).T), expected)


@pytest.mark.parametrize("path", gpu.PATHS, ids=str)
def test_r5_torch_views_of_the_cache(path):
    """Strided caches, queries, tables and lengths give the bits of contiguous ones; what a kernel
    cannot read is refused by name."""
    arguments = path.case(LENGTHS, ROWS).make()
    tensors = gpu.on_device(arguments)
    function = functools.partial(getattr(torch_core, path.phase), backend=path.backend)
    expected = function(**tensors)
    gpu.check(arguments, inputs.to_numpy(expected))
    key, value, query = (tensors[name] for name in (*CACHE_NAMES, "query"))
    pool = gpu.stack([key, value], 1)
    by_head = gpu.stack([key, value], 3)
    hnd = dict(kv_layout="HND")
    views = [
        dict(key_cache=pool[:, 0], value_cache=pool[:, 1]),
        dict(key_cache=key.transpose(1, 2), value_cache=value.transpose(1, 2)) | hnd,
        dict(key_cache=by_head[:, :, :, 0], value_cache=by_head[:, :, :, 1]),
        dict(key_cache=pool[:, 0].transpose(1, 2), value_cache=pool[:, 1].transpose(1, 2)) | hnd,
        dict(query=gpu.stack([query] * 2, 1)[:, 1]),
        dict(query=gpu.stack([query] * 2, 3)[..., 1]),
        dict(query=inside(query, query.shape[-1], 1)),
        dict(page_table=tensors["page_table"].T.contiguous().T),
        dict(seq_lens=torch.stack([tensors["seq_lens"]] * 2, dim=1)[:, 0]),
    ]
    wide = dict(key_cache=inside(key, 192), value_cache=inside(value, 192))
    strides = "key_cache must have strides that are multiples of"
    refused = [
        (dict(value_cache=gpu.stack([value] * 2, 1)[:, 1]), "value_cache must have the strides"),
        (dict(key_cache=inside(key, 129), value_cache=inside(value, 129)), strides),
        (
            dict(key_cache=inside(key, 256), value_cache=inside(value, 256, 1)),
            "value_cache must start at a multiple of 16 bytes",
        ),
    ]
    if path.backend == "xqa":
        refused.append((wide, f"{strides} 128"))
    else:
        views.append(wide)
    for view in views:
        assert torch.equal(function(**tensors | view), expected), list(view)
    for view, message in refused:
        with pytest.raises(ValueError, match=message):
            function(**tensors | view)
    assert torch.equal(function(**tensors), expected)


def inside(tensor: torch.Tensor, width: int, start: int = 0) -> torch.Tensor:
    """The same values as a part of memory with rows of `width` elements."""
    memory = torch.zeros(tensor[..., 0].numel() * width + start, device=gpu.DEVICE)
    rows = memory.to(tensor.dtype)[start:].view(*tensor.shape[:-1], width)[..., : tensor.shape[-1]]
    rows.copy_(tensor)
    return rows


@pytest.mark.parametrize("path", gpu.PATHS, ids=str)
def test_r5_axes_of_size_1(path):
    """Caches of one page, one head or one token a page; and strides of such axes mean nothing."""
    lengths, rows = (9, 40, 0), (3, 40, 1)
    # XQA needs 8 query heads a KV head, and pages of its own size.
    cases = [path.case(lengths, rows, num_qo_heads=8, num_kv_heads=1)]
    cases.append(path.case((9,), (3,), extra_pages=0))
    if not path.backend == "xqa":
        cases.append(path.case(lengths, rows, page_size=1, num_qo_heads=8, num_kv_heads=1))
    for case in cases:
        arguments = case.make()
        tensors = gpu.on_device(arguments)
        function = functools.partial(getattr(torch_core, path.phase), backend=path.backend)
        expected = function(**tensors)
        gpu.check(arguments, inputs.to_numpy(expected))
        for names in (CACHE_NAMES, CACHE_NAMES[1:]):
            view = {}
            for name in names:
                cache = tensors[name]
                pairs = zip(cache.shape, cache.stride(), strict=True)
                strides = [7 if size == 1 else step for size, step in pairs]
                assert strides != list(cache.stride())
                view[name] = cache.as_strided(cache.shape, strides)
            assert torch.equal(function(**tensors | view), expected), names


@pytest.mark.parametrize("dtype", interop.DTYPES)
def test_r6_dtypes_cross_bit_exact_without_a_copy(dtype):
    """JAX to torch to JAX keeps every bit and the pointer, on the GPU."""
    size = jnp.dtype(dtype).itemsize
    values = np.arange(512 * size, dtype=np.uint8)
    values = (values % 2).astype(bool) if dtype == "bool" else values.view(jnp.dtype(dtype))
    array = jnp.array(values)
    tensor = jaxattn.to_torch(array)
    assert str(tensor.dtype) == f"torch.{dtype}" and tensor.device.type == gpu.DEVICE
    back = jaxattn.to_jax(tensor)
    assert faults.same_bits(np.asarray(back), values)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr() == back.unsafe_buffer_pointer()


@pytest.mark.parametrize("path", [gpu.XQA, gpu.FA3], ids=str)
def test_r7_lengths_are_int32(path):
    """int64 lengths and tables are TypeErrors before any launch; int32 ones made under x64 work."""
    arguments = path.case(LENGTHS, ROWS).make()
    arrays, _ = faults.jax_arrays(arguments)
    for name in ("seq_lens", "page_table"):
        wrong = arguments | {name: np.maximum(arguments[name], 0).astype(np.int64)}
        for front in faults.FRONTS:
            with (
                jax.enable_x64(True),
                pytest.raises(TypeError, match=rf"{name} must be int32 \[.*got int64"),
            ):
                gpu.attend(front, path, wrong)
    expected = bits(first(jitted(path)(arrays)))
    steps = np.diff(arguments["seq_lens"], prepend=0)
    with jax.enable_x64(True):

        @jax.jit
        def made(arrays, steps):
            lengths = jnp.cumsum(steps)
            assert lengths.dtype == jnp.int64
            return jitted(path)(arrays | dict(seq_lens=lengths.astype(jnp.int32)))

        assert np.array_equal(bits(first(made(arrays, steps.astype(np.int64)))), expected)
