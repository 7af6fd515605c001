from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loomserve.platform.access.shared_counts import Count, NoPlaceError, SharedCounts
from tests.waiting import PATIENCE_S

Start = Callable[[], SharedCounts]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[SharedCounts] = []

    def start_one() -> SharedCounts:
        started.append(SharedCounts(tmp_path / "gateways", 2))
        return started[-1]

    yield start_one
    for one in started:
        one.close()


def test_what_one_counts_the_others_see_at_once(start: Start) -> None:
    one, two, three = start(), start(), start()
    one.add("key a", Count.RUNNING, 2)
    three.add("key a", Count.RUNNING, 1)
    three.add("key b", Count.RUNNING, 5)
    assert two.running_elsewhere("key a") == 3
    assert one.running_elsewhere("key a") == 1
    assert two.running_elsewhere("key c") == 0
    one.add("key a", Count.RUNNING, -2)
    assert two.running_elsewhere("key a") == 1


def test_news_are_told_once(start: Start) -> None:
    one, two = start(), start()
    one.add("key a", Count.TOKENS, 30)
    one.add("key a", Count.TOKENS, 12)
    assert two.news("key a", Count.TOKENS) == 42
    assert two.news("key a", Count.TOKENS) == 0
    assert two.news("key a", Count.REQUESTS) == 0
    one.add("key a", Count.TOKENS, 1)
    assert two.news("key a", Count.TOKENS) == 1


def test_what_was_before_is_no_news(start: Start) -> None:
    one = start()
    one.add("key a", Count.REQUESTS, 7)
    two = start()
    assert two.news("key a", Count.REQUESTS) == 0
    one.add("key a", Count.REQUESTS, 1)
    assert two.news("key a", Count.REQUESTS) == 1


def test_connections_are_those_of_a_client_and_of_all(start: Start) -> None:
    one, two = start(), start()
    one.add_connections("192.0.2.1", 1)
    one.add_connections("192.0.2.1", 1)
    one.add_connections("192.0.2.2", 1)
    assert two.connections_elsewhere("192.0.2.1") == 2
    assert two.all_connections_elsewhere == 3
    assert one.all_connections_elsewhere == 0
    one.add_connections("192.0.2.1", -1)
    assert two.connections_elsewhere("192.0.2.1") == 1


def test_each_has_a_place_of_its_own_and_there_are_only_so_many(
    start: Start, tmp_path: Path
) -> None:
    assert [start().place for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(NoPlaceError):
        SharedCounts(tmp_path / "gateways", 2)


def test_a_place_that_was_left_is_taken_again_and_its_counts_go_on(tmp_path: Path) -> None:
    one, two = SharedCounts(tmp_path, 2), SharedCounts(tmp_path, 2)
    one.add("key a", Count.REQUESTS, 3)
    one.add("key a", Count.RUNNING, 3)
    assert two.news("key a", Count.REQUESTS) == 3
    one.close()
    assert two.running_elsewhere("key a") == 0
    again = SharedCounts(tmp_path, 2)
    assert again.place == 0
    again.add("key a", Count.REQUESTS, 1)
    assert two.news("key a", Count.REQUESTS) == 1
    two.close()
    again.close()


def test_one_that_is_killed_has_nothing_running(tmp_path: Path, start: Start) -> None:
    own = start()
    ready, say = multiprocessing.get_context("spawn").Pipe(duplex=False)
    child = multiprocessing.get_context("spawn").Process(
        target=_count_and_wait, args=(tmp_path / "gateways", say)
    )
    child.start()
    assert ready.poll(PATIENCE_S)
    own.look()
    assert own.places == [1]
    assert own.running_elsewhere("key a") == 2
    assert own.all_connections_elsewhere == 1
    assert own.news("key a", Count.TOKENS) == 9
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(PATIENCE_S)
    own.look()
    assert own.places == []
    assert own.running_elsewhere("key a") == 0
    assert own.all_connections_elsewhere == own.connections_elsewhere("192.0.2.1") == 0
    assert own.news("key a", Count.TOKENS) == 0
    assert start().place == 1


def _count_and_wait(folder: Path, say: multiprocessing.connection.Connection) -> None:
    counts = SharedCounts(folder, 2)
    counts.add("key a", Count.RUNNING, 2)
    counts.add("key a", Count.TOKENS, 9)
    counts.add_connections("192.0.2.1", 1)
    say.send(counts.place)
    signal.pause()


def test_more_names_than_there_is_room_for_hold_in_each_alone(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = start(), start()
    for number in range(4100):
        one.add(f"key {number}", Count.RUNNING, 1)
    assert two.running_elsewhere("key 4095") == 1
    assert two.running_elsewhere("key 4096") == 0
    assert len(caplog.records) == 1
