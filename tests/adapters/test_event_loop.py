"""An event loop goes on while a model is loaded, a prompt is prepared or a grammar is compiled, whoever asks for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("langchain_core")
pytest.importorskip("llama_index.core")
pytest.importorskip("llguidance")

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from pydantic import BaseModel

from paged_backend import LLM, SamplingParams
from paged_backend.adapters import common
from paged_backend.adapters.langchain import ChatPaged
from paged_backend.adapters.langchain import PagedLLM as LangChainLLM
from paged_backend.adapters.llama_index import PagedLLM as LlamaIndexLLM
from paged_backend.constrain.grammar import GrammarCompiler
from paged_backend.engine.engine import Engine
from paged_backend.testing import reply_engine
from paged_backend.text.tokenizer import Tokenizer


class Place(BaseModel):
    city: str


async def read(stream: Any) -> list[Any]:
    return [part async for part in stream]


TEXT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
ASKED = [ChatMessage(role="user", content="hi")]
OPTIONS = {"temperature": 0, "max_tokens": 24}
CALLS: dict[str, Callable[[str], Any]] = {
    "chat": lambda name: ChatPaged(model=name, **OPTIONS).ainvoke("hi"),
    "chat, many": lambda name: ChatPaged(model=name, **OPTIONS).abatch(["hi", "ho", "ha"]),
    "chat stream": lambda name: read(ChatPaged(model=name, **OPTIONS).astream("hi")),
    "chat, structured": lambda name: (
        ChatPaged(model=name, **OPTIONS).with_structured_output(Place).ainvoke("hi")
    ),
    "text": lambda name: LangChainLLM(model=name, **OPTIONS).ainvoke(TEXT),
    "text, many": lambda name: LangChainLLM(model=name, **OPTIONS).abatch([TEXT, TEXT + "ho"]),
    "text stream": lambda name: read(LangChainLLM(model=name, **OPTIONS).astream(TEXT)),
    "llama_index chat": lambda name: LlamaIndexLLM(name, **OPTIONS).achat(ASKED),
    "llama_index text": lambda name: LlamaIndexLLM(name, **OPTIONS).acomplete(TEXT),
    "llama_index structured": lambda name: LlamaIndexLLM(name, **OPTIONS).astructured_predict(
        Place, PromptTemplate("hi")
    ),
}


async def _streamed(call: Any) -> Any:
    return await read(await call)


CALLS["llama_index chat stream"] = lambda name: _streamed(LlamaIndexLLM(name, **OPTIONS).astream_chat(ASKED))
CALLS["llama_index text stream"] = lambda name: _streamed(
    LlamaIndexLLM(name, **OPTIONS).astream_complete(TEXT)
)


@pytest.fixture
def model():
    with reply_engine(lambda prompt: '{"city": "Paris"}') as engine:
        yield engine


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_nothing_that_takes_long_runs_in_the_loop_s_own_thread(call, model, tiny_model, monkeypatch):
    loading, go, here = threading.Event(), threading.Event(), threading.get_ident()
    opened, inside = [], []

    def load(name: str, **options: Any) -> Engine:
        loading.set()
        assert go.wait(60), "the loop stands still"
        opened.append(name)
        return Engine.of(model.model)

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            inside.append(threading.get_ident())
            return function(*args, **kwargs)

        return run

    for owner, name in ((Tokenizer, "encode"), (GrammarCompiler, "compile")):
        monkeypatch.setattr(owner, name, noted(getattr(owner, name)))
    monkeypatch.setattr(common, "get_engine", load)

    async def main() -> None:
        running = asyncio.ensure_future(call(tiny_model))
        while not (loading.is_set() or running.done()):
            await asyncio.sleep(0.001)
        go.set()
        assert await running

    asyncio.run(main())
    assert opened == [tiny_model], "calls that wait for one model wait for one load"
    assert inside
    assert here not in inside


def test_a_call_that_is_cancelled_while_the_model_loads_takes_nothing_from_the_others(model, monkeypatch):
    loading, go = threading.Event(), threading.Event()

    def load(name: str, **options: Any) -> Engine:
        loading.set()
        assert go.wait(60)
        return Engine.of(model.model)

    monkeypatch.setattr(common, "get_engine", load)

    async def main() -> None:
        chat = ChatPaged(model="a model", **OPTIONS)
        first, second = (asyncio.ensure_future(chat.ainvoke(text)) for text in ("one", "two"))
        while not loading.is_set():
            await asyncio.sleep(0.001)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        go.set()
        assert (await second).content

    asyncio.run(main())


def test_a_load_that_fails_is_told_to_all_who_wait_and_tried_again(model, monkeypatch):
    tries = []

    def load(name: str, **options: Any) -> Engine:
        tries.append(name)
        if len(tries) == 1:
            raise OSError("the disk is not there yet")
        return Engine.of(model.model)

    monkeypatch.setattr(common, "get_engine", load)

    async def main() -> None:
        chat = ChatPaged(model="a model", **OPTIONS)
        with pytest.raises(OSError, match="not there yet"):
            await chat.ainvoke("hi")
        assert (await chat.ainvoke("hi")).content

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        (TEXT + "word " * 500, SamplingParams(max_tokens=2)),
        ({"prompt": TEXT + "word " * 500}, SamplingParams(max_tokens=2)),
        (TEXT, SamplingParams(max_tokens=40, structured_outputs={"json": Place.model_json_schema()})),
    ],
)
def test_an_engine_prepares_what_takes_long_beside_the_loop(model, monkeypatch, prompt, params):
    prepare, inside = model.model.inputs.prepare, []
    monkeypatch.setattr(
        model.model.inputs, "prepare", lambda *args: inside.append(threading.get_ident()) or prepare(*args)
    )

    async def main() -> None:
        assert (await read(model.generate(prompt, params)))[-1].finished

    asyncio.run(main())
    assert inside
    assert threading.get_ident() not in inside


@pytest.mark.parametrize(
    "options", [{}, {"max_model_len": 64}, {"num_blocks": 9}, {"kv_cache_memory": 1 << 16}]
)
def test_metadata_is_known_without_loading_and_does_not_change_with_it(tiny_model, monkeypatch, options):
    llm = LlamaIndexLLM(tiny_model, engine_options={"kernels": "reference", **options})
    with monkeypatch.context() as patch:
        patch.setattr(common, "get_engine", lambda *_, **__: pytest.fail("the model was loaded"))
        before = llm.metadata
    llm.complete("hi", max_tokens=1)
    assert llm.metadata == before
    assert before.context_window == llm._engine.max_model_len
    llm.close()


def test_metadata_tells_of_the_engine_that_is_open_already(tiny_model):
    with LLM(tiny_model, kernels="reference", max_model_len=77) as other:
        llm = LlamaIndexLLM("whatever", engine=other.engine)
        assert llm.metadata.context_window == 77
