"""LLM: the offline, synchronous face. Same calls as vLLM's class of that name."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paged_backend.engine.inputs import Prompt, as_prompts
from paged_backend.engine.registry import get_engine
from paged_backend.engine.stream import RequestHandle
from paged_backend.errors import BatchError, EngineClosedError, RequestRejectedError
from paged_backend.neutral import without_neutral
from paged_backend.outputs import RequestOutput
from paged_backend.sampling_params import SamplingParams
from paged_backend.tokenization import ChatTokenizer
from paged_backend.toolcalls.chat import prepare_chat
from paged_backend.vllm_options import CALL

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """Generate text for many prompts at once.

    model: a folder, a hub id, a .gguf file or ``demo``. engine_options: fields of ``EngineConfig``, or vLLM's options
    where they ask for what is done anyway (others are refused by name). The engine is
    shared with everybody in this process who names the same model; ``close``, ``with`` or dropping the object gives it
    up.
    """

    def __init__(self, model: str, **engine_options: Any) -> None:
        self.engine = get_engine(model, **engine_options)

    @property
    def tokenizer(self) -> ChatTokenizer | None:
        return self.engine.tokenizer

    def get_tokenizer(self) -> ChatTokenizer | None:
        """The tokenizer, by the name of vLLM's method."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **vllm_options: Any,
    ) -> list[RequestOutput]:
        """Continue every prompt; results come in the order of the prompts.

        prompts: text, token ids, a dict with ``prompt`` or ``prompt_token_ids``, or a list of these; or none, and
        prompt_token_ids. sampling_params: one for all, or one for each. priority: the same, instead of theirs.
        use_tqdm: draw a progress bar, by tqdm or by a class like it. lora_request and vllm_options: vLLM's other
        options, where they ask for nothing.

        Raises :class:`RequestRejectedError` naming the first prompt that could never run, before any runs; after
        all have ended :class:`BatchError` if some failed, with every result in its ``outputs``.
        """
        self._ensure_open()
        _check_call({"lora_request": lora_request, **vllm_options})
        if (prompts is None) == (prompt_token_ids is None):
            raise TypeError("give prompts or prompt_token_ids")
        items = as_prompts(prompt_token_ids if prompts is None else prompts)
        params = _one_each(sampling_params, len(items))
        if priority is not None:
            ranks = [priority] * len(items) if isinstance(priority, int) else list(priority)
            if len(ranks) != len(items):
                raise ValueError(f"{len(ranks)} priorities for {len(items)} prompts: give one, or one each")
            params = [replace(one, priority=rank) for one, rank in zip(params, ranks)]
        return self._gather(self.engine.submit_many(items, params), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        split_special_tokens: bool = True,
        priority: int | Sequence[int] | None = None,
        **vllm_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of ``{"role", "content"}``) or a list of them, by the model's chat template.

        tools: in OpenAI's form, or documented functions; a template that knows of none has them explained to it, and
        calls that are begun are valid ones. Calls stand in the outputs' text: ``paged_backend.toolcalls.parse_reply``
        reads them. tool_choice, parallel_tool_calls, response_format: as in OpenAI's API. The rest: as in ``generate``.
        """
        self._ensure_open()
        _check_call({"lora_request": lora_request, **vllm_options})
        single = bool(messages) and isinstance(messages, Sequence) and isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if single else list(messages)
        for conversation in conversations:
            if isinstance(conversation, (str, bytes, Mapping)) or not isinstance(conversation, Sequence):
                raise RequestRejectedError(
                    'a conversation is a list of messages, such as [{"role": "user", "content": "Hello"}], '
                    f"got {conversation!r:.80}"
                )
        calls = [
            prepare_chat(
                self.tokenizer,
                conversation,
                params,
                tools=tools,
                tool_choice=tool_choice,
                parallel_tool_calls=parallel_tool_calls,
                response_format=response_format,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
                split_special_tokens=split_special_tokens,
            )
            for conversation, params in zip(conversations, _one_each(sampling_params, len(conversations)))
        ]
        prompts, params = [call.prompt for call in calls], [call.params for call in calls]
        return self.generate(prompts, params, use_tqdm=use_tqdm, priority=priority)

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request that says nothing is sampled with: the model's own defaults."""
        return SamplingParams().resolved(self.engine.generation_config)

    def _gather(
        self, handles: list[RequestHandle], use_tqdm: bool | Callable[..., Any]
    ) -> list[RequestOutput]:
        try:
            if use_tqdm:
                self._watch(handles, use_tqdm)
            outputs = [handle.wait() for handle in handles]
        finally:
            for handle in handles:  # no effect on finished ones; on Ctrl-C nothing goes on in the background
                handle.abort()
        failed = [output for output in outputs if output.error is not None]
        if failed:
            raise BatchError(
                f"{len(failed)} of {len(outputs)} requests failed, first: {failed[0].error}; "
                "all results are in this error's .outputs",
                outputs,
            ) from failed[0].error
        return outputs

    def _watch(
        self, handles: list[RequestHandle], use_tqdm: bool | Callable[..., Any], interval: float = 0.2
    ) -> None:
        """Progress bar: requests done, tokens per second, KV memory in use."""
        from tqdm import tqdm

        start = time.monotonic()
        made: Callable[..., Any] = use_tqdm if callable(use_tqdm) else tqdm
        with made(total=len(handles), desc="requests", unit="req", dynamic_ncols=True) as bar:
            pending = handles
            while pending:
                with contextlib.suppress(TimeoutError):
                    pending[0].wait(interval)
                still = [handle for handle in pending if not handle.finished]
                bar.update(len(pending) - len(still))
                pending = still
                tokens = sum(handle.num_generated for handle in handles)
                rate = tokens / max(time.monotonic() - start, 1e-9)
                bar.set_postfix_str(f"{rate:.1f} tok/s, KV {self.engine.stats().kv_usage:.0%}", refresh=True)

    def close(self) -> None:
        """Give up the engine; the last user's close frees its memory. Others who use it are not affected."""
        self.engine.close()

    def _ensure_open(self) -> None:
        if self.engine.health == "closed":
            raise EngineClosedError("this LLM was closed: make a new one")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _one_each(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if isinstance(given, Mapping):
        raise TypeError("sampling_params must be SamplingParams, got a dict: use SamplingParams(**options)")
    params = list(given)
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts: give one, or one each")
    return params


def _check_call(given: Mapping[str, Any]) -> None:
    """Raise for an option of vLLM's calls that asks for something, ValueError, and for one nobody knows, TypeError."""
    for name in without_neutral(given, CALL):
        raise TypeError(f"unknown option {name!r}")
