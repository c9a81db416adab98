"""The forms in which models write tool calls, and which of them a model uses."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from paged_backend.tokenization import ChatTokenizer


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write tool calls.

    start, end: what stands before and after a call, as text. arguments_key: the name of the arguments in a call's JSON.
    bare: a reply that begins with a JSON object is a call even without ``start``. native: the model's chat template
    takes tools itself; otherwise ``chat_prompt`` explains them in the system message. start_id: the special token that
    ``start`` is, if it is one; its text is then lost unless special tokens are decoded.
    """

    name: str
    start: str
    end: str = ""
    arguments_key: str = "arguments"
    bare: bool = False
    native: bool = True
    start_id: int | None = None

    @property
    def skip_special_tokens(self) -> bool:
        """What to set in ``SamplingParams`` so that the text still shows the calls."""
        return self.start_id is None


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
LLAMA3 = ToolFormat("llama3", "<|python_tag|>", arguments_key="parameters", bare=True)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]")


def tool_format_for(tokenizer: ChatTokenizer, chat_template: str | None = None) -> ToolFormat:
    """The format of a tokenizer's chat template, or of ``chat_template``, a template or the name of one of its own.

    Known by the markers the template writes. A template that knows of no tools, or marks calls in a way not known here,
    gets Hermes' convention and has the tools explained to it.
    """
    templates = tokenizer.templates
    if chat_template is not None:
        text = templates.get(chat_template, chat_template)
    else:
        text = templates.get("tool_use") or templates.get("default") or ""
    if not re.search(r"\btools\b", text):
        return replace(HERMES, native=False)
    if "[TOOL_CALLS]" in text:
        found = MISTRAL
    elif "<tool_call>" in text:
        found = HERMES
    elif "ipython" in text or "<|python_tag|>" in text:
        found = LLAMA3
    else:
        return replace(HERMES, native=False)
    index = tokenizer.token_to_id(found.start)
    return replace(found, start_id=index) if index is not None and index in tokenizer.special_ids else found
