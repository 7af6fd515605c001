"""SSD tier: KV blocks in append-only segment files.

::

    folder/format                 name and version; locked by the one process that uses the folder
    folder/segment-0000000001.kv  records, one after the other
    a record                      one page: header, length and digest of the slot, checksum;
                                  then the slot's bytes as they lie in the arena

The record headers are the manifest: a rebuild reads one page of each record. A separate manifest
file would be quicker to read, but it and the segments could disagree after a crash or a full disk,
and each would have to be checked against the other. Space is freed by whole segments, oldest first,
so that the disk sees only sequential writes and no compaction is needed.

A location is ``segment << 32 | page``, where ``page`` is the first page of the record. A header's
checksum is seeded by its location, so a record that was moved is invalid. No process appends to
segments of an earlier one or uses a segment number twice, so a location never comes to mean another
block.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import re
import struct
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from loomserve.kvstore.storage.checksum import (
    HEADER_BYTES,
    PAGE,
    SEAL_BYTES,
    BlockHeader,
    seal,
    unseal,
)
from loomserve.platform.base.errors import LoomserveError, StartError
from loomserve.platform.base.paths import check_private

NAME = b"loomserve-kv-ssd"
VERSION = 1

_SETTING = "kvstore.ssd_path"
_SEGMENT_NAME = re.compile(r"segment-(\d{10})\.kv", re.ASCII)
_RECORD = struct.Struct(f"<{HEADER_BYTES}sQQ")

_log = logging.getLogger(__name__)


class SsdFullError(LoomserveError):
    """Nothing was written: the tier is at its capacity, or the disk is full."""


class Entry(NamedTuple):
    """Location, header and slot size of a complete record."""

    location: int
    header: BlockHeader
    slot_bytes: int


class _Record(NamedTuple):
    """Header page of a record; ``digest`` is of the slot's bytes, which follow it."""

    header: BlockHeader
    slot_bytes: int
    digest: int

    def pack(self, location: int) -> bytes:
        body = _RECORD.pack(self.header.packed(), self.slot_bytes, self.digest)
        return seal(body, location)

    @classmethod
    def unpack(cls, page: mmap.mmap, location: int) -> _Record | None:
        body = unseal(page[: _RECORD.size + SEAL_BYTES], location)
        if body is None:
            return None
        header, slot_bytes, digest = _RECORD.unpack(body)
        return cls(BlockHeader.unpacked(header), slot_bytes, digest)


class _Segment:
    """Open segment file. Its descriptor stays open until the last reader is done with it."""

    def __init__(self, path: Path, number: int, flags: int) -> None:
        self.path = path
        self.number = number
        self.fd = os.open(path, flags, 0o600)
        weakref.finalize(self, os.close, self.fd)
        self.bytes = os.fstat(self.fd).st_size
        self.locations: set[int] = set()

    def location(self, offset: int) -> int:
        return self.number << 32 | offset // PAGE

    def read(self, offset: int, buffers: Sequence[mmap.mmap | memoryview]) -> bool:
        """Fill the buffers; False if the file ends before they are full, or the disk fails."""
        try:
            got = os.preadv(self.fd, buffers, offset)
        except OSError as error:
            _log.warning("cannot read %s at %d: %s", self.path, offset, error)
            return False
        return got == sum(len(buffer) for buffer in buffers)

    def append(self, page: mmap.mmap, slot: NDArray[np.uint8]) -> None:
        """Append a header page and a slot, or nothing and raise ``OSError``."""
        size = PAGE + slot.nbytes
        try:
            if os.pwritev(self.fd, [page, slot.data], self.bytes) < size:
                # What was in the way is said only to who tries again.
                os.pwrite(self.fd, page, self.bytes + size - PAGE)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self.fd, self.bytes)
            raise
        self.bytes += size

    def entries(self) -> Iterator[Entry]:
        page = mmap.mmap(-1, PAGE)
        offset = 0
        while offset + PAGE <= self.bytes:
            location = self.location(offset)
            record = _Record.unpack(page, location) if self.read(offset, [page]) else None
            if record is None:
                # A header that cannot be read does not say where the next one is.
                offset += PAGE
                continue
            offset += PAGE + record.slot_bytes
            if offset <= self.bytes:
                yield Entry(location, record.header, record.slot_bytes)


