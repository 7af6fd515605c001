"""What holds for all tests."""

import os
from typing import Any

import pytest
from hypothesis import settings

from tests.groups import GroupScheduling, put_in_order

# Processes that run tests side by side have a width, which changes what commands print.
os.environ.pop("COLUMNS", None)

# A busy machine must not fail a test: none is timed. What is checked before a merge is the same
# each time; who works on it looks for more.
settings.register_profile("untimed", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    put_in_order(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadscope" else None
