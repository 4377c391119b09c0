"""Building kernels ahead of their first use; `python -m torch_core.warmup` from a shell."""

import functools
import inspect
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .. import build, checks, dispatch, kv_cache
from ..problem import AttentionProblem

PHASES = ("decode", "prefill")
BOUND = ("phase", "capability")  # of `explain`: not limits


class Task(NamedTuple):
    """One thing that calls would compile at their first use."""

    kernel: str
    label: str
    run: Callable[[], Any]
    built: bool | None = None  # on disk already; None: not known before
    seconds: int = 1  # about, on 16 cores


def warmup(
    phase: str | Sequence[str] = PHASES,
    *,
    jobs: int | None = None,
    progress: bool = False,
    **limits: Any,
) -> tuple[str, ...]:
    """Builds and loads the kernels of all calls within limits, so that serving compiles nothing.

    A kernel serves every batch size and length. It is built once for each dtype pair, head_dim,
    and whether there is a window or a soft cap; XQA also for each page_size, group_size and q_len.
    torch's append_kv is compiled too. JAX itself still compiles a jitted function for new shapes.

    Args:
        phase: "decode", "prefill" or both, the default.
        jobs: modules to build at a time; default: one for each 8 cores. nvcc takes up to 4 GiB a
            core; the environment variable MAX_JOBS bounds the cores of one module.
        progress: says on stderr what is built.

    Takes the arguments of `explain` but capability: kernels are built for this machine's GPU. Each
    may be a list of the values that calls will have: `q_len=[1, 4], window_left=[-1, 1023]`.

    Returns:
        Names of what the calls use, each once: kernels, "append_kv" (torch), "adapter" (JAX). On a
        CPU that is "reference", and nothing is built.

    Raises:
        ValueError, TypeError: an argument that no call accepts, or a list without a value.
        NotImplementedError: no kernel runs such a call.
        RuntimeError: a build failed; the message says why.
    """
    environment = dispatch.environment(dispatch.device_capability())
    gpus = (torch.cuda.current_device(),) if environment.capability else ()
    return run(tasks(environment, phase, limits, gpus), jobs=jobs, progress=progress)


def calls(phase: str | Sequence[str], limits: dict[str, Any]) -> Iterator[tuple[str, dict]]:
    """Phase and arguments of `describe_call` for every combination."""
    parameters = inspect.signature(dispatch.explain).parameters.values()
    named = {p.name: p.default is p.empty for p in parameters if p.name not in BOUND}
    if unknown := limits.keys() - named:
        raise TypeError(f"warmup has no argument {min(unknown)}; it takes {', '.join(named)}")
    if missing := [name for name, needed in named.items() if needed and name not in limits]:
        raise TypeError(f"warmup needs {', '.join(missing)}")
    asked: dict[str, Any] = dict(phase=phase, **limits)
    values = {n: v if isinstance(v, list | tuple) else (v,) for n, v in asked.items()}
    for name, several in values.items():
        if not several:
            raise ValueError(f"{name} must have a value or more, got none")
    for each, *chosen in itertools.product(*values.values()):
        yield each, dict(zip(limits, chosen, strict=True))


def tasks(
    environment: dispatch.Environment,
    phase: str | Sequence[str],
    limits: dict[str, Any],
    gpus: Sequence[int] | None,
    *,
    append: bool = True,
) -> list[Task]:
    """What calls within the limits compile. `gpus`: where modules are loaded; None: they are only
    built, which needs no GPU. `append`: torch's append_kv too."""
    found: dict[Any, Task] = {}
    for each, arguments in calls(phase, limits):
        backend = arguments.pop("backend", "auto")
        problem = dispatch.describe_call(each, **arguments)
        kernel = dispatch.choose(problem, environment, backend)
        module = dispatch.load(kernel)
        if not hasattr(module, "source"):
            found.setdefault(kernel.name, Task(kernel.name, "nothing to build", _nothing, True))
        elif (key := module.key(problem, kernel.name)) not in found:
            spec, label, seconds = source = module.source(*key)
            work = functools.partial(build.make, *source)
            if gpus is not None:
                work = functools.partial(_load, module, key, gpus)
            found[key] = Task(kernel.name, label, work, spec.is_compiled, seconds)
        if append and environment.capability and problem.kv_dtype != dispatch.NVFP4:
            task = append_task(problem)
            found.setdefault(task.label, task)
    return list(found.values())


def _nothing() -> None:
    pass


def _load(module: Any, key: tuple, gpus: Sequence[int]) -> None:
    function = module.function(*key)
    for gpu in gpus:
        build.on_device(function, gpu)


def append_task(problem: AttentionProblem) -> Task:
    """The task of append_kv for a call's caches."""
    key_dtype, kv_dtype = problem.out_dtype, problem.kv_dtype
    sizes = (problem.page_size, problem.num_kv_heads, problem.head_dim)
    label = f"append_kv (Triton, {key_dtype} to {kv_dtype}, {problem.kv_layout}, {sizes})"
    device = torch.device("cuda", torch.cuda.current_device())
    return Task("append_kv", label, functools.partial(_append, problem, device))


def _append(problem: AttentionProblem, device: torch.device) -> None:
    """Compiles append_kv's kernels by launches that write nothing: every place is negative."""
    tokens = (problem.page_size, problem.num_kv_heads)
    tokens = tokens if problem.kv_layout == "NHD" else tokens[::-1]
    dtype = getattr(torch, problem.kv_dtype)
    caches = [torch.empty(1, *tokens, problem.head_dim, dtype=dtype, device=device) for _ in "kv"]
    rows = torch.empty(
        1, problem.num_kv_heads, problem.head_dim, dtype=getattr(torch, problem.out_dtype),
        device=device,
    )  # fmt: skip
    nowhere = torch.full((1,), -1, dtype=torch.int32, device=device)
    one, table = torch.ones((), device=device), nowhere.view(1, 1)
    by_position: dict[str, Any] = dict(page_table=table, positions=nowhere)
    places = [
        dict(slots=nowhere), by_position, by_position | dict(request_ids=torch.zeros_like(nowhere))
    ]  # fmt: skip
    scales: list[dict[str, Any]] = [{}]
    if problem.kv_dtype in checks.FP8:
        scales += [dict(k_scale=0.5, v_scale=0.5), dict(k_scale=one, v_scale=one)]
    for place, scale in itertools.product(places, scales):
        kv_cache.append_kv(
            rows, rows, caches[0], caches[1], **place, **scale, kv_layout=problem.kv_layout
        )


def run(wanted: list[Task], *, jobs: int | None = None, progress: bool = False) -> tuple[str, ...]:
    """Runs the tasks, the slowest first; the first failure is raised when those that run are done.

    FlashInfer's modules are built by nvcc in processes of their own, so threads are enough."""
    if jobs is None:
        jobs = max(1, (os.cpu_count() or 1) // 8)
    jobs = checks.integer("jobs", jobs, 1)
    order = sorted(wanted, key=lambda task: (bool(task.built), -task.seconds))
    with _report(len(order), progress) as done, ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(_timed, task, done) for task in order]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return tuple(dict.fromkeys(task.kernel for task in wanted))


def _timed(task: Task, done: Callable[[str], None]) -> None:
    started = time.perf_counter()
    task.run()
    done(f"{task.label}: {time.perf_counter() - started:.1f} s")


@contextmanager
def _report(total: int, progress: bool) -> Iterator[Callable[[str], None]]:
    """What is called with a line when a task is done: a bar where tqdm, which FlashInfer brings,
    is installed; lines elsewhere."""
    if not progress:
        yield lambda line: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        count = itertools.count(1)
        yield lambda line: print(f"[{next(count)}/{total}] {line}", file=sys.stderr, flush=True)
        return
    with tqdm(total=total, desc="kernels") as bar:

        def done(line: str) -> None:
            bar.write(line, file=sys.stderr)
            bar.update()

        yield done
