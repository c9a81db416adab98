"""``paged-backend``: the command line. A command's module is imported when it runs, and the engine by the command."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paged_backend import __version__
from paged_backend.cli.help import SETTINGS

COMMANDS = ("run", "chat", "serve", "doctor", "bench")
"""Modules beside this one, each with its commands as ``app``."""


class _Commands(Mapping[str, Any]):
    """The commands by name; one that is looked up is imported."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        return typer.main.get_command(import_module(f"paged_backend.cli.{name}").app)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Group(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": _Commands()})


app = typer.Typer(
    name="paged-backend",
    cls=_Group,
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


def main() -> None:
    """The console entry point."""
    _print_any_text()
    app()


def _print_any_text() -> None:
    """What models write has every character, and Windows' code pages and the C locale have few: files and pipes get
    UTF-8 unless ``PYTHONIOENCODING`` says otherwise, and what a terminal cannot show is a question mark there."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        chosen = sys.stdout.isatty() or "PYTHONIOENCODING" in os.environ
        sys.stdout.reconfigure(encoding=None if chosen else "utf-8", errors="replace")
