"""The files of usage: a line of JSON for each minute, API key and model, a file for each month.

Lines are only ever appended, each of several gateways' as a whole, so the same minute may have
several lines for a key and a model: they add up. Gateways of several nodes have files of their own,
since a network's file system may let appends of two machines overwrite each other.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

import msgspec

from loomserve.platform.base.errors import StartError
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.config import Server

_log = logging.getLogger("ray.serve")

_ENDING = ".jsonl"


class UsageRecord(msgspec.Struct):
    """Sums over the requests that ended in a minute."""

    minute: str
    """When it began, as ``2026-11-26T01:30Z``."""
    key: str
    """The API key's name; empty: requests without a key."""
    model: str
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of those, the ones that the prefix cache or the KV store had."""
    completion_tokens: int = 0
    device_seconds: float = 0.0

    @property
    def month(self) -> str:
        """As ``2026-11``."""
        return self.minute[:7]

    @property
    def amounts(self) -> dict[str, float]:
        """What adds up, by field."""
        return {name: getattr(self, name) for name in _AMOUNTS}

    def add(self, other: UsageRecord) -> None:
        for name in _AMOUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_AMOUNTS = UsageRecord.__struct_fields__[3:]


def minute_of(unix_s: float) -> str:
    """The minute of a time in Unix seconds; later ones are greater as text, too."""
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%dT%H:%MZ}"


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(UsageRecord)


def usage_folder_path(server: Server, base: Path) -> Path:
    """The folder, of a configuration in folder ``base``."""
    if server.usage.folder is None:
        return cache_folder() / f"usage-{server.port}"
    return (base / Path(server.usage.folder).expanduser()).absolute()


def check_usage_folder(folder: Path) -> None:
    """Make the folder and check that files can be made there, or raise StartError."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        trial = folder / f".writable-{os.getpid()}"
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise StartError(
            f"server.usage.folder: {folder} cannot be written to ({error.strerror}): set it to a "
            "folder of your own"
        ) from None


class UsageFiles:
    """A folder's files; any thread may use them, and any number of processes."""

    def __init__(self, folder: Path, node: str | None = None) -> None:
        """``node``: whose gateways write here, where there are several."""
        self._folder = folder
        self._ending = _ENDING if node is None else f".{node}{_ENDING}"

    def append(self, records: Iterable[UsageRecord]) -> None:
        """Keep records; OSError: a month's could not be written, and none of them is kept."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        by_month = sorted(records, key=lambda record: record.month)
        for month, of_month in groupby(by_month, key=lambda record: record.month):
            lines = b"".join(_encoder.encode(record) + b"\n" for record in of_month)
            with _locked(self._folder / f"{month}{self._ending}") as file:
                size = os.fstat(file).st_size
                # The machine may have stopped within a line.
                torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
                try:
                    _write(file, b"\n" + lines if torn else lines)
                    os.fsync(file)
                except OSError:
                    os.ftruncate(file, size)
                    raise

    def read(self, begin: str, end: str) -> Iterator[UsageRecord]:
        """Records of all nodes from a minute to before another; torn lines are skipped."""
        for path in sorted(self._folder.glob(f"*{_ENDING}")):
            if not begin[:7] <= path.name[:7] <= end[:7]:
                continue
            torn = 0
            with path.open("rb") as file:
                for line in file:
                    try:
                        record = _decoder.decode(line)
                    except msgspec.DecodeError:
                        torn += bool(line.strip())
                        continue
                    if begin <= record.minute < end:
                        yield record
            if torn:
                _log.warning("%d lines of %s are no usage", torn, path)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """A file to append to, of which this process has the lock."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def _write(file: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]
