"""A request's conversation: messages, and items of ``input`` of ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.policy.fields import is_of_messages
from loomserve.platform.requests.policy.message_parts import (
    ANTHROPIC_PARTS,
    CHAT_PARTS,
    Forms,
    check_parts,
    check_tool_calls,
)

MOST_MESSAGES = 2048
MOST_ITEMS = 1024
"""Of ``input`` of ``/v1/responses``: vLLM tries some sixty classes on each, 0.1 ms."""
MOST_PARTS = 4096
"""Of all messages."""

Status = Literal["in_progress", "completed", "incomplete"]


class _FunctionCall(msgspec.Struct):
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    namespace: str | None = None


class _FunctionCallOutput(msgspec.Struct):
    call_id: str


class _SummaryText(msgspec.Struct):
    text: str
    type: Literal["summary_text"]


class _ReasoningText(msgspec.Struct):
    text: str
    type: Literal["reasoning_text"]


class _Reasoning(msgspec.Struct):
    id: str
    summary: list[_SummaryText]
    content: list[_ReasoningText] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


class _Message(msgspec.Struct):
    role: str


class _MessageOfPieces(_Message):
    # vLLM takes the first piece of an answer without looking whether there is one.
    content: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]


# Items that are no messages, by their type.
_TYPES: dict[str, type[msgspec.Struct]] = {
    "function_call": _FunctionCall,
    "function_call_output": _FunctionCallOutput,
    "reasoning": _Reasoning,
}


def check_messages(path: str, fields: Mapping[str, Any]) -> None:
    """Check the form of messages, and of the parts of each; what is no list is left to vLLM.

    Raises:
        BadRequest: there are too many, or one is of another form; it is named.
    """
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
        if not isinstance(message.get("role", ""), str):
            raise BadRequest(f"{where}.role must be a text", param=f"{where}.role")
        content = message.get("content")
        if isinstance(content, list):
            parts += len(content)
            if parts > MOST_PARTS:
                raise _too_many("messages", parts, MOST_PARTS, "parts")
            check_parts(content, f"{where}.content", forms)
        elif not isinstance(content, str | None):
            param = f"{where}.content"
            raise BadRequest(f"{param} must be a text, or a list of parts", param=param)
        if isinstance(calls := message.get("tool_calls"), list):
            check_tool_calls(calls, f"{where}.tool_calls")


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
    """Check the items; anything but a list of them is left to vLLM to refuse.

    Raises:
        BadRequest: an item is neither a message nor of a type that vLLM 0.29 reads. It would fail
            on it, as if the fault were its own. Or there are too many.
    """
    if isinstance(items, list):
        _check_number(items, "input", MOST_ITEMS)
        parts = (item.get("content") for item in items if isinstance(item, dict))
        number = sum(len(part) for part in parts if isinstance(part, list))
        if number > MOST_PARTS:
            raise _too_many("input", number, MOST_PARTS, "parts")
    for number, item in enumerate(items) if isinstance(items, list) else ():
        try:
            msgspec.convert(item, _type_of(item))
        except msgspec.ValidationError as error:
            param = f"input[{number}]"
            raise BadRequest(
                f"{param} is no item of a conversation: {error}. Give a message with role and "
                f"content, or one of the types {', '.join(_TYPES)}",
                param=param,
            ) from None


def _type_of(item: object) -> type[msgspec.Struct]:
    if not isinstance(item, dict):
        return _Message
    kind = item.get("type")
    if isinstance(kind, str) and kind in _TYPES:
        return _TYPES[kind]
    return _MessageOfPieces if isinstance(item.get("content"), list) else _Message
