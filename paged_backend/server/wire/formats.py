"""What form an answer must have: ``response_format`` and ``structured_outputs``."""

from __future__ import annotations

from typing import Any

from paged_backend.errors import RequestRejectedError
from paged_backend.server.wire.schema import CompletionRequest
from paged_backend.toolcalls import response_outputs


def structured_outputs(body: CompletionRequest) -> Any:
    """The engine's ``structured_outputs`` of a request, None for free text."""
    wanted = response_outputs(body.response_format)
    if wanted is not None and body.structured_outputs is not None:
        raise RequestRejectedError("response_format and structured_outputs exclude each other")
    return body.structured_outputs if wanted is None else wanted
