"""A thread that serves a lender's rings."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from loomserve.platform.lending.device.kernel_loan import KernelLoan
from loomserve.platform.lending.ring.lent_ring import LentRing
from loomserve.platform.lending.ring.words import LINE_WORDS, Closed, ControlLine

log = logging.getLogger(__name__)

LOOK_NS = 100_000_000
"""Nanoseconds between two looks at which borrowers live."""
IDLE_SLEEP_S = 100e-6
"""The thread is not woken: it sleeps so long between two looks for tasks."""


class ServingThread:
    """Serves rings, one task at a time, while it holds ``lock``, unless it is paused. An error of a
    ring's service closes it as FAILED."""

    def __init__(
        self,
        rings: Mapping[LentRing, KernelLoan],
        serve: Callable[[KernelLoan], int],
        spin_s: float,
    ) -> None:
        """``rings`` is changed by who holds ``lock``; ``serve`` serves at most one task, and
        returns how many. After ``spin_s`` without one the thread sleeps between looks."""
        self.lock = threading.Lock()
        self._rings = rings
        self._serve = serve
        self._spin_s = spin_s
        self._idle = threading.Event()
        self._idle.set()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._looked = 0

    def start(self, within: Callable[[], AbstractContextManager[object]]) -> None:
        """Begin, unless it has, in the context that ``within`` makes."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(within,), daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._idle.set()
        if self._thread is not None:
            self._thread.join()

    def pause(self) -> None:
        """Begin no service until :meth:`resume`; one may still hold ``lock``."""
        self._idle.clear()

    def resume(self) -> None:
        self._idle.set()

    def serve_all(self, serve: Callable[[KernelLoan], int]) -> int:
        """Serve each ring once; the caller holds ``lock``."""
        now, count = time.monotonic_ns(), 0
        for ring, served in self._rings.items():
            ring.words[ControlLine.LENDER * LINE_WORDS + 1] = now
            try:
                count += serve(served)
            except Exception:
                ring.shut(Closed.FAILED)
                log.exception("a borrower's attention failed")
        return count

    def look_for_dead(self) -> None:
        """Close the rings of borrowers that have ended; the caller holds ``lock``."""
        now = time.monotonic_ns()
        if now - self._looked < LOOK_NS:
            return
        self._looked = now
        for ring, served in self._rings.items():
            if served.borrower.gone():
                ring.shut(Closed.DIED)

    def _run(self, within: Callable[[], AbstractContextManager[object]]) -> None:
        last = time.monotonic()
        with within():
            while not self._stopped:
                self._idle.wait()
                with self.lock:
                    served = 0
                    if self._idle.is_set() and not self._stopped:
                        served = self.serve_all(self._serve)
                        self.look_for_dead()
                if served:
                    last = time.monotonic()
                elif time.monotonic() - last >= self._spin_s:
                    time.sleep(IDLE_SLEEP_S)
