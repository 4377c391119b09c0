"""Finds needles in a long context, by dense attention and by QSA: `--help` lists the options."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import needle
import numpy as np
import torch
from jax import Array
from modeling import Batch, Config, Engine, init_caches

CPU = Config(
    vocab_size=needle.CODE,
    hidden_size=needle.HIDDEN_SIZE,
    intermediate_size=8,
    num_layers=2,
    num_qo_heads=2,
    num_kv_heads=1,
    head_dim=128,
    index_heads=1,
    index_dim=128,
    rotary_dim=needle.ROTARY_DIM,
    rope_theta=needle.ROPE_THETA,
    compress_ratio=4,
    budget=64,
    context_length=4096,
)
# The heads of Qwen3.8-Flash-Next.
GPU = replace(
    CPU,
    num_qo_heads=24,
    num_kv_heads=2,
    head_dim=256,
    index_heads=4,
    budget=2048,
    context_length=65536,
    dtype="bfloat16",
)


@dataclass
class Run:
    """What one kind of attention found and took."""

    answers: np.ndarray  # [requests, needles]
    prefill_seconds: float
    step_seconds: float  # of a decode step of all requests
    kv_bytes: int
    index_bytes: int  # of compressed keys and rings
    workspace_bytes: int  # of the larger program, as XLA plans it


def search(
    engine: Engine,
    contexts: Sequence[needle.Context],
    *,
    chunk: int,
    page_size: int,
    steps: int,
) -> Run:
    """Reads the contexts in chunks, asks for one needle after the other, then times more steps."""
    length, needles = len(contexts[0].tokens), len(contexts[0].keys)
    requests, pages_per_seq = len(contexts), -(-(length + needles + steps) // page_size)
    page_table = jnp.arange(requests * pages_per_seq, dtype=jnp.int32).reshape(requests, -1)
    caches = init_caches(engine.config, page_table.size, page_size, requests)
    kv_bytes = sum(cache.key.nbytes + cache.value.nbytes for cache in caches)
    index_bytes = sum(cache.index_key.nbytes + cache.ring.nbytes for cache in caches)
    questions = np.stack([context.keys for context in contexts], axis=1)  # [needles, requests]
    pieces = jax.device_put(list(prefill_chunks(contexts, page_table, chunk)))
    batches = [
        Batch(
            page_table,
            np.full(requests, length + step + 1, np.int32),
            np.arange(requests + 1, dtype=np.int32),
        )
        for step in range(needles + steps)
    ]
    questions, batches = jax.device_put((list(questions), batches))
    tokens, batch = pieces[0]
    programs = [
        engine.compile(caches, tokens, batch, 0),
        engine.compile(caches, questions[0], batches[0], requests),
    ]
    workspace = max(program.memory_analysis().temp_size_in_bytes for program in programs)
    # GPU kernels load when they first run. The same chunk again writes the same.
    _, caches = engine(caches, tokens, batch, 0)
    jax.block_until_ready(caches)

    start = time.perf_counter()
    for tokens, batch in pieces:
        _, caches = engine(caches, tokens, batch, 0)
    jax.block_until_ready(caches)
    prefill_seconds = time.perf_counter() - start

    answers = []
    for tokens, batch in zip(questions, batches[:needles], strict=True):
        logits, caches = engine(caches, tokens, batch, requests)
        answers.append(np.asarray(logits).argmax(-1))

    start = time.perf_counter()
    for batch in batches[needles:]:
        _, caches = engine(caches, questions[-1], batch, requests)
    jax.block_until_ready(caches)
    step_seconds = (time.perf_counter() - start) / steps
    return Run(
        np.stack(answers, axis=1), prefill_seconds, step_seconds, kv_bytes, index_bytes, workspace
    )


def prefill_chunks(
    contexts: Sequence[needle.Context], page_table: Array, chunk: int
) -> Iterator[tuple[np.ndarray, Batch]]:
    """One request after the other, in chunks of as many rows, padding included."""
    length = len(contexts[0].tokens)
    rows = min(chunk, length)
    for request, context in enumerate(contexts):
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            counts, seq_lens = np.zeros((2, len(contexts)), np.int32)
            counts[request], seq_lens[request] = stop - start, stop
            offsets = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
            tokens = np.pad(context.tokens[start:stop], (0, rows - (stop - start)))
            yield tokens, Batch(page_table, seq_lens, offsets)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    on_cpu = jax.default_backend() == "cpu"
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__)

    def add(flag: str, cpu: int, gpu: int, meaning: str) -> None:
        default = cpu if on_cpu else gpu
        text = f"{meaning} (default {cpu} on a CPU, {gpu} on a GPU)"
        parser.add_argument(flag, type=int, default=default, help=text)

    add("--tokens", CPU.context_length, GPU.context_length, "length of a context")
    add("--requests", 1, 16, "contexts, which form one batch")
    add("--needles", 5, 5, "in a context")
    add("--budget", CPU.budget, GPU.budget, "tokens that a row of QSA attends to")
    add("--chunk", 512, 4096, "most tokens in one step of prefill")
    add("--page-size", 16, 64, "tokens in a page of the caches")
    add("--steps", 16, 64, "decode steps that are timed, after one for each needle")
    add("--seed", 0, 0, "of the contexts")
    parser.add_argument("--via", default="auto", choices=["auto", "triton", "dlpack"],
                        help="how QSA's kernels are launched on a GPU")  # fmt: skip
    options = parser.parse_args(arguments)
    for name, low, high in (
        ("needles", 1, needle.KEYS),
        ("tokens", 4 * options.needles, 2**20),
        ("requests", 1, 1024),
        ("chunk", 1, 2**20),
        ("steps", 1, 2**20),
        ("seed", 0, 2**63 - 1),
    ):
        if not low <= getattr(options, name) <= high:
            parser.error(f"--{name} must be {low} to {high}, got {getattr(options, name)}")
    ratio = CPU.compress_ratio
    if options.budget < ratio or options.budget % ratio:
        parser.error(f"--budget must be a positive multiple of {ratio}, got {options.budget}")
    if options.page_size < 16 or options.page_size % 16:
        parser.error(f"--page-size must be a positive multiple of 16, got {options.page_size}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if both kinds of attention found every needle, else 1."""
    options = parse(arguments)
    # On a CPU the attention runs in torch, from one of XLA's threads. More threads of torch would
    # wait for the cores that XLA keeps busy.
    torch.set_num_threads(1)
    device = jax.devices()[0]
    config = replace(
        CPU if device.platform == "cpu" else GPU,
        budget=options.budget,
        context_length=options.tokens + options.needles + options.steps,
    )
    model = needle.make_model(config)
    rng = np.random.default_rng(options.seed)
    shape = options.tokens, options.needles
    contexts = [needle.make_context(*shape, rng) for _ in range(options.requests)]
    settings = dict(chunk=options.chunk, page_size=options.page_size, steps=options.steps)
    runs = {
        "dense": search(Engine(model, sparse=False), contexts, **settings),
        "QSA": search(Engine(model, via=options.via), contexts, **settings),
    }
    print(
        f"{config.num_layers} layers on {device.device_kind}, {config.dtype}: "
        f"{config.num_qo_heads} query and {config.num_kv_heads} KV heads of {config.head_dim}, "
        f"indexer {config.index_heads} of {config.index_dim}, budget {config.budget}\n"
        f"{options.requests} x {options.tokens} tokens, {options.needles} needles each\n"
    )
    return report(contexts, runs)


