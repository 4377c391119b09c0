"""Random mixed batches end to end: decode rows, drafts of which some are rejected, prefill behind
prefixes, in any order of pages. All that must not be read is poisoned."""

import random

import pytest
import torch

from tests.torch_core.qsa import cases
from tests.torch_core.qsa.checked import checking
from tests.torch_core.qsa.test_api import LARGE
from torch_core.qsa import launch

REQUESTS = 6
FILLS = (float("nan"), float("inf"), 3e4)
SCALES = dict(k_scale=0.25, v_scale=0.5)
E4M3 = "float8_e4m3fn"
GEOMETRIES = {
    "qwen": LARGE,
    "e4m3": cases.Sizes(
        dtype="bfloat16", kv_dtype=E4M3, index_dtype=E4M3, num_qo_heads=8, num_kv_heads=2,
        head_dim=128, index_dim=64, budget=512, page_size=32, pages_per_seq=64, num_draft=1,
    ),
    "float16": cases.Sizes(
        dtype="float16", num_qo_heads=14, num_kv_heads=2, head_dim=64, index_heads=3, index_dim=40,
        compress_ratio=2, budget=512, page_size=16, pages_per_seq=96, num_draft=2,
    ),
    "ratio 8": cases.Sizes(
        dtype="bfloat16", kv_dtype=E4M3, num_qo_heads=16, num_kv_heads=1, head_dim=128,
        index_heads=1, index_dim=256, compress_ratio=8, budget=1024, page_size=128,
        pages_per_seq=24, num_draft=7,
    ),
}  # fmt: skip
TINY = cases.Sizes(dtype="float16", head_dim=64, budget=8, pages_per_seq=4, num_draft=1)


class Server(cases.Server):
    """Behind a request's pages its table names the null page, pages that do not exist, or other
    requests' pages."""

    def mapped_pages(self, request: int, length: int) -> torch.Tensor:
        sizes, pages = self.sizes, len(self.key_cache)
        garbage = torch.tensor([0, -1, pages, 2**31 - 1, -(2**31), 1], dtype=torch.int32)
        columns = torch.arange(sizes.pages_per_seq)
        unmapped = garbage[(columns + request + length) % len(garbage)].to(self.device)
        used = (columns * sizes.page_size < length).to(self.device)
        return torch.where(used, self.page_table[request], unmapped)


def random_batch(server: cases.Server, rng: random.Random, chunks: list[int]) -> None:
    """A step of some requests with some padding rows; then the server takes back a part of each
    one's drafts."""
    sizes = server.sizes
    query_len = 1 + rng.choice([0, sizes.num_draft])
    room = [sizes.pages_per_seq * sizes.page_size - length for length in server.lengths]
    order = rng.sample(range(REQUESTS), REQUESTS)
    ready = [r for r in order if server.lengths[r] and room[r] >= query_len]
    decodes = ready[: rng.choice([0, 1, 3, 4])]
    others = [request for request in order if request not in decodes]
    others = others[: rng.choice([0, 1, 2])] if decodes else others[: rng.choice([1, 2, 3])]
    takes = [(request, query_len) for request in decodes]
    takes += [(request, min(rng.choice(chunks), room[request])) for request in others]
    server.step(takes, num_decodes=len(decodes), padding=rng.choice([0, 0, 3]))
    for request in decodes:
        server.lengths[request] -= rng.randrange(query_len)


def serve(sizes: cases.Sizes, batches: int, servers: int, chunks: list[int], device: str) -> None:
    capacity = sizes.pages_per_seq * sizes.page_size
    tape = {n: x.to(device) for n, x in cases.random_tokens(sizes, capacity).items()}
    tokens = [{n: x.roll(101 * r, 0) for n, x in tape.items()} for r in range(REQUESTS)]
    scales = SCALES if sizes.kv_dtype else {}
    long = 3 * sizes.budget // 2 + 10
    for seed in range(servers):
        rng = random.Random(seed)
        fill = FILLS[seed % len(FILLS)]
        server = Server(sizes, tokens, fill=fill, seed=seed, device=device, **scales)
        with checking():
            server.step([(0, long + 1), (1, 2), (2, 0), (3, long // 2)])
            for _ in range(batches - 1):
                random_batch(server, rng, chunks)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GEOMETRIES)
def test_50_batches(name):
    serve(GEOMETRIES[name], 25, 2, [0, 1, 2, 3, 5, 17, 60, 150, 300], "cuda")


def test_2_batches_in_the_interpreter(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU in this process")
    monkeypatch.setattr(launch, "uses_kernels", lambda array: True)
    serve(TINY, 2, 1, [0, 1, 2, 3], "cpu")
