"""Where ``run`` gets its requests: arguments, a file or stdin, one item each, bad lines included."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import typer

KINDS = ("prompt", "messages", "prompt_token_ids")
_FIELDS = (*KINDS, "params", "id")


@dataclass(frozen=True, slots=True)
class Item:
    """One request as it was given. error: what is wrong with it, then nothing else but its place is to be relied on.

    index: its number among the requests. line: its line in the input, None for an argument. id: the caller's own.
    """

    index: int
    line: int | None = None
    kind: str = "prompt"
    value: Any = None
    params: Mapping[str, Any] = field(default_factory=dict)
    id: Any = None
    error: str | None = None


def from_arguments(prompts: Sequence[str]) -> Iterator[Item]:
    for index, prompt in enumerate(prompts):
        yield Item(index, value=prompt)


def from_file(path: Path | None, form: str | None) -> Iterator[Item]:
    """Items of a file, or of stdin for None or ``-``. form: ``text``, ``jsonl``, or None to go by the file's suffix.

    Lines are read as they are needed, so an endless pipe works. Empty lines are skipped.
    """
    stdin = path is None or str(path) == "-"
    if form is None:
        form = "jsonl" if not stdin and path is not None and path.suffix in (".jsonl", ".ndjson") else "text"
    source: Any = nullcontext(sys.stdin.buffer) if stdin or path is None else path.open("rb")
    with source as lines:
        yield from _parse(lines, form)


def check_source(path: Path | None, form: str | None) -> None:
    """Refuse what cannot be opened before a model is loaded."""
    if form not in (None, "text", "jsonl"):
        raise typer.BadParameter(f"--format must be text or jsonl, got {form!r}")
    if path is not None and str(path) != "-":
        try:
            path.open("rb").close()
        except OSError as error:
            raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from error


def _parse(lines: Iterable[bytes] | BinaryIO, form: str) -> Iterator[Item]:
    index = 0
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            yield Item(index, number, value=text) if form == "text" else _object(index, number, text)
        except ValueError as error:
            yield Item(index, number, error=f"not valid UTF-8: {error}")
        index += 1


def _object(index: int, number: int, text: str) -> Item:
    try:
        entry = json.loads(text)
    except ValueError as error:
        return Item(index, number, error=f"not valid JSON: {error}")
    if not isinstance(entry, dict):
        return Item(index, number, error=f"expected a JSON object, got {type(entry).__name__}")
    own_id = entry.get("id")
    unknown = [name for name in entry if name not in _FIELDS]
    given = [kind for kind in KINDS if entry.get(kind) is not None]
    problem = None
    if unknown:
        problem = f"unknown field {unknown[0]!r}; sampling parameters go into 'params'"
    elif len(given) != 1:
        problem = f"give exactly one of {', '.join(KINDS)}, got {len(given)}"
    elif given == ["prompt"] and not isinstance(entry["prompt"], str):
        problem = "'prompt' must be text; token ids go into 'prompt_token_ids'"
    elif not isinstance(entry.get("params") or {}, dict):
        problem = "'params' must be an object of sampling parameters"
    if problem is not None:
        return Item(index, number, id=own_id, error=problem)
    return Item(index, number, given[0], entry[given[0]], entry.get("params") or {}, own_id)
