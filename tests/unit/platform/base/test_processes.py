"""A person is told in which file a process's errors are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_TELL = "from loomserve.platform.base.processes import own_log; print(own_log())"


@pytest.mark.parametrize("goes", ["to a file", "to a pipe", "nowhere"])
def test_the_log_is_named_where_it_is_a_file(goes: str, tmp_path: Path) -> None:
    log = tmp_path / "worker-1.err"
    command = f"import os; os.close(2); {_TELL}" if goes == "nowhere" else _TELL
    with log.open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", command],
            stdout=subprocess.PIPE,
            stderr=out if goes == "to a file" else subprocess.PIPE,
            check=True,
        )
    told = f"its log, {log}," if goes == "to a file" else "its log"
    assert done.stdout.decode().strip() == told
