"""What the GPU tests of faults share: a kernel and a configuration for each, calls, checks.

The configurations agree in what FlashInfer compiles for: dtypes, head_dim, window and soft cap, and
for XQA also page size, group size and q_len.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import torch_core
from tests import compare, faults, inputs, oracle
from tests.inputs import DTYPES, Case
from torch_core import reference

DEVICE = "cuda"
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
SIZES = dict(num_qo_heads=16, num_kv_heads=2, head_dim=128, dtype="bfloat16")


@dataclass(frozen=True)
class Path:
    """One kernel with one pair of dtypes."""

    name: str
    phase: str
    backend: str
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    lse: bool = True

    def __str__(self) -> str:
        return self.name

    def case(self, seq_lens: tuple, q_lens: tuple | None = None, **changes: Any) -> Case:
        """A call; `q_lens` counts for a prefill only (default: one row each)."""
        if self.phase == "decode":
            q_lens = None
        elif q_lens is None:
            q_lens = (1,) * len(seq_lens)
        own = dict(page_size=self.page_size, dtype=self.dtype, kv_dtype=self.kv_dtype)
        return Case(self.name, tuple(seq_lens), q_lens, **(SIZES | own | changes))


XQA = Path("xqa", "decode", "xqa", page_size=64, lse=False)
XQA_E4M3 = dataclasses.replace(XQA, name="xqa_e4m3", kv_dtype=E4M3)
DECODE = Path("native_decode", "decode", "native_decode")
DECODE_E4M3 = dataclasses.replace(DECODE, name="native_decode_e4m3", kv_dtype=E4M3)
FA3 = Path("fa3", "prefill", "native_prefill_fa3")
FA3_E4M3 = dataclasses.replace(FA3, name="fa3_e4m3_query", dtype=E4M3)
FA2 = Path("fa2", "prefill", "native_prefill_fa2")
FA2_E4M3 = dataclasses.replace(FA2, name="fa2_e4m3", kv_dtype=E4M3)

PATHS = [XQA, XQA_E4M3, DECODE, DECODE_E4M3, FA3, FA3_E4M3, FA2, FA2_E4M3]
NATIVE = [DECODE, FA3, FA2]
# What "auto" takes on Hopper for each kind of call: those go through JAX too.
AUTO = [XQA_E4M3, DECODE, FA3, FA2_E4M3]


def calls(paths: list[Path], from_jax: list[Path] = AUTO) -> pytest.MarkDecorator:
    """Parametrises `front` and `path`: all paths from torch, and those of `from_jax` from JAX."""
    pairs = [("torch", path) for path in paths]
    pairs += [("jax", path) for path in paths if path in from_jax]
    return pytest.mark.parametrize("front, path", pairs, ids=lambda value: str(value))


def run(front: str, name: str, arguments: dict[str, Any], **more: Any) -> Any:
    """Calls `name` of torch_core or, inside jit, of jaxattn on NumPy arguments."""
    if front == "jax":
        return faults.run(front, name, arguments, **more)
    return inputs.run_torch(getattr(torch_core, name), arguments | more, DEVICE)


def attend(
    front: str, path: Path, arguments: dict[str, Any], **more: Any
) -> tuple[np.ndarray, np.ndarray | None]:
    """out and lse (None where the kernel has none) of a call on the path's kernel."""
    more |= dict(backend=path.backend, return_lse=path.lse)
    results = run(front, path.phase, arguments, **more)
    return results if path.lse else (results, None)


def static_of(path: Path) -> tuple:
    """The static arguments of the path's calls of at most 64 rows a request, for `jitted`."""
    static = path.case((1,), (1,)).make() | dict(backend=path.backend, return_lse=path.lse)
    static = {name: v for name, v in static.items() if not isinstance(v, np.ndarray)}
    if path.phase == "prefill":
        static["max_seqlen_q"] = 64
    return tuple(sorted(static.items()))


def jitted(path: Path) -> Any:
    """The path's jaxattn call under jit, on a dictionary of arrays."""
    return faults.jitted(path.phase, static_of(path))


