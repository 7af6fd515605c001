"""The parts and tool calls of a message, each in the form that its type has.

vLLM's validators name what another kind of part would lack, without the place, and accept some
parts that lack what the prompt needs.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from loomserve.platform.base.errors import BadRequest

_AT = re.compile(r"^(?P<says>.*?)(?: - at `\$(?P<at>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$")


Form = type[msgspec.Struct]
Forms = dict[str, Form]


def form(**fields: Any) -> Form:
    """Objects that have at least these fields, each of a type, or of a type with a default."""
    given = [(name, *of) if isinstance(of, tuple) else (name, of) for name, of in fields.items()]
    return msgspec.defstruct("Form", given)


# vLLM takes a link as it is, too, and none for what it has by its uuid.
_LINK: Any = form(url=str) | str | None
_SOURCE: Any = msgspec.defstruct(
    "Encoded", [("data", str)], tag_field="type", tag="base64"
) | msgspec.defstruct("Linked", [("url", str)], tag_field="type", tag="url")
_AUDIO: Any = form(data=str, format=str) | None
_TOOL_CALL = form(id=str, type=Literal["function"], function=form(name=str, arguments=str))

CHAT_PARTS: Forms = {
    "text": form(text=str),
    "refusal": form(refusal=str),
    "thinking": form(thinking=str),
    "image_url": form(image_url=_LINK),
    "audio_url": form(audio_url=_LINK),
    "video_url": form(video_url=_LINK),
    "input_audio": form(input_audio=_AUDIO),
}
"""Of chats, by the ``type`` of a part; of other types vLLM's errors are right."""
ANTHROPIC_PARTS: Forms = {
    "text": form(text=str),
    "thinking": form(thinking=str),
    "image": form(source=_SOURCE),
    "tool_use": form(id=str, name=str, input=dict[str, Any]),
    "tool_result": form(tool_use_id=str),
}
"""Of ``/v1/messages``."""


def check_parts(parts: list[Any], where: str, forms: Forms) -> None:
    """Raises BadRequest if a part of ``where`` (``messages[0].content``) lacks its type's
    fields."""
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in forms:
            _check(part, forms[kind], f"{where}[{number}]", f" in a part of the type {kind!r}")


def check_tool_calls(calls: list[Any], where: str) -> None:
    """Raises BadRequest for a call without an id, a function's name or arguments."""
    for number, call in enumerate(calls):
        _check(call, _TOOL_CALL, f"{where}[{number}]", "")


def _check(value: Any, of: Form, where: str, within: str) -> None:
    try:
        msgspec.convert(value, of)
    except msgspec.ValidationError as error:
        found = _AT.match(str(error))
        assert found is not None
        param = where + (found["at"] or "")
        if missing := _MISSING.match(found["says"]):
            param, says = f"{param}.{missing['name']}", "is missing"
        else:
            says = f"is wrong: {found['says']}"
        raise BadRequest(f"{param} {says}{within}", param=param) from None
