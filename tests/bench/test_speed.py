"""Throughput, latency and perplexity of one engine: workloads, what is measured, the commands; no timings."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from paged_backend.bench import speed, workloads
from paged_backend.bench.perplexity import default_text, perplexity, windows
from paged_backend.bench.workloads import SHORTEST_CONTEXT
from paged_backend.cli.app import app
from paged_backend.engine.registry import get_engine

VOCAB = 1000


@pytest.fixture(scope="module")
def engine(tiny_model):
    with get_engine(tiny_model, share=False, kernels="reference", enable_prefix_caching=False) as opened:
        yield opened


# --- workloads -------------------------------------------------------------------------------------------------------


def test_throughput_workload_is_seeded_and_hits_the_means():
    first, again, other = (workloads.throughput(VOCAB, 64, seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    for work in (first, other, workloads.throughput(VOCAB, 200, 7)):
        count = len(work.requests)
        assert work.prompt_tokens / count == pytest.approx(144, abs=1)
        assert work.output_tokens / count == pytest.approx(118, abs=1)
        assert max(len(r.prompt) for r in work.requests) <= 1024
        assert max(r.output for r in work.requests) <= 256
        assert min(min(len(r.prompt), r.output) for r in work.requests) >= 1
        assert all(len(r.prompt) + r.output < work.max_len for r in work.requests)
        assert all(0 <= t < VOCAB for r in work.requests for t in r.prompt)
    assert len({len(r.prompt) for r in first.requests}) > 32  # they do differ


@pytest.mark.parametrize("context", [SHORTEST_CONTEXT, 700, 1024])
def test_chats_fit_into_a_short_context_with_the_same_means(context):
    work = workloads.throughput(VOCAB, 64, context=context)
    assert max(len(r.prompt) + r.output for r in work.requests) <= context
    assert work.prompt_tokens / 64 == pytest.approx(144, abs=1)
    assert work.output_tokens / 64 == pytest.approx(118, abs=1)
    with pytest.raises(ValueError, match="context must be at least"):
        workloads.throughput(VOCAB, 64, context=SHORTEST_CONTEXT - 1)


def test_latency_workload_is_one_by_one():
    work = workloads.latency(VOCAB, 3, prompt=10, output=5)
    assert (work.one_by_one, work.stream, work.max_seqs) == (True, True, 1)
    with pytest.raises(ValueError, match="output"):
        workloads.latency(VOCAB, output=1)


# --- what is measured ------------------------------------------------------------------------------------------------


def test_every_request_makes_all_of_its_tokens(engine):
    work = workloads.throughput(engine.tokenizer.vocab_size, 5, context=engine.max_model_len)
    before = engine.stats().generation_tokens
    found = speed.throughput(engine, work)
    made = engine.stats().generation_tokens - before
    assert made == work.output_tokens + sum(r.output for r in work.warmup)
    assert found["tokens_per_s"] == pytest.approx(work.output_tokens / found["seconds"])
    assert 0 < found["first_token_s"] < found["seconds"]


def test_an_answer_of_another_length_is_an_error_and_no_figure(engine):
    longest = engine.max_model_len
    request = workloads.BenchRequest((5,) * (longest - 3), 9)
    for measure in (speed.throughput, speed.latency):
        with pytest.raises(RuntimeError, match="9 were asked for"):
            measure(engine, workloads.Workload("cut short", (request,), (), longest, 1))


def test_requests_alone_do_not_run_together(engine):
    work = workloads.latency(engine.tokenizer.vocab_size, 3, prompt=9, output=5)
    before = engine.stats().num_steps
    found = speed.latency(engine, work)
    steps = engine.stats().num_steps - before
    assert steps >= 3 * 5  # together they would take five
    assert min(found.values()) > 0


def test_perplexity_is_that_of_the_models_own_logprobs(engine, tiny_model):
    import torch
    from transformers import AutoModelForCausalLM

    text = "the quick brown fox jumps over the lazy dog and the lazy dog sleeps"
    value, count = perplexity(engine, text, length=8, limit=20)
    ids = engine.tokenizer.encode(text, add_special_tokens=False)[:20]
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    losses = []
    for window in windows(ids, 8, 20):
        with torch.no_grad():
            logits = model(torch.tensor([window])).logits[0, :-1].double()
        losses += torch.nn.functional.cross_entropy(
            logits, torch.tensor(window[1:]), reduction="none"
        ).tolist()
    assert count == len(losses)
    assert value == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)


def test_perplexity_windows():
    assert [len(w) for w in windows(range(25), 10, 100)] == [10, 10, 5]
    assert [len(w) for w in windows(range(25), 10, 21)] == [10, 10]
    assert len(default_text()) > 200_000
    with pytest.raises(ValueError, match="fewer than 2"):
        windows([1], 10, 100)
    with pytest.raises(ValueError, match="at least 2"):
        windows(range(9), 1, 100)


# --- the commands ----------------------------------------------------------------------------------------------------

SHORT = {
    "throughput": ["--requests", "2", "--repeats", "2"],
    "latency": ["--requests", "2", "--prompt", "5", "--output", "3", "--repeats", "2"],
    "perplexity": ["--tokens", "30", "--window", "10"],
}


@pytest.mark.parametrize("command", SHORT)
def test_a_command_prints_and_writes_its_figures(command, tiny_model, tmp_path):
    file = tmp_path / "figures.json"
    arguments = [*SHORT[command], "--kernels", "reference", "--json", str(file)]
    result = CliRunner().invoke(app, ["bench", command, tiny_model, *arguments])
    assert result.exit_code == 0, result.output
    data = json.loads(file.read_text())
    assert data["engine"] == {"kernels": "reference"}
    if command == "perplexity":
        assert f"perplexity {data['perplexity']:.4f} over 27 tokens" in result.stdout
    else:
        assert "2 requests" in data["title"]
        assert len(data["runs"]) == 2
        assert "median" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["throughput", "--repeats", "0"], 2, "--repeats"),
        (["throughput", "--requests", "0"], 1, "requests must be at least 1"),
        (["throughput", "--max-model-len", "100"], 1, "context must be at least"),
        (["latency", "--output", "1"], 1, "output must be at least 2"),
        (["latency", "--prompt", "5000"], 1, "5000"),
        (["perplexity", "--window", "1"], 1, "at least 2"),
        (["perplexity", "--text", "/nonexistent"], 1, "nonexistent"),
        (["perplexity", "--quantization", "int5"], 2, "int5"),
    ],
)
def test_bad_options_end_with_a_clear_message(arguments, status, message, tiny_model):
    result = CliRunner().invoke(
        app, ["bench", arguments[0], tiny_model, "--kernels", "reference", *arguments[1:]], terminal_width=300
    )
    assert result.exit_code == status
    assert message in result.stderr
