"""How long an engine's steps take, as its connector sees them."""

from __future__ import annotations

# Time to compute a prompt token, until steps have been measured.
_FIRST_GUESS_S_PER_TOKEN = 1e-3
# Weight of the newest step; the first ones count alike, so that the blocks of an engine that has
# just started are worth as much to the store as those of others.
_SMOOTHING = 0.1


class StepPace:
    """Running estimate of the seconds that a prompt token and a step take.

    Times are monotonic seconds of the caller's clock.
    """

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
