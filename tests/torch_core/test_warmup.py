"""Building ahead: what limits reach, the command, and that serving then compiles nothing."""

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import torch

import jaxattn
import torch_core
from jaxattn import _device, _ffi
from tests import inputs
from tests.inputs import Case
from torch_core import build, dispatch
from torch_core.backends import native, xqa

ROOT = Path(torch_core.__file__).parents[1]
warming, command = (import_module(f"torch_core.warmup{part}") for part in ("", ".__main__"))
GEOMETRY: dict[str, Any] = dict(num_qo_heads=64, num_kv_heads=8, head_dim=128, page_size=64)
ARGUMENTS = [part for name, value in GEOMETRY.items()
             for part in (f"--{name.replace('_', '-')}", str(value))]  # fmt: skip
QSA = [*ARGUMENTS, "--qsa", *(
    "--index-heads 4 --index-dim 128 --budget 2048 --num-pages 99 --pages-per-seq 64 "
    "--max-requests 2 --max-rows 8 --max-positions 4096 --rotary-dim 64").split()]  # fmt: skip


class Spec:
    """A FlashInfer JIT spec that records how it is built."""

    def __init__(self, log, key, built, error=None, meet=None):
        self.log, self.key, self.is_compiled = log, key, key in built
        self.error, self.meet = error, meet

    def build_and_load(self):
        self._do("load")
        return types.SimpleNamespace(xqa_wrapper="xqa", paged_run="native")

    def build(self, need_lock):
        assert need_lock
        self._do("build")

    def _do(self, how):
        if self.meet:
            self.meet.wait(20)
        if self.error:
            raise self.error
        self.log.append((how, self.key))


@pytest.fixture
def gpu(monkeypatch):
    """A described H200 whose builds are recorded."""
    made = types.SimpleNamespace(log=[], built=set(), error=None, meet=None, appends=[])

    def source(*key):
        spec = Spec(made.log, key, made.built, made.error, made.meet)
        return build.Source(spec, f"FlashInfer {key}", 85 if key[0] == "fa3" else 10)

    for module in (xqa, native):
        monkeypatch.setattr(module, "source", source)
        module.function.cache_clear()
    monkeypatch.setattr(dispatch, "device_capability", lambda *_: 90)
    environment = dispatch.Environment(90, flashinfer=True)
    monkeypatch.setattr(dispatch, "environment", lambda _: environment)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(_device, "gpus", lambda: (0,))
    monkeypatch.setattr(warming, "_append", lambda problem, _: made.appends.append(problem))
    yield made
    for module in (xqa, native):
        module.function.cache_clear()


def test_what_limits_reach(gpu):
    """Every combination once, whatever its batch and length; append_kv with them."""
    names = torch_core.warmup(**GEOMETRY, q_len=[1, 4], window_left=[-1, 1023], jobs=1)
    assert names == ("xqa", "append_kv", "native_prefill_fa3")
    bf16 = "bfloat16"
    assert {key for _, key in gpu.log} == {
        *((bf16, bf16, 64, 128, 8, window, q_len) for window in (False, True) for q_len in (1, 4)),
        *(("fa3", bf16, bf16, bf16, 128, window, False) for window in (False, True)),
    }
    assert len(gpu.log) == 6 and len(gpu.appends) == 1
    assert gpu.log[0][1][0] == "fa3"  # the slowest first
    torch_core.warmup(**GEOMETRY)
    assert len(gpu.log) == 6


def test_jax_has_its_adapter_and_not_the_append_of_torch(gpu, monkeypatch):
    monkeypatch.setattr(_device, "environment", lambda: dispatch.environment(90))
    built = []
    monkeypatch.setattr(_ffi, "adapter", lambda: built.append("adapter"))
    assert jaxattn.warmup("decode", **GEOMETRY) == ("xqa", "adapter")
    assert built and not gpu.appends and [how for how, _ in gpu.log] == ["load"]


