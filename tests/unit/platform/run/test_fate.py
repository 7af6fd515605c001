"""A process that asked for it ends with its parent, also within a native call and during start."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.waiting import PATIENCE_S

# The child holds the interpreter's lock for a minute, or asks once its parent has ended.
PARENT = """
import ctypes, multiprocessing, os, sys, time
from loomserve.platform.run.fate import end_with_parent

def busy():
    end_with_parent()
    print(os.getpid(), flush=True)
    ctypes.PyDLL(None).sleep(60)

def late():
    print(os.getpid(), flush=True)
    time.sleep(1)
    end_with_parent()
    time.sleep(60)

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=globals()[sys.argv[1]]).start()
    time.sleep(60)
"""


@pytest.mark.parametrize("child", ["busy", "late"])
def test_a_child_ends_with_a_parent_that_is_killed(child: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(script), child], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    left = psutil.Process(int(parent.stdout.readline()))
    time.sleep(0.2)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    gone, alive = psutil.wait_procs([left], timeout=PATIENCE_S)
    for process in alive:
        process.kill()
    assert gone == [left]
