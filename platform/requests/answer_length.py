"""How many tokens an answer had, read from its last bytes as they pass."""

from __future__ import annotations

import re

# The usage stands at the end of every body, and so does why it ended.
_TAIL_BYTES = 4096
# An answer's own text cannot look like this: there, quotation marks have a backslash before them.
_TOKENS = re.compile(rb'"(?:completion|output)_tokens":\s?(\d{1,9})')
_ENDED = re.compile(
    rb'"(?:finish_reason|stop_reason)":\s?"(?:stop|tool_calls|end_turn|tool_use|stop_sequence)"'
)


class AnswerLength:
    """Keeps the end of one answer. Nothing is parsed before somebody asks."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, chunk: bytes) -> None:
        """Take in the next bytes of the body."""
        self._tail = (self._tail + chunk[-_TAIL_BYTES:])[-_TAIL_BYTES:]

    @property
    def tokens(self) -> int | None:
        """Tokens of an answer that the model ended itself.

        None if it was cut off, or does not say: a stream does so only for a client that set
        ``stream_options.include_usage``, and Anthropic's always.
        """
        found = _TOKENS.findall(self._tail)
        return int(found[-1]) if found and _ENDED.search(self._tail) else None
