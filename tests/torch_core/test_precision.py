"""Errors of the GPU's kernels against float64: no more than twice those of the same maths done
plainly in the kernel's dtype, in the largest and in the mean, without any allowance.

`pytest -m gpu -rP tests/torch_core/test_precision.py` prints the ratios.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torch_core
from tests import inputs
from tests.inputs import Case
from tests.torch_core.qsa import test_attend_kernels as sparse
from torch_core import qsa, reference

pytestmark = pytest.mark.gpu

DECODE = Case("decode", (5, 1, 17, 300, 64, 2000, 640, 4096), num_qo_heads=64, num_kv_heads=8,
              head_dim=128, page_size=64)  # fmt: skip
DRAFTS = replace(DECODE, q_len=4, seq_lens=(5, 4, 17, 300, 64, 2000, 640, 4096))
PREFILL = replace(DECODE, seq_lens=(300, 17, 8, 640, 2000), q_lens=(100, 17, 8, 1, 512))
PATHS = {
    "xqa": DECODE,
    "xqa drafts": DRAFTS,
    "native_decode": DECODE,
    "native_prefill_fa2": PREFILL,
    "native_prefill_fa3": PREFILL,
}
SCALES = {"sm_scale", "k_scale", "v_scale"}
E4M3: dict[str, Any] = dict(kv_dtype="float8_e4m3fn", options=dict(k_scale=0.25, v_scale=0.5))


def check_ratios(label: str, actual: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor):
    """Asserts both ratios of `actual`'s errors to `plain`'s."""
    exact = exact.double().cpu()
    finite = torch.isfinite(exact)
    errors = [(x.double().cpu() - exact)[finite].abs() for x in (actual, plain)]
    largest, mean = (reduce(errors[0]) / reduce(errors[1]) for reduce in (torch.max, torch.mean))
    print(f"{label}: largest error {largest:.2f} of plain maths', mean {mean:.2f}")
    assert largest <= 2 and mean <= 2


def check(label: str, case: Case, backend: str, plain: Callable[..., Any]) -> None:
    """Calls a kernel and holds out, and lse where the kernel gives one, against `plain`."""
    arguments = {name: inputs.to_torch(x, "cuda") for name, x in case.make().items()}
    return_lse = backend != "xqa"
    result = getattr(torch_core, case.phase)(**arguments, backend=backend, return_lse=return_lse)
    exact = reference.evaluate(case.phase, **arguments)
    results = result if return_lse else (result,)
    for name, *three in zip(("out", "lse"), results, exact, plain(arguments, case), strict=False):
        check_ratios(f"{label} {name}", *three)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kv_dtype", ["same", "e4m3"])
@pytest.mark.parametrize("path", PATHS)
def test_at_most_twice_the_error(path, kv_dtype, dtype):
    """FlashInfer's kernels, each dtype of queries and caches."""
    case = replace(PATHS[path], dtype=dtype)
    if kv_dtype == "e4m3":
        if path == "native_prefill_fa3":
            pytest.skip("FA3 takes e4m3 caches with e4m3 queries only")
        case = replace(case, **E4M3)

    def plain(arguments, case):
        compute_dtype = getattr(torch, dtype)
        return reference.evaluate(case.phase, **arguments, compute_dtype=compute_dtype)

    check(f"{path} {dtype} {kv_dtype}", case, path.split()[0], plain)


def test_at_most_twice_the_error_of_8_bits():
    """FA3 on e4m3 queries, whose products with the values take weights of e4m3."""

    def plain(arguments, case):
        query = arguments["query"].double()
        out = torch.zeros(query.shape, dtype=torch.float32, device="cuda")
        _, lse = reference.evaluate(case.phase, **arguments, compute_dtype=torch.bfloat16)
        start = 0
        for request, (length, rows) in enumerate(zip(case.seq_lens, case.q_lens, strict=True)):
            pages = arguments["page_table"][request, : -(-length // case.page_size)].long()
            key, value = (
                arguments[name].view(torch.uint8)[pages].view(torch.float8_e4m3fn)
                .flatten(0, 1)[:length].float().repeat_interleave(8, 1)
                for name in ("key_cache", "value_cache")
            )  # fmt: skip
            scores = torch.einsum("qhd,khd->hqk", query[start : start + rows].float(), key)
            scores = scores * (0.25 * case.head_dim**-0.5)
            seen = torch.arange(length, device="cuda") <= (
                torch.arange(rows, device="cuda")[:, None] + length - rows
            )
            scores = torch.where(seen, scores, float("-inf"))
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            sums = weights.sum(-1).T[..., None]
            rounded = weights.to(torch.float8_e4m3fn).float()
            out[start : start + rows] = torch.einsum("hqk,khd->qhd", rounded, value) / sums * 0.5
            start += rows
        return out, lse

    case = replace(PREFILL, dtype="float8_e4m3fn", **E4M3)
    check("native_prefill_fa3 e4m3 e4m3", case, "native_prefill_fa3", plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("path", sparse.PATHS)
def test_sparse_at_most_twice_the_error(path, kv_dtype, dtype):
    """QSA attention, each path of it."""
    positions = [list(range(4000, 4040)), [2000], [11, 12, 700]]
    sizes: dict[str, Any] = dict(group_size=12, head_dim=256, page_size=64, topk=128)
    case = sparse.make(positions, **sizes, dtype=dtype, kv_dtype=kv_dtype, keep=0.8)
    results = sparse.run(case, path, "cuda")
    exact, plain = (
        qsa.reference.attend(
            **{name: x for name, x in case.arrays.items() if name not in SCALES | {"request_ids"}},
            metadata=SimpleNamespace(request_ids=case.arrays["request_ids"]),
            **{name: float(case.arrays[name]) for name in SCALES},
            compute_dtype=compute_dtype,
            out_dtype=compute_dtype,
        )
        for compute_dtype in (torch.float64, dtype)
    )
    for name, *three in zip(("out", "lse"), exact, plain, strict=True):
        check_ratios(f"{path} {dtype} {kv_dtype} {name}", results[name], *three)
