"""Every message of torch_core: what triggers it, and what it says."""

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import torch_core
from tests import errors, inputs
from tests.torch_core import test_build
from torch_core import binding, dispatch, launch

FRONT = errors.Front(torch_core, inputs.to_torch)


def call(function: str, **changes: Any) -> Callable[[], Any]:
    """A call on tensors, with some arguments given as they are."""

    def run():
        tensors = {k: inputs.to_torch(v) for k, v in errors.valid(function).items()}
        return getattr(torch_core, function)(**tensors | changes)

    return run


def shared_cache():
    cache = torch.zeros(6, 8, 2, 16)
    return call("append_kv", key_cache=cache, value_cache=cache)()


def no_kernel():
    problem, _ = dispatch.describe_decode(
        dispatch.AttentionInputs(
            query=dispatch.Spec((1, 2, 64), "bfloat16"),
            key_cache=dispatch.Spec((1, 16, 2, 64), "bfloat16"),
            value_cache=dispatch.Spec((1, 16, 2, 64), "bfloat16"),
            page_table=dispatch.Spec((1, 1), "int32"),
            seq_lens=dispatch.Spec((1,), "int32"),
        )
    )
    return dispatch.choose(problem, dispatch.Environment(70))


def constant_in_capture():
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        binding._constant(b"", "int32", (0,), torch.device("cuda"))


def compiled_plan():
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        torch_core.plan_prefill(*[None] * 6, max_seqlen_q=1)


