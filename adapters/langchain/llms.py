"""PagedLLM: a LangChain completion model on an engine in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.outputs import Generation, GenerationChunk, LLMResult

from paged_backend.adapters.common import openai_logprobs, usage
from paged_backend.adapters.langchain.base import CONFIG, PagedOptions, translated_errors
from paged_backend.adapters.langchain.batch import as_completed, seat, submit
from paged_backend.engine.stream import RequestHandle
from paged_backend.outputs import RequestOutput
from paged_backend.sampling_params import SamplingParams


class PagedLLM(PagedOptions, BaseLLM):
    """Continues text as it is, without a chat template. ``PagedLLM(model="demo", max_tokens=64)``.

    Nothing is loaded before the first call. All prompts of a ``generate``, ``batch`` or ``abatch`` go to the engine at
    once; with ``max_concurrency`` at most so many are in flight, a new one starting whenever one ends.
    """

    model_config = CONFIG

    @property
    def _llm_type(self) -> str:
        return "paged-backend"

    def _submit(
        self, prompts: list[str], stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> tuple[SamplingParams, list[RequestHandle]]:
        params = self._params(stop, kwargs)
        engine = self._engine(kwargs)
        with translated_errors():
            if len(prompts) == 1:
                return params, [submit(engine, prompts[0], params)]
            return params, engine.submit_many(prompts, [params] * len(prompts))

    def _submit_one(self, prompt: str, params: SamplingParams, kwargs: Mapping[str, Any]) -> RequestHandle:
        with translated_errors():
            return self._engine(kwargs).submit(prompt, params)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        if self._streams(prompts, stop, kwargs, run_manager):
            params = self._params(stop, kwargs, stream=True)
            with translated_errors():
                handle = submit(self._engine(kwargs), prompts[0], params)
            parts = []
            for output in self._deltas(handle):
                parts.append(output)
                if run_manager is not None:
                    chunk = _chunk(output, params)
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            return self._result(params, [_joined(parts)], kwargs)
        params, handles = self._submit(prompts, stop, kwargs)
        return self._result(params, self._await(handles), kwargs)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        if self._streams(prompts, stop, kwargs, run_manager):
            params = self._params(stop, kwargs, stream=True)
            handle = await self._uses.run(self._name(kwargs), self._submit_one, prompts[0], params, kwargs)
            parts = []
            async with aclosing(self._deltas_async(handle)) as deltas:
                async for output in deltas:
                    parts.append(output)
                    if run_manager is not None:
                        chunk = _chunk(output, params)
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            return self._result(params, [_joined(parts)], kwargs)
        params, handles = await self._uses.run(self._name(kwargs), self._submit, prompts, stop, kwargs)
        return self._result(params, await self._await_async(handles), kwargs)

    def _streams(
        self, prompts: list[str], stop: list[str] | None, kwargs: Mapping[str, Any], run_manager: Any
    ) -> bool:
        """Whether a plain call lets callbacks see every token: ``streaming``, one prompt, one output."""
        one = self.streaming and run_manager is not None and len(prompts) == 1
        return one and self._params(stop, kwargs).n == 1

    def _result(
        self, params: SamplingParams, outputs: list[RequestOutput], kwargs: Mapping[str, Any]
    ) -> LLMResult:
        generations = []
        for output in outputs:
            row = []
            for completion in output.outputs:
                info: dict[str, Any] = {
                    "finish_reason": completion.finish_reason,
                    "stop_reason": completion.stop_reason,
                    "cached_tokens": output.num_cached_tokens,
                }
                content = openai_logprobs(completion, params.logprobs)
                if content is not None:
                    info["logprobs"] = {"content": content}
                row.append(Generation(text=completion.text, generation_info=info))
            generations.append(row)
        llm_output = {"token_usage": usage(outputs), "model_name": kwargs.get("model") or self.model}
        return LLMResult(generations=generations, llm_output=llm_output)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        params = self._params(stop, kwargs, stream=True)
        handle = self._submit_one(prompt, params, kwargs)
        for output in self._deltas(handle):
            chunk = _chunk(output, params)
            if run_manager is not None:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        params = self._params(stop, kwargs, stream=True)
        handle = await self._uses.run(self._name(kwargs), self._submit_one, prompt, params, kwargs)
        deltas = self._deltas_async(handle)
        try:
            async for output in deltas:
                chunk = _chunk(output, params)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
        finally:
            await deltas.aclose()

    def batch_as_completed(
        self, inputs: Sequence[LanguageModelInput], config: Any = None, **kwargs: Any
    ) -> Any:
        yield from as_completed(super().batch_as_completed, inputs, config, kwargs)

    def invoke(self, input: LanguageModelInput, config: Any = None, **kwargs: Any) -> str:
        with seat():
            return super().invoke(input, config, **kwargs)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._ls_params("llm", stop, kwargs)


def _chunk(output: RequestOutput, params: SamplingParams) -> GenerationChunk:
    completion = output.outputs[0]
    info: dict[str, Any] = {}
    content = openai_logprobs(completion, params.logprobs)
    if content:
        info["logprobs"] = {"content": content}
    if output.finished:
        info["finish_reason"] = completion.finish_reason
    return GenerationChunk(text=completion.text, generation_info=info or None)


def _joined(parts: Sequence[RequestOutput]) -> RequestOutput:
    """The whole that the deltas of a request with one output add up to."""
    deltas = [part.outputs[0] for part in parts]
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    whole = replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=None if deltas[-1].logprobs is None else logprobs,
    )
    return replace(parts[-1], outputs=[whole])
