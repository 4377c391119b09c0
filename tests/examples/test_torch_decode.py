"""The torch example runs, on a CPU or under a CUDA graph, and refuses steps that do not fit."""

import pathlib
import subprocess
import sys

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "torch_decode.py"


def example(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(EXAMPLE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_runs_to_the_asked_length():
    done = example("--steps", "5")
    assert done.returncode == 0, done.stderr
    assert "8 requests at [5, 5, 5, 5, 5, 5, 5, 5] tokens" in done.stdout


def test_refuses_steps_beyond_the_pages():
    done = example("--steps", "5000")
    assert done.returncode == 2
    assert "--steps must be between 1 and 1023, got 5000" in done.stderr
