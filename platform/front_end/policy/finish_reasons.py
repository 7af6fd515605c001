"""Why an answer that may have called tools ended."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import msgspec


class End(NamedTuple):
    reason: str = "stop"
    at_text: bool = False
    """It came upon one of the request's stop strings."""


def finish_reason(end: End, calls: Collection[str]) -> str:
    """``tool_calls`` where calls were made and none was cut off; else as the engine ended.
    ``calls`` are the arguments of the answer's calls, as JSON."""
    made = end.reason == "stop" and calls and (not end.at_text or all(map(is_whole, calls)))
    return "tool_calls" if made else end.reason


def is_whole(arguments: str) -> bool:
    """Whether a call's arguments are a JSON object, not cut off."""
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, ValueError):
        return False
    return True
