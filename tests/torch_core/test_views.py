"""Which views of a cache reach a compiled kernel, and as what."""

import types

import pytest
import torch

import torch_core
from torch_core import dispatch
from torch_core.backends import native, xqa
from torch_core.binding import Binding, Operand

PAGES, TOKENS, HEADS, DIM = 3, 8, 2, 64
SHAPE = (PAGES, TOKENS, HEADS, DIM)


@pytest.fixture(params=[xqa, native], ids=["xqa", "native"])
def kernel(request, monkeypatch):
    """A kernel with the limits of a backend, which keeps the tensors that it gets."""
    made = types.SimpleNamespace(got=[], backend=request.param)

    def launched(*tensors):
        made.got[:] = tensors

    names = ("query", "key_cache", "value_cache", "out")
    bound = Binding("stub", launched, tuple(map(Operand, names)), 0)
    stub = types.SimpleNamespace(
        bind=lambda *_: bound,
        scales=lambda *_: {},
        operands=lambda _, inputs, *rest: {name: getattr(inputs, name) for name in names[:3]},
        stride_unit=made.backend.stride_unit,
    )
    monkeypatch.setattr(dispatch, "load", lambda _: stub)
    return made


def decode(key_cache, value_cache, *, kv_layout="NHD", dtype=torch.bfloat16, **changes):
    arguments = dict(
        query=torch.zeros(2, 4, DIM, dtype=dtype),
        key_cache=key_cache,
        value_cache=value_cache,
        page_table=torch.zeros(2, 1, dtype=torch.int32),
        seq_lens=torch.ones(2, dtype=torch.int32),
        kv_layout=kv_layout,
    )
    return torch_core.decode(**arguments | changes)


def rows(width: int, start: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A cache whose rows are cut out of rows of `width` elements."""
    return torch.zeros(*SHAPE[:3], width, dtype=dtype)[..., start : start + DIM]


def test_views_that_are_read(kernel):
    """A layer of a pool, keys beside values, heads first, every second token, a wide row."""
    pool = torch.zeros(PAGES, 2, TOKENS, HEADS, DIM, dtype=torch.bfloat16)
    beside = torch.zeros(PAGES, TOKENS, HEADS, 2 * DIM, dtype=torch.bfloat16)
    sparse = torch.zeros(PAGES, 2 * TOKENS, HEADS, DIM, dtype=torch.bfloat16)
    for pair in (
        (pool[:, 0], pool[:, 1]),
        (beside[..., :DIM], beside[..., DIM:]),
        (sparse[:, ::2], sparse[:, 1::2]),
        (rows(2 * DIM), rows(2 * DIM)),
    ):
        for swapped in (False, True):
            caches = [cache.transpose(1, 2) if swapped else cache for cache in pair]
            decode(*caches, kv_layout="HND" if swapped else "NHD")
            for given, got in zip(caches, kernel.got[1:3], strict=True):
                assert (got.data_ptr(), got.stride()) == (given.data_ptr(), given.stride())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_strides_between_rows(kernel, dtype):
    """XQA counts in rows, the others load 16 bytes at a time."""
    for width in (96, 72, 65):
        cache = rows(width, dtype=dtype)
        if kernel.backend is native and width * dtype.itemsize % 16 == 0:
            decode(cache, cache)
            continue
        unit = DIM if kernel.backend is xqa else 16 // dtype.itemsize
        message = rf"key_cache must have strides that are multiples of {unit} .*{width}, 1\)"
        with pytest.raises(ValueError, match=message):
            decode(cache, cache)


def test_starts(kernel):
    """Caches and results start at a multiple of 16 bytes; a query that does not is copied."""
    plain, shifted = rows(DIM), rows(2 * DIM, 1)
    aligned = rows(2 * DIM)
    for name, pair in (("key", (shifted, aligned)), ("value", (aligned, shifted))):
        with pytest.raises(ValueError, match=f"{name}_cache must start at a multiple of 16 bytes"):
            decode(*pair)
    flat = torch.zeros(2 * 4 * DIM + 1, dtype=torch.bfloat16)[1:].view(2, 4, DIM)
    with pytest.raises(ValueError, match=r"^out must start at a multiple of 16 bytes"):
        decode(plain, plain, out=flat)
    decode(plain, plain, query=flat)
    assert kernel.got[0].data_ptr() % 16 == 0 and torch.equal(kernel.got[0], flat)


def test_axes_of_size_1(kernel):
    """Their strides mean nothing: kernels get the same ones for both caches."""
    unit = DIM if kernel.backend is xqa else 8
    for shape in ((1, 1, 1, DIM), (3, 1, 2, DIM), (3, 8, 1, DIM)):
        cache = torch.zeros(shape, dtype=torch.bfloat16)
        odd = [7 if size == 1 else step for size, step in zip(shape, cache.stride(), strict=True)]
        decode(cache, cache.as_strided(shape, odd))
        key, value = kernel.got[1:3]
        assert key.stride() == value.stride()
        assert all(step % unit == 0 for step in key.stride()[:3])
