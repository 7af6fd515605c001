"""What both protocols of the store share: that of engines, and that of stores of other nodes."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

NAMESPACE_BYTES = 16
MOST_MESSAGE_BYTES = 2**22
"""Of a request: the keys of a context of four million tokens, in blocks of sixteen."""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Raised by decoding what is no message. Text that is no UTF-8, and arrays in arrays without end,
are not ``DecodeError``."""

Namespace = Annotated[bytes, Meta(min_length=NAMESPACE_BYTES, max_length=NAMESPACE_BYTES)]
Count = Annotated[int, Meta(ge=0, lt=2**32)]
Size = Annotated[int, Meta(ge=1, lt=2**40)]


class Corrupt(msgspec.Struct, tag=True, frozen=True):
    """Reports that the last block of a chain failed its checksum, which the store checks again."""

    namespace: Namespace
    keys: bytes


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The request was not carried out, and why."""

    message: str
