"""Batches of models that answer nothing else, and the process that computes them."""

from __future__ import annotations

import openai
import psutil
import pytest

from tests.browser import browser, log_in, open_page, tab
from tests.e2e.conftest import OFFLINE, Platform
from tests.e2e.test_admin import wait_for
from tests.e2e.test_batch import ended, lane_process, line, lines_of, processes, shown, submit

pytestmark = pytest.mark.e2e


def offline_process(platform: Platform) -> psutil.Process:
    (offline,) = processes(platform, "OfflineProcess")
    return offline


@pytest.mark.claim("offline batch")
def test_an_offline_model_answers_them_although_its_process_is_killed(
    platform: Platform,
) -> None:
    client = platform.client()
    lines = [line(f"s-{n}", model=OFFLINE, max_tokens=4 + n) for n in range(12)]
    lines += [line("other-model"), line("bad", model=OFFLINE, logprobs=True)]
    batch_id = submit(client, lines)
    wait_for(lambda: shown(platform, batch_id)["completed"] > 0, 120)
    offline_process(platform).kill()
    batch = ended(client, batch_id, 240)
    assert (batch.status, batch.request_counts.completed) == ("completed", 13)
    good = lines_of(client, batch.output_file_id)
    assert set(good) == {f"s-{n}" for n in range(12)} | {"other-model"}
    online = client.chat.completions.create(**line("s-1")["body"])
    body = good["s-1"]["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", OFFLINE)
    assert body["usage"]["prompt_tokens"] == (online.usage and online.usage.prompt_tokens)
    first_words = [
        text.split()[0]
        for text in (
            body["choices"][0]["message"]["content"],
            online.choices[0].message.content or "",
        )
    ]
    assert first_words[0] == first_words[1]
    (bad,) = lines_of(client, batch.error_file_id).values()
    assert bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["param"] == "logprobs"
    with pytest.raises(openai.NotFoundError, match="batches only"):
        client.chat.completions.create(**line("online", model=OFFLINE)["body"])


def test_a_cancelled_batch_of_such_a_model_makes_way_at_once(platform: Platform) -> None:
    client = platform.client()
    long = {"model": OFFLINE, "max_tokens": 600, "ignore_eos": True}
    first = submit(client, [line("long", **long)])
    wait_for(lambda: shown(platform, first)["in_flight"] > 0, 60)
    client.batches.cancel(first)
    assert ended(client, first).status == "cancelled"
    assert ended(client, submit(client, [line("short", model=OFFLINE)])).status == "completed"


def test_its_process_ends_with_a_lane_that_is_killed_and_the_next_has_its_own(
    platform: Platform,
) -> None:
    lane, offline = lane_process(platform), offline_process(platform)
    lane.kill()
    wait_for(lambda: not offline.is_running(), 30)
    wait_for(lambda: len(processes(platform, "OfflineProcess")) == 1, 60)
    assert lane_process(platform).pid != lane.pid


def test_the_console_shows_it(platform: Platform) -> None:
    with browser() as running, tab(running, platform.url) as page:
        log_in(page, platform.admin_token)
        open_page(page, "batches", "Batches")
        page.get_by_text(OFFLINE, exact=True).first.wait_for()
