"""Bounds of what an engine compiles to grammars: JSON schemas, tools, regular expressions, EBNF.

The time of a compilation grows with powers of a schema's depth and of its objects' width: a schema
of 900 arrays, 22 KB, takes a minute, and so does one object of 2,400 optional properties. Each
character of a pattern costs 0.2 ms, of a long literal up to 0.2 ms; of a schema's pattern that
repeats something 1,000 times 0.06 s, 10,000 times more than 20 s. Within these bounds what is worst
takes an engine two seconds in threads of its own, and a front end 0.1 s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.policy.json_size import json_size
from loomserve.platform.requests.policy.repeats import repeats

MOST_CHARACTERS = 2**16
"""Of one field, or one tool, as JSON text."""
MOST_DEPTH = 64
"""Arrays and objects within each other, from the field or the tool on."""
MOST_TOOL_CHARACTERS = 2**18
"""Of all tools, of which an engine may make one grammar."""
MOST_ENTRIES = 256
"""Of one object, as of a schema's properties."""
MOST_CHOICES = 1024
"""Of ``structured_outputs.choice``."""
MOST_PATTERN_CHARACTERS = 2**13
"""Of a regular expression, of a grammar in EBNF or Lark, and of all of a schema's patterns."""
MOST_LITERAL_CHARACTERS = 2**10
"""Of a choice, and of an entry of a schema's enum."""
MOST_ITEMS = 2**16
"""Of all arrays of a field or of all tools, by their ``minItems`` and ``maxItems``. A schema that
xgrammar does not take goes to llguidance, which keeps a kilobyte for each item that there may be:
with 10^9 of them, one request took all of the machine's memory."""
MOST_REPEATS = 1024
"""Of all of a schema's patterns, by their counts (``{2,5}``)."""
MOST_LENGTH = 2**16
"""Of one text, by ``minLength`` and ``maxLength``."""
MOST_PROPERTIES = 256
"""Of one object, by ``minProperties`` and ``maxProperties``."""

# Chat and completions; vLLM's own; responses; messages.
_COMPILED = ("response_format", "structured_outputs", "text", "output_config")
# Forms of structured_outputs that vLLM takes for JSON in a text.
_JSON_TEXTS = ("json", "structural_tag")
_PATTERNS = ("regex", "grammar", "whitespace_pattern")
# Of JSON schemas, and of structural tags.
_PATTERN_NAMES = ("pattern", "regex", "grammar")
_ITEM_NAMES = ("minItems", "maxItems")
_COUNTED = {
    "minLength": MOST_LENGTH,
    "maxLength": MOST_LENGTH,
    "minProperties": MOST_PROPERTIES,
    "maxProperties": MOST_PROPERTIES,
}
_SLOW_NAMES = frozenset(
    {*_PATTERN_NAMES, *_ITEM_NAMES, *_COUNTED, "patternProperties", "enum", "const"}
)


def check_grammars(fields: Mapping[str, Any]) -> None:
    """Check all of a request's fields that an engine may compile.

    Raises:
        BadRequest: one is over a bound, or ``structured_outputs`` is no object; it is named.
    """
    if (outputs := fields.get("structured_outputs")) is not None:
        # vLLM fails on others, as if the fault were its own.
        if not isinstance(outputs, dict):
            raise BadRequest(
                'structured_outputs must be an object, such as {"regex": "yes|no"}',
                param="structured_outputs",
            )
        _check_structured_outputs(outputs)
    _check_response_format(fields.get("response_format"))
    for name in _COMPILED:
        if isinstance(fields.get(name), dict):
            _check(fields[name], name)
    if isinstance(tools := fields.get("tools"), list):
        _check_tools(tools)


def _check_response_format(form: Any) -> None:
    if isinstance(form, dict) and form.get("type") == "json_schema":
        named = form.get("json_schema")
        if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
            param = "response_format.json_schema.schema"
            raise BadRequest(f"{param} must be an object, the JSON schema to obey", param=param)


def _check_tools(tools: list[Any]) -> None:
    characters = patterns = items = repeated = 0
    for number, tool in enumerate(tools):
        cost = _check(tool, f"tools[{number}]")
        characters += cost.characters
        patterns += cost.patterns
        items += cost.items
        repeated += cost.repeats
        if repeated > MOST_REPEATS:
            raise _too_many_repeats("tools")
        if characters > MOST_TOOL_CHARACTERS:
            raise _too_large("tools", MOST_TOOL_CHARACTERS)
        if patterns > MOST_PATTERN_CHARACTERS:
            raise _too_large("tools", MOST_PATTERN_CHARACTERS, "its patterns have")
        if items > MOST_ITEMS:
            raise _too_many_items("tools")


