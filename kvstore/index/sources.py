"""From which node a chain's missing blocks are fetched, if that is quicker than computing them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from loomserve.kvstore.index.directory import Holding

_FIRST_GUESS_BYTES_PER_S = 5e8
_FIRST_GUESS_SETUP_S = 0.002
_SMOOTHING = 0.2
_LARGE_BYTES = 2**20
"""A smaller fetch says how long one takes to begin, a larger one how fast it goes on."""
_LEAST_S = 1e-6
# Until blocks are in a holder's memory that are on its SSD.
_SSD_BYTES_PER_S = 5e8
_LONGEST_FETCH_S = 1.5
"""An engine does not wait for longer, all in all."""


@dataclass
class LinkRate:
    """Running estimate of what fetches from one node take; ``fetches`` have been measured."""

    bytes_per_s: float = _FIRST_GUESS_BYTES_PER_S
    setup_s: float = _FIRST_GUESS_SETUP_S
    fetches: int = 0

    def seconds(self, size: int) -> float:
        """Predicted seconds for a fetch of so many bytes."""
        return self.setup_s + size / self.bytes_per_s

    def learn(self, size: int, took_s: float) -> None:
        # The first ones count more, for what they replace is a guess.
        share = max(_SMOOTHING, 1 / (self.fetches + 1))
        self.fetches += 1
        if size < _LARGE_BYTES:
            alone_s = max(took_s - size / self.bytes_per_s, _LEAST_S)
            self.setup_s += share * (alone_s - self.setup_s)
            return
        # Of the time that a large fetch takes, what is not its own is noise.
        alone_s = max(took_s - self.setup_s, took_s / 2, _LEAST_S)
        self.bytes_per_s += share * (size / alone_s - self.bytes_per_s)


class Offer(NamedTuple):
    """Blocks that a node has of a chain beyond those here, and when they could be here.
    ``in_memory`` of them need not be read from its SSD first."""

    node: str
    blocks: int
    in_memory: int
    ready_s: float


def best_offer(
    holdings: Iterable[Holding],
    have: int,
    slot_bytes: int,
    link_of: Callable[[str], LinkRate],
    block_s: float,
) -> Offer | None:
    """The offer that saves most against computing the blocks, ``block_s`` seconds each. None if no
    node has more than the first ``have`` blocks, or if computing them is quicker."""
    best: Offer | None = None
    most_saved_s = 0.0
    for holding in holdings:
        if holding.resident <= have:
            continue
        offer = _offer(holding, have, slot_bytes, link_of(holding.node))
        saved_s = offer.blocks * block_s - offer.ready_s
        if offer.blocks > 0 and saved_s > most_saved_s:
            best, most_saved_s = offer, saved_s
    return best


def _offer(holding: Holding, have: int, slot_bytes: int, link: LinkRate) -> Offer:
    """As much of what a node has as comes in the time that an engine waits."""
    in_memory = max(0, holding.in_memory - have)
    block_s = slot_bytes / link.bytes_per_s
    budget_s = max(0.0, _LONGEST_FETCH_S - link.setup_s)
    from_memory = min(in_memory, int(budget_s / block_s))
    blocks = from_memory
    if from_memory == in_memory:
        left_s = budget_s - from_memory * block_s
        from_ssd_s = block_s + slot_bytes / _SSD_BYTES_PER_S
        blocks += min(holding.resident - have - in_memory, int(left_s / from_ssd_s))
    read_s = (blocks - from_memory) * slot_bytes / _SSD_BYTES_PER_S
    return Offer(holding.node, blocks, from_memory, link.seconds(blocks * slot_bytes) + read_s)
