"""A batch in OpenAI's form: every line is answered as the server would, and a bad one fails alone."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

pytest.importorskip("fastapi")

from paged_backend.cli import openai_batch
from paged_backend.cli.app import app
from paged_backend.config import EngineConfig

OPTIONS = ["--kernels", "reference", "--num-blocks", "128", "--max-model-len", "1024", "--engine-seed", "3"]


def line(custom_id, url, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 4}
TEXT = {"prompt": "five jugs", "temperature": 0, "max_tokens": 4, "logprobs": 1}
GOOD = [
    line("chat", "/v1/chat/completions", model="m", **CHAT),
    line("text", "/v1/completions", **TEXT),
    line("two", "/v1/completions", **{**TEXT, "prompt": ["a", "b"]}),
    line("response", "/v1/responses", input="hi", temperature=0, max_output_tokens=4),
]


@pytest.fixture
def run(model, tmp_path):
    def call(lines, *arguments, name="in.jsonl"):
        path = tmp_path / name
        path.write_text(
            "".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines), "utf-8"
        )
        result = CliRunner().invoke(app, ["run", model, "--input", str(path), *arguments, *OPTIONS])
        return result, {r["custom_id"]: r for r in map(json.loads, result.stdout.splitlines())}

    return call


def test_lines_are_answered_in_openais_form(run):
    result, found = run(GOOD, "--served-model-name", "m")
    assert result.exit_code == 0, result.output
    assert len({record["id"] for record in found.values()}) == len(GOOD) == len(found)
    for record in found.values():
        assert set(record) == {"id", "custom_id", "response", "error"}
        assert record["error"] is None
        assert record["response"]["status_code"] == 200
        assert record["response"]["request_id"]
    bodies = {name: record["response"]["body"] for name, record in found.items()}
    assert bodies["chat"]["object"] == "chat.completion"
    assert bodies["chat"]["model"] == "m"
    assert len(bodies["two"]["choices"]) == 2
    assert len(bodies["text"]["choices"][0]["logprobs"]["tokens"]) == 4
    assert bodies["response"]["object"] == "response"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("nonsense\n", "Expecting value"),
        ("[1]\n", "expected a JSON object"),
        (line(1, "/v1/completions", **TEXT), "'custom_id' must be text"),
        (line("bad", "/v2/completions", **TEXT), "'url' must be one of"),
        (line("bad", "/v1/completions", stream=True, **TEXT), "'stream' has no place"),
        ({**line("bad", "/v1/completions", **TEXT), "method": "GET"}, "'method' must be POST"),
        ({**line("bad", "/v1/completions"), "body": 1}, "'body' must be an object"),
        ({**line("bad", "/v1/completions", **TEXT), "params": {}}, "unknown field 'params'"),
    ],
)
def test_a_line_that_is_no_request_fails_alone(run, bad, message):
    result, found = run([GOOD[1], bad, line("last", "/v1/completions", **TEXT)])
    assert result.exit_code == 1
    assert (
        found.pop("text")["response"]["body"]["choices"] == found.pop("last")["response"]["body"]["choices"]
    )
    ((_, record),) = found.items()
    assert record["response"] is None
    assert record["error"]["code"] == "invalid_line"
    assert record["error"]["message"].startswith("line 2: ")
    assert message in record["error"]["message"]
    assert f"line 2: {message}" in result.stderr or message in result.stderr


@pytest.mark.parametrize(
    ("bad", "status", "message"),
    [
        (line("bad", "/v1/completions", **TEXT, temprature=1), 400, "temprature"),
        (line("bad", "/v1/completions", **TEXT, model="gpt-4o"), 404, "gpt-4o"),
        (line("bad", "/v1/embeddings", input="hi"), 400, "embeddings are not supported"),
        (line("bad", "/v1/completions", prompt="a " * 2000), 400, "context"),
    ],
)
def test_a_request_that_is_refused_has_the_servers_answer(run, bad, status, message):
    result, found = run([bad, GOOD[1]])
    assert result.exit_code == 1
    assert found["text"]["response"]["status_code"] == 200
    assert found["bad"]["response"]["status_code"] == status
    assert message in found["bad"]["response"]["body"]["error"]["message"]
    assert "line 1: " in result.stderr


def test_results_go_to_a_file(run, tmp_path):
    out = tmp_path / "out.jsonl"
    result, found = run(GOOD[:2], "--output", str(out), "--served-model-name", "m")
    assert (result.exit_code, found) == (0, {})
    assert {json.loads(text)["custom_id"] for text in out.read_text("utf-8").splitlines()} == {"chat", "text"}


def test_results_of_other_inputs_go_to_a_file_too(run, tmp_path):
    out = tmp_path / "out.jsonl"
    result, _ = run([{"prompt": "jugs", "id": "x"}], "--output", str(out), "--max-tokens", "2")
    assert (result.exit_code, result.stdout) == (0, "")
    assert json.loads(out.read_text("utf-8"))["id"] == "x"


def test_what_a_batch_has_no_use_for_is_a_usage_error(run, tmp_path):
    for arguments in (["--text"], ["--chat"], ["--temperature", "0"]):
        result, _ = run(GOOD, *arguments)
        assert result.exit_code == 2
        assert "leave out" in result.stderr
    result, _ = run([{"prompt": "jugs"}], "--served-model-name", "m")
    assert result.exit_code == 2
    result, _ = run(GOOD, "--output", str(tmp_path / "no" / "where"))
    assert result.exit_code == 2
    result, _ = run(GOOD, name="batch.txt")
    assert (result.exit_code, "--format openai" in result.stderr) == (2, True)


def test_no_more_lines_are_read_than_there_is_room_for(model):
    read, written, most = 0, 0, 0

    def lines():
        nonlocal read, most
        for number in range(3000):
            read += 1
            most = max(most, read - written)
            yield number, json.dumps(line(str(number), "/v1/completions", prompt="a", max_tokens=1)).encode()

    def write(record):
        nonlocal written
        assert record["response"]["status_code"] == 200
        written += 1

    config = EngineConfig(model, kernels="reference", num_blocks=128, max_model_len=64)
    assert openai_batch.run_batch(config, (), lines(), write, False)
    assert written == 3000
    assert most <= 1024 + 3 * openai_batch.LINES_AHEAD


def test_output_that_cannot_be_written_ends_the_run(model):
    def write(record):
        raise OSError(28, "no space left")

    config = EngineConfig(model, kernels="reference", num_blocks=128, max_model_len=64)
    lines = (
        (i, json.dumps(line("a", "/v1/completions", prompt="a", max_tokens=1)).encode()) for i in range(10**9)
    )
    with pytest.raises(OSError, match="no space"):
        openai_batch.run_batch(config, (), lines, write, False)
