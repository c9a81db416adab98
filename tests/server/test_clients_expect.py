"""What clients of OpenAI's older API, of vLLM and of containers' hosts expect: best_of, functions, suffix, /ping ..."""

from __future__ import annotations

import json

import openai
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paged_backend.sampling_params import SamplingParams
from paged_backend.server.wire.errors import ApiError
from paged_backend.server.wire.sampling import MAX_LISTED, check_listed

HELLO = [{"role": "user", "content": "hi"}]


def test_samples_at_temperature_zero_are_equal(server):
    answer = server.client().completions.create(
        model="tiny", prompt="the fox", n=3, temperature=0, max_tokens=5
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 1


def test_best_of_gives_the_likeliest_of_the_samples(server):
    options = {
        "model": "tiny",
        "prompt": ["the fox", "a dog"],
        "seed": 5,
        "max_tokens": 6,
        "temperature": 1.5,
    }
    create = server.client().completions.create
    every = create(**options, n=4, logprobs=0)
    means = [sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs) for c in every.choices]
    best = create(**options, n=2, best_of=4)
    expected = []
    for prompt in (range(4), range(4, 8)):
        expected += [every.choices[i].text for i in sorted(prompt, key=lambda i: -means[i])[:2]]
    assert [choice.text for choice in best.choices] == expected
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage.completion_tokens == every.usage.completion_tokens


def test_minus_one_lists_the_whole_vocabulary(server):
    # the sum of all probabilities is one, whatever was listed
    from math import exp

    body = {"prompt": "the fox", "max_tokens": 2, "logprobs": -1, "prompt_logprobs": -1}
    choice = server.post("/v1/completions", body | {"return_tokens_as_token_ids": True}).json()["choices"][0]
    first, *scored = choice["prompt_logprobs"]
    assert first is None
    for entry in scored:
        assert len(entry) == 300
        assert abs(sum(exp(item["logprob"]) for item in entry.values()) - 1) < 1e-4
    assert [len(entry) for entry in choice["logprobs"]["top_logprobs"]] == [300, 300]
    body = {"messages": HELLO, "max_tokens": 1, "logprobs": True, "top_logprobs": -1}
    answer = server.post("/v1/chat/completions", body).json()
    assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 300


