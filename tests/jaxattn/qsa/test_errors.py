"""Every message of jaxattn.qsa: torch_core's, while tracing, and what only JAX can get wrong."""

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxattn
from tests import errors as repository_errors
from tests.jaxattn.qsa import front
from tests.torch_core.qsa import errors
from torch_core import qsa as torch_qsa

# Strides, devices, gradients and `out` are torch's; prepare_query reads no positions.
ONLY_TORCH = {
    "query_gradient", "ring_strides", "cache_strides", "compressed_device", "tokens", "out_count",
    "out_dtype", "positions_of_query",
}  # fmt: skip
AT_RUN_TIME = {
    "rotary_positions", "table_too_short", "seq_lens_long", "seq_lens_negative",
    "ring_ids_negative", "ring_ids_high", "request_high", "slot_high",
    "select_request_high", "attend_request_high",
}  # fmt: skip
ROWS = [row for row in errors.WRONG if row[0] not in ONLY_TORCH]


def to_jax(value: Any) -> Any:
    """64-bit tensors as NumPy's, which JAX would cut."""
    wide = isinstance(value, torch.Tensor) and value.dtype == torch.int64
    return value.numpy() if wide else front.to_jax(value)


def call(name: str, **changes: Any) -> Any:
    arguments = {key: to_jax(value) for key, value in errors.valid(name).items()}
    return getattr(jaxattn.qsa, name)(**arguments | changes)


@pytest.fixture
def through_jax(monkeypatch):
    """The rows' calls go to jaxattn."""

    def calling(name: str) -> Any:
        return lambda **arguments: getattr(jaxattn.qsa, name)(
            **{key: to_jax(value) for key, value in arguments.items()}
        )

    names = ("build_metadata", "prepare_query", "compress", "select", "expand", "attend",
             "attention", "warmup", "ring_rows", "rotary_tables")  # fmt: skip
    calls = SimpleNamespace(**{name: calling(name) for name in names})
    calls.Metadata, calls.split_batch = torch_qsa.Metadata, jaxattn.qsa.split_batch
    monkeypatch.setattr(errors, "qsa", calls)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_shared_message(row, through_jax):
    name, trigger, error, message = row
    if name in AT_RUN_TIME:
        with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(message)):
            jax.block_until_ready(trigger())
    else:
        message = message.replace("got Tensor", "got ArrayImpl")
        with pytest.raises(error, match=f"^{re.escape(message)}"):
            jax.eval_shape(trigger)


# name, trigger, error, start of the message
OWN = [
    ("torch_tensor", lambda: call("select", index_query=torch.ones(3, 4, 16)), TypeError,
     "index_query must be a jax.Array, got torch.Tensor (jaxattn.to_jax takes torch tensors)"),
    ("torch_metadata", lambda: call("expand", metadata=errors.valid("expand")["metadata"]),
     TypeError, "request_ids must be a jax.Array, got torch.Tensor"),
    ("torch_scale", lambda: call("attend", k_scale=torch.ones(())), TypeError,
     "k_scale must be a jax.Array, got torch.Tensor"),
    ("traced_offsets",
     lambda: jax.jit(lambda offsets: call("build_metadata", cu_seqlens_q=offsets)[0])(
         jnp.array([0, 1, 3], jnp.int32)), ValueError,
     "num_decodes and decode_query_len must be given for offsets that are traced or on a GPU: "),
    ("traced_budget", lambda: jax.jit(lambda budget: call("select", budget=budget))(8), TypeError,
     "budget must be a Python int known before the call, got "),
    ("traced_eps", lambda: jax.jit(lambda eps: call("compress", eps=eps))(1e-6), TypeError,
     "eps must be a Python number, got an array"),
    ("traced_flag", lambda: jax.jit(lambda x: call("attend", return_lse=x))(True), TypeError,
     "return_lse must be True or False, got "),
    ("via", lambda: call("attention", via="cuda"), ValueError,
     "via must be one of 'auto', 'dlpack', 'triton', got 'cuda'"),
    ("wide_positions", lambda: call("prepare_query", positions=np.arange(3)), TypeError,
     "positions must be int32 [num_rows] = [3], got int64 [3]"),
]  # fmt: skip


@pytest.mark.parametrize("row", OWN, ids=lambda row: row[0])
def test_own_message(row):
    _name, trigger, error, message = row
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        trigger()


def test_every_message_has_a_test():
    """Left out: what test_triton raises about versions."""
    missing = repository_errors.uncovered(jaxattn.qsa, [row[1] for row in OWN])
    assert [place.split(":")[0] for place in missing] == ["_run.py"], missing


def test_a_call_after_an_error_works(through_jax):
    for row in ROWS:
        if row[0] in AT_RUN_TIME:
            with pytest.raises(jax.errors.JaxRuntimeError):
                jax.block_until_ready(row[1]())
    expected = torch_qsa.attend(**errors.valid("attend"))
    assert front.same(call("attend"), expected)
