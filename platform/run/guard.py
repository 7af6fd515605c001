"""The guard of a run: a process that ends the run once its command is gone, however that ended.

Ray ends most of its processes with the command, but some linger, and none gives shared memory back.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from loomserve.platform.run.folder import RUN_VARIABLE, RunFolder
from loomserve.platform.run.leftovers import end_run


def start_guard(run: RunFolder, keep: Collection[Path]) -> subprocess.Popen[bytes]:
    """A guard for the run of this process, which it is no part of: who ends the run and is killed
    meanwhile has it go on.

    Args:
        keep: shared memory that outlives the run.
    """
    command = [sys.executable, "-m", __name__, str(run.path), *map(str, keep)]
    # In a session of its own, what kills the command's whole process group spares it.
    own = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=own)


def end_guard(guard: subprocess.Popen[bytes]) -> None:
    """End a guard whose run has been ended."""
    guard.kill()
    guard.wait()
    if guard.stdin is not None:
        guard.stdin.close()


def main() -> None:
    # Nothing is ever written: the pipe closes when the command has ended.
    sys.stdin.buffer.read()
    path, *keep = map(Path, sys.argv[1:])
    end_run(RunFolder(path), keep)


if __name__ == "__main__":
    main()
