"""Bounds of what an engine compiles to grammars: JSON schemas, tools, regular expressions, EBNF.

The time grows with powers of a schema's depth and of its objects' width: 900 nested arrays (22 KB)
take a minute, and so do 2,400 optional properties of one object. Each character of a pattern costs
0.2 ms, of a long literal up to 0.2 ms; a schema's pattern that repeats something 1,000 times 0.06
s, 10,000 times over 20 s. Within these bounds the worst takes an engine two seconds in threads, and
the gateway 0.1 s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from loomserve.platform.base.errors import BadRequest

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
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
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
_COUNT = re.compile(r"\{(\d{0,9})(,?)(\d{0,9})\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_NO_NAMES: frozenset[str] = frozenset()
_OTHER_CHARACTERS = 8


def check_grammars(fields: Mapping[str, Any]) -> None:
    """Raises BadRequest if a field that an engine may compile is over a bound."""
    if (outputs := fields.get("structured_outputs")) is not None:
        # vLLM fails on others, as if the fault were its own.
        if not isinstance(outputs, dict):
            raise BadRequest(
                'structured_outputs must be an object, such as {"regex": "yes|no"}',
                param="structured_outputs",
            )
        if not any(fields.get(name) for name in ("response_format", "tools")):
            _check_names_one(outputs)
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
    total = _Cost()
    for number, tool in enumerate(tools):
        total = total.plus(_check(tool, f"tools[{number}]"))
        if total.characters > MOST_TOOL_CHARACTERS:
            raise _too_large("tools", MOST_TOOL_CHARACTERS)
        total.check("tools")


def _check_names_one(outputs: Mapping[str, Any]) -> None:
    if all(outputs.get(kind) is None for kind in _KINDS):
        raise BadRequest(
            f"structured_outputs has none of {', '.join(_KINDS)}; give one of them, or leave it "
            "out",
            param="structured_outputs",
        )


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
    characters: int = 0
    patterns: int = 0
    """Characters of all patterns."""
    items: int = 0
    """Of all arrays, at most."""
    repeats: int = 0

    def plus(self, other: _Cost) -> _Cost:
        return _Cost(*map(sum, zip(self, other, strict=True)))

    def check(self, param: str) -> None:
        """Raises BadRequest if patterns, items or repeats are over a bound."""
        if self.patterns > MOST_PATTERN_CHARACTERS:
            raise _too_large(param, MOST_PATTERN_CHARACTERS, "its patterns have")
        if self.items > MOST_ITEMS:
            raise BadRequest(
                f"{param} has arrays of more than {MOST_ITEMS} items in all; give smaller minItems "
                "and maxItems, or leave them out",
                param=param,
            )
        if self.repeats > MOST_REPEATS:
            raise BadRequest(
                f"{param} has patterns that repeat parts more than {MOST_REPEATS} times in all; "
                "use + or *, or minLength and maxLength",
                param=param,
            )


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
    cost = _Cost(size.characters)
    for schema in size.watched:
        texts = list(_patterns(schema))
        _check_counts(schema, param)
        for literals in (schema.get("enum"), [schema.get("const")]):
            _check_literals(literals, param)
        # A pattern that is too long is refused for that.
        repeated = sum(
            repeats(text, MOST_REPEATS) for text in texts if len(text) <= MOST_PATTERN_CHARACTERS
        )
        cost = cost.plus(_Cost(0, sum(map(len, texts)), _most_items(schema), repeated))
    cost.check(param)
    return cost


def _patterns(schema: Mapping[str, Any]) -> Iterator[str]:
    own = (schema.get(name) for name in _PATTERN_NAMES)
    by_name = schema.get("patternProperties")
    names = by_name if isinstance(by_name, dict) else ()
    return (text for text in (*own, *names) if isinstance(text, str))


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


def _too_large(param: str, most: int, part: str = "it has") -> BadRequest:
    return BadRequest(
        f"{param} is too large to be compiled: {part} more than {most} characters; shorten it",
        param=param,
    )


def repeats(pattern: str, most: int) -> int:
    """Copies of a pattern's characters and classes that its counted repeats (``{2,5}``) make.

    Counting stops above ``most``, and where the text is no expression.
    """
    # Of the expression, and of each group that is open: what is in it, and its last part.
    within, last = [0], [0]
    at, closed = 0, True
    while at < len(pattern):
        mark = pattern[at]
        step, part = 1, 0
        if mark == "(":
            within.append(0)
            last.append(0)
        elif mark == ")" and len(within) > 1:
            part = within.pop()
            last.pop()
            last[-1] = part
            within[-1] += part
        elif mark == "{" and (count := _COUNT.match(pattern, at)):
            times = max(int(count[3] or 0), int(count[1] or 0))
            # What the part has of its own is counted already.
            within[-1] += max(last[-1] * (times - 1), 0) if last[-1] else times
            last[-1] = max(last[-1], 1) * times
            step = len(count[0])
        elif mark == "\\":
            step, last[-1] = 2, 0
        elif mark == "[" and closed:
            found = _CLASS.match(pattern, at)
            closed = found is not None
            step, last[-1] = len(found[0]) if found else 1, 0
        elif mark not in "*+?":
            last[-1] = 0
        at += step
        if within[-1] > most:
            return most + 1
    return sum(within)


class JsonSize(NamedTuple):
    """The size of a parsed JSON value, or of the part of it that was looked at."""

    characters: int
    """Length of its shortest JSON text, nearly: numbers count as eight."""
    depth: int
    """Arrays and objects within each other; 0 for a text or a number."""
    widest: int
    """Entries of the largest object."""
    watched: list[dict[str, Any]]


def json_size(
    value: Any, *, most_characters: int, most_depth: int, watch: frozenset[str] = _NO_NAMES
) -> JsonSize:
    """The size of ``value``; one over a bound is looked at no further than to see that it is.

    Each step counts at least one character, so that there are no more than ``most_characters``.
    """
    deepest = widest = 0
    watched: list[dict[str, Any]] = []
    # Texts and numbers are counted with what they are in, so a list is put around the value, and
    # its own characters taken off. Level by level, a tool costs half of what a stack would.
    level: list[Any] = [[value]]
    characters = -4
    while level and characters <= most_characters and deepest <= most_depth:
        inner: list[Any] = []
        for one in level:
            # Its brackets, commas and colons, before its entries are taken up.
            characters += 2 + 2 * len(one)
            if characters > most_characters:
                break
            entries = one
            if type(one) is dict:
                entries = one.values()
                widest = max(widest, len(one))
                characters += sum(map(len, one)) + 2 * len(one)
                if not watch.isdisjoint(one):
                    watched.append(one)
            for entry in entries:
                kind = type(entry)
                if kind is str:
                    characters += len(entry) + 2
                elif kind is dict or kind is list:
                    inner.append(entry)
                else:
                    characters += _OTHER_CHARACTERS
        deepest += bool(inner)
        level = inner
    return JsonSize(characters, deepest, widest, watched)
