"""The SSD tier gives back exactly the block that was written, or says that it cannot."""

from __future__ import annotations

import errno
import itertools
import mmap
import multiprocessing
import os
import resource
import shutil
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from loomserve.kvstore.storage.arena import ArenaOwner
from loomserve.kvstore.storage.checksum import PAGE, BlockHeader
from loomserve.kvstore.storage.ssd import SsdFullError, SsdTier
from loomserve.platform.base.errors import StartError

SLOT = 3 * PAGE
RECORD = SLOT + PAGE
SEGMENT = 4 * RECORD
NAMESPACE = b"n" * 16


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def header(number: int) -> BlockHeader:
    return BlockHeader(NAMESPACE, key(number), key(max(number - 1, 0)), number)


def buffer(slot_bytes: int = SLOT) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, slot_bytes), np.uint8)


def slot_of(number: int) -> NDArray[np.uint8]:
    slot = buffer()
    slot[:] = np.random.default_rng(number).integers(0, 256, SLOT, np.uint8)
    return slot


def tier_in(folder: Path, capacity_bytes: int = 100 * SEGMENT) -> SsdTier:
    return SsdTier(folder / "ssd", capacity_bytes, SEGMENT)


def write(tier: SsdTier, numbers: range) -> dict[int, int]:
    """Locations by the block's number."""
    return {number: tier.write(header(number), slot_of(number)) for number in numbers}


def is_read(tier: SsdTier, location: int, number: int) -> bool:
    into = buffer()
    found = tier.read(location, into, NAMESPACE, key(number))
    assert not found or bytes(into) == bytes(slot_of(number))
    return found


def readable(tier: SsdTier, locations: dict[int, int]) -> set[int]:
    return {number for number, at in locations.items() if is_read(tier, at, number)}


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "ssd").glob("segment-*"))


def write_until_killed(folder: Path, pipe: Connection) -> None:
    tier = tier_in(folder)
    for number in itertools.count(1):
        pipe.send((number, tier.write(header(number), slot_of(number))))


