"""What grammars cost is measured with real states. Its figures are not asserted: tests have no timings."""

from __future__ import annotations

from typer.testing import CliRunner

from benchmarks.__main__ import app


def test_each_part_of_a_grammars_work_is_a_row(tiny_model):
    arguments = [tiny_model, "--requests", "2", "--tokens", "60", "--kernels", "reference"]
    result = CliRunner().invoke(app, ["grammars", *arguments])
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[3:]] == [
        "mask",
        "settle",
        "advance",
        "all",
    ]
