"""Three ways to read a reply while it is written, on one engine in one process.

    python examples/streaming.py

LangChain, LlamaIndex and the engine itself name the same model, so they share its weights, its memory and its prefixes:
the second and the third find the common prompt already computed. Leaving a stream early frees its memory at once.

Needs: pip install 'paged-backend[langchain,llama-index]'
"""

from __future__ import annotations

import asyncio
import time

# first: if LangChain or LlamaIndex is missing, they say what to install
from paged_backend.adapters.langchain import ChatPaged
from paged_backend.adapters.llama_index import PagedLLM

# isort: split
from langchain_core.messages import HumanMessage
from llama_index.core.llms import ChatMessage

from paged_backend import SamplingParams, get_engine

QUESTION = "Tell me a short story about a fox who could not sleep, and about the owl who helped. " * 4


def show(name: str, pieces, most: int = 40) -> None:
    start = time.monotonic()
    for number, piece in enumerate(pieces):
        if number == 0:
            print(f"\n{name} (first piece after {time.monotonic() - start:.2f} s): ", end="")
        print(piece, end="", flush=True)
        if number == most:
            break
    pieces.close()  # a stream that is left gives its memory back within a step
    print()


async def engine_stream(prompt) -> None:
    engine = get_engine("demo")
    print("\nengine: ", end="")
    async for output in engine.generate(
        prompt, SamplingParams(temperature=0, max_tokens=24, output_kind="delta")
    ):
        print(output.outputs[0].text, end="", flush=True)
    print(f"\n\nprompt tokens from the cache: {output.num_cached_tokens} of {len(output.prompt_token_ids)}")
    engine.close()


def main() -> None:
    chat = ChatPaged(model="demo", temperature=0, max_tokens=200)
    show("LangChain", (chunk.content for chunk in chat.stream([HumanMessage(QUESTION)])))
    llm = PagedLLM("demo", temperature=0, max_tokens=200)
    show(
        "LlamaIndex",
        (item.delta or "" for item in llm.stream_chat([ChatMessage(role="user", content=QUESTION)])),
    )

    engine = get_engine("demo")
    messages = [{"role": "user", "content": QUESTION}]
    asyncio.run(engine_stream({"prompt_token_ids": engine.tokenizer.encode_chat(messages)}))
    print(f"blocks in use afterwards: {engine.stats().kv_blocks_used}")
    for user in (engine, chat, llm):
        user.close()


if __name__ == "__main__":
    main()
