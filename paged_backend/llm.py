"""LLM: the offline, synchronous face. Same calls as vLLM's class of that name."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from paged_backend.engine.inputs import Prompt, as_prompts
from paged_backend.engine.registry import get_engine
from paged_backend.engine.stream import RequestHandle
from paged_backend.errors import BatchError, EngineClosedError, RequestRejectedError
from paged_backend.outputs import RequestOutput
from paged_backend.sampling_params import SamplingParams
from paged_backend.toolcalls.chat import prepare_chat

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """Generate text for many prompts at once.

    model: a folder, a hub id, a .gguf file or ``demo``. engine_options: fields of ``EngineConfig``. The engine is
    shared with everybody in this process who names the same model; ``close``, ``with`` or dropping the object gives it
    up.
    """

    def __init__(self, model: str, **engine_options: Any) -> None:
        self.engine = get_engine(model, **engine_options)

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def get_tokenizer(self) -> Any:
        """The tokenizer, by the name of vLLM's method."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue every prompt; results come in the order of the prompts.

        prompts: text, token ids, a dict with ``prompt`` or ``prompt_token_ids``, or a list of these.
        sampling_params: one for all, or one for each. use_tqdm: draw a progress bar.

        Raises :class:`RequestRejectedError` naming the first prompt that could never run, before any runs; after
        all have ended :class:`BatchError` if some failed, with every result in its ``outputs``.
        """
        self._ensure_open()
        items = as_prompts(prompts)
        params = _one_each(sampling_params, len(items))
        return self._gather(self.engine.submit_many(items, params), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of ``{"role", "content"}``) or a list of them, by the model's chat template.

        tools: in OpenAI's form, or documented functions; a template that knows of none has them explained to it, and
        calls that are begun are valid ones. Calls stand in the outputs' text: ``paged_backend.toolcalls.parse_reply``
        reads them. tool_choice, parallel_tool_calls, response_format: as in OpenAI's API.
        """
        self._ensure_open()
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
            )
            for conversation, params in zip(conversations, _one_each(sampling_params, len(conversations)))
        ]
        return self.generate(
            [call.prompt for call in calls], [call.params for call in calls], use_tqdm=use_tqdm
        )

    def _gather(self, handles: list[RequestHandle], use_tqdm: bool) -> list[RequestOutput]:
        try:
            if use_tqdm:
                self._watch(handles)
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

    def _watch(self, handles: list[RequestHandle], interval: float = 0.2) -> None:
        """Progress bar: requests done, tokens per second, KV memory in use."""
        from tqdm import tqdm

        start = time.monotonic()
        with tqdm(total=len(handles), desc="requests", unit="req", dynamic_ncols=True) as bar:
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
