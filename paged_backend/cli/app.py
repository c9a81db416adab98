"""``paged-backend``: the command line. Commands import the engine when they run, so that --help answers at once."""

from __future__ import annotations

from typing import Annotated

import typer

from paged_backend import __version__
from paged_backend.cli.bench import app as bench
from paged_backend.cli.chat import chat
from paged_backend.cli.doctor import doctor
from paged_backend.cli.help import SETTINGS, HeadedCommand
from paged_backend.cli.run import run
from paged_backend.cli.serve import serve

app = typer.Typer(
    name="paged-backend",
    help="Run language models with paged attention and continuous batching.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=SETTINGS,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paged-backend {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass  # the options of the program itself; each of them acts in its callback


for name, command in (("run", run), ("chat", chat), ("serve", serve)):
    app.command(name, cls=HeadedCommand)(command)
app.command("doctor")(doctor)
app.add_typer(bench, name="bench")


def main() -> None:
    """The console entry point."""
    app()
