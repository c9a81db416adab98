"""``python -m benchmarks pipeline`` with its real workers, on the tiny model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("more", [[], ["--ignore-eos"]])
def test_both_sides_give_the_same_answers(more: list[str], tiny_model: str, tmp_path: Path) -> None:
    long = shutil.copytree(tiny_model, tmp_path / "long")
    config = json.loads((long / "config.json").read_text())
    (long / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    sizes = ["--requests", "5", "--batch-size", "2", "--max-new-tokens", "9", "--repeats", "1"]
    done = CliRunner().invoke(
        app, ["pipeline", str(long), "--variant", "reference", "--cores", "all", *sizes, *more]
    )
    assert done.exit_code == 0, done.output
    assert "5 of 5 answers are transformers batch_size=2's, token for token" in done.output
