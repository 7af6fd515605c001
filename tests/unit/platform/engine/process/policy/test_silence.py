"""What counts against an engine's process that says nothing, and when it is wedged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.engine.process.policy.silence import (
    UNSENT_TURNS,
    WEDGED_S,
    counted_against,
    sends_nothing,
    wedged,
)


@pytest.mark.parametrize(
    ("computed_s", "wants", "expected_s"),
    [
        (0.0, False, 10.0),
        (0.4, False, 10.0),
        (10.0, False, 1.0),
        (160.0, True, 1.0),
        (1.0, True, 0.19),
        (0.0, True, 0.1),
        (-1.0, True, 0.1),
    ],
)
def test_ten_seconds_count_by_what_the_engine_did(
    computed_s: float, wants: bool, expected_s: float
) -> None:
    assert counted_against(10.0, computed_s, wants=wants) == pytest.approx(expected_s)


@given(st.floats(0, 100), st.floats(0, 1000), st.booleans())
def test_something_always_counts_and_never_more_than_has_passed(
    passed_s: float, computed_s: float, wants: bool
) -> None:
    counted = counted_against(passed_s, computed_s, wants=wants)
    assert passed_s / 101 <= counted <= passed_s


def test_an_engine_is_wedged_only_by_seconds_that_count() -> None:
    assert wedged(WEDGED_S, WEDGED_S) is None
    assert wedged(9 * WEDGED_S, 0.9 * WEDGED_S) is None


@pytest.mark.parametrize(
    ("lasted_s", "stopped", "told"),
    [
        (121.0, False, "its process slept and came to the end of no step for 121 s"),
        (121.0, True, "its process is stopped and came to the end of no step for 121 s"),
        (
            1210.0,
            False,
            "its process computed, or waited for a core, and came to the end of no step for",
        ),
    ],
)
def test_why_it_is_ended_says_what_it_did(lasted_s: float, stopped: bool, told: str) -> None:
    said = wedged(lasted_s, 121.0, stopped=stopped)
    assert said is not None
    assert said.startswith(told)


def test_an_engine_whose_steps_go_on_is_ended_by_turns_in_which_it_sent_nothing() -> None:
    assert sends_nothing(UNSENT_TURNS - 1) is None
    said = sends_nothing(UNSENT_TURNS)
    assert said == "its steps went on, and its thread that sends outputs sent none in 30 turns"
