"""The console's pages in a real browser, before an admin API of numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser import (
    DESKTOP,
    PHONE,
    browser,
    check_readable,
    log_in,
    open_page,
    picture,
    shown,
    tab,
    window,
)
from tests.unit.platform.http.console.made_up import (
    ENDED,
    HOSTILE,
    PLAN,
    TOKEN,
    TRACE_URL,
    MadeUp,
)
from tests.unit.served import served

pytestmark = pytest.mark.xdist_group("browser")

PAGES = {
    "fleet": ("Fleet", "chat is degraded. 2 of 3 replicas are live"),
    "models": ("Models", "org/translate"),
    "models/chat": ("chat", "chat-de"),
    "models/org%2Ftranslate": ("org/translate", "No engine runs."),
    "chat": ("Chat", "Message"),
    "requests": ("Requests", "22 requests running, 7 waiting in engines"),
    "plans": ("Plans", PLAN.id),
    f"plans/{PLAN.id}": (PLAN.id, "gpu0 and gpu2 are on two nodes"),
    "kv": ("KV store", "69\u00a0% of 131,000"),
    "batches": ("Batches", "7,433 of 12,000"),
    "keys": ("Keys and usage", "220,113"),
    "events": ("Events", "idle for 300 s"),
}
PICTURED = {
    "fleet": "fleet-made-up",
    "plans": "plans-made-up",
    f"plans/{PLAN.id}": "plan-one",
    "batches": "batches-made-up",
    "keys": "keys-made-up",
}
"""Pages, in docs/console.md, of what takes a longer day to come about."""
SOON_MS = 10_000


@pytest.fixture(scope="module", name="running")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture
def platform() -> Iterator[MadeUp]:
    platform = MadeUp()
    with served(platform.app) as url:
        platform.url = url
        yield platform


@pytest.fixture(scope="module")
def windows(running: Any) -> Iterator[dict[str, Any]]:
    """One of each kind for all tests, whose platforms have each a store of its own there."""
    with window(running, **DESKTOP) as desktop, window(running, **PHONE) as phone:
        yield {"desktop": desktop, "phone": phone}


@pytest.fixture
def page(windows: dict[str, Any], platform: MadeUp) -> Iterator[Any]:
    with shown(page := windows["desktop"], platform.url):
        log_in(page, TOKEN)
        yield page


def shows(page: Any, text: str) -> None:
    page.get_by_text(text).first.wait_for()


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_each_page_shows_what_there_is_and_can_be_read(
    windows: dict[str, Any], platform: MadeUp, size: str
) -> None:
    with shown(page := windows[size], platform.url):
        check_readable(page)
        log_in(page, TOKEN)
        for name, (heading, text) in PAGES.items():
            open_page(page, name, heading)
            shows(page, text)
            check_readable(page)
            if size == "desktop" and name in PICTURED:
                picture(page, PICTURED[name])


def test_the_token_is_asked_for_kept_in_the_tab_and_nowhere_else(
    running: Any, platform: MadeUp
) -> None:
    with tab(running, platform.url) as page:
        page.get_by_label("Admin token").fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_role("alert").get_by_text("This is not the admin token.").wait_for()
        assert page.evaluate("sessionStorage.length") == 0
    with tab(running, platform.url) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        log_in(page, TOKEN)
        page.reload()
        open_page(page, "events", "Events")
        assert asked
        assert not any(TOKEN in url for url in asked)
        assert page.evaluate("localStorage.length + document.cookie.length") == 0
        page.get_by_role("button", name="Leave").click()
        page.get_by_label("Admin token").wait_for()
        assert page.evaluate("sessionStorage.length") == 0


def test_text_of_the_server_stays_text(page: Any) -> None:
    for name, heading in (("models", "Models"), ("events", "Events")):
        open_page(page, name, heading)
        shows(page, HOSTILE)
        assert page.locator("main img").count() == 0
    assert "owned" not in page.title()


def test_an_operator_changes_what_is_there_and_is_asked_before_something_is_lost(
    page: Any, platform: MadeUp
) -> None:
    open_page(page, "models", "Models")
    page.get_by_role("button", name="Have code sleep").click()
    shows(page, "code gives its memory back.")
    unload = page.get_by_role("button", name="Unload code")
    unload.click()
    page.keyboard.press("Escape")
    unload.click()
    page.get_by_role("dialog").get_by_role("button", name="Leave it").click()
    page.get_by_role("button", name="Unload mail").click()
    page.get_by_role("dialog").get_by_role("button", name="Unload").click()
    shows(page, "mail has no engine")
    page.goto(page.url.split("#")[0] + "#/models/org%2Ftranslate")
    page.get_by_role("spinbutton", name="Replicas").fill("2")
    page.get_by_role("button", name="Set", exact=True).click()
    shows(page, "org/translate will have 2.")
    assert platform.changes == [
        ("POST", "models/code/sleep", None),
        ("POST", "models/mail/unload", None),
        ("PUT", "models/org/translate/replicas", {"replicas": 2}),
    ]


DANGEROUS = {
    ("fleet", "Fleet", "Drain ada"): ("POST", "nodes/ada/drain", None),
    ("fleet", "Fleet", "End the loan of chat with mail"): (
        "POST", "lending/loans/loan-1/drain", None,
    ),
    ("fleet", "Fleet", "Switch chat and mail off"): (
        "PUT", "lending/pairs/chat/mail", {"enabled": False},
    ),
    ("models/chat", "chat", "Drain chat-1"): (
        "PUT", "replicas/chat-1/draining", {"draining": True},
    ),
    ("models", "Models", "Delete the alias assistant"): ("DELETE", "aliases/assistant", None),
    ("kv", "KV store", "Empty the store"): ("POST", "kv/flush", {"model": None}),
    ("kv", "KV store", "Forget the blocks of code"): ("POST", "kv/flush", {"model": "code"}),
    ("batches", "Batches", "Cancel batch_67f1"): ("POST", "batches/batch_67f1/cancel", None),
}  # fmt: skip
"""What takes something away: where its button is, and what it asks for."""


@pytest.mark.parametrize("place", DANGEROUS, ids=[label for _, _, label in DANGEROUS])
def test_what_takes_something_away_is_asked_for_twice_by_keyboard_alone(
    page: Any, platform: MadeUp, place: tuple[str, str, str]
) -> None:
    name, heading, label = place
    open_page(page, name, heading)
    button = page.get_by_role("button", name=label, exact=True)
    button.focus()
    page.keyboard.press("Enter")
    # What leaves all as it is has the focus, so that a second Enter does no harm.
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for(state="detached")
    assert platform.changes == []
    button.focus()
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Tab")
    with page.expect_response(lambda said: said.request.method != "GET"):
        page.keyboard.press("Enter")
    assert platform.changes == [DANGEROUS[place]]


def test_a_model_is_loaded_and_a_prompt_pinned(page: Any, platform: MadeUp) -> None:
    open_page(page, "models", "Models")
    page.get_by_text("Name and source").click()
    page.get_by_label("Name", exact=True).fill("new")
    page.get_by_label("Source", exact=True).fill("org/new")
    page.get_by_label("Further fields, as JSON").fill('{"replicas": 2}')
    page.get_by_role("button", name="Load", exact=True).click()
    shows(page, "new is loaded.")
    open_page(page, "kv", "KV store")
    page.get_by_label("System message of a chat").fill("You are terse.")
    page.get_by_label("Of the API key").select_option("alice")
    page.get_by_role("button", name="Pin", exact=True).click()
    page.wait_for_function("document.querySelectorAll('.toast').length > 0")
    pinned = {
        "model": "chat",
        "messages": [{"role": "system", "content": "You are terse."}],
        "pinned": True,
        "api_key": "alice",
    }
    assert platform.changes == [
        ("POST", "models", {"name": "new", "source": "org/new", "replicas": 2}),
        ("POST", "kv/pin", pinned),
    ]


def test_a_plan_is_proposed_explained_and_applied(page: Any, platform: MadeUp) -> None:
    open_page(page, "plans", "Plans")
    page.get_by_role("button", name="What would move now?").click()
    shows(page, "the gap would shrink by 0.4 %")
    page.get_by_text("An action of your own").click()
    page.get_by_label("Action", exact=True).select_option("set_role")
    page.get_by_label("Role").select_option("prefill")
    page.get_by_label("Limits may be exceeded").check()
    page.get_by_role("button", name="Propose").click()
    page.get_by_role("row", name=PLAN.id).get_by_role("button", name=f"Apply {PLAN.id}").click()
    page.get_by_role("dialog").get_by_role("button", name="Apply").click()
    shows(page, f"{PLAN.id} is carried out.")
    own = {"action": "set_role", "engine": "chat-1", "role": "prefill"}
    assert platform.changes == [
        ("POST", "plans", {}),
        ("POST", "plans", {"actions": [own], "force": True}),
        ("POST", f"plans/{PLAN.id}/apply", None),
    ]
    ended = page.get_by_role("row", name=ENDED.id)
    assert ended.get_by_role("button").count() == 0


def test_plans_stand_on_a_time_line_each_with_its_end(page: Any) -> None:
    open_page(page, "plans", "Plans")
    line = page.get_by_role("list", name="Plans over time")
    bars = {
        each: line.get_by_role("listitem").filter(has_text=each) for each in (ENDED.id, PLAN.id)
    }
    assert bars[ENDED.id].get_by_role("img", name="done, from").is_visible()
    lasted = bars[ENDED.id].get_by_role("img").get_attribute("aria-label")
    assert lasted.endswith("for 40\u00a0s")
    assert bars[PLAN.id].get_by_role("img", name="proposed, from").is_visible()
    # It was made later than the other, which has ended, and is open until now.
    ended, open_ = (bars[each].locator("rect").nth(1).bounding_box() for each in bars)
    assert ended["x"] < open_["x"]
    assert ended["x"] + ended["width"] < open_["x"] + open_["width"]
    bars[PLAN.id].get_by_role("link").click()
    page.get_by_role("heading", name=PLAN.id, level=1).wait_for()


def test_a_plan_is_aborted_once_that_is_confirmed(page: Any, platform: MadeUp) -> None:
    open_page(page, "plans", "Plans")
    abort = page.get_by_role("row", name=PLAN.id).get_by_role("button", name=f"Abort {PLAN.id}")
    abort.click()
    page.get_by_role("dialog").get_by_role("button", name="Leave it").click()
    assert platform.changes == []
    abort.click()
    page.get_by_role("dialog").get_by_role("button", name="Abort").click()
    shows(page, f"{PLAN.id} is aborted.")
    assert platform.changes == [("POST", f"plans/{PLAN.id}/abort", None)]


def test_a_chat_streams_its_answer_and_goes_on(page: Any, platform: MadeUp) -> None:
    open_page(page, "chat", "Chat")
    page.get_by_label("Model", exact=True).select_option("code")
    page.get_by_label("Message", exact=True).fill("How many threads?")
    page.keyboard.press("Enter")
    answer = page.get_by_role("article", name="code")
    answer.get_by_text("Two threads, <img").wait_for()
    answer.get_by_text("9 tokens of prompt, 3 of answer").wait_for()
    page.get_by_label("Message", exact=True).fill("And now?")
    page.get_by_role("button", name="Send").click()
    answer.nth(1).get_by_text("3 of answer").wait_for()
    first, second = (body for _, _, body in platform.changes)
    assert first["messages"] == [{"role": "user", "content": "How many threads?"}]
    assert (first["model"], first["stream"]) == ("code", True)
    assert [each["role"] for each in second["messages"]] == ["user", "assistant", "user"]
    # Each answer has a trace of its own, which is sent, and its page is a link away.
    header = re.compile(r"00-([0-9a-f]{32})-[0-9a-f]{16}-01")
    ids = [found[1] for each in platform.traces if (found := header.fullmatch(each or ""))]
    assert len(set(ids)) == 2
    links = [answer.nth(n).get_by_role("link", name="its trace") for n in range(2)]
    pages = [TRACE_URL.replace("{trace_id}", each) for each in ids]
    assert [each.get_attribute("href") for each in links] == pages
    assert links[0].get_attribute("rel") == "noopener noreferrer"


def test_what_is_typed_and_where_stays_while_the_page_is_drawn_anew(page: Any) -> None:
    open_page(page, "models", "Models")
    page.get_by_text("Make or change an alias").click()
    alias = page.get_by_label("Alias", exact=True)
    alias.fill("canary")
    with page.expect_response("**/admin/v1/state"):
        pass
    with page.expect_response("**/admin/v1/state"):
        pass
    assert alias.input_value() == "canary"
    assert page.evaluate("document.activeElement.name") == "name"


def test_a_platform_that_is_away_is_said_and_asked_again(page: Any, platform: MadeUp) -> None:
    open_page(page, "fleet", "Fleet")
    platform.away = True
    page.get_by_text("the controller is restarting").wait_for(timeout=SOON_MS)
    assert page.get_by_role("heading", name="Devices").is_visible()
    platform.away = False
    page.get_by_text("the controller is restarting").wait_for(state="hidden", timeout=SOON_MS)


def test_a_token_that_is_no_longer_right_leads_to_the_login(page: Any) -> None:
    open_page(page, "fleet", "Fleet")
    page.evaluate("sessionStorage.setItem('loomserve.token', 'old')")
    page.get_by_text("The token is no longer right.").wait_for(timeout=SOON_MS)


def test_the_keyboard_alone_leads_everywhere(page: Any) -> None:
    open_page(page, "fleet", "Fleet")
    page.reload()
    page.get_by_role("heading", name="Devices").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    for _ in range(3):  # the name, Fleet, Models
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Models", level=1).wait_for()
    assert page.evaluate("document.activeElement.id") == "main"


def test_many_models_are_shown(windows: dict[str, Any]) -> None:
    platform = MadeUp(more_models=60)
    with served(platform.app) as url, shown(page := windows["phone"], url):
        log_in(page, TOKEN)
        open_page(page, "models", "Models")
        shows(page, "65 models, 1 alias")
        assert page.get_by_role("row").count() == 65 + 1 + 2
        check_readable(page)
