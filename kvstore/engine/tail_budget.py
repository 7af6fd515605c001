"""How many blocks that answers are filling may be saved beside a step."""

from __future__ import annotations

from loomserve.kvstore.engine.messages import Transferred

SHARE = 0.01
"""Of the time, for these saves. On a GPU a copy costs no core, and all else of a save does, while
who goes on computes the block in a step."""
_MOST_BLOCKS = 16.0
# Weight of the newest copies; the first ones count alone.
_SMOOTHING = 0.1


class TailBudget:
    """Blocks that may be saved before they are full, as many as cost a share of a core's time.

    Such a save copies a whole block for a few tokens of it. It spares whoever goes on with the
    answer as many tokens, and is lost where nobody has to. Times are monotonic seconds of the
    caller's clock.
    """

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._blocks = _MOST_BLOCKS
        self._s_per_block = 0.0
        self._spent_s = 0.0
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
        """Learn what a block costs, and the vain attempts before it."""
        self._spent_s += done.out_core_s
        if done.out_blocks:
            s_per_block, self._spent_s = self._spent_s / done.out_blocks, 0.0
            weight = _SMOOTHING if self._s_per_block else 1.0
            self._s_per_block += weight * (s_per_block - self._s_per_block)
