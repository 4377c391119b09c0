"""Decode speed of examples/smollm2 against transformers' generate, on one machine in one run.

    python tests/bench/bench_smollm2.py [--rounds 3] [--new-tokens 64] [--batch 1 8]

float32, greedy, the same GGUF file, the same prompt in every slot of the batch. The generated
tokens are compared first. The two take turns and the best round of each counts: other load on the
machine only ever slows one down. Tokens/s leave out the prompt and the first token of each request,
and for jaxattn the compilation.
"""

import argparse
import importlib
import platform
import sys
import time
from pathlib import Path

import jax
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "smollm2"))
modeling, params, run = map(importlib.import_module, ("modeling", "params", "run"))

PROMPT = "Once upon a time, in a village by the sea,"


def transformers_decode(model, prompt: list[int], batch: int, new_tokens: int):
    """Seconds from the first new token to the last, and the tokens; every slot runs to the end."""
    ids = torch.tensor([prompt] * batch)
    times = []

    def clock(ids, scores):
        times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)

    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        eos_token_id=-1,
        pad_token_id=0,
        do_sample=False,
        stopping_criteria=[clock],
    )
    return times[-1] - times[0], out[:, len(prompt) :].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    path, threads = params.fetch_default(), torch.get_num_threads()
    loaded = params.load(path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    prompt = loaded.tokenizer.encode(PROMPT).ids
    engine = modeling.Engine(loaded.model)
    print(
        f"{platform.processor() or platform.machine()}, {threads} torch threads, "
        f"jax {jax.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    for batch in options.batch:
        best = {"transformers": 0.0, "jaxattn": 0.0}
        decoded = batch * (options.new_tokens - 1)
        for _ in range(options.rounds):
            torch.set_num_threads(threads)
            seconds, tokens = transformers_decode(theirs, prompt, batch, options.new_tokens)
            best["transformers"] = max(best["transformers"], decoded / seconds)
            torch.set_num_threads(1)  # as run.py does
            result = run.generate(engine, [prompt] * batch, max_new_tokens=options.new_tokens)
            if result.tokens != tokens:
                raise SystemExit(f"batch {batch}: the generated tokens differ")
            best["jaxattn"] = max(best["jaxattn"], decoded / result.decode_seconds)
        rates = ", ".join(f"{name} {rate:.1f} tokens/s" for name, rate in best.items())
        print(f"batch {batch}: {rates}, ratio {best['jaxattn'] / best['transformers']:.2f}")


if __name__ == "__main__":
    main()
