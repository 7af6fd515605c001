"""Static batching on transformers: a batch is padded, starts together and ends with its longest.

This is how Magnus and UELLM execute batches (``transformers``, greedy). It stands beside vLLM, not
in its place: it is what batching policies are measured with, and runs models that only transformers
can run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from loomserve.platform.errors import LoomserveError


class OutOfMemoryError(LoomserveError):
    """A batch needed more KV memory than there is; none of its answers is complete."""

    def __init__(self, size: int, length: int, generated: int) -> None:
        super().__init__(
            f"a batch of {size} requests ran out of KV memory with {length} tokens of prompt and "
            f"{generated} of answer each; run it in two halves"
        )
        self.generated = generated


@dataclass(frozen=True, slots=True)
class StaticRequest:
    """A prompt's token ids, at least one; its answer ends at an end token or its limit."""

    prompt: Sequence[int]
    max_tokens: int
    ignore_eos: bool = False


class StaticExecutor:
    """A model that computes one batch after the other, greedily, on the CPU."""

    def __init__(self, model: Path, *, threads: int, kv_bytes: int, dtype: str = "auto") -> None:
        """``threads`` are torch's, of the whole process.

        ``kv_bytes`` is a budget, not an allocation: main memory has no edge of its own that could
        be met safely, so a batch that crosses the budget is ended as if there were no more.
        """
        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self.kv_bytes = kv_bytes
        eos = self._model.generation_config.eos_token_id
        self._end_tokens = frozenset([eos] if isinstance(eos, int) else eos or ())

    @property
    def token_bytes(self) -> int:
        """KV of one token (Δ)."""
        config = self._model.config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size: int = self._model.dtype.itemsize
        return int(2 * config.num_hidden_layers * config.num_key_value_heads * head * size)

    @property
    def context(self) -> int:
        """Tokens of prompt and answer that the model was made for."""
        return int(self._model.config.max_position_embeddings)

    def run(self, requests: Sequence[StaticRequest]) -> list[list[int]]:
        """The answers' token ids, an end token included, once the last of them is complete.

        Raises:
            OutOfMemoryError: β·(L + g)·Δ crossed the budget as each answer was to get its g-th
                token; what was computed until then is lost.
            ValueError: a request is empty, or longer than the model's context.
        """
        for one in requests:
            if not one.prompt or one.max_tokens < 1:
                raise ValueError("a request needs a prompt and an answer of at least one token")
            if len(one.prompt) + one.max_tokens > self.context:
                raise ValueError(
                    f"{len(one.prompt)} tokens of prompt and {one.max_tokens} of answer exceed the "
                    f"model's context of {self.context}: shorten either"
                )
        with torch.inference_mode():
            return self._run(requests) if requests else []

    def _run(self, requests: Sequence[StaticRequest]) -> list[list[int]]:
        length = max(len(one.prompt) for one in requests)
        most = max(one.max_tokens for one in requests)
        tokens, mask = _padded(requests, length, most)
        positions = (mask[:, :length].cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=self._model.config)
        answers: list[list[int]] = [[] for _ in requests]
        going = set(range(len(requests)))
        for generated in range(1, most + 1):
            if len(requests) * (length + generated) * self.token_bytes > self.kv_bytes:
                raise OutOfMemoryError(len(requests), length, generated - 1)
            logits = self._model(
                input_ids=tokens,
                attention_mask=mask[:, : length + generated - 1],
                position_ids=positions,
                past_key_values=cache,
                logits_to_keep=1,
            ).logits
            # Those that have ended are computed on: that is what a static batch wastes.
            tokens = logits[:, -1:].argmax(-1)
            positions = positions[:, -1:] + 1
            for at, token in enumerate(tokens[:, 0].tolist()):
                if at in going:
                    answers[at].append(token)
                    if self._ends(requests[at], answers[at]):
                        going.discard(at)
            if not going:
                break
        return answers

    def _ends(self, request: StaticRequest, answer: Sequence[int]) -> bool:
        return len(answer) == request.max_tokens or (
            not request.ignore_eos and answer[-1] in self._end_tokens
        )


def _padded(
    requests: Sequence[StaticRequest], length: int, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts ``[requests, length]``, padded on the left, and which tokens are attended to,
    ``[requests, length + most]``."""
    tokens = torch.zeros(len(requests), length, dtype=torch.long)
    mask = torch.ones(len(requests), length + most, dtype=torch.long)
    for row, one in enumerate(requests):
        padding = length - len(one.prompt)
        tokens[row, padding:] = torch.tensor(one.prompt)
        mask[row, :padding] = 0
    return tokens, mask
