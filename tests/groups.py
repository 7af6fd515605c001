"""Which tests have an engine or a platform in common: one process runs them all, if several run.

``pytest.mark.xdist_group`` says it where this module does not see it.
"""

from __future__ import annotations

from collections import Counter

import pytest

SHARED = (
    *("pair", "served_engine", "stored_engine", "platform"),
    *("real_platform", "simulated_platform"),
)
"""Fixtures that tests of several files have in common."""


def put_in_group(item: pytest.Item) -> None:
    """Of a fixture that files share, or else of its file, whose tests have fixtures and caches in
    common; clusters of nodes take the whole machine."""
    folder, _, file = item.nodeid.partition("::")[0].removeprefix("tests/").partition("/")
    if item.get_closest_marker("xdist_group") is None:
        alone = folder if folder == "cluster" else f"{folder}/{file}"
        item.add_marker(pytest.mark.xdist_group(_shared(folder, item) or alone))


def _shared(folder: str, item: pytest.Item) -> str | None:
    """What it has in common with tests of other files; a module may have one of its own, and unit
    tests share nothing."""
    if folder == "unit":
        return None
    names = getattr(item, "fixturenames", ())
    module = getattr(item, "module", None)
    return next((name for name in SHARED if name in names and not hasattr(module, name)), None)


def put_in_order(items: list[pytest.Item]) -> None:
    """Groups one after the other, the largest first, so that several processes end at about the
    same time; unit tests stay in front, first those of groups with a name, which take longest."""
    sizes = Counter(map(group, items))

    def place(item: pytest.Item) -> tuple[bool, bool, int, str]:
        name, unit = group(item), item.nodeid.startswith("tests/unit/")
        return not unit, name.startswith("unit/"), -sizes[name], name

    items.sort(key=place)


def group(item: pytest.Item) -> str:
    """Empty: it is in none."""
    marker = item.get_closest_marker("xdist_group")
    return "" if marker is None else str(marker.args[0])
