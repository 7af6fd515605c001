"""What the two ends of a loan do, each in a process of its own whose kernels are interpreted."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import torch

from loomserve.platform.lending.cuda.attention import SERVING, LenderMemory
from loomserve.platform.lending.cuda.borrowing import ANSWERED, DeviceBorrower
from loomserve.platform.lending.cuda.buffer import NUMBER, TaskBuffer, TaskShape
from loomserve.platform.lending.cuda.kernel import INTERPRETED
from loomserve.platform.lending.cuda.resident import queue_programs
from loomserve.platform.lending.cuda.serving import DeviceLender

PATIENCE_S = 500.0
"""Of a borrower that shall have its answer: more than any takes on the busiest machine."""

_borrowers: dict[str, DeviceBorrower] = {}
_lenders: dict[str, DeviceLender] = {}


class Step(NamedTuple):
    """A step's metadata as a borrower gets it."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class Rows(NamedTuple):
    """A layer's rows."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Answer(NamedTuple):
    """What a wait left."""

    answered: bool
    output: torch.Tensor
    seconds: float


def interpreted() -> bool:
    """Begin, on one core, as the other end computes, too."""
    torch.set_num_threads(1)
    return INTERPRETED


def open_borrower(name: str, shape: TaskShape, buffer: TaskBuffer, patience_s: float) -> None:
    _borrowers[name] = DeviceBorrower(shape, buffer, patience_s)


def open_lender(
    name: str,
    shape: TaskShape,
    buffer: TaskBuffer,
    caches: list[tuple[torch.Tensor, torch.Tensor]],
    granted: torch.Tensor,
    memory: LenderMemory,
) -> None:
    # A part of a context has a tile, lest the interpreter compute long ones.
    _lenders[name] = DeviceLender(shape, buffer, caches, granted, memory, part_tiles=1)


def reside(name: str, seconds: float, programs: int, one: int) -> None:
    """Run this one of a server's programs."""
    queue_programs(_lenders[name], seconds, programs, range(one, one + 1))


def begin_step(name: str, step: Step) -> None:
    _borrowers[name].begin_step(*step)


def post(name: str, layer: int, rows: Rows) -> None:
    _borrowers[name].post(layer, *rows)


def wait(name: str, rows: int, shape: TaskShape) -> Answer:
    output = torch.full((rows, shape.query_heads, shape.head_size), torch.nan, dtype=shape.dtype)
    begin = time.monotonic()
    _borrowers[name].wait(output)
    answered = bool(_borrowers[name].state[ANSWERED.value])
    return Answer(answered, output, time.monotonic() - begin)


def through_layers(name: str, layers: list[Rows], shape: TaskShape) -> list[Answer]:
    """Post each layer's rows and wait for them, as a step does."""
    answers = []
    for layer, rows in enumerate(layers):
        post(name, layer, rows)
        answers.append(wait(name, len(rows.query), shape))
    return answers


def poll(name: str) -> None:
    _lenders[name].poll()


def attend(name: str) -> None:
    _lenders[name].attend()


def serve(name: str) -> None:
    _lenders[name].serve()


def serve_until(name: str, number: int) -> None:
    """Look for tasks until so many are served."""
    lender = _lenders[name]
    while int(lender.state[NUMBER.value]) < number:
        lender.poll()
        # The interpreter takes long for programs that have nothing to do.
        if lender.state[SERVING.value] != lender.state[NUMBER.value]:
            lender.attend()
        else:
            time.sleep(1e-3)


def poll_and_die(name: str) -> None:
    """Take a task, and end as if killed."""
    _lenders[name].poll()
    os._exit(9)
