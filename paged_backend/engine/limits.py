"""What is refused before it can cost anybody anything: requests that could never run on this engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paged_backend.cache.manager import CacheManager
from paged_backend.errors import ContextOverflowError, RequestRejectedError


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of an engine. Reads nothing that changes, so any thread may ask.

    vocab_size: ids of prompts are below it. max_model_len: longest prompt + output in tokens.
    max_num_batched_tokens: token budget of a step. max_num_seqs: most sequences in one.
    """

    cache: CacheManager
    vocab_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int

    def longest_request(self) -> int:
        """Prompt and output tokens that one request can have, by the context and by the pool."""
        pool = self.cache.longest_sequence(self.max_num_batched_tokens)
        return self.max_model_len if pool is None else min(self.max_model_len, pool)

    def admit(self, prompt_token_ids: Sequence[int], n: int, beams: int = 0, max_tokens: int = 1) -> None:
        """Raise :class:`RequestRejectedError` for a request that could never run.

        n: samples. beams: of a beam search with outputs of ``max_tokens``; they advance together, so the pool must hold
        them all.
        """
        self._check_ids(prompt_token_ids)
        self._check_length(len(prompt_token_ids))
        if max(n, beams) > self.max_num_seqs:
            name = "n" if n > beams else "num_beams"
            raise RequestRejectedError(f"{name}={max(n, beams)} exceeds max_num_seqs={self.max_num_seqs}")
        if beams:
            self._check_beams(len(prompt_token_ids), beams, max_tokens)

    def _check_ids(self, prompt_token_ids: Sequence[int]) -> None:
        if not len(prompt_token_ids):
            raise RequestRejectedError("the prompt is empty: give at least one token")
        low, high = min(prompt_token_ids), max(prompt_token_ids)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise RequestRejectedError(f"token id {bad} is outside the vocabulary of {self.vocab_size} ids")

    def _check_length(self, count: int) -> None:
        if count >= self.max_model_len:
            raise ContextOverflowError(
                f"the prompt has {count} tokens, which exceeds the context window: at most {self.max_model_len - 1} "
                f"leave room for one new token (max_model_len is {self.max_model_len})"
            )
        if count >= self.longest_request():
            raise ContextOverflowError(
                f"the prompt has {count} tokens and one must be generated, but the whole KV pool holds "
                f"{self.longest_request()}: raise num_blocks or kv_cache_memory"
            )

    def _check_beams(self, count: int, beams: int, max_tokens: int) -> None:
        total = min(count + max_tokens, self.max_model_len)
        size = self.cache.block_size
        if self.cache.window is None:
            # each beam may own all blocks behind the prompt's full ones, and one copy of a shared tail at a time
            own = self.cache.blocks_for(total) - count // size + 1
            need = count // size + beams * own
        else:  # each may have to be computed from the start, with what a chunk adds to the window
            seen = self.cache.window + self.max_num_batched_tokens
            need = beams * (self.cache.blocks_for(min(total, seen)) + 1)
        if need > self.cache.pool.capacity:
            raise ContextOverflowError(
                f"{beams} beams of {total} tokens exceed the KV pool of {self.cache.capacity_tokens} tokens: "
                "lower num_beams or max_tokens, or raise num_blocks or kv_cache_memory"
            )
