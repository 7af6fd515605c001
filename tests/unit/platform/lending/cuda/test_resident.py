"""The server that stays: two programs of it, each in a process of its own, and a borrower."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from loomserve.platform.lending.cuda.buffer import NUMBER, REFUSED
from loomserve.platform.lending.cuda.resident import begin_anew
from tests.unit.platform.lending.cuda import ends
from tests.unit.platform.lending.cuda.loans import (
    GRANTED,
    SHAPE,
    TWO,
    Loan,
    Processes,
    process,
    rows_of,
    step_of,
)

pytestmark = [pytest.mark.heavy, pytest.mark.xdist_group("interpreted kernels")]

DRAINED = 1
LONG_S = 500.0
PROGRAMS = 2


class Resident:
    """Both programs of one loan's server."""

    def __init__(self, loan: Loan, second: Any) -> None:
        self._loan, self._second = loan, second
        second.submit(ends.open_lender, *loan.lenders).result()

    def begin(self, seconds: float) -> list[Future[Any]]:
        begin_anew(self._loan.own.state)
        return [
            self._loan.processes.at_lender(ends.reside, self._loan.name, seconds, PROGRAMS, 0),
            self._second.submit(ends.reside, self._loan.name, seconds, PROGRAMS, 1),
        ]


@pytest.fixture(scope="module")
def second(processes: Processes) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, process() as other:
        patch.setenv("TRITON_INTERPRET", "1")
        assert other.submit(ends.interpreted).result()
        yield other


@pytest.fixture
def resident(loan: Loan, second: Any) -> Resident:
    return Resident(loan, second)


def test_two_programs_answer_all_layers_of_many_steps(loan: Loan, resident: Resident) -> None:
    serving = resident.begin(LONG_S)
    # The last has fewer rows than there are programs.
    steps = [step_of(*TWO), step_of([1, 16, 17], [1, 1, 1]), step_of([33], [1])]
    for step in steps:
        loan.begin(step)
        layers = [rows_of(step) for _ in range(SHAPE.layers)]
        answers = loan.processes.at_borrower(ends.through_layers, loan.name, layers, SHAPE).result()
        for layer, (rows, answer) in enumerate(zip(layers, answers, strict=True)):
            assert answer.answered
            whole = loan.whole(layer, rows.query, step)
            torch.testing.assert_close(answer.output, whole, rtol=0, atol=2e-6)
    assert (loan.closed, loan.done) == (0, len(steps) * SHAPE.layers)
    loan.buffer.closed.fill_(DRAINED)
    for each in serving:
        each.result()


def test_it_ends_by_itself_and_another_goes_on_where_it_ended(
    loan: Loan, resident: Resident
) -> None:
    step = step_of(*TWO)
    loan.begin(step)
    for layer in range(2):
        for each in resident.begin(0.01):
            each.result()
        assert loan.done == layer
        rows = rows_of(step)
        loan.post(layer, rows)
        serving = resident.begin(LONG_S) if layer else resident.begin(1.0)
        answer = loan.waiting(4).result()
        assert answer.answered
        torch.testing.assert_close(
            answer.output, loan.whole(layer, rows.query, step), rtol=0, atol=2e-6
        )
        if layer:
            loan.buffer.closed.fill_(DRAINED)
        for each in serving:
            each.result()


@pytest.mark.parametrize("what", ["block", "slots"])
def test_what_is_not_the_borrowers_closes_the_loan_and_ends_all_programs(
    loan: Loan, resident: Resident, what: str
) -> None:
    step = step_of(*TWO)
    loan.begin(step)
    loan.post(1, rows_of(step))
    if what == "block":
        loan.buffer.block_table[1, 1] = GRANTED
    else:
        loan.buffer.slots[3] = GRANTED * SHAPE.block_size
    before = loan.memory.clone()
    for each in resident.begin(LONG_S):
        each.result()
    assert (loan.closed, loan.done) == (REFUSED.value, 0)
    assert torch.equal(loan.memory[:, GRANTED:], before[:, GRANTED:])
    # It is over, so that whoever comes next does not take it again.
    assert int(loan.own.state[NUMBER.value]) == 1
    for each in resident.begin(LONG_S):
        each.result()
    assert loan.done == 0


def test_a_closed_loan_is_served_nothing(loan: Loan, resident: Resident) -> None:
    step = step_of(*TWO)
    loan.begin(step)
    loan.post(0, rows_of(step))
    loan.buffer.closed.fill_(DRAINED)
    for each in resident.begin(LONG_S):
        each.result()
    assert loan.done == 0
