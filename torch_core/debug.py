"""JAXATTN_DEBUG=1, set before the process starts: lengths, offsets and page ids are checked before
each launch on a GPU, as a CPU checks them always. Every call then waits for the device. A page id
that QSA finds outside the cache is no error: it is a page that is not mapped."""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

ENABLED = os.environ.get("JAXATTN_DEBUG", "") not in ("", "0")

logger = logging.getLogger("torch_core")


def check(checks: Callable[[], Any]) -> None:
    """Runs `checks`, which reads device memory. While a CUDA graph is captured nothing can be read,
    and a replay runs no checks."""
    if not ENABLED:
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        _tell()
    else:
        checks()


@functools.cache
def _tell() -> None:
    logger.warning("JAXATTN_DEBUG=1 checks nothing in calls that a CUDA graph captures")
