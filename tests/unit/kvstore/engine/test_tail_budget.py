"""How many unfilled blocks are saved."""

from __future__ import annotations

import pytest

from loomserve.kvstore.engine.messages import Transferred
from loomserve.kvstore.engine.pace import TailBudget


def saved(budget: TailBudget, seconds: float, step_s: float, wanted: int) -> int:
    """In so long, where each step would save ``wanted``."""
    count, now = 0, 0.0
    while (now := now + step_s) < seconds:
        for _ in range(min(wanted, budget.blocks(now))):
            budget.spend()
            count += 1
    return count


@pytest.mark.parametrize("step_s", [0.01, 0.1, 0.5])
def test_saving_takes_its_share_of_the_time_however_long_steps_are(step_s: float) -> None:
    budget = TailBudget(0.01)
    budget.learn(Transferred(0, 0.0, 0, 0.0, 2, 0.004))
    assert 0.002 * saved(budget, 100, step_s, 100) == pytest.approx(1.0, rel=0.1)


def test_all_are_saved_where_they_take_less_than_that() -> None:
    budget = TailBudget(0.01)
    budget.learn(Transferred(0, 0.0, 0, 0.0, 1, 0.001))
    assert saved(budget, 100.05, 0.2, 1) == 500


def test_how_long_one_takes_is_learnt_from_all_that_were_saved() -> None:
    budget = TailBudget(1.0)
    for _ in range(100):
        budget.learn(Transferred(0, 0.0, 100, 1.0, 0, 0.0))
        # The first asked a store that had them all.
        budget.learn(Transferred(0, 0.0, 0, 0.0, 0, 1.0))
        budget.learn(Transferred(0, 3.0, 0, 0.0, 6, 2.0))
    assert saved(budget, 100, 1.0, 100) == pytest.approx(200, rel=0.1)


def test_a_long_rest_does_not_save_up_for_long_steps() -> None:
    budget = TailBudget(0.01)
    budget.learn(Transferred(0, 0.0, 0, 0.0, 1, 0.001))
    budget.blocks(0.0)
    assert budget.blocks(1e6) == 16
