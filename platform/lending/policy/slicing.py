"""Operator slicing: how finely a lender slices its operators so that borrowers' tasks wait little.

A lender serves a borrower's task between two of its own operators. A task that arrives at a
uniformly random time of the lender's step meets operator i, of T_i seconds, with probability
T_i/ΣT, and then waits for the rest of it, W, uniform on [0, T_i]. The sender works for K seconds
itself meanwhile, and the task's service takes N, so it is delayed by (W + N - K)⁺. With the slack
s = (K - N)⁺, a task that meets operator i is delayed in the mean by

    ∫ (w - s)⁺ dw / T_i over [0, T_i]  +  (N - K)⁺  =  ((T_i - s)⁺)² / (2 T_i)  +  (N - K)⁺

and over the whole step by Σ ((T_i - s)⁺)² / (2 ΣT) + (N - K)⁺, quadratic in large operators.

Weaver (§4.2) states the conditional wait E[W | K < W + N] instead: (T_i + s)/2 where T_i > s,
weighted by T_i. It does not drive the algorithm here, because it is the wait of those who are
blocked and says nothing of how many are: it stays above s until the very last operator is shorter
than s, when hardly any task is delayed any more, and it counts waiting that the sender's own work
hides. The delay also bounds what slicing can gain: (N - K)⁺ is the tasks' own service, which no
slice shortens.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operator:
    """One of the lender's operators, which runs whole or in equal slices; names are unique in a
    step."""

    name: str
    seconds: float
    most_slices: int = 1  # 1 if it cannot be sliced
    slice_overhead_s: float = 0.0  # what each slice takes beyond its share

    def slice_s(self, slices: int) -> float:
        return self.seconds / slices + (self.slice_overhead_s if slices > 1 else 0.0)


@dataclass(frozen=True, slots=True)
class SlicingPlan:
    slices: Mapping[str, int]  # by operator's name
    wait_before_s: float  # mean delay of a task with all operators whole
    wait_after_s: float
    overhead_s: float = 0.0  # what the slices add to a step of the lender


def expected_wait(operator_s: Sequence[float], local_s: float, service_s: float) -> float:
    """Return the mean seconds by which a task delays its sender: E[(W + N - K)⁺]. K is ``local_s``,
    what the sender computes itself meanwhile, N ``service_s``, what the lender computes for the
    task."""
    slack_s, floor_s = max(local_s - service_s, 0.0), max(service_s - local_s, 0.0)
    step_s = sum(operator_s)
    blocked = sum(max(each_s - slack_s, 0.0) ** 2 for each_s in operator_s)
    return floor_s + (blocked / (2 * step_s) if step_s else 0.0)


def split(
    operators: Sequence[Operator],
    local_s: float,
    service_s: float,
    threshold_s: float,
    most_overhead_s: float = math.inf,
) -> SlicingPlan:
    """Plan by Weaver's algorithm 1: halve the longest slices until tasks wait little. It goes on
    while the mean delay that the operators cause exceeds ``threshold_s`` and their longest slice K
    - N. Slices of one operator are equal, so they are halved together. One that cannot be halved,
    or whose overhead would make tasks wait longer or, with that of the others, exceed
    ``most_overhead_s`` a step, stays as it is. ``ValueError`` if two operators have the same
    name."""
    slices = {operator.name: 1 for operator in operators}
    if len(slices) < len(operators):
        raise ValueError("two operators of a step have the same name")
    slack_s, floor_s = max(local_s - service_s, 0.0), max(service_s - local_s, 0.0)

    def wait_s() -> float:
        return expected_wait(list(_slice_seconds(operators, slices)), local_s, service_s)

    def overhead_s() -> float:
        return sum(_slice_seconds(operators, slices)) - sum(each.seconds for each in operators)

    before_s = after_s = wait_s()
    longest = [(-operator.seconds, at) for at, operator in enumerate(operators)]
    heapq.heapify(longest)
    while longest and after_s - floor_s > threshold_s and -longest[0][0] > slack_s:
        at = heapq.heappop(longest)[1]
        operator = operators[at]
        if 2 * slices[operator.name] > operator.most_slices:
            continue
        slices[operator.name] *= 2
        halved_s = wait_s()
        if halved_s < after_s and overhead_s() <= most_overhead_s:
            after_s = halved_s
            heapq.heappush(longest, (-operator.slice_s(slices[operator.name]), at))
        else:
            slices[operator.name] //= 2
    return SlicingPlan(slices, before_s, after_s, overhead_s())


def _slice_seconds(operators: Sequence[Operator], slices: Mapping[str, int]) -> Iterator[float]:
    for operator in operators:
        count = slices[operator.name]
        for _ in range(count):
            yield operator.slice_s(count)
