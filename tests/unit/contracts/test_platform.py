"""What clients and operators of a whole platform see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.contracts import story
from tests.unit.contracts.fleet import WholePlatform
from tests.unit.contracts.recordings import check, masked

pytestmark = pytest.mark.xdist_group("contracts")


@pytest.fixture(scope="package")
def told(whole: WholePlatform) -> dict[str, Any]:
    """All of it, in an order that which tests are chosen does not change."""
    found = {each.__name__: each(whole) for each in story.COURSE}
    places = {str(whole.folder): "FOLDER", f":{whole.port}": ":PORT"}
    return {name: masked(each, places=places) for name, each in found.items()}


@pytest.mark.parametrize("chapter", story.COURSE, ids=lambda each: each.__name__)
def test_users_see_what_was_recorded(
    chapter: Callable[[WholePlatform], Any], told: dict[str, Any]
) -> None:
    check(chapter.__name__, told[chapter.__name__])
