"""First use of a kernel: what is said, what a failed build says, and building ahead."""

import logging

import pytest
import torch

import torch_core
from tests import inputs
from tests.inputs import Case
from torch_core import build

LOG = """FAILED: prefill.cuda.o
/x/prefill.cu(12): error: identifier "foo" is undefined
/x/prefill.cu(15): error: too many
ninja: build stopped: subcommand failed."""


class Spec:
    """A FlashInfer JIT spec that is not built yet."""

    is_compiled = False

    def __init__(self, error=None):
        self.error = error

    def build_and_load(self):
        if self.error:
            raise self.error
        self.is_compiled = True
        return "module"


def failed_build():
    build.load(Spec(RuntimeError(LOG)), "FlashInfer XQA", 10)


def test_first_build_says_what_and_how_long(caplog):
    """Once: a kernel that is on disk is loaded without a word."""
    spec = Spec()
    with caplog.at_level(logging.INFO):
        assert build.load(spec, "FlashInfer XQA (bfloat16)", 10) == "module"
    assert "building FlashInfer XQA (bfloat16) with nvcc: about 10 s" in caplog.text
    caplog.clear()
    build.load(spec, "FlashInfer XQA (bfloat16)", 10)
    assert not caplog.text


def test_failed_build_is_readable():
    """The compiler's own lines and what is needed, not pages of a build log."""
    with pytest.raises(RuntimeError) as error:
        failed_build()
    message = str(error.value)
    assert message.startswith("torch_core could not build FlashInfer XQA: ")
    assert 'error: identifier "foo" is undefined' in message
    assert "nvcc" in message and "FAILED" not in message and "\n" not in message
    assert error.value.__cause__ is not None


@pytest.mark.parametrize("error", [FileNotFoundError("ninja not found"), OSError(), KeyError("x")])
def test_any_failure_has_a_reason(error):
    with pytest.raises(RuntimeError, match=r"could not build kernel: .+ It needs nvcc"):
        build.load(Spec(error), "kernel", 1)


def test_warmup_on_a_cpu():
    """Names the reference, and refuses what no call accepts."""
    geometry = dict(num_qo_heads=8, num_kv_heads=2, head_dim=64, page_size=16)
    if not torch.cuda.is_available():
        assert torch_core.warmup("decode", **geometry) == "reference"
    with pytest.raises(ValueError, match="phase must be one of"):
        torch_core.warmup("train", **geometry)
    with pytest.raises(TypeError):
        torch_core.warmup("decode", heads=3, **geometry)


@pytest.mark.gpu
@pytest.mark.parametrize("q_lens", [None, (3, 5)], ids=["decode", "prefill"])
@pytest.mark.parametrize("changes", [dict(), dict(return_lse=True)], ids=str)
def test_nothing_is_built_after_warmup(monkeypatch, q_lens, changes):
    """At any batch and length."""
    geometry = dict(num_qo_heads=64, num_kv_heads=8, head_dim=128, page_size=64)
    phase = "decode" if q_lens is None else "prefill"
    name = torch_core.warmup(phase, **geometry, **changes)
    monkeypatch.setattr(build, "load", lambda *_: pytest.fail("built after warmup"))
    for lengths in ((5, 9), (700, 3)):
        case = Case("", lengths, q_lens=q_lens, dtype="bfloat16", **geometry)
        inputs.run_torch(getattr(torch_core, phase), case.make(), "cuda", **changes)
    asked = torch_core.explain(phase, **geometry, **changes)
    assert asked.kernel is not None and asked.kernel.name == name
