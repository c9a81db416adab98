"""/v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails

from paged_backend.outputs import CompletionOutput
from paged_backend.remote.job import Job
from paged_backend.server.routes.answers import EventStream, json_answer, unless_gone
from paged_backend.server.routes.prompts import encode, fit_prompt
from paged_backend.server.routes.serving import Serving, serving_of
from paged_backend.server.wire.errors import ApiError
from paged_backend.server.wire.formats import structured_outputs
from paged_backend.server.wire.logprobs import CompletionLogprobs, prompt_logprobs
from paged_backend.server.wire.sampling import check_listed, to_params
from paged_backend.server.wire.schema import CompletionRequest, body_of, read_body
from paged_backend.server.wire.sse import DONE, event
from paged_backend.text.fim import FillIn, fill_in

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/completions", openapi_extra=body_of(CompletionRequest), response_model=Completion)
async def create_completion(request: Request) -> Response:
    """Continue one or several prompts, given as text or token ids. With ``stream``: server-sent events."""
    serving = serving_of(request)
    body = await read_body(request, CompletionRequest)
    serving.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream", param="stream_options", code="invalid_value")
    answer = await unless_gone(serving, request, _open(serving, body))
    request.state.job = answer.job  # for the log
    if body.stream:
        return EventStream(serving, answer.job, answer.events())
    with answer.job:
        completion = await unless_gone(serving, request, answer.whole())
    return json_answer(completion.model_dump_json(exclude_unset=True))


async def _open(serving: Serving, body: CompletionRequest) -> _Answer:
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise ApiError(
            400, "max_tokens must be at least 1 without echo", param="max_tokens", code="invalid_value"
        )
    keep = body.n or 1
    chosen = body.best_of is not None and body.best_of > keep
    if body.best_of is not None and body.best_of < keep:
        raise _bad("best_of", f"must be at least n={keep}")
    if chosen and (body.stream or body.use_beam_search):
        raise _bad("best_of", "above n cannot be streamed, nor be a beam search")
    if body.min_tokens and body.max_tokens is None:
        max_tokens = max(max_tokens, body.min_tokens)
    filling = None
    if body.suffix is not None:
        filling = _checked_fill_in(serving, body)
    prompts = [fit_prompt(serving, body, ids, max_tokens) for ids in await _prompts(serving, body, filling)]
    scored = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        scored = -1 if -1 in (scored, body.logprobs) else max(scored or 0, body.logprobs)
    params = to_params(
        body,
        max_tokens=max(max_tokens, 1),  # the engine makes at least one; with max_tokens=0 it is not shown
        n=body.best_of if chosen else None,
        stop_token_ids=None if filling is None else [*(body.stop_token_ids or ()), *filling.stop_ids],
        logprobs=0 if chosen and body.logprobs is None else body.logprobs,
        prompt_logprobs=scored,
        structured_outputs=structured_outputs(body),
    )
    check_listed(params, prompts, serving.tokenizer.vocab_size)
    job = await serving.client.open(prompts, params, body.cache_salt)
    return _Answer(serving, body, job, params.n, show_output=max_tokens > 0)


def _bad(param: str, problem: str) -> ApiError:
    return ApiError(400, f"{param} {problem}", param=param, code="invalid_value")


def _checked_fill_in(serving: Serving, body: CompletionRequest) -> FillIn:
    filling = fill_in(serving.tokenizer)
    if body.truncate_prompt_tokens is not None:
        raise _bad(
            "suffix",
            "and truncate_prompt_tokens exclude each other: what would be cut are the marks of the gap",
        )
    if body.echo and body.logprobs is not None:
        raise _bad("suffix", "with echo excludes logprobs: the prompt's tokens are not those of its text")
    return filling


async def _prompts(serving: Serving, body: CompletionRequest, filling: FillIn | None) -> list[list[int]]:
    given: Any = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise ApiError(400, "prompt must not be empty", param="prompt", code="invalid_value")
    special = body.add_special_tokens is not False
    if filling is not None:
        return [await serving.aside(filling.encode, item, body.suffix, special) for item in given]
    return [await encode(serving, item, special) if isinstance(item, str) else list(item) for item in given]


class _Answer:
    """One completion as it comes.

    sampled: outputs per prompt, of which the best ``body.n`` are shown. show_output: False for max_tokens=0, where only
    the prompt is wanted.
    """

    def __init__(
        self, serving: Serving, body: CompletionRequest, job: Job, sampled: int, show_output: bool
    ) -> None:
        self.job = job
        self._serving = serving
        self._body = body
        self._show_output = show_output
        self._id = f"cmpl-{body.request_id or uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = body.model or serving.name
        self._n = sampled
        self._choosing = sampled > (body.n or 1)
        self._begun: set[int] = set()
        self._logprobs: dict[int, CompletionLogprobs] = {}

    async def whole(self) -> Completion:
        pieces: dict[int, list[CompletionChoice]] = {}
        likely: dict[int, list[float]] = {}
        async for batch in self.job.news():
            for number, output in batch:
                choice = self._choice(number, output)
                pieces.setdefault(choice.index, []).append(choice)
                for token, entry in zip(output.token_ids, (output.logprobs or ()) if self._choosing else ()):
                    likely.setdefault(choice.index, []).append(entry[token].logprob)
        choices = [_joined(pieces[index]) for index in self._best(pieces, likely)]
        for index, choice in enumerate(choices):
            choice.index = index
        return self._completion(choices, self._usage())

    def _best(self, given: Iterable[int], likely: Mapping[int, list[float]]) -> list[int]:
        """The indices to show: all, or of each prompt the ``n`` whose tokens are the most likely on average."""
        if not self._choosing:
            return sorted(given)
        shown = self._body.n or 1

        def rank(index: int) -> tuple[int, float, int]:
            values = likely[index]
            return index // self._n, -sum(values) / len(values), index

        return [index for place, index in enumerate(sorted(given, key=rank)) if place % self._n < shown]

    async def events(self) -> AsyncIterator[bytes]:
        options = self._body.stream_options
        everywhere = (
            options is not None
            and bool(options.continuous_usage_stats)
            and options.include_usage is not False
        )
        at_end = options is not None and bool(options.include_usage)
        async for batch in self.job.news():
            parts = []
            for number, output in batch:
                choice = self._choice(number, output)
                if choice.text or choice.finish_reason or choice.logprobs or self._body.return_token_ids:
                    chunk = self._completion([choice], self._usage() if everywhere else None)
                    parts.append(event(chunk.model_dump_json(exclude_unset=True)))
            if parts:
                yield b"".join(parts)
        if at_end:
            yield event(self._completion([], self._usage()).model_dump_json(exclude_unset=True))
        yield DONE

    def _completion(self, choices: list[CompletionChoice], usage: CompletionUsage | None) -> Completion:
        return Completion(
            id=self._id,
            object="text_completion",
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
        )

    def _usage(self) -> CompletionUsage:
        prompt, output = self.job.prompt_tokens, self.job.output_tokens if self._show_output else 0
        return CompletionUsage(
            prompt_tokens=prompt,
            completion_tokens=output,
            total_tokens=prompt + output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.job.cached_tokens),
        )

    def _choice(self, number: int, output: CompletionOutput) -> CompletionChoice:
        """What is new of one choice; the first piece has the prompt too where it is echoed."""
        index = number * self._n + output.index
        remote, body = self.job.requests[number], self._body
        first = index not in self._begun
        self._begun.add(index)
        text = output.text if self._show_output else ""
        tokens = output.token_ids if self._show_output else []
        logprobs = (
            self._new_logprobs(index, number, first, tokens, output) if body.logprobs is not None else None
        )
        echoed = first and bool(body.echo)
        if echoed:
            text = self._echoed(number) + text
        extra: dict[str, Any] = {}
        if first and (body.prompt_logprobs is not None or not body.stream):
            asked = remote.prompt_logprobs if body.prompt_logprobs is not None else None
            extra["prompt_logprobs"] = prompt_logprobs(asked)
        if body.return_token_ids:
            extra["token_ids"] = tokens
            if first:
                extra["prompt_token_ids"] = remote.prompt_token_ids
        if output.finish_reason is not None:
            extra["stop_reason"] = output.stop_reason
        reason: Any = "length" if output.finished and not self._show_output else output.finish_reason
        return CompletionChoice.construct(
            index=index, text=text, logprobs=logprobs, finish_reason=reason, **extra
        )

    def _echoed(self, number: int) -> str:
        """The prompt's text; with a suffix only what was before the gap, as it was given."""
        ids, given = self.job.requests[number].prompt_token_ids, self._body.prompt
        if self._body.suffix is not None:
            one: Any = given if isinstance(given, str) or isinstance(given[0], int) else given[number]
            if isinstance(one, str):
                return one
            ids = one
        skip = self._body.skip_special_tokens is not False
        text: str = self._serving.tokenizer.decode(ids, skip_special_tokens=skip)
        return text

    def _new_logprobs(
        self, index: int, number: int, first: bool, tokens: list[int], output: CompletionOutput
    ) -> Logprobs | None:
        body, remote = self._body, self.job.requests[number]
        echoed = first and bool(body.echo)
        if first:
            skip = body.skip_special_tokens is not False
            context = [] if body.echo else remote.prompt_token_ids
            self._logprobs[index] = CompletionLogprobs(
                self._serving.tokenizer, context, bool(body.return_tokens_as_token_ids), skip
            )
        entries: list[Any] = list(output.logprobs or []) if self._show_output else []
        if echoed:
            tokens = [*remote.prompt_token_ids, *tokens]
            entries = [*(remote.prompt_logprobs or []), *entries]
        return self._logprobs[index].add(tokens, entries, body.logprobs or 0) if tokens else None


def _joined(pieces: list[CompletionChoice]) -> CompletionChoice:
    """The choice that ``pieces`` add up to."""
    if len(pieces) == 1:
        return pieces[0]
    values = {name: value for piece in pieces for name, value in (piece.model_extra or {}).items()}
    if "token_ids" in values:
        values["token_ids"] = [token for piece in pieces for token in (piece.model_extra or {})["token_ids"]]
    scored = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    logprobs = None
    if scored:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        lists: dict[str, Any] = {
            name: [item for part in scored for item in getattr(part, name)] for name in names
        }
        logprobs = Logprobs.construct(**lists)
    return CompletionChoice.construct(
        index=pieces[0].index,
        text="".join(piece.text for piece in pieces),
        logprobs=logprobs,
        finish_reason=pieces[-1].finish_reason,
        **values,
    )
