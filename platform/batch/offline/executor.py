"""Static batching on transformers: a batch is padded, starts together and ends with its longest.

This is how Magnus and UELLM execute batches (``transformers``). It stands beside vLLM, not in its
place: it is what batching policies are measured with, and runs the batch lane's offline models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from loomserve.platform.base.errors import ConfigError, LoomserveError


class OutOfMemoryError(LoomserveError):
    """A batch needed more KV memory than there is; none of its answers is complete."""

    def __init__(self, size: int, length: int, generated: int) -> None:
        super().__init__(
            f"a batch of {size} requests ran out of KV memory with {length} tokens of prompt and "
            f"{generated} of answer each; run it in two halves"
        )
        self.generated = generated


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    """A prompt's token ids, at least one; its answer ends at an end token or its limit.

    Attributes:
        temperature: 0: greedy.
        top_p: The most probable tokens that have this share together may be drawn; above 0.
        seed: Of the draws, which then do not depend on who else is in the batch; None: any.
    """

    prompt: Sequence[int]
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


class OfflineExecutor:
    """A model that computes one batch after the other, on the CPU."""

    def __init__(
        self, model: Path | str, *, threads: int, kv_bytes: int, dtype: str = "auto"
    ) -> None:
        """``threads`` are torch's, of the whole process.

        ``kv_bytes`` is a budget, not an allocation: main memory has no edge of its own that could
        be met safely, so a batch that crosses the budget is ended as if there were no more.

        Raises:
            ConfigError: it is no model that is run here; see :func:`check`.
        """
        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self.kv_bytes = kv_bytes
        self.token_bytes = _token_bytes(self._model)
        """KV of one token (Δ)."""
        eos = self._model.generation_config.eos_token_id
        self.end_tokens = frozenset([eos] if isinstance(eos, int) else eos or ())

    @property
    def context(self) -> int:
        """Tokens of prompt and answer that the model was made for."""
        return _context(self._model.config)

    def run(
        self,
        requests: Sequence[OfflineRequest],
        left: Callable[[], Collection[int]] = frozenset,
    ) -> list[list[int]]:
        """The answers' token ids, an end token included, once the last of them is complete.

        Before each step ``left`` tells which requests, by their places, nobody waits for any more;
        the batch does not go on for them, and what they have by then is their answer.

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
            return self._run(requests, left) if requests else []

    def _run(
        self, requests: Sequence[OfflineRequest], left: Callable[[], Collection[int]]
    ) -> list[list[int]]:
        length = max(len(one.prompt) for one in requests)
        most = max(one.max_tokens for one in requests)
        tokens, mask = _padded(requests, length, most)
        positions = (mask[:, :length].cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=self._model.config)
        answers: list[list[int]] = [[] for _ in requests]
        draws = {at: _Draw(one) for at, one in enumerate(requests) if one.temperature > 0}
        going = set(range(len(requests)))
        for generated in range(1, most + 1):
            going.difference_update(left())
            if not going:
                break
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
            for at in going & draws.keys():
                tokens[at] = draws[at](logits[at, -1])
            positions = positions[:, -1:] + 1
            for at, token in enumerate(tokens[:, 0].tolist()):
                if at in going:
                    answers[at].append(token)
                    if self._ends(requests[at], answers[at]):
                        going.discard(at)
        return answers

    def _ends(self, request: OfflineRequest, answer: Sequence[int]) -> bool:
        return len(answer) == request.max_tokens or (
            not request.ignore_eos and answer[-1] in self.end_tokens
        )


class _Draw:
    """Draws a request's tokens, with random numbers of its own."""

    def __init__(self, request: OfflineRequest) -> None:
        self._temperature = TemperatureLogitsWarper(float(request.temperature))
        self._top_p = TopPLogitsWarper(request.top_p) if request.top_p < 1 else None
        self._source = torch.Generator()
        if request.seed is None:
            self._source.seed()
        else:
            self._source.manual_seed(request.seed)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """A token, ``[1]``, by logits ``[vocabulary]``."""
        scores = self._temperature(None, logits[None].float())
        if self._top_p is not None:
            scores = self._top_p(None, scores)
        return torch.multinomial(scores.softmax(-1)[0], 1, generator=self._source)


def check(model: Path | str) -> None:
    """Whether the model is one that :class:`OfflineExecutor` runs; reads no weights.

    Raises:
        ConfigError: transformers does not know it as a language model, or it does not take or
            keep what a padded batch needs.
        OSError: it cannot be read or fetched.
    """
    try:
        config = AutoConfig.from_pretrained(model)
        _context(config)
        with torch.device("meta"):
            shape = AutoModelForCausalLM.from_config(config).eval()
    except ValueError as error:
        # Of transformers' paragraphs the first sentence says what is wrong.
        what = str(error).split(". ")[0]
        raise ConfigError(f"transformers has no language model for {model}: {what}") from None
    _token_bytes(shape)


def _context(config: Any) -> int:
    context = getattr(config, "max_position_embeddings", None)
    if not context:
        raise ConfigError(f"{config.model_type!r} has no max_position_embeddings in its config")
    return int(context)


def _token_bytes(model: Any) -> int:
    """What one token leaves in the cache, seen on one; also whether the model can be run so."""
    cache = DynamicCache(config=model.config)
    one = torch.ones(1, 1, dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            model(
                input_ids=one,
                # Masks are looked into, and without weights there is nothing to see.
                attention_mask=None if model.device.type == "meta" else one,
                position_ids=one - 1,
                past_key_values=cache,
                logits_to_keep=1,
            )
        kept = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(
            f"models of type {model.config.model_type!r} cannot be run in padded batches with a KV "
            f"cache: {error}"
        ) from None
    size = sum(tensor.nbytes for tensor in kept if tensor is not None)
    if not size:
        raise ConfigError(f"models of type {model.config.model_type!r} keep no KV cache")
    return int(size)


def _padded(
    requests: Sequence[OfflineRequest], length: int, most: int
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