OUT = torch.zeros(4, 4, 16)
LSE = torch.zeros(4, 4)
WIDE = torch.zeros(6, 8, 2, 96)
FAR = torch.empty(1, device="meta").as_strided((6, 8, 2, 64), (2**32, 128, 64, 1))
# name, trigger, error, start of the message
KEY, OVERLAP = torch.zeros(1, 4, 2), torch.zeros(4, 1, 4, 2)
OWN = [
    ("device", call("decode", page_table=torch.zeros(2, 3, dtype=torch.int32, device="meta")),
     ValueError, "page_table must be on cpu like the others, got meta"),
    ("numpy", call("decode", page_table=np.zeros((2, 3), np.int32)),
     TypeError, "page_table must be a torch.Tensor, got ndarray"),
    ("grad_decode", call("decode", query=torch.zeros(4, 4, 16, requires_grad=True)),
     NotImplementedError,
     "torch_core.decode is for inference and has no gradient: call it under "
     "torch.inference_mode() or torch.no_grad()"),
    ("grad_append", call("append_kv", key=torch.zeros(2, 2, 16, requires_grad=True)),
     NotImplementedError, "torch_core.append_kv is for inference"),
    ("grad_merge", call("merge_states", lse_a=torch.zeros(3, 4, requires_grad=True)),
     NotImplementedError, "torch_core.merge_states is for inference"),
    ("shared_cache", shared_cache,
     ValueError, "value_cache must not share its memory with key_cache"),
    ("append_overlap", lambda: torch_core.append_kv(
        KEY, KEY, OVERLAP[:3], OVERLAP[1:], slots=torch.tensor([0], dtype=torch.int32)),
     ValueError, "value_cache must not share its memory with key_cache"),
    ("append_expanded", lambda: torch_core.append_kv(
        KEY, KEY, OVERLAP[:1].expand(3, -1, -1, -1), OVERLAP[1:],
        slots=torch.tensor([0], dtype=torch.int32)),
     ValueError, "key_cache must not be an expanded tensor, got strides (0, 8, 2, 1)"),
    ("out_count", call("decode", out=(OUT, LSE)),
     ValueError, "out must be one tensor, got 2 tensors"),
    ("out_without_lse", call("decode", out=OUT, return_lse=True),
     ValueError, "out must be (out, lse), got 1 tensors"),
    ("out_type", call("decode", out=np.zeros((4, 4, 16), np.float32)),
     TypeError, "out must be a tensor, got ndarray"),
    ("out_dtype", call("decode", out=OUT.bfloat16()),
     TypeError, "out must be float32 [4, 4, 16] on cpu, got bfloat16 [4, 4, 16] "
     "on cpu"),
    ("out_shape", call("decode", out=OUT[:3]),
     ValueError, "out must be float32 [4, 4, 16] on cpu, got float32 [3, 4, 16] "
     "on cpu"),
    ("lse_shape", call("decode", out=(OUT, LSE[:3]), return_lse=True),
     ValueError, "out: lse must be float32 [4, 4] on cpu, got float32 [3, 4] on cpu"),
    ("out_strides", call("decode", out=torch.zeros(4, 16, 4).transpose(1, 2)),
     ValueError, "out must be contiguous, got strides (64, 1, 4)"),
    ("cache_strides", lambda: launch._kernel_caches(
        torch.zeros(6, 8, 2, 16), torch.zeros(6, 2, 8, 16).transpose(1, 2), 16),
     ValueError, "value_cache must have the strides of key_cache, with contiguous rows, got "
     "(256, 16, 128, 1) beside (256, 32, 16, 1)"),
    ("cache_steps", lambda: launch._kernel_caches(WIDE[..., :64], WIDE[..., :64], 64),
     ValueError, "key_cache must have strides that are multiples of 64 below 2**32, got "
     "(1536, 192, 96, 1)"),
    ("cache_steps_of_64_bits", lambda: launch._kernel_caches(FAR, FAR, 64),
     ValueError, "key_cache must have strides that are multiples of 64 below 2**32, got "
     "(4294967296, 128, 64, 1)"),
    ("cache_start", lambda: launch._kernel_caches(WIDE[..., :63], WIDE[..., 33:], 8),
     ValueError, "value_cache must start at a multiple of 16 bytes, got 4 past one"),
    ("merge_out", call("merge_states", out=OUT), TypeError, "out must be (out, lse), got Tensor"),
    ("merge_out_lse", call("merge_states", out=(OUT[:3], LSE)),
     ValueError, "out: lse must be float32 [3, 4] on cpu, got float32 [4, 4] on cpu"),
    ("no_kernel", no_kernel, NotImplementedError,
     "no kernel runs this decode:\ntrtllm_gen: needs capability 100, 103, this device "
     "has 70\n"),
    ("capture", constant_in_capture, RuntimeError,
     "call once with these shapes before capturing a CUDA graph"),
    ("phase", lambda: torch_core.explain(
        "train", num_qo_heads=1, num_kv_heads=1, head_dim=64, page_size=16),
     ValueError, "phase must be one of 'decode', 'prefill', got 'train'"),
    ("compiled_plan", compiled_plan, NotImplementedError,
     "plan_prefill must be called outside torch.compile: hand its result to the compiled code"),
    ("build", test_build.failed_build, RuntimeError,
     "torch_core could not build FlashInfer XQA: /x/prefill.cu(12): error: "),
    ("explain_head_dim", lambda: torch_core.explain(
        "decode", num_qo_heads=1, num_kv_heads=1, head_dim=0, page_size=16),
     ValueError, "head_dim must be in [1, 2147483647], got 0"),
    ("explain_dtype", lambda: torch_core.explain(
        "decode", num_qo_heads=1, num_kv_heads=1, head_dim=64, page_size=16, query_dtype=None),
     TypeError, "query_dtype must be a dtype or its name, got None"),
]  # fmt: skip


@pytest.mark.parametrize("wrong", errors.SHARED, ids=str)
def test_shared_message(wrong):
    """The error names the argument, what it must be and what it got."""
    with pytest.raises(wrong.error, match="^" + re.escape(wrong.message)):
        wrong.run(FRONT)


@pytest.mark.parametrize(
    "trigger, error, message", [row[1:] for row in OWN], ids=[r[0] for r in OWN]
)
def test_own_message(trigger, error, message):
    """Messages that only torch_core has."""
    with pytest.raises(error, match="^" + re.escape(message)):
        trigger()


@pytest.mark.parametrize("function", ["decode", "prefill", "append_kv", "merge_states"])
def test_unchanged_calls_are_valid(function):
    """The tables start from calls that work."""
    FRONT.call(function, errors.valid(function))


def test_every_raise_is_triggered():
    """No `raise` of the sources lacks a row in the tables; qsa and warmup have their own tests."""
    triggers = [lambda wrong=wrong: wrong.run(FRONT) for wrong in errors.SHARED]
    missing = errors.uncovered(torch_core, triggers + [row[1] for row in OWN])
    assert [place for place in missing if not place.startswith(("qsa/", "warmup/"))] == []


def test_the_count_sees_a_missing_row():
    """Without triggers, every raise is reported."""
    assert len(errors.uncovered(torch_core, [])) > 20
