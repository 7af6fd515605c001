"""Unit tests have a run's folder, as all processes of the platform have."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from loomserve.platform.base import heap
from loomserve.platform.run.folder import RUN_VARIABLE, RunFolder


@pytest.fixture(scope="session")
def _folder_of_a_run() -> Iterator[Path]:
    # pytest's own folders are too deep for sockets.
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        RunFolder(Path(folder)).sockets.mkdir()
        yield Path(folder)


@pytest.fixture(autouse=True)
def _in_a_run(monkeypatch: pytest.MonkeyPatch, _folder_of_a_run: Path) -> None:
    monkeypatch.setenv(RUN_VARIABLE, str(_folder_of_a_run))


@pytest.fixture(autouse=True)
def _heap_of_all_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    # It goes through what all modules and tests are made of: half a second for each front end.
    monkeypatch.setattr(heap, "settle_heap", lambda: None)
