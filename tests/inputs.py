"""Random calls as NumPy arrays, and the ways from there to torch and JAX."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

from . import oracle

DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
}


@dataclass(frozen=True)
class Case:
    """A call by its parameters; `make` draws its arrays."""

    name: str
    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None  # given: prefill; not given: decode
    q_len: int = 1
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 8
    dtype: str = "float32"
    kv_dtype: str | None = None
    kv_layout: str = "NHD"
    sinks: bool = False
    draft_mask: str | None = None  # "bool" or "packed"
    extra_pages: int = 3
    extra_rows: int = 0
    options: dict[str, Any] = field(default_factory=dict)  # passed to the call as they are

    def __str__(self) -> str:
        return self.name

    @property
    def phase(self) -> str:
        return "decode" if self.q_lens is None else "prefill"

    def make(self, seed: int = 0) -> dict[str, Any]:
        """The keyword arguments of the call, arrays as NumPy arrays."""
        rng = np.random.default_rng(seed)
        batch = len(self.seq_lens)
        needed = [-(-length // self.page_size) for length in self.seq_lens]
        pages_per_seq = max(needed, default=0) + 1
        num_pages = sum(needed) + self.extra_pages
        order = rng.permutation(num_pages)
        # Entries past a request's pages are garbage of every kind.
        garbage = [-1, num_pages, 2**31 - 1, -(2**31), 7]
        page_table = rng.choice(garbage, (batch, pages_per_seq)).astype(np.int32)
        at = 0
        for request, count in enumerate(needed):
            page_table[request, :count] = order[at : at + count]
            at += count
        token_axes = (self.page_size, self.num_kv_heads)
        if self.kv_layout == "HND":
            token_axes = token_axes[::-1]
        cache_shape = (num_pages, *token_axes, self.head_dim)
        kv_dtype = DTYPES[self.kv_dtype or self.dtype]
        rows = batch * self.q_len if self.q_lens is None else sum(self.q_lens) + self.extra_rows
        arguments: dict[str, Any] = dict(
            query=normal(rng, (rows, self.num_qo_heads, self.head_dim), DTYPES[self.dtype]),
            key_cache=normal(rng, cache_shape, kv_dtype),
            value_cache=normal(rng, cache_shape, kv_dtype),
            page_table=page_table,
            seq_lens=np.array(self.seq_lens, np.int32),
            kv_layout=self.kv_layout,
        )
        if self.sinks:
            arguments["sinks"] = rng.normal(size=self.num_qo_heads).astype(np.float32)
        if self.q_lens is not None:
            arguments["cu_seqlens_q"] = np.cumsum([0, *self.q_lens]).astype(np.int32)
            arguments["max_seqlen_q"] = max(self.q_lens, default=0)
        else:
            arguments["q_len"] = self.q_len
            if self.draft_mask:
                mask = rng.random((batch, self.q_len, self.q_len)) < 0.6
                arguments["draft_mask"] = mask if self.draft_mask == "bool" else oracle.pack(mask)
        return arguments | self.options


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32).astype(dtype)


def to_torch(array: Any, device: str = "cpu") -> Any:
    """A NumPy array as a tensor of its own memory; anything else as it is."""
    if not isinstance(array, np.ndarray):
        return array
    array = np.ascontiguousarray(array).copy() if array.ndim else array.copy()
    if (
        array.dtype in DTYPES.values() and array.dtype.kind not in "f"
    ) or array.dtype.name in DTYPES:
        bits = array.view(f"u{array.dtype.itemsize}")
        return torch.from_numpy(bits).view(getattr(torch, array.dtype.name)).to(device)
    return torch.from_numpy(array).to(device)


def to_jax(array: Any) -> Any:
    """A NumPy array as a JAX array; anything else as it is."""
    return jnp.array(array) if isinstance(array, np.ndarray) else array


def to_numpy(array: Any) -> np.ndarray:
    """A tensor or JAX array as a NumPy array of the same dtype."""
    if isinstance(array, torch.Tensor):
        name = str(array.dtype).removeprefix("torch.")
        if name in DTYPES:
            bits = (
                array.detach().cpu().contiguous().view(getattr(torch, f"uint{array.itemsize * 8}"))
            )
            return bits.numpy().view(DTYPES[name])
        return array.detach().cpu().numpy()
    return np.asarray(array)


def run_torch(function: Any, arguments: dict[str, Any], device: str = "cpu", **more: Any) -> Any:
    """Calls a torch_core function on NumPy arguments; results as NumPy arrays."""
    tensors = {name: to_torch(value, device) for name, value in arguments.items()}
    return _map(to_numpy, function(**tensors, **more))


def run_jax(function: Any, arguments: dict[str, Any], **more: Any) -> Any:
    """Calls a jaxattn function inside jit on NumPy arguments, every array traced."""
    arrays = {name: to_jax(v) for name, v in arguments.items() if isinstance(v, np.ndarray)}
    static = {name: v for name, v in arguments.items() if not isinstance(v, np.ndarray)} | more
    return _map(np.asarray, jax.jit(lambda arrays: function(**arrays, **static))(arrays))


def _map(function: Any, result: Any) -> Any:
    return tuple(map(function, result)) if isinstance(result, tuple) else function(result)
