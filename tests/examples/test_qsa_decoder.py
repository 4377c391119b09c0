"""The QSA example: its attention layer and decoder against transformers, and its demonstration."""

import random
import re
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers.models.qwen4_exp import configuration_qwen4_exp, modeling_qwen4_exp

from tests.examples.qsa_server import (
    DECODE_STEPS,
    EXAMPLE,
    Server,
    all_ways,
    modeling,
    needle,
    params,
    run,
)

# Half the distance of 1 and the next number.
UNITS = {"float32": 2.0**-24, "bfloat16": 2.0**-8}

gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def one_torch_thread():
    """As run.py does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def skip_on_gpu() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("needs JAX on a CPU")


def text_config(hidden_size: int = 24, **sizes):
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        pytest.skip(f"needs transformers 5.24, here is {transformers.__version__}")
    text = configuration_qwen4_exp.Qwen4ExpTextConfig(
        hidden_size=hidden_size, num_hidden_layers=1, layer_types=["indexed_attention"], **sizes
    )
    text._attn_implementation = "eager"
    return text


def random_config(number: int):
    rng = random.Random(number)
    ratio = (2, 4, 8)[number % 3]
    kv_heads, head_dim, index_dim = (
        rng.choice([1, 2]),
        rng.choice([8, 16, 32]),
        rng.choice([16, 32]),
    )
    # transformers cuts both rotary embeddings from one table.
    rotary_dim = min(rng.choice([4, 8, head_dim // 2, head_dim]), index_dim)
    return text_config(
        num_attention_heads=kv_heads * rng.choice([1, 2, 3]),
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        indexer_n_heads=rng.choice([2, 4, 8]),
        indexer_kv_heads=1,
        indexer_head_dim=index_dim,
        indexer_budget=ratio * rng.choice([2, 3, 4, 6]),
        indexer_compress_ratio=ratio,
        rope_parameters=dict(
            rope_type="default",
            rope_theta=rng.choice([1e4, 1e7]),
            partial_rotary_factor=rotary_dim / head_dim,
        ),
    )


def random_weights(module: torch.nn.Module, std: float) -> None:
    """Numbers that bfloat16 holds exactly, so that a model has the same ones in every dtype."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.normal(0, std, parameter.shape).bfloat16())


@torch.no_grad()
def transformers_layer(module, hidden: torch.Tensor) -> np.ndarray:
    """An attention layer's output [length, hidden_size] for hidden [length, hidden_size]."""
    length, dtype = len(hidden), hidden.dtype
    places = modeling_qwen4_exp.Qwen4ExpTextRotaryEmbedding(module.config)(
        hidden[None], torch.arange(length)[None]
    )
    mask = torch.zeros(length, length, dtype=dtype)
    mask = mask.masked_fill(torch.ones(length, length).triu(1).bool(), torch.finfo(dtype).min)
    output, _ = module(hidden[None], places, mask[None, None], None)
    return output[0].double().numpy()


@torch.no_grad()
def near_ties(module, hidden: torch.Tensor) -> np.ndarray:
    """bool [length]: rows whose last chosen and first left out group score (nearly) the same."""
    indexer = module.indexer
    ratio, dim, topk = indexer.compress_ratio, indexer.index_head_dim, indexer.block_topk
    heads = indexer.index_qk_proj(hidden).view(len(hidden), -1, dim)
    cos, sin = modeling_qwen4_exp.Qwen4ExpTextRotaryEmbedding(module.config)(
        hidden[None], torch.arange(len(hidden))[None]
    )
    rotate = modeling_qwen4_exp.apply_rotary_pos_emb
    query = rotate(indexer.q_layernorm(heads[:, :-1]), cos=cos[0], sin=sin[0])
    groups = len(hidden) // ratio
    pooled = indexer.k_layernorm(heads[: groups * ratio, -1:].view(groups, ratio, dim).mean(1))
    starts = slice(0, groups * ratio, ratio)
    key = rotate(pooled[:, None], cos=cos[0, starts], sin=sin[0, starts])[:, 0]
    scores = torch.einsum("rhd,gd->rhg", query, key).relu().sum(1)
    visible = (torch.arange(len(hidden)) + 1) // ratio
    scores = scores.masked_fill(torch.arange(groups) >= visible[:, None], -1.0)
    ordered = scores.sort(1, descending=True).values
    ordered = torch.nn.functional.pad(ordered, (0, topk + 1), value=-1.0)
    last, first = ordered[:, topk - 1], ordered[:, topk]
    return ((visible > topk) & (last - first <= 1e-5 * last)).numpy()


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def largest(x: np.ndarray) -> float:
    return float(np.abs(x).max())


def layer_and_inputs(text, lengths: list[int], seed: int, dtype: str, std: float):
    """A layer of transformers, the example's with its weights, and hidden states to feed."""
    torch.manual_seed(seed)
    module = modeling_qwen4_exp.Qwen4ExpTextAttention(text, 0).eval()
    random_weights(module, std)
    hidden = [torch.randn(length, text.hidden_size).bfloat16().float() for length in lengths]
    config = params.config_of(text, context_length=max(lengths), dtype=dtype)
    layer = modeling.Attention(config)
    params.load(layer, module.state_dict())
    inputs = [x.numpy().astype(jnp.dtype(dtype)) for x in hidden]
    return module, hidden, Server(config, layer, inputs)


