"""Building kernels ahead of their first use."""

from typing import Any

from . import dispatch


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
    backend = arguments.pop("backend", "auto")
    problem = dispatch.describe_call(phase, **arguments)
    environment = dispatch.environment(dispatch.device_capability())
    kernel = dispatch.choose(problem, environment, backend)
    module = dispatch.load(kernel)
    if hasattr(module, "bind"):
        module.bind(problem, dispatch.sm_count(), kernel.name, None)
    return kernel.name
