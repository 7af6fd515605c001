"""What the simulation of queues that know all lengths compares."""

from __future__ import annotations

import random

import pytest

from benchmarks.adaptive_engine import Length
from benchmarks.adaptive_simulated import StepCost, compared, feedback
from loomserve.platform.scheduling.policy.expected import Expected
from loomserve.platform.scheduling.policy.queue import QueuedRequest

COST = StepCost.parse("12:0.6")


def lengths(answers: list[int]) -> list[Length]:
    return [Length(20, answer, None) for answer in answers]


def test_a_cost_is_of_a_step_and_of_its_tokens() -> None:
    assert StepCost(12.0, 0.6) == COST
    assert COST.recompute_s(100) == pytest.approx(0.072)


def test_who_has_had_less_comes_first_by_levels_that_double() -> None:
    priorities = [feedback(QueuedRequest(0.0, tokens, 9), 5.0) for tokens in (1, 31, 32, 63, 64)]
    assert priorities == [0, 0, -1, -1, -2]


def test_who_makes_way_for_who_comes_starts_sooner_and_costs_throughput() -> None:
    over = compared(lengths(random.Random(1).choices([4, 60], k=300)), 64, COST)
    at_once, first_come = over["feedback_at_once"], over["adaptive_fcfs"]
    assert at_once["weighted_turnaround"] < 0.9 * first_come["weighted_turnaround"]
    assert at_once["throughput"] < 0.9 * first_come["throughput"]


def test_who_knows_lengths_waits_less_where_they_differ() -> None:
    mixed = random.Random(1).choices([4, 60], k=300)
    over = compared(lengths(mixed), 64, COST)
    assert over["sjf_known"]["turnaround"] < over["adaptive_fcfs"]["turnaround"] < 1
    assert over["fair_known"]["weighted_turnaround"] < 0.7


def test_who_is_told_predictions_does_as_if_they_were_the_lengths_where_they_are() -> None:
    answers = random.Random(1).choices([4, 60], k=300)
    told = [Length(20, answer, Expected(answer, answer)) for answer in answers]
    over = compared(told, 64, COST)
    assert over["fair_predicted"] == over["fair_known"]
    assert "fair_predicted" not in compared(lengths(answers), 64, COST)


def test_knowing_lengths_gains_nothing_where_all_are_alike() -> None:
    over = compared(lengths([64] * 200), 64, COST)
    assert over["sjf_known"]["turnaround"] == pytest.approx(
        over["adaptive_fcfs"]["turnaround"], rel=0.05
    )
