"""CompletionState: text, token ids, logprobs and finish reason in step, whole or as deltas."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend.engine.output_processor import CompletionState, logprob_dict
from paged_backend.outputs import Logprob
from paged_backend.runner.sampler import Sampled
from paged_backend.sampling_params import SamplingParams
from paged_backend.text.stop_strings import overlap

EOS = 256
WORD = 257


class Bytes:
    """One token a byte, one special token, one token of several characters."""

    special_ids = frozenset({EOS})

    def decode(self, ids, skip_special_tokens=True):
        parts = {EOS: b"" if skip_special_tokens else b"</s>", WORD: b"one two three"}
        return b"".join(parts.get(i, bytes([i % 256])) for i in ids).decode(errors="replace")

    def token_bytes(self, index):
        return b"one two three" if index == WORD else b"</s>" if index == EOS else bytes([index % 256])

    def overlaps_special(self, text):
        return overlap(text, "</s>")


def make_state(prompt=b"prompt", stop_ids=(EOS,), **params):
    resolved = SamplingParams(**params).resolved()
    return CompletionState(0, resolved, Bytes(), list(prompt), stop_ids)


def token(i, top=()):
    return Sampled(i, -0.5, 2, [(t, -0.1 * n, n) for n, t in enumerate(top, 1)])


def run(state, ids):
    """Append until it stops; the number of tokens taken and the (text, ids) of every delta."""
    deltas = []
    for n, i in enumerate(ids, 1):
        stopped = state.append(token(i))
        delta = state.delta()
        deltas.append((delta.text, delta.token_ids))
        if stopped:
            return n, deltas
    return len(ids), deltas


def test_text_ids_and_logprobs_grow_together():
    state = make_state(logprobs=1)
    state.append(token(ord("h"), top=[ord("x")]))
    state.append(token(ord("i"), top=[ord("i")]))
    output = state.snapshot()
    assert (output.text, output.token_ids, output.finish_reason) == ("hi", [104, 105], None)
    assert output.cumulative_logprob == -1.0
    assert output.logprobs == [
        {104: Logprob(-0.5, 2, "h"), 120: Logprob(-0.1, 1, "x")},
        {105: Logprob(-0.5, 2, "i")},
    ]


def test_a_stop_string_over_several_tokens_cuts_text_but_keeps_every_token():
    """Public reports: vLLM #3574, #2577, PR #3672, PR #47616, PR #55483; TensorRT-LLM PR #18190."""
    state = make_state(stop=["END"], logprobs=0)
    taken, deltas = run(state, b"abENDxyz")
    output = state.snapshot()
    assert taken == 5
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", "END")
    assert output.token_ids == list(b"abEND")
    assert len(output.logprobs) == len(output.token_ids)
    assert [text for text, _ in deltas] == ["a", "b", "", "", ""]


def test_tokens_after_the_stop_string_are_ignored():
    """Public reports: vLLM PR #47616; TensorRT-LLM PR #18190."""
    state = make_state(stop=["b"], logprobs=0)
    run(state, b"ab")
    before = state.snapshot()
    assert state.append(token(ord("z"))) is False
    state.finish("length")
    assert state.snapshot() == before


def test_an_included_stop_string_ends_the_text():
    state = make_state(stop=["END"], include_stop_str_in_output=True)
    run(state, b"abEND")
    assert state.text == "abEND"


def test_a_stop_string_inside_a_token_cuts_the_token():
    state = make_state(stop=["two"])
    assert state.append(token(WORD)) is True
    output = state.snapshot()
    assert (output.text, output.token_ids) == ("one ", [WORD])


def test_a_stop_string_beats_the_length_limit():
    state = make_state(stop=["b"])
    state.append(token(ord("a")))
    assert state.append(token(ord("b")), "length") is True
    assert (state.finish_reason, state.stop_reason) == ("stop", "b")


def test_the_beginning_of_a_stop_string_is_shown_when_the_output_ends():
    """Public reports: vLLM #3574, #13087."""
    state = make_state(stop=["END"])
    run(state, b"abE")
    assert state.text == "ab"
    state.append(token(ord("N")), "length")
    assert (state.text, state.finish_reason) == ("abEN", "length")
    assert (state.delta().text, state.delta().text) == ("EN", "")


