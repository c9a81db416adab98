"""/v1/completions, /tokenize and /detokenize over a real port."""

from __future__ import annotations

import math

import pytest

PROMPT = "the quick brown fox jumps"


@pytest.fixture(scope="module")
def reference(tiny_model):
    """Log-probabilities of the next token at each position, from transformers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)

    def logprobs(ids: list[int]):
        with torch.inference_mode():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)

    return logprobs


def tokens_of(server, text: str) -> list[int]:
    return server.post("/tokenize", {"prompt": text}).json()["tokens"]


@pytest.mark.parametrize("repeat", [1, 2])
def test_loglikelihood_of_a_prompt(server, reference, repeat):
    # vllm #9336, #8268: max_tokens=0 with echo and logprobs, cold and from the prefix cache
    ids = tokens_of(server, PROMPT * 3)
    answer = server.client().completions.create(model="tiny", prompt=ids, max_tokens=0, echo=True, logprobs=2)
    choice, expected = answer.choices[0], reference(ids)
    found = choice.logprobs
    assert choice.text == PROMPT * 3
    assert answer.usage.completion_tokens == 0
    assert len(found.tokens) == len(ids) == len(found.token_logprobs) == len(found.text_offset)
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    for i in range(1, len(ids)):
        assert math.isclose(found.token_logprobs[i], expected[i - 1, ids[i]], rel_tol=1e-4, abs_tol=1e-4)
    assert "".join(found.tokens) == choice.text
    assert all(choice.text[o : o + len(t)] == t for o, t in zip(found.text_offset, found.tokens))


def test_prompts_in_every_form_give_the_same(server):
    ids = tokens_of(server, PROMPT)
    complete = server.client().completions.create
    options = {"model": "tiny", "max_tokens": 5, "temperature": 0}
    text = complete(prompt=PROMPT, **options).choices[0].text
    assert complete(prompt=[PROMPT, "a"], **options).choices[0].text == text
    assert complete(prompt=ids, **options).choices[0].text == text
    both = complete(prompt=[[5, 6], ids], **options)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[1].text == text


def test_choices_are_numbered_by_prompt_then_sample(server):
    options = {"model": "tiny", "prompt": ["a", "b", "c"], "n": 2, "max_tokens": 4, "seed": 1, "echo": True}
    answer = server.client().completions.create(**options)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text[0] for choice in answer.choices] == list("aabbcc")
    streamed = [""] * 6
    for chunk in server.client().completions.create(**options, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in answer.choices]
    assert answer.usage.completion_tokens == 24


@pytest.mark.parametrize("echo", [False, True])
def test_streamed_logprobs_are_those_of_the_whole(server, echo):
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 9, "logprobs": 3, "seed": 2, "echo": echo}
    whole = server.client().completions.create(**options).choices[0]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    streamed: dict[str, list] = {name: [] for name in names}
    text = ""
    for chunk in server.client().completions.create(**options, stream=True):
        text += chunk.choices[0].text
        for name in names if chunk.choices[0].logprobs else ():
            streamed[name] += getattr(chunk.choices[0].logprobs, name)
    assert text == whole.text
    assert streamed == {name: getattr(whole.logprobs, name) for name in names}
    assert whole.logprobs.text_offset[0] == 0
    assert len(whole.logprobs.tokens) == 9 + (len(tokens_of(server, PROMPT)) if echo else 0)


def test_sixteen_tokens_by_default_and_explicit_zero_temperature(server):
    # vllm #15241, mlx-vlm #1331: temperature=0 is a value, not "not given"
    first = server.client().completions.create(model="tiny", prompt=PROMPT, temperature=0)
    assert first.usage.completion_tokens == 16
    assert (
        first.choices[0].text
        == server.client().completions.create(model="tiny", prompt=PROMPT, temperature=0).choices[0].text
    )


def test_stop_strings_end_the_text_and_usage_counts_what_was_generated(server):
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    full = server.client().completions.create(**options).choices[0].text
    stop = full[11:14]
    cut = full.index(stop)
    answer = server.client().completions.create(**options, stop=[stop])
    assert answer.choices[0].text == full[:cut]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == stop
    kept = server.client().completions.create(
        **options, stop=stop, extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == full[: cut + len(stop)]
    stream = server.client().completions.create(**options, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == full[:cut]


def test_truncation(server):
    ids = list(range(10, 60))

    def prompt(**extra) -> list[int]:
        extra = {"return_token_ids": True, **extra}
        answer = server.client().completions.create(model="tiny", prompt=ids, max_tokens=4, extra_body=extra)
        return answer.choices[0].prompt_token_ids

    assert prompt() == ids
    assert prompt(truncate_prompt_tokens=5) == ids[-5:]
    assert prompt(truncate_prompt_tokens=5, truncation_side="right") == ids[:5]
    long = server.post("/v1/completions", {"prompt": ids * 40, "max_tokens": 4, "truncate_prompt_tokens": -1})
    assert long.json()["usage"]["prompt_tokens"] == 1020


def test_cache_salt_keeps_prefixes_apart(server):
    def cached(salt: str | None) -> int:
        body = {"prompt": "a salted prompt " * 4, "max_tokens": 1, "cache_salt": salt}
        return server.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("x") > 0, cached("x") > 0, cached("y") > 0, cached(None) > 0, cached(None) > 0] == [
        False,
        True,
        False,
        False,
        True,
    ]


def test_tokenize_and_detokenize_are_inverse(server):
    text = "the lazy dog \N{GRINNING FACE}"
    found = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 1024
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    assert server.post("/detokenize", {"tokens": [1, *found["tokens"]]}).json()["prompt"] == "<s>" + text
    outside = server.post("/detokenize", {"tokens": [5, 300]})
    assert outside.status_code == 400
    assert outside.json()["error"]["param"] == "tokens"


def test_parts_of_characters_have_their_own_bytes_and_names(server):
    text = "🌶é"
    form = {"structured_outputs": {"choice": [text]}}
    chat = server.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        logprobs=True,
        top_logprobs=5,
        extra_body=form,
    )
    items = chat.choices[0].logprobs.content
    joined = b"".join(bytes(item.bytes) for item in items)
    assert joined.removesuffix(b"</s>") == text.encode()
    assert items[0].token == "bytes:\\xf0"
    answer = (
        server.client().completions.create(model="tiny", prompt="x", logprobs=5, extra_body=form).choices[0]
    )
    assert answer.text == text
    for token, top in zip(answer.logprobs.tokens, answer.logprobs.top_logprobs):
        assert token in top
        assert len(top) >= 5
    assert answer.logprobs.tokens[:2] == ["bytes:\\xf0", "bytes:\\x9f"]


def test_tokens_that_are_spelled_alike_keep_their_own_entries():
    from paged_backend.outputs import Logprob
    from paged_backend.server.wire.logprobs import CompletionLogprobs
    from paged_backend.testing import small_tokenizer

    tokenizer = small_tokenizer()
    entry = {7: Logprob(-1.0, 2, "a"), 5: Logprob(-0.5, 1, "a"), 9: Logprob(-3.0, 3, "b")}
    made = CompletionLogprobs(tokenizer, [], False, True).add([7], [entry], 3)
    assert made.top_logprobs == [{"token_id:5": -0.5, "a": -1.0, "b": -3.0}]
    assert made.tokens == ["a"]


@pytest.mark.parametrize(
    "prompt", [[1.5], [[5, "a"]], [True], [["a"]], [[[5]]], 5, {"a": 1}, ["a", 5], [5, [6]], [-1], [1 << 50]]
)
def test_what_is_no_prompt_is_told_in_one_line(server, prompt):
    error = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}).json()["error"]
    assert error["param"] == "prompt"
    assert error["message"] == (
        "prompt: must be text, a list of token ids (integers from 0 on), or a list of either"
    )


def test_texts_and_token_ids_may_be_mixed(server):
    answer = server.post(
        "/v1/completions", {"prompt": ["a", [5, 6]], "max_tokens": 1, "return_token_ids": True}
    )
    assert [choice["prompt_token_ids"] for choice in answer.json()["choices"]][1] == [5, 6]
