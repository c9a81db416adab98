"""Structured prediction for LlamaIndex: the grammar holds the model to the class, in streams too."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.program.utils import process_streaming_objects
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import PydanticProgramMode

_dispatcher = get_dispatcher(__name__)


def _format(output_cls: type[BaseModel]) -> dict[str, Any]:
    if not isinstance(output_cls, type) or not issubclass(output_cls, BaseModel):
        raise TypeError(
            f"output_cls must be a pydantic model (a RootModel[...] for lists or enums), got {output_cls!r:.80}"
        )
    schema = output_cls.model_json_schema()
    return {"type": "json_schema", "json_schema": {"name": output_cls.__name__, "schema": schema}}


class StructuredPrediction:
    """Overrides what ``FunctionCallingLLM`` does by tool calls, which its streams do not insist on.

    A ``pydantic_program_mode`` other than the default is LlamaIndex's own way, and is left to it.
    """

    if TYPE_CHECKING:
        chat: Any
        achat: Any
        stream_chat: Any
        astream_chat: Any
        _extend_messages: Any
        pydantic_program_mode: Any

    @property
    def _ours(self) -> bool:
        return bool(self.pydantic_program_mode == PydanticProgramMode.DEFAULT)

    def _request(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None,
        prompt_args: dict[str, Any],
    ) -> tuple[list[Any], dict[str, Any]]:
        messages = self._extend_messages(prompt.format_messages(**prompt_args))
        return messages, {**(llm_kwargs or {}), "response_format": _format(output_cls)}

    @_dispatcher.span
    def structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """An ``output_cls`` from what the model says to the prompt."""
        if not self._ours:
            return super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)  # type: ignore[misc]
        messages, options = self._request(output_cls, prompt, llm_kwargs, prompt_args)
        response = self.chat(messages, **options)
        return output_cls.model_validate_json(response.message.content or "")

    @_dispatcher.span
    async def astructured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        if not self._ours:
            return await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)  # type: ignore[misc]
        messages, options = self._request(output_cls, prompt, llm_kwargs, prompt_args)
        response = await self.achat(messages, **options)
        return output_cls.model_validate_json(response.message.content or "")

    def _structured_stream_call(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        if not self._ours:
            yield from super()._structured_stream_call(output_cls, prompt, llm_kwargs, **prompt_args)  # type: ignore[misc]
            return
        messages, options = self._request(output_cls, prompt, llm_kwargs, prompt_args)
        current: Any = None
        for response in self.stream_chat(messages, **options):
            current = _partial(response, output_cls, current)
            yield current
        yield output_cls.model_validate_json(response.message.content or "")

    async def _structured_astream_call(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        if not self._ours:
            found: AsyncGenerator[Any, None] = await super()._structured_astream_call(
                output_cls, prompt, llm_kwargs, **prompt_args
            )  # type: ignore[misc]
            return found
        messages, options = self._request(output_cls, prompt, llm_kwargs, prompt_args)

        async def stream() -> AsyncGenerator[Any, None]:
            current: Any = None
            async for response in await self.astream_chat(messages, **options):
                current = _partial(response, output_cls, current)
                yield current
            yield output_cls.model_validate_json(response.message.content or "")

        return stream()


def _partial(response: Any, output_cls: type[BaseModel], current: Any) -> Any:
    """The object as far as it is written: an ``output_cls`` in which fields may be missing."""
    return process_streaming_objects(
        response, output_cls, cur_objects=None if current is None else [current], flexible_mode=True
    )
