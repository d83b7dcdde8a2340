"""The chat page in a real browser, with a real server behind it."""

from __future__ import annotations

import re
import shutil

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_api.sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except Exception as error:
            pytest.skip(f"no Chromium that starts: {str(error).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture
def page(browser, server):
    """The page, its model read; any error of its script fails the test."""
    opened = browser.new_page(viewport={"width": 1100, "height": 760})
    opened.set_default_timeout(120_000)  # two busy cores
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    opened.goto(server.address)
    opened.wait_for_selector(".dot.ok")
    yield opened
    opened.close()
    assert errors == []


def test_a_conversation(page, engine):
    engine.tokens_per_s = 150
    engine.script = engine.tokenizer.encode("**Paris** is `the` capital.\n\n- one\n- two <b>x</b>")
    page.fill("#ask", "What is the capital of France?")
    page.press("#ask", "Enter")
    page.wait_for_selector(".turn.assistant .facts button")
    answer = page.locator(".turn.assistant .text")
    assert answer.locator("strong").inner_text() == "Paris"
    assert answer.locator("code").inner_text() == "the"
    assert answer.locator("li").all_inner_texts() == ["one", "two <b>x</b>"]
    assert answer.locator("b").count() == 0
    speed = page.locator("[data-role=speed]").inner_text()
    rate = re.search(r"([\d.]+) tokens/s", speed)
    assert rate is not None and 0 < float(rate.group(1)) < 200, speed
    assert f"{len(engine.script) + 1} tokens" in speed and "s to the first" in speed
    page.fill("#ask", "And of Spain?")
    page.click("#go")
    page.locator(".turn .facts button").nth(1).wait_for()
    told = engine.tokenizer.decode(engine.seen[-1][0])
    assert "<assistant>**Paris**" in told and told.endswith("<user>And of Spain?\n<assistant>")


def test_lists_and_tables_within_text(page, engine):
    """As small models write them: without blank lines, and with marks that are no HTML."""
    engine.tokens_per_s = 400
    said = "Two:\n- a\n- **b**\n# Rates\n| x | y |\n| --- | --- |\n| 1 | <i>2</i> |\nEnd"
    engine.script = engine.tokenizer.encode(said)
    page.fill("#ask", "x")
    page.press("#ask", "Enter")
    page.wait_for_selector(".turn.assistant .facts button")
    answer = page.locator(".turn.assistant .text")
    assert answer.locator("p").all_inner_texts() == ["Two:", "End"]
    assert answer.locator("li").all_inner_texts() == ["a", "b"]
    assert answer.locator("h3").inner_text() == "Rates"
    assert answer.locator("th").all_inner_texts() == ["x", "y"]
    assert answer.locator("td").all_inner_texts() == ["1", "<i>2</i>"]
    assert answer.locator("i").count() == 0


def test_stop_ends_the_request(page, engine):
    engine.tokens_per_s = 30
    engine.script = engine.tokenizer.encode("word " * 200)
    page.fill("#ask", "Go on")
    page.press("#ask", "Enter")
    answer = page.locator(".turn.assistant .text")
    expect = pytest.importorskip("playwright.sync_api").expect
    expect(answer).to_contain_text("word word", timeout=30_000)  # a token may be one letter
    page.click("#go[aria-label=Stop]")
    page.wait_for_selector("#go[aria-label=Send]")
    assert answer.inner_text().startswith("word word")
    assert len(answer.inner_text()) < len("word " * 200)
    assert page.locator(".error").count() == 0


def test_an_error_is_shown(page, engine):
    engine.fail_at = 1
    engine.script = engine.tokenizer.encode("abc")
    page.fill("#ask", "x")
    page.press("#ask", "Enter")
    page.wait_for_selector(".turn.assistant .error")
    assert "a kernel failed" in page.locator(".error").inner_text()


def test_settings_and_a_new_chat(page, engine):
    page.click("#settings")
    page.fill("#system", "Be brief.")
    page.fill("#most", "3")
    page.locator("#temperature").fill("0.2")
    assert page.locator("#heat").inner_text() == "0.2"
    page.click("#done")
    page.click(".ideas button >> nth=0")
    page.wait_for_selector(".turn.assistant .facts button")
    prompt, params, *_ = engine.seen[-1]
    assert engine.tokenizer.decode(prompt).startswith("<system>Be brief.\n<user>What is the")
    assert (params.temperature, params.max_tokens) == (0.2, 3)
    page.click("#fresh")
    assert page.locator(".turn").count() == 0 and page.locator("#hello").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_shows_everything(browser, server, engine, scheme):
    """Nothing is wider than a phone, and text stands out from its ground."""
    engine.script = engine.tokenizer.encode("```\n" + "word " * 60 + "\n```\n" + "x" * 300)
    page = browser.new_page(viewport={"width": 360, "height": 640}, color_scheme=scheme)
    page.set_default_timeout(120_000)
    page.goto(server.address)
    page.wait_for_selector(".dot.ok")
    page.fill("#ask", "y" * 200)
    page.press("#ask", "Enter")
    page.wait_for_selector(".turn.assistant .facts button")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator("#ask").is_visible() and page.locator("#settings").is_visible()
    ink, paper = (
        page.evaluate(f"getComputedStyle(document.body).{name}")
        for name in ("color", "backgroundColor")
    )
    ink, paper = (sum(map(int, re.findall(r"\d+", color)[:3])) for color in (ink, paper))
    assert abs(paper - ink) > 450 and (paper > ink) == (scheme == "light")
    page.close()


def test_an_answer_stays_in_its_conversation(page, engine):
    """What ends without an answer is no part of what is told next; nor is an older chat."""
    engine.fail_at = 0
    page.fill("#ask", "lost")
    page.press("#ask", "Enter")
    page.wait_for_selector(".turn.assistant .error")
    engine.fail_at, engine.tokens_per_s = None, 30
    engine.script = engine.tokenizer.encode("word " * 200)
    page.fill("#ask", "Go on")
    page.press("#ask", "Enter")
    expect = pytest.importorskip("playwright.sync_api").expect
    expect(page.locator(".turn.assistant .text").nth(1)).to_contain_text("word", timeout=30_000)
    told = engine.tokenizer.decode(engine.seen[-1][0])
    assert told.startswith("<user>Go on\n") and "lost" not in told
    page.click("#fresh")
    page.wait_for_selector("#go[aria-label=Send]")
    engine.tokens_per_s, engine.script = 400, engine.tokenizer.encode("yes")
    page.fill("#ask", "New")
    page.press("#ask", "Enter")
    page.wait_for_selector(".turn.assistant .facts button")
    assert engine.tokenizer.decode(engine.seen[-1][0]) == "<user>New\n<assistant>"
