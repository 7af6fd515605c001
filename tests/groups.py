"""Which tests have an engine or a platform in common: one process runs them all, if several run."""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

_PLATFORM = "platform"
_OTHER_MODELS = "other models"
GROUPS = {
    # Each starts a platform of its own; the others of the folder share one.
    **{
        name: name
        for name in (
            "e2e/test_adapters.py",
            "e2e/test_dashboards_of_features.py",
            "e2e/test_on_demand.py",
            "e2e/test_placed_by_itself.py",
            "e2e/test_scaling.py",
            "e2e/test_two_front_ends.py",
        )
    },
    # They serve other models instead of the shared platform's, which do not come back: after all of
    # that, or in another process, on a platform like it.
    **dict.fromkeys(
        ("e2e/test_lending.py", "e2e/test_lending_kills.py", "e2e/test_shards_of_replicas.py"),
        _OTHER_MODELS,
    ),
    # By the engines that they share.
    "integration/test_lending.py": "pair",
    "integration/test_shards.py": "pair",
    "integration/test_shards_and_store.py": "pair",
    "integration/test_sleep_of_lenders.py": "pair",
    "integration/test_front_ends.py": "served_engine",
    "integration/test_resumption.py": "served_engine",
    "integration/test_sleep.py": "served_engine",
    "integration/test_kv_connector.py": "stored_engine",
    "integration/test_kv_faults.py": "stored_engine",
}
# Those that take minutes, the longest first, so that two processes end at about the same time;
# after all that use both cores, for these pin their engines to a core of each process.
FIRST = (
    _PLATFORM,
    "e2e/test_on_demand.py",
    "e2e/test_placed_by_itself.py",
    "e2e/test_adapters.py",
    "e2e/test_scaling.py",
    _OTHER_MODELS,
    "cluster",
    "pair",
    "served_engine",
    "integration/test_scheduler.py",
    "integration/test_adapters.py",
    "integration/test_kv_nodes.py",
)
_PLACES = {group: at for at, group in enumerate(FIRST)}


def group(node_id: str) -> str:
    """Of a test: all of one engine or platform are one, and else those of a file."""
    module = node_id.partition("::")[0].removeprefix("tests/")
    if module.startswith("cluster/"):
        return "cluster"
    if module.startswith("e2e/"):
        return GROUPS.get(module, _PLATFORM)
    return GROUPS.get(module, module)


def put_in_order(items: list[pytest.Item]) -> None:
    """Groups one after the other; unit tests stay in front."""

    def place(item: pytest.Item) -> int:
        if item.nodeid.startswith("tests/unit/"):
            return -1
        return _PLACES.get(group(item.nodeid), len(_PLACES))

    items.sort(key=place)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a whole group to the process that has the least left to do."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)
