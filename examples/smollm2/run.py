"""Continues prompts with a Llama-family model on paged caches: `--help` lists the options."""

import argparse
import itertools
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import jax
import numpy as np
import params
import torch
from modeling import Batch, Engine, Ints, Sampling, init_caches
from tokenizers import Tokenizer

from torch_core.dispatch import BACKENDS

DEFAULT_PROMPT = "The capital of France is"
MAX_PAGE_SIZE = 4096


@dataclass
class Generation:
    """What `generate` made: the new tokens of each prompt, its EOS included, and the times."""

    tokens: list[list[int]]
    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0

    @property
    def decode_tokens(self) -> int:
        """All but the first of each prompt, which prefill makes."""
        return sum(len(tokens) - 1 for tokens in self.tokens)


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_ids: frozenset[int] = frozenset(),
    page_size: int = 16,
    prefill_chunk: int = 512,
    seed: int = 0,
    on_token: Callable[[int, int], None] = lambda request, token: None,
) -> Generation:
    """Continues token sequences as one batch; `on_token(request, token)` sees each as it comes."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    page_table = assign_pages(lengths + max_new_tokens, page_size)
    caches = init_caches(engine.config, int(page_table.max()) + 1, page_size)
    chunks = list(prefill_chunks(prompts, page_table, prefill_chunk))
    key, count = jax.random.key(seed), map(np.int32, itertools.count())
    result = Generation([[] for _ in prompts], prompt_tokens=int(lengths.sum()))
    running = np.ones(len(prompts), bool)

    def take(requests: np.ndarray, tokens: Ints) -> None:
        """Reads the tokens of some requests, which waits until they are computed."""
        tokens = np.asarray(tokens)
        for request in requests:
            token = int(tokens[request])
            result.tokens[request].append(token)
            done = token in eos_ids or len(result.tokens[request]) == max_new_tokens
            running[request] = not done
            on_token(int(request), token)

    start = time.perf_counter()
    tokens = np.zeros(len(prompts), np.int32)
    engine.compile(caches, *chunks[0][:2], key, np.int32(0))
    if max_new_tokens > 1:
        batch = decode_batch(lengths, running, page_table)
        engine.compile(caches, tokens, batch, key, np.int32(0))
    result.compile_seconds = time.perf_counter() - start

    start = time.perf_counter()
    for chunk, batch, ended in chunks:
        tokens, caches = engine(caches, chunk, batch, key, next(count))
        take(ended, tokens)
    result.prefill_seconds = time.perf_counter() - start

    start = time.perf_counter()
    tokens = np.array([tokens[-1] for tokens in result.tokens], np.int32)
    positions = lengths
    while running.any():
        batch = decode_batch(positions, running, page_table)
        tokens, caches = engine(caches, tokens, batch, key, next(count))
        take(np.flatnonzero(running), tokens)
        positions = positions + 1
    result.decode_seconds = time.perf_counter() - start
    return result


def assign_pages(lengths: np.ndarray, page_size: int) -> np.ndarray:
    """Gives each request the pages for its length; int32 [batch, pages_per_seq], 0 where unused."""
    counts = -(-lengths // page_size)
    page_table = np.zeros((len(lengths), counts.max()), np.int32)
    used = np.arange(counts.max()) < counts[:, None]
    page_table[used] = np.arange(counts.sum())
    return page_table


def prefill_chunks(
    prompts: Sequence[Sequence[int]], page_table: np.ndarray, chunk: int
) -> Iterator[tuple[np.ndarray, Batch, np.ndarray]]:
    """Packs the prompts into chunks of one fixed number of rows, so that one program runs them all.

    Yields the tokens, where they belong, and the requests whose prompt ends in the chunk.
    """
    lengths = [len(prompt) for prompt in prompts]
    total = sum(lengths)
    # A power of two: few programs for many lengths.
    rows = min(chunk, 1 << (total - 1).bit_length())
    tokens = np.concatenate(prompts).astype(np.int32)
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    request_ids = np.repeat(np.arange(len(prompts), dtype=np.int32), lengths)
    ends = np.cumsum(lengths)
    for start in range(0, total, rows):
        stop = min(start + rows, total)
        padding = (0, rows - (stop - start))
        ids = request_ids[start:stop]
        counts = np.bincount(ids, minlength=len(prompts))
        seq_lens = np.zeros(len(prompts), np.int32)
        np.maximum.at(seq_lens, ids, positions[start:stop] + 1)
        batch = Batch(
            positions=np.pad(positions[start:stop], padding, constant_values=-1),
            page_table=page_table,
            seq_lens=seq_lens,
            request_ids=np.pad(ids, padding),
            cu_seqlens_q=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        )
        ended = np.flatnonzero((ends > start) & (ends <= stop))
        yield np.pad(tokens[start:stop], padding), batch, ended


def decode_batch(positions: np.ndarray, running: np.ndarray, page_table: np.ndarray) -> Batch:
    """One new token for each running request; the others keep a row that does nothing."""
    positions = np.where(running, positions, -1).astype(np.int32)
    return Batch(positions=positions, page_table=page_table, seq_lens=positions + 1)


@dataclass
class TextStream:
    """Turns tokens into text as they come, holding back characters that are not complete yet."""

    tokenizer: Tokenizer
    tokens: list[int] = field(default_factory=list)
    written: int = 0

    def push(self, token: int) -> str:
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens)
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._new(text)

    def finish(self) -> str:
        return self._new(self.tokenizer.decode(self.tokens))

    def _new(self, text: str) -> str:
        new, self.written = text[self.written :], len(text)
        return new


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without argparse's usage block."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse(arguments: Sequence[str] | None) -> tuple[Parser, argparse.Namespace]:
    parser = Parser(prog="run.py", description=__doc__)
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help=f"several make a batch; {DEFAULT_PROMPT!r}")
    add("--model", type=Path, metavar="PATH", help="GGUF file or Hugging Face directory")
    add("--max-new-tokens", type=int, default=64)
    add("--temperature", type=float, default=0.0, help="0: the most likely token, always")
    add("--top-p", type=float, default=1.0, help="sample among this share of the probability")
    add("--seed", type=int, default=0)
    add("--page-size", type=int, default=16, help="tokens in a page of the cache")
    add("--prefill-chunk", type=int, default=512, help="most prompt tokens in one step")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="bfloat16; float32 on a CPU")
    add("--backend", default="auto", help="kernel of the decode steps, as in jaxattn.decode")
    add("--json", action="store_true", help="one line a prompt: prompt, tokens, text")
    options = parser.parse_args(arguments)
    options.prompts = options.prompts or [DEFAULT_PROMPT]
    if not (options.temperature >= 0 and math.isfinite(options.temperature)):
        parser.error(f"--temperature must be 0 or more, got {options.temperature}")
    if not 0 < options.top_p <= 1:
        parser.error(f"--top-p must be above 0 and at most 1, got {options.top_p}")
    for name in ("max_new_tokens", "page_size", "prefill_chunk"):
        if getattr(options, name) < 1:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} must be 1 or more, got {getattr(options, name)}")
    for name, high in (("page_size", MAX_PAGE_SIZE), ("seed", 2**63 - 1)):
        if getattr(options, name) > high:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} must be at most {high}, got {getattr(options, name)}")
    if options.backend not in BACKENDS:
        names = ", ".join(map(repr, BACKENDS))
        parser.error(f"--backend must be one of {names}, got {options.backend!r}")
    for prompt in options.prompts:
        if not prompt:
            parser.error("PROMPT must not be empty")
        if not prompt.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in prompt):
            parser.error("PROMPT must be UTF-8")
    return parser, options


def main(arguments: Sequence[str] | None = None) -> None:
    parser, options = parse(arguments)
    dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    try:
        path = options.model or params.fetch_default()
    except (OSError, RuntimeError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    try:
        model, tokenizer, eos_ids = params.load(path, dtype)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    prompts = [tokenizer.encode(prompt).ids for prompt in options.prompts]
    limit = model.config.context_length
    for text, prompt in zip(options.prompts, prompts, strict=True):
        if not prompt:
            parser.error(f"PROMPT must hold at least one token, got {text!r}")
        if len(prompt) + options.max_new_tokens > limit:
            parser.error(
                f"a prompt of {len(prompt)} tokens and --max-new-tokens {options.max_new_tokens} "
                f"exceed the model's context of {limit} tokens"
            )
    # On a CPU the attention runs in torch, from one of XLA's threads. More threads of torch would
    # wait for the cores that XLA keeps busy.
    torch.set_num_threads(1)
    sampling = Sampling(options.temperature, options.top_p)
    stream = TextStream(tokenizer)
    streaming = len(prompts) == 1 and not options.json

    def show(_: int, token: int) -> None:
        if not stream.tokens:
            print(options.prompts[0], end="")
        print(stream.push(token), end="", flush=True)

    try:
        result = generate(
            Engine(model, sampling, options.backend),
            prompts,
            max_new_tokens=options.max_new_tokens,
            eos_ids=eos_ids,
            page_size=options.page_size,
            prefill_chunk=options.prefill_chunk,
            seed=options.seed,
            on_token=show if streaming else lambda request, token: None,
        )
    except (NotImplementedError, ValueError) as error:  # jaxattn has no such kernel
        parser.error(" ".join(str(error).splitlines()))
    if streaming:
        print(stream.finish())
    else:
        write(options, tokenizer, result.tokens)
    report(result)


def write(options: argparse.Namespace, tokenizer: Tokenizer, results: list[list[int]]) -> None:
    for prompt, tokens in zip(options.prompts, results, strict=True):
        text = tokenizer.decode(tokens)
        if options.json:
            print(json.dumps({"prompt": prompt, "tokens": tokens, "text": text}))
        else:
            print(f"> {prompt}\n{prompt}{text}\n")


def report(result: Generation) -> None:
    """Speed without the compilation, on stderr."""
    prefill = result.prompt_tokens / result.prefill_seconds
    decode = "no decode step, "
    if result.decode_tokens:
        decode = f"decode {result.decode_tokens / result.decode_seconds:.1f} tokens/s, "
    # Linux counts kilobytes, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    print(
        f"prompt {prefill:.1f} tokens/s, {decode}"
        f"compilation {result.compile_seconds:.1f} s, peak resident memory {peak:.0f} MiB",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