def test_the_whole_vocabulary_is_not_listed_for_more_tokens_than_memory_is_there_for():
    check_listed(SamplingParams(logprobs=20, max_tokens=MAX_LISTED), [[1]], 1000)
    check_listed(SamplingParams(logprobs=-1, max_tokens=MAX_LISTED // 1000), [[1]], 1000)
    for params in (
        SamplingParams(logprobs=-1, max_tokens=MAX_LISTED // 1000 + 1),
        SamplingParams(prompt_logprobs=-1),
    ):
        with pytest.raises(ApiError, match="at most 1048 tokens"):
            check_listed(params, [[1] * 2000], 1000)


def test_a_chat_can_begin_with_what_the_assistant_has_said(server):
    messages = [*HELLO, {"role": "assistant", "content": "So it is"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0}
    go_on = {"continue_final_message": True, "add_generation_prompt": False}
    create = server.client().chat.completions.create
    plain = create(**body, extra_body=go_on).choices[0].message.content
    assert create(**body, extra_body={**go_on, "echo": True}).choices[0].message.content == "So it is" + plain
    chunks = create(**body, stream=True, extra_body={**go_on, "echo": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "So it is" + plain
    asked = create(**{**body, "messages": HELLO}, extra_body={"echo": True}).choices[0].message.content
    assert asked == create(**{**body, "messages": HELLO}).choices[0].message.content


FUNCTION = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
    },
}


def test_functions_are_answered_in_their_own_form(server):
    pytest.importorskip("llguidance")
    options = {
        "model": "tiny", "messages": HELLO, "functions": [FUNCTION], "function_call": {"name": "weather"},
        "max_tokens": 100, "seed": 1,
    }  # fmt: skip
    choice = server.client().chat.completions.create(**options).choices[0]
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None
    assert choice.message.function_call.name == "weather"
    assert json.loads(choice.message.function_call.arguments)["city"] in ("Rome", "Oslo")
    chunks = [c.choices[0] for c in server.client().chat.completions.create(**options, stream=True)]
    calls = [c.delta.function_call for c in chunks if c.delta.function_call is not None]
    assert [call.name for call in calls if call.name] == ["weather"]
    assert "".join(call.arguments for call in calls) == choice.message.function_call.arguments
    assert chunks[-1].finish_reason == "function_call"


def test_a_history_with_functions_reads_as_one_with_tools(server):
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    old = [
        *HELLO,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "sunny"},
    ]
    new = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    sizes = set()
    for messages in (old, new):
        body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
        answer = server.post("/v1/chat/completions", body).json()
        sizes.add(tuple(answer["prompt_token_ids"]))
    assert len(sizes) == 1


@pytest.fixture(scope="module")
def filler(start, tmp_path_factory):
    """A server whose model has the tokens for filling in the middle."""
    folder = tmp_path_factory.mktemp("fim")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<|endoftext|>")
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    with start({"tokenizer": str(folder)}) as server:
        yield server


def test_a_suffix_is_filled_towards(filler):
    options = {"prompt": ["def f(", "x"], "suffix": "return 1", "max_tokens": 4, "temperature": 0}
    answer = filler.post("/v1/completions", {**options, "return_token_ids": True, "echo": True}).json()
    asked = [choice["prompt_token_ids"] for choice in answer["choices"]]
    texts = [
        "<fim_prefix>def f(<fim_suffix>return 1<fim_middle>",
        "<fim_prefix>x<fim_suffix>return 1<fim_middle>",
    ]
    body = {"skip_special_tokens": False}
    assert [filler.post("/detokenize", {**body, "tokens": ids}).json()["prompt"] for ids in asked] == texts
    by_hand = filler.post("/v1/completions", {**options, "prompt": asked, "suffix": None}).json()
    for choice, other, prompt in zip(answer["choices"], by_hand["choices"], options["prompt"]):
        assert choice["text"] == prompt + other["text"]
    ids = [filler.post("/tokenize", {"prompt": text}).json()["tokens"] for text in options["prompt"]]
    again = filler.post("/v1/completions", {**options, "prompt": ids, "return_token_ids": True}).json()
    assert [choice["prompt_token_ids"] for choice in again["choices"]] == asked


@pytest.mark.parametrize("more", [{"truncate_prompt_tokens": 5}, {"echo": True, "logprobs": 1}])
def test_a_suffix_goes_not_with_what_would_hide_it(filler, more):
    error = filler.post("/v1/completions", {"prompt": "a", "suffix": "b", **more}).json()["error"]
    assert error["param"] == "suffix"


def test_hosts_and_balancers_find_what_they_look_for(start):
    with start(api_keys=("secret",)) as server:
        assert server.get("/ping").json() == server.post("/ping").json() == {"status": "ok"}
        assert server.get("/load").status_code == 401
        assert server.get("/load", headers={"Authorization": "Bearer secret"}).json() == {"server_load": 0}


def test_tokenizer_info_is_what_a_client_needs_to_render_messages(server):
    info = server.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<s>", "</s>", "<pad>")
    assert "messages" in info["chat_template"]
    assert info["tokenizer_class"]


def test_the_two_names_of_the_limit_may_say_the_same(server):
    create = server.client().chat.completions.create
    answer = create(model="tiny", messages=HELLO, max_tokens=3, max_completion_tokens=3)
    assert answer.usage.completion_tokens <= 3
    with pytest.raises(openai.BadRequestError, match="differ"):
        create(model="tiny", messages=HELLO, max_tokens=3, max_completion_tokens=4)
