"""Processes that end in the middle of something: calls in flight, a first-use build."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import jaxattn

ROOT = Path(jaxattn.__file__).parents[1]
IN_FLIGHT = """
import sys
import jax, jax.numpy as jnp
import jaxattn

gpu = sys.argv[1] == "gpu"
page, pages, heads, dim = (64, 8, 8, 128) if gpu else (16, 16, 1, 16)
rows, dtype = page * pages, jnp.bfloat16 if gpu else jnp.float32
cache = jnp.ones((pages, page, 1, dim), dtype)
table = jnp.arange(pages, dtype=jnp.int32).reshape(1, pages)
lengths, offsets = jnp.array([rows], jnp.int32), jnp.array([0, rows], jnp.int32)

def body(_, query):
    return jaxattn.prefill(query, cache, cache, table, lengths, offsets, max_seqlen_q=rows)

# XLA runs cheap programs at once; this one is dispatched to a thread of its own.
@jax.jit
def step(query):
    square = jax.lax.fori_loop(0, 10, lambda _, x: x @ x / 300, jnp.ones((300, 300)))
    return jax.lax.fori_loop(0, 20, body, query), square

query = jnp.ones((rows, heads, dim), dtype)
jax.block_until_ready(step(query))
results = [step(query) for _ in range(int(sys.argv[2]))]
print("in flight:", not results[-1][0].is_ready(), flush=True)
del results
raise KeyError("the server's own")
"""


def leave(platform: str, count: int) -> None:
    """No crash and no hang: Python's own way out of an exception."""
    environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", IN_FLIGHT, platform, str(count)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == "in flight: True\n", done.stdout + done.stderr
    assert done.returncode == 1 and "Fatal" not in done.stderr, done.stderr
    assert done.stderr.endswith('KeyError: "the server\'s own"\n')


def test_the_interpreter_leaves_while_calls_run():
    """By an exception, with calls dispatched that need Python, whose results nobody holds. (A
    daemon thread that still computes aborts Python below 3.14, also with JAX or torch alone.)"""
    leave("cpu", 10)


@pytest.mark.gpu
def test_the_interpreter_leaves_while_kernels_run():
    leave("gpu", 50)


BUILD = "from jaxattn import _ffi; assert _ffi.adapter() is not None"


def test_a_killed_build_of_the_adapter(tmp_path):
    """Killed while it compiles, with half a library left: the next process builds it again, and
    does not wait for the dead one's lock."""
    environment = dict(os.environ, TVM_FFI_CACHE_DIR=str(tmp_path))
    line = [sys.executable, "-c", BUILD]
    process = subprocess.Popen(line, cwd=ROOT, env=environment, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (plans := list(tmp_path.rglob("build.ninja"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    library = plans[0].with_name("jaxattn_adapter.so")
    assert not library.exists()
    library.write_bytes(b"\x7fELF half a library")
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
