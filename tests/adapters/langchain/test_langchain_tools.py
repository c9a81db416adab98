"""Tools and structured output in LangChain: choices, streams, truncation, agents."""

from __future__ import annotations

import json
from typing import Literal

import pytest

pytest.importorskip("langchain_core")
pytest.importorskip("llguidance")
pytest.importorskip("pytest_asyncio")

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from paged_backend.adapters.langchain import ChatPaged
from paged_backend.testing import CHATML, reply_engine, small_tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
# a template that takes tools in Llama 3's form: calls are bare JSON, which no grammar can impose on free text
LLAMA = "{% if tools %}ipython{% endif %}" + CHATML


def respond(prompt):
    last = prompt.rsplit("<|im_start|>", 2)[1]
    if "<tool_response>" in last or last.startswith("tool"):
        return "The result is 7."
    if "both" in last:
        return CALL + "\n" + CALL
    if "bare" in last:
        return '{"name": "add", "parameters": {"a": 3, "b": 4}}'
    if "add" in last:
        return "I will add.\n" + CALL
    if "person" in last:
        return '{"name": "Ann", "age": 30, "kind": "a"}'
    return "No tool."


@pytest.fixture(scope="module")
def engine():
    with reply_engine(respond) as engine:
        yield engine
        engine.check()


@pytest.fixture
def chat(engine):
    return ChatPaged(model="scripted", engine=engine, temperature=0, max_tokens=120)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def now() -> str:
    """The time."""
    return "noon"


class Person(BaseModel):
    """A person."""

    name: str
    age: int
    kind: Literal["a", "b"] = "a"


def total(chunks):
    chunks = list(chunks)
    full = chunks[0]
    for chunk in chunks[1:]:
        full += chunk
    return full


def test_choices(chat):
    auto = chat.bind_tools([add, now])
    assert auto.invoke("hello").tool_calls == []
    called = auto.invoke("please add")
    assert called.content == "I will add."
    assert [(c["name"], c["args"]) for c in called.tool_calls] == [("add", {"a": 3, "b": 4})]
    assert called.response_metadata["finish_reason"] == "tool_calls"
    for choice in ("any", "required", True, "add", {"type": "function", "function": {"name": "add"}}):
        forced = chat.bind_tools([add], tool_choice=choice).invoke("hello")
        assert [c["name"] for c in forced.tool_calls] == ["add"]
        assert set(forced.tool_calls[0]["args"]) == {"a", "b"}
    none = chat.bind_tools([add], tool_choice="none").invoke("please add")
    assert none.tool_calls == []
    assert "<tool_call>" in none.content
    with pytest.raises(ValueError, match="none of the tools"):
        chat.bind_tools([add], tool_choice="sub").invoke("hello")


def test_parallel_calls(chat):
    assert len(chat.bind_tools([add]).invoke("both").tool_calls) == 2
    assert len(chat.bind_tools([add], parallel_tool_calls=False).invoke("both").tool_calls) == 1


def test_tools_in_every_form(chat):
    def plain(x: int) -> str:
        """Do it.

        Args:
            x: a number
        """
        return str(x)

    schemas = [
        plain,
        add,
        Person,
        Person.model_json_schema(),
        {"name": "anthropic", "description": "d", "input_schema": {"type": "object", "properties": {}}},
        {
            "type": "function",
            "function": {"name": "openai", "parameters": {"type": "object", "properties": {}}},
        },
    ]
    for schema in schemas:
        assert len(chat.bind_tools([schema], tool_choice="any").invoke("hello").tool_calls) == 1


@pytest.mark.parametrize("question", ["add", "both", "hello"])
def test_streams_agree_with_the_whole(question, chat):
    model = chat.bind_tools([add])
    whole = model.invoke(question)
    chunks = list(model.stream(question))
    streamed = total(chunks)
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [
        (c["name"], c["args"]) for c in whole.tool_calls
    ]
    assert streamed.content == whole.content
    assert streamed.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]
    assert all(call["id"] for call in streamed.tool_calls)
    pieces = [piece for chunk in chunks for piece in chunk.tool_call_chunks]
    assert len([piece for piece in pieces if piece["id"]]) == len(whole.tool_calls)


