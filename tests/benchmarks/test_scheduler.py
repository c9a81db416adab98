"""The scheduler benchmark measures the batch it says. Its figures are not asserted: tests have no timings."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.parts.scheduler import measure_overlap, measure_step


@pytest.mark.parametrize("running", [1, 8, 40])
def test_all_parts_of_a_step_are_measured(running):
    cost = measure_step(running, waiting=3, steps=5)
    assert (cost.running, cost.waiting) == (running, 3)
    assert min(cost.schedule, cost.build, cost.commit) > 0
    assert cost.total == cost.schedule + cost.build + cost.commit


def test_steps_on_a_device_are_measured_in_turn_and_ahead():
    found = measure_overlap(3, 1.0, steps=5)
    assert (found.running, found.device) == (3, 1000.0)
    assert min(found.in_turn, found.ahead) > 0
    table = CliRunner().invoke(app, ["scheduler", "--running", "2", "--steps", "3", "--device-ms", "1"])
    assert "ahead" in table.stdout
    result = CliRunner().invoke(app, ["scheduler", "--device-ms", "1", "--waiting", "2"])
    assert result.exit_code == 2


def test_the_command_prints_a_table_or_json():
    table = CliRunner().invoke(app, ["scheduler", "--running", "2", "--steps", "5"])
    assert "schedule" in table.stdout
    result = CliRunner().invoke(
        app, ["scheduler", "--running", "2", "--running", "3", "--steps", "5", "--json"]
    )
    assert [cost["running"] for cost in json.loads(result.stdout)] == [2, 3]


def test_nothing_to_measure_is_a_usage_error():
    result = CliRunner().invoke(app, ["scheduler", "--running", "0"])
    assert result.exit_code == 2
    assert "running >= 1" in result.stderr
