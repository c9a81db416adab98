"""ReplyChunks: the deltas of one request as LangChain's chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from langchain_core.messages import AIMessageChunk
from langchain_core.outputs import ChatGenerationChunk

from paged_backend.adapters.common import openai_logprobs
from paged_backend.adapters.langchain.messages import chunk_from, spoil, usage_metadata
from paged_backend.outputs import RequestOutput
from paged_backend.text.pieces import Pieces
from paged_backend.toolcalls import ChatCall, ReplyDelta


class ReplyChunks:
    """Turns the deltas of one request into LangChain's chunks."""

    def __init__(self, call: ChatCall, model: str) -> None:
        self._call = call
        self._model = model
        self._parser = call.parser()
        self._tokens = 0
        self._sent: dict[str, tuple[int, Pieces]] = {}
        self._ids: dict[int, str] = {}

    def chunks(self, output: RequestOutput) -> Iterator[ChatGenerationChunk]:
        completion = output.outputs[0]
        self._tokens += len(completion.token_ids)
        delta = ReplyDelta(completion.text) if self._parser is None else self._parser.push(completion.text)
        logprobs = openai_logprobs(completion, self._call.params.logprobs)
        if delta or logprobs:
            yield self._chunk(delta, logprobs)
        if not output.finished:
            return
        reason = completion.finish_reason
        last = ReplyDelta()
        spoiled: list[Any] = []
        if self._parser is not None:
            last = self._parser.finish(truncated=reason == "length")
            self._note(last)
            reason = self._parser.reply.finish_reason(reason)
            sent = {name: (index, str(arguments)) for name, (index, arguments) in self._sent.items()}
            spoiled = spoil(self._parser.reply.invalid, sent)
        # strings of chunks are concatenated and counts are added up, so these stand in one chunk only
        info = {"finish_reason": reason, "model_name": self._model, "model_provider": "paged_backend"}
        message = chunk_from(
            last,
            spoiled,
            response_metadata=info,
            usage_metadata=usage_metadata(output, self._tokens),
            chunk_position="last",
        )
        yield ChatGenerationChunk(message=message)

    def _chunk(self, delta: ReplyDelta, logprobs: list[dict[str, Any]] | None) -> ChatGenerationChunk:
        self._note(delta)
        info = {"logprobs": {"content": logprobs}} if logprobs else None
        message: AIMessageChunk = chunk_from(delta)
        return ChatGenerationChunk(message=message, generation_info=info)

    def _note(self, delta: ReplyDelta) -> None:
        for call in delta.calls:
            if call.id is not None:
                self._ids[call.index] = call.id
            name = self._ids[call.index]
            self._sent.setdefault(name, (call.index, Pieces()))[1].add(call.arguments)
