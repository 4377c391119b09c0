"""README.md: its examples run, its table and commands are those of the project."""

import importlib
import pathlib
import re
import subprocess
import sys

import pytest

from torch_core import dispatch

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_matrix_is_the_table():
    """`python -m torch_core` prints what the README holds."""
    held = re.search(r"<!-- matrix -->\n(.*)\n<!-- /matrix -->", README, re.S)
    assert held is not None
    assert held[1] == dispatch.matrix()
    command = [sys.executable, "-m", "torch_core"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == held[1]


@pytest.mark.parametrize("title", ["From JAX", "From torch", "QSA"])
def test_example_runs(title):
    """The code block of each section, as it is; finite results."""
    run(README.split(f"## {title}\n")[1].split("\n## ")[0], title)


@pytest.mark.parametrize("name", ["export", "rpa", "sharding", "speculative"])
def test_example_of_a_module_runs(name):
    """The code block of the docstring of a module of jaxattn."""
    run(importlib.import_module(f"jaxattn.{name}").__doc__, name)


def run(text: str, name: str) -> None:
    code = re.search(r"```python\n(.*?)```", text, re.S)
    assert code is not None
    scope: dict = {}
    exec(compile(code[1], name, "exec"), scope)
    out = scope["out"]
    assert out.shape[1] == 8 and out.shape[2] in (64, 128)
    assert bool((out == out).all())


def test_ci_runs_the_readme_command():
    """.ci/run installs as the README says and calls its test command."""
    script = (ROOT / ".ci" / "run").read_text()
    assert "\n    .venv/bin/python -m pytest\n" in README
    assert script.rstrip().endswith("\n.venv/bin/python -m pytest")
    install = re.search(r"-m pip install (.*?) &&", README)
    assert install is not None
    assert install[1] in script.replace("--quiet ", "")
