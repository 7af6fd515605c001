"""Server-sent events that are passed on whole, or not at all."""

from __future__ import annotations

_END = b"\n\n"


class WholeEvents:
    """A stream of events, cut between two of them: a client that sees half of one fails on it."""

    def __init__(self) -> None:
        self.rest = b""
        """The begin of an event whose end has not come."""

    def whole(self, chunk: bytes) -> bytes:
        """What may be passed on once ``chunk`` has come; nothing, if no event has ended with it."""
        # Engines send an event at a time, so this is all that a token costs.
        if not self.rest and chunk.endswith(_END):
            return chunk
        whole, end, self.rest = (self.rest + chunk).rpartition(_END)
        return whole + end
