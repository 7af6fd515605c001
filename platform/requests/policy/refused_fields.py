"""Fields that other servers and versions obey and this one does not: what to send instead.

They would change the answer, so a request that sets one is refused. ``refused_fields.toml`` has
them, and ``docs/requests.md`` the table.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loomserve.platform.requests.policy.fields import PASSED_ON, TEXT_ENDPOINTS

OFF: tuple[Any, ...] = (False, 0, "")
"""Values that ask for nothing where a field has no others."""


@dataclass(frozen=True, slots=True)
class RefusedField:
    instead: str
    """What to send in its place, or where it is obeyed; completes "field: …"."""
    off: tuple[Any, ...] = OFF
    empty_asks: bool = False

    def is_off(self, value: Any) -> bool:
        return is_off(value, self.off) and not (self.empty_asks and value == {})


def is_off(value: Any, off: tuple[Any, ...]) -> bool:
    """Whether a value asks for nothing. true and 1 are two values, as false and 0."""
    if value is None or value == [] or value == {}:
        return True
    return any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in off)


_READ = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

OFF_VALUES: Mapping[str, tuple[Any, ...]] = {
    name: tuple(row["values"]) for row in _READ["off"] for name in row["names"].split()
}
"""Values beside null, [] and {} that ask for nothing, of fields where they are others than OFF."""

EMPTY_ASKS = frozenset(_READ["empty_asks"]["names"].split())
"""Fields of which an empty object asks for something."""

REFUSED: Mapping[str, RefusedField] = {
    name: RefusedField(instead, OFF_VALUES.get(name, OFF), empty_asks=name in EMPTY_ASKS)
    for instead, names in _READ["instead"].items()
    for name in names.split()
}
"""Of endpoints that generate text."""


def _fields(rows: Mapping[str, Mapping[str, Any]]) -> Mapping[str, RefusedField]:
    return {
        name: RefusedField(row["instead"], tuple(row.get("off", OFF))) for name, row in rows.items()
    }


REFUSED_EMBEDDINGS = _fields(_READ["embeddings"])
REFUSED_FORMS = _fields(_READ["forms"])
"""Of transcriptions and translations."""

SAME: Mapping[str, Mapping[str, str]] = {
    name: row for row in _READ["same"] for name in row.pop("names").split()
}
"""Fields that the endpoints name each otherwise: what each calls it."""


def here(path: str, name: str) -> str:
    """Where a field of another endpoint that generates text is obeyed."""
    if same := SAME.get(name, {}).get(path):
        return f"use {same}"
    return f"{next(other for other in TEXT_ENDPOINTS if name in PASSED_ON[other])} has it"
