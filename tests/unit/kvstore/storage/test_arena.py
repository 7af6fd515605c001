"""The arena's slots never overlap, look alike in all processes and outlive the store's death."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loomserve.kvstore.storage.arena import Arena, ArenaOwner
from loomserve.kvstore.storage.checksum import PAGE, BlockHeader, BlockLayout, seed
from loomserve.platform.base.errors import StartError
from tests.unit.kvstore.sealing import is_whole, seal_layer

EXTENT = 16 * PAGE
SPAWN = multiprocessing.get_context("spawn")


def header(number: int, parent: int = 0, depth: int = 0) -> BlockHeader:
    return BlockHeader(
        b"n" * 16, number.to_bytes(16, "little"), parent.to_bytes(16, "little"), depth
    )


def arena_of(folder: Path, extents: int) -> ArenaOwner:
    return ArenaOwner.create(folder / "arena", extents * EXTENT, EXTENT)


def use_as_an_engine(path: Path, slot: int, block_seed: int, pipe: Connection) -> None:
    layout = BlockLayout(3, 1000)
    view = Arena.attach(path).view(slot, layout.slot_bytes)
    pipe.send(layout.check(view, block_seed))
    layout.pieces(view)[1][:] = 7
    seal_layer(layout, view, 1, block_seed)
    pipe.send("written")


def own_and_wait(path: Path, pipe: Connection) -> None:
    owner = ArenaOwner.create(path, 2 * EXTENT, EXTENT)
    published, _ = owner.allocate(PAGE, 2)
    owner.view(published, PAGE)[:] = 9
    owner.publish(published, header(5, parent=4, depth=1))
    pipe.send(published)
    signal.pause()


def test_two_processes_see_the_same_bytes(tmp_path: Path) -> None:
    layout, block_seed = BlockLayout(3, 1000), seed(b"n" * 16, b"k" * 16)
    owner = arena_of(tmp_path, 3)
    slot = owner.allocate(layout.slot_bytes, 40)[-1]
    view = owner.view(slot, layout.slot_bytes)
    for layer in range(3):
        layout.pieces(view)[layer][:] = layer + 1
        seal_layer(layout, view, layer, block_seed)
    here, there = SPAWN.Pipe()
    child = SPAWN.Process(
        target=use_as_an_engine, args=(tmp_path / "arena", slot, block_seed, there)
    )
    child.start()
    assert here.recv() is True
    assert here.recv() == "written"
    child.join()
    assert layout.pieces(view)[1].tolist() == [7] * 1000
    assert layout.check(view, block_seed)


def test_a_killed_owners_published_slots_are_taken_over_and_no_others(tmp_path: Path) -> None:
    here, there = SPAWN.Pipe()
    child = SPAWN.Process(target=own_and_wait, args=(tmp_path / "arena", there))
    child.start()
    slot = here.recv()
    with pytest.raises(StartError, match="belongs to a store that runs"):
        ArenaOwner.reopen(tmp_path / "arena")
    with pytest.raises(StartError, match="belongs to a store that runs"):
        arena_of(tmp_path, 1)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    owner = ArenaOwner.reopen(tmp_path / "arena")
    assert list(owner.headers()) == [(slot, header(5, parent=4, depth=1))]
    assert owner.view(slot, PAGE).tolist() == [9] * PAGE
    assert owner.usage()[PAGE].allocated == 1
    everything = owner.allocate(PAGE, 1000)
    assert slot not in everything
    assert len(everything) == 2 * 15 - 1


def test_an_extent_serves_another_size_once_all_its_slots_are_free(tmp_path: Path) -> None:
    owner = arena_of(tmp_path, 2)
    small = owner.allocate(PAGE, 100)
    assert len(small) == 2 * 15
    assert owner.allocate(3 * PAGE, 1) == []
    first, second = owner.slots_by_extent(PAGE)
    owner.free(first[1:])
    assert owner.allocate(3 * PAGE, 1) == []
    owner.free(first[:1])
    assert set(owner.usage()) == {PAGE}
    assert owner.usage()[PAGE].extents == 1
    large = owner.allocate(3 * PAGE, 100)
    assert len(large) == 5
    assert owner.slot_bytes(large[0]) == 3 * PAGE
    assert {size: tuple(usage) for size, usage in owner.usage().items()} == {
        PAGE: (1, 15, 15),
        3 * PAGE: (1, 5, 5),
    }
    assert owner.slots_by_extent(PAGE) == [second]


def test_slots_of_one_call_lie_in_a_row(tmp_path: Path) -> None:
    slots = arena_of(tmp_path, 2).allocate(2 * PAGE, 7)
    assert slots == list(range(slots[0], slots[0] + 14, 2))


def test_what_is_not_allocated_cannot_be_freed_or_published(tmp_path: Path) -> None:
    owner = arena_of(tmp_path, 2)
    slot, other = owner.allocate(2 * PAGE, 2)
    owner.free([other])
    for wrong in (other, slot + 1, 1000, -1):
        with pytest.raises(ValueError, match="not allocated"):
            owner.free([wrong])
        with pytest.raises(ValueError, match="not allocated"):
            owner.publish(wrong, header(1))
    assert owner.usage()[2 * PAGE].allocated == 1


@pytest.mark.parametrize("slot_bytes", [0, 100, -PAGE, EXTENT])
def test_a_slot_that_no_extent_can_hold_is_refused(tmp_path: Path, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        arena_of(tmp_path, 1).allocate(slot_bytes, 1)


def test_torn_and_moved_headers_and_retracted_slots_are_empty_after_reopening(
    tmp_path: Path,
) -> None:
    owner = arena_of(tmp_path, 2)
    kept, torn, retracted, moved = owner.allocate(PAGE, 4)
    for slot in (kept, torn, retracted):
        owner.publish(slot, header(slot))
    owner.retract(retracted)
    owner.close()
    data = bytearray((tmp_path / "arena").read_bytes())
    table = 2 * PAGE
    data[table + 64 + 20] ^= 1
    data[table + 3 * 64 : table + 4 * 64] = data[table : table + 64]
    # In place: the old mapping must not lose its pages.
    with (tmp_path / "arena").open("r+b") as file:
        file.write(data)
    again = ArenaOwner.reopen(tmp_path / "arena")
    assert list(again.headers()) == [(kept, header(kept))]
    assert {torn, retracted, moved} <= set(again.allocate(PAGE, 14))


def test_bytes_of_a_former_slot_are_no_header_of_its_successor(tmp_path: Path) -> None:
    owner = arena_of(tmp_path, 1)
    (slot,) = owner.allocate(PAGE, 1)
    owner.publish(slot, header(1))
    forged = np.fromfile(tmp_path / "arena", np.uint8)[2 * PAGE :][:64]
    owner.free([slot])
    owner._data[:64] = forged
    assert owner.allocate(PAGE, 1) == [slot]
    assert list(owner.headers()) == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from([1, 2, 3, 7]), st.integers(1, 40)), max_size=30
    )
)
def test_slots_never_overlap_each_other_or_the_headers(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bool, int, int]]
) -> None:
    path = tmp_path_factory.mktemp("arena") / "arena"
    owner = ArenaOwner.create(path, 4 * EXTENT, EXTENT)
    held: dict[int, int] = {}
    stamp = 0
    stamps: dict[int, int] = {}
    for takes, pages, count in steps:
        if takes:
            slots = owner.allocate(pages * PAGE, count)
            assert len(slots) <= count
            for slot in slots:
                assert slot not in held
                stamp += 1
                held[slot], stamps[slot] = pages * PAGE, stamp
                owner.publish(slot, header(stamp))
                view = owner.view(slot, pages * PAGE)
                assert view.nbytes == pages * PAGE
                view.view("<u4")[:] = stamp
        else:
            slots = sorted(held)[:: pages + 1][:count]
            owner.free(slots)
            for slot in slots:
                del held[slot], stamps[slot]
        for slot, size in held.items():
            assert (owner.view(slot, size).view("<u4") == stamps[slot]).all()
    expected = {slot: header(stamps[slot]) for slot in held}
    assert dict(owner.headers()) == expected
    owner.close()
    again = ArenaOwner.reopen(path)
    assert dict(again.headers()) == expected
    assert {slot: again.slot_bytes(slot) for slot in held} == held
    again.free(list(held))
    assert again.usage() == {}
    assert len(again.allocate(PAGE * 15, 100)) == 4


def test_too_little_space_is_said_before_any_is_taken(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="make the arena smaller"):
        ArenaOwner.create(tmp_path / "arena", 1 << 60, 1 << 30)
    assert list(tmp_path.iterdir()) == []


def test_space_that_runs_out_while_it_is_reserved_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StartError, match="No space left"):
        arena_of(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_backed_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    owner = arena_of(tmp_path, 4)
    stat = (tmp_path / "arena").stat()
    assert stat.st_blocks * 512 >= stat.st_size == owner.nbytes
    assert stat.st_mode & 0o777 == 0o600
    assert owner.base_address % PAGE == 0
    assert owner.view(0, PAGE).ctypes.data == owner.base_address + 2 * PAGE


def test_a_replaced_arena_stays_whole_for_those_who_mapped_it(tmp_path: Path) -> None:
    owner = arena_of(tmp_path, 1)
    (slot,) = owner.allocate(PAGE, 1)
    owner.view(slot, PAGE)[:] = 3
    engine = Arena.attach(tmp_path / "arena")
    owner.close()
    arena_of(tmp_path, 2)
    assert engine.view(slot, PAGE).tolist() == [3] * PAGE
    assert Arena.attach(tmp_path / "arena").capacity_bytes == 2 * EXTENT


def test_files_that_are_no_arena_are_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    with pytest.raises(StartError, match="No such file"):
        Arena.attach(path)
    path.write_bytes(b"letters" * 1000)
    for use in (Arena.attach, ArenaOwner.reopen, lambda path: arena_of(path.parent, 1)):
        with pytest.raises(StartError, match="no KV arena"):
            use(path)
    assert path.read_bytes() == b"letters" * 1000


def test_another_versions_or_a_cut_arena_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena_of(tmp_path, 2).close()
    os.truncate(tmp_path / "arena", 2 * EXTENT)
    with pytest.raises(StartError, match="cut short"):
        Arena.attach(tmp_path / "arena")
    arena_of(tmp_path, 2).close()
    monkeypatch.setattr("loomserve.kvstore.storage.arena.VERSION", 2)
    with pytest.raises(StartError, match="has format 1, this Loomserve reads 2"):
        ArenaOwner.reopen(tmp_path / "arena")
    arena_of(tmp_path, 2)


def test_the_layout_of_a_block() -> None:
    layout = BlockLayout(30, 49_152)
    assert layout.block_bytes == 1_474_560
    assert layout.slot_bytes == 1_474_560 + PAGE
    assert BlockLayout(1, 3).slot_bytes == PAGE
    assert BlockLayout(1, PAGE - 8).slot_bytes == PAGE
    assert BlockLayout(1, PAGE - 7).slot_bytes == 2 * PAGE


@given(st.integers(1, 5), st.integers(1, 300), st.data())
def test_every_changed_byte_of_a_layer_is_noticed(
    layers: int, layer_bytes: int, data: st.DataObject
) -> None:
    layout, block_seed = BlockLayout(layers, layer_bytes), seed(b"n" * 16, b"k" * 16)
    view = np.zeros(layout.slot_bytes, np.uint8)
    assert not layout.check(view, block_seed)
    for layer in range(layers):
        layout.pieces(view)[layer][:] = data.draw(st.integers(0, 255))
        seal_layer(layout, view, layer, block_seed)
    assert layout.check(view, block_seed)
    assert not layout.check(view, seed(b"n" * 16, b"j" * 16))
    assert not layout.check(view, seed(b"m" * 16, b"k" * 16))
    assert not layout.check(np.append(view, view), block_seed)
    at = data.draw(st.integers(0, layout.block_bytes - 1))
    view[at] ^= data.draw(st.integers(1, 255))
    assert [is_whole(layout, view, layer, block_seed) for layer in range(layers)] == [
        layer != at // layer_bytes for layer in range(layers)
    ]


def test_two_layers_cannot_change_places() -> None:
    layout, block_seed = BlockLayout(2, 8), seed(b"n" * 16, b"k" * 16)
    view = np.zeros(layout.slot_bytes, np.uint8)
    for layer in range(2):
        layout.pieces(view)[layer][:] = layer + 1
        seal_layer(layout, view, layer, block_seed)
    view[:32] = view[[*range(8, 16), *range(8), *range(24, 32), *range(16, 24)]]
    assert not is_whole(layout, view, 0, block_seed)
    assert not is_whole(layout, view, 1, block_seed)
