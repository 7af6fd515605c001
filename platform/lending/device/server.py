"""The lender's end of loans whose rows kernels carry."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from functools import partial

import torch

from loomserve.platform.lending.device.borrower import KernelBorrower
from loomserve.platform.lending.device.kernel_loan import KernelLoan
from loomserve.platform.lending.device.memory import SharedMemory
from loomserve.platform.lending.leaf import Leaf
from loomserve.platform.lending.policy.layout import PLAIN, Rows
from loomserve.platform.lending.ring.lent_ring import LentRing
from loomserve.platform.lending.ring.ring import LINE_WORDS, Closed, ControlLine, Ring
from loomserve.platform.lending.ring.served_ring import POLLED, Caches, ComputeLayers
from loomserve.platform.lending.ring.serving_thread import ServingThread

SPIN_S = 0.05
STAY_S = 0.05
"""For so long the kernel that stays does; copies of blocks wait for its end."""


class Form(StrEnum):
    """How a lender's tasks are served."""

    STREAM = "stream"
    """By a thread."""
    POLLS = "polls"
    """By a thread, and by polls within steps."""
    RESIDENT = "resident"
    """By a kernel that stays."""


class KernelServer:
    """A :class:`~loomserve.platform.lending.leaf.LenderEnd` in one of three forms.

    A thread serves tasks on a stream of the highest priority. It looks for one by a kernel and
    queues what serves it (``STREAM``), or queues a kernel that stays and does both (``RESIDENT``),
    whether the engine runs a step or not. In the form ``POLLS`` it does the former between steps;
    within them :meth:`poll` queues both on the model's own stream. Of kernels on two streams, those
    of a step wait for the thread's and the thread's for the step's, so no task is served twice.
    """

    def __init__(self, memory: SharedMemory, form: Form = Form.STREAM) -> None:
        self._memory = memory
        self._form = form
        self._loans: dict[LentRing, KernelLoan] = {}
        self._thread = ServingThread(self._loans, self._serving(form), SPIN_S)
        self._stream: torch.cuda.Stream | None = None
        # A thread that is in CUDA must not outlive Python.
        self._stop = weakref.finalize(self, self._thread.stop)

    @staticmethod
    def _serving(form: Form) -> Callable[[KernelLoan], int]:
        # Of a thread, so that it keeps no server alive.
        return (
            partial(KernelLoan.stay, seconds=STAY_S) if form is Form.RESIDENT else KernelLoan.serve
        )

    def poll(self) -> int:
        """Queue the service of what is posted; how much that is nobody knows yet."""
        if self._form is Form.POLLS:
            with self._thread.lock:
                self._thread.serve_all(KernelLoan.queue)
        return 0

    def open(
        self,
        ring: LentRing,
        caches: Caches,
        layers: ComputeLayers | None = None,
        rows: Rows = PLAIN,
    ) -> None:
        """Serve this ring from now on, and make the memory that its borrower opens.

        For the first borrower of its shape on this machine it takes some seconds to compile.
        ``ValueError`` if it is to compute layers, or its attention is none that the kernels
        compute.
        """
        if layers is not None:
            raise ValueError("layers are lent between CPU devices only")
        loan = KernelLoan(ring, caches, self._memory, rows)
        loan.compile(STAY_S if self._form is Form.RESIDENT else None)
        ring.words[ControlLine.LENDER * LINE_WORDS] = os.getpid()
        with self._thread.lock:
            self._loans[ring] = loan
        if self._stream is None and torch.cuda.is_available():
            _, highest = torch.cuda.Stream.priority_range()
            self._stream = torch.cuda.Stream(priority=highest)
        self._thread.start(partial(_on, self._stream))

    def close(self, ring: LentRing) -> bool:
        with self._thread.lock:
            self._loans.pop(ring).end()
        return False

    def busy(self) -> None:
        if self._form is Form.POLLS:
            self._thread.pause()
        with self._thread.lock:
            if self._form is Form.POLLS and self._stream is not None:
                torch.cuda.current_stream().wait_stream(self._stream)
            for loan in self._loans.values():
                loan.clear()

    def idle(self) -> None:
        if self._form is Form.POLLS:
            with self._thread.lock:
                for loan in self._loans.values():
                    loan.count(POLLED)
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream())
            self._thread.resume()

    def dead(self) -> list[LentRing]:
        return [ring for ring in self._loans if ring.closed is not Closed.OPEN]

    def stop(self) -> None:
        self._stop()
        self._loans.clear()


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    if stream is None:
        torch.set_num_threads(1)
        return nullcontext()
    torch.cuda.set_device(stream.device)
    current: AbstractContextManager[object] = torch.cuda.stream(stream)
    return current


def kernel_leaf(memory: SharedMemory, form: Form = Form.STREAM) -> Leaf:
    """Kernels between devices of one kind, over memory that both ends map."""
    return Leaf(
        borrower=lambda path, patience_s: KernelBorrower(Ring.attach(path), memory, patience_s),
        server=lambda: KernelServer(memory, form),
        computes_layers=False,
        polls=form is Form.POLLS,
    )
