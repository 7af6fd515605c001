"""A borrower's loan, as its scheduler sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loomserve.platform.lending.engine.shards.migration import ShardMigration
from loomserve.platform.lending.policy.limits import LoanLimit
from loomserve.platform.lending.ring.ring import Ring, RingStats

Copy = Callable[[list[tuple[int, int]]], bool]
"""Copies each pair's first block onto its second; False if a lender's ring has closed."""


@dataclass
class Loan:
    """Memory of one lender; the first ``usable`` of its ``blocks`` may be used."""

    name: str
    partition: int
    ring: Ring
    blocks: range
    seen: RingStats
    limit: LoanLimit
    usual_delay_s: float = 0.0
    shard: ShardMigration | None = None
    """Set if a shard of all requests lies there, and no request as a whole."""
    layers: bool = False
    """Whether that shard is layers, which compute more than attention."""
    usable: int = 0
    most: int | None = None
    """Blocks that may be used however many the lender grants."""
    open: bool = True
    """Whether requests may start there, or the shard may stay."""