def report(contexts: Sequence[needle.Context], runs: dict[str, Run]) -> int:
    first, length = contexts[0], len(contexts[0].tokens)
    print("    at token  depth  question  answer  " + "  ".join(f"{name:>5}" for name in runs))
    for at, place in enumerate(first.places):
        answers = "  ".join(f"{run.answers[0, at]:5}" for run in runs.values())
        found = f"{first.keys[at]:9} {first.answers[at]:7}  {answers}"
        print(f"{place:12} {place / length:6.0%} {found}")
    print(
        "\n        prefill tokens/s  ms a step  decode tokens/s   KV MiB  index MiB  workspace MiB"
    )
    for name, run in runs.items():
        index_bytes = 0 if name == "dense" else run.index_bytes
        print(
            f"{name:>5} {len(contexts) * length / run.prefill_seconds:18.0f}"
            f"{1000 * run.step_seconds:11.2f}{len(contexts) / run.step_seconds:17.0f}"
            f"{run.kv_bytes / 2**20:9.1f}{index_bytes / 2**20:11.1f}"
            f"{run.workspace_bytes / 2**20:15.1f}"
        )
    wanted = np.stack([context.answers for context in contexts])
    found = {name: int((run.answers == wanted).sum()) for name, run in runs.items()}
    print(
        "\n" + ", ".join(f"{name} found {n} of {wanted.size} needles" for name, n in found.items())
    )
    return 0 if all(n == wanted.size for n in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
