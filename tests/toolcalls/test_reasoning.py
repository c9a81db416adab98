"""Thoughts told apart from answers, whole and in pieces of any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_backend.toolcalls import ReasoningParser, reasoning_parser_for

CASES = [
    (False, "just text", "", "just text"),
    (False, "  spaced  text \n", "", "  spaced  text \n"),
    (False, "<think>\nso\n\nthen \n</think>\n\nyes \n", "so\n\nthen", "yes \n"),
    (False, "\n<think>a</think>b", "a", "b"),
    (False, "<think>\n\n</think>\n\nyes", "", "yes"),
    (False, "<think>cut off </thi", "cut off </thi", ""),
    (False, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    (False, "a <think>b</think>", "", "a <think>b</think>"),
    (False, "<thin", "", "<thin"),
    (False, " \n", "", " \n"),
    (True, "so\n</think>\n\nyes", "so", "yes"),
    (True, "never ends \n", "never ends", ""),
    (True, "</think>yes", "", "yes"),
]


def read(begun, pieces):
    parser = ReasoningParser(begun)
    told = [parser.push(piece, number == len(pieces) - 1) for number, piece in enumerate(pieces)]
    return "".join(thought for thought, _ in told), "".join(answer for _, answer in told)


@pytest.mark.parametrize(("begun", "text", "thoughts", "answer"), CASES)
def test_whole_and_letter_by_letter(begun, text, thoughts, answer):
    assert read(begun, [text]) == (thoughts, answer)
    assert read(begun, [*text, ""]) == (thoughts, answer)


@given(
    st.booleans(), st.lists(st.sampled_from(["<think>", "</think>", "<", "think>", " ", "\n", "a", "b c"]))
)
def test_pieces_of_any_size_give_what_the_whole_gives(begun, pieces):
    assert read(begun, [*pieces, ""]) == read(begun, ["".join(pieces)])


class Spoken:
    """A tokenizer whose tokens are letters."""

    def __init__(self, template):
        self.templates = {"default": template}

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))


def test_a_model_thinks_if_its_template_says_so_and_at_once_if_the_prompt_does():
    assert reasoning_parser_for(Spoken("{{ messages }}"), []) is None
    thinker = Spoken("... <think> ... </think>")
    for prompt, thoughts in (
        ("assistant: <think>\n", "a"),
        ("assistant: ", ""),
        ("<think>\n\n</think>\n\n", ""),
    ):
        parser = reasoning_parser_for(thinker, list(map(ord, prompt)))
        assert parser.push("a</think>b", True)[0] == thoughts
