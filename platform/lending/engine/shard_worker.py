"""A worker's end of the loans in which a lender computes a shard of all requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from loomserve.kvstore.engine.transfers.batched_memory import memory_of
from loomserve.kvstore.engine.transfers.memory import BlockMemory
from loomserve.platform.lending.engine.attention import LendingContext
from loomserve.platform.lending.engine.block_partitions import OWN
from loomserve.platform.lending.engine.borrower_worker import StepLimits
from loomserve.platform.lending.engine.shards.heads import (
    RemoteHeads,
    geometry_of_heads,
    room_without_heads,
)
from loomserve.platform.lending.engine.shards.layers import (
    OwnModel,
    RemoteLayers,
    check_layers,
    room_without,
)
from loomserve.platform.lending.engine.shards.shard import LocalKv, RemoteShard
from loomserve.platform.lending.engine.shards.store_memory import ShardedMemory
from loomserve.platform.lending.leaf import Leaf
from loomserve.platform.state.lending_options import ShardSpec


class Store(Protocol):
    """What copies blocks between this engine and the KV store."""

    memory: BlockMemory

    def settle(self) -> None:
        """Wait for copies that run beside steps."""

    def use(self, memory: BlockMemory) -> None: ...


@dataclass
class ShardWorker:
    """Moves shards between this engine and their lenders, one at a time. ``lending.shard`` is set
    while one is away. ``store`` finds the engine's end of the KV store, if it has one."""

    lending: LendingContext
    kv: LocalKv
    model: OwnModel
    limits: StepLimits
    leaf: Leaf
    store: Callable[[], Store | None]
    _shards: dict[int, RemoteShard] = field(default_factory=dict)

    def requirements(self, spec: ShardSpec) -> dict[str, Any]:
        """Return what a lender must know to compute this shard. Without the shard, an own block
        takes less memory, so there may be more of them. ``ValueError`` if the engine has no such
        shard, or cannot do without it."""
        ranges, every = self.lending.partitions.ranges, self.kv.geometry
        own = len(ranges[OWN])
        most = own + sum(len(each) for each in ranges[1:2])
        needed: dict[str, Any] = {"least": own, **self.limits}
        if "heads" in spec:
            geometry = geometry_of_heads(every, spec["heads"])
            blocks = room_without_heads(self.kv, geometry.kv_heads)
        else:
            layers = range(*spec["layers"])
            check_layers(layers, every, self.model.hidden_size)
            blocks = room_without(layers, own, every, self.model.weights())
            geometry = replace(every, layers=len(layers))
            needed["layers"] = {"of": spec["layers"], **self.model.description()}
        return {"geometry": geometry.to_json(), "blocks": min(blocks, most), **needed}

    def begin(self, partition: int, path: str, spec: ShardSpec) -> int:
        """Prepare to hand a shard over to the lender that holds ``partition``, whose block numbers
        become own ones while the shard is away. Returns how many own blocks there are then."""
        self._shards[partition] = shard = self._shard(Path(path), spec)
        return shard.blocks

    def _shard(self, path: Path, spec: ShardSpec) -> RemoteShard:
        patience_s = self.lending.patience_s
        borrower = self.leaf.borrower(path, patience_s)
        if "heads" in spec:
            return RemoteHeads(self.kv, borrower, patience_s)
        return RemoteLayers(
            self.kv,
            borrower,
            patience_s,
            layers=range(*spec["layers"]),
            modules=self.model.layers(),
            weights=self.model.weights(),
        )

    def end_loan(self, partition: int) -> bool:
        shard = self._shards.pop(partition, None)
        if shard is None:
            return False
        shard.borrower.ring.close()
        return True

    def send(self, partition: int, blocks: list[int]) -> bool:
        return self._shards[partition].send(blocks)

    def fetch(self, partition: int, blocks: list[int]) -> bool:
        return self._shards[partition].fetch(blocks)

    def copy(self, partition: int, pairs: list[tuple[int, int]]) -> bool:
        return self._shards[partition].copy(pairs)

    def free_memory(self, partition: int) -> bool:
        return self._shards[partition].free_memory()

    def prepare_return(self, partition: int) -> bool:
        return self._shards[partition].prepare_return()

    def hand_over(self, partition: int, rest: list[int]) -> bool:
        """Copy the rest of the blocks, and have the lender compute the shard from now on. False if
        the lender's ring has closed, and the shard stays here."""
        shard, store = self._shards[partition], self.store()
        if store is not None:
            store.settle()
        if rest and not shard.send(rest):
            return False
        shard.hand_over()
        self.lending.partitions.join(partition)
        self.lending.shard = shard
        if store is not None:
            store.use(ShardedMemory(shard, store.memory, self.kv.geometry))
        return True

    def take_back(self, partition: int, rest: list[int]) -> bool:
        """Copy the rest of the blocks back, and compute the shard here from now on. False if the
        lender's ring has closed, and the shard is away still."""
        shard = self._shards[partition]
        if rest and not shard.fetch(rest):
            return False
        shard.take_back()
        self.lending.partitions.separate(partition)
        self.lending.shard = None
        if (store := self.store()) is not None:
            names = [layer.layer_name for layer in self.kv.attention]
            store.use(memory_of(dict(zip(names, self.kv.caches, strict=True))))
        return True
