"""What FlashInfer's native decode and prefill share: page lists for the plan, wrappers, results."""

import math
import threading
from typing import Any

import torch

from ..problem import AttentionInputs, AttentionProblem

FLOAT_WORKSPACE_BYTES = 256 * 2**20

_local = threading.local()


def wrapper(make: Any, device: torch.device, *key: Any) -> Any:
    """A wrapper object with its workspaces, one for each thread, device and kind.

    Reused with a new plan for each call: a call first reads its lengths, which waits for what the
    stream still had to do with the plan before.
    """
    wrappers = _local.__dict__.setdefault("wrappers", {})
    if (device, *key) not in wrappers:
        workspace = torch.empty(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrappers[device, *key] = make(workspace)
    return wrappers[device, *key]


def page_lists(
    problem: AttentionProblem, inputs: AttentionInputs, lengths: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Upstream's indptr (host), page indices (device) and last_page_len (host).

    A request without keys gets one key of page 0, since upstream wants at least one; its rows are
    overwritten by `finish`.
    """
    page_size, device = problem.page_size, inputs.query.device
    lengths = [max(length, 1) for length in lengths]
    counts = torch.tensor([-(-length // page_size) for length in lengths], dtype=torch.int32)
    indptr = torch.zeros(problem.batch + 1, dtype=torch.int32)
    indptr[1:] = counts.cumsum(0)
    column = torch.arange(problem.pages_per_seq, device=device)
    used = column < counts.to(device)[:, None]
    table = inputs.page_table.masked_fill(inputs.seq_lens[:, None] == 0, 0)
    last = torch.tensor([(length - 1) % page_size + 1 for length in lengths], dtype=torch.int32)
    return indptr, table[used].contiguous(), last


def finish(out: torch.Tensor, lse: torch.Tensor | None, empty_rows: list[int]) -> None:
    """Converts the base of lse and fills the rows that see no key."""
    if lse is not None:
        lse.mul_(math.log(2))
    if empty_rows:
        index = torch.tensor(empty_rows, device=out.device)
        out[index] = 0
        if lse is not None:
            lse[index] = -torch.inf


def scales(problem: AttentionProblem, inputs: AttentionInputs) -> tuple[float, float]:
    """The factors of the scores and of the output, as host numbers."""
    score_scale = float(inputs.sm_scale) * float(inputs.k_scale)
    if problem.query_dtype == "float8_e4m3fn":
        score_scale *= float(inputs.q_scale)
    return score_scale, float(inputs.v_scale)
