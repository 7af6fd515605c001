"""Streams of all kinds are the same to their clients when engines are killed, stopped or drained.

``make bench-continue`` measures it, with more of everything.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import HOT, Platform
from tests.e2e.test_admin import model_state, wait_for
from tests.e2e.test_batch import COMPLETIONS, ended, line, lines_of, submit
from tests.e2e.test_failures import engine_process
from tests.streams import Answer, Asked, Load, differences, mixture, with_stop_strings
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e

REQUESTS = 11
"""One of each kind."""
TOKENS = 64
LONG_TOKENS = 900
LONG_REQUESTS = 4
STOPPED_S = 5.0
BUSY_STOPPED_S = 20.0
BACK_S = 240.0
CONTINUED = "loomserve_continued_requests_total"
PAUSES = "loomserve_continuation_pause_seconds"
_LOOK_S = 0.005


@contextmanager
def running(platform: Platform, asked: Sequence[Asked]) -> Iterator[Load]:
    """The requests as they run; ends when they have."""
    load = Load()
    thread = Thread(target=lambda: asyncio.run(load.run(platform.url, asked, platform.key)))
    thread.start()
    try:
        yield load
    finally:
        thread.join(900)
    assert load.ended.is_set()
    assert [one.lost for one in load.answers if one.lost] == []


def answers(platform: Platform, asked: Sequence[Asked]) -> list[Answer]:
    with running(platform, asked) as load:
        pass
    return load.answers


def reach(load: Load, tokens: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not load.half_have(tokens):
        assert time.monotonic() < deadline, "no tokens came"
        time.sleep(_LOOK_S)
    assert not load.ended.is_set()


def in_flight(platform: Platform) -> dict[str, int]:
    """Requests that each replica's engine has."""
    return {one["id"]: one["in_flight"] for one in model_state(platform, HOT)["replicas"]}


def draining(platform: Platform, replica: str) -> bool:
    """Whether it is told, or says, to take no requests."""
    (found,) = (one for one in model_state(platform, HOT)["replicas"] if one["id"] == replica)
    return bool(found["draining"])


def busiest(platform: Platform) -> dict[str, Any]:
    return dict(max(model_state(platform, HOT)["replicas"], key=lambda one: one["in_flight"]))


def kill_engine(platform: Platform) -> str:
    victim = busiest(platform)
    engine_process(victim).kill()
    return str(victim["id"])


def back_without(platform: Platform, replica: str) -> bool:
    model = model_state(platform, HOT)
    ids = [one["id"] for one in model["replicas"]]
    return model["status"] == "ready" and len(ids) == 2 and replica not in ids


@pytest.fixture(scope="module")
def undisturbed(platform: Platform) -> tuple[list[Asked], list[Answer]]:
    requests = mixture(HOT, REQUESTS, TOKENS, 0, 1)
    found = answers(platform, requests)
    asked = with_stop_strings(requests, found)
    stopped = [number for number, one in enumerate(asked) if one is not requests[number]]
    again = answers(platform, [asked[number] for number in stopped])
    for number, answer in zip(stopped, again, strict=True):
        found[number] = answer
    return asked, found


@pytest.fixture(scope="module")
def asked(undisturbed: tuple[list[Asked], list[Answer]]) -> list[Asked]:
    return undisturbed[0]


@pytest.fixture(scope="module")
def expected(undisturbed: tuple[list[Asked], list[Answer]]) -> list[Answer]:
    """That they are alike each time, tests see once they have disturbed them."""
    return undisturbed[1]


@pytest.mark.claim("continuation")
@pytest.mark.parametrize("at", [pytest.param(1, marks=pytest.mark.slow), 40])
def test_an_engine_is_killed(
    platform: Platform, asked: list[Asked], expected: list[Answer], at: int
) -> None:
    before = platform.metric(CONTINUED, model=HOT, reason="gone")
    with running(platform, asked) as load:
        reach(load, at)
        gone = kill_engine(platform)
    assert differences(expected, load.answers) == {}
    assert platform.metric(CONTINUED, model=HOT, reason="gone") > before
    pauses = [platform.metric(f"{PAUSES}_{what}", model=HOT) for what in ("sum", "count")]
    print(f"moved requests paused for {pauses[0] / pauses[1]:.2f} s in the mean of {pauses[1]:.0f}")
    wait_for(lambda: back_without(platform, gone), BACK_S)
    assert differences(expected, answers(platform, asked)) == {}


