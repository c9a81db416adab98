"""The option --plot, checked before anything is computed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import typer

SUFFIXES = (".png", ".svg", ".pdf")


def drawable(path: Path | None) -> Path | None:
    """For typer: ``path`` if a picture can be drawn to it, else a usage error."""
    if path is None:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("drawing needs matplotlib: pip install 'paged-backend[bench]'")
    if path.suffix not in SUFFIXES:
        raise typer.BadParameter(f"{path}: the name must end in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    return path
