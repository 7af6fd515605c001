"""What holds for all tests."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

from tests.groups import put_in_group, put_in_order

# A busy machine must not fail a test: none is timed. What is checked before a merge is the same
# each time; who works on it looks for more.
settings.register_profile(
    "untimed",
    deadline=None,
    derandomize="CI" in os.environ,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")


def pytest_configure() -> None:
    # Processes that run tests side by side have a width, which changes what commands print.
    os.environ.pop("COLUMNS", None)


def pytest_collection_finish() -> None:
    # Thousands of tests, and what they import, which the collector would go through again and
    # again.
    gc.freeze()


def pytest_itemcollected(item: pytest.Item) -> None:
    put_in_group(item)


# Of those that are left, once others are deselected.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    put_in_order(items)
