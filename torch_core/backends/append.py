"""Appending to a paged cache on a GPU, with nothing read back: one program for each row."""

from typing import Any

import torch
import triton
import triton.language as tl

from ..binding import CACHES
from ..checks import dtype_name
from ..problem import AppendInputs, AppendProblem
from ..qsa.plan import Launch

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


@triton.jit
def _quantised(
    rows, scale, SCALED: tl.constexpr, ARRAYS: tl.constexpr, LARGEST: tl.constexpr
):  # fmt: skip
    """rows / scale, saturated at LARGEST (0: not at all)."""
    if SCALED:
        factor = tl.load(scale).to(tl.float32) if ARRAYS else scale
        rows = tl.div_rn(rows.to(tl.float32), tl.zeros_like(rows).to(tl.float32) + factor)
    if LARGEST > 0:
        rows = rows.to(tl.float32)
        rows = tl.clamp(rows, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return rows


@triton.jit(do_not_specialize=["num_pages", "batch", "pages_per_seq"])
def append(
    key_ptr, value_ptr, place_ptr, request_ptr, table_ptr, k_scale, v_scale,
    key_cache_ptr, value_cache_ptr,
    key_row, key_head, key_dim, value_row, value_head, value_dim,
    key_page, key_slot, key_cache_head, key_cache_dim,
    value_page, value_slot, value_cache_head, value_cache_dim,
    num_pages, batch, pages_per_seq,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BY_SLOT: tl.constexpr, BY_REQUEST: tl.constexpr,
    K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, ARRAYS: tl.constexpr,
    LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(place_ptr + row)
    exists = place >= 0
    page = (place // PAGE_SIZE).to(tl.int64)
    if not BY_SLOT:
        request = row  # no more rows than requests
        if BY_REQUEST:
            request = tl.load(request_ptr + row).to(tl.int64)
            exists &= (request >= 0) & (request < batch)
        exists &= page < pages_per_seq
        page = tl.load(table_ptr + request * pages_per_seq + page, mask=exists, other=-1)
        page = page.to(tl.int64)
    exists &= (page >= 0) & (page < num_pages)
    slot = (place % PAGE_SIZE).to(tl.int64)
    for start in tl.static_range(0, NUM_HEADS * HEAD_DIM, BLOCK):
        index = start + tl.arange(0, BLOCK)
        mask = exists & (index < NUM_HEADS * HEAD_DIM)
        head, dim = (index // HEAD_DIM).to(tl.int64), (index % HEAD_DIM).to(tl.int64)
        key = tl.load(key_ptr + row * key_row + head * key_head + dim * key_dim, mask=mask)
        value = tl.load(
            value_ptr + row * value_row + head * value_head + dim * value_dim, mask=mask
        )
        key = _quantised(key, k_scale, K_SCALED, ARRAYS, LARGEST)
        value = _quantised(value, v_scale, V_SCALED, ARRAYS, LARGEST)
        at = page * key_page + slot * key_slot + head * key_cache_head + dim * key_cache_dim
        tl.store(key_cache_ptr + at, key.to(key_cache_ptr.dtype.element_ty), mask=mask)
        at = page * value_page + slot * value_slot + head * value_cache_head
        at += dim * value_cache_dim
        tl.store(value_cache_ptr + at, value.to(value_cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def append_whole(
    key_ptr, value_ptr, places_ptr, request_ids_ptr, page_table_ptr, k_scale_ptr, v_scale_ptr,
    key_cache_ptr, value_cache_ptr, new_key_cache_ptr, new_value_cache_ptr,
    NUM_PAGES: tl.constexpr, BATCH: tl.constexpr, PAGES_PER_SEQ: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BY_SLOT: tl.constexpr, BY_REQUEST: tl.constexpr,
    K_SCALED: tl.constexpr, V_SCALED: tl.constexpr,
    LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`append` to whole arrays, which need no strides; the new caches are the old ones' memory."""
    row: tl.constexpr = NUM_HEADS * HEAD_DIM
    slot: tl.constexpr = HEAD_DIM if HEADS_FIRST else row
    head: tl.constexpr = PAGE_SIZE * HEAD_DIM if HEADS_FIRST else HEAD_DIM
    append(
        key_ptr, value_ptr, places_ptr, request_ids_ptr, page_table_ptr, k_scale_ptr, v_scale_ptr,
        new_key_cache_ptr, new_value_cache_ptr,
        row, HEAD_DIM, 1, row, HEAD_DIM, 1,
        PAGE_SIZE * row, slot, head, 1,
        PAGE_SIZE * row, slot, head, 1,
        NUM_PAGES, BATCH, PAGES_PER_SEQ,
        NUM_HEADS, HEAD_DIM, PAGE_SIZE, BY_SLOT, BY_REQUEST, K_SCALED, V_SCALED, True,
        LARGEST, BLOCK,
    )  # fmt: skip


def plan(problem: AppendProblem, inputs: AppendInputs) -> Launch:
    """The launch on whole arrays, which makes `new_key_cache` and `new_value_cache` of the caches'
    memory. Scales are arrays, or None for 1."""
    by_slot, by_request = inputs.slots is not None, inputs.request_ids is not None
    places = "slots" if by_slot else "positions"
    batch, pages_per_seq = (0, 0) if by_slot else inputs.page_table.shape
    optional = ("request_ids", "page_table", "k_scale", "v_scale")
    caches = {name: getattr(inputs, name) for name in CACHES}
    return Launch(
        kernel=f"{__name__}:append_whole",
        grid=(inputs.key.shape[0],),
        inputs=(
            "key",
            "value",
            f"places={places}",
            # The kernel gets any array for one that it does not read.
            *(n if getattr(inputs, n) is not None else f"{n}={places}" for n in optional),
            *CACHES,
        ),
        outputs=tuple((f"new_{n}", tuple(x.shape), dtype_name(x)) for n, x in caches.items()),
        constants=(
            ("NUM_PAGES", inputs.key_cache.shape[0]),
            ("BATCH", batch if by_request else 0),
            ("PAGES_PER_SEQ", pages_per_seq),
            ("HEADS_FIRST", problem.kv_layout == "HND"),
            ("K_SCALED", inputs.k_scale is not None),
            ("V_SCALED", inputs.v_scale is not None),
            *_constants(problem, inputs).items(),
        ),
        aliases=tuple((name, f"new_{name}") for name in CACHES),
    )


def _constants(problem: AppendProblem, inputs: AppendInputs) -> dict[str, Any]:
    """Of both kernels."""
    _, num_heads, head_dim = inputs.key.shape
    return dict(
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=problem.page_size,
        BY_SLOT=inputs.slots is not None,
        BY_REQUEST=inputs.request_ids is not None,
        LARGEST=LARGEST.get(dtype_name(inputs.key_cache), 0.0),
        BLOCK=min(1024, triton.next_power_of_2(num_heads * head_dim)),
    )


def run(problem: AppendProblem, inputs: AppendInputs) -> None:
    """Writes the rows on torch's current stream; a place that does not exist is skipped."""
    key, value, key_cache, value_cache = inputs[:4]
    if not key.numel():
        return
    heads_first = problem.kv_layout == "HND"
    caches = [x.transpose(1, 2) if heads_first else x for x in (key_cache, value_cache)]
    by_slot, by_request = inputs.slots is not None, inputs.request_ids is not None
    places = inputs.slots if by_slot else inputs.positions
    k_scale, v_scale = inputs.k_scale, inputs.v_scale
    scaled = [not (isinstance(scale, float) and scale == 1.0) for scale in (k_scale, v_scale)]
    arrays = any(isinstance(scale, torch.Tensor) for scale in (k_scale, v_scale))
    if arrays:
        k_scale, v_scale = (_array(scale, key.device) for scale in (k_scale, v_scale))
    table = places.new_empty(0, 0) if by_slot else inputs.page_table
    arguments = (
        key, value,
        places.contiguous(),
        inputs.request_ids.contiguous() if by_request else places,
        table.contiguous(),
        k_scale, v_scale,
        key_cache, value_cache,
        *key.stride(), *value.stride(), *caches[0].stride(), *caches[1].stride(),
        key_cache.shape[0], *table.shape,
    )  # fmt: skip
    # Triton launches on the current device, an operator of torch on that of its tensors.
    with torch.cuda.device(key.device if key.is_cuda else -1):
        append[key.shape[:1]](
            *arguments,
            K_SCALED=scaled[0],
            V_SCALED=scaled[1],
            ARRAYS=arrays,
            **_constants(problem, inputs),
            num_warps=4,
        )


def _array(scale: Any, device: torch.device) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        return scale.to(device)
    return torch.full((), scale, dtype=torch.float32, device=device)
