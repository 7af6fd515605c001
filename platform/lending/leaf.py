"""What carries a loan's rows to its lender and back: one form for each kind of device.

Control words, counters and copies of blocks are the task ring's in all forms, so schedulers and
replicas see no difference. ``ring`` computes between CPUs, ``device`` by kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from loomserve.platform.lending.policy.layout import PLAIN, Rows
from loomserve.platform.lending.ring.lent_ring import LentRing
from loomserve.platform.lending.ring.ring import Ring, RingTask
from loomserve.platform.lending.ring.served_ring import Caches, ComputeLayers


class BorrowerEnd(Protocol):
    """A worker's end of one loan, as :class:`~loomserve.platform.lending.ring.borrower.Borrower`
    has it."""

    ring: Ring

    def begin_step(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Tell the lender what the rows of this step's tasks are."""

    def resume_step(self) -> None:
        """Go on with the step's tasks after blocks were copied within it."""

    def post(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Hand the step's rows of one layer to the lender."""

    def wait(self, output: torch.Tensor, timeout_s: float) -> bool:
        """Have the posted task's attention in ``output``; False if it is known not to come."""

    def begin_copy(self, blocks: Sequence[int], task: RingTask) -> None:
        """Write which of the loan's blocks the next calls of write or read copy."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, timeout_s: float) -> bool:
        """Copy one layer of the blocks into the lender's memory."""

    def read(self, layer: int, timeout_s: float) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Copy one layer of the blocks from the lender's memory."""

    def through_layers(
        self, hidden: torch.Tensor, residual: torch.Tensor, timeout_s: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Have the lender compute its layers of the step's rows, if it computes any
        (:attr:`Leaf.computes_layers`)."""


class LenderEnd(Protocol):
    """Serves all loans of a worker, as
    :class:`~loomserve.platform.lending.ring.attention_server.AttentionServer` does."""

    @property
    def poll(self) -> Callable[[], int]:
        """Serves posted tasks within a step, and returns how many."""

    def open(
        self,
        ring: LentRing,
        caches: Caches,
        layers: ComputeLayers | None = None,
        rows: Rows = PLAIN,
    ) -> None:
        """Serve this ring from now on; ``ValueError`` if it cannot be."""

    def close(self, ring: LentRing) -> bool:
        """Serve it no more; returns whether it had layers, which are freed."""

    def busy(self) -> None:
        """The engine begins a step."""

    def idle(self) -> None:
        """The engine has ended its step."""

    def dead(self) -> list[LentRing]:
        """Return the served rings that have been closed."""

    def stop(self) -> None:
        """Serve nothing any more, for good."""


class Leaf(Protocol):
    """Makes both ends.

    Attributes:
        computes_layers: Whether a lender can compute whole layers, too.
        polls: Whether the lender's steps may look for tasks.
    """

    @property
    def computes_layers(self) -> bool: ...
    @property
    def polls(self) -> bool: ...

    def borrower(self, path: Path, patience_s: float) -> BorrowerEnd:
        """Attach to the ring at ``path``; ``StartError`` if there is none."""

    def server(self) -> LenderEnd:
        """Make a worker's one lender's end."""
