"""ChatPaged: a LangChain chat model on an engine in this process."""

from __future__ import annotations

import contextvars
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel

from paged_backend.adapters.common import openai_logprobs, usage
from paged_backend.adapters.langchain.base import CONFIG, PagedOptions, translated_errors
from paged_backend.adapters.langchain.batch import (
    as_completed,
    seat,
    submit,
    threads,
    together,
    unlimited,
    wide,
)
from paged_backend.adapters.langchain.messages import (
    message_from,
    to_dicts,
    usage_metadata,
)
from paged_backend.adapters.langchain.stream import ReplyChunks
from paged_backend.adapters.langchain.structured import structured_runnable
from paged_backend.engine.engine import Engine
from paged_backend.engine.stream import RequestHandle
from paged_backend.outputs import RequestOutput
from paged_backend.toolcalls import CHAT_OPTIONS, ChatCall, chat_prompt, prepare_chat

_IGNORED = ("stream", "strict", "ls_structured_output_format", "structured_output_format")


class ChatPaged(PagedOptions, BaseChatModel):
    """A chat model whose weights, KV memory, prefix cache and batch it shares with everybody who names the same model.

    ``ChatPaged(model="demo", temperature=0)``. Nothing is loaded before the first call. ``batch``, ``abatch``,
    ``generate`` and the ``as_completed`` forms hand over all their prompts at once.
    """

    model_config = CONFIG

    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template."""
    split_special_tokens: bool = True
    """Special tokens written out in messages are text; False lets them act as what they are."""

    @property
    def _llm_type(self) -> str:
        return "paged-backend-chat"

    # --- one conversation -----------------------------------------------------------------------------------

    def _prepare(
        self,
        messages: Sequence[BaseMessage],
        stop: list[str] | None,
        kwargs: Mapping[str, Any],
        stream: bool = False,
    ) -> tuple[Engine, ChatCall]:
        options = {name: kwargs[name] for name in CHAT_OPTIONS if kwargs.get(name) is not None}
        options.setdefault("split_special_tokens", self.split_special_tokens)
        template = {**(self.chat_template_kwargs or {}), **(kwargs.get("chat_template_kwargs") or {})}
        ours = (*CHAT_OPTIONS, *_IGNORED, "chat_template_kwargs")
        sampling = {name: value for name, value in kwargs.items() if name not in ours}
        params = self._params(stop, sampling, stream)
        if "tools" in options:
            options["tools"] = [convert_to_openai_tool(tool) for tool in options["tools"]]
        engine = self._engine(kwargs)
        self._learn(engine)
        with translated_errors():
            return engine, prepare_chat(
                engine.tokenizer, to_dicts(messages), params, chat_template_kwargs=template, **options
            )

    async def _start(
        self,
        messages: Sequence[BaseMessage],
        stop: list[str] | None,
        kwargs: Mapping[str, Any],
        stream: bool = False,
    ) -> tuple[ChatCall, RequestHandle]:
        """Prepare a conversation and hand it over, beside the event loop."""

        def start() -> tuple[ChatCall, RequestHandle]:
            engine, call = self._prepare(messages, stop, kwargs, stream)
            with translated_errors():
                return call, engine.submit(call.prompt, call.params)

        return await self._uses.run(self._name(kwargs), start)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        engine, call = self._prepare(messages, stop, kwargs)
        with translated_errors():
            handle = submit(engine, call.prompt, call.params)
        return self._result(call, self._await([handle])[0], kwargs)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call, handle = await self._start(messages, stop, kwargs)
        return self._result(call, (await self._await_async([handle]))[0], kwargs)

    def _result(self, call: ChatCall, output: RequestOutput, kwargs: Mapping[str, Any]) -> ChatResult:
        name = kwargs.get("model") or self.model
        generations = []
        for completion in output.outputs:
            reply = call.parse(completion.text, completion.finish_reason)
            info: dict[str, Any] = {
                "finish_reason": reply.finish_reason(completion.finish_reason),
                "model_name": name,
                "model_provider": "paged_backend",
            }
            content = openai_logprobs(completion, call.params.logprobs)
            if content is not None:
                info["logprobs"] = {"content": content}
            message = message_from(
                reply,
                response_metadata=dict(info),
                usage_metadata=usage_metadata(output, len(completion.token_ids)),
            )
            generations.append(ChatGeneration(message=message, generation_info=info))
        return ChatResult(
            generations=generations, llm_output={"token_usage": usage([output]), "model_name": name}
        )

    # --- streams --------------------------------------------------------------------------------------------

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        engine, call = self._prepare(messages, stop, kwargs, stream=True)
        with translated_errors():
            handle = submit(engine, call.prompt, call.params)
        reply = ReplyChunks(call, kwargs.get("model") or self.model)
        for output in self._deltas(handle):
            for chunk in reply.chunks(output):
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call, handle = await self._start(messages, stop, kwargs, stream=True)
        reply = ReplyChunks(call, kwargs.get("model") or self.model)
        deltas = self._deltas_async(handle)
        try:
            async for output in deltas:
                for chunk in reply.chunks(output):
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
        finally:
            await deltas.aclose()

    # --- many conversations ---------------------------------------------------------------------------------

    def generate(self, messages: list[list[BaseMessage]], *args: Any, **kwargs: Any) -> LLMResult:
        if len(messages) < 2:
            return super().generate(messages, *args, **kwargs)
        base = super().generate
        run_id = kwargs.pop("run_id", None)

        def one(position: int, conversation: list[BaseMessage]) -> LLMResult:
            with seat():
                return base([conversation], *args, **kwargs, run_id=run_id if position == 0 else None)

        with together(len(messages)), ThreadPoolExecutor(threads(len(messages))) as pool:
            contexts = [contextvars.copy_context() for _ in messages]
            work = [pool.submit(c.run, one, i, m) for i, (c, m) in enumerate(zip(contexts, messages))]
            results = [future.result() for future in work]
        return LLMResult(
            generations=[result.generations[0] for result in results],
            llm_output=self._combine_llm_outputs([result.llm_output for result in results]),
            run=[info for result in results for info in result.run or ()] or None,
        )

    def batch(self, inputs: list[LanguageModelInput], config: Any = None, **kwargs: Any) -> list[AIMessage]:
        with together(len(inputs) if unlimited(config) else 1):
            return super().batch(inputs, wide(config, len(inputs)), **kwargs)

    def batch_as_completed(
        self, inputs: Sequence[LanguageModelInput], config: Any = None, **kwargs: Any
    ) -> Any:
        yield from as_completed(super().batch_as_completed, inputs, config, kwargs)

    def invoke(self, input: LanguageModelInput, config: Any = None, **kwargs: Any) -> AIMessage:
        with seat():
            return super().invoke(input, config, **kwargs)

    # --- tools and structured output ------------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """tool_choice: ``auto``, ``none``, ``any``/``required``/True, or the name of a tool. Arguments always follow
        the tool's schema; ``strict`` refuses a schema with keywords that no grammar can hold them to."""
        formatted = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        if strict is not None:  # which is left out of those that are in OpenAI's form already
            formatted = [
                {**tool, "function": {**tool["function"], "strict": strict}} if "function" in tool else tool
                for tool in formatted
            ]
        if tool_choice is not None:
            kwargs["tool_choice"] = tool_choice
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(tools=formatted, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: str = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """method: ``json_schema``, ``function_calling`` or ``json_mode``; each holds the output to the schema, the last
        without a schema to some JSON object. include_raw: a dict with ``raw``, ``parsed`` and ``parsing_error``
        instead of the parsed output."""
        return structured_runnable(self, schema, method, include_raw, strict, kwargs)

    # --- what LangChain asks about the model ----------------------------------------------------------------

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._ls_params("chat", stop, kwargs)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the prompt that these messages, and tools, become."""
        tokenizer = self._engine({}).tokenizer
        offered = [convert_to_openai_tool(tool) for tool in tools or ()]
        with translated_errors():
            prompt = chat_prompt(
                tokenizer,
                to_dicts(messages),
                offered,
                chat_template_kwargs=self.chat_template_kwargs,
                split_special_tokens=self.split_special_tokens,
            )
        return len(prompt["prompt_token_ids"])

    def _resolve_model_profile(self) -> ModelProfile | None:
        profile = ModelProfile(
            name=self.model,
            text_inputs=True,
            text_outputs=True,
            image_inputs=False,
            audio_inputs=False,
            tool_calling=True,
            tool_choice=True,
            tool_call_streaming=True,
            structured_output=True,
            temperature=True,
        )
        limit = self.engine_options.get("max_model_len")
        if self.engine is not None:
            limit = self.engine.max_model_len
        if limit is not None:
            profile["max_input_tokens"] = profile["max_output_tokens"] = limit
        return profile

    def _learn(self, engine: Engine) -> None:
        """Put the context length into the profile; it is not known before the model is open."""
        if isinstance(self.profile, dict) and "max_input_tokens" not in self.profile:
            self.profile["max_input_tokens"] = self.profile["max_output_tokens"] = engine.max_model_len
