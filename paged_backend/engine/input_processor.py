"""InputProcessor: from what a caller gives (a prompt, params) to what the core runs and the caller waits for.

Runs in the caller's thread, so that text is encoded and grammars are compiled while the engine steps.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paged_backend.constrain.grammar import GrammarCompiler
from paged_backend.constrain.options import StructuredOutputs
from paged_backend.constrain.state import GrammarState
from paged_backend.engine.inputs import Prompt, check_token_options, encode_prompt
from paged_backend.engine.limits import RequestLimits
from paged_backend.engine.output_processor import CompletionState
from paged_backend.engine.request import Request
from paged_backend.engine.stream import RequestState
from paged_backend.errors import RequestRejectedError
from paged_backend.outputs import RequestMetrics
from paged_backend.sampling_params import SamplingParams
from paged_backend.tokenization import Tokenizer


class InputProcessor:
    """Safe from any thread. seed: of the first request without one, counted up from there; None draws entropy."""

    def __init__(
        self,
        limits: RequestLimits,
        tokenizer: Tokenizer | None,
        grammars: GrammarCompiler,
        eos_token_ids: Sequence[int],
        generation_config: Mapping[str, Any],
        seed: int | None,
    ) -> None:
        self._limits = limits
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._eos_token_ids = tuple(eos_token_ids)
        self._generation_config = generation_config
        self._ids = itertools.count()
        self._seeds = itertools.count(seed) if seed is not None else None

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        resume: Mapping[int, Sequence[int]] | None = None,
        cache_salt: str | None = None,
    ) -> tuple[list[Request], RequestState]:
        """The request (one per sample if it is resumed) and its state. Raises :class:`RequestRejectedError`."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {type(params).__name__}")
        request_id = request_id or f"request-{next(self._ids)}"
        params = self._counted(params.resolved(self._generation_config))
        text, token_ids = encode_prompt(prompt, self._tokenizer)
        beams = params.beam_search.num_beams if params.beam_search is not None else 0
        self._limits.admit(token_ids, params.n, beams, params.max_tokens or 1)
        bad_words = check_token_options(params, self._tokenizer, self._limits.vocab_size)
        stop_ids = (() if params.ignore_eos else self._eos_token_ids) + tuple(params.stop_token_ids or ())
        max_tokens = min(params.max_tokens or 1, self._limits.longest_request() - len(token_ids))
        constraint = self._constraint(params, max_tokens, stop_ids)
        now = time.monotonic()
        completions = [
            CompletionState(i, params, self._tokenizer, token_ids, stop_ids) for i in range(params.n)
        ]
        state = RequestState(
            request_id, text, token_ids, params, completions, self._tokenizer, RequestMetrics(now)
        )
        request = Request(
            request_id,
            token_ids,
            params,
            seed=self._seed(params),
            stop_ids=stop_ids,
            bad_words_ids=bad_words,
            max_tokens=max_tokens,
            namespace=() if cache_salt is None else (("salt", cache_salt),),
            arrival_time=now,
            owner=state,
        )
        request.constraint = constraint
        requests = [request]
        if resume is not None:
            self._check_resume(resume, params, max_tokens)
            requests = [request.resumed(index, output) for index, output in sorted(resume.items())]
            for completion in completions:
                if completion.index in resume:
                    completion.resume(resume[completion.index])
                else:
                    completion.finish("stop")
        return requests, state

    def _counted(self, params: SamplingParams) -> SamplingParams:
        """-1 logprobs are those of the whole vocabulary."""
        size = self._limits.vocab_size
        if params.logprobs == -1:
            params = replace(params, logprobs=size)
        if params.prompt_logprobs == -1:
            params = replace(params, prompt_logprobs=size)
        return params

    def _constraint(
        self, params: SamplingParams, max_tokens: int, stop_ids: Sequence[int]
    ) -> GrammarState | None:
        if params.structured_outputs is None:
            return None
        ignored = self._eos_token_ids if params.ignore_eos else ()
        grammar = self._grammars.compile(StructuredOutputs.coerce(params.structured_outputs))
        return grammar.open(max_tokens, stop_ids, ignored)

    def _seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        return next(self._seeds) if self._seeds is not None else secrets.randbits(62)

    def _check_resume(
        self, resume: Mapping[int, Sequence[int]], params: SamplingParams, max_tokens: int
    ) -> None:
        if params.beam_search is not None or params.prompt_logprobs is not None:
            raise RequestRejectedError("resume_output_ids excludes beam_search and prompt_logprobs")
        if not resume or not all(0 <= index < params.n for index in resume):
            raise RequestRejectedError(
                f"resume_output_ids must name samples below n={params.n}, got {list(resume)}"
            )
        for output in resume.values():
            if len(output) >= max_tokens:
                raise RequestRejectedError(
                    f"resume_output_ids has {len(output)} tokens of at most {max_tokens}: nothing is left to generate"
                )
            if output and not 0 <= min(output) <= max(output) < self._limits.vocab_size:
                raise RequestRejectedError("resume_output_ids has an id outside the vocabulary")