class SsdTier:
    """Store of blocks in the segment files of one folder.

    Any number of threads may ``read`` while others write or drop. All calls block. Buffers are
    whole, aligned pages, as the arena's views are, else ``ValueError`` is raised. With O_DIRECT,
    where the filesystem has it, bytes move without a copy and without filling the page cache.

    Every record whose ``write`` returned survives the death of the process. A power cut may lose
    records of segments that are not full yet, since only a full segment is synced; an incomplete
    record reads as no block.
    """

    def __init__(self, folder: Path, capacity_bytes: int, segment_bytes: int) -> None:
        """Open or create the tier, of at most ``capacity_bytes`` on disk.

        Segments of an earlier, larger capacity count; dropping segments makes them fit again.
        Raises StartError if the folder cannot be used, holds other files or those of a newer
        version, or is used by another process.
        """
        self._folder = folder
        self._capacity_bytes = capacity_bytes
        self._segment_bytes = segment_bytes
        self._claimed = _claim(folder)
        self._flags = os.O_RDWR | _direct_io(folder / "format")
        self._lock = threading.Lock()
        self._page = mmap.mmap(-1, PAGE)
        self._active: _Segment | None = None
        self._segments: dict[int, _Segment] = {}
        numbers = _segment_numbers(folder)
        for number in numbers:
            try:
                self._segments[number] = _Segment(self._path(number), number, self._flags)
            except OSError as error:
                _log.warning("cannot use a segment of KV blocks: %s", error)
        self._last = max(numbers, default=0)

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        return sum(segment.bytes for segment in list(self._segments.values()))

    def write(self, header: BlockHeader, slot: NDArray[np.uint8]) -> int:
        """Append the block in ``slot``, and return its location. Raises SsdFullError if there is no
        room for it; OSError if the disk failed."""
        _check_buffer(slot)
        if PAGE + slot.nbytes > self._segment_bytes:
            raise ValueError(f"a slot of {slot.nbytes} bytes exceeds a segment")
        with self._lock:
            if self.used_bytes + PAGE + slot.nbytes > self._capacity_bytes:
                raise SsdFullError(f"{self._folder} holds its {self._capacity_bytes} bytes")
            try:
                return self._append(header, slot)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise SsdFullError(f"{self._folder}: {error.strerror}") from error
                raise

    def read(self, location: int, into: NDArray[np.uint8], namespace: bytes, key: bytes) -> bool:
        """Read a block into a slot of its size; False if the location does not hold this block. It
        was dropped, torn or corrupted, or is another one. ``into`` may then hold anything."""
        _check_buffer(into)
        segment = self._segments.get(location >> 32)
        page = mmap.mmap(-1, PAGE)
        if segment is None or not segment.read(_offset(location), [page, into.data]):
            return False
        record = _Record.unpack(page, location)
        return (
            record is not None
            and (record.header.namespace, record.header.key) == (namespace, key)
            and record.slot_bytes == into.nbytes
            and record.digest == xxh3_64_intdigest(into.data)
        )

    def entries(self) -> Iterator[Entry]:
        """All records with a valid header, oldest first; only headers are read."""
        for segment in list(self._segments.values()):
            for entry in segment.entries():
                segment.locations.add(entry.location)
                yield entry

    def drop_oldest_segment(self) -> list[int]:
        """Delete the oldest segment, if there is one; returns the locations in it."""
        with self._lock:
            if not self._segments:
                return []
            segment = self._segments.pop(min(self._segments))
            if segment is self._active:
                self._active = None
            segment.path.unlink(missing_ok=True)
            return sorted(segment.locations)

    def close(self) -> None:
        """Sync, and let another process use the folder. No other call may follow."""
        with self._lock:
            if self._active is not None:
                os.fsync(self._active.fd)
            self._active = None
            self._segments.clear()
            os.close(self._claimed)

    def _append(self, header: BlockHeader, slot: NDArray[np.uint8]) -> int:
        segment = self._segment(PAGE + slot.nbytes)
        location = segment.location(segment.bytes)
        record = _Record(header, slot.nbytes, xxh3_64_intdigest(slot.data)).pack(location)
        self._page[: len(record)] = record
        try:
            segment.append(self._page, slot)
        except OSError as error:
            if error.errno == errno.EFBIG and segment.bytes:
                # The process may not make files as large as a segment.
                self._active = None
            raise
        segment.locations.add(location)
        return location

    def _segment(self, room: int) -> _Segment:
        """Segment to append ``room`` bytes to: the active one, or a new one if that is full."""
        if self._active is not None:
            if self._active.bytes + room <= self._segment_bytes:
                return self._active
            os.fsync(self._active.fd)
        number = self._last + 1
        flags = self._flags | os.O_CREAT | os.O_EXCL
        self._active = self._segments[number] = _Segment(self._path(number), number, flags)
        self._last = number
        return self._active

    def _path(self, number: int) -> Path:
        return self._folder / f"segment-{number:010d}.kv"


