"""What is wrong with a model's sampling defaults or chat template, and how long its context is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

GENERATION_CONFIG = "generation_config.json"
_NUMBER = (int, float)
# Nothing is rendered with it.
_ENVIRONMENT = Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"])
_NAMES = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("max_sequence_length", "max_target_positions"),
)
# Of those, the positions are as many as the configuration says, or the type is plain.
_AS_STATED = frozenset({"", "default", "llama3", "su", "longrope", "mrope", "proportional"})


def _are_tokens(value: object) -> bool:
    tokens: list[Any] = value if isinstance(value, list) else [value]
    return all(type(each) is int and each >= 0 for each in tokens)


# Those that requests get where they say nothing themselves: what is right, and what that is called.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda v: type(v) in _NUMBER and v >= 0, "a number of 0 or more"),
    "top_p": (lambda v: type(v) in _NUMBER and 0 < v <= 1, "a number above 0, 1 at most"),
    "top_k": (lambda v: type(v) is int and v >= -1, "a whole number; 0 or -1 for all tokens"),
    "min_p": (lambda v: type(v) in _NUMBER and 0 <= v <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda v: type(v) in _NUMBER and v > 0, "a number above 0"),
    "max_new_tokens": (lambda v: type(v) is int and v >= 1, "a whole number of 1 or more"),
    "eos_token_id": (_are_tokens, "a token's number, or a list of them"),
}


def generation_problem(config: Mapping[str, Any]) -> str | None:
    """Which field is wrong, what it is, and what it must be; None: all is well."""
    for field, (is_right, wanted) in _RULES.items():
        value = config.get(field)
        if value is not None and not is_right(value):
            shown = repr(value)
            shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
            return f"{field} is {_kind(value)}, {shown}; write {wanted}"
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


def template_problem(text: str) -> str | None:
    """What is wrong, with its line; None: nothing that its syntax shows."""
    try:
        _ENVIRONMENT.parse(text)
    except TemplateSyntaxError as error:
        message = error.message or "its syntax is wrong"
        # Tags that vLLM's environment has and this one has not.
        if "unknown tag" in message and "innermost block" not in message:
            return None
        return f"line {error.lineno}: {message}"
    return None


def longest_context(config: Mapping[str, Any]) -> int | None:
    """Tokens, as vLLM takes them from ``config.json``; None: unknown here. With scaled positions
    (other RoPE types than the plain one) there are more than stated."""
    text = config.get("text_config")
    part = {**config, **text} if isinstance(text, Mapping) else config
    stated = [part[name] for name in _NAMES if isinstance(part.get(name), int)]
    scaling = part.get("rope_scaling") or part.get("rope_parameters") or {}
    if not stated or not isinstance(scaling, Mapping):
        return None
    kind = scaling.get("rope_type", scaling.get("type", ""))
    return min(stated) if kind in _AS_STATED else None
