"""Bounds the memory of all request bodies together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Message, Receive

from loomserve.platform.base.errors import Unavailable

_RETRY_AFTER_S = 1.0


class BodyBudget:
    """Bytes of the bodies of all requests that are in the process, and the most there may be."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0

    @contextmanager
    def counted(self, receive: Receive) -> Iterator[Receive]:
        """A ``receive`` whose bytes are held until the end of the block.

        It raises :class:`Unavailable` where they are too many beside other requests' bytes.
        """
        held = 0

        async def counting() -> Message:
            nonlocal held
            message = await receive()
            size = len(message.get("body", b""))
            held += size
            self._held += size
            if self._held > self._most:
                raise Unavailable(
                    "The server holds as many bytes of requests as it may. Try again shortly, or "
                    "ask the operator to raise server.max_body_total.",
                    reason="bodies_exceeded",
                    retry_after_s=_RETRY_AFTER_S,
                )
            return message

        try:
            yield counting
        finally:
            self._held -= held
