"""What attending costs on each side, learnt from the steps that were."""

from __future__ import annotations

from collections import defaultdict

_SMOOTHING = 0.1
# Until the first lent step: of the order of reading a small model's KV from a CPU's memory.
_FIRST_TOKEN_S = 1e-5
_FIRST_STEP_S = 0.03
# Until the first copy: of the order of a lender's looking for tasks some times while it computes.
_FIRST_BLOCK_COPY_S = 0.01


class PartitionCosts:
    """Moving averages, in seconds a step, and of copies.

    A token of context costs its reading wherever it lies, so what lenders' service shows is taken
    for the own side too, whose attention stands within operators that nobody times.
    """

    def __init__(self) -> None:
        self.token_s = _FIRST_TOKEN_S
        self.step_s = _FIRST_STEP_S
        """Of any step."""
        self._block_copy_s = _FIRST_BLOCK_COPY_S
        self._handoff_s: defaultdict[int, float] = defaultdict(float)

    def handoff_s(self, side: int) -> float:
        """What a step takes for using this lender at all: waiting until it serves."""
        return self._handoff_s[side]

    def copy_s(self, blocks: int) -> float:
        """To copy so many blocks from one side to another."""
        return blocks * self._block_copy_s

    def saw_copy(self, blocks: int, seconds: float) -> None:
        if blocks:
            self._block_copy_s += _SMOOTHING * (seconds / blocks - self._block_copy_s)

    def rest_s(self, own_tokens: int) -> float:
        """Of a step beside attention."""
        return max(0.0, self.step_s - own_tokens * self.token_s)

    def saw_step(self, seconds: float) -> None:
        self.step_s += _SMOOTHING * (seconds - self.step_s)

    def saw_lender(self, side: int, tokens: int, service_s: float, delay_s: float) -> None:
        """A step in which a lender attended to so many tokens of context, in all its layers.

        Args:
            side: the lender's.
            tokens: of context.
            service_s: that the lender took.
            delay_s: until it began, of all layers.
        """
        if tokens:
            self.token_s += _SMOOTHING * (service_s / tokens - self.token_s)
            self._handoff_s[side] += _SMOOTHING * (delay_s - self._handoff_s[side])

    def forget(self, side: int) -> None:
        """Another lender may take its place."""
        self._handoff_s.pop(side, None)
