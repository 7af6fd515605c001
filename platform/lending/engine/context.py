"""What a worker, its model runner and its attention layers share of their engine's loans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from loomserve.platform.lending.engine.block_partitions import Partitions
from loomserve.platform.lending.engine.shards.shard import RemoteShard
from loomserve.platform.lending.leaf import BorrowerEnd


@dataclass
class LendingContext:
    """The loans of one engine as its worker's process sees them.

    The worker makes one and hands it to its model runner and to its model's attention layers. Only
    the worker's own methods write it, between two steps; a step only reads it. Attention layers of
    a borrower's model that are hosted here have none: they serve, and are not served within.

    Attributes:
        patience_s: A lender that takes longer for one layer is given up.
        partitions: Which block lies where; empty until there is KV memory.
        borrowers: By partition, this engine's end of the ring to the lender that holds it.
        shard: Heads or layers that a lender computes for all own requests; None: none.
        poll: Serves waiting tasks of this engine's borrowers; None: there are none, or attention
            does not look for them.
    """

    patience_s: float = 0.1
    partitions: Partitions = field(default_factory=lambda: Partitions([0], 0))
    borrowers: dict[int, BorrowerEnd] = field(default_factory=dict)
    shard: RemoteShard | None = None
    poll: Callable[[], Any] | None = None
