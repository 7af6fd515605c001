"""How long an engine's steps take, and how many unfilled blocks may be saved beside them."""

from __future__ import annotations

from loomserve.kvstore.engine.messages import Transferred

# Time to compute a prompt token, until steps have been measured.
_FIRST_GUESS_S_PER_TOKEN = 1e-3
# Weight of the newest step or copies. The first steps count alike, so that the blocks of an engine
# that has just started are worth as much to the store as those of others; the first copies alone.
_SMOOTHING = 0.1
SHARE = 0.01
"""Of the time, for saves of unfilled blocks. On a GPU a copy costs no core, and all else of a save
does, while who goes on computes the block in a step."""
_MOST_BLOCKS = 16.0


class StepPace:
    """Running estimate of the seconds that a prompt token and a step take. Times are monotonic
    seconds of the caller's clock."""

    def __init__(self, block_size: int) -> None:
        self.s_per_token = _FIRST_GUESS_S_PER_TOKEN
        self.step_s = 0.0
        """Seconds of the last step that has ended."""
        self.began_at = 0.0
        self._tokens = self._learned = 0
        self._least_tokens = 4 * block_size

    def begin(self, now: float, tokens: int) -> None:
        self.began_at, self._tokens = now, tokens

    def end(self, now: float) -> None:
        """Learn the time of a prompt token from steps that were mostly prefill."""
        self.step_s = now - self.began_at
        if self._tokens >= self._least_tokens:
            self._learned += 1
            weight = max(_SMOOTHING, 1 / self._learned)
            self.s_per_token += weight * (self.step_s / self._tokens - self.s_per_token)


class TailBudget:
    """Blocks that may be saved before they are full, as many as cost a share of a core's time.

    Such a save copies a whole block for a few tokens of it. It spares who goes on with the answer
    as many tokens, and is lost where nobody has to. Times are monotonic seconds.
    """

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._blocks = _MOST_BLOCKS
        self._s_per_block = 0.0
        self._spent_s = 0.0
        self._at = 0.0

    def blocks(self, now: float) -> int:
        if self._s_per_block:
            earned = self._share * (now - self._at) / self._s_per_block
            self._blocks = min(self._blocks + earned, _MOST_BLOCKS)
        self._at = now
        return int(self._blocks)

    def spend(self) -> None:
        self._blocks -= 1

    def learn(self, done: Transferred) -> None:
        """Learn what a block costs, and the vain attempts before it."""
        self._spent_s += done.out_core_s
        if done.out_blocks:
            s_per_block, self._spent_s = self._spent_s / done.out_blocks, 0.0
            weight = _SMOOTHING if self._s_per_block else 1.0
            self._s_per_block += weight * (s_per_block - self._s_per_block)
