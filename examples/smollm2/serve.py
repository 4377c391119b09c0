"""Continuous batching: requests join a running batch and leave it at any step. `--help` lists the
options."""

import argparse
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import params
import torch
from modeling import Batch, Engine, init_caches

from jaxattn import paging


@dataclass(eq=False)
class Request:
    """A prompt, and the tokens that were made for it so far."""

    prompt: list[int]
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)
    fed: int = 0  # tokens of the prompt, then of the answer, that are in the cache

    @property
    def left(self) -> int:
        """Tokens that must go through the model before it can make the next one."""
        return len(self.prompt) + len(self.tokens) - self.fed

    def feed(self, count: int) -> list[int]:
        start, self.fed = self.fed, self.fed + count
        return (self.prompt + self.tokens)[start : self.fed]


class Server:
    """A batch of `slots` requests over one pool of pages; further requests wait.

    A request joins as soon as a slot is empty and the pool has pages for the longest it may become.
    Each pass then adds a token to every request whose prompt is through, and feeds the others a
    piece of their prompt in the rows that are left. Shapes never change: there is one program for
    passes with pieces of prompts, and one for those without.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        slots: int,
        num_pages: int,
        max_len: int,
        page_size: int = 16,
        prefill_chunk: int = 128,
        eos_ids: frozenset[int] = frozenset(),
        seed: int = 0,
    ):
        self.engine, self.eos_ids, self.max_len = engine, eos_ids, max_len
        # Every request has a row in every pass, and no two programs have the same number of rows.
        self.rows = max(prefill_chunk, slots + 1)
        self.waiting: deque[Request] = deque()
        self.running: list[Request | None] = [None] * slots
        self.pool = paging.PagePool.empty(
            num_pages=num_pages,
            page_size=page_size,
            batch=slots,
            pages_per_seq=-(-max_len // page_size),
        )
        self.caches = init_caches(engine.config, num_pages, page_size)
        self.key, self.passes = jax.random.key(seed), 0
        self.run = jax.jit(self._pass, donate_argnames=("caches", "pool"))

    def submit(self, prompt: list[int], max_new_tokens: int) -> Request:
        """Puts a request in the queue; its `tokens` grow as passes are made."""
        most = min(self.max_len, self.pool.ref_counts.size * self.pool.page_size)
        if not prompt or max_new_tokens < 1 or len(prompt) + max_new_tokens > most:
            raise ValueError(
                f"prompt and max_new_tokens must be 1 or more and at most {most} together, got "
                f"{len(prompt)} and {max_new_tokens}"
            )
        self.waiting.append(Request(prompt, max_new_tokens))
        return self.waiting[-1]

    def step(self) -> list[Request]:
        """Makes one pass, if there is work; returns the requests that it finished."""
        self._admit()
        present = [(slot, each) for slot, each in enumerate(self.running) if each is not None]
        if not present:
            return []
        counts = np.zeros(len(self.running), np.int32)
        pieces, spare = [], self.rows - len(present)
        for slot, request in present:
            more = min(request.left - 1, spare)
            spare -= more
            counts[slot] = 1 + more
            pieces += request.feed(1 + more)
        if counts.max() == 1:
            tokens = np.zeros(len(self.running), np.int32)
            tokens[counts > 0] = pieces
        else:
            tokens = np.array(pieces + [0] * (self.rows - len(pieces)), np.int32)
        count = np.int32(self.passes)
        picked, self.caches, self.pool = self.run(
            self.engine.state, self.caches, self.pool, tokens, counts, self.key, count
        )
        self.passes += 1
        return self._take(np.asarray(picked), present)

    def _pass(self, state, caches, pool, tokens, counts, key, count):
        """Row i of a pass of `slots` rows is the token of slot i; otherwise the tokens of all slots
        are packed, and `counts` says how many each has."""
        start, slots = pool.seq_lens, len(counts)
        pool, _ = paging.append(pool, counts)  # `_admit` made sure of the pages
        seq_lens = jnp.where(counts > 0, pool.seq_lens, 0)
        if len(tokens) == slots:
            batch = Batch(jnp.where(counts > 0, start, -1), pool.page_table, seq_lens)
        else:
            ends = jnp.cumsum(counts)
            row = jnp.arange(len(tokens))
            ids = jnp.minimum(jnp.searchsorted(ends, row, side="right"), slots - 1)
            positions = jnp.where(row < ends[-1], start[ids] + row - (ends - counts)[ids], -1)
            offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
            batch = Batch(positions, pool.page_table, seq_lens, ids, offsets)
        return *self.engine.step(state, caches, tokens, batch, key, count), pool

    def _admit(self) -> None:
        """Moves waiting requests to empty slots, in their order, while there are pages."""
        empty = [slot for slot, each in enumerate(self.running) if each is None]
        joining = list(zip(empty, self.waiting, strict=False))
        if not joining:
            return
        lengths = np.zeros(len(self.running), np.int32)
        for slot, request in joining:
            lengths[slot] = len(request.prompt) + request.max_new_tokens
        self.pool, ok = paging.alloc(self.pool, lengths)
        for slot, request in joining:
            if ok[slot]:
                self.running[slot] = request
                self.waiting.remove(request)

    def _take(self, picked: np.ndarray, present: list[tuple[int, Request]]) -> list[Request]:
        """Hands each request its token, and empties the slots of those that are finished."""
        done = np.zeros(len(self.running), bool)
        finished = []
        for slot, request in present:
            if request.left:  # in the middle of its prompt
                continue
            request.tokens.append(int(picked[slot]))
            done[slot] = (
                request.tokens[-1] in self.eos_ids or len(request.tokens) == request.max_new_tokens
            )
            if done[slot]:
                self.running[slot] = None
                finished.append(request)
        if finished:
            self.pool = paging.free(self.pool, done)
        return finished


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="serve.py", description=__doc__)
    add = parser.add_argument
    add("prompts", nargs="+", metavar="PROMPT")
    add("--model", type=Path, metavar="PATH", help="GGUF file or Hugging Face directory")
    add("--slots", type=int, default=2, help="requests that run at once")
    add("--num-pages", type=int, default=64, help="pages of 16 tokens in the pool")
    add("--max-new-tokens", type=int, default=32)
    options = parser.parse_args(arguments)
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    torch.set_num_threads(1)  # see run.py
    try:
        model, tokenizer, eos_ids = params.load(options.model or params.fetch_default(), dtype)
        server = Server(
            Engine(model),
            slots=options.slots,
            num_pages=options.num_pages,
            max_len=min(model.config.context_length, 16 * options.num_pages),
            eos_ids=eos_ids,
        )
        names = {
            server.submit(tokenizer.encode(prompt).ids, options.max_new_tokens): prompt
            for prompt in options.prompts
        }
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))
    while server.waiting or any(server.running):
        for request in server.step():
            print(f"> after pass {server.passes}: {names[request]}")
            print(f"{names[request]}{tokenizer.decode(request.tokens)}\n")


if __name__ == "__main__":
    main()
