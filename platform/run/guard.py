"""The guard of a run: a process that ends the run once its command is gone, however that ended.

Ray ends most of its processes with the command, but some linger, and none gives shared memory back.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from loomserve.platform.run.folder import RunFolder
from loomserve.platform.run.leftovers import end_run


def start_guard(run: RunFolder, keep: Collection[Path]) -> subprocess.Popen[bytes]:
    """A guard for the run of this process; who ends the run ends it, too.

    Args:
        keep: shared memory that outlives the run.
    """
    command = [sys.executable, "-m", __name__, str(run.path), *map(str, keep)]
    # In a session of its own, what kills the command's whole process group spares it.
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def main() -> None:
    # Nothing is ever written: the pipe closes when the command has ended.
    sys.stdin.buffer.read()
    path, *keep = map(Path, sys.argv[1:])
    end_run(RunFolder(path), keep)


if __name__ == "__main__":
    main()
