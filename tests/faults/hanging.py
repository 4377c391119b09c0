"""GPU cases that could hang, all in one process with a time limit: `python -m tests.faults.hanging`
runs them and prints a line for each."""

import functools
import json
import os
import pathlib
import subprocess
import sys
import traceback

import numpy as np
import pytest

LIMIT = 240  # seconds for all cases, compilations included


@functools.cache
def answers() -> dict[str, str]:
    """What each case said; the first one that is missing hung or crashed."""
    environment = os.environ | dict(XLA_PYTHON_CLIENT_PREALLOCATE="false")
    command = [sys.executable, "-m", "tests.faults.hanging"]
    root = pathlib.Path(__file__).parents[2]
    process = subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, errors = process.communicate(timeout=LIMIT)
        end = f"ended with {process.returncode}: {errors[-1500:]}"
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        end = f"hung for {LIMIT} s"
    found = dict(json.loads(line) for line in out.splitlines() if line.startswith("["))
    return found | {"end": end}


def answer(name: str) -> str:
    """What one case said."""
    found = answers()
    if name not in found:
        pytest.fail(f"{name} has no answer after {', '.join(found) or 'nothing'}: {found['end']}")
    return found[name]


def pollute() -> None:
    """Leaves 0xFF in the memory that torch hands out next."""
    import torch

    blocks = [torch.full((1 << size,), 255, dtype=torch.uint8, device="cuda") for size in range(29)]
    blocks += [torch.full((3 << 20,), 255, dtype=torch.uint8, device="cuda") for _ in range(20)]
    del blocks


def steps(lse: bool):
    """decode(64), prefill, decode(1), decode(64): long enough to be split."""
    from tests.faults import gpu

    decode, prefill = (gpu.DECODE if lse else gpu.XQA), gpu.FA2 if lse else gpu.FA3
    many, one = decode.case([800 + 7 * n for n in range(64)]), decode.case((60_000,))
    chunk = prefill.case((3000, 17, 600), (100, 17, 1))
    calls = [(decode, many.make()), (prefill, chunk.make()), (decode, one.make(1))]
    return [*calls, calls[0]]


def r22_torch(lse: bool = False) -> None:
    from tests.faults import gpu

    calls = steps(lse)
    expected = [gpu.attend("torch", path, arguments) for path, arguments in calls]
    for _ in range(4):
        for (path, arguments), right in zip(calls, expected, strict=True):
            pollute()
            assert gpu.same_bits(gpu.attend("torch", path, arguments), right), path
    # The split result itself: one request's rows against a call without splits.
    path, arguments = calls[1]
    gpu.check(arguments, *expected[1])
    uniform_check(gpu.DECODE if lse else gpu.XQA)


def uniform_check(path) -> None:
    """The longest split call sees all its keys."""
    from tests import faults
    from tests.faults import gpu

    arguments = faults.uniform(path.case((60_000,)))
    pollute()
    gpu.check_visible(arguments, *gpu.attend("torch", path, arguments), [range(60_000)])


def r22_jax() -> None:
    """Two programs in turn, without waiting between them."""
    from tests import faults
    from tests.faults import gpu

    calls = [call for lse in (False, True) for call in steps(lse)[:3]]
    arrays = [faults.jax_arrays(arguments)[0] for _, arguments in calls]
    programs = [faults.jitted(path.phase, static(path)) for path, _ in calls]
    expected = [gpu.bits(gpu.first(p(a))).copy() for p, a in zip(programs, arrays, strict=True)]
    rounds = [[gpu.first(p(a)) for p, a in zip(programs, arrays, strict=True)] for _ in range(10)]
    for results in rounds:
        for result, right in zip(results, expected, strict=True):
            assert np.array_equal(gpu.bits(result), right)


def static(path):
    from tests.faults import gpu

    return tuple(sorted((dict(gpu.static_of(path)) | dict(max_seqlen_q=100)).items())) if (
        path.phase == "prefill") else gpu.static_of(path)  # fmt: skip


def r35(tokens: int, query: str) -> None:
    """64 / 8 heads, pages of 32: a window with a bfloat16 query, an e4m3 query without."""
    from tests.faults import gpu

    path = gpu.FA3_E4M3 if query == "e4m3" else gpu.FA3
    options = {} if query == "e4m3" else dict(window_left=511)
    sizes = dict(num_qo_heads=64, num_kv_heads=8, page_size=32, options=options)
    arguments = path.case((tokens,), (tokens,), **sizes).make()
    out, lse = gpu.attend("torch", path, arguments)
    # The oracle takes a row at a time: the last ones, and those around a tile's end.
    for first, last in ((0, 3), (126, 130), (tokens - 3, tokens)):
        part = arguments | dict(
            query=arguments["query"][first:last],
            seq_lens=np.array([last], np.int32),
            cu_seqlens_q=np.array([0, last - first], np.int32),
        )
        gpu.check(part, out[first:last], lse[first:last])


CASES = {
    "r22_torch": r22_torch,
    "r22_torch_lse": functools.partial(r22_torch, True),
    "r22_jax": r22_jax,
} | {
    f"r35_{query}_{tokens}": functools.partial(r35, tokens, query)
    for query in ("bf16", "e4m3")
    for tokens in (255, 256, 257, 1024)
}


def main() -> None:
    for name, case in CASES.items():
        try:
            case()
            said = "right"
        except Exception:
            said = traceback.format_exc()[-1500:]
        print(json.dumps([name, said]), flush=True)


if __name__ == "__main__":
    main()
