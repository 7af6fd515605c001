"""The thread of a lender that queues kernels, on a stream of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum

import torch

from loomserve.platform.lending.device.kernel_loan import KernelLoan
from loomserve.platform.lending.ring.lent_ring import LentRing
from loomserve.platform.lending.ring.ring import Closed

log = logging.getLogger(__name__)

LOOK_NS = 100_000_000
"""Nanoseconds between two looks at which borrowers live."""
IDLE_SLEEP_S = 100e-6
"""Between two looks for a task, once there was none for a while."""
SPIN_S = 0.05
STAY_S = 0.05
"""For so long the kernel that stays does; copies of blocks wait for its end."""
_SHARE = 8
"""One in so many multiprocessors has a program of the kernel that stays."""


class Form(StrEnum):
    """How a lender's tasks are served (:class:`.server.KernelServer`)."""

    STREAM = "stream"
    POLLS = "polls"
    RESIDENT = "resident"


class ServingThread:
    """Serves loans while it holds ``lock``, unless it is paused."""

    def __init__(self, loans: Mapping[LentRing, KernelLoan], form: Form) -> None:
        self.lock = threading.Lock()
        self._loans = loans
        self._form = form
        self._idle = threading.Event()
        self._idle.set()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._looked = 0
        self._stream: torch.cuda.Stream | None = None
        self._programs = 1

    def start(self) -> None:
        if self._thread is None:
            if torch.cuda.is_available():
                _, highest = torch.cuda.Stream.priority_range()
                self._stream = torch.cuda.Stream(priority=highest)
                of = torch.cuda.get_device_properties(self._stream.device)
                self._programs = max(1, of.multi_processor_count // _SHARE)
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._idle.set()
        if self._thread is not None:
            self._thread.join()

    def pause(self) -> None:
        """Queue nothing until :meth:`resume`; the current stream waits for what is queued."""
        self._idle.clear()
        with self.lock:
            if self._stream is not None:
                torch.cuda.current_stream().wait_stream(self._stream)

    def resume(self) -> None:
        """Go on, behind what is queued on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._idle.set()

    def _run(self) -> None:
        last = time.monotonic()
        with self._on_stream():
            while not self._stopped:
                self._idle.wait()
                with self.lock:
                    served = 0
                    if self._idle.is_set() and not self._stopped:
                        served = sum(self._serve(loan) for loan in self._loans.values())
                        self._look_for_dead(time.monotonic_ns())
                if served:
                    last = time.monotonic()
                elif time.monotonic() - last >= SPIN_S:
                    time.sleep(IDLE_SLEEP_S)

    def _on_stream(self) -> AbstractContextManager[object]:
        if self._stream is None:
            torch.set_num_threads(1)
            return nullcontext()
        torch.cuda.set_device(self._stream.device)
        current: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return current

    def _serve(self, loan: KernelLoan) -> bool:
        try:
            if self._form is Form.RESIDENT:
                return loan.stay(STAY_S, self._programs)
            return loan.serve()
        except Exception:
            loan.ring.shut(Closed.FAILED)
            log.exception("a borrower's attention failed")
            return False

    def _look_for_dead(self, now: int) -> None:
        if now - self._looked >= LOOK_NS:
            self._looked = now
            for loan in self._loans.values():
                if loan.copies.borrower.gone():
                    loan.ring.shut(Closed.DIED)
