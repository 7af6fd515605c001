"""A real browser for tests of the web console; they are skipped where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    # Tests run as root in containers, whose kernels often refuse Chromium's own sandbox.
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
DESKTOP = {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"}
PHONE = {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"}
LEFT_OUT = "Failed to load resource: the server responded with a status of"
"""What Chromium says of each error that a server answers, such as that it has no batches."""

PICTURES = os.environ.get("LOOMSERVE_CONSOLE_PICTURES")
"""A folder for pictures of the pages, as docs/console.md shows them; none: there are none."""


@contextmanager
def browser() -> Iterator[Any]:
    """Playwright's browser. Until it is closed, this thread has a running event loop."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("there is no Chromium (on Debian: apt-get install chromium)")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=QUIET)
        try:
            yield running
        finally:
            running.close()


@contextmanager
def window(running: Any, **options: Any) -> Iterator[Any]:
    """An empty page; each has processes of its own, which take seconds of a core to start."""
    context = running.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(30_000)
    try:
        yield page
    finally:
        context.close()


@contextmanager
def shown(page: Any, url: str) -> Iterator[None]:
    """The page is at the console's login; no script may fail there, nor break the policy."""
    wrong: list[str] = []
    lost: list[str] = []
    heard: dict[str, Callable[[Any], None]] = {
        "pageerror": lambda error: wrong.append(str(error)),
        "console": lambda said: wrong.append(said.text) if said.type == "error" else None,
        "requestfailed": lambda asked: lost.append(f"{asked.url}: {asked.failure}"),
    }
    for event, hear in heard.items():
        page.on(event, hear)
    try:
        page.goto(f"{url}/console")
        try:
            page.get_by_label("Admin token").wait_for()
        except Exception as error:
            raise AssertionError(f"the console did not start: {wrong + lost}") from error
        yield
        grave = [each for each in wrong if not each.startswith(LEFT_OUT)]
        assert not grave, grave
    finally:
        for event, hear in heard.items():
            page.remove_listener(event, hear)
        page.goto("about:blank")


@contextmanager
def tab(running: Any, url: str, **options: Any) -> Iterator[Any]:
    """A window of its own at the console's login."""
    with window(running, **options) as page, shown(page, url):
        yield page


def log_in(page: Any, token: str) -> None:
    page.get_by_label("Admin token").fill(token)
    page.keyboard.press("Enter")
    page.get_by_role("navigation").wait_for()


def open_page(page: Any, name: str, heading: str) -> None:
    """Go to a page of the console and wait until it shows what it asked for."""
    page.goto(page.url.split("#")[0] + f"#/{name}")
    page.get_by_role("heading", name=heading, exact=True, level=1).wait_for()


def check_fits(page: Any) -> None:
    """Nothing sticks out to the side."""
    wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(wider) <= 0, f"{page.url} is wider than its window"


def check_readable(page: Any) -> None:
    """It fits, and axe finds nothing that keeps people out."""
    check_fits(page)
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page).response["violations"]
    grave = {
        each["id"]: [node["html"] for node in each["nodes"]]
        for each in found
        if each["impact"] in ("serious", "critical")
    }
    assert grave == {}, page.url


def picture(page: Any, name: str) -> None:
    """Of a page, if there is a folder for it."""
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / f"{name}.png", full_page=True)
