"""/v1/chat/completions through the official client, over a real port."""

from __future__ import annotations

import asyncio

import openai
import pytest

HELLO = [{"role": "user", "content": "the quick brown fox"}]


def test_answer_has_the_shape_of_the_api(server):
    answer = server.client().chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=8, temperature=0
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tiny"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer._request_id


@pytest.mark.parametrize(
    "extra", [{}, {"logprobs": True, "top_logprobs": 3}, {"stop": ["e"]}, {"max_tokens": 1}]
)
def test_a_stream_adds_up_to_the_whole_answer(server, extra):
    options = {"model": "tiny", "messages": HELLO, "max_tokens": 24, "temperature": 1, "seed": 5, **extra}
    whole = server.client().chat.completions.create(**options)
    chunks = list(server.client().chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}
    if "logprobs" in extra:
        streamed = [
            item
            for chunk in chunks
            if chunk.choices[0].logprobs
            for item in chunk.choices[0].logprobs.content
        ]
        assert streamed == whole.choices[0].logprobs.content
        assert len(streamed) == whole.usage.completion_tokens
        assert all(len(item.top_logprobs) == 3 for item in streamed)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_usage_comes_in_a_last_chunk_without_choices(server):
    options = {"model": "tiny", "messages": HELLO, "max_tokens": 5, "stream": True, "temperature": 0}
    *chunks, last = server.client().chat.completions.create(**options, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == 5
    assert all(chunk.usage is None for chunk in chunks)
    extra = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    counts = [
        chunk.usage.completion_tokens
        for chunk in server.client().chat.completions.create(**options, extra_body=extra)
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_several_answers_differ_and_are_numbered(server):
    options = {"model": "tiny", "messages": HELLO, "n": 3, "seed": 1, "max_tokens": 12}
    answer = server.client().chat.completions.create(**options)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    streamed = ["", "", ""]
    for chunk in server.client().chat.completions.create(**options, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_async_client_and_many_at_once(server):
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=10, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main() -> list[str]:
        async with server.async_client() as client:
            return await asyncio.gather(*[ask(client, seed) for seed in range(20)])

    texts = asyncio.run(main())
    assert texts == asyncio.run(main())
    assert len(set(texts)) > 10


def test_sampling_extras_at_top_level_take_effect(server):
    def text(**extra) -> str:
        options = {"model": "tiny", "messages": HELLO, "max_tokens": 6, "temperature": 1.0, "seed": 3}
        answer = server.client().chat.completions.create(**options, extra_body=extra)
        return answer.choices[0].message.content

    greedy = text(top_k=1)
    assert text(top_k=1) == greedy == text(min_p=1.0)
    (a,) = server.post("/tokenize", {"prompt": "a"}).json()["tokens"]
    assert text(allowed_token_ids=[a]) == "aaaaaa"
    assert text(logit_bias={str(a): 100}) == "aaaaaa"
    forced = server.client().chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=6,
        extra_body={"stop_token_ids": [a], "allowed_token_ids": [a]},
    )
    assert forced.choices[0].finish_reason == "stop"
    assert forced.choices[0].stop_reason == a
    assert forced.choices[0].message.content == ""


def test_token_ids_and_prompt_logprobs_on_request(server):
    extra = {"return_token_ids": True, "prompt_logprobs": 2}
    options = {"model": "tiny", "messages": HELLO, "max_tokens": 4, "temperature": 0}
    answer = server.client().chat.completions.create(**options, extra_body=extra)
    assert len(answer.choices[0].token_ids) == 4
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens == len(answer.prompt_logprobs)
    assert answer.prompt_logprobs[0] is None
    chunks = list(server.client().chat.completions.create(**options, stream=True, extra_body=extra))
    streamed = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", None) or []]
    assert streamed == answer.choices[0].token_ids
    assert [c.prompt_token_ids for c in chunks if hasattr(c, "prompt_token_ids")] == [answer.prompt_token_ids]
    assert [c.prompt_logprobs for c in chunks if hasattr(c, "prompt_logprobs")] == [answer.prompt_logprobs]


def test_exactly_one_begin_of_sequence(server):
    # vllm PR #27515, #16976: the template writes it, so encoding must not add another
    found = server.post("/tokenize", {"messages": HELLO}).json()["tokens"]
    assert found.count(1) == 1
    assert found[0] == 1
    answer = server.client().chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert answer.prompt_token_ids == found


def test_continue_final_message_and_content_parts(server):
    messages = [*HELLO, {"role": "assistant", "content": "jumps over"}]
    extra = {"continue_final_message": True, "return_token_ids": True, "add_generation_prompt": False}
    answer = server.client().chat.completions.create(
        model="tiny", messages=messages, max_tokens=2, extra_body=extra
    )
    prompt = server.post("/detokenize", {"tokens": answer.prompt_token_ids}).json()["prompt"]
    assert prompt.endswith("[assistant] jumps over")
    parts = [{"role": "user", "content": [{"type": "text", "text": "the quick brown fox"}]}]
    same = server.post("/tokenize", {"messages": parts}).json()
    assert same == server.post("/tokenize", {"messages": HELLO}).json()
    developer = [{"role": "developer", "content": "be brief"}, *HELLO]
    tokens = server.post("/tokenize", {"messages": developer}).json()["tokens"]
    assert "[system] be brief" in server.post("/detokenize", {"tokens": tokens}).json()["prompt"]


def test_default_max_tokens_is_what_the_context_leaves(server):
    answer = server.client().chat.completions.create(
        model="tiny", messages=HELLO, extra_body={"ignore_eos": True, "temperature": 0}
    )
    assert answer.usage.total_tokens == 1024
    assert answer.choices[0].finish_reason == "length"


def test_parse_gives_the_object_asked_for(server):
    pydantic = pytest.importorskip("pydantic")
    pytest.importorskip("llguidance")

    class Fox(pydantic.BaseModel):
        name: str
        jumps: int

    answer = server.client().chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Fox, max_tokens=120, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Fox)
    with server.client().chat.completions.stream(
        model="tiny", messages=HELLO, response_format=Fox, max_tokens=120, seed=1
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


def test_beam_search(server):
    options = {"model": "tiny", "messages": HELLO, "max_tokens": 6}
    extra = {"use_beam_search": True}
    answer = server.client().chat.completions.create(**options, n=2, extra_body=extra)
    assert len({choice.message.content for choice in answer.choices}) == 2
    with pytest.raises(openai.BadRequestError, match="use_beam_search"):
        server.client().chat.completions.create(**options, extra_body={"length_penalty": 2.0})


def test_models_and_both_names(server):
    client = server.client()
    assert [model.id for model in client.models.list()] == ["tiny", "second-name"]
    assert client.models.retrieve("second-name").id == "second-name"
    answer = client.chat.completions.create(model="second-name", messages=HELLO, max_tokens=1)
    assert answer.model == "second-name"
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.BadRequestError, match="embeddings are not supported"):
        client.embeddings.create(model="tiny", input="a")


def test_messages_in_the_forms_that_clients_send(server):
    def prompt(messages, **options):
        tokens = server.post("/tokenize", {"messages": messages, **options}).json()["tokens"]
        return server.post("/detokenize", {"tokens": tokens, "skip_special_tokens": True}).json()["prompt"]

    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": ""}}
    chat = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": []},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": None, "tool_call_id": "other"},
        {"role": "critic", "content": "Hm."},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "more", "name": "Ada"},
    ]
    text = prompt(chat, add_generation_prompt=False)
    assert text.startswith("[system] Be kind.\n[user] one\ntwo\n[user] \n[assistant] ")
    assert text.endswith("[critic] Hm.\n[assistant] \n[user] more\n")
    answer = server.client().chat.completions.create(model="tiny", messages=chat, max_tokens=2)
    assert answer.usage.completion_tokens


def test_special_tokens_in_messages_are_text_unless_they_are_asked_for(server):
    chat = [{"role": "user", "content": "a</s>b"}]

    for split, count in ((None, 0), (True, 0), (False, 1)):
        extra = {} if split is None else {"split_special_tokens": split}
        tokens = server.post("/tokenize", {"messages": chat, **extra}).json()["tokens"]
        assert tokens.count(2) == count
        answer = server.post(
            "/v1/chat/completions", {"messages": chat, "max_tokens": 1, "return_token_ids": True, **extra}
        )
        assert answer.json()["prompt_token_ids"] == tokens
        usage = server.post("/v1/responses", {"input": chat, "max_output_tokens": 1, **extra}).json()["usage"]
        assert usage["input_tokens"] == len(tokens)

    for split, count in ((None, 1), (True, 0)):
        body = {"prompt": "a</s>b", **({} if split is None else {"split_special_tokens": split})}
        assert server.post("/tokenize", body).json()["tokens"].count(2) == count