TIES = {"rows": 0, "all": 0}


@pytest.mark.parametrize("number", range(8))
def test_layer_equals_transformers(number):
    """Against the layer with float64 projections and attention: the error is at most twice that of
    the same layer in float32, plus four roundings, by root mean square and by maximum. A
    row that attends to another group is far outside.
    """
    skip_on_gpu()
    lengths = [DECODE_STEPS + 9 + 7 * number, DECODE_STEPS + 30 + number]
    module, hidden, server = layer_and_inputs(
        random_config(number), lengths, number, "float32", 0.3
    )
    decided = [~near_ties(module, x) for x in hidden]
    plain = [transformers_layer(module, x) for x in hidden]
    exact = [transformers_layer(module.double(), x.double()) for x in hidden]
    TIES["rows"] += sum(int((~rows).sum()) for rows in decided)
    TIES["all"] += sum(lengths)
    for way, outputs in all_ways(server, 13, number).items():
        for at, rows in enumerate(decided):
            noise, error = (x[at][rows] - exact[at][rows] for x in (plain, outputs))
            for measure in (rms, largest):
                bound = 2 * measure(noise) + 4 * UNITS["float32"] * measure(exact[at])
                print(f"{way}: {measure(error) / bound:.2f} of the {measure.__name__} bound")
                assert measure(error) <= bound, way


def test_few_rows_are_ties():
    """Runs after the parity test: what it left out."""
    if not TIES["all"]:
        pytest.skip("the parity test did not run")
    assert TIES["rows"] <= 0.02 * TIES["all"], TIES


@pytest.mark.parametrize(
    ("heads", "head_dim", "index_dim", "budget", "length"),
    [
        pytest.param(2, 32, 32, 32, 150, id="cpu"),
        pytest.param(8, 128, 64, 128, 700, id="gpu", marks=gpu),
    ],
)
def test_layer_in_bfloat16(heads, head_dim, index_dim, budget, length, request):
    """Against transformers in float32, the error is at most twice that of transformers in
    bfloat16, plus two roundings: over all rows, and for the median row. Some rows attend to another
    group, as scores are rounded: in both, and neither measure falls for a few of them.
    """
    if request.node.get_closest_marker("gpu") is None:
        skip_on_gpu()
    text = text_config(
        hidden_size=256,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=head_dim,
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=index_dim,
        indexer_budget=budget,
        indexer_compress_ratio=4,
        rope_parameters=dict(
            rope_type="default", rope_theta=1e4, partial_rotary_factor=16 / head_dim
        ),
    )
    lengths = [length, length - 33]
    module, hidden, server = layer_and_inputs(text, lengths, 0, "bfloat16", 256**-0.5)
    exact = np.concatenate([transformers_layer(module, x) for x in hidden])
    module = module.bfloat16()
    noise = np.concatenate([transformers_layer(module, x.bfloat16()) for x in hidden]) - exact

    def median(x: np.ndarray) -> float:
        return float(np.median(np.sqrt(np.mean(np.square(x), -1))))

    for way, outputs in all_ways(server, 29, 0).items():
        error = np.concatenate(outputs) - exact
        assert np.isfinite(error).all()
        for measure in (rms, median):
            bound = 2 * measure(noise) + 2 * UNITS["bfloat16"] * measure(exact)
            print(f"{way}: {measure(error) / bound:.2f} of the {measure.__name__} bound")
            assert measure(error) <= bound, way


class PlainDecoder(torch.nn.Module):
    """What modeling.Decoder computes, of transformers' parts."""

    def __init__(self, text, num_layers: int, intermediate_size: int):
        super().__init__()
        qwen, hidden = modeling_qwen4_exp, text.hidden_size
        self.embed_tokens = torch.nn.Embedding(text.vocab_size, hidden)
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                dict(
                    input_layernorm=qwen.Qwen4ExpTextRMSNorm(hidden),
                    self_attn=qwen.Qwen4ExpTextAttention(text, 0),
                    post_attention_layernorm=qwen.Qwen4ExpTextRMSNorm(hidden),
                    mlp=qwen.Qwen4ExpTextMLP(text, intermediate_size),
                )
            )
            for _ in range(num_layers)
        )
        self.norm = qwen.Qwen4ExpTextRMSNorm(hidden)
        self.lm_head = torch.nn.Linear(hidden, text.vocab_size, bias=False)

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor) -> np.ndarray:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            out = transformers_layer(layer["self_attn"], layer["input_layernorm"](x))
            x = x + torch.from_numpy(out).to(x.dtype)
            x = x + layer["mlp"](layer["post_attention_layernorm"](x))
        return self.lm_head(self.norm(x)).numpy()


