"""What a simulated engine is, read from what its replica would start a real one with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from loomserve.platform.config import Fault, Simulated
from loomserve.platform.models.simulated import HEAD_SIZE, KV_HEADS, LAYERS
from loomserve.platform.scheduling.options import ADDITIONAL_CONFIG, SchedulerOptions

SIMULATED_CONFIG = "loomserve_simulated"
"""The key of ``additional_config`` under which it finds the section ``simulated``."""

# vLLM's own, where nothing is said.
_BLOCK_TOKENS, _RUNNING, _STEP_TOKENS = 16, 256, 2048
_LONGEST = 131072


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of an engine, its policies, and the coefficients of its steps' times in seconds."""

    seed: int
    answer_tokens: int
    start_s: float
    faults: tuple[Fault, ...]
    step_shares: tuple[float, ...]
    max_model_len: int
    max_num_seqs: int
    step_tokens: int
    blocks: int
    block_tokens: int
    item_bytes: int
    prefix_caching: bool
    with_store: bool
    scheduling: SchedulerOptions

    @property
    def block_bytes(self) -> int:
        return _token_bytes(self.item_bytes) * self.block_tokens

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Those of an engine that is started with these options of vLLM's.

        Raises:
            ValueError: its memory does not hold the longest request.
        """
        additional = options.get("additional_config") or {}
        given = Simulated.model_validate(additional.get(SIMULATED_CONFIG, {}))
        block_tokens = options.get("block_size") or _BLOCK_TOKENS
        item_bytes = 4 if options.get("dtype") in ("float32", "float") else 2
        kv_tokens = given.kv_tokens or options["kv_cache_memory_bytes"] // _token_bytes(item_bytes)
        blocks = kv_tokens // block_tokens
        longest = options.get("max_model_len") or min(_LONGEST, blocks * block_tokens)
        if not 0 < longest <= blocks * block_tokens:
            raise ValueError(
                f"a request may have {longest} tokens (max_model_len), and KV memory holds "
                f"{blocks * block_tokens}: lower it, or raise kv_cache_memory or kv_tokens"
            )
        in_ms = (
            *(given.step_ms, given.token_ms, given.request_ms),
            *(given.context_token_ms, given.attention_pair_ms),
        )
        return cls(
            seed=given.seed,
            answer_tokens=given.answer_tokens,
            start_s=given.start_s,
            faults=given.faults,
            step_shares=tuple(each / 1000 for each in in_ms),
            max_model_len=longest,
            max_num_seqs=options.get("max_num_seqs") or _RUNNING,
            step_tokens=options.get("max_num_batched_tokens") or _STEP_TOKENS,
            blocks=blocks,
            block_tokens=block_tokens,
            item_bytes=item_bytes,
            prefix_caching=options.get("enable_prefix_caching") is not False,
            with_store=options.get("kv_transfer_config") is not None,
            scheduling=SchedulerOptions.model_validate(additional.get(ADDITIONAL_CONFIG, {})),
        )


def _token_bytes(item_bytes: int) -> int:
    return 2 * LAYERS * KV_HEADS * HEAD_SIZE * item_bytes
