"""The platform that all recordings are of: it is started once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.contracts.fleet import WholePlatform


@pytest.fixture(scope="package")
def whole(
    tmp_path_factory: pytest.TempPathFactory, _folder_of_a_run: Path
) -> Iterator[WholePlatform]:
    # It imports vLLM, which descriptions need not.
    from tests.unit.contracts.fleet import whole_platform

    with whole_platform(tmp_path_factory.mktemp("whole"), _folder_of_a_run) as platform:
        yield platform
