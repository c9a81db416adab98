"""The pipeline benchmark with fake workers; what its real worker does is in tests/adapters/huggingface."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.compare import pipeline_command
from benchmarks.compare.contenders import Contender
from benchmarks.compare.harness import Settings
from benchmarks.compare.pipeline import chats, run_once, same_answers
from benchmarks.compare.pipeline_command import register

FAKE = """
import json, sys
request = json.load(sys.stdin)
done = [{{"tokens": [len(r["prompt"][0]["content"])] * {length}}} for r in request["requests"]]
json.dump({{"ok": True, "load_s": 1.0, "wall_s": {wall}, "cpu_s": {wall}, "requests": done}}, sys.stdout)
"""


def worker(folder: Path, name: str, wall: float, length: int) -> Path:
    path = folder / f"{name}.py"
    path.write_text(FAKE.format(wall=wall, length=length))
    return path


def test_chats_are_seeded_and_as_long_as_chats():
    first, again, other = chats(64), chats(64), chats(64, seed=1)
    assert first == again != other
    letters = [len(chat[0]["content"]) for chat in first]
    assert mean(letters) / 4 == pytest.approx(144, rel=0.15)
    assert len(set(letters)) > 40
    assert [len(chat) for chat in first] == [1] * 64
    with pytest.raises(ValueError, match="at least 1"):
        chats(0)


def test_answers_count_as_long_as_they_are(tmp_path):
    short, long = (
        Contender(name, sys.executable, worker(tmp_path, name, wall, length))
        for name, wall, length in (("short", 2.0, 3), ("long", 4.0, 5))
    )
    results = {c.label: [run_once(chats(6), c, "model", Settings())] for c in (short, long)}
    assert [r[0].tokens_per_s for r in results.values()] == [6 * 3 / 2, 6 * 5 / 4]
    assert same_answers(results, "short") == ["long: 0 of 6 answers are short's, token for token"]
    assert same_answers(results, None) == []


def test_a_worker_that_fails_is_a_line(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit(3)")
    result = run_once(chats(2), Contender("broken", sys.executable, script), "model", Settings())
    assert "status 3" in result.error


@pytest.fixture
def command(monkeypatch, tmp_path):
    theirs, mine = worker(tmp_path, "theirs", 6.0, 4), worker(tmp_path, "mine", 1.5, 4)
    made = [
        Contender("theirs", sys.executable, theirs),
        Contender("mine", sys.executable, mine, ours=True),
    ]
    monkeypatch.setattr(pipeline_command, "_contenders", lambda *_: made)
    monkeypatch.setattr("benchmarks.compare.export.export", lambda *_: tmp_path)
    app = typer.Typer()
    register(app)
    return lambda *args: CliRunner().invoke(app, args)  # its only command needs no name


def test_the_command_alternates_and_compares(command):
    done = command("m", "--repeats", "2", "--requests", "3", "--cores", "all", "--threads", "1")
    assert done.exit_code == 0, done.output
    assert "mine: 3 of 3 answers are theirs's, token for token" in done.output
    runs = [line.split()[2] for line in done.output.splitlines() if line.startswith("  run ")]
    assert runs == ["theirs:", "mine:"] * 2
    row = next(line for line in done.output.splitlines() if line.startswith("mine "))
    assert "4.00" in row.split()


def test_bad_options_are_refused(command):
    for name in ("--repeats", "--batch-size", "--max-new-tokens", "--requests"):
        assert command("m", name, "0").exit_code == 2


def test_contenders():
    made = pipeline_command._contenders(["fp32", "int8"], 16, {"max_new_tokens": 5, "ignore_eos": False})
    assert [c.label for c in made] == ["transformers batch_size=16", "ours fp32", "ours int8"]
    assert [c.ours for c in made] == [False, True, True]
    assert made[2].options["quantization"] == "int8"
    assert made[0].worker.exists()
    for bad, message in (
        (["fp32", "fp32"], "twice"),
        (["int8:requests=3"], "requests"),
        (["nonsense"], "unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            pipeline_command._contenders(bad, 16, {})
