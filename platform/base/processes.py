"""Processes below another one, as the kernel lists them: no other process is looked at."""

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


def with_descendants(pid: int) -> Iterator[int]:
    """A process and all below it; ``OSError`` as of :func:`threads`."""
    yield pid
    for child in children(pid):
        yield from with_descendants(child)
