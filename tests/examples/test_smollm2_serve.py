"""Continuous batching in the example: every request gets the tokens that it gets alone."""

import importlib

import numpy as np
import pytest

from tests.examples.test_smollm2_steps import one_torch_thread, params, run, write_model

modeling, serve = map(importlib.import_module, ("modeling", "serve"))
__all__ = ["one_torch_thread"]  # a fixture of every test here too

LENGTHS = [1, 30, 17, 5, 9, 63, 2, 40]
NEW_TOKENS = [12, 3, 9, 1, 20, 6, 15, 7]
PROMPTS = [np.random.default_rng(n).integers(0, 512, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), 2)


@pytest.fixture(scope="module")
def loaded(model_path):
    return params.load(model_path, "float32")


@pytest.fixture(scope="module")
def alone(loaded):
    """The tokens of each prompt as the only one of a batch."""
    engine = modeling.Engine(loaded.model)
    # One page a request and small chunks: few programs to compile.
    options = dict(max_new_tokens=max(NEW_TOKENS), page_size=96, prefill_chunk=8)
    tokens = [run.generate(engine, [prompt], **options).tokens[0] for prompt in PROMPTS]
    return [each[:count] for each, count in zip(tokens, NEW_TOKENS, strict=True)]


def new_server(loaded, **options):
    defaults = dict(slots=3, num_pages=24, max_len=96, page_size=8, prefill_chunk=16)
    return serve.Server(modeling.Engine(loaded.model), **defaults | options)


def serve_all(server, arrivals) -> list[list[int]]:
    """Submits request i before pass arrivals[i], and runs until all are done."""
    requests, finished = {}, []
    while len(finished) < len(arrivals):
        for index in range(len(arrivals)):
            if arrivals[index] <= server.passes and index not in requests:
                requests[index] = server.submit(PROMPTS[index], NEW_TOKENS[index])
        finished += server.step()
        assert server.passes < 500
    return [requests[index].tokens for index in range(len(arrivals))]


@pytest.mark.parametrize(
    ("options", "most"),
    [
        pytest.param({}, 3, id="3-slots"),
        # Of eleven pages the request of 69 tokens has nine.
        pytest.param(dict(slots=5, num_pages=11, prefill_chunk=1), 4, id="few-pages"),
    ],
)
def test_requests_join_and_leave(loaded, alone, options, most):
    """They come at any time, wait for slots and pages, and compile nothing but two programs."""
    server = new_server(loaded, **options)
    beside = []
    step = server.step
    server.step = lambda: (beside.append(sum(map(bool, server.running))), step())[1]
    for arrivals in ([0] * 8, [0, 2, 2, 5, 9, 10, 11, 30]):
        arrivals = [server.passes + arrival for arrival in arrivals]
        assert serve_all(server, arrivals) == alone
        assert (server.pool.ref_counts == 0).all() and (server.pool.page_table == -1).all()
        assert not server.pool.seq_lens.any()
    assert server.run._cache_size() == 2
    assert max(beside) == most


def test_stops_at_eos(loaded, alone):
    eos = alone[4][4]
    wanted = [tokens[: tokens.index(eos) + 1] if eos in tokens else tokens for tokens in alone]
    assert serve_all(new_server(loaded, eos_ids=frozenset([eos])), [0] * 8) == wanted


@pytest.mark.parametrize(("prompt", "count"), [([], 1), ([5], 0), ([5] * 90, 7)])
def test_refuses_what_never_fits(loaded, prompt, count):
    with pytest.raises(ValueError, match=rf"at most 96 together, got {len(prompt)} and {count}"):
        new_server(loaded).submit(prompt, count)


def test_command(model_path, capsys):
    path = str(model_path)
    serve.main(["abc", "b", "cd", "--slots", "2", "--max-new-tokens", "3", "--model", path])
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("> ")] == [
        "> after pass 3: abc", "> after pass 3: b", "> after pass 6: cd",
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        serve.main(["abcde", "--max-new-tokens", "1020", "--num-pages", "2", "--model", path])
    assert "at most 32 together, got 5 and 1020" in capsys.readouterr().err