def _check_structured_outputs(outputs: Mapping[str, Any]) -> None:
    for form in _JSON_TEXTS:
        if isinstance(text := outputs.get(form), str):
            _check_text(text, f"structured_outputs.{form}")
    for form in _PATTERNS:
        pattern = outputs.get(form)
        if isinstance(pattern, str) and len(pattern) > MOST_PATTERN_CHARACTERS:
            raise _too_large(f"structured_outputs.{form}", MOST_PATTERN_CHARACTERS)
    if isinstance(choices := outputs.get("choice"), list):
        if len(choices) > MOST_CHOICES:
            raise BadRequest(
                f"structured_outputs.choice has {len(choices)} entries, of which {MOST_CHOICES} "
                "are allowed; give fewer",
                param="structured_outputs.choice",
            )
        _check_literals(choices, "structured_outputs.choice")


def _check_text(text: str, param: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise _too_large(param, MOST_CHARACTERS)
    try:
        _check(msgspec.json.decode(text), param)
    except RecursionError:
        raise _too_deep(param) from None
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise BadRequest(f"{param} is not valid JSON: {error}", param=param) from None


class _Cost(NamedTuple):
    characters: int
    patterns: int
    """Characters of all patterns."""
    items: int
    """Of all arrays, at most."""
    repeats: int
    """Of all patterns."""


def _check(value: Any, param: str) -> _Cost:
    """The cost of a value that is within the bounds."""
    size = json_size(
        value, most_characters=MOST_CHARACTERS, most_depth=MOST_DEPTH, watch=_SLOW_NAMES
    )
    if size.depth > MOST_DEPTH:
        raise _too_deep(param)
    if size.characters > MOST_CHARACTERS:
        raise _too_large(param, MOST_CHARACTERS)
    if size.widest > MOST_ENTRIES:
        raise BadRequest(
            f"{param} has an object of {size.widest} entries, of which {MOST_ENTRIES} are allowed; "
            "divide it",
            param=param,
        )
    patterns = items = repeated = 0
    for schema in size.watched:
        patterns += _pattern_characters(schema)
        repeated += _repeats(schema)
        _check_counts(schema, param)
        items += _most_items(schema)
        for literals in (schema.get("enum"), [schema.get("const")]):
            _check_literals(literals, param)
    if patterns > MOST_PATTERN_CHARACTERS:
        raise _too_large(param, MOST_PATTERN_CHARACTERS, "its patterns have")
    if items > MOST_ITEMS:
        raise _too_many_items(param)
    if repeated > MOST_REPEATS:
        raise _too_many_repeats(param)
    return _Cost(size.characters, patterns, items, repeated)


def _patterns(schema: Mapping[str, Any]) -> Iterator[str]:
    own = (schema.get(name) for name in _PATTERN_NAMES)
    by_name = schema.get("patternProperties")
    names = by_name if isinstance(by_name, dict) else ()
    return (text for text in (*own, *names) if isinstance(text, str))


def _pattern_characters(schema: Mapping[str, Any]) -> int:
    return sum(map(len, _patterns(schema)))


def _repeats(schema: Mapping[str, Any]) -> int:
    # One that is too long is refused for that.
    texts = (text for text in _patterns(schema) if len(text) <= MOST_PATTERN_CHARACTERS)
    return sum(repeats(text, MOST_REPEATS) for text in texts)


def _check_counts(schema: Mapping[str, Any], param: str) -> None:
    for name, most in _COUNTED.items():
        count = schema.get(name)
        if isinstance(count, int | float) and count > most:
            raise BadRequest(
                f"{param} has a {name} of {count:g}, of which {most} is the most; give a smaller "
                "one, or leave it out",
                param=param,
            )


def _most_items(schema: Mapping[str, Any]) -> int:
    bounds = [schema.get(name) for name in _ITEM_NAMES]
    return max((int(one) for one in bounds if isinstance(one, int | float)), default=0)


def _check_literals(literals: Any, param: str) -> None:
    for literal in literals if isinstance(literals, list) else ():
        if isinstance(literal, str) and len(literal) > MOST_LITERAL_CHARACTERS:
            raise _too_large(param, MOST_LITERAL_CHARACTERS, "a value in it has")


def _too_deep(param: str) -> BadRequest:
    return BadRequest(
        f"{param} has arrays and objects nested more than {MOST_DEPTH} deep; make it flatter, for "
        "instance with $defs and $ref",
        param=param,
    )


def _too_many_items(param: str) -> BadRequest:
    return BadRequest(
        f"{param} has arrays of more than {MOST_ITEMS} items in all; give smaller minItems and "
        "maxItems, or leave them out",
        param=param,
    )


def _too_many_repeats(param: str) -> BadRequest:
    return BadRequest(
        f"{param} has patterns that repeat parts more than {MOST_REPEATS} times in all; use + or "
        "*, or minLength and maxLength",
        param=param,
    )


def _too_large(param: str, most: int, part: str = "it has") -> BadRequest:
    return BadRequest(
        f"{param} is too large to be compiled: {part} more than {most} characters; shorten it",
        param=param,
    )