def test_modules_are_built_side_by_side(gpu):
    """Two builds that wait for each other."""
    gpu.meet = threading.Barrier(2)
    torch_core.warmup("prefill", **GEOMETRY, window_left=[-1, 9], jobs=2)
    assert len(gpu.log) == 2


def test_a_failed_build(gpu, capsys):
    gpu.error = RuntimeError("x.cu(1): error: no such header")
    with pytest.raises(RuntimeError, match=r"could not build FlashInfer .*no such header"):
        torch_core.warmup("decode", **GEOMETRY)
    assert command.main(ARGUMENTS) == 1
    assert "no such header" in capsys.readouterr().err
    assert gpu.log == []


def test_list(gpu, capsys):
    """Says what is built, what is not and how long it takes; builds nothing."""
    gpu.built = {("fa3", *["bfloat16"] * 3, 128, False, False)}
    assert command.main([*ARGUMENTS, "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "for capability 90:" and len(lines) == 4
    assert lines[1].split()[0] == "xqa" and "to build: about 10 s on 16 cores" in lines[1]
    assert lines[2].split()[0] == "append_kv" and "in seconds, unless Triton's cache" in lines[2]
    assert lines[3].split()[0] == "native_prefill_fa3" and lines[3].endswith("  built")
    assert gpu.log == [] and gpu.appends == []


@pytest.mark.parametrize("bar", [True, False])
def test_progress(gpu, capsys, monkeypatch, bar):
    """A bar where tqdm is installed, numbered lines elsewhere."""
    if not bar:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    assert command.main([*ARGUMENTS, "--phase", "decode"]) == 0
    said = capsys.readouterr().err
    assert "FlashInfer ('bfloat16'" in said and "append_kv (Triton, bfloat16 to bfloat16" in said
    assert ("2/2" if bar else "[2/2] ") in said
    assert [how for how, _ in gpu.log] == ["load"]


def test_no_gpu(gpu, capsys, monkeypatch):
    """Says what to set; with it modules are built and not loaded."""
    monkeypatch.setattr(dispatch, "device_capability", lambda *_: 0)
    monkeypatch.delenv(command.ARCHITECTURES, raising=False)
    assert command.main(ARGUMENTS) == 1
    assert (
        "no GPU here: set FLASHINFER_CUDA_ARCH_LIST (for example 9.0a)" in capsys.readouterr().err
    )
    assert command.main([*ARGUMENTS, "--list"]) == 0
    assert "for capability none (no GPU here):" in capsys.readouterr().out
    assert command.main(QSA) == 1
    assert "no GPU here: QSA's Triton kernels need the GPU itself" in capsys.readouterr().err
    monkeypatch.setenv(command.ARCHITECTURES, "9.0a 12.0f")
    assert command.build_targets() == [90, 120]
    monkeypatch.setenv(command.ARCHITECTURES, "9.0a")
    assert command.main(ARGUMENTS) == 0
    assert [how for how, _ in gpu.log] == ["build", "build"] and not gpu.appends


@pytest.mark.parametrize("arguments, message", [
    (["--head-dim", "128"], "required: --num-qo-heads, --num-kv-heads, --page-size\n"),
    ([*ARGUMENTS, "--jobs", "0"], "jobs must be in [1, 2147483647], got 0"),
    ([*ARGUMENTS, "--kv-dtype", "int8"], "kv_dtype must be one of 'bfloat16', "),
    ([*ARGUMENTS, "--num-kv-heads", "7"], "query must have a positive multiple of num_kv_heads"),
    ([*QSA, "--page-size", "16", "32", "--head-dim", "64", "128"],
     "--head-dim, --page-size must have one value with --qsa"),
    ([*ARGUMENTS[2:], "--qsa", "--budget", "64"],
     "required with --qsa: --num-qo-heads, --index-heads, --pages-per-seq, --max-requests, "
     "--max-rows, --index-dim, --num-pages, --max-positions, --rotary-dim\n"),
    ([*QSA, "--max-draft", "-1"], "max_draft must be in [0, 2147483647], got -1"),
    ([*QSA, "--compress-ratio", "3"], "compress_ratio must be one of (2, 4, 8), got"),
])  # fmt: skip
def test_wrong_options(arguments, message, gpu, capsys):
    """Exit status 2 and the library's own words."""
    with pytest.raises(SystemExit) as left:
        command.main(arguments)
    assert left.value.code == 2 and message in capsys.readouterr().err
    assert gpu.log == []


def test_wrong_architectures(gpu, capsys, monkeypatch):
    monkeypatch.setattr(dispatch, "device_capability", lambda *_: 0)
    monkeypatch.setenv(command.ARCHITECTURES, "hopper")
    with pytest.raises(SystemExit):
        command.main(ARGUMENTS)
    assert "FLASHINFER_CUDA_ARCH_LIST must be like '9.0a'" in capsys.readouterr().err


def test_no_kernel_is_readable(gpu, capsys):
    assert command.main([*ARGUMENTS, "--head-dim", "80", "--phase", "prefill"]) == 1
    assert "no kernel runs this prefill:\n" in capsys.readouterr().err


def test_qsa(gpu, capsys, monkeypatch):
    """Every specialization that qsa.warmup compiles, and append_kv."""
    compiled = []
    monkeypatch.setattr(command.launch, "compile_ahead", compiled.append)
    assert command.main([*QSA, "--list"]) == 0
    assert "QSA compress:compress (Triton, 4 variants)" in capsys.readouterr().out
    assert compiled == []
    assert command.main(QSA) == 0
    tokens, bf16 = (99, 64, 8, 128), torch.bfloat16
    meta = dict(dtype=bf16, device="meta")
    arrays = (torch.empty(*tokens, **meta), torch.empty(99, 16, 1, 128, **meta),
              torch.empty(2, 4, 128, **meta), torch.empty(128, **meta),
              torch.empty(4096, 32, device="meta"))  # fmt: skip
    limits = dict(num_qo_heads=64, index_heads=4, budget=2048, pages_per_seq=64, max_requests=2,
                  max_rows=8, max_draft=0, eps=1e-6, workspace_bytes=2**28)  # fmt: skip
    assert set(compiled) == command.reachable(*arrays, **limits)
    assert len(gpu.appends) == 1


def test_on_a_cpu():
    """Names the reference, and refuses what no call accepts."""
    if not torch.cuda.is_available():
        assert torch_core.warmup(**GEOMETRY) == ("reference",)
    with pytest.raises(ValueError, match="phase must be one of"):
        torch_core.warmup("train", **GEOMETRY)


@pytest.mark.parametrize("package", [torch_core, jaxattn])
@pytest.mark.parametrize("phase, changes, error, message", [
    ("decode", dict(batch=4), TypeError,
     "warmup has no argument batch; it takes num_qo_heads, num_kv_heads, head_dim, page_size, "),
    ("decode", dict(capability=90), TypeError, "warmup has no argument capability; it takes "),
    ("decode", dict(head_dim=[]), ValueError, "head_dim must have a value or more, got none"),
    ((), {}, ValueError, "phase must have a value or more, got none"),
    ("decode", dict(query_dtype=["bfloat16", "bf16"]), ValueError,
     "query_dtype must be one of 'bfloat16', 'float16', 'float32', 'float8_e4m3fn', got 'bf16'"),
])  # fmt: skip
def test_arguments_that_mean_nothing(package, phase, changes, error, message):
    """Errors that name them, before anything is built."""
    with pytest.raises(error) as raised:
        package.warmup(phase, **GEOMETRY | changes)
    assert str(raised.value).startswith(message)


def test_sizes_that_are_left_out():
    with pytest.raises(TypeError, match=r"^warmup needs head_dim, page_size$"):
        torch_core.warmup(num_qo_heads=64, num_kv_heads=8)


def test_dtypes_of_every_kind(gpu):
    """torch's, JAX's and names reach one kernel."""
    for dtype in (torch.bfloat16, jnp.bfloat16, "bfloat16", [torch.bfloat16, "bfloat16"]):
        torch_core.warmup("decode", **GEOMETRY, query_dtype=dtype, kv_dtype=torch.float8_e4m3fn)
    assert {key[:2] for _, key in gpu.log} == {("bfloat16", "float8_e4m3fn")}


def test_as_a_module():
    """From a shell, without a warning of Python's."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "torch_core.warmup", "--help"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and "--num-qo-heads" in done.stdout, done.stderr
    assert done.stdout.count("required with --qsa") == len(command.QSA)
    assert len(re.findall("required$", done.stdout, re.M)) == len(command.SIZES)
    assert not done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_nothing_is_compiled_after_warmup(kv_dtype, monkeypatch):
    """At any batch and length: no module is built, no kernel of append_kv is compiled."""
    from torch_core.backends.append import append

    def compiled() -> int:
        return sum(len(caches[0]) for caches in append.device_caches.values())

    limits = GEOMETRY | dict(kv_dtype=kv_dtype)
    decode, prefill = (torch_core.warmup(phase, **limits) for phase in ("decode", "prefill"))
    before = compiled()
    monkeypatch.setattr(build, "load", lambda *_: pytest.fail("built after warmup"))
    for lengths in ((5, 9), (700, 3, 44)):
        for name, q_lens in ((decode, None), (prefill, (3,) * len(lengths))):
            case = Case("", lengths, q_lens, dtype="bfloat16", kv_dtype=kv_dtype, **GEOMETRY)
            arguments = case.make()
            phase = case.phase
            inputs.run_torch(getattr(torch_core, phase), arguments, "cuda")
            asked = torch_core.explain(phase, **limits)
            assert asked.kernel is not None and asked.kernel.name == name[0]
        rows = torch.randn(len(lengths), 8, 128, device="cuda").bfloat16()
        caches = [inputs.to_torch(arguments[n], "cuda") for n in ("key_cache", "value_cache")]
        table = inputs.to_torch(arguments["page_table"], "cuda")
        positions = torch.zeros(len(lengths), dtype=torch.int32, device="cuda")
        requests = torch.arange(len(lengths), dtype=torch.int32, device="cuda")
        scales = {} if kv_dtype == "bfloat16" else dict(k_scale=0.3, v_scale=0.7)
        by_position = dict(page_table=table, positions=positions)
        for place in (dict(slots=positions - 1), by_position,
                      by_position | dict(request_ids=requests)):  # fmt: skip
            torch_core.append_kv(rows, rows, *caches, **place, **scales)
    assert compiled() == before > 0


@pytest.mark.gpu
def test_the_command_on_a_gpu(tmp_path):
    """In an empty cache: to build, then built, and killed half-way it is built again."""
    environment = dict(os.environ, FLASHINFER_WORKSPACE_BASE=str(tmp_path))
    # What no package of prebuilt kernels has.
    odd = ["--num-qo-heads", "40", "--num-kv-heads", "8", "--head-dim", "128", "--page-size", "128"]
    line = [sys.executable, "-m", "torch_core.warmup", *odd, "--phase", "decode"]

    def listed() -> str:
        return subprocess.run([*line, "--list"], cwd=ROOT, env=environment, capture_output=True,
                              text=True, check=True, timeout=120).stdout  # fmt: skip

    assert "to build" in listed()
    process = subprocess.Popen(line, cwd=ROOT, env=environment, start_new_session=True)
    deadline = time.time() + 100
    while not list(tmp_path.rglob("build.ninja")) and time.time() < deadline:
        time.sleep(0.1)
    time.sleep(2)
    os.killpg(process.pid, 9)
    process.wait()
    subprocess.run(line, cwd=ROOT, env=environment, check=True, timeout=400)
    assert "to build" not in listed()
