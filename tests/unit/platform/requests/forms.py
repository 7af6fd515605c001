"""Forms as clients send them."""

from __future__ import annotations

from collections.abc import Mapping

SOUND = bytes(range(256)) * 2
BOUNDARY = b"----a-boundary"


def part(name: str, value: bytes, *, file: str = "") -> bytes:
    given = f'; filename="{file}"' if file else ""
    head = f'Content-Disposition: form-data; name="{name}"{given}\r\n'
    return b"--" + BOUNDARY + b"\r\n" + head.encode() + b"\r\n" + value + b"\r\n"


def a_form(
    fields: Mapping[str, object], sound: bytes | None = SOUND, more: bytes = b""
) -> tuple[bytes, bytes]:
    """A body and its Content-Type; a file comes first, as curl may send it."""
    file = b"" if sound is None else part("file", sound, file="a.wav")
    parts = b"".join(part(name, str(value).encode()) for name, value in fields.items())
    body = file + parts + more + b"--" + BOUNDARY + b"--\r\n"
    return body, b"multipart/form-data; boundary=" + BOUNDARY
