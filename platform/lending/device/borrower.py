"""The borrower's end of a loan whose rows kernels carry; what copies blocks is the ring's."""

from __future__ import annotations

import time

import torch

from loomserve.platform.base.errors import StartError
from loomserve.platform.lending.cuda.borrowing import HANDED_AT, TAKEN_AT, DeviceBorrower
from loomserve.platform.lending.cuda.buffer import TaskBuffer, borrower_bytes, lender_bytes
from loomserve.platform.lending.device.memory import SharedMemory
from loomserve.platform.lending.device.shape import answer_file, task_file, task_shape
from loomserve.platform.lending.ring.borrower import Borrower
from loomserve.platform.lending.ring.ring import Ring
from loomserve.platform.lending.ring.words import LINE_WORDS, ControlLine


class KernelBorrower(Borrower):
    """A borrower's end for the stream that runs a model. All of a step is queued there, so nothing
    says in a step whether an answer came: what did not is zeros, and the ring is closed by then,
    which the scheduler sees before it takes the step's tokens. A lender that died is given up like
    one that is late."""

    def __init__(self, ring: Ring, memory: SharedMemory, patience_s: float) -> None:
        """``StartError`` if the lender made nothing for kernels beside the ring."""
        super().__init__(ring)
        shape, path = task_shape(ring), ring.path
        tasks = memory.open(task_file(path), lender_bytes(shape))
        if tasks is None:
            raise StartError(
                f"the lender of {path} has no memory for kernels: run both engines on devices of "
                "one kind"
            )
        closed = memory.pin(ring.areas.control[ControlLine.CLOSED, :1])
        answers = memory.make(answer_file(path), borrower_bytes(shape))
        buffer = TaskBuffer.over(shape, tasks, answers, closed)
        self._device = DeviceBorrower(shape, buffer, patience_s)
        self._device.compile()
        self._layers = shape.layers

    def begin_step(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        self._count_waits()
        self._device.begin_step(query_start_loc, seq_lens, block_table, slot_mapping)

    def post(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self._device.post(layer, query, key, value)
        self.ring.count(0, 1)

    def wait(self, output: torch.Tensor, timeout_s: float) -> bool:
        self._device.wait(output.view(len(output), -1, self.ring.geometry.head_size))
        self.ring.words[ControlLine.BORROWER * LINE_WORDS + 1] = time.monotonic_ns()
        return True

    def _count_waits(self) -> None:
        """Count the last step's waits, each as long as that of its last layer."""
        state = self._device.state.tolist()
        waited = max(0, state[TAKEN_AT.value] - state[HANDED_AT.value])
        self.ring.count(2, waited * self._layers)
