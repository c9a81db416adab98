"""Every field of OpenAI's and vLLM's requests: honoured, taken because no answer depends on it, or refused by name."""

from __future__ import annotations

import pytest

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SHORT = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    TEXT: {"prompt": "hi", "max_tokens": 2},
    RESPONSES: {"input": "hi", "max_output_tokens": 2},
}
ELSEWHERE = {"max_completion_tokens": "max_tokens"}
"""What a refusal names instead: the field that it does not go with."""
GENERAL = {
    # field: (values that are taken, values that are refused)
    "temperature": ([0, 0.5], [-1]),
    "top_p": ([0.5], [0]),
    "top_k": ([-1, 0, 3], [-2]),
    "min_p": ([0.1], [2]),
    "presence_penalty": ([0.5], [3]),
    "frequency_penalty": ([0.5], [3]),
    "repetition_penalty": ([1.1], [0]),
    "seed": ([1], ["x"]),
    "stop": (["z", ["a", "b"]], [[""]]),
    "stop_token_ids": ([[1]], [[-1]]),
    "include_stop_str_in_output": ([True], [1]),
    "ignore_eos": ([True], [1]),
    "min_tokens": ([0, 1], [-1]),
    "logit_bias": ([{"3": 1}], [{"x": 1}]),
    "allowed_token_ids": ([[5]], [[]]),
    "bad_words": ([["a"]], [[1]]),
    "skip_special_tokens": ([False], [1]),
    "priority": ([0, -3], ["high"]),
    "structured_outputs": ([{"choice": ["a"]}], [{"json": {}, "regex": "a"}]),
    "stream": ([False], ["yes"]),
    "truncate_prompt_tokens": ([5, -1], [0]),
    "add_special_tokens": ([True], [1]),
    "cache_salt": (["salt"], [""]),
    "request_id": (["abc"], [""]),
    "model": (["tiny"], [1]),
    "user": (["me"], [1]),
    "session_id": (["s"], [1]),
    "safety_identifier": (["s"], [1]),
    "metadata": ([{"a": "b"}, {}], [1]),
    "prompt_cache_key": (["k"], [1]),
    "prompt_cache_retention": (["24h"], [1]),
    "prompt_cache_options": ([{}], [1]),
    "service_tier": (["auto", "default", "flex", "priority"], ["gold"]),
    "prediction": ([{"type": "content", "content": "hi"}], [1]),
    "stream_interval": ([1, 10], ["x"]),
    "spaces_between_special_tokens": ([True, False], [1]),
    "guided_decoding_backend": (["xgrammar"], [1]),
    "media_io_kwargs": ([{}], [1]),
    "mm_processor_kwargs": ([{}], [1]),
    "mm_payload": (["none"], [1]),
    "return_mm_kwargs": ([False], [1]),
    "moderation": ([{}], [{"model": "m"}]),
    "watermarking": ([False], [True]),
    "include_reasoning": ([True], [False]),
    "thinking_token_budget": ([-1], [100]),
    "logprob_token_ids": ([[]], [[1]]),
    "prompt_embeds": ([[]], ["abc"]),
    "routed_experts_prompt_start": ([0], [3]),
    "return_token_offsets": ([False], [True]),
    "kv_transfer_params": ([{}], [{"a": 1}]),
    "ec_transfer_params": ([{}], [{"a": 1}]),
    "vllm_xargs": ([{}], [{"a": 1}]),
    "repetition_detection": ([{}], [{"min_count": 3}]),
    "logits_processors": ([[]], [["m.f"]]),
    "store": ([True, False], ["yes"]),
}
SEVERAL = {
    "n": ([2], [0]),
    "prompt_logprobs": ([0, 2, -1], [-2, 21]),
    "use_beam_search": ([False, True], ["x"]),
    "return_token_ids": ([True], [1]),
    "return_tokens_as_token_ids": ([True], [1]),
    "guided_json": ([{"type": "object"}, "{}"], [[1]]),
    "guided_regex": (["a"], [""]),
    "guided_choice": ([["a"]], [[]]),
    "guided_grammar": (['start: "a"'], [1]),
    "response_format": ([{"type": "text"}, {"type": "json_object"}], [{"type": "xml"}]),
}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
OWN = {
    CHAT: {
        **SEVERAL,
        "max_completion_tokens": ([2], [0, 3]),
        "logprobs": ([True, False], [1]),
        "top_logprobs": ([0], [21, -2]),
        "echo": ([True], [1]),
        "tools": ([[TOOL], []], ["x"]),
        "tool_choice": (["none"], ["required"]),
        "parallel_tool_calls": ([True, False], [1]),
        "functions": ([[FUNCTION]], [[]]),
        "function_call": (["none"], ["auto"]),
        "modalities": ([["text"]], [["text", "audio"]]),
        "audio": ([], [{"voice": "alloy"}]),
        "verbosity": (["medium"], ["low", "high"]),
        "web_search_options": ([{}], [{"search_context_size": "low"}]),
        "reasoning_effort": (["none", "low", "xhigh"], [1]),
        "add_generation_prompt": ([True, False], [1]),
        "continue_final_message": ([False], [1]),
        "chat_template": ([], ["{{ x }}"]),
        "chat_template_kwargs": ([{}, {"enable_thinking": False}], [{"messages": []}]),
        "documents": ([], [[{"text": "a"}]]),
        "return_prompt_text": ([False], [True]),
    },
    TEXT: {
        **SEVERAL,
        "best_of": ([1, 2], [0]),
        "echo": ([True], [1]),
        "logprobs": ([0, 3, -1], [21, -2]),
        "suffix": ([], ["b"]),
    },
    RESPONSES: {
        "instructions": (["be brief"], [1]),
        "reasoning": ([{"effort": "low"}, {"effort": "none"}], [{"summary": "detailed"}]),
        "background": ([False], [True]),
        "background_options": ([{}], [{"a": 1}]),
        "access_programs": ([{}], [1]),
        "context_management": ([[]], [[{"type": "compaction"}]]),
        "conversation": ([], ["conv_1"]),
        "image": ([{}], [{"a": 1}]),
        "max_tool_calls": ([3], ["x"]),
        "prompt": ([{}], [{"id": "p"}]),
        "enable_response_messages": ([False], [True]),
        "previous_input_messages": ([[]], [[{"role": "user"}]]),
        "parallel_tool_calls": ([True, False], [1]),
        "text": ([{"format": {"type": "text"}}], [1]),
        "truncation": (["disabled"], ["sometimes"]),
    },
}
CASES = [
    (route, name, value, taken)
    for route in SHORT
    for name, values in {**GENERAL, **OWN[route]}.items()
    for taken, chosen in zip((True, False), values)
    for value in chosen
]


@pytest.mark.parametrize(("route", "name", "value", "taken"), CASES)
def test_a_field_is_taken_or_refused_by_name(server, route, name, value, taken):
    needed = {"logprobs": True} if name == "top_logprobs" else {}
    response = server.post(route, {**SHORT[route], **needed, name: value})
    if taken:
        assert response.status_code == 200, response.text
    else:
        assert response.status_code == 400, response.text
        named = response.json()["error"]["param"]
        expected = "structured_outputs" if name.startswith("guided_") else ELSEWHERE.get(name, name)
        assert name in named or expected == named, response.text


def test_a_field_that_nobody_knows_is_refused_everywhere(server):
    for route, body in SHORT.items():
        error = server.post(route, {**body, "temprature": 1}).json()["error"]
        assert (error["param"], error["code"]) == ("temprature", "unsupported_parameter")


def test_the_reference_lists_what_is_taken_without_effect(server):
    schemas = server.get("/openapi.json").json()["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest"):
        assert {"service_tier", "watermarking", "session_id"} <= set(schemas[name]["properties"])
