"""Makes the predictor's query from a request to any of the text endpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from loomserve.platform.lengths.predict.prediction import LengthQuery
from loomserve.platform.requests.policy.sequences import longest

_SYSTEM = ("system", "developer")
# Characters whose tokens are counted; the rest is taken to have as many tokens per character.
_COUNTED = 4000


def query_of(request: Mapping[str, Any], count: Callable[[str], int]) -> LengthQuery | None:
    """The length query of a request to any endpoint that generates text.

    The instruction is the text of system messages, ``system`` or ``instructions``; all other text
    is the user's input. ``count`` returns the tokens of a text. None: there is no text, as with
    token ids, or there are several prompts, whose answers differ.
    """
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
