"""`python -m jaxattn.doctor`: what is installed, what works and why not, and a short self-test.

Its output goes into an issue report as it is. Exit status 1 where the self-test fails.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jaxattn
import torch_core
from torch_core import debug, dispatch
from torch_core.warmup import PHASES, tasks

from . import _device, _triton

SECONDS = 10.0  # no step of the self-test starts later
HANGS = 30.0  # and none may take longer
MOST = 30  # built modules that are listed
OPTIONAL = ("flashinfer-cubin", "flashinfer-jit-cache", "jax-cuda13-plugin")
PROGRAMS = ("nvcc", "ninja", "c++")
# What decides how JAX and torch share a GPU's memory, with what JAX does where it is not set.
MEMORY = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
    "XLA_CLIENT_MEM_FRACTION": "0.75",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "",  # its older name
    "XLA_PYTHON_CLIENT_ALLOCATOR": "default",
    "PYTORCH_ALLOC_CONF": "",
    "PYTORCH_CUDA_ALLOC_CONF": "",
}
# The self-test's calls; XQA's module is that of 64 query heads over 8, too.
GEOMETRY: dict[str, Any] = dict(num_qo_heads=8, num_kv_heads=1, head_dim=128, page_size=64)

SIZES = ", ".join(f"{name} {value}" for name, value in GEOMETRY.items())
HOW_TO_BUILD = "python -m torch_core.warmup " + " ".join(
    f"--{name.replace('_', '-')} {value}" for name, value in GEOMETRY.items()
)


def versions() -> Iterator[str]:
    """Installed versions; what lies outside the range of pyproject.toml says so."""
    yield f"python: {platform.python_version()} on {platform.platform()}"
    wanted = requirements()
    if not wanted:
        yield "jaxattn: not installed as a package, so supported versions are not known"
    for name in ("jaxattn", *wanted, *OPTIONAL):
        version, specifiers = dispatch.version(name), wanted.get(name, [])
        if not version:
            needed = "" if name in OPTIONAL else " (pip install 'jaxattn[cuda]')"
            yield f"{name}: not installed{needed}"
        elif all(holds(version, each) for each in specifiers):
            yield f"{name}: {version}"
        else:
            yield f"{name}: {version}, OUTSIDE the supported range {','.join(specifiers)}"
    yield f"CUDA of torch: {torch.version.cuda or 'none'}"
    for program in PROGRAMS:
        yield f"{program}: {shutil.which(program) or 'not found'}"


def requirements() -> dict[str, list[str]]:
    """Distribution -> specifiers (">=2"), of jaxattn and of its extra `cuda`."""
    found: dict[str, list[str]] = {}
    try:
        lines = importlib.metadata.requires("jaxattn") or []
    except importlib.metadata.PackageNotFoundError:
        return found
    for line in lines:
        requirement, _, marker = line.partition(";")
        match = re.match(r"([\w.-]+)(?:\[.*?\])?\s*(.*)", requirement.strip())
        if match and ("extra" not in marker or "'cuda'" in marker):
            found.setdefault(match[1], [each.strip() for each in match[2].split(",") if each])
    return found


def holds(version: str, specifier: str) -> bool:
    """Whether a version meets one specifier; of releases, not of pre-releases."""
    match = re.match(r"(>=|<=|==|!=|<|>)\s*(.*)", specifier)
    if not match:
        return True
    pair = [[int(n) for n in re.findall(r"\d+", v.partition("+")[0])] for v in (version, match[2])]
    width = max(map(len, pair))
    have, limit = (numbers + [0] * (width - len(numbers)) for numbers in pair)
    return {
        ">=": have >= limit, "<=": have <= limit, "==": have == limit, "!=": have != limit,
        "<": have < limit, ">": have > limit,
    }[match[1]]  # fmt: skip


def devices() -> Iterator[str]:
    """What JAX and torch see."""
    for device in jax.local_devices():
        kind = f"JAX: {device.platform} {device.id} ({device.device_kind})"
        if device.platform == "gpu":
            kind += f", capability {device.compute_capability}, {device.core_count} multiprocessors"
        yield kind
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = (amount / 2**30 for amount in torch.cuda.mem_get_info(index))
        yield (
            f"torch: GPU {index} ({properties.name}), capability {properties.major}."
            f"{properties.minor}, {free:.1f} of {total:.1f} GiB free"
        )
    jax_gpu, torch_gpu = bool(_device.environment().capability), torch.cuda.is_available()
    if not torch_gpu:
        yield "torch: no GPU"
    if jax_gpu != torch_gpu:
        lacking = "JAX" if torch_gpu else "torch"
        yield f"WRONG: only {lacking} sees no GPU (a CPU build of it, or JAX_PLATFORMS?)"


def kernels() -> Iterator[str]:
    """Each row of the table: available on JAX's device, or why not. Asked with a call that it would
    take, so what is said is about this machine."""
    environment = _device.environment()
    for kernel in dispatch.TABLE:
        pair = min(kernel.dtypes, key=lambda pair: (pair[0] != "bfloat16", pair))
        problem = dispatch.describe_call(
            kernel.phase, **GEOMETRY, query_dtype=pair[0], kv_dtype=pair[1]
        )
        reason = dispatch.refusal(kernel, problem, environment)
        yield f"{kernel.phase} {kernel.name}: {reason or 'available'}"
    if capability := environment.capability:
        yield f"qsa via='triton': {_triton.failure(capability) or 'available'}"
        triton = importlib.util.find_spec("triton")
        yield f"qsa via='dlpack': {'available' if triton else 'needs triton'}"
    else:
        yield "qsa: reference (no GPU)"
    for phase in PHASES:
        (task,) = tasks(environment, phase, GEOMETRY, _device.gpus(), append=False)
        state = "built" if task.built else f"not built: {HOW_TO_BUILD}"
        yield f"{phase} of {SIZES}: {task.kernel}, {state}"


def caches() -> Iterator[str]:
    """Kernels that earlier runs built, and where they are kept."""
    home = Path.home()
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", home)) / ".cache" / "flashinfer"
    modules = sorted(base.glob("*/*/cached_ops/*/*.so"))
    yield f"FlashInfer: {len(modules)} modules in {base}"
    for path in modules[:MOST]:
        version, architecture = path.parts[-5:-3]
        yield f"  {path.stem} ({version}, {architecture})"
    if len(modules) > MOST:
        yield "  ..."
    triton = Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache"))
    yield f"Triton: {sum(1 for _ in triton.glob('*'))} entries in {triton}"
    adapters = Path(os.environ.get("TVM_FFI_CACHE_DIR", home / ".cache" / "tvm-ffi")).expanduser()
    count = sum(1 for _ in adapters.glob("jaxattn_adapter_*/*.so"))
    yield f"adapter: {count or 'not built'} in {adapters}"
    yield f"JAX: jax_compilation_cache_dir={jax.config.jax_compilation_cache_dir}"  # pyright: ignore[reportAttributeAccessIssue]


def memory(settings: dict[str, str | None]) -> Iterator[str]:
    """How JAX and torch share a GPU."""
    for name, value in settings.items():
        default = MEMORY[name]
        unset = f"not set (JAX: {default})" if default else "not set"
        yield f"{name}={value}" if value is not None else f"{name}: {unset}"
    if not _device.environment().capability:
        yield "no GPU: these change nothing here"
        return
    if settings["XLA_PYTHON_CLIENT_PREALLOCATE"] in ("false", "False", "0"):
        yield (
            "JAX and torch take memory as they need it and keep it: bound torch with "
            "torch.cuda.set_per_process_memory_fraction where one leaves too little to the other"
        )
        return
    share = next((settings[name] for name in MEMORY if "FRACTION" in name and settings[name]), 0.75)
    yield (
        f"JAX takes {share} of the GPU at its first use, torch has the rest: jaxattn's kernels "
        "use JAX's. For torch models beside JAX set XLA_CLIENT_MEM_FRACTION to JAX's share, or "
        "XLA_PYTHON_CLIENT_PREALLOCATE=false"
    )


class SelfTest:
    """Small calls of two requests against a float64 einsum; `steps` names them."""

    lengths = (5, 70)

    def steps(self) -> dict[str, Callable[[], str | None]]:
        """Name -> what raises where it fails, or says why it cannot run."""
        return {
            "arrays on JAX's device": self.prepare,
            "append_kv (JAX)": self.append,
            "decode (JAX)": lambda: self.phase("decode", jaxattn),
            "prefill (JAX)": lambda: self.phase("prefill", jaxattn),
            "decode (torch)": lambda: self.phase("decode", torch_core),
            "prefill (torch)": lambda: self.phase("prefill", torch_core),
            "qsa (JAX)": self.qsa,
        }

    def prepare(self) -> None:
        """Draws the calls' arrays."""
        rng = np.random.default_rng(0)
        names = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")
        heads, kv_heads, dim, page = (GEOMETRY[name] for name in names)

        def normal(*shape: int) -> np.ndarray:
            return rng.normal(size=shape).astype(np.float32)

        self.tokens = [(normal(n, kv_heads, dim), normal(n, kv_heads, dim)) for n in self.lengths]
        self.query = normal(2, heads, dim)
        self.table = np.array([[3, 0], [1, 2]], np.int32)
        self.seq_lens = np.array(self.lengths, np.int32)
        self.cache = (4, page, kv_heads, dim)
        flat = [np.concatenate(parts) for parts in zip(*self.tokens, strict=True)]
        self.key, self.value = (jnp.asarray(array, jnp.bfloat16) for array in flat)
        self.positions = np.concatenate([np.arange(n) for n in self.lengths]).astype(np.int32)
        self.request_ids = np.repeat(np.arange(2), self.lengths).astype(np.int32)

    def append(self) -> None:
        """The caches of the other steps, written by append_kv."""
        blank = jnp.full(self.cache, jnp.nan, jnp.bfloat16)
        place = dict(positions=self.positions, request_ids=self.request_ids)
        write = jax.jit(jaxattn.append_kv)
        self.caches = write(self.key, self.value, blank, blank, self.table, **place)
        for cache, rows in zip(self.caches, (self.key, self.value), strict=True):
            pages = self.table[self.request_ids, self.positions // self.cache[1]]
            written = np.asarray(cache)[pages, self.positions % self.cache[1]]
            if not np.array_equal(written, np.asarray(rows)):
                raise AssertionError("the caches do not hold what was written")

    def phase(self, phase: str, package: Any) -> str | None:
        """Decode, or a prefill of the last token of each request: the same answer."""
        environment = _device.environment()
        (task,) = tasks(environment, phase, GEOMETRY, _device.gpus(), append=False)
        if not task.built:
            return f"{task.kernel} is not built: {HOW_TO_BUILD}"
        arrays: list[Any] = [jnp.asarray(self.query, jnp.bfloat16), *self.caches]
        arrays += [jnp.asarray(self.table), jnp.asarray(self.seq_lens)]
        options: dict[str, Any] = {}
        if phase == "prefill":
            arrays.append(jnp.arange(3, dtype=jnp.int32))
            options["max_seqlen_q"] = 1
        if package is torch_core:
            result = getattr(torch_core, phase)(*map(jaxattn.to_torch, arrays), **options)
            self.compare(result.float().cpu().numpy())
        else:
            call = jax.jit(lambda arrays: getattr(jaxattn, phase)(*arrays, **options))
            self.compare(np.asarray(call(arrays)))
        return None

    def qsa(self) -> None:
        """A step whose budget holds every token, so the answer is that of dense attention."""
        qsa, ratio, dim = jaxattn.qsa, 4, 32
        page = self.cache[1]
        sizes = dict(num_rows=2, num_pages=4, page_size=page, compress_ratio=ratio)
        metadata, split = qsa.build_metadata(
            self.table, self.seq_lens, np.arange(3, dtype=np.int32), **sizes
        )
        ones = [jnp.ones(shape, jnp.bfloat16) for shape in ((2, 2, dim), (2, dim), (dim,))]
        ring = jnp.zeros((2, qsa.ring_rows(ratio, 0), dim), jnp.bfloat16)
        groups = jnp.zeros((4, page // ratio, 1, dim), jnp.bfloat16)
        out, _, _ = qsa.attention(
            jnp.asarray(self.query, jnp.bfloat16), ones[0], ones[1], *self.caches, groups, ring,
            self.table, self.seq_lens, metadata, ones[2],
            *qsa.rotary_tables(2 * page, rotary_dim=16, theta=1e4),
            budget=2 * page, compress_ratio=ratio, num_decodes=split.num_decodes,
        )  # fmt: skip
        self.compare(np.asarray(out))

    def compare(self, out: np.ndarray) -> None:
        """Within a few bfloat16 roundings of the einsum."""
        query = np.asarray(jnp.asarray(self.query, jnp.bfloat16), np.float64)
        for row, (key, value) in enumerate(self.tokens):
            rounded = (np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in (key, value))
            key, value = (x.repeat(query.shape[1] // x.shape[1], 1) for x in rounded)
            scores = np.einsum("hd,thd->ht", query[row], key) * query.shape[2] ** -0.5
            weights = np.exp(scores - scores.max(1, keepdims=True))
            exact = np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), value)
            error = np.abs(out[row].astype(np.float64) - exact).max()
            if not error <= 0.02 * np.abs(exact).max():
                largest = np.abs(exact).max()
                raise AssertionError(
                    f"row {row} is off by {error:.3g}, its largest is {largest:.3g}"
                )


def self_test(steps: dict[str, Callable[[], str | None]]) -> Iterator[tuple[str, bool]]:
    """A line for each step, and whether it is a failure. Steps run in a thread, so that a kernel
    that hangs does not hang this. None follows one that hangs, or the first where it fails."""
    deadline = time.monotonic() + SECONDS
    first = next(iter(steps.values()))
    for name, step in steps.items():
        if time.monotonic() > deadline:
            yield f"{name}: not run, {SECONDS:.0f} s are over", False
            continue
        started = time.monotonic()
        results: list[str | BaseException | None] = []

        def work(step: Callable = step, results: list = results) -> None:
            try:
                results.append(step())
            except BaseException as error:
                results.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(HANGS)
        seconds = time.monotonic() - started
        if not results:
            yield f"{name}: FAILED, no result after {seconds:.0f} s", True
            return
        if isinstance(results[0], BaseException):
            message = " ".join(f"{type(results[0]).__name__}: {results[0]}".split())
            yield f"{name}: FAILED, {message[:500]}", True
            if step == first:
                return
        elif results[0] is not None:
            yield f"{name}: not run, {results[0]}", False
        else:
            yield f"{name}: right ({seconds:.1f} s)", False


def section(title: str, lines: Iterable[str]) -> None:
    """Prints lines below a title; what stops them is the last."""
    print(f"\n{title}")
    try:
        for line in lines:
            print(f"  {line}")
    except Exception as error:
        print(f"  could not go on: {type(error).__name__}: {error}")


def main(arguments: list[str] | None = None) -> int:
    """Prints the report; returns the exit status."""
    argparse.ArgumentParser("python -m jaxattn.doctor", description=__doc__).parse_args(arguments)
    settings = {name: os.environ.get(name) for name in MEMORY}
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # a server may run on the same GPU
    print("jaxattn doctor")
    section("versions", versions())
    section("devices", devices())
    section("kernels (on JAX's device)", kernels())
    section("built kernels", caches())
    section("memory", memory(settings))
    section("checks", [f"JAXATTN_DEBUG is {'on' if debug.ENABLED else 'off'}"])
    failed = False
    print("\nself-test")
    for line, failure in self_test(SelfTest().steps()):
        print(f"  {line}", flush=True)
        failed |= failure
    print(f"\n{'FAILED' if failed else 'ok'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    status = main()
    if status:
        os._exit(status)  # a kernel that hangs would keep the process
    sys.exit(0)
