"""Predicted seconds of an engine's steps and copies."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.kv_cache_interface import KVCacheConfig

from loomserve.platform.costs.step_time import StepTimes
from loomserve.platform.costs.transfer_time import TransferTimes


@dataclass
class EngineCosts:
    """Cost model of one engine; its predictors learn from each step and copy.

    A block has ``block_size`` tokens and ``block_bytes``, of all layers on all ranks; a step has at
    most ``step_tokens``.
    """

    step_times: StepTimes
    transfer_times: TransferTimes
    block_size: int
    block_bytes: int
    step_tokens: int

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def bytes(self, tokens: int) -> int:
        return self.blocks(tokens) * self.block_bytes

    def prefill_s(self, tokens: int) -> float:
        return self.step_times.prefill_s(tokens, self.step_tokens)

    def worth_swapping(self, tokens: int) -> bool:
        """Whether copying so many tokens' KV out and in again is quicker than computing them."""
        size, times = self.bytes(tokens), self.transfer_times
        return times.out.seconds(size) + times.into.seconds(size) < self.prefill_s(tokens)

    def worth_loading(self, tokens: int) -> bool:
        """Whether loading so many tokens' KV is quicker than computing them."""
        return self.transfer_times.into.seconds(self.bytes(tokens)) < self.prefill_s(tokens)


def block_bytes(config: KVCacheConfig) -> int:
    """Bytes of one of vLLM's KV blocks: all layers of one rank."""
    return sum(
        len(group.layer_names) * group.kv_cache_spec.page_size_bytes
        for group in config.kv_cache_groups
    )
