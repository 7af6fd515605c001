"""KV blocks on SSD: append-only segment files.

::

    folder/format                 name and version; locked by the one process that uses the folder
    folder/segment-0000000001.kv  records, one after the other
    a record                      one page: header, length and digest of the slot, checksum;
                                  then the slot's bytes as they lie in the arena

The record headers are the manifest: a rebuild reads one page a record. A manifest file of its own
would be quicker to read, but it and the segments could disagree after a crash or a full disk, and
each would have to be checked against the other. Space comes back a whole segment at a time, oldest
first, so that the disk sees only sequential writes and no compaction is needed.

A location is ``segment << 32 | page``, the page at which the record begins. A header's checksum is
seeded by its location, so that a record which moved or belongs to another segment is none. Segments
are never appended to by a later process and no number is used twice in one, so a location never
comes to mean another block.
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
    HEADER,
    PAGE,
    SEAL_BYTES,
    BlockHeader,
    seal,
    unseal,
)
from loomserve.platform.base.errors import LoomserveError, StartError

NAME = b"loomserve-kv-ssd"
VERSION = 1

_SEGMENT_NAME = re.compile(r"segment-(\d{10})\.kv", re.ASCII)
_RECORD = struct.Struct(f"<{HEADER.size}sQQ")

_log = logging.getLogger(__name__)


class SsdFullError(LoomserveError):
    """The block was not written, since the tier is at its capacity or the disk is full. Nothing
    else is lost, and ``drop_oldest_segment`` makes room."""


class Entry(NamedTuple):
    location: int
    header: BlockHeader
    slot_bytes: int


class _Record(NamedTuple):
    header: BlockHeader
    slot_bytes: int
    digest: int

    def pack(self, location: int) -> bytes:
        body = _RECORD.pack(HEADER.pack(*self.header), self.slot_bytes, self.digest)
        return seal(body, location)

    @classmethod
    def unpack(cls, page: mmap.mmap, location: int) -> _Record | None:
        body = unseal(page[: _RECORD.size + SEAL_BYTES], location)
        if body is None:
            return None
        header, slot_bytes, digest = _RECORD.unpack(body)
        return cls(BlockHeader(*HEADER.unpack(header)), slot_bytes, digest)


class _Segment:
    """An open segment. Its descriptor lives as long as anyone still reads from it."""

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
        """Fill the buffers; False when the file ends before, or the disk cannot read it."""
        try:
            got = os.preadv(self.fd, buffers, offset)
        except OSError as error:
            _log.warning("cannot read %s at %d: %s", self.path, offset, error)
            return False
        return got == sum(len(buffer) for buffer in buffers)

    def append(self, page: mmap.mmap, slot: NDArray[np.uint8]) -> None:
        """All of it or nothing; ``OSError`` says why nothing."""
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
        """The complete records, in the order they were written."""
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
    """The blocks under one folder.

    Any number of threads may ``read`` while others write or drop. All calls block. Buffers are
    whole pages and page-aligned, as the arena's views are; anything else is a ``ValueError``. With
    O_DIRECT, where the filesystem has it, bytes go between the disk and the arena with no copy and
    leave the page cache to others.

    A process killed at any moment leaves all records whose ``write`` returned. A power cut may take
    those of segments not yet full, since only a full segment is synced; what is then incomplete
    reads as no block.
    """

    def __init__(self, folder: Path, capacity_bytes: int, segment_bytes: int) -> None:
        """Open or make the tier, of at most ``capacity_bytes`` on disk.

        What is there counts even when it exceeds a capacity that became smaller; dropping
        segments makes it fit again.

        Raises:
            StartError: the folder cannot be used, holds something else or a newer version's
                files, or another process uses it.
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
        """Append the block that lies in ``slot``; its location.

        Raises:
            SsdFullError: there is no room for it.
            OSError: the disk failed.
        """
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
        """Read a block into a slot of its size.

        False, and anything in ``into``, when the location does not hold this block whole: it was
        dropped, or the record is torn, cut off, corrupt, another block's or of another size.
        """
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
        """All complete records, oldest first, for the rebuild: only headers are read, ``read``
        judges the rest."""
        for segment in list(self._segments.values()):
            for entry in segment.entries():
                segment.locations.add(entry.location)
                yield entry

    def drop_oldest_segment(self) -> list[int]:
        """Delete the oldest segment; which of the locations that ``write`` and ``entries`` told are
        no more. With no segment left it does nothing, and ``used_bytes`` is 0."""
        with self._lock:
            if not self._segments:
                return []
            segment = self._segments.pop(min(self._segments))
            if segment is self._active:
                self._active = None
            segment.path.unlink(missing_ok=True)
            return sorted(segment.locations)

    def close(self) -> None:
        """Sync, and let another process use the folder. No call may follow."""
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
        """The segment to append to: the active one, or a new one when it is full."""
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
    """In ascending order; what has another name, such as a copy of a segment, is none."""
    names = (_SEGMENT_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(name[1]) for name in names if name)


def _offset(location: int) -> int:
    return (location & 0xFFFFFFFF) * PAGE


def _check_buffer(buffer: NDArray[np.uint8]) -> None:
    if buffer.nbytes % PAGE or buffer.ctypes.data % PAGE:
        raise ValueError("the buffer is not whole, aligned pages")


def _claim(folder: Path) -> int:
    """Open, lock and check the format file, made when the folder is new; its descriptor."""
    path = folder / "format"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = not {file.name for file in folder.iterdir()} - {"format", "lost+found"}
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
    """O_DIRECT if the filesystem of ``path``, a file of a page, can read with it, else 0."""
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