def _segment_numbers(folder: Path) -> list[int]:
    """Numbers of the segment files, ascending. Files with other names are ignored."""
    names = (_SEGMENT_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(name[1]) for name in names if name)


def _offset(location: int) -> int:
    return (location & 0xFFFFFFFF) * PAGE


def _check_buffer(buffer: NDArray[np.uint8]) -> None:
    if buffer.nbytes % PAGE or buffer.ctypes.data % PAGE:
        raise ValueError("the buffer is not whole, aligned pages")


def _claim(folder: Path) -> int:
    """Open, lock and check the format file, creating it in an empty folder; its descriptor."""
    path = folder / "format"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = not {file.name for file in folder.iterdir()} - {"format", "lost+found"}
        if fresh:
            check_private(folder, _SETTING)
        fd = os.open(path, os.O_RDWR | (os.O_CREAT if fresh else 0), 0o600)
    except FileNotFoundError as error:
        raise _foreign(folder) from error
    except OSError as error:
        raise StartError(f"cannot keep KV blocks in {folder}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if fresh and not os.fstat(fd).st_size:
            os.pwrite(fd, (NAME + b" %d\n" % VERSION).ljust(PAGE), 0)
            os.fsync(fd)
        _check_format(folder, os.pread(fd, PAGE, 0))
        check_private(folder, _SETTING)
    except BlockingIOError as error:
        os.close(fd)
        raise StartError(f"another process keeps KV blocks in {folder}: stop it") from error
    except OSError as error:
        os.close(fd)
        raise StartError(f"cannot keep KV blocks in {folder}: {error.strerror}") from error
    except StartError:
        os.close(fd)
        raise
    return fd


def _check_format(folder: Path, content: bytes) -> None:
    name, _, version = content.strip().partition(b" ")
    if name != NAME or not version.isdigit():
        raise _foreign(folder)
    if int(version) > VERSION:
        raise StartError(
            f"the KV blocks in {folder} are a newer Loomserve's (format {int(version)}, this one "
            f"reads {VERSION}): empty the folder or name another"
        )


def _foreign(folder: Path) -> StartError:
    return StartError(f"{folder} holds something else than KV blocks: name an empty folder")


def _direct_io(path: Path) -> int:
    """O_DIRECT if the filesystem can read ``path``, a file of one page, with it; else 0."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return 0
    try:
        os.preadv(fd, [mmap.mmap(-1, PAGE)], 0)
    except OSError:
        return 0
    finally:
        os.close(fd)
    return os.O_DIRECT
