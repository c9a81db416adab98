"""What ChatPaged and PagedLLM have in common: options, engine, errors, deadlines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from typing import Any

from langchain_core.exceptions import ContextOverflowError as LangChainContextOverflow
from langchain_core.exceptions import ModelInvalidRequestError, ModelTimeoutError
from langchain_core.language_models.base import LangSmithParams
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from paged_backend.adapters.common import ALIASES, EngineUses, last_output, sampling_params
from paged_backend.engine.engine import Engine
from paged_backend.engine.stream import RequestHandle
from paged_backend.errors import ContextOverflowError, RequestRejectedError
from paged_backend.outputs import RequestOutput
from paged_backend.sampling_params import RequestOutputKind, SamplingParams
from paged_backend.tokenization import needed

_REMOTE_ONLY = ("api_key", "max_retries")
CONFIG = ConfigDict(extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True)
"""For the models too: LangChain's own bases, which come later, would let any misspelt option pass."""


class InvalidRequestError(ModelInvalidRequestError, RequestRejectedError):
    """A request that could never run, in LangChain's words and in ours."""


class PromptTooLongError(LangChainContextOverflow, ContextOverflowError):
    """The prompt does not fit the context."""


class DeadlineError(ModelTimeoutError, TimeoutError):
    """The request did not finish within ``timeout`` seconds and was aborted."""


