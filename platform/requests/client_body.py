"""Reads a client's JSON body without building what the platform does not look at.

JSON of a few megabytes can be millions of lists, which take a second to build and hold up
all that the process serves: in a thread as well, for the interpreter's lock is held. So of a large
body only known fields are taken, and texts stay the bytes that they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from loomserve.platform.base.errors import BadRequest

SMALL_BYTES = 2**18
"""A body up to this size is read whole."""
MOST_OTHER_BYTES = 2**19
"""Of a larger body: all but its texts."""

TEXTS = ("messages", "prompt", "input", "system", "instructions", "prompt_embeds", "tokens")
"""Fields that may be long: what the model reads, and what media it is sent."""
_KNOWN = (
    "model",
    "n",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "cache_salt",
    "safety_identifier",
    "user",
    "vllm_xargs",
    "kv_transfer_params",
    "response_format",
    "structured_outputs",
    "text",
    "output_config",
    "tools",
)
_SPACE = b" \t\n\r"
_Optional = msgspec.Raw | msgspec.UnsetType
_LARGE = msgspec.json.Decoder(
    msgspec.defstruct("_Large", [(name, _Optional, msgspec.UNSET) for name in (*TEXTS, *_KNOWN)])
)


def read_body(body: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The fields of a body, and the texts among them that were left as JSON.

    A small body's fields are all there, a large one's are those that the platform knows.

    Raises:
        BadRequest: it is no JSON object, in UTF-8, or a large one has more than texts.
    """
    try:
        return _read_large(body) if len(body) > SMALL_BYTES else (_read_small(body), {})
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise _unreadable(body, error) from None


def _read_small(body: bytes) -> dict[str, Any]:
    parsed = msgspec.json.decode(body)
    if not isinstance(parsed, dict):
        raise _no_object()
    return parsed


def _read_large(body: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    # Only texts that are built are looked at by the decoder.
    if not body.isascii():
        str(body, "utf-8")
    if not body.lstrip(_SPACE).startswith(b"{"):
        raise _no_object()
    found = msgspec.structs.asdict(_LARGE.decode(body))
    texts = _texts(found)
    other = len(body) - sum(len(text) for text in texts.values())
    if other > MOST_OTHER_BYTES:
        raise BadRequest(
            f"the fields other than {', '.join(TEXTS)} are {other} bytes long, of which "
            f"{MOST_OTHER_BYTES} are allowed; send less"
        )
    fields = {name: found[name] for name in _KNOWN if found[name] is not msgspec.UNSET}
    return {name: msgspec.json.decode(raw) for name, raw in fields.items()}, texts


def texts_of(body: bytes) -> dict[str, bytes]:
    """The texts of a body that was read, as JSON."""
    return _texts(msgspec.structs.asdict(_LARGE.decode(body)))


def _texts(found: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: bytes(raw) for name in TEXTS if (raw := found[name]) is not msgspec.UNSET}


def with_fields(body: bytes, added: Mapping[str, Any]) -> bytes:
    """The body with fields at its end, where they hold: of a name given twice the last counts."""
    end = len(body.rstrip(_SPACE)) - 1
    is_empty = body[:end].rstrip(_SPACE).endswith(b"{")
    comma = b"" if is_empty else b","
    return b"".join((memoryview(body)[:end], comma, msgspec.json.encode(added)[1:]))


def _no_object() -> BadRequest:
    return BadRequest('the body must be a JSON object, such as {"model": …, "messages": […]}')


def _unreadable(body: bytes, error: Exception) -> BadRequest:
    try:
        body.decode()
    except UnicodeDecodeError as wrong:
        return BadRequest(f"the body is not UTF-8: {wrong.reason} at byte {wrong.start}")
    return BadRequest(f"the body is not valid JSON: {error}")