def test_text_that_is_not_part_of_a_stop_string_is_never_late():
    """Public reports: vLLM #13087, PR #31135; llama.cpp #10914."""
    state = make_state(stop=["\n\nObservation:"])
    _, deltas = run(state, b"hello")
    assert deltas == [(c, [ord(c)]) for c in "hello"]


def test_min_tokens_keeps_stop_strings_from_ending_it():
    """Public reports: vLLM #4180, PR #5849."""
    state = make_state(stop=["ab"], min_tokens=3)
    taken, _ = run(state, b"ababab")
    assert taken == 4
    assert state.text == "ab"


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "hi"),
        ({"skip_special_tokens": False}, "hi"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "hi</s>"),
        ({"include_stop_str_in_output": True}, "hi"),
    ],
    ids=str,
)
def test_the_text_of_end_of_sequence_is_hidden_but_its_id_is_kept(params, text):
    """Public reports: vLLM PR #55483, TensorRT-LLM PR #18190."""
    state = make_state(**params, logprobs=0)
    run(state, b"hi")
    state.append(token(EOS), "stop")
    output = state.snapshot()
    assert (output.text, output.token_ids) == (text, [104, 105, EOS])
    assert (len(output.logprobs), output.finish_reason, output.stop_reason) == (3, "stop", None)


def test_the_text_of_a_stop_token_is_hidden():
    """Public report: vLLM PR #55483."""
    state = make_state(stop_ids=(EOS, ord("!")))
    run(state, b"hi")
    state.append(token(ord("!")), "stop", ord("!"))
    assert (state.text, state.stop_reason) == ("hi", ord("!"))


def test_end_of_sequence_that_does_not_end_it_is_a_token_like_others():
    """Public reports: vLLM #4180, PR #4468 (ignore_eos)."""
    state = make_state(stop_ids=(), ignore_eos=True, skip_special_tokens=False)
    state.append(token(EOS))
    state.append(token(ord("a")), "length")
    assert state.text == "</s>a"


def test_a_character_in_parts_gives_tokens_first_and_text_with_the_last():
    """Public reports: llama-cpp-python #372, vllm #48853."""
    data = "\U0001f336".encode()
    state = make_state()
    _, deltas = run(state, data)
    assert deltas == [("", [b]) for b in data[:-1]] + [("\U0001f336", [data[-1]])]


def test_an_abort_shows_what_was_held_back_and_comes_once():
    state = make_state(stop=["END"])
    run(state, b"xE")
    state.finish("abort")
    state.finish("error")
    assert (state.text, state.finish_reason) == ("xE", "abort")


def test_a_snapshot_is_a_copy():
    state = make_state(logprobs=0)
    run(state, b"a")
    before = state.snapshot()
    run(state, b"b")
    assert (before.text, before.token_ids, len(before.logprobs)) == ("a", [97], 1)


def test_without_detokenizing_there_is_no_text_and_no_tokenizer():
    state = CompletionState(3, SamplingParams(detokenize=False, logprobs=1).resolved(), None, [1], ())
    state.append(token(5, top=[6]), "length")
    output = state.snapshot()
    assert (output.index, output.text, output.token_ids) == (3, "", [5])
    assert output.logprobs == [{5: Logprob(-0.5, 2), 6: Logprob(-0.1, 1)}]


def test_missing_parts_are_named():
    with pytest.raises(ValueError, match="needs a tokenizer"):
        CompletionState(0, SamplingParams().resolved(), None, [], ())
    with pytest.raises(ValueError, match="sampled without"):
        make_state(logprobs=1).append(Sampled(3))


def test_a_prompt_position_is_reported_with_the_actual_token_first():
    entry = logprob_dict(token(97, top=[98, 97]), Bytes())
    assert list(entry) == [97, 98]
    assert entry[97] == Logprob(-0.5, 2, "a")


