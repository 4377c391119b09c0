"""The reference against transformers, which defines QSA."""

import random
from dataclasses import dataclass

import pytest
import torch
from transformers import DynamicCache
from transformers.models.qwen4_exp import configuration_qwen4_exp, modeling_qwen4_exp

from tests.torch_core.qsa import cases
from torch_core.qsa import prepare_query, reference, rotary_tables

CONFIGURATIONS = 36


@dataclass(frozen=True)
class Configuration:
    sizes: cases.Sizes
    length: int
    theta: float
    seed: int

    def __str__(self) -> str:
        s = self.sizes
        return (
            f"r{s.compress_ratio}-b{s.budget}-{s.num_qo_heads}x{s.num_kv_heads}x{s.head_dim}-"
            f"{s.index_heads}x{s.index_dim}-p{s.page_size}-{self.length}"
        )


def configuration(number: int) -> Configuration:
    rng = random.Random(number)
    ratio = (2, 4, 8)[number % 3]
    budget = ratio * rng.choice([2, 3, 4, 6])
    length = budget * (1 + number % 5) + rng.randrange(ratio)
    page_size = rng.choice([16, 32])
    kv_heads = rng.choice([1, 2])
    head_dim, index_dim = rng.choice([8, 16, 32]), rng.choice([16, 32])
    sizes = cases.Sizes(
        num_qo_heads=kv_heads * rng.choice([1, 2, 3]),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        index_heads=1 if number == 9 else rng.choice([2, 4, 8]),
        index_dim=index_dim,
        # transformers cuts both rotary embeddings from one table.
        rotary_dim=min(rng.choice([4, 8, head_dim // 2, head_dim]), index_dim),
        compress_ratio=ratio,
        budget=budget,
        page_size=page_size,
        pages_per_seq=-(-length // page_size),
    )
    return Configuration(sizes, length, rng.choice([1e4, 1e7]), number)


class Layer:
    """One attention layer of transformers with random weights, and its projections."""

    def __init__(self, config: Configuration) -> None:
        s = config.sizes
        torch.manual_seed(config.seed)
        text = configuration_qwen4_exp.Qwen4ExpTextConfig(
            hidden_size=24,
            num_hidden_layers=1,
            num_attention_heads=s.num_qo_heads,
            num_key_value_heads=s.num_kv_heads,
            head_dim=s.head_dim,
            layer_types=["indexed_attention"],
            indexer_n_heads=s.index_heads,
            indexer_kv_heads=1,
            indexer_head_dim=s.index_dim,
            indexer_budget=s.budget,
            indexer_compress_ratio=s.compress_ratio,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=config.theta,
                partial_rotary_factor=s.rotary_dim / s.head_dim,
            ),
        )
        text._attn_implementation = "eager"
        self.text = text
        self.module = modeling_qwen4_exp.Qwen4ExpTextAttention(text, 0).eval()
        for parameter in self.module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        self.rotary = modeling_qwen4_exp.Qwen4ExpTextRotaryEmbedding(text)
        self.hidden = torch.randn(1, config.length, 24)
        self.sizes = s
        self.tables = rotary_tables(config.length, s.rotary_dim, config.theta)

    @torch.no_grad()
    def run(self, pieces: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(bool [length, length] selected tokens, [length, hidden] outputs), in these pieces."""
        cache = DynamicCache(config=self.text)
        masks, outputs, end = [], [], 0
        length = self.hidden.shape[1]
        hook = self.module.indexer.register_forward_hook(
            lambda _module, _inputs, mask: masks.append(mask[0, 0])
        )
        for rows in pieces:
            begin, end = end, end + rows
            places = self.rotary(self.hidden, torch.arange(end)[None])
            causal = torch.ones(end, end).tril().bool()[begin:, :]
            mask = torch.where(causal, 0.0, torch.finfo(torch.float32).min)[None, None]
            output, _ = self.module(self.hidden[:, begin:end], places, mask, cache)
            outputs.append(output[0])
        hook.remove()
        selected = torch.cat(
            [torch.nn.functional.pad(mask, (0, length - mask.shape[1])) for mask in masks]
        )
        return selected, torch.cat(outputs)

    @torch.no_grad()
    def tokens(self) -> dict[str, torch.Tensor]:
        """The arrays of a step for every token, from the layer's weights."""
        m, s, hidden = self.module, self.sizes, self.hidden[0]
        positions = torch.arange(len(hidden), dtype=torch.int32)
        cos, sin = self.tables
        eps = self.text.rms_norm_eps

        def heads(x: torch.Tensor, norm: torch.nn.Module, dim: int) -> torch.Tensor:
            return prepare_query(
                x.reshape(len(hidden), -1, dim), norm.weight, cos, sin, positions, eps=eps
            )

        query, gate = m.q_proj(hidden).view(len(hidden), -1, 2 * s.head_dim).chunk(2, -1)
        projected = m.indexer.index_qk_proj(hidden)
        index_query, index_key = projected.split((s.index_heads * s.index_dim, s.index_dim), -1)
        return dict(
            query=heads(query, m.q_norm, s.head_dim),
            gate=gate.contiguous(),
            key=heads(m.k_proj(hidden), m.k_norm, s.head_dim),
            value=m.v_proj(hidden).view(len(hidden), -1, s.head_dim),
            index_query=heads(index_query, m.indexer.q_layernorm, s.index_dim),
            index_key=index_key.contiguous(),
        )

    def server(self) -> cases.Server:
        weight = self.module.indexer.k_layernorm.weight.detach()
        return cases.Server(self.sizes, [self.tokens()], weight=weight, tables=self.tables)


def odd_pieces(length: int, seed: int) -> list[int]:
    rng, pieces = random.Random(seed), []
    while sum(pieces) < length:
        pieces.append(min(rng.choice([1, 3, 5, 7, 11]), length - sum(pieces)))
    return pieces


def near_ties(server: cases.Server, layer: Layer) -> torch.Tensor:
    """bool [length]: rows whose last chosen and first left out group score (nearly) the same."""
    s = layer.sizes
    scores = reference.score(server.tokens[0]["index_query"], server.keys(0))
    positions = torch.arange(len(scores))
    visible = (positions + 1) // s.compress_ratio
    scores = scores.masked_fill(torch.arange(scores.shape[1]) >= visible[:, None], -1.0)
    ordered = scores.sort(1, descending=True).values
    ordered = torch.nn.functional.pad(ordered, (0, 1), value=-1.0)
    last = ordered.gather(1, visible.clamp(1, s.topk)[:, None] - 1)[:, 0]
    first = ordered.gather(1, visible.clamp(max=s.topk)[:, None])[:, 0]
    return (visible > s.topk) & (last - first <= 1e-5 * last.abs())


ROWS = {"ties": 0, "selected": 0, "all": 0}


@pytest.mark.parametrize("number", range(CONFIGURATIONS), ids=lambda n: str(configuration(n)))
def test_equals_transformers(number):
    config = configuration(number)
    layer = Layer(config)
    length, odd = config.length, odd_pieces(config.length, number)
    for pieces in ([length], odd, [1] * length):
        mask, output = layer.run(pieces)
        server = layer.server()
        result = cases.run(server, 0, pieces)
        ties = near_ties(server, layer)
        for row, chosen in enumerate(cases.sets(result["token_indices"], result["counts"])):
            if not ties[row]:
                assert chosen == set(mask[row].nonzero()[:, 0].tolist()), f"row {row}"
        with torch.no_grad():
            ours = layer.module.o_proj(result["out"].flatten(1))
        error = (ours - output)[~ties].abs().max()
        assert error <= 2e-5 * output.abs().max()
        ROWS["ties"] += int(ties.sum())
        ROWS["all"] += length
        ROWS["selected"] += int(((torch.arange(length) + 1) > config.sizes.budget).sum())


def test_few_rows_are_ties():
    """Runs after the parity test: what it left out."""
    if not ROWS["all"]:
        pytest.skip("the parity test did not run")
    assert ROWS["ties"] <= 0.03 * ROWS["selected"], ROWS
    assert ROWS["selected"] >= 0.4 * ROWS["all"], ROWS


def test_keys_equal_transformers_in_bfloat16():
    """Compressed keys of a bf16 layer: transformers rotates in bf16, we round once."""
    config = configuration(1)
    layer = Layer(config)
    s, raw_keys = layer.sizes, layer.tokens()["index_key"].bfloat16()
    indexer = layer.module.indexer.bfloat16()
    raw = raw_keys[: config.length // s.compress_ratio * s.compress_ratio]
    groups = raw.view(-1, s.compress_ratio, s.index_dim)
    cos, sin = (table[:: s.compress_ratio][: len(groups)] for table in layer.tables)
    pooled = indexer.k_layernorm(groups.float().mean(1).bfloat16())
    wanted = modeling_qwen4_exp.apply_rotary_pos_emb(
        pooled[:, None], cos=torch.cat((cos, cos), 1), sin=torch.cat((sin, sin), 1)
    )
    places = torch.arange(len(groups)) * s.compress_ratio
    keys = reference.group_keys(groups, indexer.k_layernorm.weight, *layer.tables, places, 1e-6)
    torch.testing.assert_close(keys, wanted[:, 0].float(), rtol=1e-6, atol=1e-6)
