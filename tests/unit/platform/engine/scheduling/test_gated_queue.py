"""The queue that shows vLLM only who may start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.request_queue import FCFSRequestQueue

from loomserve.platform.engine.scheduling.gated_queue import GatedQueue


@dataclass(frozen=True)
class Named:
    name: Any


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


CALLS = st.sampled_from(
    [
        "add_request",
        "prepend_request",
        "pop_request",
        "peek_request",
        "remove_request",
        "remove_requests",
        "prepend_requests",
    ]
)


@given(st.lists(CALLS))
def test_while_it_is_open_to_all_it_is_vllms_own_queue(calls: list[str]) -> None:
    ours, theirs = GatedQueue(), FCFSRequestQueue()
    for number, call in enumerate(calls):
        if call in ("add_request", "prepend_request"):
            given: tuple[Any, ...] = (Named(number),)
        elif not theirs and call != "prepend_requests":
            continue
        elif call in ("pop_request", "peek_request"):
            given = ()
        elif call == "remove_request":
            given = (list(theirs)[number % len(theirs)],)
        elif call == "remove_requests":
            given = (list(theirs)[::2],)
        else:
            given = ([Named((number, 1)), Named((number, 2))],)
        assert getattr(ours, call)(*given) == getattr(theirs, call)(*given)
        assert list(ours) == list(theirs)
        assert (len(ours), bool(ours)) == (len(theirs), bool(theirs))
