"""What ``run`` prints: one JSON object per request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paged_backend.cli.items import Item

if TYPE_CHECKING:
    from paged_backend.outputs import CompletionOutput, Logprob, RequestOutput


def result_record(item: Item, output: RequestOutput) -> dict[str, Any]:
    """A finished request. With n > 1 the samples stand in ``outputs``, else the only one's fields at the top."""
    record = _place(item)
    if len(output.outputs) == 1:
        record.update(_sample(output.outputs[0]))
    else:
        record["outputs"] = [{"index": o.index, **_sample(o)} for o in output.outputs]
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [
            None if entry is None else _position(token, entry)
            for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs)
        ]
    record["usage"] = {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(o.token_ids) for o in output.outputs),
        "cached_tokens": output.num_cached_tokens,
    }
    return record


def error_record(item: Item, kind: str, message: str) -> dict[str, Any]:
    """A request that was not run, or failed."""
    return {**_place(item), "error": {"type": kind, "message": message}}


def _place(item: Item) -> dict[str, Any]:
    record: dict[str, Any] = {"index": item.index}
    if item.id is not None:
        record["id"] = item.id
    return record


def _sample(output: CompletionOutput) -> dict[str, Any]:
    sample: dict[str, Any] = {"text": output.text, "finish_reason": output.finish_reason}
    if output.stop_reason is not None:
        sample["stop_reason"] = output.stop_reason
    if output.logprobs is not None:
        sample["cumulative_logprob"] = output.cumulative_logprob
        sample["logprobs"] = _positions(output.token_ids, output.logprobs)
    return sample


def _positions(tokens: Sequence[int], entries: Sequence[dict[int, Logprob]]) -> list[dict[str, Any]]:
    return [_position(token, entry) for token, entry in zip(tokens, entries)]


def _position(token: int, entry: dict[int, Logprob]) -> dict[str, Any]:
    ranked = sorted(entry.items(), key=lambda pair: (pair[1].rank or 0, pair[0]))
    return {**_logprob(token, entry[token]), "top": [_logprob(other, value) for other, value in ranked]}


def _logprob(token: int, value: Logprob) -> dict[str, Any]:
    return {"token_id": token, "token": value.token, "logprob": value.logprob, "rank": value.rank}
