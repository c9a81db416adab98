"""``paged-backend run``, in this process on a tiny model."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from paged_backend import LLM, EngineConfig, SamplingParams, __version__
from paged_backend.cli.app import app
from paged_backend.cli.flags import ENGINE, SAMPLING

OPTIONS = ["--kernels", "reference", "--num-blocks", "128", "--max-model-len", "1024"]
GREEDY = ["--temperature", "0", "--max-tokens", "6", "--ignore-eos"]


@pytest.fixture
def run(model):
    def call(*arguments, stdin=None, options=OPTIONS, sampling=GREEDY):
        return CliRunner().invoke(app, ["run", model, *arguments, *sampling, *options], input=stdin)

    return call


def records(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


def by_index(result):
    return sorted(records(result), key=lambda record: record["index"])


def write_lines(path, lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return str(path)


# --- prompts in, objects out -----------------------------------------------------------------------------------------


def test_each_prompt_gives_one_object_with_text_reason_and_usage(run):
    result = run("five jugs", "a box", "my liquor", "--no-chat")
    assert result.exit_code == 0, result.output
    assert [r["index"] for r in by_index(result)] == [0, 1, 2]
    for record in records(result):
        assert set(record) == {"index", "text", "finish_reason", "usage"}
        assert record["finish_reason"] == "length"
        assert record["usage"]["completion_tokens"] == 6


def test_the_text_is_what_the_library_gives(run, model):
    prompts = ["five jugs", "a box"]
    result = run(*prompts, "--no-chat")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(model, kernels="reference", num_blocks=128, max_model_len=1024) as llm:
        expected = [o.outputs[0].text for o in llm.generate(prompts, params, use_tqdm=False)]
    assert [r["text"] for r in by_index(result)] == expected


def test_a_short_request_is_printed_before_a_long_one_that_came_first(run, tmp_path):
    lines = [
        {"prompt": "box", "params": {"max_tokens": 400}},
        {"prompt": "jugs", "params": {"max_tokens": 1}},
    ]
    result = run("--input", write_lines(tmp_path / "in.jsonl", lines))
    assert [r["index"] for r in records(result)] == [1, 0]


def test_a_text_file_is_one_prompt_per_line_and_empty_lines_are_skipped(run, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbffive jugs\r\n\n   \na box")
    result = run("--input", str(path), "--no-chat")
    assert by_index(result) == by_index(run("five jugs", "a box", "--no-chat"))


def test_prompts_come_from_stdin_when_none_are_given(run):
    result = run("--no-chat", stdin="five jugs\na box\n")
    assert by_index(result) == by_index(run("five jugs", "a box", "--no-chat"))


def test_stdin_may_be_jsonl_too(run):
    result = run("--input", "-", "--format", "jsonl", stdin='{"prompt_token_ids": [5, 6, 7], "id": "x"}\n')
    (record,) = records(result)
    assert record["id"] == "x"
    assert record["usage"]["prompt_tokens"] == 3


def test_jsonl_lines_have_prompts_messages_or_ids_and_params_of_their_own(run, tmp_path):
    lines = [
        {"prompt": "five jugs", "id": 7},
        {"messages": [{"role": "user", "content": "five jugs"}], "id": {"any": "json"}},
        {"prompt_token_ids": [5, 6, 7], "params": {"max_tokens": 2}},
        {"prompt": "a box", "params": {"n": 2, "temperature": 1.0, "seed": 3}},
    ]
    result = run("--input", write_lines(tmp_path / "in.jsonl", lines))
    assert result.exit_code == 0, result.output
    first, second, third, fourth = by_index(result)
    assert first["id"] == 7
    assert second["id"] == {"any": "json"}
    assert first["text"] == second["text"]  # a plain prompt is a user's message when the model has a template
    assert third["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 0}
    assert [o["index"] for o in fourth["outputs"]] == [0, 1]
    assert fourth["usage"]["completion_tokens"] == 12


def test_an_empty_input_is_no_error(run, tmp_path):
    path = tmp_path / "empty.txt"
    path.touch()
    result = run("--input", str(path))
    assert (result.exit_code, result.stdout) == (0, "")


def test_more_requests_than_seats_all_get_their_answer(run):
    result = run(*["five jugs", "a box"] * 20, options=[*OPTIONS, "--max-num-seqs", "3"])
    assert [r["index"] for r in by_index(result)] == list(range(40))
    assert len({r["text"] for r in records(result)}) == 2


def test_a_repeated_prompt_reports_cached_tokens(run):
    prompt = "pack my box with five dozen liquor jugs and then pack another box " * 2
    once, again = by_index(run(prompt, prompt, options=[*OPTIONS, "--max-num-seqs", "1"]))
    assert once["usage"]["cached_tokens"] == 0
    assert again["usage"]["cached_tokens"] >= 16
    assert once["text"] == again["text"]


@pytest.mark.parametrize(
    ("name", "stdin"),
    [("requests.txt", False), ("requests.json", False), (None, True)],
)
def test_requests_in_json_are_not_run_as_text_by_mistake(run, tmp_path, name, stdin):
    line = '{"prompt": "five jugs"}\n'
    arguments = []
    if name is not None:
        (tmp_path / name).write_text(f"\n{line}", encoding="utf-8")
        arguments = ["--input", str(tmp_path / name)]
    result = run(*arguments, stdin=line if stdin else None)
    assert result.exit_code == (1 if stdin else 2)  # what a pipe has is known only when it comes
    assert "this looks like JSONL: --format jsonl" in result.stderr
    assert "text" not in result.stdout.replace("--format text", "")
    assert run(*arguments, "--format", "text", stdin=line if stdin else None).exit_code == 0
    (record,) = records(run(*arguments, "--format", "jsonl", stdin=line if stdin else None))
    assert "text" in record


def test_text_that_only_begins_like_json_is_a_prompt(run, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text('{"a": 1} is JSON\n{"colour": "red"}\n', encoding="utf-8")
    result = run("--input", str(path))
    assert [set(record) >= {"text"} for record in records(result)] == [True, True]


def test_a_named_pipe_gives_all_its_lines(run, tmp_path):
    pipe = tmp_path / "prompts"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("five jugs\na box\n"))
    writer.start()
    result = run("--input", str(pipe))
    writer.join()
    assert [r["index"] for r in by_index(result)] == [0, 1]


def test_an_empty_stdin_is_no_prompt(run):
    result = run(stdin="")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "paged-backend: no prompts: give them as arguments, with --input, or on stdin\n"


# --- the chat template -----------------------------------------------------------------------------------------------


def test_the_template_is_applied_by_default_and_no_chat_leaves_it_out(run):
    (with_template,) = records(run("jugs"))
    (without,) = records(run("jugs", "--no-chat"))
    assert with_template["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"]


def test_messages_use_the_template_even_with_no_chat(run, tmp_path):
    lines = [{"messages": [{"role": "user", "content": "jugs"}]}]
    (record,) = records(run("--no-chat", "--input", write_lines(tmp_path / "in.jsonl", lines)))
    assert record["usage"] == records(run("jugs"))[0]["usage"]


# --- options ---------------------------------------------------------------------------------------------------------


def test_every_sampling_parameter_that_a_command_line_can_say_is_a_flag():
    command_s_own = {"output_kind", "detokenize"}  # how a stream is cut, and that there is text at all
    objects = {"logits_processors", "stop_criteria", "beam_search"}
    assert set(SAMPLING) == {f.name for f in fields(SamplingParams)} - command_s_own - objects


def test_every_engine_option_is_a_flag():
    assert set(ENGINE) == {f.name for f in fields(EngineConfig)} - {"model", "trust_remote_code"}


def test_logprobs_are_reported_per_token_in_step_with_the_text(run):
    (record,) = records(run("five jugs", "--logprobs", "2", "--prompt-logprobs", "0"))
    assert len(record["logprobs"]) == 6
    best = record["logprobs"][0]["top"][0]
    assert (best["rank"], best["token_id"]) == (1, record["logprobs"][0]["token_id"])  # greedy
    assert record["cumulative_logprob"] == pytest.approx(sum(p["logprob"] for p in record["logprobs"]))
    assert record["prompt_logprobs"][0] is None
    assert len(record["prompt_logprobs"]) == record["usage"]["prompt_tokens"]


def test_repeated_flags_and_json_flags_reach_the_sampler(run):
    allowed = [
        "--allowed-token-ids",
        "40",
        "--allowed-token-ids",
        "41",
        "--logit-bias",
        '{"41": 50}',
        "--logprobs",
        "0",
    ]
    (record,) = records(run("five jugs", *allowed))
    assert [p["token_id"] for p in record["logprobs"]] == [41] * 6


def test_the_form_of_the_answer_may_be_given_by_flag_and_by_line(run, tmp_path):
    lines = [{"prompt": "jugs"}, {"prompt": "jugs", "params": {"structured_outputs": {"choice": ["maybe"]}}}]
    form = ["--structured-outputs", '{"regex": "yes|no"}']
    result = run("--input", write_lines(tmp_path / "in.jsonl", lines), sampling=["--temperature", "0", *form])
    first, second = by_index(result)
    assert first["text"] in ("yes", "no")
    assert second["text"] == "maybe"


def test_equal_seeds_give_equal_samples(run):
    sampling = ["--temperature", "1", "--seed", "5", "--max-tokens", "8"]
    first, second = by_index(run("jugs", "jugs", sampling=sampling))
    assert first["text"] == second["text"]
    assert records(run("jugs", sampling=sampling))[0]["text"] == first["text"]


def test_a_stop_text_ends_the_answer(run):
    (whole,) = records(run("five jugs"))
    stop = whole["text"][2:4]
    (record,) = records(run("five jugs", "--stop", stop))
    assert record["finish_reason"] == "stop"
    assert record["stop_reason"] == stop
    assert stop not in record["text"]


def test_text_streams_the_same_text_without_json(run):
    (record,) = records(run("five jugs"))
    result = run("five jugs", "--text")
    assert result.stdout == record["text"] + "\n"


def test_progress_goes_to_stderr_and_only_if_asked_or_on_a_terminal(run):
    assert run("jugs").stderr == ""
    result = run("jugs", "box", "--progress")
    assert "2/2" in result.stderr
    assert len(records(result)) == 2


# --- bad input -------------------------------------------------------------------------------------------------------


def test_bad_lines_are_reported_with_their_number_and_the_rest_runs(run, tmp_path):
    path = tmp_path / "in.jsonl"
    good = b'{"prompt": "jugs"}'
    bad = [
        (b"{nonsense", "not valid JSON"),
        (b'["jugs"]', "expected a JSON object"),
        (b'{"prompt": "jugs", "temperature": 0}', "unknown field 'temperature'"),
        (b'{"prompt": "jugs", "messages": []}', "exactly one of"),
        (b'{"id": "empty"}', "exactly one of"),
        (b'{"prompt": [1, 2]}', "must be text"),
        (b'{"prompt": "jugs", "params": {"temprature": 0}}', "did you mean 'temperature'"),
        (b'{"prompt": "jugs", "params": {"top_p": 7}}', "top_p must be"),
        (b'{"prompt": "jugs", "params": {"n": "two"}}', "n must be"),
        (b'{"prompt": "jugs", "params": 3}', "'params' must be"),
        (b'{"prompt_token_ids": [5, 300]}', "outside the vocabulary"),
        (b'{"prompt_token_ids": []}', "empty"),
        (b'{"prompt_token_ids": 5}', "prompt"),
        (b'{"messages": "jugs"}', "message"),
        (b'{"prompt": "\xff"}', "not valid UTF-8"),
        (json.dumps({"prompt_token_ids": [5] * 2000}).encode(), "context"),
    ]
    path.write_bytes(b"\n".join([good, *(line for line, _ in bad), good]) + b"\n")
    result = run("--input", str(path))
    assert result.exit_code == 1
    found = by_index(result)
    assert len(found) == len(bad) + 2
    assert found[0]["text"] == found[-1]["text"]
    for record, (line, expected) in zip(found[1:], bad):
        assert expected in record["error"]["message"], line
        assert f"line {record['index'] + 1}: " in result.stderr
    assert found[5]["id"] == "empty"
    assert "Traceback" not in result.stderr


def test_an_empty_prompt_is_refused_and_named(run):
    result = run("", "jugs", "--no-chat")
    assert result.exit_code == 1
    assert "prompt 1: the prompt is empty" in result.stderr
    assert "text" in by_index(result)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature must be"),
        (["--block-size", "12"], "power of two"),
        (["--kernels", "fast"], "kernels must be"),
        (["--num-blocks", "9", "--kv-cache-memory", "9999"], "not both"),
        (["--logit-bias", "[1]"], "JSON object"),
        (["--logit-bias", '{"a": 1}'], "logit_bias must map"),
        (["--format", "csv", "-i", "-"], "--format"),
        (["--input", "/nonexistent/prompts.txt"], "cannot read"),
        (["jugs", "--input", "-"], "not both"),
        (["jugs", "box", "--text"], "one prompt"),
        (["jugs", "--text", "--logprobs", "1"], "no place for logprobs"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_bad_flags_are_usage_errors_before_the_model_is_opened(arguments, message):
    result = CliRunner().invoke(app, ["run", "/nonexistent/model", *arguments], terminal_width=400)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "/nonexistent/model" not in result.stderr


def test_the_input_is_not_written_over(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": "jugs"}])
    result = CliRunner().invoke(
        app, ["run", "/nonexistent/model", "-i", path, "-o", path], terminal_width=400
    )
    assert (result.exit_code, "is the input" in result.stderr) == (2, True)
    assert (tmp_path / "in.jsonl").read_text("utf-8")


def test_a_suffix_needs_a_model_that_fills_in(run, tmp_path):
    lines = [{"prompt": "a", "suffix": "b"}, {"messages": [], "suffix": "b"}, {"prompt": "jugs"}]
    found = by_index(run("--input", write_lines(tmp_path / "in.jsonl", lines)))
    assert "suffix is not supported" in found[0]["error"]["message"]
    assert "beside a prompt" in found[1]["error"]["message"]
    assert found[2]["text"]


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_missing_model_ends_with_one_clear_line(command, tmp_path):
    result = CliRunner().invoke(app, [command, str(tmp_path / "nothing" / "here.gguf")], input="hi\n")
    assert result.exit_code == 1
    assert result.stderr.startswith("paged-backend: cannot open")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["run", "chat"])
@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--device", "cuda"], "device='cpu'"),
        (["--kernels", "triton"], "Triton"),
        (["--kernels", "c"], "C compiler"),
    ],
)
def test_kernels_that_are_not_to_be_had_here_end_with_one_clear_line(
    command, arguments, hint, model, tmp_path, monkeypatch
):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PAGED_BACKEND_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    result = CliRunner().invoke(app, [command, model, *arguments], input="hi\n")
    assert result.exit_code == 1, result.exception
    assert result.stderr.splitlines()[-1].startswith("paged-backend: cannot ")
    assert hint in result.stderr


def test_a_misspelt_demo_is_answered_with_the_name():
    result = CliRunner().invoke(app, ["run", "dmeo", "hi"])
    assert result.exit_code == 1
    assert "did you mean 'demo'?" in result.stderr


def test_a_path_that_is_not_there_is_not_taken_for_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, kind in (("./nofolder", "folder"), (str(tmp_path / "none"), "folder"), ("x.gguf", "file")):
        result = CliRunner().invoke(app, ["run", name, "hi"])
        assert result.stderr == f"paged-backend: cannot open {name!r}: there is no {kind} {name!r}\n"


def test_slow_kernels_are_warned_of_in_one_line_without_source_code(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PAGED_BACKEND_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    result = run("five jugs", options=["--num-blocks", "128"])
    assert result.exit_code == 0
    assert result.stderr.startswith("paged-backend: using the slow numpy kernels: CC='no-such-compiler'")
    assert result.stderr.count("\n") == 1


def test_compiling_the_kernels_is_announced(run, tmp_path, monkeypatch):
    from paged_backend.kernels.cpu import build

    built = build.build()
    monkeypatch.setenv("PAGED_BACKEND_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_compile", lambda *arguments: arguments[-1].write_bytes(built.read_bytes()))
    result = run("five jugs", options=["--num-blocks", "128"])
    assert result.stderr == "paged-backend: compiling the kernels, once, about 10 s\n"


def test_a_folder_without_a_model_is_named(tmp_path):
    result = CliRunner().invoke(app, ["run", str(tmp_path), "hi"])
    assert result.exit_code == 1
    assert "config.json" in result.stderr


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("command", [["run"], ["chat"], ["serve"], ["bench", "throughput"]])
def test_help_never_cuts_the_name_of_an_option(command, width):
    shown = CliRunner().invoke(app, [*command, "--help"], terminal_width=width).stdout
    assert "…" not in shown
    flags = {
        **(SAMPLING if command[0] in ("run", "chat") else {}),
        **ENGINE,
    }
    for field, flag in flags.items():
        assert f"--{(flag.name or field).replace('_', '-')} " in shown.replace("\n", " ")
    assert "\nEngine:\n" in shown  # flags have headings


def test_help_tells_of_every_command():
    shown = CliRunner().invoke(app, ["--help"]).stdout
    listed = [line.split()[0] for line in shown.partition("Commands:\n")[2].splitlines()]
    assert listed == ["run", "chat", "serve", "doctor", "bench"]


def test_a_misspelt_command_is_refused_with_the_one_that_was_meant():
    result = CliRunner().invoke(app, ["serv", "demo"])
    assert result.exit_code == 2
    assert "No such command 'serv'" in result.stderr
    assert "'serve'" in result.stderr


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.stdout == f"paged-backend {__version__}\n"
