"""A real store, for all tests of an engine's side of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.kvstore.engine.transfers.test_transfer import Store, store_in


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> Iterator[Store]:
    store = store_in(tmp_path)
    yield store
    if store.server.alive:
        store.server.stop()
