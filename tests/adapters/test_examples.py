"""The examples run as they are, on the demo model, and say what they need where it is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from demo_model import needs_demo

EXAMPLES = Path(__file__).parents[2] / "examples"
WITHOUT = """
import runpy, sys

class Missing:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
sys.path.insert(0, {folder!r})
runpy.run_path({path!r}, run_name="__main__")
"""


def run(name: str, *arguments: str, missing: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    path = str(EXAMPLES / name)
    code = WITHOUT.format(names=missing, folder=str(EXAMPLES), path=path)
    command = ["-c", code] if missing else [path]
    return subprocess.run([sys.executable, *command, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("name", "missing", "extra"),
    [
        ("agent_with_tool.py", "langchain_core", "langchain"),
        ("rag_langchain.py", "langchain_core", "langchain"),
        ("structured_extraction.py", "langchain_core", "langchain"),
        ("query_llama_index.py", "llama_index", "llama-index"),
        ("streaming.py", "llama_index", "llama-index"),
        ("openai_client.py", "openai", "server"),
    ],
)
def test_an_example_whose_packages_are_missing_names_what_to_install(name, missing, extra):
    done = run(name, missing=(missing,))
    assert done.returncode == 1
    assert f"pip install 'paged-backend[{extra}]'" in done.stderr.splitlines()[-1]
    needs = re.search(
        r"^Needs: pip install 'paged-backend\[(.*)\]'$", (EXAMPLES / name).read_text("utf-8"), re.M
    )
    assert needs is not None
    assert extra in needs[1].split(",")


@pytest.mark.slow
@needs_demo
def test_the_questions_of_the_retrieval_example_share_their_instructions():
    pytest.importorskip("langchain_core")
    done = run("rag_langchain.py")
    assert done.returncode == 0, done.stderr
    cached = [int(count) for count in re.findall(r"(\d+) from the cache", done.stdout)]
    assert sorted(count > 0 for count in cached) == [False, True, True]


@pytest.mark.slow
@needs_demo
def test_the_client_example_talks_to_its_own_server_and_prints_nothing_else():
    pytest.importorskip("openai")
    pytest.importorskip("uvicorn")
    done = run("openai_client.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    begins = [line.partition(":")[0] for line in done.stdout.splitlines() if re.match(r"\w+:", line)]
    assert [word for word in begins if word in ("answer", "stream", "object", "call")] == [
        "answer", "stream", "object", "call",
    ]  # fmt: skip


@pytest.mark.slow
@needs_demo
@pytest.mark.parametrize(
    ("name", "package", "says"),
    [
        ("agent_with_tool.py", "langchain_core", [r"^calls search_garden\(", r"^finds ", r"^answers "]),
        ("structured_extraction.py", "langchain_core", [r'^\w+\.md: {"title":.*"one_sentence":.*}$'] * 5),
        ("query_llama_index.py", "llama_index", [r"^Q: .*\?$", r"^A: .+"] * 3),
        ("streaming.py", "llama_index", [r"^LangChain .*: .", r"^LlamaIndex .*: .", "^engine: .", ": 0$"]),
    ],
)
def test_an_example_runs_and_says_what_it_is_about(name, package, says):
    pytest.importorskip(package)
    done = run(name)
    assert done.returncode == 0, done.stderr
    rest = done.stdout.replace("\r", "\n")
    for pattern in says:
        found = re.search(pattern, rest, re.M)
        assert found is not None, (pattern, done.stdout)
        rest = rest[found.end() :]
