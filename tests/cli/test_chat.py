"""``paged-backend chat`` with piped input."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from paged_backend.cli.app import app

OPTIONS = ["--kernels", "reference", "--num-blocks", "256", "--max-model-len", "512"]
GREEDY = ["--temperature", "0", "--max-tokens", "8", "--ignore-eos"]


@pytest.fixture
def talk(model):
    def call(*lines, arguments=(), sampling=GREEDY):
        command = ["chat", model, *sampling, *OPTIONS, *arguments]
        return CliRunner().invoke(app, command, input="".join(f"{line}\n" for line in lines))

    return call


def stats(result):
    return [line for line in result.stdout.splitlines() if "prefix cache" in line]


def counts(line):
    words = line.replace(",", "").split()
    return int(words[1]), int(words[3])  # prompt tokens, cached tokens


def test_the_second_turn_finds_the_first_in_the_prefix_cache(talk):
    result = talk("pack my box with five dozen liquor jugs", "/stats", "and again", "/stats")
    assert result.exit_code == 0, result.output
    (first, cached_first), (second, cached_second) = map(counts, stats(result))
    assert cached_first == 0
    assert second > first
    assert cached_second >= first // 16 * 16 > 0


def test_reset_forgets_the_conversation(talk):
    result = talk("five jugs", "/stats", "/reset", "five jugs", "/stats")
    first, second = map(counts, stats(result))
    assert first[0] == second[0]


def test_the_system_message_stays_after_a_reset_and_can_be_removed(talk):
    result = talk(
        "/stats",
        "/system be brief",
        "hi",
        "/stats",
        "/reset",
        "hi",
        "/stats",
        "/system",
        "/reset",
        "hi",
        "/stats",
    )
    assert "no answer yet" in result.stdout
    one, two, three = map(counts, stats(result))
    assert one[0] == two[0] > three[0]
    assert counts(stats(talk("hi", "/stats", arguments=["--system", "be brief"]))[0])[0] == one[0]


@pytest.mark.parametrize("word", ["/exit", "/quit"])
def test_exit_and_quit_leave_before_the_end_of_the_input(talk, word):
    result = talk(word, "hi")
    assert (result.stdout, result.exit_code) == ("", 0)


def test_an_unknown_command_is_not_sent_to_the_model(talk):
    result = talk("/stop")
    assert result.stdout == ""
    assert "unknown command /stop" in result.stderr
    assert result.exit_code == 1


def test_a_turn_that_does_not_fit_the_context_is_taken_back_and_the_talk_goes_on(talk):
    result = talk("hi", "x" * 3000, "/stats", "ho", "/stats")
    assert "context" in result.stderr
    assert "/reset" in result.stderr
    before, after = map(counts, stats(result))
    assert before[0] < after[0] < 512


@pytest.mark.parametrize("flag", [["--n", "2"], ["--logprobs", "1"]])
def test_options_without_a_place_in_a_conversation_are_refused(talk, flag):
    result = talk("hi", arguments=flag, sampling=[])
    assert result.exit_code == 2
    assert flag[0] in result.stderr
