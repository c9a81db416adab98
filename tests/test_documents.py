"""The snippets of the documents run as they stand there, each in an interpreter of its own."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from demo_model import needs_demo

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/huggingface.md")
ALL_PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
PROGRAMS = {"paged-backend": "paged_backend.cli.app", "python -m benchmarks": "benchmarks.__main__"}
SERVER = "http://127.0.0.1:8000/v1"
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")


def snippets(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


SNIPPETS = [(page, number) for page in PAGES for number in range(len(snippets(page)))]


@pytest.mark.slow
@needs_demo
@pytest.mark.parametrize(("page", "number"), SNIPPETS)
def test_a_snippet_runs(page: str, number: int, tmp_path: Path) -> None:
    code = snippets(page)[number]
    for package in ("langchain_core", "llama_index.core", "openai"):
        if package.partition(".")[0] in code or (
            package == "langchain_core" and "adapters.langchain" in code
        ):
            pytest.importorskip(package)
    if SERVER in code:  # the example has a way to start a server for itself
        code = (
            f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r})\n"
            "from openai_client import demo_server\n"
            f"with demo_server() as url:\n    exec({code!r}.replace({SERVER!r}, url))\n"
        )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("page", ALL_PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target, heading in LINK.findall(text):
        file = (ROOT / page).parent / target if target else ROOT / page
        assert file.exists(), f"{page} links to {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, f"{page} links to {target}#{heading}"


def commands(page: str) -> list[tuple[str, list[str]]]:
    """(program, arguments) of each command in a block or between backticks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    spans = [re.sub(r"^```\w*\n|```$", "", block) for block in re.findall(r"^```.*?^```$", text, re.M | re.S)]
    rest = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    spans += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest)]
    found = []
    for line in "\n".join(spans).replace("\\\n", " ").splitlines():
        for program in PROGRAMS:
            for piece in re.findall(rf"(?:^|[|&] +|\d ){re.escape(program)}( [^|&>]*)?", line):
                found.append((program, shlex.split(piece, comments=True)))
    return found


def parse(command: Any, name: str, arguments: list[str], parent: Any = None) -> None:
    """Everything that the command line does before it runs a command. Raises click's errors for what it refuses."""
    try:
        context = command.make_context(name, list(arguments), parent=parent)
    except typer.Exit:  # --help and the like
        return
    with context:
        rest = [*context._protected_args, *context.args]
        if hasattr(command, "commands") and rest:
            name, inner, left = command.resolve_command(context, rest)
            parse(inner, name, left, context)


@pytest.mark.parametrize(
    ("page", "program", "arguments"), [(page, *command) for page in ALL_PAGES for command in commands(page)]
)
def test_a_command_is_one_that_the_command_line_takes(page: str, program: str, arguments: list[str]) -> None:
    module = __import__(PROGRAMS[program], fromlist=["app"])
    parse(typer.main.get_command(module.app), program, arguments)


def test_every_folder_and_file_that_the_readme_names_for_its_promises_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[^`]+)`", text)
    assert len(named) > 8
    assert [path for path in named if not (ROOT / path).exists()] == []