def test_max_tokens_swept_over_a_forced_call_never_gives_half_a_call(chat):
    model = chat.bind_tools([add], tool_choice="any")
    with pytest.raises(ValueError, match=r"max_tokens of at least (\d+)") as refused:
        model.invoke("add", max_tokens=1)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    for limit in range(least, least + 12):
        whole, streamed = model.invoke("add", max_tokens=limit), total(model.stream("add", max_tokens=limit))
        assert [c["args"] for c in whole.tool_calls] == [c["args"] for c in streamed.tool_calls]
        assert len(whole.tool_calls) == 1
        assert (
            whole.response_metadata["finish_reason"]
            == streamed.response_metadata["finish_reason"]
            == "tool_calls"
        )


def test_a_call_cut_off_by_max_tokens_is_invalid_in_streams_too():
    with reply_engine(respond, small_tokenizer(chat_template=LLAMA)) as engine:
        model = ChatPaged(model="llama", engine=engine, temperature=0).bind_tools([add])
        whole = model.invoke("bare")
        assert whole.tool_calls[0]["args"] == {"a": 3, "b": 4}
        size = whole.usage_metadata["output_tokens"]
        for limit in range(1, size - 1):
            cut, streamed = (
                model.invoke("bare", max_tokens=limit),
                total(model.stream("bare", max_tokens=limit)),
            )
            for message in (cut, streamed):
                assert message.tool_calls == []
                assert message.response_metadata["finish_reason"] == "length"
            assert len(cut.invalid_tool_calls) == len(streamed.invalid_tool_calls)
            assert bool(cut.invalid_tool_calls) or limit < 3


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("question", ["person", "hello"])
def test_structured_output(method, question, chat):
    model = chat.with_structured_output(Person, method=method)
    found = model.invoke(question)
    assert isinstance(found, Person)
    if question == "person" and method != "function_calling":
        assert found == Person(name="Ann", age=30, kind="a")
    raw = chat.with_structured_output(Person.model_json_schema(), method=method, include_raw=True).invoke(
        question
    )
    assert isinstance(raw["raw"], AIMessage)
    assert raw["parsed"]["age"] == found.age
    assert raw["parsing_error"] is None
    partial = list(model.stream(question))
    assert partial[-1] == found


def test_structured_output_without_a_schema_is_some_object(chat):
    assert isinstance(chat.with_structured_output(method="json_mode").invoke("hello"), dict)
    with pytest.raises(ValueError, match="needs a schema"):
        chat.with_structured_output()
    with pytest.raises(ValueError, match="method must be one of"):
        chat.with_structured_output(Person, method="magic")


def test_response_format_and_tools_together_call_or_answer(chat):
    model = chat.bind_tools([add])
    wanted = {"type": "json_schema", "json_schema": {"name": "Person", "schema": Person.model_json_schema()}}
    assert json.loads(model.invoke("person", response_format=wanted).content)["name"] == "Ann"
    assert model.invoke("both", response_format=wanted).tool_calls


def test_langgraph_agent_loop(chat):
    prebuilt = pytest.importorskip("langchain.agents")
    agent = prebuilt.create_agent(chat, [add])
    messages = agent.invoke({"messages": [HumanMessage("please add")]})["messages"]
    assert [type(m).__name__ for m in messages] == ["HumanMessage", "AIMessage", "ToolMessage", "AIMessage"]
    assert messages[2].content == "7"
    assert messages[3].content == "The result is 7."
    tokens = [
        m.content for m, _ in agent.stream({"messages": [HumanMessage("please add")]}, stream_mode="messages")
    ]
    assert "".join(t for t in tokens if isinstance(t, str)).endswith("The result is 7.")


def test_langgraph_agent_with_a_structured_answer(chat):
    agents = pytest.importorskip("langchain.agents")
    strategies = pytest.importorskip("langchain.agents.structured_output")
    for strategy in (strategies.ProviderStrategy(Person), strategies.ToolStrategy(Person)):
        agent = agents.create_agent(chat, [add], response_format=strategy)
        result = agent.invoke({"messages": [HumanMessage("person")]})
        assert isinstance(result["structured_response"], Person)


async def test_langgraph_agent_async_and_parallel(chat):
    import asyncio

    agents = pytest.importorskip("langchain.agents")
    agent = agents.create_agent(chat, [add])
    runs = await asyncio.gather(*(agent.ainvoke({"messages": [HumanMessage(f"add {i}")]}) for i in range(8)))
    assert all(run["messages"][-1].content == "The result is 7." for run in runs)
