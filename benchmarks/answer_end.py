"""Answers that end by themselves after so many tokens, which nothing but the sampler knows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

ANSWER_TOKENS = "answer_tokens"
"""Of a request's ``extra_args``."""


class AnswerEnd(AdapterLogitsProcessor):  # type: ignore[misc]
    """The model's end token comes as the last of ``answer_tokens`` tokens, and not before."""

    def __init__(self, config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(config, device, is_pin_memory)
        self._end: int = config.model_config.hf_config.eos_token_id

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> partial[torch.Tensor] | None:
        tokens = (params.extra_args or {}).get(ANSWER_TOKENS)
        return None if tokens is None else partial(_with_end, self._end, tokens)


def _with_end(end: int, tokens: int, output: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[end] = float("inf") if len(output) == tokens - 1 else -float("inf")
    return logits
