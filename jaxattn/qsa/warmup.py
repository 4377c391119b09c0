"""Compiles ahead what a server's limits can reach."""

import functools
from typing import Any

from torch_core.qsa.api import WORKSPACE_BYTES
from torch_core.qsa.warmup import reachable

from .. import _device, _triton
from . import _run


def warmup(
    key_cache: Any,
    compressed_cache: Any,
    ring: Any,
    weight: Any,
    cos: Any,
    *,
    num_qo_heads: int,
    index_heads: int,
    budget: int,
    pages_per_seq: int,
    max_requests: int,
    max_rows: int,
    max_draft: int = 0,
    eps: float = 1e-6,
    workspace_bytes: int = WORKSPACE_BYTES,
    via: str = "auto",
) -> int:
    """Compiles every kernel that steps within these limits can reach, without launching one.

    For "dlpack" the kernels are then loaded and nothing is left to do. For "triton" they are
    compiled to PTX and kept for this process: what remains when XLA compiles a program is its own
    part, and the first run turns PTX into machine code. Either way JAX still traces and compiles a
    jitted function for each new shape.

    Args:
        key_cache, compressed_cache, ring, weight, cos: arrays as the calls will get them, or
            jax.ShapeDtypeStruct: only shapes and dtypes count. Queries have the ring's dtype, gates
            too.
        num_qo_heads, index_heads: of the queries.
        budget, eps, workspace_bytes: as the calls will get them.
        pages_per_seq: columns of the page table.
        max_requests, max_rows: of one step.
        max_draft: drafts of a decoding request: it has 1 to 1 + max_draft rows. Steps of decoding
            requests alone may attend to selections wider by up to max_draft / compress_ratio
            groups, rounded up: those of `jaxattn.speculative.reuse_selection`.
        via: as the calls will get it.

    Returns:
        How many kernels were compiled: 0 on a CPU, and when called again.

    Raises:
        ValueError, TypeError: an argument of wrong shape, value or dtype.
        NotImplementedError: no kernel for these sizes or dtypes.
    """
    wanted = reachable(
        key_cache,
        compressed_cache,
        ring,
        weight,
        cos,
        num_qo_heads=num_qo_heads,
        index_heads=index_heads,
        budget=budget,
        pages_per_seq=pages_per_seq,
        max_requests=max_requests,
        max_rows=max_rows,
        max_draft=max_draft,
        eps=eps,
        workspace_bytes=workspace_bytes,
    )
    way = _run.way(via)
    if way == "reference":
        return 0
    if way == "dlpack":
        compiled, compile_one = _run.load_kernel, _run.load_kernel
    else:
        capability = _device.environment().capability
        compiled = _triton.compiled
        compile_one = functools.partial(_triton.compiled, grid=(1,), capability=capability)
    before = compiled.cache_info().misses
    for each in sorted(wanted, key=repr):
        compile_one(each)
    return compiled.cache_info().misses - before
