"""The modules of the QSA example, and what feeds tokens to them in any pieces."""

import importlib
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import nnx

EXAMPLE = Path(__file__).parents[2] / "examples" / "qsa_decoder"
NAMES = ("modeling", "params", "needle", "run")
DECODE_STEPS = 64

Counts = Iterable[tuple[int, ...]]


def load_example() -> list[ModuleType]:
    """The example's modules; other examples have some of these names, so none is left behind."""
    others = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    sys.path.insert(0, str(EXAMPLE))
    try:
        return [importlib.import_module(name) for name in NAMES]
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in NAMES:
            sys.modules.pop(name, None)
        sys.modules.update(others)


modeling, params, needle, run = load_example()


class Server:
    """Feeds sequences of any length to one layer, or to a decoder, in any pieces."""

    def __init__(self, config, module: nnx.Module, inputs: list[np.ndarray], page_size: int = 16):
        self.config, self.inputs, self.page_size = config, inputs, page_size
        graph, self.state = nnx.split(module)
        tables = modeling.rotary_tables(config)

        def forward(state, caches, x, batch, num_decodes):
            module = nnx.merge(graph, state)
            mode = modeling.Mode(num_decodes=num_decodes)
            if isinstance(module, modeling.Decoder):
                x, caches = module(x, batch, caches, mode)
                return module.logits(x), caches
            step = modeling.begin_step(config, tables, batch, caches[0], mode, len(x))
            x, cache = module(x, step, caches[0])
            return x, [cache]

        self.forward = jax.jit(forward, static_argnames="num_decodes", donate_argnames="caches")
        self.restart()

    def restart(self) -> None:
        """Empty caches; the pages lie in random order."""
        pages_per_seq = -(-max(map(len, self.inputs)) // self.page_size)
        pages = np.random.default_rng(1).permutation(len(self.inputs) * pages_per_seq)
        self.page_table = pages.reshape(len(self.inputs), -1).astype(np.int32)
        self.caches = modeling.init_caches(
            self.config, pages.size, self.page_size, len(self.inputs)
        )
        self.done = np.zeros(len(self.inputs), np.int32)
        self.outputs: list[list[np.ndarray]] = [[] for _ in self.inputs]

    def feed(self, counts: Counts, rows: int, num_decodes: int = 0) -> None:
        """Runs one pass for each tuple of counts: the next tokens of each request."""
        for each in counts:
            parts = [x[d : d + n] for x, d, n in zip(self.inputs, self.done, each, strict=True)]
            self.done = self.done + np.array(each, np.int32)
            x = np.concatenate(parts)
            x = np.pad(x, [(0, rows - len(x))] + [(0, 0)] * (x.ndim - 1))
            offsets = np.cumsum([0, *each]).astype(np.int32)
            # A request without a row in this pass is left alone.
            seq_lens = np.where(np.array(each) > 0, self.done, 0).astype(np.int32)
            batch = modeling.Batch(self.page_table, seq_lens, offsets)
            out, self.caches = self.forward(self.state, self.caches, x, batch, num_decodes)
            out = np.asarray(out).astype(np.float64)
            for request, output in enumerate(self.outputs):
                output.append(out[offsets[request] : offsets[request + 1]])

    def results(self) -> list[np.ndarray]:
        assert self.done.tolist() == list(map(len, self.inputs))
        return [np.concatenate(output) for output in self.outputs]


def odd_counts(lengths: list[int], limit: int, seed: int) -> list[tuple[int, ...]]:
    """Chunks of 0 to `limit` tokens of each request until all are fed."""
    rng, left, counts = random.Random(seed), list(lengths), []
    while any(left):
        counts.append(tuple(min(rng.randrange(limit + 1), n) for n in left))
        left = [n - c for n, c in zip(left, counts[-1], strict=True)]
    return [each for each in counts if any(each)]


def all_ways(server: Server, limit: int, seed: int) -> dict[str, list[np.ndarray]]:
    """The outputs of a prefill at once, of one in chunks, and of a prefill and decode steps."""
    lengths, rows = list(map(len, server.inputs)), limit * len(server.inputs)
    found = {}
    server.feed([tuple(lengths)], sum(lengths) + 3)
    found["at once"] = server.results()
    server.restart()
    server.feed(odd_counts(lengths, limit, seed), rows)
    found["in chunks"] = server.results()
    server.restart()
    server.feed(odd_counts([n - DECODE_STEPS for n in lengths], limit, seed + 1), rows)
    ones = (1,) * len(lengths)
    server.feed([ones] * DECODE_STEPS, len(lengths), num_decodes=len(lengths))
    found["steps"] = server.results()
    return found
