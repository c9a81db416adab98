"""Server-sent events: how each piece of a streamed answer stands on the wire."""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"
"""What ends a stream of OpenAI's older APIs."""


def event(text: str, name: str | None = None) -> bytes:
    """One event, with a name where the API has several kinds. text: JSON, which has no line breaks."""
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {text}\n\n".encode()


def json_text(value: Any) -> str:
    """Compact JSON, in ASCII: a model may write half of a surrogate pair, which UTF-8 has no bytes for."""
    return json.dumps(value, separators=(",", ":"))
