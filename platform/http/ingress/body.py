"""Reads whole request bodies before the application sees them, within limits of each and of all."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from starlette.types import Message, Receive

from loomserve.platform.base.errors import (
    BadRequest,
    BodyTooLarge,
    RequestTimeout,
    Unavailable,
    UnsupportedBody,
)

METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_FORMS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
    b"\x1f\x8b": "gzip",
    b"\x78\x01": "zlib's form",
    b"\x78\x9c": "zlib's form",
    b"\x78\xda": "zlib's form",
    b"\x28\xb5\x2f\xfd": "zstd",
}
# More digits are no length anybody means, and Python refuses to convert thousands of them.
_MAX_LENGTH_DIGITS = 18
_CHECKS = 20
_RETRY_AFTER_S = 1.0


def has_body(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request says that it has a body of one byte or more, or of unknown length."""
    return bool(headers.get(b"content-length", b"").strip(b"0")) or b"transfer-encoding" in headers


async def read_body(
    receive: Receive, content_length: bytes | None, *, max_bytes: int, timeout_s: float
) -> bytes | None:
    """The body's bytes, or None if the client went away while it sent them.

    Raises BadRequest for a wrong Content-Length, BodyTooLarge over ``max_bytes`` (declared or
    counted), and RequestTimeout after ``timeout_s`` seconds. These are counted in polls, so that
    seconds in which this process got no core count once: the client may have got none either.
    """
    _check_length(content_length, max_bytes)
    collecting = asyncio.ensure_future(_collect(receive, max_bytes))
    try:
        for _ in range(_CHECKS):
            done, _ = await asyncio.wait({collecting}, timeout=timeout_s / _CHECKS)
            if done:
                return collecting.result()
    finally:
        collecting.cancel()
    raise RequestTimeout(
        f"The request body had not arrived after {timeout_s:g} s. Send it without pauses."
    )


def check_encoding(content_encoding: bytes | None) -> None:
    """Raises UnsupportedBody for a compressed body."""
    coding = (content_encoding or b"identity").strip().lower()
    if coding != b"identity":
        raise UnsupportedBody(
            f"Bodies are not taken with Content-Encoding: {coding.decode('latin-1')[:64]}. Send "
            "the body as it is, without that header."
        )


def without_bom(body: bytes) -> bytes:
    """The body without UTF-8's byte order mark; raises UnsupportedBody for other encodings."""
    if body.startswith(codecs.BOM_UTF8):
        return body[len(codecs.BOM_UTF8) :]
    # All JSON, and all forms, begin with two characters of ASCII, which are a byte in UTF-8.
    form = next((form for begin, form in _FORMS.items() if body.startswith(begin)), None)
    if form is None and 0 in body[:2]:
        form = "UTF-32" if body[:4].count(0) > 2 else "UTF-16"
    if form is not None:
        raise UnsupportedBody(f"The body is in {form}. Send it in UTF-8, uncompressed.")
    return body


def replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the whole body once, then the server's own messages."""
    message: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def replayed() -> Message:
        nonlocal message
        if message is None:
            return await receive()
        first, message = message, None
        return first

    return replayed


def _check_length(content_length: bytes | None, max_bytes: int) -> None:
    if content_length is None:
        return
    if not content_length.isdigit() or len(content_length) > _MAX_LENGTH_DIGITS:
        raise BadRequest("The Content-Length header is not a number of bytes.")
    if int(content_length) > max_bytes:
        raise _too_large(max_bytes)


async def _collect(receive: Receive, max_bytes: int) -> bytes | None:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunk if len(chunks) == 1 else b"".join(chunks)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The request body is larger than {max_bytes} bytes. Send less, or ask the operator to "
        "raise server.max_body."
    )


class BodyBudget:
    """Counts the bytes of all request bodies in the process against a bound."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0

    @contextmanager
    def counted(self, receive: Receive) -> Iterator[Receive]:
        """A ``receive`` whose bytes count within the block; it may raise Unavailable."""
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
