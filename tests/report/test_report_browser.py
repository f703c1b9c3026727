"""The report in a real browser, used with clicks and keys. Needs Chromium and playwright."""

import os
import re
import shutil
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT, small_run
from report.runs_for_tests import write_run

from grpo.report.__main__ import main
from grpo.report.page import build_page
from grpo.report.read import read_run

pytestmark = pytest.mark.slow
playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip(
        "Chromium was not found: install it, or set CHROMIUM to its path", allow_module_level=True
    )


@pytest.fixture(scope="module")
def browser():
    options = ["--disable-gpu", "--disable-background-networking", "--no-first-run"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")
    with playwright.sync_playwright() as driver:
        program = driver.chromium.launch(executable_path=CHROMIUM, args=options)
        yield program
        program.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    runs = [write_run(folder / "first", seed=1), write_run(folder / "second", seed=2, steps=9)]
    path = folder / "report.html"
    path.write_text(build_page([read_run(run) for run in runs], reload_s=None), encoding="ascii")
    return path.as_uri()


@pytest.fixture
def page(browser, address):
    yield from opened(browser, address, viewport={"width": 1200, "height": 900})


def opened(browser, address, **options):
    context = browser.new_context(**options)
    page = context.new_page()
    messages = []
    requests = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    yield page
    assert messages == [], "no message and no error on the console"
    assert requests == [address], "nothing else is fetched"
    assert page.evaluate("window.owned") is None, "text of a model was executed"
    context.close()


def cards(page):
    return page.locator("article.sample")


def test_samples_are_filtered_searched_and_paged_by_clicks(page):
    count = page.locator("#sample-count")
    assert count.inner_text() == "7 completions of step 11"
    assert cards(page).count() == 5
    page.get_by_role("button", name="Next page").click()
    assert cards(page).count() == 2
    page.locator("#samples").get_by_label("Show").select_option("advantage above 0")
    page.get_by_role("button", name="Earlier step").click()
    assert count.inner_text() == "3 completions of step 9"
    page.locator("#samples").get_by_label("Step", exact=True).first.select_option("every")
    page.get_by_placeholder("Search the text").fill("IT IS 10 ")
    assert count.inner_text() == "6 completions"
    text = cards(page).first.locator(".completion").inner_text()
    for part in (
        "</script><script>window.owned = 1</script><img src=x",
        "@@DATA@@",
        "&amp;",
        "\\u202e",
        "\\u0000",
    ):
        assert part in text, "invisible characters are shown as escapes"


def test_a_token_shows_its_log_prob_ratio_and_advantage(page):
    card = cards(page).nth(4)
    card.get_by_role("button", name="Tokens").click()
    card.locator(".token").nth(1).click()
    reading = card.locator("output.reading")
    # exp(-1.0) = 36.8%; exp(-1.5 + 1.0) = 0.6065
    assert "log-prob -1 (probability 36.8%)" in reading.inner_text()
    assert "ratio 0.6065, advantage +1, KL to the reference 0" in reading.inner_text()
    page.keyboard.press("ArrowLeft")
    assert "token 1 of 4" in reading.inner_text()


def test_charts_show_all_runs_and_a_cursor_moves_with_the_keys(page):
    figure = page.locator("figure[data-chart='reward']")
    assert figure.locator("path").count() == 2, "one line per run"
    assert figure.locator("output").inner_text() == "last: first 1.200 \u00b7 second 0.9000"
    figure.locator("svg").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert figure.locator("output").inner_text() == "step 2: first 0.2000 \u00b7 second 0.2000"
    drawn = page.locator("figure[data-chart='kl'] path").first.get_attribute("d")
    assert drawn.count("M") == 2, "a gap where step 5 has no value"


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_the_result_and_the_reward_are_on_the_first_screen(browser, address, width, height):
    for page in opened(browser, address, viewport={"width": width, "height": height}):
        tile = page.locator(".tile").first
        shown = " ".join(tile.inner_text().split())
        assert (
            "step 0 \u2192 12 25.0% 17.5\u201334.3 \u2192 75.0% 65.7\u201382.5 +50.0 95% CI"
            in shown
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= width, (
            "the page is not wider than the screen"
        )
        box = tile.bounding_box()
        assert box["y"] + box["height"] <= height, "visible without scrolling"


def test_the_open_page_follows_a_run(browser, tmp_path, random_model, monkeypatch):
    """A real run is trained and watched while the page is open."""
    monkeypatch.setattr("grpo.commands.report.RELOAD_S", 2)
    run = tmp_path / "run"
    arguments = [*small_run(random_model, run), "optim.max_steps=24", "checkpoint.save_steps=8"]
    command = [sys.executable, "train_grpo.py", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as training:
        while not (run / "metrics.jsonl").exists():
            assert training.poll() is None
            time.sleep(0.1)
        watching = threading.Thread(target=main, args=([str(run), "--watch"],))
        watching.start()
        while not (run / "report.html").exists():
            time.sleep(0.1)
        page = browser.new_context(viewport={"width": 1200, "height": 700}).new_page()
        page.goto((run / "report.html").as_uri())
        seen = page.locator("#about").text_content()
        page.evaluate("window.scrollTo(0, 400); document.activeElement.blur()")
        playwright.expect(page.locator("#about")).not_to_have_text(seen, timeout=60_000)
        assert page.evaluate("window.scrollY") == 400
        assert training.wait() == 0
    watching.join(timeout=60)
    playwright.expect(page.locator("#about")).to_contain_text(re.compile("24 steps .*, complete"))
    # The first page of the complete run still reloads itself, and loads the last one.
    playwright.expect(page.locator("#live")).to_have_count(0)
    page.context.close()


def test_empty_and_single_runs_open_too(browser, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "metrics.jsonl").touch()
    one = read_run(tmp_path)
    empty = read_run(tmp_path / "none")
    path = tmp_path / "report.html"
    for shown in ([one], [empty], [one, empty]):
        path.write_text(build_page(shown, reload_s=None))
        for page in opened(browser, path.as_uri()):
            assert "could not be shown" not in page.inner_text("body")
