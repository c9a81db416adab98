"""PagedLLM: a LlamaIndex LLM, with tools and structured output, on an engine in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM

from paged_backend.adapters.common import EngineUses, last_output, sampling_params
from paged_backend.adapters.llama_index.messages import (
    ReplyStream,
    logprobs_of,
    raw_of,
    response_from,
    to_dicts,
)
from paged_backend.adapters.llama_index.structured import StructuredPrediction
from paged_backend.adapters.llama_index.tools import ToolCalling
from paged_backend.engine.engine import Engine
from paged_backend.engine.stream import RequestHandle
from paged_backend.errors import RequestRejectedError
from paged_backend.outputs import RequestOutput
from paged_backend.sampling_params import RequestOutputKind, SamplingParams
from paged_backend.toolcalls import CHAT_OPTIONS, ChatCall, prepare_chat, response_outputs


class PagedLLM(ToolCalling, StructuredPrediction, FunctionCallingLLM):
    """``PagedLLM(model="demo", max_tokens=128)``: nothing is loaded before it is needed.

    ``messages_to_prompt`` writes chats instead of the model's template, and then there are no tools;
    ``completion_to_prompt`` alone makes LlamaIndex prefer completions to chats.

    Weights, KV memory, prefix cache and batch are shared with everybody in the process who names the same model.
    None leaves an option to the model's generation config, then to our defaults. Options given with a call win.
    """

    model: str = Field(description="A folder, a hub id, a .gguf file or 'demo'.")
    engine_options: dict[str, Any] = Field(default_factory=dict, description="Fields of EngineConfig.")
    temperature: float | None = None
    max_tokens: int | None = None
    stop: list[str] | str | None = None
    seed: int | None = None
    sampling: dict[str, Any] = Field(default_factory=dict, description="Any other field of SamplingParams.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Variables of the chat template."
    )
    split_special_tokens: bool = Field(
        default=True, description="Whether special tokens written out in messages are text."
    )

    _uses: EngineUses = PrivateAttr()
    _writes_chats: bool = PrivateAttr(default=False)
    _writes_prompts: bool = PrivateAttr(default=False)

    def __init__(self, model: str, *, engine: Engine | None = None, **kwargs: Any) -> None:
        """engine: an open engine to use instead of opening ``model``."""
        unknown = sorted(set(kwargs) - set(type(self).model_fields))
        if unknown:
            raise TypeError(
                f"PagedLLM has no option {unknown[0]!r}; options of SamplingParams go into sampling={{}}"
            )
        super().__init__(model=model, **kwargs)
        self._writes_chats = kwargs.get("messages_to_prompt") is not None
        self._writes_prompts = kwargs.get("completion_to_prompt") is not None
        if self._writes_chats and self.chat_template_kwargs:
            raise ValueError(
                "messages_to_prompt takes the chat template's place: leave out chat_template_kwargs"
            )
        self._uses = EngineUses(self.engine_options, engine)
        self._params({})  # out-of-range values raise here, not at the first call

    @classmethod
    def class_name(cls) -> str:
        return "PagedLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """From the model's config, which is read without opening it: event loops ask for this."""
        facts = self._uses.facts(self.model)
        return LLMMetadata(
            context_window=facts.max_model_len,
            num_output=self._params({}).resolved(facts.generation_config).max_tokens or 1,
            is_chat_model=self._writes_chats or not self._writes_prompts,
            is_function_calling_model=not self._writes_chats,
            model_name=self.model,
            system_role=MessageRole.SYSTEM,
        )

    def close(self) -> None:
        """Give up the engine; the last user's close frees its memory."""
        self._uses.close()

    @property
    def _engine(self) -> Engine:
        return self._uses.get(self.model)

    def _params(self, kwargs: dict[str, Any], stream: bool = False) -> SamplingParams:
        own = {name: getattr(self, name) for name in ("temperature", "max_tokens", "stop", "seed")}
        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        params = sampling_params(own, self.sampling, kwargs, output_kind=kind)
        if stream and params.n > 1:
            raise RequestRejectedError(f"a stream has one output, but n is {params.n}")
        return params

    # --- chat -----------------------------------------------------------------------------------------------

    def _submit_chat(
        self, messages: Sequence[ChatMessage], kwargs: dict[str, Any], stream: bool = False
    ) -> tuple[ChatCall, RequestHandle]:
        options = {name: kwargs[name] for name in CHAT_OPTIONS if kwargs.get(name) is not None}
        sampling = {k: v for k, v in kwargs.items() if k not in (*CHAT_OPTIONS, "chat_template_kwargs")}
        template = {**self.chat_template_kwargs, **(kwargs.get("chat_template_kwargs") or {})}
        params = self._params(sampling, stream)
        if self._writes_chats:
            call = self._own_chat(messages, params, {**options, **template})
            return call, self._engine.submit(call.prompt, call.params)
        options.setdefault("split_special_tokens", self.split_special_tokens)
        call = prepare_chat(
            self._engine.tokenizer, to_dicts(messages), params, chat_template_kwargs=template, **options
        )
        return call, self._engine.submit(call.prompt, call.params)

    def _own_chat(
        self, messages: Sequence[ChatMessage], params: SamplingParams, options: dict[str, Any]
    ) -> ChatCall:
        """A chat whose text is ``messages_to_prompt``'s."""
        wanted = response_outputs(options.pop("response_format", None))
        if options.get("tools") == [] or options.get("tool_choice") in ("none", "auto"):
            options = {k: v for k, v in options.items() if k not in ("tools", "tool_choice")}
        if options:
            raise RequestRejectedError(
                f"messages_to_prompt takes the chat template's place, and {', '.join(options)} are for the template: "
                "leave one of them out"
            )
        if wanted is not None:
            params = replace(params, structured_outputs=wanted)
        return ChatCall({"prompt": self.messages_to_prompt(messages)}, params)

    def _chat_response(self, call: ChatCall, output: RequestOutput) -> ChatResponse:
        completion = output.outputs[0]
        reply = call.parse(completion.text, completion.finish_reason)
        reason = reply.finish_reason(completion.finish_reason)
        return response_from(reply, raw_of(output, self.model), logprobs_of(completion), reason)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        call, handle = self._submit_chat(messages, kwargs)
        return self._chat_response(call, _wait(handle))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        call, handle = await self._uses.run(self.model, self._submit_chat, messages, kwargs)
        return self._chat_response(call, await last_output(handle))

    @llm_chat_callback()
    def stream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> Generator[ChatResponse, None, None]:
        call, handle = self._submit_chat(messages, kwargs, stream=True)

        def stream() -> Generator[ChatResponse, None, None]:
            reply = ReplyStream(call, self.model)
            with closing(iter(handle)) as outputs:
                for output in outputs:
                    response = reply.response(output)
                    if response is not None:
                        yield response

        return stream()

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> AsyncGenerator[ChatResponse, None]:
        call, handle = await self._uses.run(self.model, self._submit_chat, messages, kwargs, True)

        async def stream() -> AsyncGenerator[ChatResponse, None]:
            reply = ReplyStream(call, self.model)
            async with aclosing(handle.__aiter__()) as outputs:
                async for output in outputs:
                    response = reply.response(output)
                    if response is not None:
                        yield response

        return stream()

    # --- completion -----------------------------------------------------------------------------------------

    def _submit(
        self, prompt: str, formatted: bool, kwargs: dict[str, Any], stream: bool = False
    ) -> RequestHandle:
        text = prompt if formatted or self.completion_to_prompt is None else self.completion_to_prompt(prompt)
        return self._engine.submit(text, self._params(kwargs, stream))

    def _completion(self, output: RequestOutput) -> CompletionResponse:
        completion, raw = output.outputs[0], raw_of(output, self.model)
        return CompletionResponse(
            text=completion.text,
            raw=raw,
            logprobs=logprobs_of(completion),
            additional_kwargs={"finish_reason": completion.finish_reason, **raw["usage"]},
        )

    def _completion_part(self, output: RequestOutput, text: str, tokens: int) -> CompletionResponse:
        completion, raw = output.outputs[0], raw_of(output, self.model, tokens)
        extra = {"finish_reason": completion.finish_reason, **raw["usage"]} if output.finished else {}
        return CompletionResponse(
            text=text,
            delta=completion.text,
            raw=raw,
            logprobs=logprobs_of(completion),
            additional_kwargs=extra,
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return self._completion(_wait(self._submit(prompt, formatted, kwargs)))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        handle = await self._uses.run(self.model, self._submit, prompt, formatted, kwargs)
        return self._completion(await last_output(handle))

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> Generator[CompletionResponse, None, None]:
        handle = self._submit(prompt, formatted, kwargs, stream=True)

        def stream() -> Generator[CompletionResponse, None, None]:
            text, tokens = "", 0
            with closing(iter(handle)) as outputs:
                for output in outputs:
                    text, tokens = text + output.outputs[0].text, tokens + len(output.outputs[0].token_ids)
                    yield self._completion_part(output, text, tokens)

        return stream()

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> AsyncGenerator[CompletionResponse, None]:
        handle = await self._uses.run(self.model, self._submit, prompt, formatted, kwargs, True)

        async def stream() -> AsyncGenerator[CompletionResponse, None]:
            text, tokens = "", 0
            async with aclosing(handle.__aiter__()) as outputs:
                async for output in outputs:
                    text, tokens = text + output.outputs[0].text, tokens + len(output.outputs[0].token_ids)
                    yield self._completion_part(output, text, tokens)

        return stream()


def _wait(handle: RequestHandle) -> RequestOutput:
    try:
        return handle.result()
    finally:
        handle.abort()  # no effect on a finished one; on Ctrl-C nothing goes on in the background


__all__ = ["PagedLLM"]
