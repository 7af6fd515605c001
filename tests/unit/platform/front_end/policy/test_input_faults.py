"""Of a value that is of no class, the class that it names is told about."""

from __future__ import annotations

from typing import Any

import pytest

from loomserve.platform.front_end.policy.input_faults import (
    MOST_CHARACTERS,
    MOST_FAULTS,
    InputFault,
    class_name,
    message,
    reported_faults,
)

ONE, OTHER = class_name(0), class_name(1)
TEXT, LIST = "Input should be a valid string", "Input should be a valid list"


def of_messages(item: Any, *faults: tuple[tuple[Any, ...], str, str]) -> list[tuple[Any, str]]:
    where = [
        InputFault(("messages", 0, *inner), kind, says)
        for inner, kind, says in faults
    ]  # fmt: skip
    return [(one.param, one.says) for one in reported_faults(where, {"messages": [item]})]


def test_the_class_of_the_role_is_told_about_however_much_is_wrong_in_it() -> None:
    item = {"role": "tool", "content": None}
    assert of_messages(
        item,
        ((ONE, "role"), "literal_error", "Input should be 'user'"),
        ((OTHER, "content", ONE), "string_type", TEXT),
        ((OTHER, "content", OTHER), "list_type", LIST),
        ((OTHER, "tool_call_id"), "missing", "Field required"),
    ) == [
        ("messages[0].content", f"{TEXT} or a valid list"),
        ("messages[0].tool_call_id", "Field required"),
    ]


def test_classes_within_classes_are_told_apart() -> None:
    item = {"role": "user", "content": [{"type": "text", "text": 3}]}
    assert of_messages(
        item,
        ((ONE, OTHER, "content", ONE), "string_type", TEXT),
        ((ONE, OTHER, "content", OTHER, 0, ONE, "type"), "literal_error", "not 'image'"),
        ((ONE, OTHER, "content", OTHER, 0, OTHER, "text"), "string_type", TEXT),
        ((OTHER, ONE, "id"), "missing", "Field required"),
    ) == [("messages[0].content[0].text", TEXT)]


def test_who_names_no_class_is_told_to() -> None:
    assert of_messages(
        {},
        ((ONE, "author"), "missing", "Field required"),
        ((OTHER, "role"), "missing", "Field required"),
        ((OTHER, "content"), "missing", "Field required"),
    )[0] == ("messages[0].role", "Field required")


@pytest.mark.parametrize("many", [1, MOST_FAULTS, MOST_FAULTS + 2, 1000])
def test_a_message_has_a_few_short_faults(many: int) -> None:
    body = {f"{number}{'k' * 30_000}": 1 for number in range(many)}
    faults = reported_faults(
        [InputFault((name,), "string_type", "x" * 30_000) for name in body], body
    )
    text = message(faults)
    assert len(faults) == many
    assert len(text) <= MOST_FAULTS * (MOST_CHARACTERS + 2) + 20
    assert text.endswith(f"and {many - MOST_FAULTS} more") is (many > MOST_FAULTS)
    assert all(len(fault.param or "") <= 100 for fault in faults)
