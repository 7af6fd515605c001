"""A request's conversation: messages, and items of ``input`` of ``/v1/responses``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import GenericAlias
from typing import Annotated, Any, Literal, get_args

import msgspec

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.policy.fields import is_of_messages
from loomserve.platform.requests.policy.message_parts import (
    ANTHROPIC_PARTS,
    CHAT_PARTS,
    Form,
    Forms,
    check_arguments,
    check_form,
    check_parts,
    check_tool_calls,
    form,
)

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
