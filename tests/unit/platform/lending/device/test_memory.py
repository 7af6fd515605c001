"""Memory that two processes open by a file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from benchmarks.gpu.host_memory import HostMemory


def test_what_one_writes_the_other_reads_and_the_file_is_gone(tmp_path: Path) -> None:
    path, memory = tmp_path / "ring.task", HostMemory()
    made = memory.make(path, 4096)
    assert not made.any()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    opened = memory.open(path, 4096)
    assert opened is not None
    assert os.listdir(tmp_path) == []
    made[7] = 3
    opened[4095] = 5
    assert (int(opened[7]), int(made[4095])) == (3, 5)


def test_there_may_be_nothing_yet(tmp_path: Path) -> None:
    assert HostMemory().open(tmp_path / "ring.task", 4096) is None


def test_memory_of_another_size_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "ring.task"
    HostMemory().make(path, 4096)
    with pytest.raises(ValueError, match="has 4096 bytes, not 8192"):
        HostMemory().open(path, 8192)
