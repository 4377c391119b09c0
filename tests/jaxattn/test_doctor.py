"""python -m jaxattn.doctor: what it says of machines of every kind, and when its test fails."""

import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

import jaxattn
from jaxattn import _device, _triton, doctor
from torch_core import dispatch

ROOT = Path(jaxattn.__file__).parents[1]
TITLES = ("versions", "devices", "kernels (on JAX's device)", "built kernels", "memory", "checks",
          "self-test")  # fmt: skip
WITHOUT = """
import runpy, sys
for name in ("flashinfer", "triton", "jax_triton"):
    sys.modules[name] = None
runpy.run_module("jaxattn.doctor", run_name="__main__")
"""


def test_a_report_without_gpu_and_kernel_libraries():
    """Every section, and a self-test that is right."""
    environment = dict(os.environ, XLA_PYTHON_CLIENT_MEM_FRACTION="0.4", JAX_PLATFORMS="cpu",
                       CUDA_VISIBLE_DEVICES="", JAXATTN_DEBUG="1")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, env=environment,
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr + done.stdout
    assert all(f"\n{title}\n" in done.stdout for title in TITLES)
    assert done.stdout.endswith("\nok\n") and "could not go on" not in done.stdout
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert f"jax: {jax.__version__}" in lines
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.4" in lines and "JAXATTN_DEBUG is on" in lines
    assert "decode reference: available" in lines
    assert "decode native_decode: needs capability 80+, this device has none (CPU)" in lines
    assert sum(": right (" in line for line in lines) == 7


@pytest.fixture
def quiet(monkeypatch):
    """Only the self-test, with an environment that is put back."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    for name in ("versions", "devices", "kernels", "caches"):
        monkeypatch.setattr(doctor, name, lambda: ["-"])


def test_wrong_numbers_fail(quiet, capsys, monkeypatch):
    """Exit status 1; the other steps still run."""
    right = jaxattn.decode
    monkeypatch.setattr(jaxattn, "decode", lambda *arrays: right(*arrays) * 1.05)
    assert doctor.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    (failed,) = [line for line in lines if "FAILED," in line]
    assert failed.startswith("  decode (JAX): FAILED, AssertionError: row 0 is off by ")
    assert lines[-1] == "FAILED" and sum(": right (" in line for line in lines) == 6


@pytest.mark.parametrize("name", ["append_kv", "prefill"])
def test_errors_fail(name, quiet, capsys, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(jaxattn, name, broken)
    assert doctor.main([]) == 1
    assert f"{name} (JAX): FAILED, RuntimeError: no such kernel\n" in capsys.readouterr().out


def test_nan_fails():
    test = doctor.SelfTest()
    test.prepare()
    with pytest.raises(AssertionError, match="row 0 is off by nan"):
        test.compare(np.full((2, 8, 128), np.nan))


def test_a_device_that_cannot_be_used(quiet, capsys, monkeypatch):
    """One failure with JAX's reason, not seven."""
    monkeypatch.setattr(doctor.jnp, "asarray", lambda *_: 1 / 0)
    assert doctor.main([]) == 1
    assert capsys.readouterr().out.count("FAILED, ZeroDivisionError: division by zero") == 1


def test_a_hang_ends(monkeypatch):
    """The hanging step fails and is the last."""
    monkeypatch.setattr(doctor, "HANGS", 0.1)
    steps = {"good": lambda: None, "hangs": lambda: time.sleep(5), "later": lambda: None}
    lines = list(doctor.self_test(steps))
    assert [failed for _, failed in lines] == [False, True]
    assert lines[1][0].startswith("hangs: FAILED, no result after ")


def test_the_time_is_bounded(monkeypatch):
    monkeypatch.setattr(doctor, "SECONDS", 0.05)
    steps = {"slow": lambda: time.sleep(0.1), "later": lambda: pytest.fail("ran")}
    assert [failed for _, failed in doctor.self_test(steps)] == [False, False]
    assert "later: not run, 0 s are over" in [line for line, _ in doctor.self_test(steps)]


def test_versions_outside_the_range(monkeypatch):
    """Said beside the range; what is not installed too."""
    installed = {"jax": "0.13.1", "torch": "2.11.0+cu130", "flashinfer-python": "", "jaxattn": "1"}
    monkeypatch.setattr(dispatch, "version", lambda name: installed.get(name, "9.9"))
    ranges = {"jax": [">=0.10", "<0.13"], "torch": [">=2.11"], "flashinfer-python": [">=0.7"]}
    monkeypatch.setattr(doctor, "requirements", lambda: ranges)
    lines = list(doctor.versions())
    assert "jax: 0.13.1, OUTSIDE the supported range >=0.10,<0.13" in lines
    assert "torch: 2.11.0+cu130" in lines
    assert "flashinfer-python: not installed (pip install 'jaxattn[cuda]')" in lines


