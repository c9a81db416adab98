"""Prompts with tools: by templates that know them, and for those that do not."""

from __future__ import annotations

import pytest

from paged_backend.errors import RequestRejectedError
from paged_backend.testing import CHATML, small_tokenizer
from paged_backend.toolcalls import chat_prompt, tool_format_for
from paged_backend.toolcalls.formats import HERMES, LLAMA3, MISTRAL

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}}
CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Go."},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "one"},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "two"}]},
]
NATIVE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}MARK{{ c.id }}{{ c.function.arguments.a }}{% endfor %}"
    "{{ m.tool_call_id or '' }}\n{% endfor %}"
)


def fake(template, special=()):
    tokenizer = small_tokenizer(chat_template=template)
    ids = {"[TOOL_CALLS]": 0} if special else {}
    tokenizer.token_to_id = ids.get
    return tokenizer


def test_formats_are_known_by_their_templates():
    assert tool_format_for(fake(CHATML)) == tool_format_for(fake(None))
    assert tool_format_for(fake(CHATML)).native is False
    assert tool_format_for(fake("{{ tools }}<tool_call>")) == HERMES
    assert tool_format_for(fake("{{ tools }}ipython")) == LLAMA3
    assert tool_format_for(fake("{{ tools }}[TOOL_CALLS]")) == MISTRAL
    assert tool_format_for(fake("{{ tools }}[TOOL_CALLS]", special=True)).start_id == 0
    assert tool_format_for(fake("{{ tools }} in some other way")).native is False


def test_a_template_without_tools_has_them_explained():
    tokenizer = fake(CHATML)
    prompt = chat_prompt(tokenizer, CONVERSATION, [TOOL])
    text = prompt["prompt"]
    assert text.startswith("<|im_start|>system\nBe kind.\n\nYou can call functions")
    assert '<tools>\n{"type": "function"' in text
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>\n<tool_call>'
        in text
    )
    assert (
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>"
        in text
    )
    assert text.endswith("<|im_start|>assistant\n")
    assert prompt["prompt_token_ids"] == tokenizer.encode(text, add_special_tokens=False)


def test_without_a_system_message_one_is_made_and_without_tools_none():
    tokenizer = fake(CHATML)
    hello = [{"role": "user", "content": "hello"}]
    assert chat_prompt(tokenizer, hello, [TOOL])["prompt"].startswith("<|im_start|>system\n")
    plain = chat_prompt(tokenizer, hello)["prompt"]
    assert plain == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA3, MISTRAL], ids=lambda f: f.name)
def test_a_template_with_tools_gets_them(tool_format):
    tokenizer = fake(f"{NATIVE}{{# {tool_format.start} #}}")
    assert tool_format_for(tokenizer) == tool_format
    text = chat_prompt(tokenizer, CONVERSATION, [TOOL])["prompt"]
    assert text.startswith("[f]system:Be kind.")
    assert "ü" in text
    if tool_format is MISTRAL:
        made = text.split("MARK")[1][:9]
        assert made.isalnum()
        assert text.count(made) == 4
    else:
        assert text.count("call_1") == 4


def test_functions_are_tools_and_a_template_of_the_caller_s_own_decides_the_format():
    def add(a: int) -> int:
        """Add.

        Args:
            a: a number
        """
        return a

    tokenizer = fake(CHATML)
    hello = [{"role": "user", "content": "hello"}]
    assert '"name": "add"' in chat_prompt(tokenizer, hello, [add])["prompt"]
    native = "{{ tools }}<tool_call>"
    assert tool_format_for(tokenizer, native) == HERMES
    assert tool_format_for(tokenizer, "default").native is False
    assert "'add'" in chat_prompt(tokenizer, hello, [add], chat_template=native)["prompt"]


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def rendered(template, messages, **options):
    return chat_prompt(fake(template), messages, **options)["prompt"]


def test_a_template_that_wants_roles_to_alternate_gets_messages_joined_and_the_system_s_in_front():
    chat = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "developer", "content": "T"},
        {"role": "user", "content": "d"},
    ]
    assert rendered(ALTERNATING, chat) == "<user>S\n\na\n\nb<assistant>c<user>T\n\nd"
    free = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert rendered(free, chat) == "<system>S<user>a<user>b<assistant>c<system>T<user>d"


def test_what_a_template_refuses_in_every_form_is_refused_in_the_words_of_the_first():
    with pytest.raises(RequestRejectedError, match="alternate"):
        rendered(ALTERNATING, [{"role": "assistant", "content": "I begin"}])


def test_a_developer_is_one_where_the_template_knows_it():
    chat = [{"role": "developer", "content": "x"}]
    knows = "{# developer #}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert rendered(knows, chat) == "<developer>x"
    assert rendered(knows.replace("developer", "other"), chat) == "<system>x"


def test_roles_of_the_caller_s_own_where_the_template_writes_them():
    chat = [{"role": "user", "content": "a"}, {"role": "critic", "content": "b"}]
    assert (
        rendered("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", chat)
        == "<user>a<critic>b"
    )
    leaves_out = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    takes_for_another = (
        "{% for m in messages %}{{ 'U' if m.role == 'user' else 'A' }}{{ m.content }}{% endfor %}"
    )
    for template in (leaves_out, takes_for_another):
        with pytest.raises(RequestRejectedError, match=r"^messages\.1\.role .*'critic'"):
            rendered(template, chat)


def test_options_of_the_prompt_are_no_variables_of_the_template():
    hello = [{"role": "user", "content": "hello"}]
    with pytest.raises(RequestRejectedError, match="chat_template_kwargs must not have 'messages'"):
        rendered(CHATML, hello, chat_template_kwargs={"messages": []})
    with pytest.raises(RequestRejectedError, match="exclude each other"):
        rendered(CHATML, hello, add_generation_prompt=True, continue_final_message=True)
    assert rendered("{{ x }}", hello, chat_template_kwargs={"x": 3}) == "3"
    assert not rendered(CHATML, hello, add_generation_prompt=False).endswith("assistant\n")
