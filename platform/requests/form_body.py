"""Reads a client's form (multipart/form-data): its fields, but not the file that it brings.

The file stays where it is in the body, which engines get in pieces, so that it is in memory once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from loomserve.platform.base.errors import BadRequest

MOST_PARTS = 64
MOST_FIELD_BYTES = 2**16
"""Of one field that is no file."""
PIECE_BYTES = 2**16
FILE = "file"

_MULTIPART = b"multipart/form-data"
_LONGEST_BOUNDARY = 70
_YES = frozenset({"1", "true", "on", "yes", "t", "y"})
_XARGS = "vllm_xargs"


@dataclass(frozen=True)
class ClientForm:
    """A form, with the fields that the platform looks at as they would be in JSON."""

    content_type: bytes
    fields: Mapping[str, Any]
    _body: bytes = field(repr=False)
    _boundary: bytes = field(repr=False)
    _end: int
    """Where the delimiter begins that ends the form."""

    @classmethod
    def of(cls, body: bytes, content_type: bytes) -> ClientForm:
        """Raises BadRequest if it is no form, has no file, or has a field twice or too long."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind.lower() != _MULTIPART or not 0 < len(boundary) <= _LONGEST_BOUNDARY:
            raise BadRequest(
                "this endpoint takes a form: multipart/form-data with a boundary, the fields "
                "model and file, such as curl -F model=… -F file=@speech.wav sends"
            )
        if options.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8"):
            raise BadRequest("the form must be in UTF-8")
        last = b"\r\n--" + boundary + b"--"
        end = body.find(last)
        if end < 0 or body[end + len(last) :].strip(b"\r\n"):
            raise BadRequest("the form is cut short: it has to end with its boundary and --")
        parts = _Parts(boundary)
        parts.read(body)
        if FILE not in parts.files:
            raise BadRequest("the form has no file in its field file", param=FILE)
        return cls(content_type, _typed(parts.fields), body, boundary, end)

    def pieces(self, added: Mapping[str, Any]) -> Iterator[bytes]:
        """The form in pieces, with fields at its end, where they hold: of two the last counts."""
        for begin in range(0, self._end, PIECE_BYTES):
            yield self._body[begin : min(begin + PIECE_BYTES, self._end)]
        yield self._tail(added)

    def size(self, added: Mapping[str, Any]) -> int:
        return self._end + len(self._tail(added))

    def _tail(self, added: Mapping[str, Any]) -> bytes:
        parts = (
            b'\r\n--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b'
            % (self._boundary, name.encode(), _text(value).encode())
            for name, value in added.items()
        )
        return b"".join(parts) + self._body[self._end :]


class _Parts:
    """Callbacks of the parser: texts of fields, and names of files."""

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.files: list[str] = []
        self._number = 0
        self._header = self._disposition = b""
        self._value = b""
        self._name = ""
        self._data: bytearray | None = None
        """Of a field; None: the part is a file."""
        self._is_whole = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._add_header,
                "on_header_value": self._add_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._name_part,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def read(self, body: bytes) -> None:
        """Raises BadRequest if it is no form, has too many parts, or a field twice or too long."""
        try:
            for begin in range(0, len(body), PIECE_BYTES):
                self._parser.write(body[begin : begin + PIECE_BYTES])
        except FormParserError as error:
            raise BadRequest(f"the form cannot be read: {error}") from None
        if not self._is_whole:
            raise BadRequest("the form is cut short: it has to end with its boundary and --")

    def _begin(self) -> None:
        self._number += 1
        if self._number > MOST_PARTS:
            raise BadRequest(f"the form has more than {MOST_PARTS} fields; send fewer")
        self._disposition = b""

    def _add_header(self, data: bytes, begin: int, end: int) -> None:
        self._header += data[begin:end]

    def _add_value(self, data: bytes, begin: int, end: int) -> None:
        self._value += data[begin:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _name_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        try:
            self._name = options[b"name"].decode()
        except (KeyError, UnicodeDecodeError):
            raise BadRequest("a part of the form has no name in its Content-Disposition") from None
        is_file = b"filename" in options
        if is_file and self._name != FILE:
            raise BadRequest(f"the form's file belongs into the field {FILE}", param=self._name)
        # A list, as OpenAI's clients write it, is a field for each entry.
        if self._name in (*self.fields, *self.files) and not self._name.endswith("[]"):
            raise BadRequest(f"the form has {self._name} twice; send it once", param=self._name)
        self._data = None if is_file else bytearray()

    def _add_data(self, data: bytes, begin: int, end: int) -> None:
        if self._data is None:
            return
        self._data += data[begin:end]
        if len(self._data) > MOST_FIELD_BYTES:
            raise BadRequest(
                f"{self._name} is longer than {MOST_FIELD_BYTES} bytes; send less", param=self._name
            )

    def _end_part(self) -> None:
        if self._data is None:
            self.files.append(self._name)
            return
        try:
            text = self._data.decode()
            before = self.fields.get(self._name)
            self.fields[self._name] = text if before is None else f"{before},{text}"
        except UnicodeDecodeError:
            raise BadRequest(f"{self._name} is not UTF-8", param=self._name) from None

    def _end(self) -> None:
        self._is_whole = True


def _typed(fields: Mapping[str, str]) -> dict[str, Any]:
    """The fields, with those that the platform looks at typed; raises BadRequest for wrong ones."""
    typed: dict[str, Any] = dict(fields)
    for name in ("stream", "use_beam_search"):
        if name in typed:
            typed[name] = fields[name].lower() in _YES
    if "n" in typed:
        if not (fields["n"].isascii() and fields["n"].isdecimal() and len(fields["n"]) < 10):
            raise BadRequest("n must be a whole number", param="n")
        typed["n"] = int(fields["n"])
    if _XARGS in typed:
        try:
            typed[_XARGS] = msgspec.json.decode(fields[_XARGS], type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            raise BadRequest(f"{_XARGS} must be a JSON object", param=_XARGS) from None
    return typed


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
