"""Reads a client's JSON body without building what the platform does not look at.

A few megabytes of JSON can be millions of lists, which take a second to build with the
interpreter's lock held, in any thread. So the texts of a large body stay bytes, and nothing else in
it may be large.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from loomserve.platform.base.errors import BadRequest

SMALL_BYTES = 2**18
"""A body up to this size is read whole."""
MOST_OTHER_BYTES = 2**19
"""Of a larger body: all but its texts."""

TEXTS = (
    *("messages", "prompt", "input", "system", "instructions", "prompt_embeds", "tokens"),
    # Of embeddings as Cohere has them, rerank, score and pooling.
    *("texts", "images", "inputs", "query", "queries", "documents", "items"),
    *("data", "data_1", "data_2", "text_1", "text_2"),
)
"""Fields that may be long: what the model reads, and what media it is sent."""
TEXTS_ONLY = frozenset({"prompt", "system", "instructions", "prompt_embeds", "tokens", "texts"})
"""Those of them that link to nothing."""
MOST_STRUCTURE = 2**19
"""Braces, brackets and commas of a conversation of a large body."""
_SPACE = b" \t\n\r"
_Optional = msgspec.Raw | msgspec.UnsetType
_LARGE = msgspec.json.Decoder(
    msgspec.defstruct("_Large", [(name, _Optional, msgspec.UNSET) for name in TEXTS])
)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
CHARACTERS_PER_TOKEN = 16
"""No real text has more to a token; one that is longer is refused before it is tokenised."""
# A picture or a sound is no text. In a text quotes are escaped, so none can pass for one.
_MEDIA = re.compile(rb'"(?:url|image_url|data|file_data)"\s*:\s*"[^"\\]{1024,}"')
_ESCAPED = 6


def read_body(body: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The fields of a body, and those of its texts that were left as JSON; the last of a repeated
    name counts, as for vLLM. Raises BadRequest if it is no JSON object in UTF-8, or a large one has
    more than texts."""
    try:
        # What is around the object makes it no larger.
        body = body.strip(_SPACE)
        if len(body) > SMALL_BYTES:
            return _read_large(body)
        parsed = msgspec.json.decode(body)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise _unreadable(body, error) from None
    if not isinstance(parsed, dict):
        raise _no_object()
    return parsed, {}


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
    fields = {name: raw for name, raw in _FIELDS.decode(body).items() if name not in texts}
    return {name: msgspec.json.decode(raw) for name, raw in fields.items()}, texts


def conversations_in(texts: Mapping[str, bytes]) -> dict[str, Any]:
    """The conversations and documents that were left as JSON; raises BadRequest for slow ones."""
    for name, text in texts.items():
        # Those within texts count, too: to find out which are takes longer than to build them.
        if sum(text.count(mark) for mark in (b"{", b"[", b",")) > MOST_STRUCTURE:
            raise BadRequest(
                f"{name} has more than {MOST_STRUCTURE} braces, brackets and commas; send less",
                param=name,
            )
    return {name: msgspec.json.decode(text) for name, text in texts.items()}


def texts_of(body: bytes) -> dict[str, bytes]:
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
    if not body.strip(_SPACE):
        return BadRequest('the body is empty: send a JSON object, such as {"model": …}')
    try:
        body.decode()
    except UnicodeDecodeError as wrong:
        return BadRequest(f"the body is not UTF-8: {wrong.reason} at byte {wrong.start}")
    return BadRequest(f"the body is not valid JSON: {error}")


def characters(json_text: bytes) -> int:
    r"""Characters of a field that was left as JSON, nearly: brackets and names count as well,
    and ``\uXXXX`` as one, so that clients may write ASCII only."""
    text = _MEDIA.sub(b"", json_text)
    escaped = min(text.count(rb"\u"), len(text) // _ESCAPED)
    length = len(text) if text.isascii() else len(text.decode("utf-8", "replace"))
    return length - (_ESCAPED - 1) * escaped
