"""A worker's end of the loans in which a lender keeps whole requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch

from loomserve.platform.lending.engine.attention import LendingContext
from loomserve.platform.lending.engine.block_partitions import OWN
from loomserve.platform.lending.engine.memory.lent import keys_and_values
from loomserve.platform.lending.engine.shards.shard import LocalKv
from loomserve.platform.lending.leaf import Leaf
from loomserve.platform.lending.ring.words import RingTask

Rows = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, each [blocks, kv_heads, block_size, head_size]."""


class StepLimits(TypedDict):
    """The largest step that an engine runs, for which a ring must have room."""

    max_tokens: int
    max_requests: int
    max_blocks: int


@dataclass(frozen=True)
class BorrowerWorker:
    """Opens and closes the rings to lenders, each of which holds one partition."""

    lending: LendingContext
    kv: LocalKv
    limits: StepLimits
    leaf: Leaf

    def requirements(self) -> dict[str, Any]:
        """Return what a lender must know to keep some of this engine's requests."""
        ranges = self.lending.partitions.ranges
        return {
            "geometry": self.kv.geometry.to_json(),
            "blocks": sum(len(each) for each in ranges[1:2]),
            "least": 1,
            **self.limits,
        }

    def borrow(self, partition: int, path: str) -> None:
        lending = self.lending
        lending.borrowers[partition] = self.leaf.borrower(Path(path), lending.patience_s)

    def end_loan(self, partition: int) -> None:
        self.lending.borrowers.pop(partition).ring.close()

    def move_blocks(self, source: int, target: int, pairs: list[tuple[int, int]]) -> bool:
        """Copy each pair's first block, of ``source``, onto its second, of ``target``; False if a
        lender's ring has closed, and some are not copied."""
        rings = [self.lending.borrowers[each].ring for each in (source, target) if each != OWN]
        most = min(ring.most_copied for ring in rings)
        batches = (pairs[at : at + most] for at in range(0, len(pairs), most))
        return all(self._move_some(source, target, batch) for batch in batches)

    def _move_some(self, source: int, target: int, pairs: Sequence[tuple[int, int]]) -> bool:
        sources = self._begin(source, [pair[0] for pair in pairs], RingTask.READ)
        targets = self._begin(target, [pair[1] for pair in pairs], RingTask.WRITE)
        for layer in range(len(self.kv.caches)):
            rows = self._read(source, sources, layer)
            if rows is None or not self._write(target, targets, layer, rows):
                return False
        return True

    def _begin(self, partition: int, blocks: Sequence[int], task: RingTask) -> list[int]:
        """Return the blocks in the partition's own numbering, once its lender knows them."""
        here = [block - self.lending.partitions.ranges[partition].start for block in blocks]
        if partition != OWN:
            self.lending.borrowers[partition].begin_copy(here, task)
        return here

    def _read(self, partition: int, blocks: list[int], layer: int) -> Rows | None:
        if partition != OWN:
            return self.lending.borrowers[partition].read(layer, self.lending.patience_s)
        key, value = keys_and_values(self.kv.caches[layer], self.kv.geometry)
        return key[blocks], value[blocks]

    def _write(self, partition: int, blocks: list[int], layer: int, rows: Rows) -> bool:
        if partition != OWN:
            return self.lending.borrowers[partition].write(layer, *rows, self.lending.patience_s)
        own = keys_and_values(self.kv.caches[layer], self.kv.geometry)
        for cache, some in zip(own, rows, strict=True):
            cache[blocks] = some.to(cache.device)
        return True
