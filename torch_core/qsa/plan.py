"""Kernel launches as data, which torch and JAX both launch from. Imports no framework."""

from dataclasses import dataclass, field
from typing import Any

from .problem import METADATA, CompressProblem, QSAProblem, power_of_two


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel launch. The kernel's parameters are the inputs, then the outputs, each named
    `<name>_ptr`, then the constants; all are passed by keyword. An input "parameter=array" is
    passed under another name than its own.

    An output that `aliases` names is not allocated: it is the input's own memory, updated in place,
    and is passed under both names."""

    kernel: str  # "file:function" in torch_core.qsa.kernels, or "package.module:function"
    grid: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, tuple[int, ...], str], ...]  # name, shape, dtype
    constants: tuple[tuple[str, Any], ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    # May start while the launch before it ends, for which its kernel waits. Until then neither may
    # write what the other uses: both belong into one call of XLA. Both kernels have a constant
    # OVERLAPS, False here: torch's launcher sets it where the GPU can, jax-triton cannot.
    overlaps: bool = False
    aliases: tuple[tuple[str, str], ...] = field(default=())  # input, output


Chain = tuple[Launch, ...]

OVERLAPS = ("OVERLAPS", False)  # as Launch.overlaps says


def plan_metadata(problem: QSAProblem) -> Chain:
    """From page_table, seq_lens and cu_seqlens_q to the four arrays of the metadata.

    Two launches, since no program of the second knows the number of rows: only a grid may depend on
    it. Programs share a request's rows where there is prefill."""
    blanks = tuple(f"blank_{name}" for name in METADATA)
    shape = (problem.num_rows,)
    clear = Launch(
        kernel="metadata:clear",
        grid=(problem.num_rows,),
        inputs=(),
        outputs=tuple((name, shape, "int32") for name in blanks),
        num_warps=1,
    )
    build = Launch(
        kernel="metadata:build",
        grid=(problem.num_requests, 8 if problem.num_prefill_rows else 1),
        inputs=("page_table", "seq_lens", "cu_seqlens_q", *blanks),
        outputs=tuple((name, shape, "int32") for name in METADATA),
        constants=(
            ("COMPRESS_RATIO", problem.compress_ratio),
            ("PAGE_SIZE", problem.page_size),
            ("PAGES_PER_SEQ", problem.pages_per_seq),
            ("NUM_PAGES", problem.num_pages),
            ("BLOCK_ROWS", 128),
        ),
        num_warps=1,
        aliases=tuple(zip(blanks, METADATA, strict=True)),
    )
    return (clear, build)


def plan_compress(problem: CompressProblem) -> Chain:
    """Writes compressed_cache and ring in place."""
    inputs = (
        "index_key", "ring", "compressed_cache", "request_ids", "positions", "slots", "seq_lens",
        "weight", "cos", "sin", "ring_ids" if problem.ring_ids else "ring_ids=seq_lens",
        "rotary_positions" if problem.rotary_positions else "rotary_positions=positions",
    )  # fmt: skip
    return (
        Launch(
            kernel="compress:compress",
            grid=(problem.num_rows,),
            inputs=inputs,
            outputs=(
                ("new_ring", problem.ring_shape, problem.key_dtype),
                ("new_compressed_cache", problem.cache_shape, problem.index_dtype),
            ),
            constants=(
                ("INDEX_DIM", problem.index_dim),
                ("ROTARY_DIM", problem.rotary_dim),
                ("BLOCK_DIM", power_of_two(problem.index_dim)),
                ("COMPRESS_RATIO", problem.compress_ratio),
                ("RING_ROWS", problem.ring_rows),
                ("BLOCK_RING", power_of_two(problem.ring_rows)),
                # Without ids each request has one, however many there are.
                ("NUM_RINGS", problem.ring_shape[0] if problem.ring_ids else 0),
                ("NUM_GROUPS", problem.cache_shape[0] * problem.cache_shape[1]),
                ("MAX_POSITIONS", problem.max_positions),
                ("EPS", problem.eps),
                ("RING_IDS", problem.ring_ids),
                ("ROTARY_POSITIONS", problem.rotary_positions),
            ),
            num_warps=1,
            num_stages=1,
            aliases=(("ring", "new_ring"), ("compressed_cache", "new_compressed_cache")),
        ),
    )
