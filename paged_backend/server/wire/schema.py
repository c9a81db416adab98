"""Bodies of requests. A field that is not listed here is refused by name, never ignored.

Names and defaults are OpenAI's, those of extensions vLLM's. ``null`` means "not given" everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError, from_json

from paged_backend.neutral import Neutral, refusal
from paged_backend.server.wire import neutral_fields
from paged_backend.server.wire.errors import ApiError, bad

Model = TypeVar("Model", bound="Body")
SEED_LIMIT = 1 << 63
MAX_ID = 1 << 40
ALL_TOKENS = "-1 for all of the vocabulary."
TokenIds = list[Annotated[int, Field(ge=0, le=MAX_ID)]]


def _list_neutral(schema: dict[str, Any], body: type[Body]) -> None:
    for name, rule in body.neutral.items():
        schema["properties"].setdefault(name, {"description": f"No answer depends on it; else: {rule.why}."})


SPLIT = "Special tokens written out in messages are text (true, the default) or act as what they are (false)."


class Body(BaseModel):
    """neutral: fields that are taken where they ask for nothing but what is done anyway."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=_list_neutral
    )
    neutral: ClassVar[Mapping[str, Neutral]] = {}


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="Usage so far in every chunk.")
    include_obfuscation: Literal[False] | None = Field(
        None, description="Padding against eavesdroppers; not offered."
    )


class Sampling(Body):
    """Sampling, which ``SamplingParams`` explains and checks."""

    model: str | None = Field(
        None, description="As in /v1/models; may be left out, as a server has one model."
    )
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = Field(None, ge=-SEED_LIMIT, lt=SEED_LIMIT)
    n: int | None = Field(None, ge=1, le=128)
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=MAX_ID)
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=-1, le=20, description=ALL_TOKENS)
    priority: int | None = Field(None, ge=-MAX_ID, le=MAX_ID)
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json, json_object, regex, choice and grammar."
    )
    use_beam_search: bool | None = Field(None, description="n beams, or as many as num_beams says.")
    num_beams: int | None = Field(None, ge=2, le=128)
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_ID, description="Keep so many tokens of a longer prompt; -1: what fits."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where it is cut; left by default."
    )
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description='Tokens of logprobs are "token_id:N".')
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Cached prefixes are shared only with requests of equal salt.",
    )
    request_id: str | None = Field(None, min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")


class Formed(Body):
    """The form of the answer."""

    response_format: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = Field(
        None, description="Old name of structured_outputs.json; so are the other three."
    )
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def _told_in_one_line(value: Any, check: Callable[[Any], Any]) -> Any:
    """What is wrong with a prompt, instead of what keeps it from being each of the forms that one may have."""
    try:
        return check(value)
    except ValidationError:
        problem = "must be text, a list of token ids (integers from 0 on), or a list of either"
        raise PydanticCustomError("prompt", problem) from None


class CompletionRequest(Sampling, Formed):
    neutral: ClassVar[Mapping[str, Neutral]] = neutral_fields.COMPLETION
    prompt: Annotated[str | TokenIds | list[str | TokenIds], WrapValidator(_told_in_one_line)]
    max_tokens: int | None = Field(None, ge=0, le=MAX_ID, description="16 by default; 0 only with echo.")
    echo: bool | None = None
    suffix: str | None = Field(
        None, description="What follows the completion: for models that fill in the middle."
    )
    logprobs: int | None = Field(None, ge=-1, le=20, description=ALL_TOKENS)
    best_of: int | None = Field(
        None,
        ge=1,
        le=128,
        description="Sample so many, give the n whose tokens are the most likely on average.",
    )


class Templating(Body):
    """How messages become a prompt."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    split_special_tokens: bool | None = Field(None, description=SPLIT)
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = Field(
        None, description="Handed to a chat template that knows it; other models have no effort to change."
    )


class ChatRequest(Sampling, Formed, Templating):
    neutral: ClassVar[Mapping[str, Neutral]] = neutral_fields.CHAT
    max_tokens: int | None = Field(
        None, ge=1, le=MAX_ID, description="By default as much as the context leaves."
    )
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_ID)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=-1, le=20, description=ALL_TOKENS)
    echo: bool | None = Field(
        None, description="Begin the answer with the last message, if that is the assistant's."
    )
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = Field(None, description="The old name of tools.")
    function_call: str | dict[str, Any] | None = Field(None, description="The old name of tool_choice.")


Includable = Literal[
    "message.output_text.logprobs",
    # thoughts are never encrypted; the rest belongs to items that do not occur here
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]  # fmt: skip


class ResponsesRequest(Sampling):
    """One answer: the fields of several, of prompts and of token ids are not for this route."""

    neutral: ClassVar[Mapping[str, Neutral]] = neutral_fields.RESPONSES
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = Field(None, description="Keep the response, as is done by default.")
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(
        None, ge=1, le=MAX_ID, description="By default what the context leaves."
    )
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = Field(None, description="format: text, json_object or json_schema.")
    include: list[Includable] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncation: Literal["disabled", "auto"] | None = Field(
        None, description="auto: a conversation that is too long loses its first turns."
    )
    reasoning: dict[str, Any] | None = Field(None, description="effort; summary only auto.")
    previous_response_id: str | None = Field(
        None, description="Of a response that this server has kept; its instructions are not taken over."
    )
    chat_template_kwargs: dict[str, Any] | None = None
    split_special_tokens: bool | None = Field(None, description=SPLIT)


class TokenizeRequest(Body):
    """Text or messages."""

    neutral: ClassVar[Mapping[str, Neutral]] = neutral_fields.TOKENIZE
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    split_special_tokens: bool | None = Field(None, description=SPLIT)


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool | None = None


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    prompt: str


def body_of(*models: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route that reads one of ``models``."""
    refs = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in models]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def refuse_given(body: BaseModel, names: Sequence[str]) -> None:
    """Raise :class:`ApiError` 400 for the first of these fields that was given: its route cannot honour it."""
    for name in names:
        if getattr(body, name) is not None:
            raise bad(name, "is not supported by this route", "unsupported_parameter")


async def read_body(request: Request, model: type[Model]) -> Model:
    """The request's body as a ``model``. Raises :class:`ApiError` 415 or 400, the latter naming the first bad field."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415,
            f"the body must be application/json, got {kind or 'no content type'}",
            code="unsupported_media_type",
        )
    raw = await request.body()
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    given = {name: value for name, value in data.items() if value is not None}
    for name in [name for name in given if name in model.neutral]:
        problem = refusal(name, given.pop(name), model.neutral)
        if problem is not None:
            raise ApiError(400, problem, param=name, code="unsupported_parameter")
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _explained(error, model) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None


def _explained(error: ValidationError, model: type[BaseModel]) -> ApiError:
    import difflib

    problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    place = [str(part) for part in first["loc"]]
    name = place[0] if place else None
    if first["type"] == "extra_forbidden":
        path = ".".join(place)
        near = difflib.get_close_matches(place[-1], list(model.model_fields), 1) if len(place) == 1 else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return ApiError(
            400, f"unknown or unsupported field {path!r}{hint}", param=path, code="unsupported_parameter"
        )
    if first["type"] == "missing":
        return ApiError(
            400, f"field {'.'.join(place)!r} is required", param=name, code="missing_required_parameter"
        )
    what = first["msg"][:1].lower() + first["msg"][1:]
    return ApiError(400, f"{name}: {what}", param=name, code="invalid_value")
