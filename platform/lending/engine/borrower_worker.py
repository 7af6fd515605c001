"""A worker's end of the loans in which a lender keeps whole requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from loomserve.platform.lending.engine.context import LendingContext
from loomserve.platform.lending.engine.memory.block_copy import BlockMover
from loomserve.platform.lending.engine.shards.shard import LocalKv
from loomserve.platform.lending.leaf import Leaf


class StepLimits(TypedDict):
    """The largest step that an engine runs, for which a ring must have room."""

    max_tokens: int
    max_requests: int
    max_blocks: int


class BorrowerWorker:
    """Opens and closes the rings to lenders, each of which holds one partition."""

    def __init__(
        self, lending: LendingContext, kv: LocalKv, limits: StepLimits, leaf: Leaf
    ) -> None:
        self._lending = lending
        self._kv = kv
        self._limits = limits
        self._leaf = leaf

    def requirements(self) -> dict[str, Any]:
        """Return what a lender must know to keep some of this engine's requests."""
        ranges = self._lending.partitions.ranges
        return {
            "geometry": self._kv.geometry.to_json(),
            "blocks": sum(len(each) for each in ranges[1:2]),
            "least": 1,
            **self._limits,
        }

    def borrow(self, partition: int, path: str) -> None:
        """Attach to the ring of the lender that holds ``partition``."""
        lending = self._lending
        lending.borrowers[partition] = self._leaf.borrower(Path(path), lending.patience_s)

    def end_loan(self, partition: int) -> None:
        self._lending.borrowers.pop(partition).ring.close()

    def move_blocks(self, source: int, target: int, pairs: list[tuple[int, int]]) -> bool:
        """Copy blocks from one partition to another (:meth:`BlockMover.move`)."""
        lending = self._lending
        mover = BlockMover(
            self._kv.caches,
            self._kv.geometry,
            lending.partitions,
            lending.borrowers,
            lending.patience_s,
        )
        return mover.move(source, target, pairs)
