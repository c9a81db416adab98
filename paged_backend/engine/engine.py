"""Engine: one user's thread-safe door to a model that runs (see ``loop``); others may have doors to it as well."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paged_backend.config import EngineConfig
from paged_backend.constrain.grammar import GrammarCompiler
from paged_backend.engine.core import EngineCore
from paged_backend.engine.input_processor import InputProcessor
from paged_backend.engine.inputs import Prompt
from paged_backend.engine.loop import EngineLoop, Lease
from paged_backend.engine.request import Request
from paged_backend.engine.stats import EngineStats
from paged_backend.engine.stream import RequestHandle, RequestState
from paged_backend.engine.trimmer import Trimmer
from paged_backend.errors import EngineClosedError, RequestRejectedError
from paged_backend.memory_pressure import MemoryPressure
from paged_backend.outputs import RequestOutput
from paged_backend.sampling_params import SamplingParams
from paged_backend.tokenization import ChatTokenizer

T = TypeVar("T")

_LONG_TEXT = 2000  # characters; takes about a millisecond to encode


@dataclass(frozen=True)
class OpenModel:
    """What all users of one running model have in common.

    eos_token_ids: end of sequence. generation_config: the model's defaults for sampling options. effective: options
    whose value in ``config`` leaves it to the model or the machine -> what became of them.
    """

    loop: EngineLoop
    config: EngineConfig
    tokenizer: ChatTokenizer | None
    eos_token_ids: tuple[int, ...]
    generation_config: Mapping[str, Any]
    grammars: GrammarCompiler
    inputs: InputProcessor
    block_bytes: int = 0
    effective: Mapping[str, Any] = field(default_factory=dict)


class Engine:
    """Serves one model to any number of threads and event loops. Get one from ``paged_backend.get_engine``.

    The model is closed when nobody has an engine of it any more: each was closed, or dropped with no request running.
    """

    def __init__(
        self,
        core: EngineCore,
        tokenizer: ChatTokenizer | None,
        config: EngineConfig,
        *,
        eos_token_ids: Sequence[int] = (),
        generation_config: Mapping[str, Any] | None = None,
        block_bytes: int = 0,
        effective: Mapping[str, Any] | None = None,
    ) -> None:
        eos, defaults = tuple(eos_token_ids), dict(generation_config or {})
        grammars = GrammarCompiler(tokenizer, eos)
        inputs = InputProcessor(core.limits, tokenizer, grammars, eos, defaults, config.seed)
        loop = EngineLoop(
            core, Trimmer(core, block_bytes, config.kv_cache_idle_timeout or 0.0, MemoryPressure().missing)
        )
        self.model = OpenModel(
            loop, config, tokenizer, eos, defaults, grammars, inputs, block_bytes, dict(effective or {})
        )
        loop.start()
        self._lease = Lease(loop)

    @classmethod
    def of(cls, model: OpenModel) -> Engine:
        """One more use of a model. Raises :class:`EngineClosedError` if it is being closed."""
        engine = object.__new__(cls)
        engine.model = model
        engine._lease = Lease(model.loop)
        return engine

    # --- the model -----------------------------------------------------------------------------------------------

    @property
    def config(self) -> EngineConfig:
        return self.model.config

    @property
    def tokenizer(self) -> ChatTokenizer | None:
        """None for a model that brought none: prompts must be token ids."""
        return self.model.tokenizer

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End of sequence."""
        return self.model.eos_token_ids

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The model's defaults for sampling options."""
        return self.model.generation_config

    @property
    def grammars(self) -> GrammarCompiler:
        return self.model.grammars

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output in tokens, by the model's context and the pool."""
        return self._core.limits.longest_request()

    @property
    def max_num_seqs(self) -> int:
        """Most sequences in one step, and so most samples of one request."""
        return self._core.limits.max_num_seqs

    @property
    def vocab_size(self) -> int:
        """Token ids are below this number."""
        return self._core.limits.vocab_size

    @property
    def _core(self) -> EngineCore:
        return self.model.loop.core

    # --- requests ------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        resume_output_ids: Mapping[int, Sequence[int]] | None = None,
        cache_salt: str | None = None,
    ) -> RequestHandle:
        """Queue one prompt (text, token ids, or a dict with ``prompt`` or ``prompt_token_ids``).

        resume_output_ids: {sample: its output in an earlier run with the same seed}. The samples go on as that run
        would have, and give out only what is new; samples that are left out have ended. cache_salt: cached prefixes are
        shared only between requests with equal salts.

        Raises :class:`RequestRejectedError` (``ValueError``) for a request that could never run; the engine is not
        affected.
        """
        self._ensure_open()
        made = self.model.inputs.prepare(
            prompt, params or SamplingParams(), request_id, resume_output_ids, cache_salt
        )
        return self._enqueue([made])[0]

    def submit_many(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str | None] | None = None,
    ) -> list[RequestHandle]:
        """Queue several at once, so that the first step sees all of them. Every one is checked before any is queued.

        What :class:`RequestRejectedError` says begins with the number of the prompt, which is its ``index`` too.
        """
        self._ensure_open()
        ids = request_ids or [None] * len(prompts)
        made = []
        for index, item in enumerate(zip(prompts, params, ids)):
            try:
                made.append(self.model.inputs.prepare(*item))
            except RequestRejectedError as error:
                raise error.at(index, len(prompts)) from error.__cause__
        return self._enqueue(made)

    def _enqueue(self, made: Sequence[tuple[list[Request], RequestState]]) -> list[RequestHandle]:
        loop = self.model.loop
        loop.submit(made, self._lease)
        return [RequestHandle(state, loop.abort, loop.drop) for _, state in made]

    async def submit_async(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> RequestHandle:
        """:meth:`submit` for an event loop, which goes on while a long text is encoded or a grammar is compiled."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        long = isinstance(text, str) and len(text) > _LONG_TEXT
        if long or (params is not None and getattr(params, "structured_outputs", None) is not None):
            import asyncio  # here, as the start of a program that has no event loop should not wait for it

            return await asyncio.to_thread(self.submit, prompt, params, request_id)
        return self.submit(prompt, params, request_id)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Submit and stream. Leaving the iteration, or cancelling the task, aborts the request."""
        handle = await self.submit_async(prompt, params, request_id)
        stream = handle.__aiter__()
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    def abort(self, request_id: str) -> None:
        """Stop a request of this user; unknown and finished ids are ignored. Safe from any thread."""
        state = self._lease.requests.get(request_id)
        if state is not None:
            self.model.loop.abort(state)

    def _ensure_open(self) -> None:
        if not self._lease.open:
            raise EngineClosedError("the engine is closed: open a new one with get_engine(...) or LLM(...)")
        self.model.loop.ensure_open()

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` in the loop thread between two steps and return its result."""
        self._ensure_open()
        return self.model.loop.call(function)

    # --- looking at it, ending it --------------------------------------------------------------------------------

    @property
    def health(self) -> str:
        """``ok``; ``degraded`` after bookkeeping failed once (it serves on); ``closed``; ``dead`` if a thread ended."""
        return self.model.loop.health if self._lease.open else "closed"

    def stats(self) -> EngineStats:
        """A snapshot; counts may be from within a running step."""
        loop = self.model.loop
        return EngineStats.of(
            self._core, loop.prompt_tokens, loop.generation_tokens, self.model.block_bytes, self.health
        )

    def trim(self) -> int:
        """Drop cached prefixes that nobody uses, give their memory back; returns the number of blocks given back: none
        on a GPU and outside of Linux, where the pool keeps its memory."""
        return self.call(self._core.trim)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, for example because the weights are new; what runs goes on as it is."""
        self.call(self._core.reset_prefixes)

    def check(self) -> None:
        """Raise if a block leaked or a cache invariant is broken."""
        self.call(self._core.check)

    def close(self) -> None:
        """Give up this use; the last one ends the engine: what runs is aborted, every waiter is woken, the memory is
        free. Once more does nothing. Requests of a use that is given up run on while others keep the engine open."""
        self._lease.close()

    def close_soon(self) -> None:
        """Give up this use without waiting for the end. Takes no lock: finalizers may call it."""
        self._lease.close_soon()

    def shutdown(self) -> None:
        """End the engine, whoever still uses it."""
        self.model.loop.shutdown()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
