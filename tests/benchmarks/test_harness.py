"""The comparison harness, with fake peers: tiny scripts that speak the workers' protocol. No timing is asserted."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.compare import commands, measures, report
from benchmarks.compare.commands import register
from benchmarks.compare.contenders import Contender, make_contenders, parse_peer, parse_variant
from benchmarks.compare.harness import Settings, compare, run_once
from benchmarks.compare.workloads import longcontext, prefix
from paged_backend.bench import workloads

VOCAB = 1000
FAKE = """
import json, sys
request = json.load(sys.stdin)
done = []
for r in request["requests"]:
    n = r["output"]
    done.append({{"tokens": [r["prompt"][0]] * n, "times": [0.1 * (i + 1) for i in range(n)]}})
with open({log!r}, "a") as log:
    log.write({name!r} + " " + str(request["prefix_cache"]) + "\\n")
{extra}
answer = {{"ok": True, "load_s": 1.0, "wall_s": {wall}, "cpu_s": {wall}, "peak_rss_mb": 10.0, "requests": done}}
json.dump(answer, sys.stdout)
"""


@pytest.fixture
def fake(tmp_path):
    """fake(name, wall, extra) -> a contender whose worker notes its runs in the log; ``fake.log()`` reads it."""
    log = tmp_path / "log"

    def make(name: str, wall: float = 1.0, extra: str = "", ours: bool = False) -> Contender:
        script = tmp_path / f"{name}.py"
        script.write_text(FAKE.format(log=str(log), name=name, wall=wall, extra=extra))
        return Contender(name, sys.executable, script, ours=ours)

    make.log = lambda: log.read_text().splitlines() if log.exists() else []
    return make


def here(contender: Contender) -> str:
    return "model"


# --- workloads -------------------------------------------------------------------------------------------------------


def test_prefix_workload_shares_exactly_the_prefix():
    work = prefix(VOCAB, True, count=5, shared=40, tail=3)
    prompts = [r.prompt for r in work.requests]
    assert {len(p) for p in prompts} == {43}
    assert len({p[:40] for p in prompts}) == 1
    assert len({p[40:] for p in prompts}) == 5
    assert work.prefix_cache
    assert not prefix(VOCAB, False).prefix_cache
    assert prefix(VOCAB, False, 5, 40, 3).requests == work.requests


def test_longcontext_workload_enters_late():
    work = longcontext(VOCAB, running=4, prompt=100, output=20, after=5)
    assert [r.after for r in work.requests] == [0, 0, 0, 0, 5]
    assert len(work.requests[-1].prompt) == 100
    assert work.max_len >= 108
    with pytest.raises(ValueError, match="after"):
        longcontext(VOCAB, output=8, after=8)


# --- who takes part --------------------------------------------------------------------------------------------------


def test_contenders_are_parsed():
    ours = parse_variant("int8:max_num_batched_tokens=256,kernels=c", "py")
    assert ours.options == {"quantization": "int8", "max_num_batched_tokens": 256, "kernels": "c"}
    assert ours.ours
    peer = parse_peer("openvino:weights=q8_0,precision=f32,requests=8=/some/bin/python")
    assert (peer.python, peer.format, peer.limit) == ("/some/bin/python", "gguf-q8_0", 8)
    assert peer.options == {"precision": "f32"}
    assert "q8_0" in peer.label
    assert parse_peer("vllm:dtype=bfloat16=py").format == "hf-bfloat16"
    assert parse_peer("llama.cpp:model=/x.gguf=py").model == "/x.gguf"
    assert parse_peer("transformers-batch=py").options["mode"] == "batch"
    for peer in (parse_peer(f"{name}=py") for name in ("transformers", "vllm", "openvino", "llama.cpp")):
        assert peer.worker.exists()


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        ("vllm", "NAME=PYTHON"),
        ("nobody=py", "unknown peer 'nobody'"),
        ("openvino:weights=q3=py", "weights must be one of f16"),
        ("vllm:weights=f16=py", "weights must be one of hf"),
        ("vllm:dtype=py", "unknown peer"),
    ],
)
def test_bad_peers_are_refused(peer, message):
    if peer == "vllm:dtype=py":
        message = "option=value"
    with pytest.raises(ValueError, match=message):
        parse_peer(peer)


def test_bad_variants_are_refused():
    with pytest.raises(ValueError, match="unknown variant 'fp99'"):
        parse_variant("fp99", "py")
    with pytest.raises(ValueError, match="twice"):
        make_contenders(["bf16", "bf16"], [], "py")
    with pytest.raises(ValueError, match="nobody"):
        make_contenders([], [], "py")


# --- running ---------------------------------------------------------------------------------------------------------


def test_runs_alternate_and_medians_are_taken(fake):
    work = workloads.throughput(VOCAB, 3)
    a, b = fake("a", wall=2.0, ours=True), fake("b", wall=4.0)
    results = compare(work, [a, b], here, Settings(repeats=3))
    assert [line.split()[0] for line in fake.log()] == ["a", "b", "a", "b", "a", "b"]
    rows, base = measures.rows(measures.THROUGHPUT, results, frozenset({"a"}), len(work.requests))
    assert base == "b"  # the best peer, never one of ours
    assert rows[0].ratio == pytest.approx(2.0)
    assert rows[1].ratio == pytest.approx(1.0)
    assert rows[0].values["tokens_per_s"] == pytest.approx(work.output_tokens / 2.0)
    assert rows[1].agreement == 1.0
    text = report.table(measures.THROUGHPUT, rows, base)
    assert "ratio: to b" in text
    data = json.loads(report.as_json("t", rows, base, {}))
    assert [len(row["runs"]) for row in data["rows"]] == [3, 3]


def test_a_missing_peer_is_reported_and_the_others_run(fake, tmp_path):
    missing = replace(fake("gone"), python=str(tmp_path / "no-python-here"))
    results = compare(workloads.throughput(VOCAB, 2), [missing, fake("there")], here, Settings(repeats=2))
    assert len(results["gone"]) == 1  # not tried again
    assert "no-python-here" in results["gone"][0].error
    rows, base = measures.rows(measures.THROUGHPUT, results, frozenset())
    assert base == "there"
    assert rows[0].values == {}
    assert rows[0].ratio is None
    text = report.table(measures.THROUGHPUT, rows, base)
    assert "failed" in text
    assert "no-python-here" in text


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("done[1]['tokens'].append(5)", "wrong lengths: request 1 has"),
        ("done[0]['tokens'].pop()", "wrong lengths: request 0 has"),
        ("done.pop()", "wrong lengths: 1 answers to 2"),
        ("raise RuntimeError('out of cheese')", "out of cheese"),
        ("print('chatter')", "status 0 and no answer"),
        ("json.dump({'ok': False, 'error': 'no such model'}, sys.stdout); sys.exit()", "no such model"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
    ],
)
def test_whatever_goes_wrong_is_a_failed_run(fake, extra, message):
    work = replace(workloads.throughput(VOCAB, 2), warmup=())
    result = run_once(work, fake("x", extra=extra), here, Settings(timeout=1 if "sleep" in extra else 60))
    assert result.error is not None
    assert message in result.error


def test_a_model_that_cannot_be_exported_fails_its_peer_only(fake):
    def locate(contender):
        raise RuntimeError("cannot be made")

    assert run_once(workloads.throughput(VOCAB, 2), fake("x"), locate, Settings()).error == "cannot be made"


def test_ctrl_c_keeps_what_was_measured(fake):
    def interrupt(turn, result):
        raise KeyboardInterrupt

    results = compare(
        workloads.throughput(VOCAB, 2), [fake("a"), fake("b")], here, Settings(repeats=2), interrupt
    )
    rows, base = measures.rows(measures.THROUGHPUT, results, frozenset())
    assert base == "a"
    assert rows[1].error == "it was not run"


def test_a_limited_peer_runs_the_first_requests_and_says_so(fake):
    work = workloads.throughput(VOCAB, 6)
    results = compare(work, [replace(fake("slow"), limit=2)], here, Settings(repeats=1))
    assert results["slow"][0].requests == work.requests[:2]
    rows, base = measures.rows(measures.THROUGHPUT, results, frozenset(), 6)
    assert "first 2 requests" in report.table(measures.THROUGHPUT, rows, base)


def test_longcontext_reads_the_gaps_of_those_that_ran():
    work = longcontext(VOCAB, running=2, prompt=50, output=6, after=2)
    times = [[1.0, 2.0, 3.0, 4.0, 9.0, 10.0], [1.0, 2.0, 3.0, 4.0, 9.0, 10.0], [9.0 + i for i in range(8)]]
    run = measures.RunResult("x", wall_s=10, cpu_s=10, requests=work.requests, tokens=[[1]] * 3, times=times)
    found = measures.LONGCONTEXT.measure(run)
    assert found["longest_gap_ms"] == pytest.approx(5000)
    assert found["gap_ratio"] == pytest.approx(5.0)
    assert found["long_first_token_s"] == pytest.approx(7.0)


def test_a_peer_without_token_times_fails_where_they_are_needed(fake):
    work = workloads.latency(VOCAB, 2, 4, 4)
    bad = fake("blind", extra="for d in done: d['times'] = None")
    results = compare(work, [bad, fake("seeing")], here, Settings(repeats=1))
    rows, base = measures.rows(measures.LATENCY, results, frozenset())
    assert "no time for each token" in rows[0].error
    assert base == "seeing"


# --- the workers' own protocol ---------------------------------------------------------------------------------------


def test_the_shared_protocol_keeps_stdout_clean_and_drives_steps(tmp_path):
    """A peer that is stepped, talks on stdout, and is asked for requests that enter late and one by one."""
    folder = Path(commands.__file__).parent / "peers"
    script = tmp_path / "worker.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(folder)!r})\n"
        """
