"""Whether a model's sampling defaults (``generation_config.json``) are such that it can answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

FILE = "generation_config.json"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_tokens(value: object) -> bool:
    tokens: list[Any] = value if isinstance(value, list) else [value]
    return all(_is_int(each) and each >= 0 for each in tokens)


# Those that requests get where they say nothing themselves: what is right, and what that is called.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda v: _is_number(v) and v >= 0, "a number of 0 or more"),
    "top_p": (lambda v: _is_number(v) and 0 < v <= 1, "a number above 0, 1 at most"),
    "top_k": (lambda v: _is_int(v) and v >= -1, "a whole number; 0 or -1 for all tokens"),
    "min_p": (lambda v: _is_number(v) and 0 <= v <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda v: _is_number(v) and v > 0, "a number above 0"),
    "max_new_tokens": (lambda v: _is_int(v) and v >= 1, "a whole number of 1 or more"),
    "eos_token_id": (_are_tokens, "a token's number, or a list of them"),
}


def generation_problem(config: Mapping[str, Any]) -> str | None:
    """Which field is wrong, what it is, and what it must be; None: all is well."""
    for field, (is_right, wanted) in _RULES.items():
        value = config.get(field)
        if value is not None and not is_right(value):
            return f"{field} is {_kind(value)}, {_short(value)}; write {wanted}"
    return None


def _kind(value: object) -> str:
    match value:
        case bool():
            return "a truth value"
        case str():
            return "a text"
        case int() | float():
            return "a number"
        case list():
            return "a list"
        case _:
            return "an object"


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
