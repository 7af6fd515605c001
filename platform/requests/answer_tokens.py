"""The tokens of an answer, read from its bytes as they pass.

vLLM writes JSON without spaces, and within JSON's own strings quotation marks have a backslash
before them and ends of lines are escaped. So the marks that are looked for here are the engine's
own, whatever an answer says.
"""

from __future__ import annotations

import re
from collections import deque

_USAGE = b'"usage":{'
# Within a usage, which is far shorter.
_USAGE_BYTES = 1024
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens":(\d{1,9})')
# Anthropic's input_tokens are those that no cache had.
_CACHED = re.compile(rb'"cache_(?:read|creation)_input_tokens":(\d{1,9})')
_COMPLETION = re.compile(rb'"(?:completion|output)_tokens":(\d{1,9})')
_END_OF_EVENT = b"\n\n"

# After the usage a stream has two events at most, each perhaps a piece of its own.
_LAST_PIECES = 4

_ANY_USAGE = re.compile(rb',"usage":\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}')
# The engine's last word has no choices.
_NO_CHOICES = b'"choices":[],'

Tokens = tuple[int, int]
"""Of the prompt and of the answer."""


class LastUsage:
    """The usage at an answer's end; costs next to nothing until it is asked for."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque(maxlen=_LAST_PIECES)

    def feed(self, piece: bytes) -> None:
        """Take in the next bytes of the body."""
        if piece:
            self._pieces.append(piece)

    def tokens(self, *, complete: bool) -> Tokens | None:
        """None: the answer told none, or is not complete."""
        if not complete:
            return None
        body = b"".join(self._pieces)
        at = body.rfind(_USAGE)
        return _read(body[at : at + _USAGE_BYTES]) if at >= 0 else None


class RunningUsage:
    """The usage that an answer has told so far, and the events that it has had."""

    def __init__(self, prompt_bytes: int) -> None:
        """``prompt_bytes``: size of the request, by which its prompt is judged if need be."""
        self._estimate = prompt_bytes // 4
        self._found = b""
        self._carry = b""
        self._events = 0

    def feed(self, piece: bytes) -> None:
        """Take in the next bytes of the body."""
        self._events += piece.count(_END_OF_EVENT)
        seen = self._carry + piece
        at = seen.rfind(_USAGE)
        if at >= 0:
            self._found = seen[at : at + _USAGE_BYTES]
        elif self._found:
            self._found += piece[: _USAGE_BYTES - len(self._found)]
        self._carry = seen[-len(_USAGE) + 1 :]

    def tokens(self, *, complete: bool) -> Tokens:
        """What the engine told; beyond that, a token an event and for four bytes of the prompt."""
        told = _read(self._found)
        if told is None:
            return self._estimate, self._events
        prompt, completion = told
        return prompt, completion if complete else max(completion, self._events)


class HiddenUsage:
    """Takes out of a stream the usage that the platform, and not the client, has asked for.

    It holds back an event until it is whole.
    """

    def __init__(self, *, keeps_last: bool) -> None:
        """``keeps_last``: the client has asked for the usage at the end."""
        self._keeps_last = keeps_last
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """Take in the next bytes of the stream, and return what the client gets of it now."""
        seen = self._rest + piece
        end = seen.rfind(_END_OF_EVENT) + len(_END_OF_EVENT)
        if end < len(_END_OF_EVENT):
            self._rest = seen
            return b""
        self._rest = seen[end:]
        if _NO_CHOICES not in seen:
            return _ANY_USAGE.sub(b"", seen[:end])
        return b"".join(map(self._shown, seen[:end].split(_END_OF_EVENT)[:-1]))

    def _shown(self, event: bytes) -> bytes:
        if _NO_CHOICES not in event:
            return _ANY_USAGE.sub(b"", event) + _END_OF_EVENT
        return event + _END_OF_EVENT if self._keeps_last else b""

    def rest(self) -> bytes:
        """What is left at the end."""
        return self._rest


def _read(usage: bytes) -> Tokens | None:
    prompt, completion = _PROMPT.search(usage), _COMPLETION.search(usage)
    if prompt is None:
        return None
    cached = sum(map(int, _CACHED.findall(usage)))
    # Of embeddings there is a prompt alone.
    return int(prompt[1]) + cached, int(completion[1]) if completion else 0
