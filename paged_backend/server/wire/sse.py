"""Server-sent events: how each piece of a streamed answer stands on the wire."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"
"""What ends a stream of OpenAI's older APIs."""


def event(json: str, name: str | None = None) -> bytes:
    """One event, with a name where the API has several kinds."""
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {json}\n\n".encode()
