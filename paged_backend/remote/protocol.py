"""What an engine and its client say to each other: JSON objects, each behind its length in bytes.

Only data crosses, no code: nothing here can be made to run anything by what the other side sends.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from paged_backend.constrain.options import StructuredOutputs
from paged_backend.outputs import CompletionOutput, Logprob
from paged_backend.sampling_params import BeamSearch, RequestOutputKind, SamplingParams

Message = dict[str, Any]
"""``t`` names the kind; ``EngineSession`` lists them all."""

HEADER = struct.Struct("!I")
_DEFAULTS = SamplingParams()
_ONLY_HERE = ("logits_processors", "stop_criteria")


def pack(message: Message) -> bytes:
    """One frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


def unpack(body: bytes) -> Message:
    """The message in a frame's body."""
    message: Message = json.loads(body)
    return message


def params_to_wire(params: SamplingParams) -> Message:
    """The fields that differ from their defaults. ValueError for functions, which cannot leave their process."""
    wire: Message = {}
    for field in fields(params):
        value = getattr(params, field.name)
        if value == getattr(_DEFAULTS, field.name):
            continue
        if field.name in _ONLY_HERE:
            raise ValueError(f"{field.name} cannot be sent to an engine in another process")
        if field.name == "structured_outputs":
            value = asdict(StructuredOutputs.coerce(value))
        elif field.name == "beam_search":
            value = asdict(value)
        elif field.name == "output_kind":
            value = value.value
        wire[field.name] = value
    return wire


def params_from_wire(wire: Mapping[str, Any]) -> SamplingParams:
    values = dict(wire)
    if "beam_search" in values:
        values["beam_search"] = BeamSearch(**values["beam_search"])
    if "structured_outputs" in values:
        values["structured_outputs"] = StructuredOutputs(**values["structured_outputs"])
    if "output_kind" in values:
        values["output_kind"] = RequestOutputKind(values["output_kind"])
    return SamplingParams(**values)


def output_to_wire(output: CompletionOutput) -> list[Any]:
    return [
        output.index,
        output.text,
        output.token_ids,
        None if output.logprobs is None else [_entry_to_wire(entry) for entry in output.logprobs],
        output.finish_reason,
        output.stop_reason,
    ]


def output_from_wire(wire: list[Any]) -> CompletionOutput:
    index, text, token_ids, logprobs, finish_reason, stop_reason = wire
    return CompletionOutput(
        index,
        text,
        token_ids,
        logprobs=None if logprobs is None else [_entry_from_wire(entry) for entry in logprobs],
        finish_reason=finish_reason,
        stop_reason=stop_reason,
    )


def prompt_logprobs_to_wire(entries: list[dict[int, Logprob] | None]) -> list[Any]:
    return [None if entry is None else _entry_to_wire(entry) for entry in entries]


def prompt_logprobs_from_wire(wire: list[Any]) -> list[dict[int, Logprob] | None]:
    return [None if entry is None else _entry_from_wire(entry) for entry in wire]


def _entry_to_wire(entry: Mapping[int, Logprob]) -> list[list[Any]]:
    return [
        [token, item.logprob, item.rank, item.decoded_token]
        + ([] if item.token_bytes is None else [item.token_bytes.hex()])
        for token, item in entry.items()
    ]


def _entry_from_wire(wire: list[list[Any]]) -> dict[int, Logprob]:
    return {
        token: Logprob(logprob, rank, text, bytes.fromhex(own[0]) if own else None)
        for token, logprob, rank, text, *own in wire
    }
