"""Who may start so that memory suffices until the end."""

from __future__ import annotations

import random
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from loomserve.platform.scheduling.policy.admission import (
    Growing,
    PastAnswers,
    fitting,
    peak_tokens,
)

growing = st.builds(Growing, st.integers(1, 50), st.integers(0, 50), st.just(False))


def grown(requests: list[Growing], steps: int) -> int:
    """What those hold that have not ended after so many steps, one token each."""
    return sum(one.tokens + steps for one in requests if one.left >= steps)


@given(st.lists(growing, max_size=8))
def test_the_peak_is_the_most_of_any_step(requests: list[Growing]) -> None:
    assert peak_tokens(requests, 1) == max(grown(requests, steps) for steps in range(51))


def test_each_request_has_half_a_block_to_spare() -> None:
    assert peak_tokens([Growing(10, 0), Growing(20, 0)], 8) == 38


def test_the_peak_does_not_depend_on_the_order() -> None:
    some = [Growing(5, 9), Growing(7, 9), Growing(30, 1), Growing(2, 0)]
    assert len({peak_tokens(order, 4) for order in permutations(some)}) == 1


def test_one_that_ends_soon_leaves_its_room_to_one_that_grows() -> None:
    running = [Growing(60, 2)]
    assert fitting([Growing(10, 50)], running, room_tokens=76, block_tokens=1) == 1
    assert fitting([Growing(10, 50)], [Growing(60, 20)], room_tokens=76, block_tokens=1) == 0


def test_none_overtakes_one_that_may_not_start() -> None:
    waiting = [Growing(10, 0), Growing(90, 0), Growing(10, 0)]
    assert fitting(waiting, [], room_tokens=50, block_tokens=1) == 1


def test_one_that_is_alone_always_starts() -> None:
    assert fitting([Growing(90, 90)], [], room_tokens=50, block_tokens=1) == 1
    assert fitting([], [], room_tokens=50, block_tokens=1) == 0


def test_who_makes_way_is_not_counted_by_those_who_do_not() -> None:
    running = [Growing(40, 9, background=True)]
    assert fitting([Growing(40, 5)], running, room_tokens=50, block_tokens=1) == 1
    assert fitting([Growing(40, 5, background=True)], running, 50, 1) == 0


@given(st.lists(growing, max_size=6), st.lists(growing, max_size=6), st.integers(1, 300))
def test_those_that_start_fit(
    waiting: list[Growing], running: list[Growing], room_tokens: int
) -> None:
    number = fitting(waiting, running, room_tokens, 4)
    together = [*running, *waiting[:number]]
    if len(together) > max(1, len(running)):
        assert peak_tokens(together, 4) <= room_tokens
    if number < len(waiting):
        assert peak_tokens([*together, waiting[number]], 4) > room_tokens


def test_nothing_is_said_of_answers_before_some_have_ended() -> None:
    past = PastAnswers()
    for _ in range(15):
        past.note(40)
    assert past.left(0, 100) == 0
    past.note(40)
    assert past.left(0, 100) == 40


def test_an_answer_is_expected_to_be_as_long_as_those_that_were_longer() -> None:
    past = PastAnswers()
    for tokens in [10] * 10 + [30] * 5 + [50] * 5:
        past.note(tokens)
    assert past.left(0, 100) == (100 + 150 + 250) // 20
    assert past.left(10, 100) == 40 - 10
    assert past.left(10, 35) == 35 - 10
    assert past.left(30, 100) == 50 - 30
    assert past.left(50, 1000) == 50
    assert past.left(100, 100) == 0


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(1001, 1100), st.integers(0, 99))
def test_only_the_latest_answers_count(seed: int, count: int, generated: int) -> None:
    # Drawn here, for hypothesis takes a tenth of a second to draw so many.
    answers = random.Random(seed).choices(range(1, 100), k=count)
    past = PastAnswers()
    for tokens in answers:
        past.note(tokens)
    latest = PastAnswers()
    for tokens in answers[-1000:]:
        latest.note(tokens)
    assert past.left(generated, 200) == latest.left(generated, 200)
