"""R78, R52: no GPU backend and no QSA kernel reads or writes outside its tensors."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

LIMIT = 180  # seconds


@pytest.mark.parametrize("part, last", [("backends", "appends"), ("qsa", "qsa_tiles")])
def test_memcheck_of_the_smallest_ragged_cases(part, last):
    """compute-sanitizer finds nothing in tests/sanitize.py."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("needs compute-sanitizer (of the CUDA toolkit) on PATH")
    command = [tool, "--tool", "memcheck", "--error-exitcode", "7", "--target-processes",
               "application-only", sys.executable, "-m", "tests.sanitize", part]  # fmt: skip
    process = subprocess.run(
        command,
        cwd=pathlib.Path(__file__).parents[1],
        env=os.environ | dict(PYTORCH_NO_CUDA_MEMORY_CACHING="1"),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    said = process.stdout + process.stderr
    assert f"{last}: done" in said, said[-4000:]
    assert "ERROR SUMMARY: 0 errors" in said, said[-4000:]
    assert process.returncode == 0, said[-4000:]