@settings(max_examples=300)
@given(
    ids=st.lists(st.sampled_from([*b"abE\n", *"\U0001f336".encode(), EOS, WORD]), max_size=30),
    takes=st.lists(st.booleans(), min_size=31, max_size=31),
    stop=st.lists(st.sampled_from(["ab", "E\nE", "two", "\U0001f336a", "one two threeb"]), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
    ending=st.sampled_from(["length", "abort", "stop", None]),
)
def test_deltas_taken_at_any_time_join_to_the_snapshot(ids, takes, stop, include, min_tokens, ending):
    """Public reports: vLLM #13087, PR #47616; TensorRT-LLM PR #18190."""
    state = make_state(
        stop=stop,
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
        logprobs=1,
        skip_special_tokens=False,
    )
    deltas = []
    for n, i in enumerate(ids):
        last = n == len(ids) - 1
        state.append(token(i, top=[97]), ending if last and ending in ("length", "stop") else None)
        if takes[n]:
            deltas.append(state.delta())
    if ending == "abort":
        state.finish("abort")
    deltas.append(state.delta())
    whole = state.snapshot()
    assert "".join(d.text for d in deltas) == whole.text
    assert [i for d in deltas for i in d.token_ids] == whole.token_ids
    assert [entry for d in deltas for entry in d.logprobs] == whole.logprobs
    assert all(len(d.token_ids) == len(d.logprobs) for d in deltas)
    assert len(whole.token_ids) == len(whole.logprobs)
    assert whole.cumulative_logprob == pytest.approx(-0.5 * len(whole.token_ids))
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (whole.finish_reason, whole.stop_reason)
    if whole.stop_reason is not None and include:
        assert whole.text.endswith(whole.stop_reason)


@pytest.mark.parametrize(
    ("stop", "text"),
    [("</s>", "ab"), ("b</s>", "a"), ("</s>c", "ab"), ("/s", "ab"), ("s>c", "ab"), ("b</s>c", "a")],
)
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_may_lie_in_the_text_of_a_special_token(stop, text, skip, include):
    """As transformers' ``stop_strings``; the text of the token stays hidden with ``skip_special_tokens``."""
    state = make_state(
        stop_ids=(), stop=[stop], skip_special_tokens=skip, include_stop_str_in_output=include, logprobs=0
    )
    taken, _ = run(state, [ord("a"), ord("b"), EOS, ord("c"), ord("d")])
    output = state.snapshot()
    assert taken == (4 if stop.endswith("c") else 3)
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert len(output.logprobs) == len(output.token_ids) == taken
    whole = "ab</s>c"
    end = whole.index(stop) + (len(stop) if include else 0)
    assert output.text == "".join(c for i, c in enumerate(whole[:end]) if not (skip and 2 <= i < 6))


def test_special_tokens_do_not_part_a_stop_string_that_has_nothing_of_them():
    state = make_state(stop_ids=(), stop=["ab", "</s>x"])
    assert run(state, [ord("a"), EOS, ord("b")])[0] == 3
    assert (state.text, state.stop_reason) == ("", "ab")


def test_what_was_held_back_for_a_special_token_comes_without_it():
    state = make_state(stop_ids=(), stop=["b</s>c"])
    _, deltas = run(state, [ord("a"), ord("b"), EOS, ord("d")])
    assert [text for text, _ in deltas] == ["a", "", "", "bd"]
    state = make_state(stop_ids=(), stop=["b</s>c"])
    run(state, [ord("a"), ord("b"), EOS])
    state.finish("length")
    assert state.text == "ab"


def test_a_resumed_output_knows_of_the_special_tokens_before():
    state = make_state(stop_ids=(), stop=["b</s>c"])
    state.resume([ord("a"), ord("b"), EOS])
    assert state.append(token(ord("c"))) is True
    assert state.stop_reason == "b</s>c"


def test_min_tokens_holds_for_stop_strings_that_are_special_tokens():
    state = make_state(stop_ids=(), stop=["</s>"], min_tokens=2)
    assert run(state, [EOS, ord("a"), EOS, ord("b")])[0] == 3
    assert state.text == "a"


def test_logprobs_have_the_true_bytes_of_parts_of_characters():
    state = make_state(logprobs=2)
    data = "é".encode()
    for i in data:
        state.append(token(i, top=[i, 0xFF]))
    entries = state.snapshot().logprobs
    assert [entry[i].utf8 for entry, i in zip(entries, data)] == [b"\xc3", b"\xa9"]
    assert [item.token for item in entries[0].values()] == ["bytes:\\xc3", "bytes:\\xff"]
    assert {item.decoded_token for item in entries[0].values()} == {"\ufffd"}
