"""ResponseBuilder: a Responses API answer as it grows, as typed events or as a whole, out of the same items."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from openai.types import responses as kinds
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_output_text import Logprob, LogprobTopLogprob
from openai.types.responses.response_text_delta_event import Logprob as DeltaLogprob
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails

from paged_backend.outputs import CompletionOutput
from paged_backend.remote.job import Job
from paged_backend.server.wire.errors import ApiError
from paged_backend.server.wire.logprobs import chat_logprobs
from paged_backend.server.wire.replies import Reply
from paged_backend.server.wire.sse import event
from paged_backend.toolcalls import ToolCallDelta

Item = kinds.ResponseOutputMessage | kinds.ResponseFunctionToolCall


class ResponseBuilder:
    """base: the fields of the response that echo the request. top: alternatives per token in logprobs."""

    def __init__(self, base: dict[str, Any], job: Job, reply: Reply, top: int) -> None:
        self.job = job
        self._base = base
        self._reply = reply
        self._top = top
        self._sequence = 0
        self._items: list[Item] = []
        self._message: kinds.ResponseOutputMessage | None = None
        self._message_index = 0
        self._calls: dict[int, tuple[int, kinds.ResponseFunctionToolCall]] = {}
        self._logprobs: list[Logprob] = []

    async def whole(self) -> kinds.Response:
        async for batch in self.job.news():
            for _, output in batch:
                self._advance(output)
        self._close()
        return self._response(self._status)

    async def events(self) -> AsyncIterator[bytes]:
        opening = self._response("in_progress")
        yield self._sent(
            [
                kinds.ResponseCreatedEvent(response=opening, sequence_number=0, type="response.created"),
                kinds.ResponseInProgressEvent(
                    response=opening, sequence_number=0, type="response.in_progress"
                ),
            ]
        )
        async for batch in self.job.news():
            happened = [each for _, output in batch for each in self._advance(output)]
            if happened:
                yield self._sent(happened)
        closing = self._close()
        last = self._response(self._status)
        ending: Any
        if self._status == "completed":
            ending = kinds.ResponseCompletedEvent(response=last, sequence_number=0, type="response.completed")
        else:
            ending = kinds.ResponseIncompleteEvent(
                response=last, sequence_number=0, type="response.incomplete"
            )
        yield self._sent([*closing, ending])

    def failure(self, error: ApiError) -> kinds.ResponseErrorEvent:
        """What a stream ends with when it cannot go on."""
        return kinds.ResponseErrorEvent(
            code=error.code,
            message=error.message,
            param=error.param,
            sequence_number=self._sequence,
            type="error",
        )

    def _sent(self, events: list[Any]) -> bytes:
        parts = []
        for each in events:
            each.sequence_number = self._sequence
            self._sequence += 1
            parts.append(event(each.model_dump_json(exclude_unset=True), each.type))
        return b"".join(parts)

    @property
    def _status(self) -> Any:
        return "incomplete" if self._reply.finish_reason == "length" else "completed"

    def _response(self, status: Any) -> kinds.Response:
        done = status != "in_progress"
        job = self.job
        usage = kinds.ResponseUsage(
            input_tokens=job.prompt_tokens,
            input_tokens_details=InputTokensDetails.construct(cached_tokens=job.cached_tokens),
            output_tokens=job.output_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
            total_tokens=job.prompt_tokens + job.output_tokens,
        )
        reason = IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None
        return kinds.Response.construct(
            **self._base,
            status=status,
            error=None,
            incomplete_details=reason,
            output=list(self._items) if done else [],
            usage=usage if done else None,
            completed_at=float(int(time.time())) if status == "completed" else None,
        )

    # --- what an output adds: items, changed in place, and the events that tell of it ---------------------------------

    def _advance(self, output: CompletionOutput) -> list[Any]:
        new = self._reply.push(output)
        scored = [
            Logprob(
                token=item.token,
                bytes=item.bytes or [],
                logprob=item.logprob,
                top_logprobs=[
                    LogprobTopLogprob(token=other.token, bytes=other.bytes or [], logprob=other.logprob)
                    for other in item.top_logprobs
                ],
            )
            for item in chat_logprobs(output.logprobs or [], self._top)
        ]
        self._logprobs.extend(scored)
        events: list[Any] = []
        if new.content or scored:
            events += self._text(new.content, scored)
        for call in new.calls:
            events += self._call(call)
        return events

    def _text(self, text: str, scored: list[Logprob]) -> list[Any]:
        events: list[Any] = []
        if self._message is None:
            self._message_index = len(self._items)
            self._message = kinds.ResponseOutputMessage(
                id=f"msg_{uuid.uuid4().hex}",
                content=[],
                role="assistant",
                status="in_progress",
                type="message",
            )
            events.append(self._added(self._message))
            part = kinds.ResponseOutputText(annotations=[], text="", type="output_text", logprobs=[])
            events.append(
                kinds.ResponseContentPartAddedEvent(
                    content_index=0, item_id=self._message.id, output_index=self._message_index, part=part.model_copy(),
                    sequence_number=0, type="response.content_part.added",
                )
            )  # fmt: skip
            self._message.content.append(part)
        told = [DeltaLogprob.construct(**item.model_dump()) for item in scored]
        events.append(
            kinds.ResponseTextDeltaEvent(
                content_index=0, delta=text, item_id=self._message.id, logprobs=told, output_index=self._message_index,
                sequence_number=0, type="response.output_text.delta",
            )
        )  # fmt: skip
        return events

    def _call(self, call: ToolCallDelta) -> list[Any]:
        events: list[Any] = []
        if call.index not in self._calls:
            made = kinds.ResponseFunctionToolCall(
                id=f"fc_{uuid.uuid4().hex}", call_id=call.id or "", name=call.name or "", arguments="",
                status="in_progress", type="function_call",
            )  # fmt: skip
            self._calls[call.index] = (len(self._items), made)
            events.append(self._added(made))
        index, item = self._calls[call.index]
        if call.arguments:
            events.append(
                kinds.ResponseFunctionCallArgumentsDeltaEvent(
                    delta=call.arguments, item_id=item.id or "", output_index=index, sequence_number=0,
                    type="response.function_call_arguments.delta",
                )
            )  # fmt: skip
        return events

    def _added(self, item: Item) -> kinds.ResponseOutputItemAddedEvent:
        index = len(self._items)
        self._items.append(item)
        return kinds.ResponseOutputItemAddedEvent(
            item=item.model_copy(deep=True),
            output_index=index,
            sequence_number=0,
            type="response.output_item.added",
        )

    def _close(self) -> list[Any]:
        """End every item, as the response itself ends."""
        events = [] if self._items else self._text("", [])
        for call in self._reply.calls:
            self._calls[call.index][1].arguments = call.arguments
        for index, item in enumerate(self._items):
            item.status = self._status
            if isinstance(item, kinds.ResponseOutputMessage):
                part: Any = item.content[0]
                part.text, part.logprobs = self._reply.content, self._logprobs
                events.append(
                    kinds.ResponseTextDoneEvent.construct(
                        content_index=0, item_id=item.id, logprobs=self._logprobs, output_index=index,
                        sequence_number=0, text=part.text, type="response.output_text.done",
                    )
                )  # fmt: skip
                events.append(
                    kinds.ResponseContentPartDoneEvent(
                        content_index=0, item_id=item.id, output_index=index, part=part, sequence_number=0,
                        type="response.content_part.done",
                    )
                )  # fmt: skip
            else:
                events.append(
                    kinds.ResponseFunctionCallArgumentsDoneEvent.construct(
                        arguments=item.arguments, item_id=item.id or "", name=item.name, output_index=index,
                        sequence_number=0, type="response.function_call_arguments.done",
                    )
                )  # fmt: skip
            events.append(
                kinds.ResponseOutputItemDoneEvent(
                    item=item, output_index=index, sequence_number=0, type="response.output_item.done"
                )
            )
        return events
