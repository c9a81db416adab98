"""The snippets of the documents run as they stand there, each in an interpreter of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from demo_model import needs_demo

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/huggingface.md")
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


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target, heading in LINK.findall(text):
        file = (ROOT / page).parent / target if target else ROOT / page
        assert file.exists(), f"{page} links to {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, f"{page} links to {target}#{heading}"


def test_every_folder_and_file_that_the_readme_names_for_its_promises_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[^`]+)`", text)
    assert len(named) > 8
    assert [path for path in named if not (ROOT / path).exists()] == []