@pytest.fixture(scope="module")
def decoders():
    """A decoder of transformers' parts, and the example's with its weights."""
    torch.manual_seed(3)
    text = random_config(1)
    text.vocab_size = 97
    theirs = PlainDecoder(text, 2, 40).eval()
    random_weights(theirs, 0.3)
    config = params.config_of(text, context_length=128, num_layers=2, intermediate_size=40)
    ours = modeling.Decoder(config)
    params.load(ours, theirs.state_dict())
    return theirs, ours


def test_decoder_equals_transformers(decoders):
    """Also where one request decodes in a pass in which the other prefills. Two layers add their
    roundings, and the first one's reach the scores of the second: bounded as the layer's, times 4.
    """
    skip_on_gpu()
    theirs, ours = decoders
    tokens = [np.random.default_rng(n).integers(0, 97, n).astype(np.int32) for n in (75, 60)]
    plain = [theirs(torch.from_numpy(x)) for x in tokens]
    exact = [theirs.double()(torch.from_numpy(x)) for x in tokens]
    theirs.float()
    server = Server(ours.config, ours, tokens)
    server.feed([(40, 0), (30, 5)], 43)
    server.feed([(1, 20), (1, 30)], 34, num_decodes=1)
    server.feed([(1, 1)] * 3, 2, num_decodes=2)
    server.feed([(0, 2)], 5)
    for at, logits in enumerate(server.results()):
        bound = 8 * largest(plain[at] - exact[at]) + 16 * UNITS["float32"] * largest(exact[at])
        print(f"{largest(logits - exact[at]) / bound:.2f} of the bound")
        assert largest(logits - exact[at]) <= bound


def test_load_refuses_other_weights(decoders):
    theirs, ours = decoders
    weights = dict(theirs.state_dict())
    norm = weights.pop("norm.weight")
    with pytest.raises(ValueError, match=r"must have 'norm\.weight'"):
        params.load(ours, weights)
    with pytest.raises(ValueError, match=r"norm\.weight must be \[24\], got \[23\]"):
        params.load(ours, weights | {"norm.weight": norm[:-1]})
    bias = {"lm_head.bias": torch.zeros(97)}
    with pytest.raises(ValueError, match=r"no place for \['lm_head\.bias'\]"):
        params.load(ours, weights | bias | {"norm.weight": norm})


def test_config_refuses_scaled_rotation():
    text = random_config(0)
    text.rope_parameters = text.rope_parameters | {"rope_type": "yarn"}
    with pytest.raises(ValueError, match="rope_type must be 'default', got 'yarn'"):
        params.config_of(text, context_length=64)


def found(output: str) -> dict[str, str]:
    return dict(re.findall(r"(dense|QSA) found (\d+ of \d+) needles", output))


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--tokens", "700", "--chunk", "301", "--requests", "2"], id="cpu"),
        pytest.param(["--tokens", "20001", "--requests", "4"], id="gpu", marks=gpu),
        pytest.param(["--via", "dlpack", "--requests", "1"], id="gpu-dlpack", marks=gpu),
    ],
)
def test_every_needle_is_found(arguments, request, capsys):
    if request.node.get_closest_marker("gpu") is None:
        skip_on_gpu()
    assert run.main([*arguments, "--steps", "2"]) == 0
    count = int(arguments[-1]) * 5
    assert found(capsys.readouterr().out) == dict.fromkeys(("dense", "QSA"), f"{count} of {count}")


def test_no_needle_without_the_indexer(capsys):
    """QSA finds needles because its indexer does."""
    skip_on_gpu()
    model = needle.make_model(replace(run.CPU, budget=16, context_length=520))
    weight = model.layers[1].self_attn.indexer.index_qk_proj.weight
    weight[...] = jnp.zeros_like(weight[...])
    contexts = [needle.make_context(512, 4, np.random.default_rng(0))]
    engine = modeling.Engine(model)
    result = run.search(engine, contexts, chunk=512, page_size=16, steps=1)
    assert run.report(contexts, {"QSA": result}) == 1
    assert found(capsys.readouterr().out)["QSA"] != "4 of 4"


def command(*arguments: str) -> subprocess.CompletedProcess:
    line = [sys.executable, str(EXAMPLE / "run.py"), *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_command_prints_answers_and_speed():
    skip_on_gpu()
    done = command("--tokens", "300", "--needles", "3", "--steps", "1")
    assert done.returncode == 0, done.stderr
    assert found(done.stdout) == {"dense": "3 of 3", "QSA": "3 of 3"}
    assert re.search(r"^ +298 +99% +(\d+) +(\d+) +\2 +\2$", done.stdout, re.MULTILINE)
    for name in ("dense", "QSA"):
        assert re.search(rf"^ *{name}( +[\d.]+){{6}}$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--needles", "17"], "--needles must be 1 to 16, got 17"),
        (["--tokens", "19"], "--tokens must be 20 to 1048576, got 19"),
        (["--budget", "30"], "--budget must be a positive multiple of 4, got 30"),
        (["--page-size", "24"], "--page-size must be a positive multiple of 16, got 24"),
    ],
)
def test_command_refuses(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        run.main(arguments)
    assert message in capsys.readouterr().err
