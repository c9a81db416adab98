"""What grammars cost a step: ``python -m benchmarks.parts.constrain``.

A step's time is measured with free requests; what a grammar adds to it by replaying outputs through as many states on
one thread. Filling masks counts in full here, though the engine does it while the model computes.
"""

from __future__ import annotations

import argparse
import time

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


def main() -> None:
    from paged_backend import LLM, SamplingParams, StructuredOutputs

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    chats = [
        [{"role": "user", "content": f"Describe person {i} of a novel as JSON."}]
        for i in range(options.requests)
    ]
    with LLM(options.model, threads=1) as llm:
        free = SamplingParams(temperature=0.8, seed=0, max_tokens=options.tokens, ignore_eos=True)
        llm.chat(
            chats, SamplingParams(max_tokens=1), use_tqdm=False
        )  # the prompts, and the first touch of everything
        engine = llm.engine
        steps, start = engine.stats().num_steps, time.perf_counter()
        llm.chat(chats, free, use_tqdm=False)
        step = (time.perf_counter() - start) / (engine.stats().num_steps - steps)

        wanted = StructuredOutputs(json=SCHEMA)
        held = SamplingParams(temperature=0.8, seed=0, max_tokens=options.tokens, structured_outputs=wanted)
        outputs = [output.outputs[0].token_ids for output in llm.chat(chats, held, use_tqdm=False)]
        grammar = engine.grammars.compile(wanted)
        spent = {"mask": 0.0, "settle": 0.0, "advance": 0.0}
        for tokens in outputs:
            state = grammar.open(options.tokens, engine.eos_token_ids)
            for token in tokens:
                for name, work in (
                    ("mask", state.mask),
                    ("settle", lambda token=token, state=state: state.settle(token)),
                    ("advance", lambda token=token, state=state: state.advance(token)),
                ):
                    start = time.perf_counter()
                    work()
                    spent[name] += time.perf_counter() - start
        count = sum(map(len, outputs))
    print(f"a step of {options.requests} requests: {step * 1e3:.1f} ms")
    for name, seconds in spent.items():
        each = seconds / count
        print(f"{name}: {each * 1e6:.0f} us a token, {each * options.requests / step:.2%} of the step")
    print(f"all: {sum(spent.values()) / count * options.requests / step:.2%} of the step")


if __name__ == "__main__":
    main()
