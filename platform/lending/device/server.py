"""The lender's end of loans whose rows kernels carry."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from loomserve.platform.lending.device.borrower import KernelBorrower
from loomserve.platform.lending.device.kernel_loan import KernelLoan
from loomserve.platform.lending.device.memory import SharedMemory
from loomserve.platform.lending.device.serving_thread import ServingThread
from loomserve.platform.lending.leaf import Leaf
from loomserve.platform.lending.policy.layout import PLAIN, Rows
from loomserve.platform.lending.ring.attention_server import Caches, ComputeLayers
from loomserve.platform.lending.ring.lent_ring import LentRing
from loomserve.platform.lending.ring.ring import Ring
from loomserve.platform.lending.ring.words import LINE_WORDS, Closed, ControlLine

SPIN_S = 0.05
STAY_S = 0.05
"""For so long the kernel that stays does; copies of blocks wait for its end."""


class KernelServer:
    """A :class:`~loomserve.platform.lending.leaf.LenderEnd` in one of two forms. A thread serves
    tasks on a stream of the highest priority, whether the engine runs a step or not. It looks for
    one by a kernel and queues what serves it, or (``resident``) queues a kernel that stays and does
    both."""

    def __init__(self, memory: SharedMemory, *, resident: bool) -> None:
        self._memory = memory
        self._stays_s = STAY_S if resident else None
        self._loans: dict[LentRing, KernelLoan] = {}
        # No method of the server's, so that the thread keeps none alive.
        serve: Callable[[KernelLoan], int] = KernelLoan.serve
        if resident:
            serve = partial(KernelLoan.stay, seconds=STAY_S)
        self._thread = ServingThread(self._loans, serve, SPIN_S)
        self._stream: torch.cuda.Stream | None = None
        # A thread that is in CUDA must not outlive Python.
        self._stop = weakref.finalize(self, self._thread.stop)

    def poll(self) -> int:
        """Nothing: the thread looks for tasks within steps, too."""
        return 0

    def open(
        self,
        ring: LentRing,
        caches: Caches,
        layers: ComputeLayers | None = None,
        rows: Rows = PLAIN,
    ) -> None:
        """Serve this ring from now on, and make the memory that its borrower opens. For the first
        borrower of its shape on this machine it takes some seconds to compile. ``ValueError`` if it
        is to compute layers, or its attention is none that the kernels compute."""
        if layers is not None:
            raise ValueError("layers are lent between CPU devices only")
        loan = KernelLoan(ring, caches, self._memory, rows)
        loan.compile(self._stays_s)
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
        with self._thread.lock:
            for loan in self._loans.values():
                loan.clear()

    def idle(self) -> None:
        """The thread goes on as within steps."""

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


def kernel_leaf(memory: SharedMemory, *, resident: bool = False) -> Leaf:
    """Kernels between devices of one kind, over memory that both ends map."""
    return Leaf(
        borrower=lambda path, patience_s: KernelBorrower(Ring.attach(path), memory, patience_s),
        server=lambda: KernelServer(memory, resident=resident),
        on_cpus=False,
    )
