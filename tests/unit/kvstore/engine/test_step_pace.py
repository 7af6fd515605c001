"""How long a prompt token takes, as an engine's connector learns it."""

from __future__ import annotations

import pytest

from loomserve.kvstore.engine.pace import StepPace


def steps(pace: StepPace, *seconds: float, tokens: int = 100) -> float:
    for took in seconds:
        pace.begin(10.0, tokens)
        pace.end(10.0 + took)
    return pace.s_per_token


def test_the_first_steps_are_believed_and_later_ones_smoothed() -> None:
    pace = StepPace(block_size=16)
    assert pace.s_per_token == 1e-3
    assert steps(pace, 0.3) == pytest.approx(3e-3), "the guess counts no more"
    assert steps(pace, 0.5) == pytest.approx(4e-3)
    steps(pace, *[0.4] * 8)
    assert steps(pace, 1.4) == pytest.approx(5e-3)


def test_decode_steps_tell_nothing_of_prompt_tokens() -> None:
    pace = StepPace(block_size=16)
    assert steps(pace, 5.0, tokens=63) == 1e-3
    assert pace.step_s == pytest.approx(5.0)
