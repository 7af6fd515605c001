"""The lender's end of loans whose rows kernels carry."""

from __future__ import annotations

import os
import weakref

from loomserve.platform.lending.device.kernel_loan import KernelLoan
from loomserve.platform.lending.device.memory import SharedMemory
from loomserve.platform.lending.device.serving_thread import Form, ServingThread
from loomserve.platform.lending.policy.layout import PLAIN, Rows
from loomserve.platform.lending.ring.lent_ring import LentRing
from loomserve.platform.lending.ring.ring import LINE_WORDS, Closed, ControlLine
from loomserve.platform.lending.ring.served_ring import POLLED, Caches, ComputeLayers


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
        self._thread = ServingThread(self._loans, form)
        # A thread that is in CUDA must not outlive Python.
        self._stop = weakref.finalize(self, self._thread.stop)

    def poll(self) -> int:
        """Queue the service of what is posted; how much that is nobody knows yet."""
        if self._form is Form.POLLS:
            with self._thread.lock:
                for loan in self._loans.values():
                    loan.queue()
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
        loan = KernelLoan(ring, caches, self._memory)
        ring.words[ControlLine.LENDER * LINE_WORDS] = os.getpid()
        with self._thread.lock:
            self._loans[ring] = loan
        self._thread.start()

    def close(self, ring: LentRing) -> bool:
        with self._thread.lock:
            self._loans.pop(ring).end()
        return False

    def busy(self) -> None:
        if self._form is Form.POLLS:
            self._thread.pause()
        with self._thread.lock:
            for loan in self._loans.values():
                loan.copies.clear(loan.ring.granted)

    def idle(self) -> None:
        if self._form is Form.POLLS:
            with self._thread.lock:
                for loan in self._loans.values():
                    loan.count(POLLED)
            self._thread.resume()

    def dead(self) -> list[LentRing]:
        return [ring for ring in self._loans if ring.closed is not Closed.OPEN]

    def stop(self) -> None:
        self._stop()
        self._loans.clear()
