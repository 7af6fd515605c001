"""What a simulated engine answers: tokens that its seed and a request's prompt decide. Pure."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from loomserve.platform.models.simulated import WORDS
from loomserve.platform.simulated.wire import MAX_TOKENS, FinishReason, WireRequest

# An attempt to have a request go on elsewhere has the request's own id before it.
_ATTEMPT = "#"


class Answer(NamedTuple):
    """All tokens of an answer, those that another engine has given among them."""

    tokens: list[int]
    reason: FinishReason
    stop_token: int | None = None


def answer_to(request: WireRequest, *, seed: int, mean_tokens: int, longest: int) -> Answer:
    """The answer to a request, the same on each engine that has this ``seed``.

    With greedy sampling or a seed of the request's own, its id does not matter. Answers that end by
    themselves have ``mean_tokens``, their lengths being from 1 to twice as many; no answer has more
    than ``longest`` tokens.
    """
    params = request.sampling_params or {}
    drawn = random.Random(_digest(request, params, seed))
    length = drawn.randrange(1, 2 * mean_tokens)
    least = params.get("min_tokens", 0)
    end: Any = None if params.get("ignore_eos") else params.get("_eos_token_id")
    most = min(longest, params.get("max_tokens", MAX_TOKENS) or longest)
    ends_at = most if end is None else max(length, least)
    # However many are drawn, the first are the same.
    tokens = drawn.choices(params.get("allowed_token_ids") or WORDS, k=min(ends_at, most))
    stop = _first(tokens, params.get("stop_token_ids") or (), least)
    if stop is not None:
        return Answer(tokens[: stop + 1], FinishReason.STOP, tokens[stop])
    if ends_at < most:
        return Answer([*tokens, int(end)], FinishReason.STOP)
    return Answer(tokens, FinishReason.LENGTH)


def _first(tokens: Sequence[int], wanted: Sequence[int], least: int) -> int | None:
    if not wanted:
        return None
    return next(
        (at for at, token in enumerate(tokens) if at + 1 >= least and token in wanted), None
    )


def _digest(request: WireRequest, params: Mapping[str, Any], seed: int) -> bytes:
    prompt = request.prompt_token_ids or ()
    found = blake2b(struct.pack(f"<{len(prompt)}q", *prompt), digest_size=16)
    if params.get("temperature", 1.0) == 0:
        variant: object = "greedy"
    elif params.get("seed") is not None:
        variant = params["seed"]
    else:
        variant = request.request_id.partition(_ATTEMPT)[0]
    adapter = request.lora_request[0] if request.lora_request else None
    found.update(repr((seed, variant, adapter)).encode())
    return found.digest()
