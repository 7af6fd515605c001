"""How many blocks that answers are filling may be saved beside a step."""

from __future__ import annotations

from loomserve.kvstore.engine.messages import Transferred

COPIED_BY_WHO_COMPUTES = 0.01
"""Share of the time for these saves where the cores that compute make the copies."""
COPIED_BESIDE = 1.0
"""The same where an engine of the device's own makes them."""
_MOST_BLOCKS = 16.0
# Weight of the newest copies; the first ones count alone.
_SMOOTHING = 0.1


class TailBudget:
    """Blocks that may be saved before they are full, as many as copy in a share of the time.

    Such a save copies a whole block for a few tokens of it. It spares whoever goes on with the
    answer as many tokens, and is lost where nobody has to. Times are monotonic seconds of the
    caller's clock.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._blocks = _MOST_BLOCKS
        self._s_per_block = 0.0
        self._at = 0.0

    def blocks(self, now: float) -> int:
        """Blocks that may be saved now."""
        if self._s_per_block:
            earned = self._share * (now - self._at) / self._s_per_block
            self._blocks = min(self._blocks + earned, _MOST_BLOCKS)
        self._at = now
        return int(self._blocks)

    def spend(self) -> None:
        """Count a block that is saved."""
        self._blocks -= 1

    def learn(self, done: Transferred) -> None:
        """Learn how long a block takes."""
        if done.out_blocks:
            s_per_block = done.out_s / done.out_blocks
            weight = _SMOOTHING if self._s_per_block else 1.0
            self._s_per_block += weight * (s_per_block - self._s_per_block)
