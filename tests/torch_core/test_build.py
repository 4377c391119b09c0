"""First use of a kernel: what is said, and what a failed build says."""

import logging

import pytest

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
