"""``python -m benchmarks COMMAND``: comparisons with other engines, the cost of parts, the GPU path."""

from __future__ import annotations

import typer

from benchmarks import figure
from benchmarks.compare import commands as compare
from benchmarks.compare import pipeline_command as pipeline
from benchmarks.device import commands as device
from benchmarks.memory import command as memory
from benchmarks.parts import commands as parts
from paged_backend.cli.common import orderly
from paged_backend.cli.help import SETTINGS

app = typer.Typer(
    name="benchmarks",
    help="Measurements of paged_backend beside other engines, of its parts, and of its GPU path.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=SETTINGS,
)
for part in (compare, pipeline, memory, parts, device, figure):
    part.register(app)
for command in app.registered_commands:
    if command.callback is not None:
        command.callback = orderly(command.callback)

if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