from worker_protocol import run_steps, serve

class Engine:
    def __init__(self, request):
        print("a banner")
    def run(self, requests):
        self.left, self.order = {}, []
        done = run_steps(self, requests)
        print("order", self.order)
        return done
    def add(self, index, prompt, output):
        self.left[index] = output
        self.order.append(index)
    def step(self):
        for index in list(self.left):
            self.left[index] -= 1
            yield index, [len(self.order)]
            if not self.left[index]:
                del self.left[index]

serve(Engine)
"""
    )
    peer = Contender("stepped", sys.executable, script)
    late = longcontext(VOCAB, running=2, prompt=10, output=6, after=3)
    result = run_once(late, peer, here, Settings())
    assert result.error is None
    assert list(result.tokens[0]) == [2, 2, 2, 3, 3, 3]  # the third request came after three tokens
    single = run_once(workloads.latency(VOCAB, 2, 4, 4), peer, here, Settings())
    assert [list(t) for t in single.tokens] == [[1] * 4, [1] * 4]


# --- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, fake):
    app = typer.Typer()
    register(app)
    peers = {"quick": fake("quick", 1.0, ours=True), "slow": fake("slow", 2.0)}
    monkeypatch.setattr(commands, "make_contenders", lambda *_: list(peers.values()))
    monkeypatch.setattr(commands, "_vocab_size", lambda model: VOCAB)
    return lambda *args: CliRunner().invoke(app, list(args))


def test_commands_write_table_json_and_picture(command, tmp_path):
    pytest.importorskip("matplotlib")
    found, picture = tmp_path / "out.json", tmp_path / "out.png"
    done = command("latency", "m", "--repeats", "2", "--json", str(found), "--plot", str(picture))
    assert done.exit_code == 0, done.output
    assert "quick" in done.output
    data = json.loads(found.read_text())
    assert data["baseline"] == "slow"
    assert data["settings"]["repeats"] == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_prefix_runs_each_with_and_without_the_cache(command, fake):
    done = command("prefix", "m", "--repeats", "1", "--requests", "2", "--shared", "8")
    assert done.exit_code == 0, done.output
    assert fake.log() == ["quick True", "quick False", "slow True", "slow False"]
    assert "quick not cached" in done.output


def test_commands_refuse_bad_options(command):
    for args in (["--repeats", "0"], ["--cores", "x"], ["--baseline", "nobody"], ["--requests", "0"]):
        assert command("throughput", "m", *args).exit_code == 2


# --- the profile of a step -------------------------------------------------------------------------------------------


def test_marks_split_a_step_and_drop_what_was_interrupted(monkeypatch):
    from types import SimpleNamespace

    from benchmarks.parts import step as step_module

    now = [0.0]
    monkeypatch.setattr(step_module.time, "perf_counter", lambda: now[0])

    def spend(seconds):
        now[0] += seconds

    marks = step_module.Marks()
    stats = SimpleNamespace(scheduled_tokens=0)
    number = [0]
    run = marks.wrap("C code", lambda: spend(4.0 + (100.0 if number[0] % 3 == 0 else 0.0)))

    def step():
        number[0] += 1
        stats.scheduled_tokens += 2
        spend(1.0)
        run()
        spend(0.5)
        return ["token", "token"]

    core = SimpleNamespace(step=step, scheduler=SimpleNamespace(stats=stats))
    core.step = marks.wrap_step(core)
    for _ in range(9):
        core.step()
        spend(0.25)
    found = marks.profile(2)
    assert found.steps == 8
    parts = {"C code": 4.0, "update": 1.5, "other": 0.25}
    assert {name: found.parts[name] / 1000 for name in parts} == pytest.approx(parts)
    assert found.outside == pytest.approx(1.75 / 5.75)
    with pytest.raises(ValueError, match="never ran together"):
        marks.profile(3)


@pytest.mark.slow
def test_a_step_of_the_demo_model_is_profiled():
    from benchmarks.parts.step import PARTS, profile_steps

    for profile in profile_steps("demo", [1, 3], steps=6, context=8, max_model_len=256, num_blocks=64):
        assert set(profile.parts) == set(PARTS)
        assert profile.steps >= 4
        assert 0 < profile.outside < 1
