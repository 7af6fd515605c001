"""A plugin of pytest's that writes down which tests failed, for who runs them again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FAILED_VARIABLE = "LOOMSERVE_TESTS_FAILED"
"""Names a file for the names of tests that failed, a line each."""


def pytest_configure(config: pytest.Config) -> None:
    # Not in the processes of xdist, nor for what tests run.
    if not hasattr(config, "workerinput") and (file := os.environ.pop(FAILED_VARIABLE, "")):
        config.pluginmanager.register(_Failed(Path(file), config.rootpath))


class _Failed:
    """Of a run that collected all its tests."""

    def __init__(self, file: Path, root: Path) -> None:
        self._file, self._root = file, root
        self._names = dict[str, None]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._names[str(self._root / _without_group(report.nodeid))] = None

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.TESTS_FAILED:
            self._file.write_text("".join(f"{name}\n" for name in self._names))


def _without_group(name: str) -> str:
    """A test's name, to which xdist may have appended ``@`` and a group."""
    before, _, group = name.rpartition("@")
    return before if before and not group.endswith("]") else name


def failed_in(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []
