"""`python -m torch_core.warmup`: builds the kernels of a server before it starts, or lists them."""

import argparse
import functools
import os
import re
import sys
from typing import Any

import torch

from .. import checks, dispatch
from ..dispatch import Spec
from ..qsa import launch, ring_rows
from ..qsa.api import WORKSPACE_BYTES
from ..qsa.warmup import reachable
from . import PHASES, Task, append_task, run, tasks

ARCHITECTURES = "FLASHINFER_CUDA_ARCH_LIST"
EPILOG = f"""\
Example: --num-qo-heads 64 --num-kv-heads 8 --head-dim 128 --page-size 64 --window-left -1 4095

Run it as the user of the server and with its environment (FLASHINFER_WORKSPACE_BASE,
TRITON_CACHE_DIR). Without a GPU, FlashInfer's modules are built for {ARCHITECTURES}="9.0a"
or the like; Triton's kernels need the GPU itself. JAX compiles a jitted function for each new
shape: compile those ahead with jitted.lower(...).compile(); jaxattn.warmup does the rest."""


QSA_SIZES = ("index_heads", "budget", "pages_per_seq", "max_requests", "max_rows")
QSA = (*QSA_SIZES, "index_dim", "num_pages", "max_positions", "rotary_dim")
SIZES = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")
SINGLE = (*SIZES, "query_dtype", "kv_dtype")
FLAGS = ("sinks", "draft_mask", "return_lse", "batch_invariant")


def parser() -> argparse.ArgumentParser:
    """The options: an argument of `torch_core.warmup` each, and those of `qsa.warmup`."""
    made = argparse.ArgumentParser(
        prog="python -m torch_core.warmup",
        usage="%(prog)s --num-qo-heads N --num-kv-heads N --head-dim N --page-size N [options]",
        description="Builds the kernels of calls within these limits, so that serving builds none.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--list", action="store_true", help="say what is built and what would be")
    made.add_argument("--jobs", type=int, metavar="N", help="modules at a time; 1 for each 8 cores")
    calls = made.add_argument_group("calls (several values: all combinations)")
    several = functools.partial(calls.add_argument, nargs="+")
    several("--phase", choices=PHASES, default=list(PHASES))
    for name in SIZES:
        several(_option(name), type=int, metavar="N", help="required")
    several("--query-dtype", default=["bfloat16"], metavar="DTYPE")
    several("--kv-dtype", metavar="DTYPE", help="default: the query's")
    several("--kv-layout", choices=checks.KV_LAYOUTS, default=["NHD"])
    several("--q-len", type=int, default=[1], metavar="N", help="rows of a request in decode")
    several("--window-left", type=int, default=[-1], metavar="N")
    several("--soft-cap", type=float, metavar="X")
    several("--backend", default=["auto"], metavar="NAME")
    for name in FLAGS:
        calls.add_argument(_option(name), action="store_true")
    qsa = made.add_argument_group("QSA (as in torch_core.qsa.warmup, with one value of the above)")
    qsa.add_argument("--qsa", action="store_true", help="QSA in place of decode and prefill")
    for name in QSA:
        qsa.add_argument(_option(name), type=int, metavar="N", help="required with --qsa")
    for name, value in (
        ("compress_ratio", 4),
        ("max_draft", 0),
        ("workspace_bytes", WORKSPACE_BYTES),
    ):
        qsa.add_argument(_option(name), type=int, default=value, metavar="N")
    qsa.add_argument("--index-dtype", metavar="DTYPE", help="default: the query's")
    qsa.add_argument("--rotary-dtype", default="float32", metavar="DTYPE")
    qsa.add_argument("--eps", type=float, default=1e-6, metavar="X")
    return made


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def attention_tasks(options: argparse.Namespace, capability: int, load: bool) -> list[Task]:
    """The tasks of decode, prefill and append_kv."""
    names = (*SINGLE, "kv_layout", "q_len", "window_left", "soft_cap", "backend")
    limits = {name: getattr(options, name) for name in (*names, *FLAGS)}
    environment = dispatch.environment(capability)
    gpus = (torch.cuda.current_device(),) if load else None
    return tasks(environment, options.phase, limits, gpus, append=load)


def qsa_tasks(options: argparse.Namespace, load: bool) -> list[Task]:
    """A task for each of QSA's kernels, and append_kv."""
    several = [_option(name) for name in SINGLE if len(getattr(options, name) or ()) > 1]
    if several:
        raise ValueError(f"{', '.join(several)} must have one value with --qsa")
    one: dict[str, Any] = {name: (getattr(options, name) or [None])[0] for name in SINGLE}
    dtype, ratio, pages = one["query_dtype"], options.compress_ratio, options.num_pages
    checks.integer("compress_ratio", ratio, 1)
    checks.integer("max_draft", options.max_draft, 0)
    tokens, index_dim = one["page_size"], options.index_dim
    wanted = reachable(
        Spec((pages, tokens, one["num_kv_heads"], one["head_dim"]), one["kv_dtype"] or dtype),
        Spec((pages, tokens // ratio, 1, index_dim), options.index_dtype or dtype),
        Spec((options.max_requests, ring_rows(ratio, options.max_draft), index_dim), dtype),
        Spec((index_dim,), dtype),
        Spec((options.max_positions, options.rotary_dim // 2), options.rotary_dtype),
        num_qo_heads=one["num_qo_heads"],
        max_draft=options.max_draft,
        eps=options.eps,
        workspace_bytes=options.workspace_bytes,
        **{name: getattr(options, name) for name in QSA_SIZES},
    )
    kernels: dict[str, list[launch.Specialization]] = {}
    for each in sorted(wanted, key=repr):
        kernels.setdefault(each.kernel, []).append(each)
    found = [
        Task("qsa", f"QSA {name} (Triton, {len(variants)} variants)",
             lambda variants=variants: list(map(launch.compile_ahead, variants)))
        for name, variants in kernels.items()
    ]  # fmt: skip
    return [*found, append_task(dispatch.describe_call("decode", **one))] if load else found


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    command = parser()
    options = command.parse_args(arguments)
    # argparse cannot know what --qsa needs, and would name its own first.
    required = SIZES + QSA if options.qsa else SIZES
    missing = [_option(name) for name in required if getattr(options, name) is None]
    if missing:
        command.error(f"required{' with --qsa' * options.qsa}: {', '.join(missing)}")
    capability = dispatch.device_capability()
    here = capability or options.qsa or (options.list and not os.environ.get(ARCHITECTURES))
    try:
        for target in [capability] if here else build_targets():
            if options.qsa:
                found = qsa_tasks(options, bool(capability))
            else:
                found = attention_tasks(options, target, bool(capability))
            if options.list:
                print(listing(found, target))
            elif options.qsa and not capability:
                raise RuntimeError("no GPU here: QSA's Triton kernels need the GPU itself")
            else:
                # Triton compiles in this process, one kernel after another.
                run(found, jobs=1 if options.qsa else options.jobs, progress=True)
    except (ValueError, TypeError) as error:
        command.error(str(error))
    except (ImportError, NotImplementedError, RuntimeError) as error:
        print(f"torch_core.warmup: {error}", file=sys.stderr)
        return 1
    return 0


def build_targets() -> list[int]:
    """Capabilities to build for without a GPU."""
    listed = os.environ.get(ARCHITECTURES, "").split()
    if not listed:
        raise RuntimeError(
            f"no GPU here: set {ARCHITECTURES} (for example 9.0a) to build FlashInfer's modules "
            "for another machine with nvcc; Triton's kernels need the GPU itself"
        )
    found = [re.fullmatch(r"(\d+)\.(\d)[a-z]?", name) for name in listed]
    if None in found:
        raise ValueError(f"{ARCHITECTURES} must be like '9.0a' or '8.0 9.0a', got {listed}")
    return [int(match[1] + match[2]) for match in found if match]


def listing(found: list[Task], capability: int) -> str:
    """The tasks as a table, for people."""
    # Triton does not say what its cache holds.
    states = {True: "built", None: "compiled in seconds, unless Triton's cache has it"}
    lines = [f"for capability {capability or 'none (no GPU here)'}:"]
    width = max((len(task.label) for task in found), default=0)
    for task in found:
        state = states.get(task.built, f"to build: about {task.seconds} s on 16 cores")
        lines.append(f"  {task.kernel:<20}{task.label:<{width}}  {state}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
