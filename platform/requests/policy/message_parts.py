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
"""Of chats, by the ``type`` of a part."""
OTHER_PARTS = frozenset({
    *("input_text", "output_text", "input_image", "tool_reference", "prompt_embeds"),
    *("image_embeds", "audio_embeds", "video_embeds", "image_pil"),
})  # fmt: skip
"""vLLM's, whose errors are right."""
# vLLM takes these without a type.
_UNTYPED = ("image_url", "audio_url", "video_url", "input_audio", "uuid")
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
        if not isinstance(part, dict):
            continue
        kind, at = part.get("type"), f"{where}[{number}]"
        if isinstance(kind, str) and kind in forms:
            check_form(part, forms[kind], at, f" in a part of the type {kind!r}")
        elif forms is CHAT_PARTS and not _is_known(kind, part):
            says = "is missing" if kind is None else f"is {str(kind)[:64]!r}"
            raise BadRequest(
                f"{at}.type {says}; a part has one of {', '.join(forms)}", param=f"{at}.type"
            )


def _is_known(kind: Any, part: dict[str, Any]) -> bool:
    if kind is None:
        return any(name in part for name in (*_UNTYPED, *OTHER_PARTS))
    return isinstance(kind, str) and kind in OTHER_PARTS


def check_tool_calls(calls: Any, where: str) -> None:
    """Raises BadRequest for a call without an id, a function's name or arguments that can be
    read."""
    if not isinstance(calls, list | None):
        raise BadRequest(f"{where} must be a list of calls", param=where)
    for number, call in enumerate(calls or ()):
        at = f"{where}[{number}]"
        check_form(call, _TOOL_CALL, at, "")
        check_arguments(call["function"]["arguments"], f"{at}.function.arguments")


def check_arguments(arguments: Any, where: str) -> None:
    """Raises BadRequest for a call's arguments on which vLLM's reader of JSON would fail as if the
    fault were its own. Others that are no JSON, as a model may write, are left to vLLM."""
    try:
        if isinstance(arguments, str):
            msgspec.json.decode(arguments)
    except RecursionError:
        raise BadRequest(f"{where} is nested too deeply", param=where) from None
    except msgspec.ValidationError:
        raise BadRequest(f"{where} has a number that is too large", param=where) from None
    except (msgspec.DecodeError, UnicodeEncodeError):
        return


def check_form(value: Any, of: Form, where: str, within: str) -> None:
    """Raises BadRequest, whose message ends with ``within``, for a value that has not its form."""
    try:
        msgspec.convert(value, of)
    except msgspec.ValidationError as error:
        found = _AT.match(str(error))
        assert found is not None
        param = where + (found["at"] or "")
        if missing := _MISSING.match(found["says"]):
            param, says = f"{param}.{missing['name']}", "is missing"
        elif found["says"].startswith("Invalid enum value"):
            says = "has a value that is not allowed"  # which may be long
        else:
            says = f"is wrong: {found['says']}"
        raise BadRequest(f"{param} {says}{within}", param=param) from None
