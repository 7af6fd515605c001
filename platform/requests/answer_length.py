"""The number of tokens of an answer, read from its last bytes as they pass."""

from __future__ import annotations

import re

# The usage and the finish reason are at the end of every body.
_TAIL_BYTES = 4096
# An answer's own text cannot look like this: there, quotation marks have a backslash before them.
_TOKENS = re.compile(rb'"(?:completion|output)_tokens":\s?(\d{1,9})')
_ENDED = re.compile(
    rb'"(?:finish_reason|stop_reason)":\s?"(?:stop|tool_calls|end_turn|tool_use|stop_sequence)"'
)


class AnswerLength:
    """Tail of one answer's body; parsed only when its tokens are asked for."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, chunk: bytes) -> None:
        """Take in the next bytes of the body."""
        self._tail = (self._tail + chunk[-_TAIL_BYTES:])[-_TAIL_BYTES:]

    @property
    def tokens(self) -> int | None:
        """Tokens of the answer, if the model itself ended it.

        None: the answer was cut off, or has no usage. A stream has it only if the client set
        ``stream_options.include_usage``; Anthropic's streams always have.
        """
        found = _TOKENS.findall(self._tail)
        return int(found[-1]) if found and _ENDED.search(self._tail) else None
