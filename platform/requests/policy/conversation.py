"""Items of a conversation in ``input`` of ``/v1/responses``: those that an engine can read."""

from __future__ import annotations

from collections.abc import Mapping

from loomserve.platform.base.errors import BadRequest

# What each type of item that is no message must have, and as what.
_NEEDED: Mapping[str, Mapping[str, type]] = {
    "function_call": {"call_id": str, "name": str, "arguments": str},
    "function_call_output": {"call_id": str},
    "reasoning": {"id": str, "summary": list},
}


def check_conversation(items: object) -> None:
    """Check the items; anything but a list of them is left to vLLM to refuse.

    Raises:
        BadRequest: an item is neither a message nor of a type that vLLM 0.29 reads. It would fail
            on it, as if the fault were its own.
    """
    for number, item in enumerate(items) if isinstance(items, list) else ():
        if not _is_readable(item):
            param = f"input[{number}]"
            raise BadRequest(
                f"{param} is no item of a conversation: give a message with role and content, or "
                f"one of the types {', '.join(_NEEDED)} with what it needs",
                param=param,
            )


def _is_readable(item: object) -> bool:
    if not isinstance(item, dict):
        return False
    kind = item.get("type")
    needed = _NEEDED.get(kind) if isinstance(kind, str) else None
    if needed is None:
        content = item.get("content")
        # vLLM takes the first piece of an answer without looking whether there is one.
        pieces = not isinstance(content, list) or all(isinstance(one, dict) for one in content)
        return isinstance(item.get("role"), str) and content != [] and pieces
    return all(isinstance(item.get(name), type_) for name, type_ in needed.items())
