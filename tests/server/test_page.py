"""The page at / and the reference at /docs: nothing from elsewhere, and at work in a real browser."""

from __future__ import annotations

import re
import shutil
from importlib import resources

import pytest

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


def test_pages_are_served_with_a_strict_policy(server):
    for path in ("/", "/docs"):
        page = server.get(path)
        assert page.headers["content-type"].startswith("text/html")
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert "unsafe" not in page.headers["content-security-policy"]
        for asset in re.findall(r'(?:src|href)="(/page/[^"]+)"', page.text):
            assert server.get(asset).status_code == 200
    assert server.get("/page/nothing.js").status_code == 404
    assert server.get("/page/..%2fapp.py").status_code == 404


def test_the_pages_need_nothing_from_elsewhere():
    for file in (resources.files("paged_backend.server") / "page").iterdir():
        text = file.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*|// .*", "", text, flags=re.M), file.name
        assert "innerHTML" not in text


@pytest.fixture
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser, server):
    """A page that notes every error, and every request that leaves the server."""
    page = browser.new_page()
    page.problems = []
    page.on("console", lambda m: page.problems.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith(server.url) else page.problems.append(r.url))
    return page


@pytest.mark.slow
def test_chat_and_charts_in_a_browser(page, server):
    page.goto(server.url)
    page.locator("#health", has_text="ok").wait_for()
    assert page.locator("#model").text_content() == "tiny"
    page.click("#options summary")
    page.fill("#max_tokens", "40")
    page.fill("#seed", "1")
    page.fill("#input", "the quick <b>brown</b> fox")
    page.keyboard.press("Enter")
    page.locator(".assistant small", has_text="tokens in").wait_for()
    assert page.locator(".user .body").text_content() == "the quick <b>brown</b> fox"
    assert page.locator(".assistant .body").text_content()
    page.fill("#max_tokens", "")
    page.fill("#input", "and on it goes")
    page.keyboard.press("Enter")
    page.locator("#send", has_text="Stop").wait_for()
    page.keyboard.press("Escape")
    page.locator("#send", has_text="Send").wait_for()
    assert page.locator(".message").count() == 4
    page.wait_for_timeout(2500)
    assert page.locator("canvas").count() == 4
    drawn = "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    assert page.locator("canvas").first.evaluate(drawn) > 2
    assert "%" in page.locator("#prefix").text_content()
    page.fill("#temperature", "9")
    page.fill("#seed", "1.5")
    page.fill("#input", "a mistake")
    page.keyboard.press("Enter")
    page.locator(".failed small", has_text="seed").wait_for()
    page.click("#clear")
    assert page.locator(".message").count() == 0
    assert all("400" in problem for problem in page.problems), page.problems


@pytest.mark.slow
def test_the_reference_in_a_browser(page, server):
    page.goto(server.url + "/docs")
    page.locator("h3", has_text="/v1/chat/completions").wait_for()
    page.locator("summary").first.click()
    assert page.locator("td", has_text="min_p").first.is_visible()
    assert page.problems == []


@pytest.mark.slow
def test_a_phone_sees_no_sideways_scrolling(browser, server):
    page = browser.new_page(viewport={"width": 360, "height": 740})
    page.goto(server.url)
    page.locator("#health", has_text="ok").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
