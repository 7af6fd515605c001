"""The web console in a real browser, of a platform that runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.browser import (
    DESKTOP,
    PHONE,
    PICTURES,
    browser,
    check_fits,
    check_readable,
    log_in,
    open_page,
    picture,
    tab,
)
from tests.e2e.conftest import COLD, HOT, Platform, stream
from tests.e2e.test_lending import profile_devices
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.simulated]

PAGES = {
    "fleet": ("Fleet", "core1"),
    "models": ("Models", HOT),
    f"models/{HOT}": (HOT, "prefix_aware"),
    "chat": ("Chat", "Message"),
    "requests": ("Requests", "In engines"),
    "plans": ("Plans", "Loads of devices"),
    "kv": ("KV store", "By model"),
    "batches": ("Batches", "lines answered"),
    "keys": ("Keys and usage", "narrow"),
    "events": ("Events", "Only those with"),
}
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module", name="running")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@contextmanager
def streams(platform: Platform) -> Iterator[None]:
    """Clients, until the end of the block: as many as pictures want, else one."""
    asked = (HOT, HOT, HOT, COLD) if PICTURES else (COLD,)
    ended = threading.Event()

    def ask_on(model: str) -> None:
        while not ended.is_set():
            stream(platform, model, "Once upon a time", 60)

    with ThreadPoolExecutor(len(asked)) as pool:
        asking = [pool.submit(ask_on, model) for model in asked]
        try:
            yield
        finally:
            ended.set()
    for each in asking:
        each.result()


def ask_in_chat(page: Any, platform: Platform, text: str) -> Any:
    """The article of the answer, which has come to its end."""
    page.get_by_label("Model", exact=True).select_option(HOT)
    page.get_by_label("API key").fill(platform.key)
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    answer = page.get_by_role("article", name=HOT).last
    answer.get_by_text("of answer").wait_for()
    return answer


def answered(platform: Platform, question: str) -> str:
    """The same answer as clients get it."""
    answer = platform.client().chat.completions.create(
        model=HOT,
        messages=[{"role": "user", "content": question}],
        max_tokens=48,
        temperature=0,
    )
    text = answer.choices[0].message.content
    assert text
    return " ".join(text.split())


def test_an_answer_streams_into_the_chat(running: Any, platform: Platform) -> None:
    with tab(running, platform.url, **DESKTOP) as page:
        log_in(page, platform.admin_token)
        open_page(page, "chat", "Chat")
        page.get_by_text("How it answers").click()
        page.get_by_label("Most tokens").fill("48")
        page.get_by_label("Temperature").fill("0")
        answer = ask_in_chat(page, platform, QUESTION)
        assert answered(platform, QUESTION) in " ".join(answer.inner_text().split())
        assert "first token after" in answer.inner_text()
        page.get_by_text("How it answers").click()
        check_readable(page)
        picture(page, "chat-with-answer")


def test_without_a_key_the_chat_says_so(running: Any, platform: Platform) -> None:
    with tab(running, platform.url) as page:
        log_in(page, platform.admin_token)
        open_page(page, "chat", "Chat")
        page.get_by_label("Message", exact=True).fill("Hello")
        page.keyboard.press("Enter")
        page.get_by_text("Give one of its API keys.").wait_for()


@pytest.mark.parametrize(
    ("options", "suffix"), [(DESKTOP, ""), (PHONE, "-phone")], ids=["desktop", "phone"]
)
def test_each_page_shows_the_platform_and_can_be_read(
    running: Any, platform: Platform, options: dict[str, Any], suffix: str
) -> None:
    with ExitStack() as asked, tab(running, platform.url, **options) as page:
        if PICTURES:
            profile_devices(platform)
        picture(page, f"login{suffix}")
        log_in(page, platform.admin_token)
        open_page(page, "fleet", "Fleet")
        asked.enter_context(streams(platform))
        tokens_per_second = page.locator(".total strong").nth(2)
        deadline = time.monotonic() + PATIENCE_S
        while tokens_per_second.inner_text() == "0":
            assert time.monotonic() < deadline, "no token was seen"
            page.wait_for_timeout(200)
        if not PICTURES:
            # The browser draws on the cores of the engines.
            asked.close()
        for name, (heading, text) in PAGES.items():
            open_page(page, name, heading)
            page.get_by_text(text, exact=True).first.wait_for()
            # Axe has seen these pages in both sizes in unit tests.
            check = check_fits if suffix else check_readable
            check(page)
            picture(page, name.replace(f"/{HOT}", "-one") + suffix)


def test_a_model_sleeps_and_wakes_by_the_console(running: Any, platform: Platform) -> None:
    with tab(running, platform.url, **DESKTOP) as page:
        log_in(page, platform.admin_token)
        open_page(page, "models", "Models")
        row = page.get_by_role("row", name=COLD)
        row.get_by_role("button", name=f"Have {COLD} sleep").click()
        row.get_by_text("asleep").wait_for()
        row.get_by_role("button", name=f"Wake {COLD}").click()
        row.get_by_text("ready").wait_for()
        open_page(page, "events", "Events")
        page.get_by_label("Only those with").fill(COLD)
        page.get_by_role("row", name="asleep").first.wait_for()
        picture(page, "events")


def test_a_plan_is_asked_for_by_the_console(running: Any, platform: Platform) -> None:
    with tab(running, platform.url, **DESKTOP) as page:
        log_in(page, platform.admin_token)
        open_page(page, "plans", "Plans")
        page.get_by_role("button", name="What would move now?").click()
        # Devices are not profiled, and the answer says so.
        page.get_by_role("heading", name="Nothing would be moved").wait_for()
        check_readable(page)
