"""The simulated schedule of an engine whose requests come and go while it runs."""

from __future__ import annotations

from collections.abc import Iterator

from loomserve.platform.scheduling.policy.preemption import StayingRequest
from loomserve.platform.scheduling.simulator import Simulator


class LiveSimulator(Simulator):
    """Requests are added when they come; the caller takes ended ones from ``times``."""

    def remove(self, name: str) -> None:
        """Forget a request whose client has gone, between two steps."""
        for kept in (self._coming, self._waiting, self._running):
            for one in kept:
                if one.request.name == name:
                    kept.remove(one)
                    self._free_blocks += one.blocks
                    self._free_swap += one.swap_bytes
                    return

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._coming)

    @property
    def kv_usage(self) -> float:
        """Share of blocks that requests hold."""
        return 1 - self._free_blocks / self._limits.blocks

    @property
    def free_swap(self) -> int:
        return self._free_swap

    def staying(self) -> Iterator[StayingRequest]:
        """Requests that can go on elsewhere without losing what is just being computed."""
        for one in (*self._coming, *self._waiting, *self._running):
            waits = one not in self._running
            if waits or not one.prefilling:
                request = one.request
                yield StayingRequest(request.name, one.tokens, waits, request.arrived_s)