def first(result: Any) -> Any:
    """out of out and lse."""
    return result[0] if isinstance(result, tuple) else result


def bits(array: Any) -> np.ndarray:
    return inputs.to_numpy(array).view(np.uint8)


def on_device(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: inputs.to_torch(value, DEVICE) for name, value in arguments.items()}


def stack(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    """torch.stack, for fp8 by way of its bytes."""
    kind = tensors[0].dtype
    raw = torch.uint8 if tensors[0].element_size() == 1 else kind
    return torch.stack([tensor.view(raw) for tensor in tensors], dim).view(kind)


def check(arguments: dict[str, Any], out: np.ndarray, lse: np.ndarray | None = None) -> None:
    """Against the oracle in float64: at most twice the error of the same maths in the kernel's
    dtype, plus a few roundings."""
    exact = oracle.attention(**arguments)
    for actual, right, plain in zip((out, lse), exact, rounded(arguments), strict=True):
        if actual is not None:
            compare.check(actual, right, plain, "out" if actual is out else "lse")


def rounded(arguments: dict[str, Any]) -> list[np.ndarray]:
    """out and lse with every intermediate in bfloat16; under an e4m3 query, as the kernel does,
    with weights in e4m3. A native kernel takes what the score scale is beyond head_dim ** -0.5 by
    way of the query, and keeps scores in float32: of lse, what is worse with them so or so."""
    if arguments["query"].dtype.name == E4M3:
        return e4m3_weights(arguments)
    phase = faults.phase_of(arguments)
    out, lse = _evaluated(phase, arguments, torch.bfloat16)
    if phase == "prefill" or arguments.get("return_lse") or arguments.get("soft_cap") is not None:
        query = arguments["query"]
        default = query.shape[-1] ** -0.5
        factor = np.float32(arguments.get("sm_scale", default)) / np.float32(default)
        factor *= np.float32(arguments.get("k_scale", 1.0))
        if not np.isclose(factor, 1.0, rtol=1e-6):
            _, exact = _evaluated(phase, arguments, torch.float64)
            query = (query.astype(np.float32) * factor).astype(query.dtype)
            arguments = arguments | dict(query=query, sm_scale=default, k_scale=1.0)
            out, lse = _evaluated(phase, arguments, torch.bfloat16)
            _, other = _evaluated(phase, arguments, torch.float32)
            with np.errstate(invalid="ignore"):
                lse = np.where(abs(lse - exact) > abs(other - exact), lse, other)
    return [out, lse]


def _evaluated(
    phase: str, arguments: dict[str, Any], compute_dtype: torch.dtype
) -> tuple[np.ndarray, ...]:
    results = reference.evaluate(phase, **on_device(arguments), compute_dtype=compute_dtype)
    return tuple(result.double().cpu().numpy() for result in results)


def e4m3_weights(arguments: dict[str, Any]) -> list[np.ndarray]:
    """A prefill in float32 with its softmax weights, times 448, rounded to e4m3, and its scores
    summed as Hopper's fp8 tensor cores do."""
    number = {n: float(arguments.get(n) or 1.0) for n in ("q_scale", "k_scale", "v_scale")}
    query = arguments["query"].astype(np.float32)
    sm_scale = arguments.get("sm_scale")
    scale = query.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    scale *= number["q_scale"] * number["k_scale"]
    out = np.zeros(query.shape)
    lse = np.full(query.shape[:2], -np.inf)
    if arguments.get("sinks") is not None:
        lse[:] = arguments["sinks"]
    for row, (request, position) in enumerate(faults.positions(arguments)):
        length = int(arguments["seq_lens"][request])
        causal, window = arguments.get("causal", True), arguments.get("window_left", -1)
        seen = oracle.mask_of_row(position, length, causal, window)
        sinks = arguments.get("sinks")
        if not seen.any():
            continue
        key, value = (
            oracle.tokens(cache, arguments["page_table"][request], length, arguments["kv_layout"])
            for cache in (arguments["key_cache"], arguments["value_cache"])
        )
        key, value = (x[seen].astype(np.float32) for x in (key, value))
        group = query.shape[1] // key.shape[1]
        heads = query[row].reshape(key.shape[1], group, -1)
        scores = fp8_sums(heads[:, :, None] * key.swapaxes(0, 1)[:, None]) * scale
        if arguments.get("soft_cap") is not None:
            scores = arguments["soft_cap"] * np.tanh(scores / arguments["soft_cap"])
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        if sinks is not None:
            total += np.exp(sinks.reshape(total.shape) - top)
        weights = (weights * 448).astype(DTYPES[E4M3]).astype(np.float32) / 448
        result = np.einsum("hgt,thd->hgd", weights, value) / total * number["v_scale"]
        out[row] = result.reshape(out[row].shape)
        lse[row] = (np.log(total) + top).reshape(-1)
    return [out, lse]


def fp8_sums(products: np.ndarray) -> np.ndarray:
    """Sums over the last axis as Hopper's fp8 tensor cores make them: 32 products and the sum so
    far at a time, each cut to 13 bits below the largest one's leading bit."""
    total = np.zeros((*products.shape[:-1], 1))
    for start in range(0, products.shape[-1], 32):
        terms = np.concatenate([total, products[..., start : start + 32]], -1)
        largest = np.maximum(np.abs(terms).max(-1, keepdims=True), 1e-30)
        step = 2.0 ** (np.floor(np.log2(largest)) - 13)
        total = np.trunc(terms / step).sum(-1, keepdims=True) * step
    return total[..., 0]


def check_visible(
    arguments: dict[str, Any], out: np.ndarray, lse: np.ndarray | None, visible: list[range]
) -> None:
    """Asserts that row i of a UNIFORM call sees exactly the keys visible[i]."""
    head_dim = out.shape[-1]
    counts = np.array([len(keys) for keys in visible])
    expected = np.array(
        [np.bincount(np.array(keys, int) % head_dim, minlength=head_dim) for keys in visible]
    )
    expected = (expected / np.maximum(counts, 1)[:, None])[:, None]
    np.testing.assert_allclose(
        out.astype(np.float64),
        np.broadcast_to(expected, out.shape),
        rtol=float(ml_dtypes.finfo(out.dtype).eps),
    )
    if lse is not None:
        with np.errstate(divide="ignore"):
            logs = np.broadcast_to(np.log(counts)[:, None], lse.shape)
        np.testing.assert_allclose(lse, logs, rtol=4e-6, atol=4e-6)


def window_of(arguments: dict[str, Any], window_left: int) -> list[range]:
    """The keys that each row sees through a causal window."""
    return [range(max(0, p - window_left), p + 1) for _, p in faults.positions(arguments)]


def poisoned(
    arguments: dict[str, Any],
    fill: float,
    caches: tuple[str, ...] = ("key_cache", "value_cache"),
) -> dict[str, Any]:
    """The call with every slot past its request's length, and every unused page, set to `fill`."""
    used = np.zeros(faults.nhd(arguments["key_cache"], arguments["kv_layout"]).shape[:2], bool)
    for request in range(len(arguments["seq_lens"])):
        used[faults.token_places(arguments, request)] = True
    changed = dict(arguments)
    for name in caches:
        changed[name] = arguments[name].copy()
        faults.nhd(changed[name], arguments["kv_layout"])[~used] = fill
    return changed


def same_bits(actual: tuple, expected: tuple) -> bool:
    """Whether results of `attend` are equal bit by bit."""
    return faults.same_bits(
        tuple(x for x in actual if x is not None), tuple(x for x in expected if x is not None)
    )


def repeated(arguments: dict[str, Any], times: int) -> dict[str, Any]:
    """A decode or a prefill of one-row requests with its whole batch `times` times."""
    changed = {
        name: np.tile(arguments[name], (times, *(1,) * (arguments[name].ndim - 1)))
        for name in ("query", "page_table", "seq_lens")
    }
    if "cu_seqlens_q" in arguments:
        changed["cu_seqlens_q"] = np.arange(len(changed["query"]) + 1, dtype=np.int32)
    return arguments | changed
