"""Building kernels ahead of their first use."""

from collections.abc import Iterable
from typing import Any

import torch

from . import dispatch
from .build import on_device


def warmup(phase: str, **arguments: Any) -> str:
    """Builds and loads the kernel of a call ahead, so that its first use compiles nothing.

    A kernel serves every batch size and length. It is built once for each dtype pair, head_dim,
    and whether there is a window or a soft cap; XQA also for each page_size, group_size and q_len.

    Args:
        phase: "decode" or "prefill".

    Takes the arguments of `explain` but capability: the kernel is built for this machine's GPU.

    Returns:
        str: the kernel's name. On a CPU there is nothing to build.

    Raises:
        ValueError, TypeError: an argument that no call accepts.
        NotImplementedError: no kernel runs such a call.
        RuntimeError: the build failed; the message says why.
    """
    environment = dispatch.environment(dispatch.device_capability())
    gpus = (torch.cuda.current_device(),) if environment.capability else ()
    return build(environment, dispatch.sm_count(), gpus, phase, **arguments)


def build(
    environment: dispatch.Environment,
    sm_count: int,
    gpus: Iterable[int],
    phase: str,
    *,
    backend: str = "auto",
    **arguments: Any,
) -> str:
    """The same for a device that is described."""
    problem = dispatch.describe_call(phase, **arguments)
    kernel = dispatch.choose(problem, environment, backend)
    module = dispatch.load(kernel)
    if hasattr(module, "bind"):
        function = module.bind(problem, sm_count, kernel.name, False).function
        for gpu in gpus:
            on_device(function, gpu)
    return kernel.name
