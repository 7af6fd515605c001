"""Borrower and lender in two processes that share tensors; the kernels are interpreted."""

from __future__ import annotations

import math
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from loomserve.platform.lending.cuda.buffer import (
    LAYER,
    NUMBER,
    REFUSED,
    ROWS,
    TIMED_OUT,
    TaskBuffer,
    TaskShape,
)
from tests.unit.platform.lending.cuda import ends
from tests.unit.platform.lending.cuda.ends import PATIENCE_S
from tests.unit.platform.lending.cuda.loans import (
    GRANTED,
    SHAPE,
    TWO,
    Loan,
    Processes,
    rows_of,
    step_of,
)

pytestmark = [pytest.mark.heavy, pytest.mark.xdist_group("interpreted kernels")]

DRAINED = 1


def test_answers_of_many_steps_are_whole_attention_over_a_permuted_block_table(loan: Loan) -> None:
    steps = [step_of(*TWO), step_of([1, 16, 17], [1, 1, 1]), step_of([128], [2])]
    serving = loan.processes.at_lender(ends.serve_until, loan.name, 3 * len(steps))
    for step in steps:
        loan.begin(step)
        layers = [rows_of(step) for _ in range(SHAPE.layers)]
        answers = loan.processes.at_borrower(ends.through_layers, loan.name, layers, SHAPE).result()
        for layer, (rows, answer) in enumerate(zip(layers, answers, strict=True)):
            assert answer.answered
            written = loan.caches[layer][0].transpose(1, 2).flatten(0, 1)[step.slot_mapping]
            assert torch.equal(written, rows.key)
            whole = loan.whole(layer, rows.query, step)
            torch.testing.assert_close(answer.output, whole, rtol=0, atol=2e-6)
    serving.result()
    assert (loan.closed, loan.done) == (0, 9)


def test_in_half_precision_an_answer_is_as_near_as_its_mantissa(processes: Processes) -> None:
    # Of bfloat16 the interpreter multiplies the bits.
    shape = TaskShape(**{**vars(SHAPE), "dtype": torch.float16})
    loan, step = Loan(processes, shape, PATIENCE_S), step_of(*TWO)
    rows = rows_of(step, torch.float16)
    loan.begin(step)
    loan.post(1, rows)
    loan.lender(ends.serve)
    output = loan.waiting(4).result().output
    # Weights and output are rounded to 11 bits once each.
    torch.testing.assert_close(
        output.float(), loan.whole(1, rows.query, step), rtol=2**-10, atol=2**-10
    )


def test_a_lender_that_is_late_is_given_up_and_its_answer_is_nobodys(processes: Processes) -> None:
    loan, step = Loan(processes, SHAPE, patience_s=0.2), step_of(*TWO)
    loan.begin(step)
    loan.post(0, rows_of(step))
    loan.lender(ends.poll)
    first = loan.waiting(4).result()
    assert (first.answered, loan.closed) == (False, TIMED_OUT.value)
    assert first.seconds >= 0.2
    assert first.output.eq(0).all()
    # The lender had the task before the loan was closed, and ends it.
    loan.lender(ends.attend)
    assert loan.done == 1
    loan.post(1, rows_of(step))
    second = loan.waiting(4).result()
    assert not second.answered
    assert second.output.eq(0).all()
    # What was posted after the end is not there.
    assert int(loan.buffer.posted[NUMBER.value]) == 1
    loan.lender(ends.serve)
    assert loan.done == 1


def test_a_closed_loan_gets_no_task_and_is_not_waited_for(loan: Loan) -> None:
    step = step_of(*TWO)
    loan.begin(step)
    loan.buffer.closed.fill_(DRAINED)
    loan.post(0, rows_of(step))
    answer = loan.waiting(4).result()
    assert not answer.answered
    assert answer.output.eq(0).all()
    assert answer.seconds < PATIENCE_S / 2
    assert int(loan.buffer.posted[NUMBER.value]) == 0
    assert loan.closed == DRAINED


