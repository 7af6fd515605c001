"""Processes below another one, as the kernel lists them; and where this one's errors go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

NOBODY = (FileNotFoundError, ProcessLookupError)  # raised of a process that has ended


def threads(pid: int) -> Iterator[Path]:
    """Folders of its threads; ``OSError``: it has ended, or cannot be looked at."""
    return Path(f"/proc/{pid}/task").iterdir()


def children(pid: int) -> Iterator[int]:
    """Processes that it has started or adopted; ``OSError`` as of :func:`threads`."""
    for thread in threads(pid):
        try:
            yield from map(int, (thread / "children").read_text().split())
        except NOBODY:
            continue


def own_log() -> str:
    """What a person is told of the file of this process's errors, and of those that it starts."""
    try:
        path = Path("/proc/self/fd/2").resolve(strict=True)
    except OSError:
        return "its log"
    return f"its log, {path}," if path.is_file() else "its log"


def with_descendants(pid: int) -> Iterator[int]:
    """A process and all below it; ``OSError`` as of :func:`threads`."""
    yield pid
    for child in children(pid):
        yield from with_descendants(child)
