"""Whatever a client sends, it gets an answer in the shape of OpenAI's errors, and never a 5xx for its own mistake."""

from __future__ import annotations

import json

import httpx2 as httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

HELLO = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ROUTES = (CHAT, TEXT, "/v1/responses", "/tokenize", "/detokenize")


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert response.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (CHAT, {}, "messages", "missing_required_parameter"),
        (CHAT, {"messages": []}, "messages", "invalid_value"),
        (CHAT, {"messages": HELLO, "temprature": 1}, "temprature", "unsupported_parameter"),
        (CHAT, {"messages": HELLO, "functions": []}, "functions", "invalid_value"),
        (CHAT, {"messages": HELLO, "function_call": "auto"}, "function_call", "invalid_value"),
        (CHAT, {"messages": [{"role": "function", "name": "f", "content": "1"}]}, "messages.0.role", "invalid_value"),
        (CHAT, {"messages": HELLO, "guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "invalid_value"),
        (CHAT, {"messages": HELLO, "guided_regex": "a", "response_format": {"type": "json_object"}},
         "response_format", "invalid_value"),
        (CHAT, {"messages": HELLO, "stream_options": {"x": 1}}, "stream_options.x", "unsupported_parameter"),
        (CHAT, {"messages": HELLO, "temperature": "1"}, "temperature", "invalid_value"),
        (CHAT, {"messages": HELLO, "temperature": -0.1}, "temperature", "invalid_value"),
        (CHAT, {"messages": HELLO, "top_p": 0}, "top_p", "invalid_value"),
        (CHAT, {"messages": HELLO, "top_p": 1.5}, "top_p", "invalid_value"),
        (CHAT, {"messages": HELLO, "min_p": 2}, "min_p", "invalid_value"),
        (CHAT, {"messages": HELLO, "top_k": -2}, "top_k", "invalid_value"),
        (CHAT, {"messages": HELLO, "presence_penalty": 3}, "presence_penalty", "invalid_value"),
        (CHAT, {"messages": HELLO, "repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        (CHAT, {"messages": HELLO, "n": 0}, "n", "invalid_value"),
        (CHAT, {"messages": HELLO, "seed": 1 << 70}, "seed", "invalid_value"),
        (CHAT, {"messages": HELLO, "stop": [""]}, "stop", "invalid_value"),
        (CHAT, {"messages": HELLO, "stop": ["a"] * 65}, "stop", "invalid_value"),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens", "invalid_value"),
        (CHAT, {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
        (CHAT, {"messages": HELLO, "min_tokens": 9, "max_tokens": 3}, "min_tokens", "invalid_value"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "invalid_value"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        (CHAT, {"messages": HELLO, "stream_options": {}}, "stream_options", "invalid_value"),
        (CHAT, {"messages": HELLO, "logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        (CHAT, {"messages": HELLO, "logit_bias": {"300": 1}}, "logit_bias", "invalid_value"),
        (CHAT, {"messages": HELLO, "logit_bias": {"3": 101}}, "logit_bias", "invalid_value"),
        (CHAT, {"messages": HELLO, "allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
        (CHAT, {"messages": HELLO, "chat_template": "{{ x }}"}, "chat_template", "unsupported_parameter"),
        (CHAT, {"messages": HELLO, "documents": [{}]}, "documents", "unsupported_parameter"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "invalid_value"),
        (CHAT, {"messages": [{"role": "", "content": ""}]}, "messages.0.role", "invalid_value"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content", "invalid_value"),
        (CHAT, {"messages": [{"role": "user", "content": 1}]}, "messages.0.content", "invalid_value"),
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content", "invalid_value"),
        (CHAT, {"messages": [{"role": "tool", "content": ""}]}, "messages.0.tool_call_id", "invalid_value"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, "response_format", "invalid_value"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 3000}]}, "messages", "context_length_exceeded"),
        (CHAT, {"messages": HELLO, "max_tokens": 1024}, "messages", "context_length_exceeded"),
        (TEXT, {"prompt": []}, "prompt", "invalid_value"),
        (TEXT, {"prompt": ""}, None, "invalid_value"),
        (TEXT, {"prompt": [[]]}, None, "invalid_value"),
        (TEXT, {"prompt": [300]}, None, "invalid_value"),
        (TEXT, {"prompt": [-1]}, "prompt", "invalid_value"),
        (TEXT, {"prompt": ["a", 1]}, "prompt", "invalid_value"),
        (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens", "invalid_value"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix", "invalid_value"),
        (TEXT, {"prompt": "a", "best_of": 1, "n": 2}, "best_of", "invalid_value"),
        (TEXT, {"prompt": "a", "best_of": 2, "stream": True}, "best_of", "invalid_value"),
        (TEXT, {"prompt": "a", "truncation_side": "left"}, "truncation_side", "invalid_value"),
        (TEXT, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        (TEXT, {"prompt": ["a"] * 10000}, None, "invalid_value"),
        ("/tokenize", {}, "prompt", "invalid_value"),
        ("/detokenize", {"tokens": ["a"]}, "tokens", "invalid_value"),
    ],
)  # fmt: skip
def test_a_mistake_is_a_400_that_names_the_field(server, path, body, param, code):
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert (error["param"], error["code"]) == (param, code), error["message"]


def test_null_means_not_given(server):
    body = {
        "messages": HELLO,
        "max_tokens": 1,
        "temperature": None,
        "stop": None,
        "tools": None,
        "stream_options": None,
    }
    assert server.post(CHAT, body).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"null", b"[]", b'"a"', b"\xff\xfe", b'{"messages": "\xff"}', b"[" * 100_000,
        b'{"messages":' + b"[" * 3000 + b"]" * 3000 + b"}", b'{"messages": NaN}', b'{"temperature": Infinity}',
        b'{"temperature": 1e999, "messages": []}', b'{"seed": ' + b"9" * 10_000 + b', "messages": []}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"{'a': 1}", b'{"a": 1}}',
    ],
    ids=lambda raw: raw[:20].decode("latin-1"),
)  # fmt: skip
@pytest.mark.parametrize("path", ROUTES)
def test_bodies_that_are_not_json_objects(server, path, raw):
    response = server.http.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error_of(response)


def test_other_content_types_unknown_routes_and_methods(server):
    response = server.http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})
    assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")
    assert server.http.post(CHAT, content=b"{}").status_code == 415
    response = server.get("/v2/nothing")
    assert (response.status_code, error_of(response)["code"]) == (404, "unknown_url")
    response = server.get(CHAT)
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def bodies(server):
    """Objects of known fields with values of any kind, among them some that are right."""
    from paged_backend.server.wire import schema

    fields = sorted(
        {
            *schema.ChatRequest.model_fields,
            *schema.CompletionRequest.model_fields,
            *schema.ResponsesRequest.model_fields,
            "tokens",
            "input",
        }
    )
    small = st.sampled_from([0, 1, 2, -1, 0.5, True, "a", ["a"], [1, 2], {"1": 2}, {"type": "text"}])
    right = {"messages": HELLO, "prompt": "a", "tokens": [5], "input": "a", "max_tokens": 2}
    return st.dictionaries(st.sampled_from(fields), small | json_values, max_size=6).map(
        lambda some: {"max_tokens": 2, **some} if len(some) % 2 else {**some, **right}
    )


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_json_gets_an_answer_below_500(server, data):
    body = data.draw(bodies(server))
    if body.get("stream"):
        body["stream"] = False
    for name in ("max_tokens", "max_completion_tokens", "min_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int) and body[name] > 16:
            body[name] = 3
    path = data.draw(st.sampled_from(ROUTES))
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens", None) or 2
    elif body.get("max_completion_tokens") is None and body.get("max_tokens") is None:
        body["max_tokens"] = 2
    try:
        raw = json.dumps(body).encode()
    except (ValueError, RecursionError):
        return
    response = server.http.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code < 500, (path, body, response.text)
    if response.status_code != 200:
        error_of(response)


def test_an_error_in_the_middle_of_a_stream_is_an_event(server):
    from paged_backend.errors import RequestFailedError

    client = server.serving.client
    with server.hold() as gate:
        gate.allow()
        stream = server.client().chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        remote = next(iter(client._requests.values()))
        server.server._loop.call_soon_threadsafe(remote.fail, RequestFailedError("the model broke"))
        with pytest.raises(openai.APIError, match="the model broke"):
            list(stream)
        server.server._loop.call_soon_threadsafe(client._end, remote, "error")
        server.server._loop.call_soon_threadsafe(client.send, {"t": "abort", "id": remote.number})


def test_unexpected_errors_tell_no_details(server, monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise KeyError("a secret prompt")

    monkeypatch.setattr(server.serving.tokenizer, "encode", broken)
    response = server.post(TEXT, {"prompt": "a secret prompt"})
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "secret" not in response.text + caplog.text
