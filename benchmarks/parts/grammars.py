"""What grammars cost a step.

A step's time is measured with free requests; what a grammar adds to it by replaying outputs through as many states on
one thread. Filling masks counts in full here, though the engine does it while the model computes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"type": "string", "minLength": 60},
    },
    "required": ["name", "age", "tags", "note"],
}


@dataclass(frozen=True, slots=True)
class GrammarCost:
    """Seconds: ``step`` of one step of ``requests`` free requests; ``parts``, by name, per token of one request."""

    requests: int
    step: float
    parts: dict[str, float]

    def share(self, name: str) -> float:
        """Of the step, if all its requests have grammars."""
        return self.parts[name] * self.requests / self.step


def measure_grammars(model: str, requests: int, tokens: int, **options: Any) -> GrammarCost:
    """``requests`` chats of at most ``tokens`` tokens each, free and under ``SCHEMA``. options: of the engine."""
    from paged_backend import LLM, SamplingParams, StructuredOutputs

    chats = [
        [{"role": "user", "content": f"Describe person {i} of a novel as JSON."}] for i in range(requests)
    ]
    with LLM(model, threads=1, **options) as llm:
        free = SamplingParams(temperature=0.8, seed=0, max_tokens=tokens, ignore_eos=True)
        # the prompts, and the first touch of everything
        llm.chat(chats, SamplingParams(max_tokens=1), use_tqdm=False)
        engine = llm.engine
        steps, start = engine.stats().num_steps, time.perf_counter()
        llm.chat(chats, free, use_tqdm=False)
        step = (time.perf_counter() - start) / (engine.stats().num_steps - steps)

        wanted = StructuredOutputs(json=SCHEMA)
        held = SamplingParams(temperature=0.8, seed=0, max_tokens=tokens, structured_outputs=wanted)
        outputs = [output.outputs[0].token_ids for output in llm.chat(chats, held, use_tqdm=False)]
        grammar = engine.grammars.compile(wanted)
        spent = {"mask": 0.0, "settle": 0.0, "advance": 0.0}
        for answer in outputs:
            state = grammar.open(tokens, engine.eos_token_ids)
            for token in answer:
                for name, work in (
                    ("mask", state.mask),
                    ("settle", lambda token=token, state=state: state.settle(token)),
                    ("advance", lambda token=token, state=state: state.advance(token)),
                ):
                    start = time.perf_counter()
                    work()
                    spent[name] += time.perf_counter() - start
    count = sum(map(len, outputs))
    return GrammarCost(requests, step, {name: seconds / count for name, seconds in spent.items()})
