"""The lender's end of loans whose rows kernels carry: a thread that queues them."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from contextlib import AbstractContextManager, nullcontext

import torch

from loomserve.platform.lending.cuda.buffer import (
    NUMBER,
    POSTED_AT,
    ROWS,
    TaskBuffer,
    borrower_bytes,
    lender_bytes,
)
from loomserve.platform.lending.cuda.serving import PICKED_UP, SERVING, DeviceLender
from loomserve.platform.lending.device.files import answer_file, task_file
from loomserve.platform.lending.device.memory import SharedMemory
from loomserve.platform.lending.device.shape import task_shape
from loomserve.platform.lending.policy.layout import PLAIN, Rows
from loomserve.platform.lending.ring.lent_ring import GRANTED, LentRing
from loomserve.platform.lending.ring.ring import LINE_WORDS, Closed, ControlLine
from loomserve.platform.lending.ring.served_ring import (
    IDLED,
    PICKUP_NS,
    SERVICE_NS,
    Caches,
    ComputeLayers,
    ServedRing,
)

log = logging.getLogger(__name__)

LOOK_NS = 100_000_000
"""Nanoseconds between two looks at which borrowers live."""
IDLE_SLEEP_S = 100e-6
"""Between two looks for a task, once there was none for a while."""
SPIN_S = 0.05


class KernelServer:
    """A :class:`~loomserve.platform.lending.leaf.LenderEnd` with control by the CPU.

    A thread looks for tasks by a kernel, and queues those that serve what it found, on a stream of
    the highest priority, whether the engine runs a step or not; so nothing looks within steps.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._loans: dict[LentRing, _Loan] = {}
        self._work = _Thread(self._loans)
        # A thread that is in CUDA must not outlive Python.
        self._stop = weakref.finalize(self, self._work.stop)

    def poll(self) -> int:
        return 0

    def open(
        self,
        ring: LentRing,
        caches: Caches,
        layers: ComputeLayers | None = None,
        rows: Rows = PLAIN,
    ) -> None:
        """Serve this ring from now on, and make the memory that its borrower opens.

        Raises:
            ValueError: it is to compute layers, or its blocks lie abreast, or its attention is
                none that the kernels compute.
        """
        if layers is not None:
            raise ValueError("layers are lent between CPU devices only")
        if rows != PLAIN:
            raise ValueError("a borrower with fewer layers has no room on a GPU: lend to its like")
        loan = _Loan(ring, caches, self._memory)
        ring.words[ControlLine.LENDER * LINE_WORDS] = os.getpid()
        with self._work.lock:
            self._loans[ring] = loan
        self._work.start()

    def close(self, ring: LentRing) -> bool:
        with self._work.lock:
            self._loans.pop(ring).end()
        return False

    def busy(self) -> None:
        with self._work.lock:
            for loan in self._loans.values():
                loan.copies.clear(loan.ring.granted)

    def idle(self) -> None:
        """It serves all the time."""

    def dead(self) -> list[LentRing]:
        return [ring for ring in self._loans if ring.closed is not Closed.OPEN]

    def stop(self) -> None:
        self._stop()
        self._loans.clear()


class _Loan:
    """One ring, its memory, and its kernels once the borrower has made its own."""

    def __init__(self, ring: LentRing, caches: Caches, memory: SharedMemory) -> None:
        self.ring = ring
        self.copies = ServedRing(ring, caches, PLAIN)
        self._shape = task_shape(ring)
        self._caches = caches
        self._memory = memory
        self._tasks = memory.make(task_file(ring.path), lender_bytes(self._shape))
        self._kernels: DeviceLender | None = None
        self._posted = self._tasks

    def serve(self) -> bool:
        """Serve at most one task; False if none is there."""
        ring = self.ring
        ring.words[ControlLine.LENDER * LINE_WORDS + 1] = time.monotonic_ns()
        if ring.closed is not Closed.OPEN:
            return False
        if self.copies.serve(IDLED):
            return True
        kernels = self._kernels or self._meet()
        if kernels is None:
            return False
        kernels.poll()
        # It waits for the look.
        state = kernels.state.tolist()
        if state[SERVING.value] == state[NUMBER.value]:
            return False
        begin = time.monotonic_ns()
        self.copies.wrote(ring.granted)
        kernels.attend(state[ROWS.value])
        posted_at = int(self._posted[POSTED_AT.value])
        self.copies.count(IDLED, 1)
        self.copies.count(SERVICE_NS, time.monotonic_ns() - begin)
        # By clocks of two devices, which may be apart.
        self.copies.count(PICKUP_NS, max(0, state[PICKED_UP.value] - posted_at))
        return True

    def _meet(self) -> DeviceLender | None:
        """Open what the borrower has made, once it has."""
        answers = self._memory.open(answer_file(self.ring.path), borrower_bytes(self._shape))
        if answers is None:
            return None
        closed = self._memory.pin(self.ring.areas.control[ControlLine.CLOSED, :1])
        granted = self._memory.pin(self.ring.own[GRANTED : GRANTED + 1])
        buffer = TaskBuffer.over(self._shape, self._tasks, answers, closed)
        self._posted = buffer.posted
        self._kernels = DeviceLender(self._shape, buffer, self._caches, granted)
        return self._kernels

    def end(self) -> None:
        """Clear what was written, and forget all memory; nothing is being served."""
        self.copies.clear(0)
        self._kernels = None
        for file in (task_file(self.ring.path), answer_file(self.ring.path)):
            file.unlink(missing_ok=True)


class _Thread:
    """Serves loans, one task at a time, while it holds ``lock``."""

    def __init__(self, loans: dict[LentRing, _Loan]) -> None:
        self.lock = threading.Lock()
        self._loans = loans
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._looked = 0

    def start(self) -> None:
        if self._thread is None:
            device = torch.cuda.current_device() if torch.cuda.is_available() else None
            self._thread = threading.Thread(target=self._run, args=(device,), daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        if self._thread is not None:
            self._thread.join()

    def _run(self, device: int | None) -> None:
        last = time.monotonic()
        with _stream(device):
            while not self._stopped:
                with self.lock:
                    served = sum(self._serve(loan) for loan in self._loans.values())
                    self._look_for_dead(time.monotonic_ns())
                if served:
                    last = time.monotonic()
                elif time.monotonic() - last >= SPIN_S:
                    time.sleep(IDLE_SLEEP_S)

    def _serve(self, loan: _Loan) -> bool:
        try:
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


def _stream(device: int | None) -> AbstractContextManager[object]:
    """A stream of a GPU's highest priority, where there is one."""
    if device is None:
        torch.set_num_threads(1)
        return nullcontext()
    torch.cuda.set_device(device)
    _, highest = torch.cuda.Stream.priority_range()
    stream: AbstractContextManager[object] = torch.cuda.stream(torch.cuda.Stream(priority=highest))
    return stream
