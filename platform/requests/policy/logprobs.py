"""How many log probabilities one request may ask for.

vLLM makes objects and JSON of each, 5 to 10 µs on a quiet machine and 28 µs on a busy one, on the
event loop of all streams: token by token in a stream, otherwise at once, or in slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.policy.sequences import LENGTHS, answers

MOST_A_STEP = 4096
"""Of one token of each of a request's answers."""
MOST_AT_ONCE = 2**15
"""Of a prompt, and of all answers of a request that does not stream."""
MOST_IN_A_CHUNK = 2**13
"""Of a prompt that a stream echoes, and of an answer that its stream's end repeats."""

# Where endpoints say how many each token has beside its own.
_NAMES = ("top_logprobs", "logprobs")


def check_logprobs(fields: Mapping[str, Any], prompts: int, *, repeats: bool = False) -> None:
    """Raises BadRequest if a request with so many prompts asks for too many. ``repeats``: a
    stream's end says again what its chunks have said."""
    prompt = fields.get("prompt_logprobs")
    if prompt is not None and _whole(prompt) and not 0 <= prompt < MOST_A_STEP:
        raise _too_many("prompt_logprobs", prompt)
    each, name = _of_a_token(fields)
    if each is None:
        return
    if not 0 <= each < MOST_A_STEP:
        raise _too_many(name, each)
    sequences = prompts * answers(fields)
    if sequences * (each + 1) > MOST_A_STEP:
        raise BadRequest(
            f"{sequences} answers with {each + 1} log probabilities for each token are more than "
            f"{MOST_A_STEP} at a time; ask for fewer, or send several requests",
            param=name,
        )
    lengths = [fields[length] for length in LENGTHS if _whole(fields.get(length))]
    streams = fields.get("stream") is True
    if (streams and not repeats) or not lengths:
        return
    bound = MOST_IN_A_CHUNK if streams else MOST_AT_ONCE
    if (tokens := max(lengths)) > (most := bound // (sequences * (each + 1))):
        raise BadRequest(
            f"{sequences} answers of {tokens} tokens with {each + 1} log probabilities each are "
            f"more than {bound}, with which others would wait; ask for {most} tokens at most"
            f"{'' if repeats else ', or for a stream'}",
            param=name,
        )


def most_tokens(each: int, answers: int, most: int = MOST_AT_ONCE) -> int:
    """Tokens of a prompt, or of each answer, of which there are no more than ``most``. ``each``:
    log probabilities of a token beside its own; negative: the whole vocabulary. ``answers`` are to
    one prompt."""
    return max(1, most // ((each + 1) * answers)) if each >= 0 else 1


def _of_a_token(fields: Mapping[str, Any]) -> tuple[int | None, str]:
    listed = fields.get("logprob_token_ids")
    if isinstance(listed, list) and listed:
        return len(listed), "logprob_token_ids"
    for name in _NAMES:
        if _whole(fields.get(name)):
            return fields[name], name
    return (0 if fields.get("logprobs") is True else None), "logprobs"


def _whole(value: Any) -> TypeGuard[int]:
    return type(value) is int


def _too_many(name: str, given: int) -> BadRequest:
    return BadRequest(
        f"{name} is {given}; give 0 to {MOST_A_STEP - 1}, or list the tokens that matter in "
        "logprob_token_ids",
        param=name,
    )
