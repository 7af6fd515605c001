"""The question about an answer's length, made of a request, and the prediction that answers it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from loomserve.platform.requests.policy.sequences import longest

COVERAGE = 0.9
"""Share of answers whose length is to lie within the prediction's interval."""
_SYSTEM = ("system", "developer")
# Characters whose tokens are counted; the rest is taken to have as many tokens per character.
_COUNTED = 4000


@dataclass(frozen=True, slots=True)
class LengthQuery:
    """The properties of a request on which its answer's length may depend. ``instruction`` is the
    application's text: the system prompt, or the text that its requests repeat. It or
    ``user_input`` may be empty. ``input_tokens`` are those of the whole prompt, and ``max_tokens``
    the most that may be generated; None: no bound is known."""

    instruction: str
    user_input: str
    input_tokens: int
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expected output tokens, and an interval that holds :data:`COVERAGE` of the lengths. ``0 <=
    low <= tokens <= high``, and none of them exceeds the query's ``max_tokens``."""

    tokens: float
    low: float
    high: float
    median: float
    """As likely exceeded as not."""


def query_of(request: Mapping[str, Any], count: Callable[[str], int]) -> LengthQuery | None:
    """The length query of a request to any endpoint that generates text. The instruction is the
    text of system messages, ``system`` or ``instructions``; all other text is the user's input.
    ``count`` returns the tokens of a text. None: there is no text, as with token ids, or there are
    several prompts, whose answers differ."""
    instruction = list(_texts(request, ("system", "instructions")))
    user_input: list[str] = []
    for message in _messages(request):
        is_system = message.get("role") in _SYSTEM
        (instruction if is_system else user_input).extend(_texts(message, ("content",)))
    prompts = list(_texts(request, ("prompt", "input")))
    if len(prompts) > 1:
        return None
    application, text = "\n".join(instruction), "\n".join(user_input + prompts)
    if not application and not text:
        return None
    tokens = _tokens(application, count) + _tokens(text, count)
    return LengthQuery(application, text, tokens, longest(request))


def _messages(request: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for name in ("messages", "input"):
        found = request.get(name)
        if isinstance(found, list):
            yield from (message for message in found if isinstance(message, dict))


def _texts(node: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[str]:
    """Texts under these names: a string, a list, or entries ``{"type": …, "text": …}``."""
    for name in names:
        found = node.get(name)
        for part in found if isinstance(found, list) else [found]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str) and text:
                yield text


def _tokens(text: str, count: Callable[[str], int]) -> int:
    if len(text) <= _COUNTED:
        return count(text)
    return round(count(text[:_COUNTED]) * len(text) / _COUNTED)
