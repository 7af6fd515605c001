"""Arena: a file in shared memory for KV blocks, mapped by the store and all engines of a node.

::

    page 0      superblock: magic, version, extent size and count, checksum
    pages 1..   extent table: the slot size of each extent, u64, 0 while it is in the pool
    then        the extents, each: its slots' headers (64 bytes each, in whole pages), its slots

Slab allocation (Bonwick, "The Slab Allocator", USENIX Summer 1994): an extent serves slots of one
size at a time and returns to the pool when all of them are free, so that models whose blocks differ
in size share the memory. A slot's number is the page, counted over all extents, at which it begins:
the number alone locates its bytes in every process.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from loomserve.kvstore.storage.checksum import (
    HEADER_BYTES,
    PAGE,
    SEAL_BYTES,
    BlockHeader,
    round_up,
    seal,
    unseal,
)
from loomserve.platform.base.errors import StartError
from loomserve.platform.base.files import replacing

MAGIC = b"LoomKVar"
VERSION = 1

_SUPERBLOCK = struct.Struct("<8sQQQ")
_SEALED_BYTES = HEADER_BYTES + SEAL_BYTES


class Arena:
    """Mapping of the arena in a process, which reads and writes the slots that the store names."""

    def __init__(self, path: Path, file: FileIO) -> None:
        """Map an open file; ``StartError`` if it is no arena, of another version, or truncated."""
        extent_bytes, extents = _geometry(path, file)
        self.extent_bytes = extent_bytes
        self._mapping = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        self._data = self._mapping[_data_offset(extents) :]
        self.checked: dict[int, bytes] = {}
        """Sealed headers, by slot, of blocks that this process has checked or written. Where a slot
        still has the same header, they need no other check."""

    @classmethod
    def attach(cls, path: Path) -> Self:
        """Map the arena that the store created at ``path``. It stays mapped as long as the
        ``Arena`` or one of its views lives, even if the store replaces the file meanwhile."""
        with _open(path) as file:
            return cls(path, file)

    @property
    def base_address(self) -> int:
        """Address of the mapping in this process, page-aligned, for ``cudaHostRegister``."""
        return self._mapping.ctypes.data

    @property
    def nbytes(self) -> int:
        return self._mapping.nbytes

    @property
    def capacity_bytes(self) -> int:
        return self._data.nbytes

    def view(self, slot: int, slot_bytes: int) -> NDArray[np.uint8]:
        """View of the slot's bytes, ``[slot_bytes]``, page-aligned."""
        return self._data[slot * PAGE : slot * PAGE + slot_bytes]

    def header(self, slot: int, slot_bytes: int) -> bytes:
        """Sealed header of a slot, as it is now: empty or torn while nothing is published there."""
        number = slot * PAGE // self.extent_bytes
        slots = self._slots(number, slot_bytes)
        return self._header_at(number, (slot - slots.start) // slots.step).tobytes()

    def runs(self, slots: Iterable[int], slot_bytes: int) -> list[memoryview]:
        """Views of the slots' bytes in their order, one for slots that lie one after the other."""
        pages = slot_bytes // PAGE
        bounds: list[list[int]] = []
        for slot in slots:
            if bounds and bounds[-1][1] == slot:
                bounds[-1][1] += pages
            else:
                bounds.append([slot, slot + pages])
        return [self._data[begin * PAGE : end * PAGE].data for begin, end in bounds]

    def _slots(self, number: int, slot_bytes: int) -> range:
        """Slots of this size in extent ``number``; empty if the size is impossible."""
        if slot_bytes <= 0 or slot_bytes % PAGE:
            return range(0)
        count = self.extent_bytes // (slot_bytes + _SEALED_BYTES)
        while round_up(count * _SEALED_BYTES, PAGE) + count * slot_bytes > self.extent_bytes:
            count -= 1
        start = number * self.extent_bytes + round_up(count * _SEALED_BYTES, PAGE)
        first, step = start // PAGE, slot_bytes // PAGE
        return range(first, first + count * step, step)

    def _header_at(self, number: int, index: int) -> NDArray[np.uint8]:
        start = number * self.extent_bytes + index * _SEALED_BYTES
        return self._data[start : start + _SEALED_BYTES]


class ClassUsage(NamedTuple):
    """Extents that serve slots of one size, all slots in them, and the allocated ones."""

    extents: int
    slots: int
    allocated: int


class _Extent:
    """Free and taken slots of an extent that serves slots of one size."""

    def __init__(self, number: int, slots: range, taken: Iterable[int] = ()) -> None:
        self.number = number
        self.slots = slots
        self.slot_bytes = slots.step * PAGE
        self.taken = set(taken)
        # The lowest slot is handed out first, so that a run of blocks lies in a row.
        self.free = [slot for slot in reversed(slots) if slot not in self.taken]

    def take(self, count: int) -> list[int]:
        slots = self.free[-count:][::-1]
        del self.free[-count:]
        self.taken.update(slots)
        return slots

    def give(self, slot: int) -> None:
        self.taken.remove(slot)
        self.free.append(slot)


class ArenaOwner(Arena):
    """Allocator of the arena's slots, and writer of their headers, in the store. For one thread.

    A slot is *allocated* from ``allocate`` to ``free``, and *published* from ``publish`` to
    ``retract`` or ``free``. Published slots survive the store's death, slots that are only
    allocated do not.
    """

    def __init__(self, path: Path, file: FileIO) -> None:
        super().__init__(path, file)
        self._file = file
        extents = self.capacity_bytes // self.extent_bytes
        self._classes = self._mapping[PAGE : PAGE + extents * 8].view("<u8")
        self._pool: list[int] = []
        self._extents: dict[int, _Extent] = {}
        self._with_free: defaultdict[int, dict[int, _Extent]] = defaultdict(dict)
        # Extents into which a writer that was given up may still write.
        self._distrusted: set[int] = set()
        # The lowest extent is handed out first.
        for extent in reversed(range(extents)):
            self._recover(extent)

    @classmethod
    def create(cls, path: Path, capacity_bytes: int, extent_bytes: int) -> Self:
        """Create an arena of as many extents as fit ``capacity_bytes``; the file is a bit larger.

        It replaces an arena at ``path``, which stays mapped in processes that have it mapped.
        Raises StartError if there is too little space, or the file is no arena, or a running
        store's; ValueError if an extent is not whole pages, or exceeds the capacity.
        """
        extents = capacity_bytes // extent_bytes
        if extent_bytes % PAGE or not extents:
            raise ValueError(
                f"extents of {extent_bytes} bytes are not whole pages or exceed the arena's "
                f"{capacity_bytes} bytes"
            )
        if path.exists():
            with _open(path) as old:
                _claim(path, old)
                _superblock(path, old)
                path.unlink()
        # Nobody may attach to what is not complete.
        with ExitStack() as failed:
            with replacing(path, alone=True) as new:
                file = failed.enter_context(FileIO(new, "x+", opener=_private))
                _claim(path, file)
                _reserve(path, file, _data_offset(extents) + extents * extent_bytes)
                superblock = _SUPERBLOCK.pack(MAGIC, VERSION, extent_bytes, extents)
                os.pwrite(file.fileno(), seal(superblock, 0), 0)
                arena = cls(path, file)
            failed.pop_all()
        return arena

    @classmethod
    def reopen(cls, path: Path) -> Self:
        """Take over the arena of a store that died: published slots stay allocated, others do not.

        Nobody knows who still writes to those others.

        Raises ``StartError`` if there is none, its owner lives, or it is of another version.
        """
        with ExitStack() as failed:
            file = failed.enter_context(_open(path))
            _claim(path, file)
            arena = cls(path, file)
            arena._distrusted.update(range(arena.capacity_bytes // arena.extent_bytes))
            failed.pop_all()
        return arena

    def close(self) -> None:
        """Let another owner take over. The mapping ends with its last view."""
        # The mapping holds a duplicate of the descriptor, and with it the lock.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()

    def allocate(self, slot_bytes: int, count: int) -> list[int]:
        """Allocate ``count`` slots of ``slot_bytes``, or fewer if neither free slots of that size
        nor extents of the pool are left. ``ValueError`` if no extent can hold such a slot."""
        slots: list[int] = []
        with_free = self._with_free[slot_bytes]
        while len(slots) < count and (with_free or self._assign(slot_bytes)):
            extent = next(iter(with_free.values()))
            slots += extent.take(count - len(slots))
            if not extent.free:
                del with_free[extent.number]
        return slots

    def free(self, slots: Iterable[int]) -> None:
        """Retract and free the slots; ``ValueError`` if one is not allocated."""
        for slot in slots:
            self.retract(slot)
            extent = self._extent(slot)
            extent.give(slot)
            with_free = self._with_free[extent.slot_bytes]
            with_free[extent.number] = extent
            if not extent.taken:
                del with_free[extent.number], self._extents[extent.number]
                self._classes[extent.number] = 0
                self._pool.append(extent.number)

    def distrust(self, slots: Iterable[int]) -> None:
        """Have readers check whatever comes where these slots are, each time: their writer may not
        have ended."""
        self._distrusted.update(slot * PAGE // self.extent_bytes for slot in slots)

    def publish(self, slot: int, header: BlockHeader, generation: int = 0) -> None:
        """Record that the slot holds this whole block; ``ValueError`` if it is not allocated. No
        other block of the slot has the same ``generation``, but 0: readers check that each time."""
        record = self._header(slot)
        if slot * PAGE // self.extent_bytes in self._distrusted:
            generation = 0
        record[:] = np.frombuffer(seal(header.packed(generation), slot), np.uint8)

    def retract(self, slot: int) -> None:
        """Record that the slot holds no block, before its bytes change or when they proved bad; it
        stays allocated. ``ValueError`` if it is not allocated."""
        self._header(slot)[:] = 0

    def headers(self) -> Iterator[tuple[int, BlockHeader]]:
        """Published slots and their blocks. A slot with a torn or corrupt header does not count."""
        for extent in self._extents.values():
            for slot in extent.taken:
                body = unseal(self._header(slot).tobytes(), slot)
                if body is not None:
                    yield slot, BlockHeader.unpacked(body)

    def slot_bytes(self, slot: int) -> int:
        return self._extent(slot).slot_bytes

    @property
    def used_bytes(self) -> int:
        return sum(size * of.allocated for size, of in self.usage().items())

    def usage(self) -> dict[int, ClassUsage]:
        """Usage of the extents that are not in the pool, by the size of their slots."""
        usage: dict[int, ClassUsage] = {}
        for extent in self._extents.values():
            so_far = usage.get(extent.slot_bytes, ClassUsage(0, 0, 0))
            usage[extent.slot_bytes] = ClassUsage(
                so_far.extents + 1,
                so_far.slots + len(extent.slots),
                so_far.allocated + len(extent.taken),
            )
        return usage

    def slots_by_extent(self, slot_bytes: int) -> list[list[int]]:
        """Allocated slots of each extent that serves this size, by extent."""
        return [
            sorted(extent.taken)
            for extent in self._extents.values()
            if extent.slot_bytes == slot_bytes
        ]

    def _recover(self, number: int) -> None:
        """Take over an extent with the slot size in the table and the slots published in it."""
        slots = self._slots(number, int(self._classes[number]))
        published = [
            slot
            for index, slot in enumerate(slots)
            if unseal(self._header_at(number, index).tobytes(), slot) is not None
        ]
        if not published:
            self._classes[number] = 0
            self._pool.append(number)
            return
        extent = self._extents[number] = _Extent(number, slots, published)
        if extent.free:
            self._with_free[extent.slot_bytes][number] = extent

    def _assign(self, slot_bytes: int) -> bool:
        """Assign an extent of the pool to this slot size; False if the pool is empty."""
        slots = self._slots(0, slot_bytes)
        if not slots:
            raise ValueError(
                f"a slot of {slot_bytes} bytes is not whole pages or does not fit an extent of "
                f"{self.extent_bytes} bytes"
            )
        if not self._pool:
            return False
        number = self._pool.pop()
        slots = self._slots(number, slot_bytes)
        # Bytes of former slots lie where the headers come; only then may a rebuild see the class.
        start = number * self.extent_bytes
        self._data[start : slots[0] * PAGE] = 0
        self._classes[number] = slot_bytes
        extent = self._extents[number] = _Extent(number, slots)
        self._with_free[slot_bytes][number] = extent
        return True

    def _extent(self, slot: int) -> _Extent:
        extent = self._extents.get(slot * PAGE // self.extent_bytes)
        if extent is None or slot not in extent.taken:
            raise ValueError(f"slot {slot} is not allocated")
        return extent

    def _header(self, slot: int) -> NDArray[np.uint8]:
        extent = self._extent(slot)
        return self._header_at(extent.number, extent.slots.index(slot))


def _data_offset(extents: int) -> int:
    return PAGE + round_up(extents * 8, PAGE)


def _private(path: str, flags: int) -> int:
    """Open for this user alone: the blocks are computed from users' prompts."""
    return os.open(path, flags, 0o600)


def _open(path: Path) -> FileIO:
    try:
        return FileIO(path, "r+")
    except OSError as error:
        raise StartError(f"cannot open the KV arena {path}: {error.strerror}") from error


def _claim(path: Path, file: FileIO) -> None:
    """Lock the file for this owner, until it is closed or the process ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StartError(f"the KV arena {path} belongs to a store that runs: stop it") from error


def _reserve(path: Path, file: FileIO, size: int) -> None:
    """Back the file with memory now: writing to a page that is not available would be a SIGBUS."""
    free = shutil.disk_usage(path.parent).free
    try:
        # Else the attempt would take all that is left, if only for a moment.
        if size > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        raise StartError(
            f"the KV arena {path} needs {size} bytes, of which {path.parent} has {free} free "
            f"({error.strerror}): make the arena smaller or {path.parent} larger"
        ) from error


def _superblock(path: Path, file: FileIO) -> tuple[int, int, int]:
    """Read version, extent size and extent count of an arena file."""
    body = unseal(os.pread(file.fileno(), _SUPERBLOCK.size + SEAL_BYTES, 0), 0)
    if body is None or not body.startswith(MAGIC):
        raise StartError(f"{path} is no KV arena: remove it or name another path")
    _, version, extent_bytes, extents = _SUPERBLOCK.unpack(body)
    return version, extent_bytes, extents


def _geometry(path: Path, file: FileIO) -> tuple[int, int]:
    """Read extent size and count, and check that the file can be mapped."""
    version, extent_bytes, extents = _superblock(path, file)
    if version != VERSION:
        raise StartError(
            f"the KV arena {path} has format {version}, this Loomserve reads {VERSION}: remove it"
        )
    if os.fstat(file.fileno()).st_size != _data_offset(extents) + extents * extent_bytes:
        raise StartError(f"the KV arena {path} was cut short: remove it")
    return extent_bytes, extents
