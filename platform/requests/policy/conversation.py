"""A request's conversation: messages, their parts and tool calls, and items of ``input``.

vLLM's validators name what another kind of part would lack, without the place, and accept some
parts that lack what the prompt needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import GenericAlias
from typing import Annotated, Any, Literal, get_args

import msgspec

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.policy.fields import is_of_messages

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


MOST_MESSAGES = 2048
MOST_ITEMS = 1024
"""Of ``input`` of ``/v1/responses``: vLLM tries some sixty classes on each, 0.1 ms."""
MOST_PARTS = 4096
"""Of all messages."""


ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""OpenAI's. Others are a template's own, as Llama's ``ipython``."""
# What a template writes as it is, between tokens that end a turn.
_ROLE = re.compile(r"[A-Za-z][\w.-]{0,63}")
_TEXT = frozenset({"system", "developer", "user", "tool"})
"""Roles whose messages have a content always."""


def _list_of(one: Form) -> Any:
    return GenericAlias(list, (one,))


_STATUS = (Literal["in_progress", "completed", "incomplete"] | None, None)
_ITEM_ROLE = Literal["user", "assistant", "system", "developer"]
_MESSAGE = form(role=_ITEM_ROLE)
# vLLM takes the first piece of an answer without looking whether there is one.
_FIRST = msgspec.Meta(min_length=1)
_MESSAGE_OF_PIECES = form(role=_ITEM_ROLE, content=Annotated[list[dict[str, Any]], _FIRST])
# Of an answer's pieces it reads the texts, and a refusal has none.
_ANSWER = form(role=str, content=Annotated[_list_of(form(text=str)), _FIRST])

# Items that are no messages, by their type.
_TYPES: Forms = {
    "function_call": form(
        call_id=str,
        name=str,
        arguments=str,
        id=(str | None, None),
        status=_STATUS,
        namespace=(str | None, None),
    ),
    "function_call_output": form(call_id=str),
    "reasoning": form(
        id=str,
        summary=_list_of(form(text=str, type=Literal["summary_text"])),
        content=(_list_of(form(text=str, type=Literal["reasoning_text"])) | None, None),
        encrypted_content=(str | None, None),
        status=_STATUS,
    ),
}


_ITEMS = (
    f"; an item is a message with role ({', '.join(get_args(_ITEM_ROLE))}) and content, or of one "
    f"of the types {', '.join(_TYPES)}"
)


def check_messages(path: str, fields: Mapping[str, Any]) -> None:
    """Raises BadRequest for wrong or too many messages or parts; other types are left to vLLM."""
    forms = ANTHROPIC_PARTS if is_of_messages(path) else CHAT_PARTS
    if isinstance(messages := fields.get("messages"), list):
        _check_messages(messages, forms)
    if forms is ANTHROPIC_PARTS and isinstance(system := fields.get("system"), list):
        check_parts(system, "system", forms)


def _check_messages(messages: list[Any], forms: Forms) -> None:
    _check_number(messages, "messages", MOST_MESSAGES)
    parts = 0
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        where = f"messages[{number}]"
        if forms is CHAT_PARTS and "role" in message:
            _check_role(message, where)
        content = message.get("content")
        if isinstance(content, list):
            parts += len(content)
            if parts > MOST_PARTS:
                raise _too_many("messages", parts, MOST_PARTS, "parts")
            check_parts(content, f"{where}.content", forms)
        elif not isinstance(content, str | None):
            param = f"{where}.content"
            raise BadRequest(f"{param} must be a text, or a list of parts", param=param)
        check_tool_calls(message.get("tool_calls"), f"{where}.tool_calls")


def _check_role(message: Mapping[str, Any], where: str) -> None:
    role = message["role"]
    if not isinstance(role, str) or _ROLE.fullmatch(role) is None:
        says = "must be a name, such as user"
    elif role not in ROLES and role.lower() in ROLES:
        says = f"is {role!r}; write {role.lower()}"
    elif role in _TEXT and "content" not in message:
        raise BadRequest(f"{where}.content is missing", param=f"{where}.content")
    elif role == "tool" and message.get("tool_call_id") is None:
        param = f"{where}.tool_call_id"
        raise BadRequest(f"{param} is missing: the id of the call that it answers", param=param)
    else:
        return
    raise BadRequest(f"{where}.role {says}", param=f"{where}.role")


def _check_number(items: list[Any], name: str, most: int) -> None:
    if len(items) > most:
        raise _too_many(name, len(items), most, "entries")


def _too_many(name: str, given: int, most: int, what: str) -> BadRequest:
    return BadRequest(
        f"{name} has {given} {what}, of which {most} are allowed; leave the oldest out, or put "
        "several into one",
        param=name,
    )


def check_conversation(items: object) -> None:
    """Raises BadRequest for too many items of ``input``, and those that vLLM fails on."""
    if isinstance(items, list):
        _check_number(items, "input", MOST_ITEMS)
        parts = (item.get("content") for item in items if isinstance(item, dict))
        number = sum(len(part) for part in parts if isinstance(part, list))
        if number > MOST_PARTS:
            raise _too_many("input", number, MOST_PARTS, "parts")
    for number, item in enumerate(items) if isinstance(items, list) else ():
        if isinstance(item, dict) and item.get("type") == "function_call":
            check_arguments(item.get("arguments"), f"input[{number}].arguments")
        check_form(item, _type_of(item), f"input[{number}]", _ITEMS)


def _type_of(item: object) -> Form:
    if not isinstance(item, dict):
        return _MESSAGE
    kind = item.get("type")
    if isinstance(kind, str) and kind in _TYPES:
        return _TYPES[kind]
    if not isinstance(item.get("content"), list):
        return _MESSAGE
    return _ANSWER if item.get("role") == "assistant" else _MESSAGE_OF_PIECES
