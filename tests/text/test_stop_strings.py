"""StopMatcher: stop strings across pieces of text, with the shortest hold-back."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_backend.text.stop_strings import StopMatcher, overlap


def feed(matcher, pieces):
    """(texts emitted piece by piece, with what is held at the end; matched)"""
    texts = []
    for piece in pieces:
        emitted, matched = matcher.push(piece)
        texts.append(emitted)
        if matched is not None:
            return texts, matched
    return [*texts, matcher.flush()], None


def first_match(text, stops):
    """By definition: the first end of any stop string, there the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end, stop
    return None


def cut(text, places):
    edges = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@given(
    st.text("ab\n", max_size=30),
    st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 30)),
    st.booleans(),
)
def test_the_result_is_the_same_however_the_text_is_cut(text, stops, places, include):
    texts, matched = feed(StopMatcher(stops, include), cut(text, places))
    expected = first_match(text, stops)
    if expected is None:
        assert ("".join(texts), matched) == (text, None)
    else:
        end, stop = expected
        assert ("".join(texts), matched) == (text[: end if include else end - len(stop)], stop)


@given(
    st.text("ab\n", max_size=30),
    st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 30)),
)
def test_only_the_longest_possible_beginning_of_a_stop_string_is_held_back(text, stops, places):
    """Public reports: vLLM #13087, PR #31135, PR #45636; llama.cpp #10914 (fixed-size hold-back)."""
    matcher, seen, shown = StopMatcher(stops), "", ""
    for piece in cut(text, places):
        emitted, matched = matcher.push(piece)
        if matched is not None:
            return
        seen += piece
        shown += emitted
        open_ends = [n for s in stops for n in range(len(s)) if seen.endswith(s[:n])]
        assert shown == seen[: len(seen) - max(open_ends)]


def test_a_stop_string_over_three_pieces_never_leaks():
    """Public reports: vLLM #3574, #2577, PR #3672."""
    assert feed(StopMatcher(["</answer>"]), ["yes <", "/ans", "wer> more"]) == (["yes ", "", ""], "</answer>")


def test_a_beginning_that_comes_to_nothing_is_shown_at_once_or_at_the_end():
    """Public reports: vLLM #3574, #13087."""
    assert feed(StopMatcher(["\n\nUser:"]), ["a\n", "\nUs", "ual"]) == (["a", "", "\n\nUsual", ""], None)
    assert feed(StopMatcher(["\n\nUser:"]), ["a\n", "\nUs"]) == (["a", "", "\n\nUs"], None)


def test_text_that_cannot_begin_a_stop_string_is_never_held_back():
    """Public report: llama.cpp #10914."""
    pieces = ["Hello", " wor", "ld"]
    assert feed(StopMatcher(["###", "</s>"]), pieces) == ([*pieces, ""], None)


def test_a_fallback_inside_a_stop_string_finds_the_overlapping_match():
    assert feed(StopMatcher(["aab"]), ["a", "a", "a", "b", "c"]) == (["", "", "a", ""], "aab")


def test_the_match_that_completes_first_wins_and_the_longest_of_those():
    assert feed(StopMatcher(["abcd", "bc"]), ["xabcd"]) == (["xa"], "bc")
    assert feed(StopMatcher(["bc", "abc"]), ["xabcd"]) == (["x"], "abc")


def test_included_stop_strings_end_the_text():
    assert feed(StopMatcher(["END"], include_in_output=True), ["a E", "ND tail"]) == (["a ", "END"], "END")


def test_nothing_comes_after_a_match():
    matcher = StopMatcher(["x"])
    assert matcher.push("ax") == ("a", "x")
    assert matcher.push("bcx") == ("", None)
    assert matcher.flush() == ""
    assert matcher.matched == "x"


def test_text_before_min_tokens_cannot_complete_a_match_but_can_begin_one():
    matcher = StopMatcher(["ab"])
    assert matcher.push("ab", can_stop=False) == ("ab", None)
    assert matcher.push("a", can_stop=False) == ("", None)
    assert matcher.push("b") == ("", "ab")


def test_without_stop_strings_text_passes_through():
    assert feed(StopMatcher([]), ["a", "", "b"]) == (["a", "", "b", ""], None)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""])


def expected_with_hidden(pieces, stops, through, include):
    """(shown, matched) by definition: stops in ``through`` see hidden text, the others what is shown."""
    marked = [(char, hidden) for text, hidden in pieces for char in text]
    for end in range(1, len(marked) + 1):
        for stop in sorted(set(stops), key=len, reverse=True):
            places = [i for i in range(end) if stop in through or not marked[i][1]]
            if not places or places[-1] != end - 1 or len(places) < len(stop):
                continue
            if "".join(marked[i][0] for i in places).endswith(stop):
                upto = end if include else places[-len(stop)]
                return "".join(char for char, hidden in marked[:upto] if not hidden), stop
    return "".join(char for char, hidden in marked if not hidden), None


@given(
    st.lists(st.tuples(st.text("ab<", max_size=4), st.booleans()), max_size=10),
    st.lists(st.text("ab<", min_size=1, max_size=5), min_size=1, max_size=4),
    st.sets(st.integers(0, 3)),
    st.booleans(),
)
def test_hidden_text_is_never_shown_and_found_only_by_stops_that_ask_for_it(pieces, stops, chosen, include):
    through = {stop for i, stop in enumerate(stops) if i in chosen}
    matcher = StopMatcher(stops, include, through)
    shown, matched = "", None
    for text, hidden in pieces:
        emitted, matched = matcher.push(text, hidden=hidden)
        shown += emitted
        if matched is not None:
            break
    shown += matcher.flush()
    assert (shown, matched) == expected_with_hidden(pieces, stops, through, include)


@pytest.mark.parametrize(
    ("text", "touches"),
    [
        ("</s>", True),
        ("a</", True),
        (">b", True),
        ("a</s>b", True),
        ("/", True),
        ("s", True),
        ("a", False),
        ("b\\n", False),
        (">a<", True),
        ("\n", False),
    ],
)
def test_whether_a_string_can_lie_in_a_special_token(text, touches):
    assert overlap(text, "</s>") is touches
    assert overlap("</s>", text) is touches
