"""Two servers' answers to one request, made comparable.

What differs between any two answers is replaced: random ids, by the order in which they first
appear; times; the hash of the engine's configuration in ``system_fingerprint``, of which the
platform's connectors are a part. Everything else stays, the order of an object's keys among it.

vLLM's server sends what an engine has computed meanwhile in one event, so how a text is divided
into events depends on who was quicker. Streams that are not the same event by event are compared
with each choice's events joined: texts and lists behind one another, of everything else the last.
Events that begin or end something stay by themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

_IDS = ("id", "item_id", "call_id", "request_id")
_RANDOM = re.compile(r"[0-9a-f]{16,}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TIMES = ("created", "created_at", "completed_at")
_FINGERPRINT = "system_fingerprint"
_HASH = re.compile(r"-[0-9a-f]{8}$")
_OF_CACHES = {"cache_read_input_tokens", "cache_creation_input_tokens"}
# Of events of which there may be several where another server sends one.
_PIECES = ("response.output_text.delta", "response.function_call_arguments.delta")
_TEXTS = ("content", "text", "arguments", "delta", "reasoning", "partial_json")
_REASONS = ("finish_reason", "stop_reason")
_BY_INDEX = ("choices", "tool_calls")


@dataclass(frozen=True)
class Answer:
    status: int
    content_type: str
    body: bytes

    @property
    def streamed(self) -> bool:
        return self.content_type.startswith("text/event-stream")

    @property
    def error(self) -> Any:
        """The error object, of OpenAI's shape or of Anthropic's."""
        return json.loads(self.body)["error"]

    @property
    def parts(self) -> list[Any]:
        """The events of a stream, or the object alone, without what differs in any two answers."""
        names: dict[str, str] = {}
        parts = _events(self.body) if self.streamed else [json.loads(self.body)]
        return [_replaced(part, names) for part in parts]


def assert_same(one: Answer, other: Answer, *, exact: bool = True, reasons: bool = True) -> None:
    """Both have the same status, type and content; an error's content is not looked at.

    Args:
        exact: Whether numbers must be equal in every bit.
        reasons: Whether both say the same of why they ended: vLLM says of calls that were cut off
            that they were made, and of one that was named that none was.
    """
    assert (one.status, one.content_type) == (other.status, other.content_type)
    if one.status >= 400:
        return
    parts = one.parts, other.parts
    if not reasons:
        parts = _without_reasons(parts[0]), _without_reasons(parts[1])
    if one.streamed and _ordered(parts[0]) != _ordered(parts[1]):
        parts = _joined(parts[0]), _joined(parts[1])
    if not exact:
        parts = _rounded(parts[0]), _rounded(parts[1])
    assert _ordered(parts[0]) == _ordered(parts[1])


def _without_reasons(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_reasons(v) for k, v in value.items() if k not in _REASONS}
    return [_without_reasons(one) for one in value] if isinstance(value, list) else value


def _joined(events: Sequence[Any]) -> list[Any]:
    """A stream's events, with the pieces of each text joined."""
    found: list[Any] = []
    for event in sorted(events, key=_choice):
        if found and _joins(found[-1], event):
            found[-1] = _join(found[-1], event)
        else:
            found.append(event)
    return [_without_number(event) for event in found]


def _events(body: bytes) -> list[Any]:
    """The events of a stream: its lines ``event`` and ``data``, of which JSON is parsed."""
    found: list[Any] = []
    text = body.decode()
    assert text.endswith("\n\n"), text[-200:]
    for block in text[:-2].split("\n\n"):
        event: dict[str, Any] = {}
        for line in block.split("\n"):
            name, colon, value = line.partition(": ")
            assert colon, line
            event[name] = json.loads(value) if value.startswith("{") else value
        found.append(event)
    return found


def _replaced(value: Any, names: dict[str, str], key: str = "") -> Any:
    if isinstance(value, dict) and _OF_CACHES & value.keys():
        # vLLM's server counts what goes to a cache apart from the input.
        cached = sum(value.get(name) or 0 for name in _OF_CACHES)
        value = {name: one for name, one in value.items() if name not in _OF_CACHES}
        value["input_tokens"] += cached
    if isinstance(value, dict):
        return {name: _replaced(one, names, name) for name, one in value.items()}
    if isinstance(value, list):
        return [_replaced(one, names) for one in value]
    if key in _TIMES and isinstance(value, int | float):
        return "a time"
    if key in _IDS and isinstance(value, str):
        return _RANDOM.sub(lambda it: names.setdefault(it[0], f"#{len(names)}"), value)
    if key == _FINGERPRINT and isinstance(value, str):
        return _HASH.sub("-hash", value)
    return value


def _ordered(value: Any) -> Any:
    """With objects as lists of pairs, whose order counts."""
    if isinstance(value, dict):
        return ["object", *([name, _ordered(one)] for name, one in value.items())]
    return [_ordered(one) for one in value] if isinstance(value, list) else value


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return pytest.approx(value, abs=1e-3) if isinstance(value, float) else value


def _without_number(event: Any) -> Any:
    """Without the number of an event, which counts those before it."""
    data = event.get("data")
    if isinstance(data, dict) and "sequence_number" in data:
        return {**event, "data": {k: v for k, v in data.items() if k != "sequence_number"}}
    return event


def _choice(event: Any) -> float:
    """Whose event it is, so that those of each choice come together, and the last ones last."""
    data = event.get("data")
    if not isinstance(data, dict) or "choices" not in data:
        return 0 if isinstance(data, dict) else float("inf")
    return float(data["choices"][0]["index"]) if data["choices"] else float("inf")


def _joins(one: Any, other: Any) -> bool:
    """Whether they may be pieces of one text."""
    a, b = one.get("data"), other.get("data")
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return False
    if a.get("choices") and b.get("choices"):
        first, second = a["choices"][0], b["choices"][0]
        return first["index"] == second["index"] and "role" not in first.get("delta", {})
    kinds = (a.get("type"), b.get("type"))
    return kinds[0] == kinds[1] and kinds[0] in (*_PIECES, "content_block_delta")


def _join(one: Any, other: Any, key: str = "") -> Any:
    if one is None or other is None:
        return one if other is None else other
    if isinstance(one, dict) and isinstance(other, dict):
        names = [*one, *(name for name in other if name not in one)]
        return {name: _join(one.get(name), other.get(name), name) for name in names}
    if isinstance(one, list) and isinstance(other, list):
        if key not in _BY_INDEX:
            return one + other
        by_index = {each["index"]: each for each in one}
        for each in other:
            by_index[each["index"]] = _join(by_index.get(each["index"]), each)
        return list(by_index.values())
    return one + other if key in _TEXTS and isinstance(one, str) else other