@pytest.mark.slow
def test_an_engine_is_stopped_for_a_while_and_goes_on(
    platform: Platform, asked: list[Asked], expected: list[Answer]
) -> None:
    with running(platform, asked) as load:
        reach(load, 20)
        stopped = busiest(platform)
        engine = engine_process(stopped)
        engine.suspend()
        try:
            time.sleep(STOPPED_S)
        finally:
            with suppress(psutil.NoSuchProcess):
                engine.resume()
    assert differences(expected, load.answers) == {}
    assert platform.metric(CONTINUED, model=HOT, reason="silent") >= 1
    # What has left it is not computed there to its end, and it takes requests again.
    wait_for(lambda: not in_flight(platform)[stopped["id"]], 10)
    assert differences(expected, answers(platform, asked)) == {}
    assert stopped["id"] in in_flight(platform)


@contextmanager
def busy_machine() -> Iterator[None]:
    """Beside six loops a core."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(6 * (os.cpu_count() or 1))
    ]
    try:
        yield
    finally:
        for one in loops:
            one.kill()
            one.wait()


@pytest.mark.slow
def test_an_engine_is_killed_and_one_stopped_on_a_busy_machine(
    platform: Platform, asked: list[Asked], expected: list[Answer]
) -> None:
    with busy_machine():
        with running(platform, asked) as load:
            reach(load, 20)
            engine = engine_process(busiest(platform))
            engine.suspend()
            time.sleep(BUSY_STOPPED_S)
            engine.resume()
        assert differences(expected, load.answers) == {}
        with running(platform, asked) as load:
            reach(load, 20)
            gone = kill_engine(platform)
        assert differences(expected, load.answers) == {}
    wait_for(lambda: back_without(platform, gone), BACK_S)


@pytest.mark.slow
def test_a_replica_is_drained_and_takes_requests_again(
    platform: Platform, asked: list[Asked], expected: list[Answer]
) -> None:
    with platform.admin() as admin:
        with running(platform, asked) as load:
            reach(load, 20)
            drained = busiest(platform)["id"]
            path = f"/admin/v1/replicas/{drained}/draining"
            admin.put(path, json={"draining": True}).raise_for_status()
            wait_for(lambda: not in_flight(platform)[drained], 8)
            assert not load.ended.is_set()
        assert differences(expected, load.answers) == {}
        assert platform.metric(CONTINUED, model=HOT, reason="drained") >= 1
        admin.put(path, json={"draining": False}).raise_for_status()
    wait_for(lambda: not draining(platform, drained), 20)
    time.sleep(3)  # gateways must have learned of it
    with running(platform, asked) as load:
        wait_for(lambda: in_flight(platform)[drained] > 0, 20)
    assert differences(expected, load.answers) == {}


@pytest.mark.slow
def test_a_batchs_lines_are_answered_when_their_engine_is_killed(platform: Platform) -> None:
    client = platform.client()
    lines = [
        line(f"line-{number}", COMPLETIONS, max_tokens=TOKENS, ignore_eos=True)
        for number in range(8)
    ]

    def texts(batch: Any) -> dict[str, str]:
        assert batch.error_file_id is None
        found = lines_of(client, batch.output_file_id)
        return {name: one["response"]["body"]["choices"][0]["text"] for name, one in found.items()}

    undisturbed = texts(ended(client, submit(client, lines, COMPLETIONS), 180))
    batch_id = submit(client, lines, COMPLETIONS)
    wait_for(lambda: sum(in_flight(platform).values()) > 0, 60)
    gone = kill_engine(platform)
    assert texts(ended(client, batch_id, 180)) == undisturbed
    assert undisturbed.keys() == {one["custom_id"] for one in lines}
    wait_for(lambda: back_without(platform, gone), BACK_S)


@pytest.mark.slow
def test_both_engines_are_killed_in_turn(platform: Platform) -> None:
    requests = mixture(HOT, LONG_REQUESTS, LONG_TOKENS, 0, 2)
    undisturbed = answers(platform, requests)
    with running(platform, requests) as load:
        reach(load, 10)
        first = kill_engine(platform)
        wait_for(lambda: back_without(platform, first), BACK_S)
        assert not load.ended.is_set(), "they ended before the engine was back"
        (second,) = (one for one in model_state(platform, HOT)["replicas"] if one["in_flight"])
        engine_process(second).kill()
    assert differences(undisturbed, load.answers) == {}
    wait_for(lambda: back_without(platform, second["id"]), BACK_S)
