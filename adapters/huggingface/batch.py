"""generate_batch: many prompts of token ids at once, with the result type of transformers' method of that name."""

from __future__ import annotations

import time
from typing import Any

import torch

from paged_backend.errors import PagedBackendError


def generate_batch(
    model: Any, inputs: list[list[int]], generation_config: Any, progress_bar: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """See ``PagedGeneration.generate_batch``; model: a paged model."""
    from tqdm import tqdm

    config = generation_config if generation_config is not None else model.generation_config
    copies = options.get("num_return_sequences") or config.num_return_sequences or 1
    created = time.perf_counter()
    pending: list[Any] = []
    for prompt in inputs:
        try:
            if len(prompt) == 0:
                raise ValueError("the prompt is empty: give at least one token")
            ids = torch.tensor([list(prompt)], dtype=torch.long, device="cpu")
            if int(ids.min()) < 0 or int(ids.max()) >= model.engine.vocab_size:
                raise ValueError(
                    f"the prompt has a token id outside the vocabulary of {model.engine.vocab_size}"
                )
            pending.append(
                model.submit(
                    ids, attention_mask=torch.ones_like(ids), generation_config=generation_config, **options
                )
            )
        except (ValueError, PagedBackendError) as error:
            pending.append(error)
    results: dict[str, Any] = {}
    for i, (prompt, item) in enumerate(zip(tqdm(inputs, disable=not progress_bar, desc="requests"), pending)):
        names = [f"req_{i}", *(f"req_{i}__child#{j}" for j in range(copies - 1))]
        try:
            if isinstance(item, Exception):
                raise item
            outcome = item.result()
            rows = outcome if isinstance(outcome, torch.Tensor) else outcome.sequences
            for name, row in zip(names, rows):
                new = _trimmed(model, generation_config, options, row[len(prompt) :].tolist())
                results[name] = _output(name, prompt, new, created, None)
        except (ValueError, RuntimeError, PagedBackendError) as error:
            for name in names:
                results[name] = _output(name, prompt, [], created, f"{type(error).__name__}: {error}")
    return results


def _trimmed(model: Any, generation_config: Any, options: dict[str, Any], tokens: list[int]) -> list[int]:
    """The output up to its end-of-sequence token: what follows is padding to the longest sample of the prompt."""
    eos = options.get("eos_token_id")
    for config in (generation_config, model.generation_config):
        eos = eos if eos is not None or config is None else config.eos_token_id
    ids = set() if eos is None else set(eos) if isinstance(eos, (list, tuple)) else {int(eos)}
    end = next((i + 1 for i, token in enumerate(tokens) if token in ids), len(tokens))
    return tokens[:end]


def _output(name: str, prompt: list[int], tokens: list[int], created: float, error: str | None) -> Any:
    from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

    return GenerationOutput(
        request_id=name,
        prompt_ids=list(prompt),
        generated_tokens=tokens,
        error=error,
        status=RequestStatus.FINISHED if error is None else RequestStatus.FAILED,
        created_time=created,
        lifespan=(created, time.perf_counter()),
    )
