"""ReasoningParser: what a model thinks, between <think> and </think>, told apart from what it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paged_backend.errors import RequestRejectedError
from paged_backend.text.pieces import Pieces
from paged_backend.tokenization import ChatTokenizer
from paged_backend.toolcalls.parser import partial

START, END = "<think>", "</think>"


class ReasoningParser:
    """Feed it text in pieces of any size with :meth:`push`. A model thinks once, before all else or not at all.

    begun: the prompt itself ended with the start marker, so that the reply begins with thoughts. count: gives the
    number of tokens of a text.
    """

    def __init__(self, begun: bool = False, count: Callable[[str], int] = len) -> None:
        self.count = count
        self._state = "thinking" if begun else "start"
        self._buffer = ""
        self._space = Pieces()  # white space that counts only if more text of its kind follows
        self._empty = True  # nothing was given out in this state yet

    @property
    def thinking(self) -> bool:
        """Whether the answer has not begun, as far as is certain."""
        return self._state != "answer"

    def push(self, text: str, final: bool = False) -> tuple[str, str]:
        """(thoughts, answer) that are certain with ``text``. final: no more can come.

        White space around either is dropped where the markers are; a reply without markers stays as it is.
        """
        self._buffer += text
        if self._state == "start":
            head = self._buffer.lstrip()
            if head.startswith(START):
                self._space.take()
                self._state, self._buffer = "thinking", head[len(START) :]
            elif final or not START.startswith(head):
                self._state, self._empty = "answer", False
                self._buffer = self._space.take() + self._buffer
            elif not head:
                self._space.add(self._buffer)
                self._buffer = ""
        thoughts = self._thoughts(final) if self._state == "thinking" else ""
        answer = ""
        if self._state == "answer":
            answer, self._buffer = self._buffer, ""
            if self._empty:
                answer = answer.lstrip()
                self._empty = not answer
        return thoughts, answer

    def _thoughts(self, final: bool) -> str:
        text, marker, rest = self._buffer.partition(END)
        held = 0 if marker or final else partial(text, END)
        text, self._buffer = text[: len(text) - held], text[len(text) - held :]
        if self._empty:
            text = text.lstrip()
        kept = text.rstrip()
        thoughts = self._space.take() + kept if kept else ""
        self._space.add(text[len(kept) :])
        self._empty = self._empty and not thoughts
        if marker:
            self._state, self._buffer, self._empty = "answer", rest, True
        return thoughts


def reasoning_parser_for(tokenizer: ChatTokenizer, prompt_token_ids: Sequence[int]) -> ReasoningParser | None:
    """For the reply to a chat; None for a model whose chat template knows of no thoughts."""
    templates = tokenizer.templates
    if not any(END in template for template in templates.values()):
        return None
    tail = tokenizer.decode(list(prompt_token_ids[-8:]), skip_special_tokens=False)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False)) if text else 0

    return ReasoningParser(tail.rstrip().endswith(START), count)


def reasoning_options(
    tokenizer: ChatTokenizer, wanted: bool | None, effort: str | None, place: str
) -> dict[str, Any]:
    """Variables for the chat template that make the model think or not, None: as it likes.

    Raises ``RequestRejectedError``, which begins with ``place``, where thoughts cannot be turned off.
    """
    templates = tokenizer.templates.values()

    def known(name: str) -> bool:
        return any(name in template for template in templates)

    variables: dict[str, Any] = {}
    if known("enable_thinking") and wanted is not None:
        variables["enable_thinking"] = wanted
    elif wanted is False and known(END):
        raise RequestRejectedError(f"{place} cannot turn off thoughts: this model always thinks")
    if effort is not None and known("reasoning_effort"):  # others have no effort to change
        variables["reasoning_effort"] = effort
    return variables
