"""Static batching on transformers: a padded batch starts together and ends with its longest answer.

Magnus and UELLM execute batches so. It stands beside vLLM, not in its place: batching policies are
measured with it, and the batch lane's offline models run on it.
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
    """A prompt of at least one token id; its answer ends at an end token or at ``max_tokens``.

    Attributes:
        temperature: 0: greedy.
        top_p: Only the most probable tokens that together have this share are drawn; above 0.
        seed: Seed of the draws, which then do not depend on the rest of the batch; None: random.
    """

    prompt: Sequence[int]
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


class OfflineExecutor:
    """A model on the CPU, which computes one batch after another."""

    def __init__(
        self,
        model: Path | str,
        *,
        threads: int,
        kv_bytes: int,
        dtype: str = "auto",
        revision: str | None = None,
    ) -> None:
        """Load a model, with so many torch threads of the whole process. ``kv_bytes`` is the budget
        of a batch's KV, not an allocation. A batch that crosses it ends as if memory were full:
        running into the real limit of main memory is not safe. Raises ConfigError as :func:`check`
        if transformers cannot run it in batches."""
        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, revision=revision
        ).eval()
        self.kv_bytes = kv_bytes
        self.token_bytes = _token_bytes(self._model)
        """Bytes of one token's KV (Δ)."""
        eos = self._model.generation_config.eos_token_id
        self.end_tokens = frozenset([eos] if isinstance(eos, int) else eos or ())

    @property
    def context(self) -> int:
        """Most tokens of prompt and answer together."""
        return _context(self._model.config)

    def run(
        self, requests: Sequence[OfflineRequest], left: Callable[[], Collection[int]] = frozenset
    ) -> list[list[int]]:
        """Compute a batch, and return the answers' token ids, end tokens included. Before each step
        ``left`` returns the places of requests that nobody waits for any more: their answers end
        there, and the batch does not go on for them. Raises OutOfMemoryError if β·(L + g)·Δ crosses
        the budget before each answer's g-th token, and what was computed is lost; ValueError if a
        request is empty, or longer than the model's context."""
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
            # Answers that have ended are computed on: this is what a static batch wastes.
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
    """Sampler of one request's tokens, with a random generator of its own."""

    def __init__(self, request: OfflineRequest) -> None:
        self._temperature = TemperatureLogitsWarper(float(request.temperature))
        self._top_p = TopPLogitsWarper(request.top_p) if request.top_p < 1 else None
        self._source = torch.Generator()
        if request.seed is None:
            self._source.seed()
        else:
            self._source.manual_seed(request.seed)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw a token, ``[1]``, from logits ``[vocabulary]``."""
        scores = self._temperature(None, logits[None].float())
        if self._top_p is not None:
            scores = self._top_p(None, scores)
        return torch.multinomial(scores.softmax(-1)[0], 1, generator=self._source)


def check(model: Path | str, revision: str | None = None) -> None:
    """Check that :class:`OfflineExecutor` can run a model, without reading weights. Raises
    ConfigError if transformers does not know it as a language model, or it cannot run padded
    batches with a KV cache; OSError if it cannot be read or fetched."""
    try:
        config = AutoConfig.from_pretrained(model, revision=revision)
        _context(config)
        with torch.device("meta"):
            shape = AutoModelForCausalLM.from_config(config).eval()
    except ValueError as error:
        # The first sentence of transformers' message says what is wrong.
        what = str(error).split(". ")[0]
        raise ConfigError(f"transformers has no language model for {model}: {what}") from None
    _token_bytes(shape)


def _context(config: Any) -> int:
    context = getattr(config, "max_position_embeddings", None)
    if not context:
        raise ConfigError(f"{config.model_type!r} has no max_position_embeddings in its config")
    return int(context)


def _token_bytes(model: Any) -> int:
    """Bytes that one token leaves in the KV cache, found by running one token."""
    cache = DynamicCache(config=model.config)
    one = torch.ones(1, 1, dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            model(
                input_ids=one,
                # transformers reads values of a mask, which a meta tensor does not have.
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
    """Token ids ``[requests, length]``, padded on the left, and the attention mask
    ``[requests, length + most]``."""
    tokens = torch.zeros(len(requests), length, dtype=torch.long)
    mask = torch.ones(len(requests), length + most, dtype=torch.long)
    for row, one in enumerate(requests):
        padding = length - len(one.prompt)
        tokens[row, padding:] = torch.tensor(one.prompt)
        mask[row, :padding] = 0
    return tokens, mask