def test_a_wait_ends_when_its_loan_is_closed(loan: Loan) -> None:
    step = step_of(*TWO)
    loan.begin(step)
    loan.post(0, rows_of(step))
    waiting = loan.waiting(4)
    with pytest.raises(TimeoutError):
        waiting.result(timeout=0.3)
    loan.buffer.closed.fill_(DRAINED)
    answer = waiting.result()
    assert not answer.answered
    assert answer.seconds < PATIENCE_S / 2
    # A lender that looks only now serves nothing.
    loan.lender(ends.serve)
    assert loan.done == 0


def _spoil(buffer: TaskBuffer, what: str, value: int) -> None:
    word = {"number": NUMBER.value, "layer": LAYER.value, "rows": ROWS.value}
    if what in word:
        buffer.posted[word[what]] = value
    elif what == "block":
        # The second block of the second request.
        buffer.block_table[1, 1] = value
    else:
        # Of the last row.
        getattr(buffer, what)[3] = value


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("number", 2), ("number", -1),
        ("layer", -1), ("layer", SHAPE.layers), ("layer", 2**40),
        ("rows", 0), ("rows", SHAPE.max_rows + 1),
        ("block", GRANTED), ("block", -1), ("block", 2**31 - 1),
        ("slots", GRANTED * SHAPE.block_size), ("slots", -1), ("slots", 2**62),
        ("requests", -1), ("requests", SHAPE.max_requests),
        ("contexts", 0), ("contexts", -5), ("contexts", SHAPE.max_blocks * SHAPE.block_size + 1),
    ],
)  # fmt: skip
def test_what_is_not_the_borrowers_closes_the_loan(loan: Loan, what: str, value: int) -> None:
    step = step_of(*TWO)
    loan.begin(step)
    loan.post(1, rows_of(step))
    _spoil(loan.buffer, what, value)
    before = loan.memory.clone()
    loan.lender(ends.serve)
    assert (loan.closed, loan.done) == (REFUSED.value, 0)
    # Other rows of the task may have been written; nothing outside of what is granted, ever.
    assert torch.equal(loan.memory[:, GRANTED:], before[:, GRANTED:])
    assert torch.equal(loan.memory[[0, 2]], before[[0, 2]])
    assert not loan.waiting(4).result().answered


def test_memory_that_was_taken_back_is_not_touched(loan: Loan) -> None:
    step = step_of([40], [1])
    loan.begin(step)
    loan.post(0, rows_of(step))
    loan.granted.fill_(0)
    before = loan.memory.clone()
    loan.lender(ends.serve)
    assert (loan.closed, loan.done) == (REFUSED.value, 0)
    assert torch.equal(loan.memory, before)


def test_a_lender_that_dies_with_a_task_costs_no_more_than_patience(processes: Processes) -> None:
    loan, step = Loan(processes, SHAPE, patience_s=1.0), step_of(*TWO)
    loan.begin(step)
    loan.post(0, rows_of(step))
    waiting = loan.waiting(4)
    with pytest.raises(BrokenProcessPool):
        processes.at_lender(ends.poll_and_die, loan.name).result()
    processes.lender_died()
    answer = waiting.result()
    assert (answer.answered, loan.closed) == (False, TIMED_OUT.value)
    assert answer.output.eq(0).all()


def test_a_step_that_does_not_fit_is_refused_before_anything_is_written(loan: Loan) -> None:
    long = step_of([128], [9])
    with pytest.raises(ValueError, match="9 rows"):
        loan.begin(long)
    step = step_of(*TWO)
    loan.begin(step)
    with pytest.raises(ValueError, match="not a step's"):
        loan.post(0, rows_of(step_of([40], [1])))


@pytest.mark.parametrize(
    "change", [{"query_heads": 5}, {"block_size": 24}, {"head_size": 8}, {"layers": 0}]
)
def test_a_geometry_that_the_kernels_do_not_know_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"geometry|power of two|too small"):
        TaskShape(**{**vars(SHAPE), **change})


def test_times_of_a_task_follow_each_other(loan: Loan) -> None:
    step = step_of(*TWO)
    loan.begin(step)
    loan.post(0, rows_of(step))
    loan.lender(ends.serve)
    assert loan.waiting(4).result().answered
    posted, (picked, finished) = loan.buffer.posted[3], loan.buffer.done[1:3].tolist()
    assert 0 < posted <= picked <= finished
    assert math.isclose(posted, finished, rel_tol=0.5)
