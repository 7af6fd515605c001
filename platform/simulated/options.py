"""Options of a simulated engine, read from those that a real one would be started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from loomserve.platform.config import Simulated
from loomserve.platform.models.simulated import HEAD_SIZE, KV_HEADS, LAYERS
from loomserve.platform.scheduling.options import ADDITIONAL_CONFIG, SchedulerOptions
from loomserve.platform.scheduling.simulator import Limits

SIMULATED_CONFIG = "loomserve_simulated"
"""The key of ``additional_config`` under which it finds the section ``simulated``."""

# vLLM's own, where nothing is said.
_BLOCK_TOKENS, _RUNNING, _STEP_TOKENS = 16, 256, 2048
_LONGEST = 131072
_PARAMETERS = {
    "structured_outputs": "follow a grammar or a JSON schema (response_format, tools)",
    "prompt_logprobs": "tell log probabilities of a prompt",
    "logit_bias": "weigh tokens (logit_bias)",
    "bad_words": "avoid words (bad_words)",
}


@dataclass(frozen=True)
class EngineOptions:
    """The section ``simulated`` of an engine, with its sizes and its policies."""

    simulated: Simulated
    scheduling: SchedulerOptions
    limits: Limits
    max_model_len: int
    item_bytes: int
    prefix_caching: bool
    with_store: bool

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Read vLLM's options of an engine. Raises ValueError if its memory does not hold the
        longest request."""
        additional = options.get("additional_config") or {}
        given = Simulated.model_validate(additional.get(SIMULATED_CONFIG, {}))
        scheduling = SchedulerOptions.model_validate(additional.get(ADDITIONAL_CONFIG, {}))
        block_tokens = options.get("block_size") or _BLOCK_TOKENS
        item_bytes = 4 if options.get("dtype") in ("float32", "float") else 2
        token_bytes = 2 * LAYERS * KV_HEADS * HEAD_SIZE * item_bytes
        kv_tokens = given.kv_tokens or options["kv_cache_memory_bytes"] // token_bytes
        blocks = kv_tokens // block_tokens
        longest = options.get("max_model_len") or min(_LONGEST, blocks * block_tokens)
        if not 0 < longest <= blocks * block_tokens:
            raise ValueError(
                f"a request may have {longest} tokens (max_model_len), and KV memory holds "
                f"{blocks * block_tokens}: lower it, or raise kv_cache_memory or kv_tokens"
            )
        return cls(
            given,
            scheduling,
            Limits(
                blocks=blocks,
                block_tokens=block_tokens,
                block_bytes=token_bytes * block_tokens,
                running=options.get("max_num_seqs") or _RUNNING,
                step_tokens=options.get("max_num_batched_tokens") or _STEP_TOKENS,
                swap_bytes=scheduling.swap_bytes,
            ),
            max_model_len=longest,
            item_bytes=item_bytes,
            prefix_caching=options.get("enable_prefix_caching") is not False,
            with_store=options.get("kv_transfer_config") is not None,
        )


def refusal(params: Any) -> str | None:
    """Why a simulated engine cannot answer a request with these ``SamplingParams``; None: it can.
    What bends probabilities, such as top_p, changes nothing and is let through."""
    for name, what in _PARAMETERS.items():
        if getattr(params, name, None):
            return f"This model is simulated and cannot {what}: leave it out, or ask another model."
    return None