def test_the_ranges_are_those_of_the_package():
    found = doctor.requirements()
    assert set(found["jax"]) == {">=0.10", "<0.13"} and found["torch"] == [">=2.11"]
    assert {"flashinfer-python", "jax-triton", "triton"} <= set(found) and "pytest" not in found


@pytest.mark.parametrize("version, specifier, wanted", [
    ("0.10.2", ">=0.10", True), ("0.9.9", ">=0.10", False), ("0.13", "<0.13", False),
    ("0.12.9", "<0.13", True), ("2.13.0+cpu", ">=2.13", True), ("0.1.15.post2", ">=0.1.15.post2",
    True), ("0.1.15", ">=0.1.15.post2", False), ("1.0", "==1.0.0", True), ("1.0", "!=1", False),
])  # fmt: skip
def test_specifiers(version, specifier, wanted):
    assert doctor.holds(version, specifier) is wanted


@pytest.fixture
def on_hopper(monkeypatch):
    """JAX's device as a GPU, without FlashInfer."""
    monkeypatch.setattr(_device, "environment", lambda: dispatch.Environment(90))
    failure = ImportError("via='triton' cannot use jax-triton here")
    monkeypatch.setattr(_triton, "failure", lambda _: failure)


def test_kernels_of_a_gpu(on_hopper, monkeypatch, capsys):
    """The reasons against each; what no call can get is said and ends the section."""
    doctor.section("kernels", doctor.kernels())
    said = capsys.readouterr().out
    assert "prefill native_prefill_fa3: needs FlashInfer: pip install 'jaxattn[cuda]'" in said
    assert "decode trtllm_gen: needs capability 100, 103, this device has 90" in said
    assert "qsa via='triton': via='triton' cannot use jax-triton here" in said
    assert "could not go on: NotImplementedError: no kernel runs this decode" in said


def test_memory_of_a_gpu(on_hopper):
    """What is set, what JAX does otherwise, and what to set."""
    settings = dict.fromkeys(doctor.MEMORY)
    lines = list(doctor.memory(settings))
    assert "XLA_PYTHON_CLIENT_PREALLOCATE: not set (JAX: true)" in lines
    assert "JAX takes 0.75 of the GPU" in lines[-1]
    assert "XLA_CLIENT_MEM_FRACTION" in lines[-1]
    lines = list(doctor.memory(settings | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}))
    assert "JAX takes 0.3 of the GPU" in lines[-1]
    lines = list(doctor.memory(settings | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}))
    assert "set_per_process_memory_fraction" in lines[-1]


def test_built_kernels(tmp_path, monkeypatch):
    module = tmp_path / ".cache/flashinfer/0.7.4/90a/cached_ops/batch_prefill_x/batch_prefill_x.so"
    adapter = tmp_path / "ffi/jaxattn_adapter_0/jaxattn_adapter.so"
    for path in (module, adapter):
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(tmp_path / "ffi"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "nothing"))
    lines = list(doctor.caches())
    assert lines[0].startswith("FlashInfer: 1 modules in ")
    assert lines[1] == "  batch_prefill_x (0.7.4, 90a)"
    assert any(line.startswith("Triton: 0 entries") for line in lines)
    assert any(line.startswith("adapter: 1 in ") for line in lines)


def test_one_of_both_sees_the_gpu(on_hopper):
    if not torch.cuda.is_available():
        assert "WRONG: only torch sees no GPU (a CPU build of it, or JAX_PLATFORMS?)" in list(
            doctor.devices()
        )


@pytest.mark.gpu
def test_a_report_on_a_gpu():
    """With the kernels of its sizes built, all of the self-test runs on the GPU."""
    subprocess.run(
        [sys.executable, *doctor.HOW_TO_BUILD.split()[1:]], cwd=ROOT, check=True, timeout=500
    )
    for _ in range(2):  # the first builds the adapter and compiles Triton's kernels
        done = subprocess.run([sys.executable, "-m", "jaxattn.doctor"], cwd=ROOT, text=True,
                              capture_output=True, timeout=200)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert sum(": right (" in line for line in lines) == 7, done.stdout
    assert any(line.startswith("JAX: gpu 0") for line in lines)
    assert "decode native_decode: available" in lines
