"""The torch example: what it prints, steps that continue a prefill, and its CUDA graph."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest
import torch

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "torch_decode.py"
LENGTHS = torch.tensor([1, 2, 7, 64, 65, 30, 63, 5], dtype=torch.int32)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("torch_decode", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(*arguments: str) -> subprocess.CompletedProcess:
    line = [sys.executable, str(EXAMPLE), *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def prefilled(example, device: str, dtype: torch.dtype):
    """A model after a prefill of random prompts, and the prompts; always the same ones."""
    torch.manual_seed(0)
    model = example.ToyModel(torch.device(device), dtype)
    shape = (int(LENGTHS.sum()), example.NUM_QO_HEADS, example.HEAD_DIM)
    prompts = torch.randn(shape).to(device, dtype)
    model.prefill(prompts, LENGTHS)
    return model, prompts


def test_runs_to_the_asked_length():
    done = command("--steps", "5")
    assert done.returncode == 0, done.stderr
    assert "8 requests at [6, 10, 22, 69, 70, 105, 133, 205] tokens" in done.stdout
    assert "decode " in done.stdout
    assert " tokens/s" in done.stdout


def test_refuses_steps_beyond_the_pages():
    done = command("--steps", "5000")
    assert done.returncode == 2
    assert "--steps must be between 1 and 824, got 5000" in done.stderr


def test_steps_continue_the_prefill(example):
    """Three steps give the rows that one prefill of prompts and step inputs gives."""
    model, prompts = prefilled(example, "cpu", torch.float32)
    parts = [[prompt] for prompt in prompts.split(LENGTHS.tolist())]
    outputs = []
    for _ in range(3):
        for part, row in zip(parts, model.hidden, strict=True):
            part.append(row[None].clone())
        model.step()
        outputs.append(model.hidden.clone())
    assert model.seq_lens.tolist() == (LENGTHS + 3).tolist()
    whole, _ = prefilled(example, "cpu", torch.float32)
    rows = whole.prefill(torch.cat([row for part in parts for row in part]), LENGTHS + 3)
    expected = torch.stack([row[-3:] for row in rows.split((LENGTHS + 3).tolist())])
    torch.testing.assert_close(torch.stack(outputs, dim=1), expected)


@pytest.mark.gpu
def test_graph_replays_equal_an_eager_loop(example):
    eager, _ = prefilled(example, "cuda", torch.bfloat16)
    captured, _ = prefilled(example, "cuda", torch.bfloat16)
    graph = captured.capture()
    assert torch.equal(captured.seq_lens, eager.seq_lens), "capturing moves nothing on"
    assert torch.equal(captured.hidden, eager.hidden)
    for step in range(100):
        eager.step()
        graph.replay()
        assert torch.equal(captured.hidden, eager.hidden), f"step {step}"
    assert captured.seq_lens.tolist() == (LENGTHS + 100).tolist()
    assert torch.equal(captured.caches, eager.caches)
    assert captured.hidden.isfinite().all()
