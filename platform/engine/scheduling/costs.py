"""Predicted seconds of an engine's steps and copies."""

from __future__ import annotations

from dataclasses import dataclass

from loomserve.platform.costs.step_time import StepTimes
from loomserve.platform.costs.transfer_time import TransferTimes


@dataclass
class EngineCosts:
    """Cost model of one engine; its predictors learn from each step and copy.

    Args:
        step_times: of steps.
        transfer_times: of copies between the engine and the KV store.
        block_size: tokens a KV block.
        block_bytes: bytes a KV block, of all layers on all ranks.
        step_tokens: tokens a step at most.
    """

    step_times: StepTimes
    transfer_times: TransferTimes
    block_size: int
    block_bytes: int
    step_tokens: int

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def bytes(self, tokens: int) -> int:
        """Bytes of the blocks that hold so many tokens."""
        return self.blocks(tokens) * self.block_bytes

    def prefill_s(self, tokens: int) -> float:
        """Seconds to compute so many tokens of one request, alone."""
        return self.step_times.prefill_s(tokens, self.step_tokens)

    def worth_swapping(self, tokens: int) -> bool:
        """Whether copying so many tokens' KV out and in again is quicker than computing them."""
        size, times = self.bytes(tokens), self.transfer_times
        return times.out_s(size) + times.in_s(size) < self.prefill_s(tokens)

    def worth_loading(self, tokens: int) -> bool:
        """Whether loading so many tokens' KV is quicker than computing them."""
        return self.transfer_times.in_s(self.bytes(tokens)) < self.prefill_s(tokens)
