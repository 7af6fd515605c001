"""What is in a message: its parts and its tool calls, each of the form that its type has.

vLLM's validators say of a wrong part what is missing in another kind of part, without its place,
and take some that lack what the prompt needs of them.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from loomserve.platform.base.errors import BadRequest

_AT = re.compile(r"^(?P<says>.*?)(?: - at `\$(?P<at>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$")


class _Text(msgspec.Struct):
    text: str


class _Refusal(msgspec.Struct):
    refusal: str


class _Thinking(msgspec.Struct):
    thinking: str


class _Link(msgspec.Struct):
    url: str


# vLLM takes a link as it is, too, and none for what it has by its uuid.
_Linked = _Link | str | None


class _ImageUrl(msgspec.Struct):
    image_url: _Linked


class _AudioUrl(msgspec.Struct):
    audio_url: _Linked


class _VideoUrl(msgspec.Struct):
    video_url: _Linked


class _Audio(msgspec.Struct):
    data: str
    format: str


class _InputAudio(msgspec.Struct):
    input_audio: _Audio | None


class _EncodedImage(msgspec.Struct, tag="base64", tag_field="type"):
    data: str


class _LinkedImage(msgspec.Struct, tag="url", tag_field="type"):
    url: str


class _Image(msgspec.Struct):
    source: _EncodedImage | _LinkedImage


class _ToolUse(msgspec.Struct):
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(msgspec.Struct):
    tool_use_id: str


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _ToolCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: _Function


Forms = dict[str, type[msgspec.Struct]]

CHAT_PARTS: Forms = {
    "text": _Text,
    "refusal": _Refusal,
    "thinking": _Thinking,
    "image_url": _ImageUrl,
    "audio_url": _AudioUrl,
    "video_url": _VideoUrl,
    "input_audio": _InputAudio,
}
"""Of chats, by the ``type`` of a part; of other types vLLM's errors are right."""
ANTHROPIC_PARTS: Forms = {
    "text": _Text,
    "thinking": _Thinking,
    "image": _Image,
    "tool_use": _ToolUse,
    "tool_result": _ToolResult,
}
"""Of ``/v1/messages``."""


def check_parts(parts: list[Any], where: str, forms: Forms) -> None:
    """
    Args:
        parts: of a message's ``content``.
        where: its name, such as ``messages[0].content``.
        forms: by the type of a part.

    Raises:
        BadRequest: one lacks what its type has; it is named with its place.
    """
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in forms:
            _check(part, forms[kind], f"{where}[{number}]", f" in a part of the type {kind!r}")


def check_tool_calls(calls: list[Any], where: str) -> None:
    """
    Raises:
        BadRequest: one has no id, or calls no function by a name with arguments.
    """
    for number, call in enumerate(calls):
        _check(call, _ToolCall, f"{where}[{number}]", "")


def _check(value: Any, form: type[msgspec.Struct], where: str, within: str) -> None:
    try:
        msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        found = _AT.match(str(error))
        assert found is not None
        param = where + (found["at"] or "")
        if missing := _MISSING.match(found["says"]):
            param, says = f"{param}.{missing['name']}", "is missing"
        else:
            says = f"is wrong: {found['says']}"
        raise BadRequest(f"{param} {says}{within}", param=param) from None
