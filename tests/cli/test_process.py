"""What only a process of its own can show: pipes, signals, and how light the start is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

OPTIONS = ["--kernels", "reference", "--num-blocks", "2048", "--temperature", "0", "--ignore-eos"]


@pytest.fixture
def start(model, quiet_env):
    started = []

    def call(command, *arguments, model=model):
        process = subprocess.Popen(
            [sys.executable, "-m", "paged_backend", command, str(model), *arguments, *OPTIONS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=quiet_env,
            # a test run started in the background by a shell ignores SIGINT, and its children would inherit that
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield call
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["--version"], ["run", "x", "--top-p", "9"]]
)
def test_help_and_usage_errors_import_neither_torch_nor_transformers(arguments, quiet_env):
    code = (
        "import sys\n"
        "from paged_backend.cli.app import main\n"
        f"sys.argv = ['paged-backend', *{arguments!r}]\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=quiet_env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_imports_nothing_that_only_other_commands_need(model, quiet_env):
    """Every module on the way to the first token is time until the first token."""
    code = (
        "import sys\n"
        "from paged_backend.cli.app import main\n"
        f"sys.argv = ['paged-backend', 'run', {model!r}, 'five jugs', '--text', '--max-tokens', '2']\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "others = {'cli.bench', 'cli.chat', 'cli.doctor', 'cli.openai_batch', 'cli.serve', 'server', 'remote'}\n"
        "libraries = {'asyncio', 'torch', 'transformers', 'rich', 'httpx', 'openai', 'fastapi', 'scipy', 'pandas'}\n"
        "unused = {f'paged_backend.{name}' for name in others} | libraries\n"
        "print(sorted(unused & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=quiet_env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_a_slow_pipe_gets_each_result_before_it_sends_the_next_line(start):
    process = start("run", "--max-tokens", "4")
    for word in (b"five jugs\n", b"a box\n"):
        process.stdin.write(word)
        process.stdin.flush()
        assert "text" in json.loads(process.stdout.readline())
    rest, errors = process.communicate()
    assert (rest, errors, process.returncode) == (b"", b"", 0)


def test_a_reader_that_goes_away_ends_the_run_without_a_traceback(start):
    process = start("run", "--max-tokens", "40")
    process.stdin.write(b"five jugs\n" * 300)
    process.stdin.close()
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait() == 128 + signal.SIGPIPE
    assert errors == b""


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "é 水".encode()),
        ({"PYTHONIOENCODING": "cp1252"}, b"\xe9 ?"),
    ],
    ids=["a locale of few characters", "a code page"],
)
def test_text_that_the_locale_cannot_write_is_written(settings, shown, quiet_env):
    code = (
        "import sys, typer, paged_backend.cli.app as app\n"
        "app.app = lambda: typer.echo('\\u00e9 \\u6c34')\n"
        "app.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**quiet_env, **settings}, capture_output=True)
    assert (done.stdout.rstrip(), done.stderr) == (shown, b"")


def test_a_full_disk_ends_a_run_with_one_line(model, quiet_env):
    if not os.path.exists("/dev/full"):
        pytest.skip("the system has no /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "paged_backend", "run", model, "five jugs", "--max-tokens", "4", *OPTIONS],
            stdout=full,
            stderr=subprocess.PIPE,
            env=quiet_env,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == "paged-backend: cannot write the output: No space left on device\n"


@pytest.mark.parametrize("wait", [True, False], ids=["pipe that closes later", "/dev/null"])
def test_no_prompts_are_said_and_nothing_is_loaded_for_an_empty_stdin(start, quiet_env, wait):
    if wait:
        process = start("run")
        _, errors = process.communicate()
    else:
        command = [sys.executable, "-m", "paged_backend", "run", "/no/such/model"]
        process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=quiet_env)
        errors = process.stderr
    assert process.returncode == 2
    assert b"no prompts" in errors
    assert b"/no/such/model" not in errors


def test_ctrl_c_while_a_chat_loads_its_model_says_interrupted(start, model, tmp_path):
    for file in Path(model).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    process = start("chat", model=tmp_path)
    with open(tmp_path / "config.json", "w"):  # opens when the other end does
        process.send_signal(signal.SIGINT)
        process.wait()
    _, errors = process.communicate()
    assert process.returncode == 128 + signal.SIGINT
    assert errors == b"paged-backend: interrupted\n"


def test_ctrl_c_ends_a_run_without_a_traceback(start):
    process = start("run", "--text", "--max-tokens", "15000", "five jugs")
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 128 + signal.SIGINT
    assert b"Traceback" not in errors


def test_ctrl_c_in_a_chat_stops_the_answer_and_the_chat_goes_on(start):
    process = start("chat", "--max-tokens", "15000")
    process.stdin.write(b"five jugs\n")
    process.stdin.flush()
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(b"/stats\n/exit\n")
    assert process.returncode == 0, errors
    assert b"(abort)" in said
