"""The queue that shows vLLM only who may start."""

from __future__ import annotations

import random

from loomserve.platform.engine.scheduling.gated_queue import GatedQueue


class Waiting(str):
    """A request by its name."""

    num_tokens = 1
    num_stale_output_tokens = 0


def queue(names: str) -> GatedQueue:
    made = GatedQueue()
    for name in names:
        made.add_request(Waiting(name))
    return made


def test_only_those_that_may_start_are_shown_and_the_rest_stays_in_order() -> None:
    waiting = queue("abcde")
    with waiting.only(["d", "b"]):
        assert list(waiting) == ["d", "b"]
        assert waiting.pop_request() == "d"
        waiting.prepend_request(Waiting("preempted"))
        assert waiting.peek_request() == "preempted"
        assert len(waiting) == 2
    assert list(waiting) == ["preempted", "b", "a", "c", "e"]


def test_a_queue_that_shows_nobody_is_empty_and_a_gate_within_it_changes_nothing() -> None:
    waiting = queue("ab")
    with waiting.only([]):
        with waiting.only([]):
            assert not waiting
            waiting.prepend_request(Waiting("preempted"))
        assert list(waiting) == ["preempted"]
    assert list(waiting) == ["preempted", "a", "b"]


def test_its_ends_are_taken_in_order() -> None:
    waiting = queue("abcdef")
    assert waiting.take_last(2) == ["e", "f"]
    assert waiting.take_first(2) == ["a", "b"]
    waiting.put_first(["x", "y"])
    assert list(waiting) == ["x", "y", "c", "d"]


def test_its_tokens_are_those_of_all_requests_in_it_whatever_happened() -> None:
    rng, waiting, names = random.Random(0), GatedQueue(), iter(range(10**6))
    preempted: list[Waiting] = []
    for _ in range(3_000):
        new = Waiting(next(names))
        new.num_tokens = rng.randrange(1, 100)
        match rng.randrange(8):
            case 0 | 1:
                waiting.add_request(new)
            case 2:
                new.num_stale_output_tokens = rng.randrange(3)
                waiting.prepend_request(new)
                preempted.append(new)
            case 3:
                waiting.prepend_requests([waiting.pop_request() for _ in range(len(waiting) // 2)])
            case 4 if waiting:
                waiting.pop_request()
            case 5:
                waiting.remove_requests([*rng.sample(list(waiting), len(waiting) // 4), new])
            case 6:
                waiting.put_first(waiting.take_last(len(waiting) // 2))
                with waiting.only(rng.sample(list(waiting), len(waiting) // 2)):
                    while waiting and rng.random() < 0.3:
                        waiting.pop_request()
            case 7:
                for each in preempted:
                    if each.num_stale_output_tokens:
                        each.num_stale_output_tokens -= 1
                        each.num_tokens += 1
        assert waiting.tokens() == sum(each.num_tokens for each in waiting)
