"""Shared memory that a run's processes have mapped; it outlives all processes until removed."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
# vLLM's message queues, which Python names; task rings; arenas. Whatever else a process maps there,
# such as weights, is not the platform's to remove.
_OWN = re.compile(r"psm_\w+|loomserve-ring-[^/]+|loomserve-\d+/\d+/arena")
_OWN_GLOBS = ("psm_*", "loomserve-ring-*", "loomserve-*/*/arena")
_QUEUE = "psm_"


class RunMemory:
    """The platform's files in shared memory that processes of a run have mapped. A file of the run
    keeps their names, as a queue's own name does not say whose it is."""

    def __init__(self, file: Path, folder: Path = SHARED_MEMORY) -> None:
        self._file = file
        self._folder = folder
        self._noted = set(file.read_text().splitlines()) if file.exists() else set[str]()
        self._makers: dict[str, set[psutil.Process]] = {}
        self._seen = self._seen_before = set[str]()

    def has_news(self) -> bool:
        """Whether there are files that were not there two looks ago: what a process has mapped is
        long to read. A file is there a moment before it is mapped, so it is news twice."""
        there = {
            str(path.relative_to(self._folder))
            for each in _OWN_GLOBS
            for path in self._folder.glob(each)
        }
        news = there - self._seen_before
        self._seen, self._seen_before = there, self._seen & there
        return bool(news)

    def note(self, processes: Iterable[psutil.Process]) -> None:
        """Note what the processes map now."""
        for process in processes:
            for name in mapped(process.pid, self._folder):
                if _OWN.fullmatch(name):
                    self._makers.setdefault(name, set()).add(process)
        new = self._makers.keys() - self._noted
        if new:
            with self._file.open("a") as file:
                file.writelines(f"{name}\n" for name in sorted(new))
            self._noted |= new

    def remove_queues(self) -> None:
        """Remove what engines that have ended left; rings and arenas may be for those to come."""
        for name, makers in list(self._makers.items()):
            if not any(process.is_running() for process in makers):
                del self._makers[name]
                if name.startswith(_QUEUE):
                    self._remove({name})

    def remove(self, keep: Collection[Path] = ()) -> None:
        """Remove all that no process maps any more, and forget it."""
        self._remove({name for name in self._noted if self._folder / name not in keep})
        self._noted = {name for name in self._noted if (self._folder / name).exists()}
        # Another start may have removed what the same run had left.
        with contextlib.suppress(FileNotFoundError):
            self._file.write_text("".join(f"{name}\n" for name in sorted(self._noted)))

    def _remove(self, names: set[str]) -> None:
        left = {name for name in names if _OWN.fullmatch(name) and (self._folder / name).exists()}
        if left:
            for pid in psutil.pids():
                left.difference_update(mapped(pid, self._folder))
        for name in left:
            path = self._folder / name
            with contextlib.suppress(OSError):  # another user's, or removed meanwhile
                # A store's arena lies in a folder with its socket.
                path.unlink() if path.parent == self._folder else shutil.rmtree(path.parent)


def mapped(pid: int, folder: Path) -> Iterator[str]:
    """Names of files in shared memory that a process maps; none if it is another user's.
    ``OSError``: it cannot be looked at now."""
    unseen = FileNotFoundError, ProcessLookupError, PermissionError
    with contextlib.suppress(*unseen), Path(f"/proc/{pid}/maps").open() as lines:
        for line in lines:
            name = line.rstrip("\n").partition(f" {folder}/")[2]
            if name:
                yield name
