"""The bridge itself."""

import logging

import tvm_ffi.cpp

from jaxattn import _ffi


def test_an_adapter_that_cannot_be_built(monkeypatch, caplog):
    """Says once why, and leaves the way through Python."""

    def load(**_):
        raise RuntimeError("ninja exited with status 1\nc++: command not found")

    monkeypatch.setattr(tvm_ffi.cpp, "load", load)
    with caplog.at_level(logging.WARNING):
        assert _ffi.adapter.__wrapped__() is None
    assert "c++: command not found" in caplog.text
    assert "C++ compiler and ninja" in caplog.text
