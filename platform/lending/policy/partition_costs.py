"""Costs of attention in each partition, learnt from past steps."""

from __future__ import annotations

from collections import defaultdict

_SMOOTHING = 0.1
# Before the first lent step: about the time of reading a small model's KV from a CPU's memory.
_FIRST_TOKEN_S = 1e-5
_FIRST_STEP_S = 0.03
# Before the first copy: about the time in which a computing lender looks for tasks some times.
_FIRST_BLOCK_COPY_S = 0.01


class PartitionCosts:
    """Moving averages of seconds a step, and a copied block. A token of context costs its reading
    wherever it lies, so the cost seen in lenders' service is taken for the own partition too, whose
    attention runs within operators that nobody times."""

    def __init__(self) -> None:
        self.token_s = _FIRST_TOKEN_S
        self.step_s = _FIRST_STEP_S
        self._block_copy_s = _FIRST_BLOCK_COPY_S
        self._handoff_s: defaultdict[int, float] = defaultdict(float)

    def handoff_s(self, partition: int) -> float:
        """Seconds that a step waits until this lender serves."""
        return self._handoff_s[partition]

    def copy_s(self, blocks: int) -> float:
        return blocks * self._block_copy_s

    def saw_copy(self, blocks: int, seconds: float) -> None:
        if blocks:
            self._block_copy_s += _SMOOTHING * (seconds / blocks - self._block_copy_s)

    def rest_s(self, own_tokens: int) -> float:
        """Return the seconds of a step beside attention to ``own_tokens``."""
        return max(0.0, self.step_s - own_tokens * self.token_s)

    def saw_step(self, seconds: float) -> None:
        self.step_s += _SMOOTHING * (seconds - self.step_s)

    def saw_lender(self, partition: int, tokens: int, service_s: float, delay_s: float) -> None:
        """Learn from a step in which a lender attended to ``tokens`` of context in all layers, in
        ``service_s`` seconds, after ``delay_s`` seconds of waits in all."""
        if tokens:
            self.token_s += _SMOOTHING * (service_s / tokens - self.token_s)
            self._handoff_s[partition] += _SMOOTHING * (delay_s - self._handoff_s[partition])

    def forget(self, partition: int) -> None:
        """Forget a lender, whose partition another may get."""
        self._handoff_s.pop(partition, None)
