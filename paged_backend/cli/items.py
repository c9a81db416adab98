"""Where ``run`` gets its requests: arguments, a file or stdin, one item each, bad lines included."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import typer

from paged_backend.cli.common import complain

KINDS = ("prompt", "messages", "prompt_token_ids")
_FIELDS = (*KINDS, "suffix", "params", "id")
NO_PROMPTS = "no prompts: give them as arguments, with --input, or on stdin"
LOOKS_LIKE_JSONL = "this looks like JSONL: --format jsonl (--format text runs its lines as prompts)"


@dataclass(frozen=True, slots=True)
class Item:
    """One request as it was given. error: what is wrong with it, then nothing else but its place is to be relied on.

    index: its number among the requests. line: its line in the input, None for an argument. id: the caller's own.
    suffix: what follows the text that is asked for, of a prompt or of token ids.
    """

    index: int
    line: int | None = None
    kind: str = "prompt"
    value: Any = None
    params: Mapping[str, Any] = field(default_factory=dict)
    id: Any = None
    error: str | None = None
    suffix: str | None = None


def from_arguments(prompts: Sequence[str]) -> Iterator[Item]:
    for index, prompt in enumerate(prompts):
        yield Item(index, value=prompt)


def from_file(path: Path | None, form: str | None) -> Iterator[Item]:
    """Items of a file, or of stdin for None or ``-``. form: ``text``, ``jsonl``, or None to go by the file's suffix.

    Lines are read as they are needed, so an endless pipe works. Empty lines are skipped. Without a form, a line of text
    that is a request in JSON is an error, as it was hardly meant to be a prompt.
    """
    if form is None and path is not None and path.suffix in (".jsonl", ".ndjson"):
        form = "jsonl"
    with open_source(path) as lines:
        yield from _parse(lines, form)


def open_source(path: Path | None) -> AbstractContextManager[BinaryIO]:
    """The lines of a file, or of stdin for None or ``-``."""
    return nullcontext(sys.stdin.buffer) if path is None or is_stdin(path) else path.open("rb")


def is_stdin(path: Path | None) -> bool:
    return path is None or str(path) == "-"


def check_source(path: Path | None, form: str | None) -> str | None:
    """The form of the input: as it was given, or ``openai`` for a file that begins as a batch of OpenAI's API.

    Refuses before a model is loaded: what cannot be opened, an empty stdin, and JSON that would be run as text.
    """
    if form not in (None, "text", "jsonl", "openai"):
        raise typer.BadParameter(f"--format must be text, jsonl or openai, got {form!r}")
    if path is None or is_stdin(path):
        start = _waiting_input()
        if start == b"":
            complain(NO_PROMPTS)
            raise typer.Exit(2)
    else:
        start = b""
        try:
            if path.is_file():
                with path.open("rb") as lines:
                    start = next((line for line in lines if line.strip()), b"")
            elif path.is_dir() or not os.access(path, os.R_OK):
                path.open("rb").close()  # which says why not
            # a pipe gives its lines only once, to whoever opens it first
        except OSError as error:
            raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from error
        if form is None and path.suffix == ".json":
            raise typer.BadParameter(f"{path}: {LOOKS_LIKE_JSONL}")
    by_suffix = path is not None and path.suffix in (".jsonl", ".ndjson")
    first = (start or b"").lstrip().partition(b"\n")[0].decode("utf-8-sig", "replace")
    if form is None and _is_batch_line(_entry(first)):
        if not by_suffix:
            raise typer.BadParameter("this looks like a batch of OpenAI's API: --format openai runs it")
        return "openai"
    if form is None and not by_suffix and _is_request(first):
        raise typer.BadParameter(LOOKS_LIKE_JSONL)
    return form


def _waiting_input() -> bytes | None:
    """What stdin has to give at once: b"" at its end, None if nothing has arrived yet or that cannot be told."""
    try:
        ready = select.select([sys.stdin], [], [], 0)[0]
        peek = getattr(sys.stdin.buffer, "peek", None)
        return peek(1) if ready and peek is not None else None
    except (OSError, ValueError):  # not a file of the system's
        return None


def _entry(text: str) -> Any:
    """``text`` as a JSON object, None if it is none."""
    try:
        return json.loads(text) if text.startswith("{") else None
    except ValueError:
        return None


def _is_batch_line(entry: Any) -> bool:
    return isinstance(entry, dict) and "custom_id" in entry and "url" in entry


def _is_request(text: str) -> bool:
    entry = _entry(text)
    return isinstance(entry, dict) and any(kind in entry for kind in KINDS)


def _parse(lines: Iterable[bytes] | BinaryIO, form: str | None) -> Iterator[Item]:
    index = 0
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            if form == "jsonl":
                yield _object(index, number, text)
            elif form is None and _is_request(text.lstrip()):
                yield Item(index, number, error=LOOKS_LIKE_JSONL)
            else:
                yield Item(index, number, value=text)
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
    elif entry.get("suffix") is not None and (given == ["messages"] or not isinstance(entry["suffix"], str)):
        problem = "'suffix' must be text, beside a prompt"
    elif not isinstance(entry.get("params") or {}, dict):
        problem = "'params' must be an object of sampling parameters"
    if problem is not None:
        return Item(index, number, id=own_id, error=problem)
    params = entry.get("params") or {}
    return Item(index, number, given[0], entry[given[0]], params, own_id, suffix=entry.get("suffix"))
