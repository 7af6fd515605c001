"""What carries a loan's rows to its lender and back: one form for each kind of device.

Control words, counters and copies of blocks are the task ring's in all forms, so schedulers and
replicas see no difference. ``ring`` computes between CPUs, ``device`` by kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loomserve.platform.lending.policy.layout import PLAIN, Rows
from loomserve.platform.lending.ring.attention_server import AttentionServer, Caches, ComputeLayers
from loomserve.platform.lending.ring.borrower import Borrower
from loomserve.platform.lending.ring.lent_ring import LentRing
from loomserve.platform.lending.ring.ring import Ring


class LenderEnd(Protocol):
    """Serves all loans of a worker, as
    :class:`~loomserve.platform.lending.ring.attention_server.AttentionServer` does."""

    @property
    def poll(self) -> Callable[[], int]: ...
    def open(
        self,
        ring: LentRing,
        caches: Caches,
        layers: ComputeLayers | None = None,
        rows: Rows = PLAIN,
    ) -> None: ...
    def close(self, ring: LentRing) -> bool: ...
    def busy(self) -> None: ...
    def idle(self) -> None: ...
    def dead(self) -> list[LentRing]: ...
    def stop(self) -> None: ...


@dataclass(frozen=True)
class Leaf:
    """Makes both ends of loans.

    Attributes:
        borrower: Attaches to the ring at a path, with a patience in seconds; ``StartError`` if
            there is none.
        server: Makes a worker's one lender's end.
        on_cpus: Whether a lender can compute whole layers, too, and its steps look for tasks.
    """

    borrower: Callable[[Path, float], Borrower]
    server: Callable[[], LenderEnd]
    on_cpus: bool


def ring_leaf(*, split_kv: bool) -> Leaf:
    """The task ring between CPUs; ``split_kv`` is :class:`AttentionServer`'s."""
    return Leaf(
        borrower=lambda path, _: Borrower(Ring.attach(path)),
        server=lambda: AttentionServer(split_kv=split_kv),
        on_cpus=True,
    )