def test_what_was_written_is_read_and_nothing_else(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    locations = write(tier, range(1, 11))
    assert readable(tier, locations) == set(range(1, 11))
    assert not is_read(tier, locations[1], 2)
    assert not tier.read(locations[1], buffer(), b"m" * 16, key(1))
    assert not tier.read(locations[1], buffer(SLOT - PAGE), NAMESPACE, key(1))
    assert not tier.read(locations[1], buffer(SLOT + PAGE), NAMESPACE, key(1))
    for location in (0, locations[1] + 1, locations[10] + 4, 99 << 32, -1, 1 << 62):
        assert not is_read(tier, location, 1)
    assert tier.used_bytes == 10 * RECORD


def test_a_block_goes_from_one_arena_to_another(tmp_path: Path) -> None:
    first = ArenaOwner.create(tmp_path / "first", 16 * PAGE, 16 * PAGE)
    second = ArenaOwner.create(tmp_path / "second", 16 * PAGE, 16 * PAGE)
    source = first.view(first.allocate(SLOT, 2)[1], SLOT)
    source[:] = slot_of(1)
    target = second.view(second.allocate(SLOT, 1)[0], SLOT)
    tier = tier_in(tmp_path)
    assert tier.read(tier.write(header(1), source), target, NAMESPACE, key(1))
    assert bytes(target) == bytes(slot_of(1))


def test_slots_of_several_sizes_share_a_segment(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    sizes = [PAGE, 5 * PAGE, 2 * PAGE]
    locations = [tier.write(header(size), buffer(size)) for size in sizes]
    assert [tuple(entry) for entry in tier.entries()] == [
        (location, header(size), size) for location, size in zip(locations, sizes, strict=True)
    ]
    assert len(segments(tmp_path)) == 1


def test_all_records_are_there_after_reopening_and_new_ones_do_not_disturb_them(
    tmp_path: Path,
) -> None:
    tier = tier_in(tmp_path)
    locations = write(tier, range(1, 11))
    tier.close()
    tier = tier_in(tmp_path)
    entries = list(tier.entries())
    assert [entry.location for entry in entries] == list(locations.values())
    assert [entry.header for entry in entries] == [header(number) for number in range(1, 11)]
    locations |= write(tier, range(11, 14))
    assert len(set(locations.values())) == 13
    assert readable(tier, locations) == set(range(1, 14))


def test_without_direct_io_it_reads_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_in(tmp_path)
    locations = write(tier, range(1, 4))
    tier.close()
    really = os.open

    def refuses(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really(path, flags, mode)

    monkeypatch.setattr(os, "open", refuses)
    tier = tier_in(tmp_path)
    locations |= write(tier, range(4, 12))
    assert readable(tier, locations) == set(range(1, 12))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["flip", "zero", "cut"]), st.integers(0, SEGMENT - 1), st.integers(1, 255))
def test_damage_costs_the_blocks_it_touches_and_no_others(
    tmp_path_factory: pytest.TempPathFactory, damage: str, at: int, bits: int
) -> None:
    folder = tmp_path_factory.mktemp("tier")
    tier = tier_in(folder)
    locations = write(tier, range(10))
    path = segments(folder)[1]
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[at] ^= bits
        lost = {4 + at // RECORD}
    elif damage == "zero":
        size = min(bits * 64, SEGMENT - at)
        data[at : at + size] = bytes(size)
        lost = set(range(4 + at // RECORD, 4 + (at + size - 1) // RECORD + 1))
    else:
        del data[at:]
        lost = set(range(4 + at // RECORD, 8))
    path.write_bytes(data)
    # What of a header's page is padding, and what was zero before, may change.
    kept = set(range(10)) - lost
    assert kept <= readable(tier, locations)
    tier.close()
    tier = tier_in(folder)
    assert kept <= readable(tier, locations)
    found = {entry.location: entry.header for entry in tier.entries()}
    assert {locations[number]: header(number) for number in kept}.items() <= found.items()
    assert found.items() <= {at: header(number) for number, at in locations.items()}.items()
    tier.close()


def test_a_changed_byte_of_a_blocks_bytes_or_header_is_a_miss(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    locations = write(tier, range(1, 4))
    data = bytearray(segments(tmp_path)[0].read_bytes())
    data[RECORD + PAGE + 77] ^= 1
    data[2 * RECORD + 3] ^= 1
    segments(tmp_path)[0].write_bytes(data)
    assert readable(tier, locations) == {1}


def test_zeroed_segments_are_all_misses(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    locations = write(tier, range(1, 9))
    segments(tmp_path)[0].write_bytes(bytes(SEGMENT))
    assert readable(tier, locations) == {5, 6, 7, 8}
    tier.close()
    assert {entry.header.depth for entry in tier_in(tmp_path).entries()} == {5, 6, 7, 8}


def test_swapped_segments_and_swapped_records_are_misses(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    locations = write(tier, range(1, 17))
    tier.close()
    first, second, third, _ = segments(tmp_path)
    shutil.move(first, tmp_path / "aside")
    shutil.move(second, first)
    shutil.move(tmp_path / "aside", second)
    data = third.read_bytes()
    third.write_bytes(data[RECORD : 2 * RECORD] + data[:RECORD] + data[2 * RECORD :])
    tier = tier_in(tmp_path)
    assert readable(tier, locations) == {11, 12, 13, 14, 15, 16}
    assert {entry.header.depth for entry in tier.entries()} == {11, 12, 13, 14, 15, 16}


def test_a_segment_deleted_under_a_running_tier_is_read_until_it_is_dropped(
    tmp_path: Path,
) -> None:
    tier = tier_in(tmp_path)
    locations = write(tier, range(1, 9))
    segments(tmp_path)[0].unlink()
    assert readable(tier, locations) == set(range(1, 9))
    assert tier.drop_oldest_segment() == [locations[number] for number in range(1, 5)]
    assert readable(tier, locations) == {5, 6, 7, 8}


def test_what_looks_like_a_segment_and_is_none_is_left_alone(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    locations = write(tier, range(1, 7))
    tier.close()
    folder = tmp_path / "ssd"
    shutil.copy(segments(tmp_path)[0], folder / "segment-0000000001 (copy).kv")
    (folder / "segment-old.kv").write_text("dear")
    (folder / "segment-0000000007.kv").mkdir()
    tier = tier_in(tmp_path)
    assert len(list(tier.entries())) == 6
    locations |= write(tier, range(7, 9))
    assert readable(tier, locations) == set(range(1, 9))
    while tier.used_bytes:
        tier.drop_oldest_segment()
    assert len(segments(tmp_path)) == 3


def test_a_deleted_segment_or_a_disk_that_cannot_read_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_in(tmp_path)
    locations = write(tier, range(1, 9))
    tier.close()
    segments(tmp_path)[0].unlink()
    tier = tier_in(tmp_path)
    assert readable(tier, locations) == {5, 6, 7, 8}

    def fails(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fails)
    assert readable(tier, locations) == set()


def test_dropping_the_oldest_segment_frees_its_space_and_names_its_blocks(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    locations = write(tier, range(1, 7))
    assert tier.drop_oldest_segment() == [locations[number] for number in range(1, 5)]
    assert readable(tier, locations) == {5, 6}
    assert tier.used_bytes == 2 * RECORD
    assert tier.drop_oldest_segment() == [locations[5], locations[6]]
    assert (tier.used_bytes, segments(tmp_path)) == (0, [])
    assert tier.drop_oldest_segment() == []
    later = write(tier, range(7, 9))
    assert not set(later.values()) & set(locations.values())
    assert readable(tier, later) == {7, 8}


def test_after_reopening_a_drop_names_the_blocks_that_the_rebuild_was_told_of(
    tmp_path: Path,
) -> None:
    tier = tier_in(tmp_path)
    locations = write(tier, range(1, 7))
    tier.close()
    tier = tier_in(tmp_path)
    assert len(list(tier.entries())) == 6
    assert tier.drop_oldest_segment() == [locations[number] for number in range(1, 5)]


def test_what_is_dropped_or_closed_is_no_longer_held_open(tmp_path: Path) -> None:
    def held() -> list[str]:
        targets = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        return sorted(Path(at).name for at in targets if at.startswith(str(tmp_path)))

    tier = tier_in(tmp_path)
    write(tier, range(1, 10))
    tier.drop_oldest_segment()
    assert held() == ["format", "segment-0000000002.kv", "segment-0000000003.kv"]
    tier.close()
    assert held() == []


def test_at_its_capacity_it_refuses_until_a_segment_is_dropped(tmp_path: Path) -> None:
    tier = tier_in(tmp_path, capacity_bytes=2 * SEGMENT + PAGE)
    locations = write(tier, range(1, 9))
    with pytest.raises(SsdFullError):
        tier.write(header(9), slot_of(9))
    assert readable(tier, locations) == set(range(1, 9))
    tier.drop_oldest_segment()
    locations |= write(tier, range(9, 13))
    assert readable(tier, locations) == set(range(5, 13))


def test_a_full_disk_refuses_a_block_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_in(tmp_path)
    locations = write(tier, range(1, 3))
    really = os.pwritev

    def cut(fd: int, buffers: list[Any], offset: int) -> int:
        return really(fd, [buffers[0], buffers[1][:PAGE]], offset)

    def full(fd: int, buffers: list[Any], offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for disk in (cut, full):
        monkeypatch.setattr(os, "pwritev", disk)
        with pytest.raises(SsdFullError, match="No space left"):
            tier.write(header(3), slot_of(3))
        assert segments(tmp_path)[0].stat().st_size == tier.used_bytes == 2 * RECORD
    monkeypatch.setattr(os, "pwritev", really)
    locations |= write(tier, range(3, 6))
    assert readable(tier, locations) == {1, 2, 3, 4, 5}
    assert len(list(tier.entries())) == 5


def test_a_block_that_is_too_much_for_a_file_is_refused_and_its_successor_begins_another(
    tmp_path: Path,
) -> None:
    tier = tier_in(tmp_path)
    locations = write(tier, range(1, 3))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The system call writes a part of the third record.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * RECORD + 2 * PAGE, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            tier.write(header(3), slot_of(3))
        assert segments(tmp_path)[0].stat().st_size == tier.used_bytes == 2 * RECORD
        locations |= write(tier, range(3, 5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(segments(tmp_path)) == 2
    assert readable(tier, locations) == {1, 2, 3, 4}
    assert len(list(tier.entries())) == 4


def test_a_failing_disk_is_not_called_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    tier = tier_in(tmp_path)
    monkeypatch.setattr(os, "pwritev", fails)
    with pytest.raises(OSError, match="Input/output error"):
        tier.write(header(1), slot_of(1))


def test_readers_and_a_writer_that_drops_segments_do_not_disturb_each_other(
    tmp_path: Path,
) -> None:
    tier = tier_in(tmp_path, capacity_bytes=3 * SEGMENT)
    locations: dict[int, int] = {}
    dropped: set[int] = set()
    done = threading.Event()
    reads, misses = [], []

    def reader(start: int) -> None:
        generator = np.random.default_rng(start)
        while not done.is_set():
            for number, location in generator.permutation(list(locations.items())).tolist():
                found = is_read(tier, location, number)
                reads.append(number)
                # What is dropped is noted before it is, so that this cannot blame the tier.
                if not found and location not in dropped:
                    misses.append((number, location))

    threads = [threading.Thread(target=reader, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for number in range(1, 120):
        while True:
            try:
                locations[number] = tier.write(header(number), slot_of(number))
                break
            except SsdFullError:
                oldest = min(location >> 32 for location in set(locations.values()) - dropped)
                gone = {at for at in locations.values() if at >> 32 == oldest}
                dropped |= gone
                assert set(tier.drop_oldest_segment()) == gone
    done.set()
    for thread in threads:
        thread.join()
    assert reads
    assert misses == []
    assert readable(tier, locations) >= set(range(112, 120))


def test_a_killed_writer_leaves_all_that_it_wrote(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=write_until_killed, args=(tmp_path, there))
    child.start()
    there.close()
    locations = dict(here.recv() for _ in range(10))
    assert child.pid is not None
    with pytest.raises(StartError, match="another process keeps KV blocks"):
        tier_in(tmp_path)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    while here.poll():
        try:
            locations.update([here.recv()])
        except EOFError:
            break
    tier = tier_in(tmp_path)
    assert readable(tier, locations) == set(locations)
    found = {entry.header.depth: entry.location for entry in tier.entries()}
    assert locations.items() <= found.items()
    assert readable(tier, found) == set(found)


def test_a_record_cut_by_a_kill_is_not_among_the_entries(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    locations = write(tier, range(1, 4))
    tier.close()
    os.truncate(segments(tmp_path)[0], 2 * RECORD + PAGE + 100)
    tier = tier_in(tmp_path)
    assert [entry.location for entry in tier.entries()] == [locations[1], locations[2]]
    locations |= write(tier, range(4, 5))
    assert readable(tier, locations) == {1, 2, 4}


@pytest.mark.parametrize(
    ("format_", "sentence"),
    [
        (b"loomserve-kv-ssd 2\n", "newer Loomserve's"),
        (b"loomserve-kv-ssd two\n", "something else than KV blocks"),
        (b"photographs 1\n", "something else than KV blocks"),
        (None, "something else than KV blocks"),
    ],
)
def test_a_foreign_or_newer_folder_is_refused_and_left_alone(
    tmp_path: Path, format_: bytes | None, sentence: str
) -> None:
    folder = tmp_path / "ssd"
    folder.mkdir()
    (folder / "letter").write_text("dear")
    if format_ is not None:
        (folder / "format").write_bytes(format_)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(StartError, match=sentence):
        tier_in(tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("used", [False, True])
def test_a_folder_that_others_get_into_is_refused_and_left_alone(
    tmp_path: Path, used: bool
) -> None:
    folder = tmp_path / "ssd"
    if used:
        tier_in(tmp_path).close()
    else:
        folder.mkdir()
    folder.chmod(0o750)
    before = [path.name for path in folder.iterdir()]
    with pytest.raises(StartError, match=r"chmod 700 .*, or set kvstore\.ssd_path"):
        tier_in(tmp_path)
    assert [path.name for path in folder.iterdir()] == before
    folder.chmod(0o700)
    tier_in(tmp_path).close()


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ssd").write_text("a file")
    with pytest.raises(StartError, match="cannot keep KV blocks"):
        tier_in(tmp_path)


def test_a_folder_whose_maker_was_killed_at_once_is_taken(tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir(mode=0o700)
    (tmp_path / "ssd/format").touch()
    tier_in(tmp_path).close()
    tier = tier_in(tmp_path)
    assert readable(tier, write(tier, range(1, 3))) == {1, 2}


def test_buffers_that_direct_io_could_not_use_are_refused(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    wide = buffer(2 * SLOT)
    for wrong in (wide[1 : SLOT + 1], wide[: SLOT - 1]):
        with pytest.raises(ValueError, match="aligned pages"):
            tier.write(header(1), wrong)
        with pytest.raises(ValueError, match="aligned pages"):
            tier.read(0, wrong, NAMESPACE, key(1))
    with pytest.raises(ValueError, match="exceeds a segment"):
        tier.write(header(1), buffer(SEGMENT))
