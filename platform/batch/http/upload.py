"""Reads uploads (``multipart/form-data``) as they come, the file straight to disk."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from loomserve.platform.base.errors import BadRequest, BodyTooLarge, RequestTimeout

# Fields beside the file are a word or a number each.
_MAX_FIELD = 1024
_MAX_PARTS = 32
# RFC 2046.
_LONGEST_BOUNDARY = 70
# An upload that is slower than this for so long is given up.
_PACE_S = 8.0
_PACE_BYTES = 8 * 1024
_FILE = "file"


class Upload:
    """Reader of a form; its one file goes to ``target``, all else into ``fields``."""

    def __init__(self, target: BinaryIO, max_bytes: int) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size = 0
        self._target = target
        self._max_bytes = max_bytes
        self._parts = 0
        self._header = b""
        self._disposition = b""
        self._name = ""
        self._value = b""
        self._in_file = False
        self._whole = False

    async def read(self, content_type: str, stream: AsyncIterator[bytes]) -> None:
        """Read the whole form, and sync the file to disk. Raises BadRequest if it is no form, it is
        cut off, or it has no file; BodyTooLarge if the file is larger than ``max_bytes``."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise BadRequest(
                "Upload the file as multipart/form-data, with the fields file and purpose."
            )
        if len(boundary) > _LONGEST_BOUNDARY:
            raise BadRequest(f"The form's boundary has more than {_LONGEST_BOUNDARY} characters.")
        try:
            parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begins,
                    "on_header_field": self._header_field,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_ends,
                    "on_headers_finished": self._headers_finished,
                    "on_part_data": self._data,
                    "on_part_end": self._part_ends,
                    "on_end": self._ends,
                },
            )
            async for chunk in stream:
                parser.write(chunk)
        except FormParserError as error:
            raise BadRequest(f"The form cannot be read: {error}") from None
        if not self._whole:
            raise BadRequest("The form ends in its midst. Send it again.")
        if self.filename is None:
            raise BadRequest("Missing required parameter: 'file'.", param=_FILE)
        self._target.flush()
        os.fsync(self._target.fileno())

    def _part_begins(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise BadRequest(f"The form has more than {_MAX_PARTS} parts.")
        self._header = self._disposition = self._value = b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end].lower()

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        if self._header == b"content-disposition":
            self._disposition += data[start:end]

    def _header_ends(self) -> None:
        self._header = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._in_file = self._name == _FILE
        if self._in_file:
            if self.filename is not None:
                raise BadRequest("There is more than one file; send one.", param=_FILE)
            filename = options.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = filename[:_MAX_FIELD] or "upload.jsonl"

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self.size += end - start
            if self.size > self._max_bytes:
                raise BodyTooLarge(
                    f"The file is larger than {self._max_bytes} bytes. Split it, or ask the "
                    "operator to raise batch.max_file_bytes."
                )
            self._target.write(memoryview(data)[start:end])
        elif len(self._value) + end - start > _MAX_FIELD:
            raise BadRequest("The field is too long.", param=self._name)
        else:
            self._value += data[start:end]

    def _part_ends(self) -> None:
        if not self._in_file:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _ends(self) -> None:
        self._whole = True


async def paced(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The stream, as long as it is not too slow. Raises RequestTimeout if too little came for too
    long."""
    loop = asyncio.get_running_loop()
    until, come = loop.time() + _PACE_S, 0
    chunks = aiter(stream)
    while True:
        try:
            async with asyncio.timeout_at(until):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise RequestTimeout(
                f"Less than {_PACE_BYTES} bytes of the file came within {_PACE_S:g} s. Send it "
                "faster, and without pauses."
            ) from None
        come += len(chunk)
        if come >= _PACE_BYTES:
            until, come = loop.time() + _PACE_S, 0
        yield chunk


def expiry_seconds(fields: Mapping[str, object]) -> int | None:
    """Seconds of OpenAI's ``expires_after``, from a form or an object; None: it is not given.
    Raises BadRequest if the anchor or the seconds are not allowed."""
    anchor, seconds = fields.get("anchor"), fields.get("seconds")
    if anchor is None and seconds is None:
        return None
    try:
        number = int(str(seconds))
    except ValueError:
        number = 0
    if anchor != "created_at" or not 3600 <= number <= 2_592_000:
        raise BadRequest(
            "expires_after has the anchor created_at, and 3600 to 2592000 seconds.",
            param="expires_after",
        )
    return number
