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
    characters, objects = measured(value, param)
    widest = max(map(len, objects), default=0)
    if widest > MOST_ENTRIES:
        raise BadRequest(
            f"{param} has an object of {widest} entries, of which {MOST_ENTRIES} are allowed; "
            "divide it",
            param=param,
        )
    cost = _Cost(characters)
    for schema in objects:
        if _SLOW_NAMES.isdisjoint(schema):
            continue
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
    Counting stops above ``most``, and where the text is no expression."""
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


def measured(value: Any, param: str) -> tuple[int, list[dict[str, Any]]]:
    """Characters of a value's shortest JSON text, nearly (numbers count as eight), and its objects.
    Raises BadRequest for one that is too large or too deep, which is looked at no further than to
    see that it is."""
    characters, depth = 0, 0
    objects: list[dict[str, Any]] = []
    level: list[Any] = [value]
    while level:
        inner: list[Any] = []
        for one in level:
            kind = type(one)
            if kind is str:
                characters += len(one) + 2
            elif kind is dict or kind is list:
                if depth == MOST_DEPTH:
                    raise _too_deep(param)
                # Its brackets, commas, colons and names.
                characters += 2 + 2 * len(one)
                if kind is dict:
                    characters += sum(map(len, one)) + 2 * len(one)
                    objects.append(one)
                inner += one.values() if kind is dict else one
            else:
                characters += _OTHER_CHARACTERS
            if characters > MOST_CHARACTERS:
                raise _too_large(param, MOST_CHARACTERS)
        depth += 1
        level = inner
    return characters, objects
