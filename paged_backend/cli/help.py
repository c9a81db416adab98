"""How ``--help`` looks: plain text, whose option names stay whole at any width, under the headings of the flags."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class HeadedCommand(TyperCommand):
    """A command whose options stand under the headings that ``rich_help_panel`` names, also without rich."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[Any]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                heading = getattr(parameter, "rich_help_panel", None) or usual
                sections.setdefault(heading, []).append(row)
        for heading, rows in sections.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def single_command() -> typer.Typer:
    """For the module of one command, as which the program's ``app`` takes it up."""
    return typer.Typer(add_completion=False, rich_markup_mode=None)
