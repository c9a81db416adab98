"""What form an answer must have: ``response_format`` and ``structured_outputs``."""

from __future__ import annotations

from typing import Any

from paged_backend.errors import RequestRejectedError
from paged_backend.server.wire.errors import ApiError
from paged_backend.server.wire.schema import ChatRequest, CompletionRequest
from paged_backend.toolcalls import response_outputs

OLD_NAMES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def structured_outputs(body: CompletionRequest) -> Any:
    """The engine's ``structured_outputs`` of a request, None for free text."""
    wanted, own = response_outputs(body.response_format), own_form(body)
    if wanted is not None and own is not None:
        raise RequestRejectedError("response_format and structured_outputs exclude each other")
    return own if wanted is None else wanted


def own_form(body: CompletionRequest | ChatRequest) -> Any:
    """What ``structured_outputs`` says, or one of vLLM's old names of its parts."""
    own = body.structured_outputs
    for name in OLD_NAMES:
        value = getattr(body, name)
        if value is not None:
            if own is not None:
                problem = f"{name} and other ways to say the form of the answer exclude each other"
                raise ApiError(400, problem, param=name, code="invalid_value")
            own = {name.removeprefix("guided_"): value}
    return own
