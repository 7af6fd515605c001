"""What an engine would compile is bounded in depth and size wherever a request may have it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.policy.grammars import (
    MOST_CHARACTERS,
    MOST_CHOICES,
    MOST_ENTRIES,
    MOST_LITERAL_CHARACTERS,
    MOST_PATTERN_CHARACTERS,
    MOST_TOOL_CHARACTERS,
    check_grammars,
    measured,
)

PLACES: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "response format": (
        "response_format",
        lambda schema: {
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}
        },
    ),
    "structural tag": (
        "response_format",
        lambda schema: {"response_format": {"type": "structural_tag", "format": schema}},
    ),
    "old structural tag": (
        "response_format",
        lambda schema: {"response_format": {"structures": [{"schema": schema}]}},
    ),
    "object": ("structured_outputs", lambda schema: {"structured_outputs": {"json": schema}}),
    "text": (
        "structured_outputs.json",
        lambda schema: {"structured_outputs": {"json": text_of(schema)}},
    ),
    "text of a structural tag": (
        "structured_outputs.structural_tag",
        lambda schema: {"structured_outputs": {"structural_tag": text_of(schema)}},
    ),
    "tools of chat": (
        "tools[1]",
        lambda schema: {"tools": [{}, {"function": {"name": "f", "parameters": schema}}]},
    ),
    "tools of responses": ("tools[0]", lambda schema: {"tools": [{"parameters": schema}]}),
    "tools of messages": ("tools[0]", lambda schema: {"tools": [{"input_schema": schema}]}),
    "responses": ("text", lambda schema: {"text": {"format": {"schema": schema}}}),
    "messages": ("output_config", lambda schema: {"output_config": {"format": {"schema": schema}}}),
}


def text_of(schema: Any) -> str:
    """JSON text of any depth, which json.dumps does not write."""
    depth = 0
    while isinstance(schema, dict) and "items" in schema:
        schema, depth = schema["items"], depth + 1
    return '{"type": "array", "items": ' * depth + json.dumps(schema) + "}" * depth


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"type": "array", "items": schema}
    return schema


def asked(fields: dict[str, Any]) -> EngineRequest:
    paths = {"text": "/v1/responses", "output_config": "/v1/messages"}
    path = next((paths[name] for name in fields if name in paths), "/v1/chat/completions")
    return EngineRequest.of_fields(path, {"model": "m", **fields})


def refusal(fields: dict[str, Any]) -> BadRequest:
    with pytest.raises(BadRequest) as refused:
        asked(fields)
    return refused.value


@pytest.mark.parametrize("place", PLACES)
def test_a_schema_of_usual_depth_passes(place: str) -> None:
    asked(PLACES[place][1](nested(50)))


@pytest.mark.parametrize("depth", [200, 900, 5000])
@pytest.mark.parametrize("place", PLACES)
def test_a_deep_schema_is_refused_at_once(place: str, depth: int) -> None:
    param, fields = PLACES[place]
    given = fields(nested(depth))
    took = []
    # The first may pay for what others left to be collected.
    for _ in range(3):
        began = time.process_time()
        error = refusal(given)
        took.append(time.process_time() - began)
    assert min(took) < 0.05
    assert error.param == param
    assert "nested" in error.message or "more than" in error.message


@pytest.mark.parametrize("place", PLACES)
def test_a_large_schema_is_refused(place: str) -> None:
    param, fields = PLACES[place]
    error = refusal(fields({"anyOf": [{"type": "string"}] * (MOST_CHARACTERS // 16)}))
    assert error.param == param
    assert str(MOST_CHARACTERS) in error.message


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": 1000, "maxItems": 10**9},
        {"type": "array", "maxItems": 1e9},
        {"type": "array", "minItems": 2**16 + 1},
        {"anyOf": [{"type": "array", "items": {"const": i}, "maxItems": 2000} for i in range(33)]},
    ],
)
def test_arrays_of_too_many_items_are_refused(place: str, schema: dict[str, Any]) -> None:
    param, fields = PLACES[place]
    error = refusal(fields(schema))
    assert (error.param, "items" in error.message) == (param, True)


def test_items_of_all_tools_count_together() -> None:
    schema = {"type": "array", "items": {"type": "string"}, "maxItems": 2**15}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    asked({"tools": [tool] * 2})
    assert refusal({"tools": [tool] * 3}).param == "tools"


@pytest.mark.parametrize(
    ("outputs", "param"),
    [
        ({"choice": ["x"] * (MOST_CHOICES + 1)}, "structured_outputs.choice"),
        ({"choice": ["x" * 1000] * 70}, "structured_outputs"),
        ({"choice": ["x" * (MOST_LITERAL_CHARACTERS + 1)]}, "structured_outputs.choice"),
        ({"grammar": "x" * (MOST_PATTERN_CHARACTERS + 1)}, "structured_outputs.grammar"),
        ({"regex": "x" * (MOST_PATTERN_CHARACTERS + 1)}, "structured_outputs.regex"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": '{"type": NaN}'}, "structured_outputs.json"),
        ({"json": '"\ud800"'}, "structured_outputs.json"),
    ],
)
def test_other_forms_are_bounded_as_well(outputs: dict[str, Any], param: str) -> None:
    assert refusal({"structured_outputs": outputs}).param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"choice": ["x"] * MOST_CHOICES}},
        {"structured_outputs": {"grammar": "x" * MOST_PATTERN_CHARACTERS}},
        {"structured_outputs": {"json": '{"type": "string"}'}},
        {"structured_outputs": {"json_object": True}, "tools": None, "response_format": None},
        # What has another type is left to vLLM to refuse, which compiles none of it.
        {"structured_outputs": None, "tools": "x", "text": "x", "response_format": [7]},
        {"tools": [7, None, "x"]},
    ],
)
def test_what_is_within_the_bounds_passes(fields: dict[str, Any]) -> None:
    check_grammars(fields)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"p{number}": {} for number in range(MOST_ENTRIES + 1)}},
        {"pattern": "x" * (MOST_PATTERN_CHARACTERS + 1)},
        {"anyOf": [{"pattern": "x" * 1000}] * 9},
        {"patternProperties": {"x" * (MOST_PATTERN_CHARACTERS + 1): {}}},
        {"enum": ["a", "x" * (MOST_LITERAL_CHARACTERS + 1)]},
        {"const": "x" * (MOST_LITERAL_CHARACTERS + 1)},
        {"structures": [{"type": "regex", "pattern": "x" * 9000}]},
        {"minLength": 10**9},
        {"maxLength": 10**6},
        {"minProperties": 10**6},
        {"maxProperties": 257.0},
        {"pattern": "^[a-z]{1,10000}$"},
        {"pattern": "([a-z]{1,40}b){1,40}"},
        {"anyOf": [{"pattern": "a{600}"}, {"pattern": "(\\d|x){600}"}]},
        {"patternProperties": {"^x{2000}": {}}},
    ],
)
def test_what_is_small_and_slow_to_compile_is_refused(schema: dict[str, Any]) -> None:
    for param, fields in PLACES.values():
        assert refusal(fields({"items": schema})).param == param
    assert refusal({"tools": [{"parameters": {"pattern": "x" * 500}}] * 17}).param == "tools"


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"p{number}": {} for number in range(MOST_ENTRIES)}},
        {"properties": {"pattern": {"type": "string"}, "enum": {"type": "string"}}},
        {"pattern": "x" * MOST_PATTERN_CHARACTERS},
        {"enum": [str(number) for number in range(5000)]},
        {"enum": 7, "const": ["x"], "pattern": None, "patternProperties": []},
        {"description": "x" * 60_000},
        {"minLength": 1, "maxLength": 4000, "minProperties": 1, "maxProperties": 20},
        {"pattern": r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(\.\d{1,6})?$"},
        {"pattern": "^([a-z0-9-]{1,63}\\.){1,8}[a-z]{2,63}$"},
        {"pattern": "[{]{3}\\{9999}[0-9{10000}]"},
    ],
)
def test_usual_schemas_pass(schema: dict[str, Any]) -> None:
    for _, fields in PLACES.values():
        check_grammars(fields({"items": schema}))


def test_all_tools_are_bounded_together() -> None:
    tool = {"function": {"description": "x" * 60_000}}
    check_grammars({"tools": [tool] * (MOST_TOOL_CHARACTERS // 61_000)})
    assert refusal({"tools": [tool] * (MOST_TOOL_CHARACTERS // 60_000 + 1)}).param == "tools"


@pytest.mark.parametrize(
    ("value", "characters", "objects"),
    [("abc", 5, 0), ([], 2, 0), ({"a": "b"}, 10, 1), ([[["x"]]], 15, 0), (10**4000, 8, 0)],
)
def test_the_size_of_a_value(value: Any, characters: int, objects: int) -> None:
    found, inner = measured(value, "schema")
    assert (found, len(inner)) == (characters, objects)
