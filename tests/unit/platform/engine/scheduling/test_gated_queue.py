"""The queue that shows vLLM only who may start."""

from __future__ import annotations

from loomserve.platform.engine.scheduling.gated_queue import GatedQueue


def queue(names: str) -> GatedQueue:
    made = GatedQueue()
    for name in names:
        made.add_request(name)
    return made


def test_only_those_that_may_start_are_shown_and_the_rest_stays_in_order() -> None:
    waiting = queue("abcde")
    with waiting.only(["d", "b"]):
        assert list(waiting) == ["d", "b"]
        assert waiting.pop_request() == "d"
        waiting.prepend_request("preempted")
        assert waiting.peek_request() == "preempted"
        assert len(waiting) == 2
    assert list(waiting) == ["preempted", "b", "a", "c", "e"]


def test_a_queue_that_shows_nobody_is_empty_and_a_gate_within_it_changes_nothing() -> None:
    waiting = queue("ab")
    with waiting.only([]):
        with waiting.only([]):
            assert not waiting
            waiting.prepend_request("preempted")
        assert list(waiting) == ["preempted"]
    assert list(waiting) == ["preempted", "a", "b"]


def test_its_ends_are_taken_in_order() -> None:
    waiting = queue("abcdef")
    assert waiting.take_last(2) == ["e", "f"]
    assert waiting.take_first(2) == ["a", "b"]
    waiting.put_first(["x", "y"])
    assert list(waiting) == ["x", "y", "c", "d"]
