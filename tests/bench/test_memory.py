"""KV memory of the engine under traces of lengths: the promise, what holds for any trace, traces, the command."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from paged_backend.bench.memory import CATEGORIES, run_paged
from paged_backend.bench.traces import PRESETS, TraceRequest, make_trace, mean_lengths, read_trace
from paged_backend.cli.app import app

SMALL = {"pool_tokens": 1000, "context": 256, "max_num_seqs": 16, "max_num_batched_tokens": 64}
requests = st.builds(TraceRequest, st.integers(1, 120), st.integers(1, 120), st.floats(0, 60))
traces = st.lists(requests, min_size=1, max_size=20)


# --- the promise -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharegpt():
    return make_trace("sharegpt", 96, seed=1)


def test_waste_is_below_4_percent_on_sharegpt_like_lengths_at_block_16(sharegpt):
    run = run_paged(sharegpt, pool_tokens=15728)
    assert run.saturated
    assert run.waste < 0.04


def test_a_block_of_128_would_break_the_promise(sharegpt):
    assert run_paged(sharegpt, pool_tokens=15728, block_size=128).waste > 0.08


# --- what holds for any trace ----------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(traces)
def test_a_running_request_wastes_less_than_one_block(trace):
    for sample in run_paged(trace, **SMALL).samples:
        assert sample.reserved + sample.internal < 16 * (sample.running + sample.waiting) + 1


@settings(max_examples=15)
@given(traces)
def test_every_slot_of_the_pool_is_in_one_state_and_every_token_is_computed(trace):
    run = run_paged(trace, **SMALL)
    for sample in run.samples:
        states = [getattr(sample, name) for name in CATEGORIES]
        assert min(states) >= 0
        assert sum(states) == run.pool_tokens
    needed = sum(r.prompt_tokens + r.output_tokens - 1 for r in trace)
    assert run.computed_tokens >= needed
    assert run.preemptions or run.computed_tokens == needed
    assert run.samples[-1].running == run.samples[-1].waiting == 0


# --- traces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_lengths_have_the_paper_s_means_after_clipping(preset):
    trace = make_trace(preset, 20_000, seed=3, longest=10_000)
    for mean, lengths in zip(mean_lengths(trace), PRESETS[preset]):
        assert mean == pytest.approx(lengths.mean, rel=0.03)
    assert max(r.prompt_tokens for r in trace) <= 1024
    assert min(r.output_tokens for r in trace) >= 1


def test_the_same_seed_gives_the_same_trace_and_the_rate_changes_arrivals_only():
    assert make_trace(seed=4) == make_trace(seed=4) != make_trace(seed=5)
    at_once, spread = make_trace(seed=4), make_trace(seed=4, rate=0.5)
    lengths = [[(r.prompt_tokens, r.output_tokens) for r in trace] for trace in (at_once, spread)]
    assert lengths[0] == lengths[1]
    assert spread[-1].arrival == pytest.approx(len(spread) / 0.5, rel=0.3)


def test_no_request_of_a_trace_exceeds_the_context():
    assert max(r.prompt_tokens + r.output_tokens for r in make_trace(num_requests=500, longest=300)) <= 300


def test_a_trace_file_is_read_and_a_bad_line_is_named(tmp_path):
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"prompt_tokens": 3, "output_tokens": 4}\n\n{"prompt_tokens": 5, "output_tokens": 6}\n')
    assert read_trace(path) == [TraceRequest(3, 4), TraceRequest(5, 6)]
    for bad in (
        "{}",
        "[]",
        '{"prompt_tokens": 0, "output_tokens": 1}',
        '{"prompt_tokens": 9999, "output_tokens": 1}',
    ):
        path.write_text(f'{{"prompt_tokens": 3, "output_tokens": 4}}\n{bad}\n')
        with pytest.raises(ValueError, match=r"lengths\.jsonl:2"):
            read_trace(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "x"}, "sharegpt"),
        ({"num_requests": 0}, "one request"),
        ({"rate": 0.0}, "rate"),
        ({"longest": 1}, "room"),
    ],
)
def test_an_impossible_trace_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_trace(**options)


# --- the command -----------------------------------------------------------------------------------------------------

FLAGS = [
    "bench",
    "memory",
    "--requests",
    "12",
    "--pool-tokens",
    "2100",
    "--context",
    "512",
    "--trace",
    "alpaca",
]


def test_the_command_prints_a_table_and_writes_its_figures(tmp_path):
    figures = tmp_path / "m.json"
    result = CliRunner().invoke(app, [*FLAGS, "--json", str(figures)])
    assert result.exit_code == 0, result.output
    data = json.loads(figures.read_text())
    assert 0 < data["waste_of_allocated"] < 1
    assert f"{data['waste_of_allocated']:.1%}" in result.stdout
    assert all(name in result.stdout for name in CATEGORIES)


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--trace", "/nonexistent.jsonl"], 1, "nonexistent"),
        (["--pool-tokens", "100"], 1, "raise the pool"),
        (["--block-size", "3"], 2, "power of two"),
        (["--max-num-seqs", "0"], 2, "max_num_seqs"),
    ],
)
def test_bad_options_end_with_a_clear_message(flags, status, message):
    result = CliRunner().invoke(app, [*FLAGS, *flags], terminal_width=300)
    assert result.exit_code == status
    assert message in result.stderr
