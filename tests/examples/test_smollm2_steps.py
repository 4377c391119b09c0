"""Every step of the example's loop on a random model, against the float32 reference fed with the
same tokens: the kernels that "auto" takes, in bfloat16 on a GPU, and both dtypes on a CPU."""

import importlib
import json
import re
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from jax.experimental import io_callback

tokenizers = pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.numpy")
pytest.importorskip("flax")

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "smollm2"))
modeling, params, run = map(importlib.import_module, ("modeling", "params", "run"))

# SmolLM2-135M's attention: groups of 3 query heads, head_dim 64.
SETTINGS = dict(
    model_type="llama",
    vocab_size=512,
    hidden_size=576,
    intermediate_size=768,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=1024,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=True,
)
PAGE_SIZE, CHUNK = 64, 128
LENGTHS = [1, 5, 17, 63, 64, 65, 100, 130]  # of the prompts, also at the ends of a page
PROMPTS = [np.random.default_rng(n).integers(0, 512, n).tolist() for n in LENGTHS]

gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def one_torch_thread():
    """As run.py does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write_model(path: Path, num_layers: int) -> Path:
    """A Hugging Face directory with random weights that bfloat16 holds exactly, so that a model
    reads the same ones in every dtype.

    Queries and keys are large enough for scores of about 2: with smaller ones attention averages
    all values, and hardly a mistake in it would show. Embeddings are small, so that a layer's
    output and not the last token decides the next one.
    """
    rng = np.random.default_rng(0)
    hidden, intermediate = SETTINGS["hidden_size"], SETTINGS["intermediate_size"]

    def matrix(rows: int, columns: int, std: float = 1.0) -> np.ndarray:
        return rng.normal(0, std / columns**0.5, (rows, columns))

    tensors = {"model.embed_tokens.weight": rng.normal(0, 0.1, (SETTINGS["vocab_size"], hidden))}
    tensors["model.norm.weight"] = rng.uniform(0.5, 1.5, hidden)
    for layer in range(num_layers):
        weights = {
            "input_layernorm": rng.uniform(0.5, 1.5, hidden),
            "self_attn.q_proj": matrix(9 * 64, hidden, 1.5),
            "self_attn.k_proj": matrix(3 * 64, hidden, 1.5),
            "self_attn.v_proj": matrix(3 * 64, hidden, 1.5),
            "self_attn.o_proj": matrix(hidden, 9 * 64),
            "post_attention_layernorm": rng.uniform(0.5, 1.5, hidden),
            "mlp.gate_proj": matrix(intermediate, hidden),
            "mlp.up_proj": matrix(intermediate, hidden),
            "mlp.down_proj": matrix(hidden, intermediate),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": w for name, w in weights.items()}
    exact = {name: w.astype(ml_dtypes.bfloat16).astype(np.float32) for name, w in tensors.items()}
    safetensors.save_file(exact, path / "model.safetensors")
    settings = SETTINGS | dict(num_hidden_layers=num_layers)
    (path / "config.json").write_text(json.dumps(settings))
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def generate(
    model, new_tokens: int, monkeypatch, backend: str = "auto", forced: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """What the example's loop makes of PROMPTS: tokens [batch, new_tokens], and the logits that
    they were picked from [batch, new_tokens, vocab_size]. `forced` are tokens to take instead."""
    table = run.assign_pages(np.array(LENGTHS), PAGE_SIZE)
    ended = [requests for *_, requests in run.prefill_chunks(PROMPTS, table, CHUNK)]
    assert len(ended) > 1
    records: list[np.ndarray] = []

    def record(logits, tokens):
        records.append(np.array(logits))
        step = max(0, len(records) - len(ended))
        return np.array(tokens) if forced is None else forced[:, step]

    def recorded_sample(logits, key, sampling):
        tokens = sample(logits, key, sampling)
        return io_callback(record, tokens, logits, tokens, ordered=True)

    options = dict(max_new_tokens=new_tokens, page_size=PAGE_SIZE, prefill_chunk=CHUNK)
    sample = modeling.sample
    with monkeypatch.context() as patch:
        patch.setattr(modeling, "sample", recorded_sample)
        result = run.generate(modeling.Engine(model, backend=backend), PROMPTS, **options)
    first = np.empty_like(records[0])
    for logits, requests in zip(records[: len(ended)], ended, strict=True):
        first[requests] = logits[requests]
    return np.array(result.tokens), np.stack([first, *records[len(ended) :]], axis=1)


def exact_logits(model, tokens: np.ndarray) -> np.ndarray:
    """The same logits from one prefill of prompts and tokens on the reference in float32."""
    sequences = [prompt + row[:-1].tolist() for prompt, row in zip(PROMPTS, tokens, strict=True)]
    lengths = np.array(list(map(len, sequences)))
    table = run.assign_pages(lengths, PAGE_SIZE)
    ((rows, batch, _),) = run.prefill_chunks(sequences, table, 2 * int(lengths.sum()))
    caches = modeling.init_caches(model.config, int(table.max()) + 1, PAGE_SIZE)

    @jax.jit
    def forward(model, caches):
        return model.logits(model(rows, batch, caches, "reference")[0])

    with jax.default_matmul_precision("highest"):  # a GPU rounds factors of float32 to TF32
        logits = np.asarray(forward(model, caches))
    ends = np.cumsum(lengths)
    return np.stack([logits[end - tokens.shape[1] : end] for end in ends])


def rms(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.mean(np.square(x), -1))


def largest(x: np.ndarray) -> np.ndarray:
    return np.abs(x).max(-1)


@pytest.mark.parametrize(
    ("dtype", "num_layers", "new_tokens"),
    [
        pytest.param("bfloat16", 6, 256, marks=gpu, id="gpu-bfloat16"),
        pytest.param("bfloat16", 2, 12, id="cpu-bfloat16"),
        pytest.param("float32", 2, 12, id="cpu-float32"),
    ],
)
def test_every_step_equals_the_float32_reference(
    dtype, num_layers, new_tokens, tmp_path, monkeypatch, request
):
    """The error of each step's logits for each request, by root mean square and by maximum, is at
    most twice that of the same bfloat16 model on the reference, plus two roundings of the logits.

    float32 rounds 2**16 times finer. But a bfloat16 product of n terms is summed in float32 and
    rounded once, while float32's own sum rounds at each term, by sqrt(n) roundings on average.
    """
    if request.node.get_closest_marker("gpu") is None and jax.default_backend() != "cpu":
        pytest.skip("needs JAX on a CPU")
    path = write_model(tmp_path, num_layers)
    exact_model, rounded_model = (params.load(path, d).model for d in ("float32", "bfloat16"))
    model = exact_model if dtype == "float32" else rounded_model
    tokens, logits = generate(model, new_tokens, monkeypatch)
    exact = exact_logits(exact_model, tokens)
    _, rounded = generate(rounded_model, new_tokens, monkeypatch, "reference", tokens)
    noise = rounded - exact
    finer = 1.0 if dtype == "bfloat16" else SETTINGS["hidden_size"] ** 0.5 * 2.0**-16
    unit = 2.0**-8  # of bfloat16: half the distance of 1 and the next number

    def bound(measure):
        return finer * (2 * measure(noise) + 2 * unit * measure(exact))

    assert logits.shape == exact.shape == (len(PROMPTS), new_tokens, SETTINGS["vocab_size"])
    for measure in (rms, largest):
        share = measure(logits - exact) / bound(measure)  # [batch, new_tokens]
        worst, step = divmod(int(share.argmax()), new_tokens)
        found = f"{share.max():.2f} of the {measure.__name__} bound, request {worst}, step {step}"
        print(found)
        assert (share <= 1).all(), found
    second, first = np.sort(exact, -1)[..., -2:].transpose(2, 0, 1)
    decided = first - second > 2 * bound(largest)
    print(f"the reference alone decides {decided.mean():.0%} of the tokens")
    assert decided.mean() > 0.25, "the margins of too few tokens exceed the noise"
    assert (tokens == exact.argmax(-1))[decided].all()


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=gpu), "float32"])
def test_command_takes_the_dtype_of_the_device(dtype, tmp_path, capsys, request):
    if request.node.get_closest_marker("gpu") is None and jax.default_backend() != "cpu":
        pytest.skip("needs JAX on a CPU")
    path = write_model(tmp_path, 2)
    loaded = params.load(path, dtype)
    prompts = ["The capital of France is", "1, 2, 3"]
    ids = [loaded.tokenizer.encode(prompt).ids for prompt in prompts]
    options = dict(max_new_tokens=24, page_size=PAGE_SIZE)
    wanted = run.generate(modeling.Engine(loaded.model), ids, **options).tokens
    capsys.readouterr()
    arguments = [*prompts, "--model", str(path), "--max-new-tokens", "24", "--json"]
    run.main([*arguments, "--page-size", str(PAGE_SIZE)])
    out, err = capsys.readouterr()
    assert [json.loads(line)["tokens"] for line in out.splitlines()] == wanted
    assert re.search(r"prompt [\d.]+ tokens/s, decode [\d.]+ tokens/s", err)