class PagedOptions(BaseModel):
    """Options of both models. None leaves the choice to the model's generation config, then to our defaults.

    ``api_key`` and ``max_retries`` are accepted and dropped, so that code written for a remote model runs as it is.
    """

    model: str
    """A folder, a hub id, a .gguf file or ``demo``."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Fields of ``EngineConfig``; everybody in the process who names the same model shares one engine."""
    engine: Any = Field(default=None, exclude=True, repr=False)
    """An open engine to use instead of opening ``model``."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: list[str] | str | None = None
    """Strings that end the output; ``stop`` given with a call replaces them, and an empty list takes them away."""
    seed: int | None = None
    n: int | None = None
    """Outputs per prompt; streams have one."""
    logprobs: bool | int | None = None
    """True, or the number of alternatives per token."""
    top_logprobs: int | None = None
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Any other field of ``SamplingParams``."""
    timeout: float | None = None
    """Seconds after which a request is aborted."""
    streaming: bool = False
    """Let plain calls stream as well, so that callbacks see every token."""

    _uses: EngineUses = PrivateAttr()

    model_config = CONFIG

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            values = {
                ALIASES.get(name, name): value for name, value in values.items() if name not in _REMOTE_ONLY
            }
            if "model" not in values and "model_name" in values:
                values["model"] = values.pop("model_name")
        return values

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self._uses = EngineUses(self.engine_options, self.engine)
        self._params(None, {})  # out-of-range values raise here, not at the first call

    def close(self) -> None:
        """Give up the engine; the last user's close frees its memory."""
        self._uses.close()

    # --- requests ------------------------------------------------------------------------------------------------

    def _name(self, kwargs: Mapping[str, Any]) -> str:
        return kwargs.get("model") or self.model

    def _engine(self, kwargs: Mapping[str, Any]) -> Engine:
        return self._uses.get(self._name(kwargs))

    def _sampling(self) -> dict[str, Any]:
        names = (
            "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
            "max_tokens", "min_tokens", "stop", "seed", "n", "logprobs", "top_logprobs",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def _params(
        self, stop: Sequence[str] | None, kwargs: Mapping[str, Any], stream: bool = False
    ) -> SamplingParams:
        """constructor < model_kwargs < this call's keywords < this call's ``stop``."""
        merged: dict[str, Any] = {}
        call = {name: value for name, value in kwargs.items() if name != "model"}
        for layer in (self._sampling(), self.model_kwargs, call, {"stop": stop}):
            merged.update(
                {ALIASES.get(name, name): value for name, value in layer.items() if value is not None}
            )
        wanted, top = merged.pop("logprobs", None), merged.pop("top_logprobs", None)
        if wanted is not None and wanted is not False:
            merged["logprobs"] = wanted if wanted is not True else top or 0
        elif top is not None and wanted is not False:
            raise InvalidRequestError("top_logprobs needs logprobs=True")
        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        with translated_errors():
            params = sampling_params(merged, output_kind=kind)
        if stream and params.n > 1:
            raise InvalidRequestError(f"a stream has one output, but n is {params.n}: use invoke or generate")
        return params

    def _await(self, handles: Sequence[RequestHandle]) -> list[RequestOutput]:
        """Wait for all; on an error or an interrupt nothing goes on in the background."""
        with translated_errors(), Deadline(handles, self.timeout) as deadline:
            try:
                return [deadline.checked(handle.wait()) for handle in handles]
            finally:
                for handle in handles:
                    handle.abort()

    async def _await_async(self, handles: Sequence[RequestHandle]) -> list[RequestOutput]:
        with translated_errors(), Deadline(handles, self.timeout) as deadline:

            async def one(handle: RequestHandle) -> RequestOutput:
                return deadline.checked(await last_output(handle))

            return list(await asyncio.gather(*map(one, handles)))

    def _deltas(self, handle: RequestHandle) -> Iterator[RequestOutput]:
        with (
            translated_errors(),
            Deadline([handle], self.timeout) as deadline,
            closing(iter(handle)) as stream,
        ):
            for output in stream:
                yield deadline.checked(output)

    async def _deltas_async(self, handle: RequestHandle) -> AsyncGenerator[RequestOutput, None]:
        with translated_errors(), Deadline([handle], self.timeout) as deadline:
            async with aclosing(handle.__aiter__()) as stream:
                async for output in stream:
                    yield deadline.checked(output)

    # --- what LangChain asks about a model -------------------------------------------------------------------------

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything that changes the output: LangChain's cache keys are made of it."""
        return {
            "model_name": self.model,
            "engine_options": self.engine_options,
            **self._sampling(),
            **self.model_kwargs,
        }

    def _ls_params(self, kind: str, stop: list[str] | None, kwargs: Mapping[str, Any]) -> LangSmithParams:
        found = {**self._sampling(), **{ALIASES.get(k, k): v for k, v in kwargs.items() if v is not None}}
        params = LangSmithParams(
            ls_provider="paged_backend",
            ls_model_name=kwargs.get("model") or self.model,
            ls_model_type="chat" if kind == "chat" else "llm",
        )
        if found.get("temperature") is not None:
            params["ls_temperature"] = found["temperature"]
        if found.get("max_tokens") is not None:
            params["ls_max_tokens"] = found["max_tokens"]
        stops = stop if stop is not None else found.get("stop")
        if stops:
            params["ls_stop"] = [stops] if isinstance(stops, str) else list(stops)
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of ``text`` in the model's own vocabulary, unless ``custom_get_token_ids`` says otherwise."""
        custom = getattr(self, "custom_get_token_ids", None)
        if custom is not None:
            return list(custom(text))
        return needed(self._engine({}).tokenizer).encode(text, add_special_tokens=False)

    def _combine_llm_outputs(self, llm_outputs: list[dict[str, Any] | None]) -> dict[str, Any]:
        total: dict[str, int] = {}
        for output in llm_outputs:
            for name, count in ((output or {}).get("token_usage") or {}).items():
                total[name] = total.get(name, 0) + count
        return {"token_usage": total, "model_name": self.model} if total else {}


class Deadline:
    """Aborts requests after ``timeout`` seconds and tells that abort from others."""

    def __init__(self, handles: Sequence[RequestHandle], timeout: float | None) -> None:
        self._handles = handles
        self._timeout = timeout
        self._passed = False
        self._timer = None if timeout is None else threading.Timer(timeout, self._pass)

    def __enter__(self) -> Deadline:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _pass(self) -> None:
        self._passed = True
        for handle in self._handles:
            handle.abort()

    def checked(self, output: RequestOutput) -> RequestOutput:
        """``output``, unless it is that of a failed request or of one that the deadline ended."""
        if output.error is not None:
            raise output.error
        if self._passed and any(c.finish_reason == "abort" for c in output.outputs):
            raise DeadlineError(f"the request was aborted after timeout={self._timeout} seconds")
        return output


@contextmanager
def translated_errors() -> Iterator[None]:
    """Our refusals as the errors that LangChain's middleware knows; they stay catchable as ours."""
    try:
        yield
    except (ModelInvalidRequestError, LangChainContextOverflow):
        raise
    except ContextOverflowError as error:
        raise PromptTooLongError(str(error)) from error
    except ValueError as error:  # RequestRejectedError, and values out of range
        raise InvalidRequestError(str(error)) from error
