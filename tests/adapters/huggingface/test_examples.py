"""The examples run as they are, on the demo model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from demo_model import needs_demo

pytestmark = [pytest.mark.slow, needs_demo]
EXAMPLES = Path(__file__).parents[3] / "examples"


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate() -> None:
    assert "Paris" in run(str(EXAMPLES / "hf_generate.py"))


def test_pipeline() -> None:
    assert "The capital of France is Paris." in run(str(EXAMPLES / "hf_pipeline.py"))


def test_batch_over_a_jsonl_file(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "The capital of France is", "id": 1}, {"prompt": "1, 2, 3,", "id": 2}]
    source.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    run(str(EXAMPLES / "hf_batch_jsonl.py"), str(source), str(target), "demo", "--max-new-tokens", "6")
    results = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [{k: v for k, v in r.items() if k != "output"} for r in results] == lines
    assert "Paris" in results[0]["output"]
