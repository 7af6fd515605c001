"""How large and how deep a parsed JSON value is, found out within a bound and without recursion."""

from __future__ import annotations

from typing import Any, NamedTuple


class JsonSize(NamedTuple):
    """The size of a parsed JSON value, or of the part of it that was looked at.

    Attributes:
        characters: Length of its shortest JSON text, nearly: numbers count as eight.
        depth: Arrays and objects within each other; 0 for a text or a number.
        widest: Entries of the largest object.
    """

    characters: int
    depth: int
    widest: int


_OTHER_CHARACTERS = 8


def json_size(value: Any, *, most_characters: int, most_depth: int) -> JsonSize:
    """The size of ``value``; one over a bound is looked at no further than to see that it is.

    Each step counts at least one character, so that there are no more than ``most_characters``.
    """
    characters = deepest = widest = 0
    left = [(value, 0)]
    while left and characters <= most_characters and deepest <= most_depth:
        one, depth = left.pop()
        if isinstance(one, str):
            characters += len(one) + 2
        elif isinstance(one, dict | list):
            deepest = max(deepest, depth + 1)
            # Its brackets, commas and colons, before its entries are taken up.
            characters += 2 + 2 * len(one)
            if characters > most_characters:
                break
            if isinstance(one, dict):
                widest = max(widest, len(one))
                characters += sum(len(name) + 2 for name in one)
                left.extend((entry, depth + 1) for entry in one.values())
            else:
                left.extend((entry, depth + 1) for entry in one)
        else:
            characters += _OTHER_CHARACTERS
    return JsonSize(characters, deepest, widest)
