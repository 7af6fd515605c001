"""Whole runs of the simulator of an engine's schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from loomserve.platform.scheduling.simulator import (
    Costs,
    Limits,
    Policies,
    ScheduledStep,
    SimulatedRequest,
    Simulator,
    Times,
)


@dataclass(frozen=True, slots=True)
class Simulation:
    """Steps of an engine, and ``times`` of all requests by name."""

    steps: list[ScheduledStep]
    times: dict[str, Times]


class StalledError(Exception):
    """Raised where requests wait of which none will ever start."""


def simulate(
    requests: Iterable[SimulatedRequest], limits: Limits, policies: Policies, costs: Costs
) -> Simulation:
    """Run all requests to their end, each step in its predicted time.

    Raises:
        StalledError: the policies let nothing start although nothing runs.
        ValueError: a request can never run.
    """
    engine = Simulator(requests, limits, policies, costs)
    steps: list[ScheduledStep] = []
    now = 0.0
    while (due_s := engine.due_s) is not None:
        now = max(now, due_s)
        step = engine.schedule(now)
        if not (step.shares or step.preempted):
            raise StalledError(f"nothing starts at {now} s")
        now += costs.step_s(step)
        engine.end(step, now)
        steps.append(step)
    return Simulation(steps, engine.times)


def replay(
    requests: Iterable[SimulatedRequest],
    times: Sequence[float],
    limits: Limits,
    policies: Policies,
    costs: Costs,
) -> Simulation:
    """Run steps that begin at the given ``times``, of which the last is the last step's end."""
    engine = Simulator(requests, limits, policies, costs)
    steps: list[ScheduledStep] = []
    for start_s, end_s in pairwise(times):
        step = engine.schedule(start_s)
        engine.end(step, end_s)
        steps.append(step)
    return Simulation(steps, engine.times)
