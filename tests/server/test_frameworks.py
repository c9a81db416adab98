"""Other people's clients over a real port: LangChain's ChatOpenAI and LlamaIndex' OpenAILike."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_langchain_chat_openai(server):
    pytest.importorskip("langchain_openai")
    from langchain_core.exceptions import ContextOverflowError
    from langchain_openai import ChatOpenAI, OpenAI
    from pydantic import BaseModel

    options = {"model": "tiny", "base_url": server.url + "/v1", "api_key": "none", "max_retries": 0}
    chat = ChatOpenAI(**options, max_completion_tokens=20, seed=1)
    answer = chat.invoke("the quick brown fox")
    assert answer.usage_metadata["output_tokens"] == 20
    streamed = None
    for chunk in chat.stream("the quick brown fox"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.content == answer.content
    assert [a.content for a in chat.batch(["the quick brown fox"] * 3)] == [answer.content] * 3

    class Clock(BaseModel):
        """The time somewhere."""

        hour: int

    called = ChatOpenAI(**options, max_completion_tokens=100, seed=1).bind_tools([Clock], tool_choice="Clock")
    (call,) = called.invoke("what time is it?").tool_calls
    assert call["name"] == "Clock"
    for method in ("json_schema", "function_calling"):
        made = ChatOpenAI(**options, max_completion_tokens=100, seed=1).with_structured_output(
            Clock, method=method
        )
        assert isinstance(made.invoke("what time is it?"), Clock)
    assert OpenAI(**options, max_tokens=5).invoke("the fox")
    with pytest.raises(ContextOverflowError):
        chat.invoke("word " * 3000)
    responses = ChatOpenAI(**options, max_completion_tokens=20, use_responses_api=True)
    assert responses.invoke("the fox").usage_metadata["output_tokens"] == 20


async def _langchain_async(chat) -> list[str]:
    return [chunk.content async for chunk in chat.astream("the quick brown fox")]


def test_langchain_async(server):
    pytest.importorskip("langchain_openai")
    import asyncio

    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        model="tiny", base_url=server.url + "/v1", api_key="none", max_completion_tokens=9, temperature=0
    )
    assert "".join(asyncio.run(_langchain_async(chat))) == chat.invoke("the quick brown fox").content


def test_llama_index_openai_like(server):
    pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    options = {
        "model": "tiny",
        "api_base": server.url + "/v1",
        "api_key": "none",
        "max_tokens": 12,
        "temperature": 0,
    }
    chat = OpenAILike(**options, is_chat_model=True, context_window=1024)
    whole = chat.chat([ChatMessage(role="user", content="the quick brown fox")])
    assert whole.message.content
    *_, last = chat.stream_chat([ChatMessage(role="user", content="the quick brown fox")])
    assert last.message.content == whole.message.content
    plain = OpenAILike(**options, is_chat_model=False, context_window=1024)
    *_, last = plain.stream_complete("the quick brown fox")
    assert last.text == plain.complete("the quick brown fox").text
