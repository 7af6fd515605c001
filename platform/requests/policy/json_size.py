"""How large and how deep a parsed JSON value is, found out within a bound and without recursion."""

from __future__ import annotations

from typing import Any, NamedTuple

_NO_NAMES: frozenset[str] = frozenset()


class JsonSize(NamedTuple):
    """The size of a parsed JSON value, or of the part of it that was looked at.

    Attributes:
        characters: Length of its shortest JSON text, nearly: numbers count as eight.
        depth: Arrays and objects within each other; 0 for a text or a number.
        widest: Entries of the largest object.
        watched: The objects that have one of the names that were asked for.
    """

    characters: int
    depth: int
    widest: int
    watched: list[dict[str, Any]]


_OTHER_CHARACTERS = 8


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
