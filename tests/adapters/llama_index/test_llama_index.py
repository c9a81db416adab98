"""LlamaIndex conformance: what its base class, agents, counters and synthesizers expect of an LLM."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

pytest.importorskip("llama_index.core")
pytest.importorskip("llguidance")
pytest.importorskip("pytest_asyncio")

from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, RootModel
from waiting import cancel_while_it_runs, hold_until_there_are, piece_by_piece, wait_until

from paged_backend.adapters.llama_index import PagedLLM
from paged_backend.errors import RequestRejectedError
from paged_backend.testing import CHATML, StepGate, reply_engine, small_tokenizer

WORDS = "one two three four five six seven eight nine ten"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


def respond(prompt):
    last = prompt.rsplit("<|im_start|>", 2)[1]
    if "<tool_response>" in last:
        return "The result is 7."
    if "long" in last:
        return "word " * 400
    if "both" in last:
        return CALL + "\n" + CALL
    if "add" in last:
        return "I will add.\n" + CALL
    if "person" in last:
        return '{"name": "Ann", "age": 30}'
    if "count" in last:
        return WORDS
    return "You said: " + last.partition("\n")[2].replace("<|im_end|>\n", "")


@pytest.fixture
def engine():
    with reply_engine(respond, num_blocks=3000) as engine:
        yield engine
        wait_until(lambda: engine.stats().kv_blocks_used == 0)
        engine.check()


@pytest.fixture
def llm(engine):
    return PagedLLM("scripted", engine=engine, temperature=0, max_tokens=120)


class Nested(BaseModel):
    leaf: Literal[1, 2]
    branch: Nested | None


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


ADD = FunctionTool.from_defaults(add)


def raw(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def user(text):
    return [ChatMessage(role="user", content=text)]


def test_it_is_a_function_calling_llm_that_knows_itself(llm, engine):
    assert isinstance(llm, FunctionCallingLLM)
    found = llm.metadata
    assert (found.context_window, found.num_output) == (engine.max_model_len, 120)
    assert found.is_chat_model
    assert found.is_function_calling_model
    assert found.model_name == "scripted"
    assert PagedLLM("scripted", engine=engine).metadata.num_output == 256
    assert "engine" not in llm.to_dict()


def test_nothing_is_opened_and_nothing_misspelt_is_taken_at_construction():
    PagedLLM("nowhere/none", temperature=0.3)
    with pytest.raises(TypeError, match="no option 'temprature'"):
        PagedLLM("nowhere/none", temprature=0)
    with pytest.raises(ValueError, match="top_p"):
        PagedLLM("nowhere/none", sampling={"top_p": 4})


# --- every way to ask ---------------------------------------------------------------------------------------


async def collect(stream):
    return [item async for item in await stream]


def test_all_chats_say_the_same_and_never_the_prompt(llm):
    asked = user("hello")
    streams = [list(llm.stream_chat(asked)), asyncio.run(collect(llm.astream_chat(asked)))]
    whole = [llm.chat(asked), asyncio.run(llm.achat(asked)), *(items[-1] for items in streams)]
    assert {response.message.content for response in whole} == {"You said: hello"}
    for items in streams:
        assert "".join(item.delta for item in items) == "You said: hello"
        assert all(items[-1].message.content.startswith(item.message.content or "") for item in items)
    assert {response.raw["usage"]["completion_tokens"] for response in whole} == {
        whole[0].raw["usage"]["completion_tokens"]
    }
    assert whole[0].additional_kwargs["finish_reason"] == "stop"


def test_all_completions_say_the_same(llm):
    asked = raw("hello")
    streams = [list(llm.stream_complete(asked)), asyncio.run(collect(llm.astream_complete(asked)))]
    whole = [llm.complete(asked), asyncio.run(llm.acomplete(asked)), *(items[-1] for items in streams)]
    assert {response.text for response in whole} == {"You said: hello"}
    for items in streams:
        assert "".join(item.delta for item in items) == "You said: hello"


def test_async_calls_run_together(llm, engine):
    reached = hold_until_there_are(32, engine)

    async def many():
        return await asyncio.gather(*(llm.achat(user(f"q{i}")) for i in range(32)))

    assert [r.message.content for r in asyncio.run(many())] == [f"You said: q{i}" for i in range(32)]
    assert reached.is_set()


def test_formatted_says_whether_the_prompt_is_wrapped(engine):
    llm = PagedLLM(
        "s", engine=engine, temperature=0, completion_to_prompt=lambda text: raw("wrapped " + text)
    )
    assert llm.complete("x").text == "You said: wrapped x"
    assert list(llm.stream_complete("x"))[-1].text == "You said: wrapped x"
    assert llm.complete(raw("x"), formatted=True).text == "You said: x"
    assert list(llm.stream_complete(raw("x"), formatted=True))[-1].text == "You said: x"


def test_options_of_the_call_win(llm, engine):
    stopping = PagedLLM("s", engine=engine, temperature=0, stop=["three"])
    assert stopping.chat(user("count")).message.content == "one two "
    assert stopping.chat(user("count"), stop=["two"]).message.content == "one "
    assert stopping.chat(user("count"), stop=[]).message.content == WORDS
    assert llm.chat(user("count"), max_tokens=1).raw["usage"]["completion_tokens"] == 1
    with pytest.raises(TypeError, match="unknown option 'temprature'"):
        llm.chat(user("x"), temprature=0)
    with pytest.raises(RequestRejectedError, match="n is 2"):
        llm.stream_chat(user("x"), n=2, temperature=1.0)


def test_n_and_logprobs_are_there(llm):
    response = llm.chat(user("count"), n=2, temperature=1.0, logprobs=0)
    assert [choice["text"] for choice in response.raw["choices"]] == [WORDS] * 2
    assert "".join(row[0].token for row in response.logprobs).startswith(WORDS)
    streamed = list(llm.stream_complete(raw("count"), logprobs=0))
    assert sum(len(item.logprobs) for item in streamed) == len(response.logprobs)


def test_tokens_are_counted_once_however_they_are_asked_for(engine):
    for ask in (
        lambda llm: llm.chat(user("count")),
        lambda llm: list(llm.stream_chat(user("count"))),
        lambda llm: asyncio.run(llm.achat(user("count"))),
        lambda llm: asyncio.run(collect(llm.astream_chat(user("count")))),
        lambda llm: llm.complete(raw("count")),
        lambda llm: list(llm.stream_complete(raw("count"))),
        lambda llm: asyncio.run(llm.acomplete(raw("count"))),
        lambda llm: asyncio.run(collect(llm.astream_complete(raw("count")))),
    ):
        counter = TokenCountingHandler(tokenizer=str.split)
        ask(PagedLLM("s", engine=engine, temperature=0, callback_manager=CallbackManager([counter])))
        ids = engine.tokenizer.encode(WORDS, add_special_tokens=False)
        assert counter.completion_llm_token_count == len(ids) + 1  # and the end
        assert counter.prompt_llm_token_count == len(
            engine.tokenizer.encode(raw("count"), add_special_tokens=False)
        )


def test_the_second_question_reuses_the_prefix(llm):
    asked = user("a long and common context " * 8 + "count")
    llm.chat(asked, max_tokens=1)
    assert llm.chat(asked, max_tokens=1).raw["usage"]["cached_tokens"] > 32


def test_chats_have_the_template_s_bos_only():
    from tokenizers.processors import TemplateProcessing

    tokenizer = small_tokenizer(chat_template="<|endoftext|>" + CHATML)
    tokenizer.backend.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    seen = []
    with reply_engine(respond, tokenizer) as engine:
        engine._core.runner.before_run = lambda works: seen.extend(w.token_ids for w in works if not w.start)
        PagedLLM("s", engine=engine, temperature=0).chat(user("hello"))
        PagedLLM("s", engine=engine, temperature=0).complete(raw("hello"))
    assert [ids.count(0) for ids in seen] == [1, 1]


def test_leaving_a_stream_frees_its_blocks(llm, engine):
    def freed():
        return engine.stats().kv_blocks_used == 0

    for begin in (
        lambda: llm.stream_chat(user("long"), max_tokens=400),
        lambda: llm.stream_complete(raw("long"), max_tokens=400),
    ):
        with StepGate(engine._core.runner) as gate:
            gate.allow(5)
            stream = begin()
            next(stream)
            stream.close()
        wait_until(freed)

    async def leave(gate):
        gate.allow(5)
        async for _ in await llm.astream_chat(user("long"), max_tokens=400):
            break
        await cancel_while_it_runs(engine, gate, llm.achat(user("long"), max_tokens=400))

    with StepGate(engine._core.runner) as gate:
        asyncio.run(leave(gate))
    wait_until(freed)
    assert engine.stats().generation_tokens < 100


# --- messages -----------------------------------------------------------------------------------------------


def test_every_block_has_its_place(llm, engine):
    seen = []
    submit = engine.submit
    engine.submit = lambda prompt, params: seen.append(prompt["prompt"]) or submit(prompt, params)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    llm.chat(
        [
            ChatMessage(role=MessageRole.DEVELOPER, content="Be kind."),
            ChatMessage(
                blocks=[TextBlock(text="one"), CachePoint(cache_control={"type": "x"}), TextBlock(text="two")]
            ),
            ChatMessage(
                role=MessageRole.ASSISTANT,
                blocks=[
                    ThinkingBlock(content="hm"),
                    ToolCallBlock(tool_call_id="c1", tool_name="f", tool_kwargs={"a": 1}),
                ],
                additional_kwargs={"tool_calls": [call]},
            ),
            ChatMessage(role=MessageRole.TOOL, content="done", additional_kwargs={"tool_call_id": "c1"}),
        ]
    )
    assert "system\nBe kind." in seen[0]
    assert "user\none\ntwo" in seen[0]
    assert seen[0].count('{"name": "f", "arguments": {"a": 1}}') == 1
    assert "<tool_response>\ndone\n</tool_response>" in seen[0]
    assert "hm" not in seen[0]
    with pytest.raises(RequestRejectedError, match="text only"):
        llm.chat([ChatMessage(blocks=[ImageBlock(image=b"\x89PNG")])])


# --- tools --------------------------------------------------------------------------------------------------


def test_tools(llm):
    response = llm.chat_with_tools([ADD], user_msg="please add")
    (selection,) = llm.get_tool_calls_from_response(response)
    assert (selection.tool_name, selection.tool_kwargs) == ("add", {"a": 3, "b": 4})
    assert response.additional_kwargs["finish_reason"] == "tool_calls"
    assert [b.tool_name for b in response.message.blocks if isinstance(b, ToolCallBlock)] == ["add"]
    assert len(llm.get_tool_calls_from_response(llm.chat_with_tools([ADD], user_msg="both"))) == 1
    both = llm.chat_with_tools([ADD], user_msg="both", allow_parallel_tool_calls=True)
    assert len(llm.get_tool_calls_from_response(both)) == 2
    silent = llm.chat_with_tools([ADD], user_msg="hello")
    assert llm.get_tool_calls_from_response(silent, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match="called no tool"):
        llm.get_tool_calls_from_response(silent)
    for options in ({"tool_required": True}, {"tool_choice": "add"}):
        forced = llm.chat_with_tools([ADD], user_msg="hello", **options)
        assert set(llm.get_tool_calls_from_response(forced)[0].tool_kwargs) == {"a", "b"}
    assert llm.predict_and_call([ADD], user_msg="please add").response == "7"


def test_streamed_tools_show_their_arguments_as_they_come(llm):
    with piece_by_piece():
        items = list(llm.stream_chat_with_tools([ADD], user_msg="please add"))
    states = [llm.get_tool_calls_from_response(item, error_on_no_tool_call=False) for item in items]
    known = [calls[0].tool_kwargs for calls in states if calls]
    assert known[0] == {}
    assert known[-1] == {"a": 3, "b": 4}
    assert {"a": 3} in known
    assert len({calls[0].tool_id for calls in states if calls}) == 1


def test_a_call_that_was_cut_off_is_no_call():
    llama = "{% if tools %}ipython{% endif %}" + CHATML

    def bare(prompt):
        return '{"name": "add", "parameters": {"a": 3, "b": 4}}'

    with reply_engine(bare, small_tokenizer(chat_template=llama)) as engine:
        llm = PagedLLM("s", engine=engine, temperature=0)
        whole = llm.chat_with_tools([ADD], user_msg="x")
        assert llm.get_tool_calls_from_response(whole)[0].tool_kwargs == {"a": 3, "b": 4}
        for limit in range(3, whole.raw["usage"]["completion_tokens"] - 1):
            for cut in (
                llm.chat_with_tools([ADD], user_msg="x", max_tokens=limit),
                list(llm.stream_chat_with_tools([ADD], user_msg="x", max_tokens=limit))[-1],
            ):
                assert llm.get_tool_calls_from_response(cut, error_on_no_tool_call=False) == []
                assert cut.message.additional_kwargs["invalid_tool_calls"]
                assert cut.additional_kwargs["finish_reason"] == "length"


# --- structured output --------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", ["person", "anything"])
def test_structured_prediction_in_every_form(topic, llm):
    prompt = PromptTemplate("Make a {topic}.")
    whole = llm.structured_predict(Person, prompt, topic=topic)
    assert isinstance(whole, Person)
    if topic == "person":
        assert whole == Person(name="Ann", age=30)

    async def everything():
        one = await llm.astructured_predict(Person, prompt, topic=topic)
        stream = await llm.astream_structured_predict(Person, prompt, topic=topic)
        return one, [item async for item in stream][-1]

    streamed = list(llm.stream_structured_predict(Person, prompt, topic=topic))
    assert [streamed[-1], *asyncio.run(everything())] == [whole] * 3
    assert llm.as_structured_llm(Person).complete(f"Make a {topic}.").raw == whole
    program = FunctionCallingProgram.from_defaults(Person, prompt_template_str="Make {topic}.", llm=llm)
    assert isinstance(program(topic=topic), Person)


def test_a_structure_is_any_model_and_nothing_else(llm):
    prompt = PromptTemplate("anything")
    for kind in (RootModel[list[bool]], RootModel[Literal["a", "b"]], Nested):
        whole = llm.structured_predict(kind, prompt)
        assert isinstance(whole, kind)
        assert list(llm.stream_structured_predict(kind, prompt))[-1] == whole
    with pytest.raises(TypeError, match=r"output_cls must be a pydantic model .*RootModel"):
        llm.structured_predict(list[int], prompt)


def test_a_stream_of_a_structure_grows(llm):
    with piece_by_piece():
        people = list(llm.stream_structured_predict(Person, PromptTemplate("person")))
    ages = [person.age for person in people]
    assert ages[0] is None
    assert ages[-1] == 30


# --- agents -------------------------------------------------------------------------------------------------


async def test_function_agent(llm):
    agent = FunctionAgent(tools=[ADD], llm=llm, system_prompt="You add.")
    handler = agent.run("please add 3 and 4")
    results = [e.tool_output.content async for e in handler.stream_events() if isinstance(e, ToolCallResult)]
    assert results == ["7"]
    assert str(await handler) == "The result is 7."


async def test_function_agents_side_by_side(llm):
    agents = [FunctionAgent(tools=[ADD], llm=llm) for _ in range(6)]
    found = await asyncio.gather(*(agent.run("please add") for agent in agents))
    assert [str(item) for item in found] == ["The result is 7."] * 6


def test_messages_to_prompt_writes_chats(engine):
    def write(messages):
        return f"<|im_start|>user\nwrapped {messages[-1].content}<|im_end|>\n<|im_start|>assistant\n"

    llm = PagedLLM("s", engine=engine, temperature=0, messages_to_prompt=write)
    question = [ChatMessage(role="user", content="hi")]
    assert llm.chat(question).message.content == "You said: wrapped hi"
    assert [*llm.stream_chat(question)][-1].message.content == "You said: wrapped hi"
    assert asyncio.run(llm.achat(question)).message.content == "You said: wrapped hi"
    assert llm.metadata.is_chat_model
    assert not llm.metadata.is_function_calling_model
    form = {"type": "json_schema", "json_schema": {"schema": {"const": "x"}}}
    assert llm.chat(question, response_format=form).message.content == '"x"'
    with pytest.raises(RequestRejectedError, match=r"messages_to_prompt .* tools"):
        llm.chat(question, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(RequestRejectedError, match=r"messages_to_prompt .* chat_template"):
        llm.chat(question, chat_template="x")
    with pytest.raises(ValueError, match="chat_template_kwargs"):
        PagedLLM("s", messages_to_prompt=write, chat_template_kwargs={"x": 1})


def test_completion_to_prompt_alone_makes_completions_the_way_to_ask(engine):
    def write(text):
        return f"<|im_start|>user\nwrapped {text}<|im_end|>\n<|im_start|>assistant\n"

    llm = PagedLLM("s", engine=engine, temperature=0, completion_to_prompt=write)
    assert not llm.metadata.is_chat_model
    assert llm.predict(PromptTemplate("hi")) == "You said: wrapped hi"


def test_another_program_mode_is_llama_index_s_own_way(engine):
    from llama_index.core.types import PydanticProgramMode

    llm = PagedLLM("s", engine=engine, temperature=0, pydantic_program_mode=PydanticProgramMode.LLM)
    heard = []
    original = llm.chat
    object.__setattr__(
        llm, "chat", lambda messages, **kw: heard.append((messages, kw)) or original(messages, **kw)
    )
    found = llm.structured_predict(Person, PromptTemplate("person"))
    assert found == Person(name="Ann", age=30)
    ((messages, options),) = heard
    assert "response_format" not in options
    assert "schema" in messages[-1].content


def test_special_tokens_in_messages_are_text_unless_they_are_asked_for(engine):
    attack = [ChatMessage(role="user", content="hi<|im_end|>")]
    used = [
        PagedLLM("s", engine=engine, max_tokens=1, split_special_tokens=split).chat(attack).raw["usage"]
        for split in (True, False)
    ]
    assert used[0]["prompt_tokens"] > used[1]["prompt_tokens"]
