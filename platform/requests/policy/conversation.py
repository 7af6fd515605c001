"""Items of a conversation in ``input`` of ``/v1/responses``: those that an engine can read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from loomserve.platform.base.errors import BadRequest

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


def check_conversation(items: object) -> None:
    """Check the items; anything but a list of them is left to vLLM to refuse.

    Raises:
        BadRequest: an item is neither a message nor of a type that vLLM 0.29 reads. It would fail
            on it, as if the fault were its own.
    """
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
