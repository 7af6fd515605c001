"""The store loses no slot, shares nothing that differs, and never shows a block's wrong bytes."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from loomserve.kvstore.index.eviction import lru
from loomserve.kvstore.index.index import Index
from loomserve.kvstore.index.radix import KEY_BYTES, RadixNode
from loomserve.kvstore.server.protocol import (
    WRITE_S,
    Abandon,
    Commit,
    Done,
    Flush,
    Found,
    Inspect,
    Lookup,
    Outdated,
    Pin,
    Release,
    Reply,
    Request,
    Reserve,
    Reserved,
    StoreUsage,
    decode_slots,
)
from loomserve.kvstore.server.store import BlockStore
from loomserve.kvstore.storage.arena import Arena, ArenaOwner
from loomserve.kvstore.storage.checksum import PAGE, BlockLayout, seed
from loomserve.kvstore.storage.ssd import SsdTier
from loomserve.kvstore.wire import Corrupt, Refused
from loomserve.platform.state.kvstore import KvState
from tests.unit.kvstore.index.invariants import check_index
from tests.unit.kvstore.sealing import seal_layer

P = ParamSpec("P")
T = TypeVar("T")

# Seven slots of two pages fill an extent, or five of three.
EXTENT = 16 * PAGE
SMALL, LARGE = BlockLayout(2, 3000), BlockLayout(3, 4000)
SMALL_RECORD = SMALL.slot_bytes + PAGE
ONE, OTHER = b"1" * 16, b"2" * 16
LAYOUTS = {ONE: SMALL, OTHER: LARGE}
MODELS = {ONE: "one", OTHER: "other"}
LEASE_S = 10.0


class Jobs(Executor):
    """Runs what it is given only when it is told to, in the order it is told."""

    def __init__(self) -> None:
        self._jobs: list[Callable[[], None]] = []

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        self._jobs.append(job)
        return future

    def __len__(self) -> int:
        return len(self._jobs)

    def run(self, at: int = 0) -> None:
        self._jobs.pop(at)()


def chain(tokens: str) -> bytes:
    """One block a letter; a key depends on all letters up to it, as vLLM's do."""
    keys = (hashlib.sha256(tokens[:end].encode()).digest() for end in range(1, len(tokens) + 1))
    return b"".join(key[:KEY_BYTES] for key in keys)


def letters(first: str, blocks: int) -> str:
    """A chain of so many blocks that shares none with those of another first letter."""
    return first + "." * (blocks - 1)


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """This process's writes beyond so many bytes of a file fail, in the system call."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def keys_of(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


@lru_cache(maxsize=4096)
def content(namespace: bytes, key: bytes, layout: BlockLayout) -> bytes:
    """The bytes of a block, other ones for each."""
    return hashlib.shake_128(namespace + key).digest(layout.block_bytes)


@dataclass
class Home:
    """A store in a folder, and engines that use it."""

    folder: Path
    extents: int = 4
    ssd_bytes: int = 0
    segment_bytes: int = 4 * SMALL_RECORD
    quotas: Mapping[str, int] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self._open(ArenaOwner.create(self.folder / "arena", self.extents * EXTENT, EXTENT))

    def _open(self, arena: ArenaOwner) -> None:
        self.arena = arena
        self.engine = Arena.attach(self.folder / "arena")
        self.index = Index(lru)
        self.ssd = (
            SsdTier(self.folder / "ssd", self.ssd_bytes, self.segment_bytes)
            if self.ssd_bytes
            else None
        )
        self.readers, self.writer = Jobs(), Jobs()
        self.store = BlockStore(
            *(arena, self.index, self.ssd, self.folder / "spaces.json", self.quotas),
            readers=self.readers,
            ssd_writer=self.writer,
        )
        self.store.recover(self.now)

    def crash_and_recover(self) -> None:
        """As after a SIGKILL: what threads had not done by then is never done."""
        self.arena.close()
        if self.ssd is not None:
            self.ssd.close()
        self._open(ArenaOwner.reopen(self.folder / "arena"))

    def ask(self, request: Request, expected: type[T]) -> T:
        reply: Reply = self.store.answer(request, self.now)
        assert isinstance(reply, expected), reply
        return reply

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.store.tick(self.now)

    def settle(self) -> None:
        """Let the threads do all that there is to do."""
        for _ in range(200):
            self.pass_time(1)
            if not (self.readers or self.writer):
                return
            for jobs in (self.readers, self.writer):
                while jobs:
                    jobs.run()
        raise AssertionError("the store copies without end")

    def read_all(self) -> None:
        while self.readers:
            self.readers.run()

    # Engines.

    def reserve(
        self,
        keys: bytes,
        namespace: bytes = ONE,
        layout: BlockLayout = SMALL,
        model: str = "model",
    ) -> Reserved:
        return self.ask(
            Reserve(namespace, keys, model, layout.layers, layout.layer_bytes), Reserved
        )

    def write(
        self,
        room: Reserved,
        keys: bytes,
        namespace: bytes = ONE,
        layout: BlockLayout = SMALL,
    ) -> None:
        for key, slot in zip(keys_of(keys)[room.first :], decode_slots(room.slots), strict=False):
            view = self.engine.view(slot, layout.slot_bytes)
            view[: layout.block_bytes] = np.frombuffer(content(namespace, key, layout), np.uint8)
            for layer in range(layout.layers):
                seal_layer(layout, view, layer, seed(namespace, key))

    def save(
        self,
        tokens: str,
        namespace: bytes = ONE,
        layout: BlockLayout = SMALL,
        model: str = "model",
        recompute_s: float = 0.03,
    ) -> int:
        """How many blocks the store took."""
        keys = chain(tokens)
        room = self.reserve(keys, namespace, layout, model)
        if not room.writer:
            return 0
        self.write(room, keys, namespace, layout)
        return self.ask(Commit(room.writer, recompute_s), Done).blocks

    def look(
        self, tokens: str, namespace: bytes = ONE, *, skip: int = 0, promote: bool = False
    ) -> Found:
        return self.ask(Lookup(namespace, chain(tokens), skip, LEASE_S, promote), Found)

    def is_whole(self, slot: int, key: bytes, namespace: bytes, layout: BlockLayout) -> bool:
        """What a reader finds out; what it takes for the block must be the block."""
        view = self.engine.view(slot, layout.slot_bytes)
        whole = layout.check(view, seed(namespace, key))
        if whole:
            assert view[: layout.block_bytes].tobytes() == content(namespace, key, layout)
        return whole

    def read(
        self,
        tokens: str,
        namespace: bytes = ONE,
        layout: BlockLayout = SMALL,
        *,
        promote: bool = False,
    ) -> int:
        """How many blocks are found, each with its own bytes."""
        found = self.look(tokens, namespace, promote=promote)
        slots = decode_slots(found.slots)
        assert len(slots) == found.in_memory
        for key, slot in zip(keys_of(chain(tokens)), slots, strict=False):
            assert self.is_whole(slot, key, namespace, layout)
        self.ask(Release([found.lease]), Done)
        return len(slots)

    def report_what_is_bad(self, tokens: str, namespace: bytes, layout: BlockLayout) -> None:
        """As a reader does, until nothing is bad."""
        while True:
            found = self.look(tokens, namespace)
            self.ask(Release([found.lease]), Done)
            keys = keys_of(chain(tokens))
            slots = decode_slots(found.slots)
            whole = [
                self.is_whole(slot, key, namespace, layout)
                for key, slot in zip(keys, slots, strict=False)
            ]
            if all(whole):
                return
            self.ask(Corrupt(namespace, b"".join(keys[: whole.index(False) + 1])), Done)

    def allocated(self) -> int:
        return sum(usage.allocated for usage in self.arena.usage().values())

    def slot_of(self, tokens: str, namespace: bytes = ONE) -> int:
        found = self.look(tokens, namespace)
        self.ask(Release([found.lease]), Done)
        assert found.in_memory == len(tokens)
        return decode_slots(found.slots)[-1]

    def damage(self, slot: int) -> None:
        self.engine.view(slot, SMALL.slot_bytes)[100] ^= 255

    def usage(self) -> KvState:
        return self.ask(Inspect(), StoreUsage).state

    def segments(self) -> list[Path]:
        return sorted((self.folder / "ssd").glob("segment-*"))

    def check_slots(self) -> None:
        """Every slot is the index's, a writer's or a promotion's, and all that are, are."""
        check_index(self.index)
        held = [
            slot for reserved in self.store.memory._reserved.values() for slot in reserved.slots
        ]
        held += [slot for node in self.nodes() for slot in node.slots]
        arena = [
            slot
            for size in self.arena.usage()
            for slots in self.arena.slots_by_extent(size)
            for slot in slots
        ]
        assert sorted(held) == sorted(arena)

    def nodes(self) -> set[RadixNode]:
        """Of the trees, and what leases keep of removed ones."""
        nodes = {node for last in self.index.leases.lasts() for node in last.path()}
        for known in self.index._namespaces.values():
            nodes.update(known.tree.nodes())
        return nodes


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture
def small(tmp_path: Path) -> Home:
    """Room for seven blocks."""
    return Home(tmp_path, extents=1)


@pytest.fixture
def with_ssd(tmp_path: Path) -> Home:
    """Room for seven blocks in memory and forty on SSD."""
    return Home(tmp_path, extents=1, ssd_bytes=40 * SMALL_RECORD)


# Writers and readers.


def test_what_is_committed_is_found_and_read_byte_for_byte(home: Home) -> None:
    assert home.save("abcd") == 4
    assert home.read("abcdef") == 4
    assert home.read("abx") == 2
    assert home.read("xbcd") == 0
    found = home.look("abcd", skip=3)
    assert decode_slots(found.slots) == [home.slot_of("abcd")]
    assert home.look("abcd", skip=4).lease == 0


def test_blocks_are_not_found_before_they_are_committed(home: Home) -> None:
    keys = chain("abc")
    room = home.reserve(keys)
    home.write(room, keys)
    assert home.look("abc") == Found(0, 0, 0, b"", 0.0)
    home.ask(Commit(room.writer, 0.03), Done)
    assert home.read("abc") == 3


def test_only_what_is_missing_is_to_be_written(home: Home) -> None:
    home.save("ab")
    room = home.reserve(chain("abcd"))
    assert (room.first, len(decode_slots(room.slots))) == (2, 2)
    assert home.reserve(chain("ab")) == Reserved(2, b"", 0)


def test_what_another_is_writing_is_not_written_twice(home: Home) -> None:
    first = home.reserve(chain("abc"))
    assert home.reserve(chain("abc")) == Reserved(3, b"", 0)
    rest = home.reserve(chain("abcde"))
    assert (rest.first, len(decode_slots(rest.slots))) == (3, 2)
    for room in (first, rest):
        home.write(room, chain("abcde"))
        home.ask(Commit(room.writer, 0.03), Done)
    assert home.read("abcde") == 5


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_writers_of_the_same_blocks_leave_one_copy(home: Home, order: tuple[int, int]) -> None:
    keys = chain("abcd")
    gone = home.reserve(chain("ab"))
    tail = home.reserve(keys)
    home.ask(Abandon(gone.writer), Done)
    whole = home.reserve(keys)
    assert (tail.first, whole.first, len(decode_slots(whole.slots))) == (2, 0, 4)
    rooms = [tail, whole]
    for room in rooms:
        home.write(room, keys)
    for at in order:
        home.ask(Commit(rooms[at].writer, 0.03), Done)
    assert home.read("abcd") == 4
    assert home.allocated() == 4
    home.check_slots()


def test_an_abandoned_write_leaves_nothing(home: Home) -> None:
    room = home.reserve(chain("abc"))
    home.ask(Abandon(room.writer), Done)
    assert home.allocated() == 0
    assert home.read("abc") == 0
    home.ask(Commit(room.writer, 0.03), Refused)
    assert home.save("abc") == 3


def test_a_writer_that_dies_gives_its_slots_back_in_time(home: Home) -> None:
    home.save("ab")
    room = home.reserve(chain("abcd"))
    home.pass_time(WRITE_S - 1)
    assert home.allocated() == 4
    home.pass_time(1)
    assert home.allocated() == 2
    home.ask(Commit(room.writer, 0.03), Refused)
    assert home.save("abcd") == 2
    assert home.usage().leases == 0


def test_a_leased_block_keeps_its_slot_however_scarce_memory_is(small: Home) -> None:
    small.save("abcdefg")
    found = small.look("abcdefg")
    assert small.save("x") == 0
    for key, slot in zip(keys_of(chain("abcdefg")), decode_slots(found.slots), strict=True):
        assert small.is_whole(slot, key, ONE, SMALL)
    small.ask(Release([found.lease]), Done)
    assert small.save("x") == 1


def test_a_lease_ends_with_its_process_which_is_stopped_or_not(small: Home) -> None:
    small.save("abcdefg")
    with subprocess.Popen(["sleep", "600"]) as reader:
        asked = Lookup(ONE, chain("abcdefg"), 0, LEASE_S, False, pid=reader.pid)
        assert small.ask(asked, Found).in_memory == 7
        reader.send_signal(signal.SIGSTOP)
        small.pass_time(LEASE_S / 2)
        assert small.save("x") == 0
        reader.kill()
    small.pass_time(0)
    assert small.save("x") == 1
    small.check_slots()


def test_a_process_that_cannot_be_seen_ends_no_lease(small: Home) -> None:
    small.save("abcdefg")
    with subprocess.Popen(["true"]) as elsewhere:
        pass
    asked = Lookup(ONE, chain("abcdefg"), 0, LEASE_S, False, pid=elsewhere.pid)
    assert small.ask(asked, Found).in_memory == 7
    small.pass_time(LEASE_S / 2)
    assert small.save("x") == 0


def test_what_a_reader_is_on_its_way_for_stays_until_its_time_is_up(small: Home) -> None:
    for old in "abcd":
        small.save(old)
    keys = chain("xyz")
    room = small.reserve(keys)
    small.write(room, keys, ONE, SMALL)
    small.ask(Commit(room.writer, 0.03, keep_s=10.0), Done)
    # However often the others are used, they go first.
    small.now += 1
    for old in "abcd":
        small.read(old)
    assert small.save("efgh") == 4
    assert small.read("xyz") == 3
    small.pass_time(10)
    small.save("ijklmno")
    assert small.look("xyz").in_memory < 3


def test_nothing_is_kept_of_what_follows_a_block_that_went_meanwhile(small: Home) -> None:
    small.save("a")
    keys = chain("ab")
    room = small.reserve(keys)
    small.write(room, keys, ONE, SMALL)
    small.damage(small.slot_of("a"))
    small.ask(Corrupt(ONE, chain("a")), Done)
    small.ask(Commit(room.writer, 0.03, keep_s=10.0), Done)
    assert small.look("ab").resident == 0
    small.pass_time(LEASE_S + 1)
    small.check_slots()


def test_only_lookups_that_are_uses_count_for_a_block(small: Home) -> None:
    small.save("a")
    small.save("b")
    small.now += 1
    small.ask(Lookup(ONE, chain("a"), 0, LEASE_S, promote=False, use=False), Found)
    small.pass_time(LEASE_S + 1)
    (usage,) = small.usage().models
    assert (usage.hit_blocks, usage.missed_blocks) == (0, 0)
    small.read("b")
    assert small.save("cdefgh") == 6
    assert small.look("a").in_memory == 0
    assert small.look("b").in_memory == 1


def test_a_late_readers_report_spares_what_is_on_ssd_only(with_ssd: Home) -> None:
    with_ssd.save("abcdefg")
    with_ssd.settle()
    with_ssd.save(letters("x", 7))
    with_ssd.ask(Corrupt(ONE, chain("abc")), Done)
    assert with_ssd.look("abcdefg").resident == 7
    assert with_ssd.usage().corrupt_blocks == 0


def test_a_corrupt_block_does_not_come_back_though_a_crash_finds_it_leased(home: Home) -> None:
    home.save("ab")
    home.look("ab")
    home.damage(home.slot_of("a"))
    home.ask(Corrupt(ONE, chain("a")), Done)
    home.crash_and_recover()
    assert home.read("ab") == 0
    assert home.allocated() == 0


def test_a_leased_blocks_slot_stays_when_the_block_is_removed(small: Home) -> None:
    small.save("abcdefg")
    found = small.look("abcdefg")
    small.damage(decode_slots(found.slots)[0])
    small.ask(Corrupt(ONE, chain("a")), Done)
    assert small.read("abcdefg") == 0
    assert small.save("x") == 0
    small.check_slots()
    small.ask(Release([found.lease]), Done)
    assert small.allocated() == 0


def test_a_reader_that_outlives_its_lease_notices_and_harms_nobody(small: Home) -> None:
    keys = chain("abcdefg")
    small.save("abcdefg")
    found = small.look("abcdefg")
    small.pass_time(LEASE_S)
    assert small.save(letters("x", 7)) == 7
    late = zip(keys_of(keys), decode_slots(found.slots), strict=True)
    assert not any(small.is_whole(slot, key, ONE, SMALL) for key, slot in late)
    # It reports the block, which another has meanwhile saved anew elsewhere.
    small.save("abcdefg")
    assert small.ask(Corrupt(ONE, keys), Done).blocks == 0
    assert small.read("abcdefg") == 7
    assert small.usage().corrupt_blocks == 0


def test_a_corrupt_block_is_forgotten_with_all_behind_it(home: Home) -> None:
    home.save("abcd")
    home.save("abx")
    home.damage(home.slot_of("abc"))
    assert home.ask(Corrupt(ONE, chain("abc")), Done).blocks == 2
    assert (home.read("abcd"), home.read("abx")) == (2, 3)
    assert home.usage().corrupt_blocks == 1
    assert home.save("abcd") == 2
    assert home.read("abcd") == 4


def test_room_for_a_chains_end_does_not_come_from_its_beginning(small: Home) -> None:
    small.save("abcde")
    room = small.reserve(chain("abcdefghij"))
    assert (room.first, len(decode_slots(room.slots))) == (5, 2)
    small.write(room, chain("abcdefghij"))
    # Nor may another take it while the end is being written.
    assert small.save(letters("x", 7)) == 0
    small.ask(Commit(room.writer, 0.03), Done)
    assert small.read("abcdefghij") == 7


def test_a_reply_saved_block_by_block_stays_one_run(home: Home) -> None:
    for end in range(1, 9):
        home.save("abcdefgh"[:end], recompute_s=0.01 * end)
    assert len(home.nodes()) == 1


def test_the_last_block_of_a_reply_takes_the_place_of_those_with_fewer_of_its_tokens(
    home: Home,
) -> None:
    """A letter stands for a block's tokens; a part of b is ``1``, and a greater one ``2``."""
    home.save("a")
    outdated = b""
    for reply in ("a1", "a2", "ab", "ab1", "abc"):
        keys = chain(reply)
        room = home.reserve(keys)
        home.write(room, keys)
        home.ask(Commit(room.writer, 0.03, outdated=outdated), Done)
        assert home.index.match(ONE, keys).in_memory == home.allocated() == len(reply)
        outdated = keys[-KEY_BYTES:] if reply[-1].isdigit() else b""
        home.check_slots()
    assert len(home.nodes()) == 1
    assert home.read("abc") == 3


def test_a_part_of_a_block_goes_with_its_answer_or_with_its_last_reader(home: Home) -> None:
    home.save("ab1")
    found = home.look("ab1")
    assert home.ask(Outdated(ONE, chain("ab1")), Done).blocks == 0
    assert home.read("ab1") == 2
    home.ask(Release([found.lease]), Done)
    assert home.allocated() == 2
    home.save("ab2")
    assert home.ask(Outdated(ONE, chain("ab2")), Done).blocks == 1
    for gone in ("ab2", "x1", ""):
        assert home.ask(Outdated(ONE, chain(gone)), Done).blocks == 0
    assert home.ask(Outdated(OTHER, chain("ab")), Done).blocks == 0
    assert home.read("ab2") == home.allocated() == 2
    home.check_slots()


@pytest.mark.parametrize("outdated", [b"", b"short", chain("x")])
def test_what_is_outdated_and_not_there_makes_no_difference(home: Home, outdated: bytes) -> None:
    home.save("ab")
    keys = chain("abc")
    room = home.reserve(keys)
    home.write(room, keys)
    assert home.ask(Commit(room.writer, 0.03, outdated=outdated), Done).blocks == 1
    assert home.read("abc") == 3


def test_the_least_recently_used_makes_room(small: Home) -> None:
    small.save("abc")
    small.now += 1
    small.save("xyz")
    small.now += 1
    small.read("abc")
    small.now += 1
    assert small.save("123") == 3
    assert (small.read("abc"), small.read("xyz"), small.read("123")) == (3, 1, 3)


# Namespaces, sizes and quotas.


def test_namespaces_with_the_same_keys_share_nothing(home: Home) -> None:
    home.save("abc", ONE)
    assert home.read("abc", OTHER, SMALL) == 0
    home.save("ab", OTHER, LARGE)
    assert (home.read("abc", ONE), home.read("abc", OTHER, LARGE)) == (3, 2)
    home.damage(home.slot_of("a", OTHER))
    home.ask(Corrupt(OTHER, chain("a")), Done)
    assert (home.read("abc", ONE), home.read("abc", OTHER, LARGE)) == (3, 0)


def test_a_namespace_keeps_its_shape_and_a_block_fits_an_extent(home: Home) -> None:
    home.save("a")
    reshaped = home.ask(Reserve(ONE, chain("a"), "model", 4, 1500), Refused)
    assert "blocks of another shape" in reshaped.message
    huge = home.ask(Reserve(OTHER, chain("a"), "model", 1, EXTENT), Refused)
    assert "give the store more memory" in huge.message
    assert "16 bytes each" in home.ask(Lookup(ONE, b"short", 0, 1.0, False), Refused).message
    home.check_slots()


def test_another_block_size_gets_its_share_of_a_full_arena_and_no_more(home: Home) -> None:
    assert home.save(letters("a", 28), ONE) == 28
    home.now += 1
    assert home.save(letters("b", 20), OTHER, LARGE) == 10
    assert home.read(letters("a", 28), ONE) == 14
    home.now += 1
    assert home.save(letters("c", 28), ONE) == 14
    assert home.read(letters("b", 20), OTHER, LARGE) == 10
    home.now += 1
    assert home.save(letters("d", 20), OTHER, LARGE) == 10
    assert home.read(letters("c", 28), ONE) == 14
    home.check_slots()


def test_an_extent_in_use_is_not_taken_from_its_readers_and_writers(home: Home) -> None:
    home.save(letters("a", 14), ONE)
    leased = home.look(letters("a", 14), ONE)
    writing = home.reserve(chain(letters("b", 14)), ONE)
    assert home.save("x", OTHER, LARGE) == 0
    home.ask(Abandon(writing.writer), Done)
    home.ask(Release([leased.lease]), Done)
    assert home.save("x", OTHER, LARGE) == 1


def test_a_quota_bounds_a_model_over_all_its_namespaces(tmp_path: Path) -> None:
    quota = 5 * SMALL.slot_bytes
    home = Home(tmp_path, quotas={"bounded": quota})
    assert home.save("abc", ONE, SMALL, "bounded") == 3
    writing = home.reserve(chain(letters("x", 9)), OTHER, LARGE, "bounded")
    # Its own three are evicted, and three pages a slot go three times into ten pages.
    assert len(decode_slots(writing.slots)) == 3
    assert home.read("abc", ONE) == 0
    assert home.save("abc", ONE, SMALL, "bounded") == 0
    home.ask(Abandon(writing.writer), Done)
    assert home.save(letters("y", 9), ONE, SMALL, "bounded") == 5
    assert home.save(letters("z", 9), b"3" * 16, SMALL, "free") == 9
    assert home.read(letters("y", 9), ONE) == 5


# Operators.


def test_pinned_blocks_stay_until_the_same_chain_is_unpinned(small: Home) -> None:
    small.save("abc")
    assert small.ask(Pin(ONE, chain("abcde"), True), Done).blocks == 3
    small.save("abcde")
    assert small.save(letters("x", 7)) == 4
    assert small.read("abcde") == 3
    small.save("abcde")
    assert small.ask(Pin(ONE, chain("abcde"), False), Done).blocks == 5
    assert small.save(letters("y", 7)) == 7
    assert small.read("abcde") == 0


def test_blocks_pinned_for_two_chains_stay_until_both_are_unpinned(small: Home) -> None:
    small.save("ab")
    for tokens in ("abx", "aby"):
        assert small.ask(Pin(ONE, chain(tokens), True), Done).blocks == 2
    small.ask(Pin(ONE, chain("abx"), False), Done)
    assert small.save(letters("x", 7)) == 5
    small.ask(Pin(ONE, chain("aby"), False), Done)
    assert small.save(letters("y", 7)) == 7


def test_a_flush_spares_what_is_leased_and_other_models(home: Home) -> None:
    home.save("abc", ONE, SMALL, "flushed")
    home.save("xyz", ONE, SMALL, "flushed")
    home.save("abc", OTHER, SMALL, "other")
    lease = home.look("abc", ONE).lease
    assert home.ask(Flush("flushed"), Done).blocks == 3
    assert (home.read("abc"), home.read("xyz"), home.read("abc", OTHER)) == (3, 0, 3)
    home.ask(Release([lease]), Done)
    assert home.ask(Flush(""), Done).blocks == 6
    assert home.allocated() == 0


def test_the_figures_are_those_of_each_model(home: Home) -> None:
    home.save("abc", ONE, SMALL, "one")
    home.save("ab", OTHER, LARGE, "other")
    home.read("abcd", ONE)
    home.reserve(chain("z"))
    usage = home.usage()
    one, other = usage.models
    assert (one.model, one.blocks_in_memory, one.hit_blocks, one.missed_blocks) == ("one", 3, 3, 1)
    assert other.bytes_in_memory == 2 * LARGE.block_bytes
    assert usage.used_bytes == 4 * SMALL.slot_bytes + 2 * LARGE.slot_bytes
    assert (usage.writers, usage.leases, usage.capacity_bytes) == (1, 0, 4 * EXTENT)


# SSD.


def test_what_was_written_behind_outlives_its_eviction_and_comes_back(with_ssd: Home) -> None:
    home = with_ssd
    home.save("abcdefg")
    home.settle()
    assert home.usage().models[0].blocks_on_ssd == 7
    assert home.save(letters("x", 7)) == 7
    found = home.look("abcdefg", promote=False)
    assert (found.in_memory, found.resident, found.ready_s) == (0, 7, 0.0)
    home.settle()
    found = home.look("abcdefg", promote=True)
    assert found.in_memory == 0
    assert found.ready_s > 0
    home.settle()
    assert home.read("abcdefg") == 7
    assert home.look(letters("x", 7)).resident == 7


def test_blocks_on_their_way_from_ssd_are_read_once(with_ssd: Home) -> None:
    home = with_ssd
    home.save("abc")
    home.save("wxyz")
    home.settle()
    home.save(letters("x", 7))
    assert home.look("abc", promote=True).ready_s > 0
    reads = len(home.readers)
    for _ in range(2):
        assert home.look("abc", promote=True).ready_s > 0
    assert len(home.readers) == reads
    home.check_slots()
    home.settle()
    assert home.read("abc") == 3


def test_no_room_in_memory_promises_nothing_from_ssd(with_ssd: Home) -> None:
    home = with_ssd
    home.save("abc")
    home.save("wxyz")
    home.settle()
    home.save(letters("x", 7))
    home.look(letters("x", 7))
    assert home.look("abc", promote=True).ready_s == 0.0
    assert not home.readers


def flip(record: bytearray, other: bytes) -> bytes:
    record[PAGE + 50] ^= 1
    return bytes(record)


def erase(record: bytearray, other: bytes) -> bytes:
    return bytes(len(record))


def swap(record: bytearray, other: bytes) -> bytes:
    return other


@pytest.mark.parametrize("spoil", [flip, erase, swap])
def test_a_spoilt_record_is_a_miss_and_is_forgotten(
    with_ssd: Home, spoil: Callable[[bytearray, bytes], bytes]
) -> None:
    home = with_ssd
    home.save("abcdefg")
    home.settle()
    home.save(letters("x", 7))
    third = home.index.locations(ONE, chain("abc"), 2)[0]
    path = home.folder / "ssd" / f"segment-{third >> 32:010d}.kv"
    records = bytearray(path.read_bytes())
    start = (third & 0xFFFFFFFF) * PAGE
    neighbour = SMALL_RECORD if start == 0 else start - SMALL_RECORD
    other = bytes(records[neighbour : neighbour + SMALL_RECORD])
    end = start + SMALL_RECORD
    records[start:end] = spoil(records[start:end], other)
    path.write_bytes(records)
    home.look("abcdefg", promote=True)
    home.settle()
    assert home.look("abcdefg").resident == home.read("abcdefg") == 2
    assert home.usage().corrupt_blocks == 1
    home.check_slots()
    assert home.save("abcdefg") == 5
    assert home.read("abcdefg") == 7


def test_a_block_that_went_bad_before_it_was_written_behind_does_not_come_back(
    with_ssd: Home,
) -> None:
    home = with_ssd
    home.save("abcdefg")
    home.damage(home.slot_of("abc"))
    home.settle()
    home.save(letters("x", 7))
    home.look("abcdefg", promote=True)
    home.settle()
    assert home.look("abcdefg").resident == home.read("abcdefg") == 2
    assert home.usage().corrupt_blocks == 1


def test_a_truncated_segment_is_a_miss(with_ssd: Home) -> None:
    home = with_ssd
    home.save("abcdefg")
    home.settle()
    home.save(letters("x", 7))
    for path in home.segments():
        os.truncate(path, SMALL_RECORD + 100)
    home.look("abcdefg", promote=True)
    home.settle()
    assert home.look("abcdefg").resident < 7
    assert home.read("abcdefg") == home.look("abcdefg").resident
    home.check_slots()


@pytest.mark.parametrize("crash", [False, True])
def test_exchanged_segments_are_misses(with_ssd: Home, crash: bool) -> None:
    home = with_ssd
    home.save("abcdefg")
    home.settle()
    home.save(letters("x", 7))
    one, other = home.segments()
    bytes_of_one = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(bytes_of_one)
    if crash:
        home.crash_and_recover()
    home.look("abcdefg", promote=True)
    home.settle()
    assert home.look("abcdefg").resident == home.read("abcdefg") == 0
    home.check_slots()
    assert home.save("abcdefg") == 7


def test_segments_deleted_under_a_running_store_are_missed_by_its_successor_only(
    with_ssd: Home,
) -> None:
    home = with_ssd
    home.save("abcdefg")
    home.settle()
    home.save(letters("x", 7))
    for path in home.segments():
        path.unlink()
    home.look("abcdefg", promote=True)
    home.settle()
    assert home.read("abcdefg") == 7
    home.save(letters("y", 7))
    home.settle()
    home.crash_and_recover()
    assert home.look("abcdefg").resident == 0
    home.check_slots()
    assert home.save("abcdefg") == 7


def test_a_folder_deleted_under_a_running_store_costs_its_ssd_alone(with_ssd: Home) -> None:
    home = with_ssd
    shutil.rmtree(home.folder / "ssd")
    home.save("abcdefg")
    home.settle()
    assert home.read("abcdefg") == 7
    assert home.usage().models[0].blocks_on_ssd == 0
    home.check_slots()


def test_a_full_ssd_drops_its_oldest_segment_and_goes_on(tmp_path: Path) -> None:
    home = Home(tmp_path, extents=1, ssd_bytes=12 * SMALL_RECORD)
    for first in "abcdefgh":
        # Many short chains, each a copy of its own.
        for second in "12345":
            home.save(first + second)
            home.settle()
        assert home.ssd is not None
        assert home.ssd.used_bytes <= home.ssd_bytes
        home.check_slots()
    assert len(home.segments()) >= 2
    assert home.look("h5").resident == 2
    assert home.look("a1").resident == 0
    home.look("h2", promote=True)
    home.settle()
    assert home.read("h2") == 2


def test_a_batch_that_finds_the_ssd_full_costs_one_segment(tmp_path: Path) -> None:
    home = Home(tmp_path, extents=2, ssd_bytes=16 * SMALL_RECORD, segment_bytes=2 * SMALL_RECORD)
    for letter in "abcdefghijklmn":
        home.save(letter)
    home.settle()
    assert len(home.segments()) == 7
    # Fourteen more, each a run of its own, of which two fit.
    for letter in "ABCDEFGHIJKLMN":
        home.save(letter)
    home.pass_time(1)
    home.writer.run()
    home.pass_time(0)
    assert len(home.segments()) == 7


class CountedWrites:
    """Blocks that a store's SSD took from its making on."""

    def __init__(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        assert home.ssd is not None
        self.count, write = 0, home.ssd.write

        def counted(*args: Any) -> int:
            location = write(*args)
            self.count += 1
            return location

        monkeypatch.setattr(home.ssd, "write", counted)


def full_memory(folder: Path, ssd_share: float) -> Home:
    """56 blocks in 14 chains, all that memory holds, and an SSD for a share of them."""
    home = Home(folder, extents=8, ssd_bytes=int(ssd_share * 56) * SMALL_RECORD)
    for number in range(14):
        home.save(letters(chr(256 + number), 4))
        home.settle()
    return home


SHARES = (0.04, 0.1, 0.25, 0.5, 0.9, 1.0, 1.1, 1.5, 2.0)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("restarts", [False, True])
def test_at_rest_nothing_is_written(
    share: float, restarts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = full_memory(tmp_path, share)
    if restarts:
        home.crash_and_recover()
    home.settle()
    writes = CountedWrites(home, monkeypatch)
    for _ in range(60):
        home.pass_time(1)
        while home.writer:
            home.writer.run()
    assert writes.count == 0
    usage = home.usage()
    assert (usage.leases, usage.writers) == (0, 0)
    assert usage.models[0].blocks_in_memory == 56
    if not restarts:
        assert int(share * 56) // 2 <= usage.models[0].blocks_on_ssd


@pytest.mark.parametrize("share", SHARES)
def test_what_is_evicted_is_on_ssd_as_long_as_half_of_it_has_room(
    share: float, tmp_path: Path
) -> None:
    home = full_memory(tmp_path, share)
    added = [letters(chr(512 + number), 4) for number in range(40)]
    for tokens in added:
        home.save(tokens)
        home.settle()
        home.check_slots()
    # What was added last is in memory, and before that what left it last.
    found = [home.index.match(ONE, chain(tokens)) for tokens in added]
    gone = [tokens for tokens, match in zip(added, found, strict=True) if match.in_memory < 4]
    kept = sum(match.resident - match.in_memory for match in found)
    # Segments of four blocks are dropped whole.
    assert kept >= min(4 * len(gone), int(share * 56) // 2 - 4)
    if share >= 0.25:
        come_back(home, gone[-1])


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0, 1.5])
def test_hits_alone_do_not_wear_the_ssd_out(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = full_memory(tmp_path, share)
    writes = CountedWrites(home, monkeypatch)
    for turn in range(200):
        home.read(letters(chr(256 + turn % 14), 4))
        home.settle()
    assert writes.count <= 56 * share / 2 + 8


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0, 1.5])
def test_a_full_ssd_takes_a_few_times_what_memory_evicts_and_no_more(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = full_memory(tmp_path, share)
    writes = CountedWrites(home, monkeypatch)
    for turn in range(60):
        home.read(letters(chr(256 + turn % 14), 4))
        home.save(letters(chr(512 + turn), 1))
        home.settle()
    evicted = home.usage().models[0].evicted_blocks
    assert evicted <= writes.count <= 56 * share / 2 + 4 * evicted + 8


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_takes_nothing_is_left_alone_for_a_while(
    with_ssd: Home, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    home = with_ssd
    attempts = 0

    def fail(*_: object) -> int:
        nonlocal attempts
        attempts += 1
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", fail)
        home.save("abcdefg")
        for _ in range(50):
            home.pass_time(0.1)
            while home.writer:
                home.writer.run()
    assert attempts == 1
    assert home.read("abcdefg") == 7
    home.check_slots()
    home.pass_time(60)
    home.settle()
    assert home.usage().models[0].blocks_on_ssd == 7


def fill_a_small_disk(folder: Path) -> None:
    """On a filesystem of 1 MiB, which this store thinks to be larger."""
    home = Home(folder, extents=1, ssd_bytes=2**30, segment_bytes=8 * SMALL_RECORD)
    chains = [letters(chr(256 + number), 7) for number in range(40)]
    for tokens in chains[:30]:
        home.save(tokens)
        home.settle()
        home.check_slots()
    assert home.ssd is not None
    assert shutil.disk_usage(folder).free < 8 * SMALL_RECORD
    assert home.look(chains[0]).resident == 0
    come_back(home, chains[28])
    home.crash_and_recover()
    come_back(home, chains[27])
    # Another takes all that is left, and what the store gives up.
    with (folder / "another").open("wb", buffering=0) as another:
        for tokens in chains[30:37]:
            with suppress(OSError):
                while another.write(bytes(2**20)):
                    pass
            home.save(tokens)
            home.settle()
            assert home.read(tokens) == 7
            home.check_slots()
    (folder / "another").unlink()
    home.pass_time(60)
    for tokens in chains[37:]:
        home.save(tokens)
        home.settle()
    come_back(home, chains[37])


def come_back(home: Home, tokens: str) -> None:
    home.look(tokens, promote=True)
    home.settle()
    assert home.read(tokens) == len(tokens)


def mounts(script: str) -> subprocess.CompletedProcess[bytes]:
    """Run a shell script that may mount, for itself alone."""
    root = Path(__file__).parents[4]
    return subprocess.run(["unshare", "-Urm", "sh", "-ec", script], capture_output=True, cwd=root)


@pytest.mark.skipif(
    shutil.which("unshare") is None or mounts("mount -t tmpfs t /mnt").returncode != 0,
    reason="may not mount a small disk",
)
def test_on_a_disk_that_is_really_full_the_store_goes_on(tmp_path: Path) -> None:
    done = mounts(
        f"mount -t tmpfs -o size=1m small '{tmp_path}'; exec '{sys.executable}' -c '"
        "import sys; from pathlib import Path; from tests.unit.kvstore.server import test_store; "
        f"test_store.fill_a_small_disk(Path(sys.argv[1]))' '{tmp_path}'"
    )
    assert done.returncode == 0, done.stderr.decode()


def test_where_files_must_be_smaller_than_a_segment_there_are_more_of_them(
    with_ssd: Home,
) -> None:
    home = with_ssd
    with files_up_to(2 * SMALL_RECORD + PAGE):
        home.save("abcdefg")
        for _ in range(4):
            home.settle()
            home.pass_time(60)
    assert [path.stat().st_size // SMALL_RECORD for path in home.segments()] == [2, 2, 2, 1]
    home.save(letters("x", 7))
    home.look("abcdefg", promote=True)
    home.settle()
    assert home.read("abcdefg") == 7


def test_a_failing_disk_keeps_what_it_has(with_ssd: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home = with_ssd
    home.save("abcdefg")
    home.settle()
    before = home.segments()

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", fail)
        home.save(letters("x", 7))
        for _ in range(100):
            home.pass_time(10)
            while home.writer:
                home.writer.run()
    assert home.segments() == before
    assert home.look("abcdefg").resident == 7


def test_a_disk_that_cannot_even_delete_does_not_stop_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path, extents=1, ssd_bytes=4 * SMALL_RECORD)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", fail)
    home.save("abcdefg")
    home.settle()
    assert home.read("abcdefg") == 7
    home.check_slots()


def test_a_segment_dropped_under_a_reader_is_no_corruption(with_ssd: Home) -> None:
    home = with_ssd
    home.save("abcdefg")
    home.settle()
    home.save(letters("x", 7))
    home.settle()
    home.look("abcdefg", promote=True)
    assert home.ssd is not None
    for _ in home.segments():
        home.index.drop_ssd(home.ssd.drop_oldest_segment())
    home.read_all()
    home.pass_time(0)
    assert home.usage().corrupt_blocks == 0
    assert home.allocated() == 0
    assert home.save("abcdefg") == 7


def test_a_bad_record_does_not_take_the_good_copy_in_memory_along(with_ssd: Home) -> None:
    home = with_ssd
    home.save("abc")
    home.save("wxyz")
    home.settle()
    home.save(letters("x", 7))
    for path in home.segments():
        path.write_bytes(bytes(path.stat().st_size))
    home.look("abc", promote=True)
    assert home.save("abc") == 3
    home.read_all()
    home.pass_time(0)
    assert home.read("abc") == 3
    home.check_slots()


# Crashes.


def test_a_crash_loses_nothing_committed_and_keeps_nothing_else(with_ssd: Home) -> None:
    home = with_ssd
    home.save("abcde")
    home.settle()
    home.save("xyz")
    home.settle()
    home.look("abcde")
    home.reserve(chain("xyzw"))
    home.crash_and_recover()
    assert home.read("xyzw") == 3
    assert home.look("abcde").resident == 5
    assert home.usage().writers == home.usage().leases - 1 == 0
    assert home.allocated() == 3 + home.look("abcde").in_memory
    home.look("abcde", promote=True)
    home.settle()
    assert home.read("abcde") == 5
    home.check_slots()


def test_an_engine_that_outlives_the_store_cannot_touch_anothers_writes_or_leases(
    small: Home,
) -> None:
    before = small.reserve(chain("abc"))
    small.save("x")
    lease = small.look("x").lease
    small.crash_and_recover()
    after = small.reserve(chain("def"))
    small.look("x")
    small.ask(Commit(before.writer, 0.03), Refused)
    small.ask(Abandon(before.writer), Done)
    small.ask(Release([lease]), Done)
    assert small.usage().writers == 1
    assert small.usage().leases == 1
    small.write(after, chain("def"))
    small.ask(Commit(after.writer, 0.03), Done)
    assert small.read("def") == 3


def test_blocks_behind_one_that_a_crash_lost_give_their_slots_back(home: Home) -> None:
    home.save("abcd")
    home.arena.retract(home.slot_of("ab"))
    home.crash_and_recover()
    assert home.read("abcd") == home.allocated() == 1


def cut_in_two(text: bytes) -> bytes:
    return text[: len(text) // 2]


def of_another_shape(text: bytes) -> bytes:
    assert b"3000" in text
    return text.replace(b"3000", b"3001")


def of_no_namespace(text: bytes) -> bytes:
    return text.replace(b"3", b"x", 1)


@pytest.mark.parametrize("damaged", [cut_in_two, of_another_shape, of_no_namespace])
def test_what_namespaces_mean_is_needed_to_recover_and_its_loss_leaks_nothing(
    with_ssd: Home, damaged: Callable[[bytes], bytes]
) -> None:
    with_ssd.save("abcdefg")
    with_ssd.settle()
    spaces = with_ssd.folder / "spaces.json"
    spaces.write_bytes(damaged(spaces.read_bytes()))
    with_ssd.crash_and_recover()
    assert with_ssd.read("abcdefg") == 0
    assert with_ssd.allocated() == 0
    assert with_ssd.save("abcdefg") == 7


def test_a_disk_that_does_not_take_the_namespaces_does_not_stop_the_store(tmp_path: Path) -> None:
    home = Home(tmp_path)
    (tmp_path / "spaces.json").mkdir()
    assert home.save("abc") == 3
    assert home.read("abc") == 3


damages = st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 300), st.integers(0, 255))


@settings(max_examples=60, deadline=None)
@given(st.lists(damages, min_size=1, max_size=12))
def test_whatever_is_written_over_the_arena_no_successor_shows_wrong_bytes(
    tmp_path_factory: pytest.TempPathFactory, places: list[tuple[float, int, int]]
) -> None:
    home = Home(tmp_path_factory.mktemp("home"))
    saved = [("abcd", ONE, SMALL), ("abxy", ONE, SMALL), ("abc", OTHER, LARGE)]
    for tokens, namespace, layout in saved:
        home.save(tokens, namespace, layout, MODELS[namespace])
    with (home.folder / "arena").open("r+b") as file:
        # All but the first page, without which it is no arena: extent table, headers, blocks.
        size = os.fstat(file.fileno()).st_size - PAGE
        for part, length, value in places:
            file.seek(PAGE + int(part * size))
            file.write(bytes([value]) * min(length, size - int(part * size)))
    home.crash_and_recover()
    home.check_slots()
    for tokens, namespace, layout in saved:
        home.report_what_is_bad(tokens, namespace, layout)
        home.save(tokens, namespace, layout, MODELS[namespace])
        assert home.read(tokens, namespace, layout) == len(tokens)
    home.check_slots()


# All together.


@dataclass
class Write:
    room: Reserved
    tokens: str
    namespace: bytes


@dataclass
class Reading:
    slots: list[tuple[int, bytes]]
    namespace: bytes
    ends_at: float


QUOTA = 6 * LARGE.slot_bytes
namespaces = st.sampled_from([ONE, OTHER])
some_tokens = st.text("ab", min_size=1, max_size=9)
parts = st.floats(0, 1, exclude_max=True)
# Else nothing would ever grow old.
rarely = st.sampled_from([False] * 7 + [True])


def pages(slot: int, layout: BlockLayout) -> range:
    return range(slot, slot + layout.slot_bytes // PAGE)


class AnyInterleaving(RuleBasedStateMachine):
    """Engines, threads, time, damage, full disks and crashes in any order, in two extents."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.home = Home(
            self.folder,
            extents=2,
            ssd_bytes=64 * PAGE,
            segment_bytes=8 * PAGE,
            quotas={"other": QUOTA},
        )
        self.writes: list[Write] = []
        # Whose writers have ended, by time or with the store; an engine may not know it yet.
        self.outlived: list[Write] = []
        self.readings: dict[int, Reading] = {}
        # Pages.
        self.damaged: set[int] = set()

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(namespace=namespaces, tokens=some_tokens)
    def reserve(self, namespace: bytes, tokens: str) -> None:
        room = self.home.reserve(chain(tokens), namespace, LAYOUTS[namespace], MODELS[namespace])
        if room.writer:
            self.writes.append(Write(room, tokens, namespace))

    @precondition(lambda self: self.writes)
    @rule(
        part=parts,
        committed=st.booleans(),
        keep_s=st.sampled_from([0.0, 5.0]),
        takes_a_place=st.booleans(),
    )
    def end_write(
        self, part: float, committed: bool, keep_s: float = 0.0, takes_a_place: bool = False
    ) -> None:
        write = self.writes.pop(int(part * len(self.writes)))
        if committed:
            self.write_blocks(write)
            outdated = b""
            if takes_a_place:
                first = write.room.first
                other = "b" if write.tokens[first] == "a" else "a"
                outdated = chain(write.tokens[:first] + other)[-KEY_BYTES:]
            self.home.ask(Commit(write.room.writer, 0.03, keep_s, outdated), Done)
        else:
            self.home.ask(Abandon(write.room.writer), Done)

    def write_blocks(self, write: Write) -> set[int]:
        """The pages that were written."""
        layout = LAYOUTS[write.namespace]
        self.home.write(write.room, chain(write.tokens), write.namespace, layout)
        slots = decode_slots(write.room.slots)
        return {page for slot in slots for page in pages(slot, layout)}

    @precondition(lambda self: self.outlived)
    @rule(part=parts)
    def write_late(self, part: float) -> None:
        write = self.outlived.pop(int(part * len(self.outlived)))
        self.damaged |= self.write_blocks(write)
        self.home.ask(Commit(write.room.writer, 0.03), Refused)

    @rule(namespace=namespaces, tokens=some_tokens)
    def outdate(self, namespace: bytes, tokens: str) -> None:
        self.home.ask(Outdated(namespace, chain(tokens)), Done)

    @rule(namespace=namespaces, tokens=some_tokens)
    def save(self, namespace: bytes, tokens: str) -> None:
        self.reserve(namespace, tokens)
        if self.writes:
            self.end_write(0.99, committed=True)

    @rule()
    def settle(self) -> None:
        for jobs in (self.home.readers, self.home.writer):
            while jobs:
                jobs.run()
        self.tick(1.0)

    @rule(namespace=namespaces, tokens=some_tokens, part=parts, promote=st.booleans())
    def look(self, namespace: bytes, tokens: str, part: float, promote: bool) -> None:
        skip = int(part * len(tokens))
        found = self.home.look(tokens, namespace, skip=skip, promote=promote)
        if found.lease:
            keys = keys_of(chain(tokens))[skip : found.in_memory]
            slots = list(zip(decode_slots(found.slots), keys, strict=True))
            self.readings[found.lease] = Reading(slots, namespace, self.home.now + LEASE_S)

    @precondition(lambda self: self.on_ssd_only())
    @rule(part=parts)
    def bring_back(self, part: float) -> None:
        chains = self.on_ssd_only()
        namespace, keys = chains[int(part * len(chains))]
        found = self.home.ask(Lookup(namespace, keys, 0, LEASE_S, True), Found)
        self.home.ask(Release([found.lease]), Done)

    def on_ssd_only(self) -> list[tuple[bytes, bytes]]:
        return [
            (namespace, node.chain())
            for namespace, known in self.home.index._namespaces.items()
            for node in known.tree.nodes()
            if len(node.slots) < len(node)
        ]

    @precondition(lambda self: self.readings)
    @rule(part=parts)
    def release(self, part: float) -> None:
        lease = list(self.readings)[int(part * len(self.readings))]
        del self.readings[lease]
        self.home.ask(Release([lease]), Done)

    @rule(seconds=st.sampled_from([0.0, 1.0, LEASE_S / 2, WRITE_S]))
    def tick(self, seconds: float) -> None:
        self.home.pass_time(seconds)
        now = self.home.now
        self.readings = {id_: of for id_, of in self.readings.items() if of.ends_at > now}
        alive = self.home.store._writers._writes
        self.outlived += [write for write in self.writes if write.room.writer not in alive]
        self.writes = [write for write in self.writes if write.room.writer in alive]

    @precondition(lambda self: self.home.readers)
    @rule(part=parts)
    def read_ssd(self, part: float) -> None:
        self.home.readers.run(int(part * len(self.home.readers)))

    @precondition(lambda self: self.home.writer)
    @rule(full=st.booleans())
    def write_ssd(self, full: bool) -> None:
        with files_up_to(6 * PAGE if full else resource.RLIM_INFINITY):
            self.home.writer.run()

    @rule(namespace=namespaces, tokens=some_tokens)
    def damage_memory(self, namespace: bytes, tokens: str) -> None:
        found = self.home.look(tokens, namespace)
        if found.lease:
            slot = decode_slots(found.slots)[-1]
            self.home.damage(slot)
            self.damaged.add(slot)
            self.home.ask(Corrupt(namespace, chain(tokens[: found.in_memory])), Done)
            self.home.ask(Release([found.lease]), Done)

    @rule(namespace=namespaces, tokens=some_tokens)
    def report(self, namespace: bytes, tokens: str) -> None:
        self.home.report_what_is_bad(tokens, namespace, LAYOUTS[namespace])

    @precondition(lambda self: self.home.segments())
    @rule(part=parts, damage=st.sampled_from(["change", "cut", "exchange", "delete"]))
    def damage_ssd(self, part: float, damage: str) -> None:
        segments = self.home.segments()
        path = segments[int(part * len(segments))]
        if damage == "change":
            with path.open("r+b") as file:
                file.seek(PAGE + 50)
                file.write(b"damaged")
        elif damage == "cut":
            os.truncate(path, path.stat().st_size // 2)
        elif damage == "exchange":
            before = path.read_bytes()
            path.write_bytes(segments[0].read_bytes())
            segments[0].write_bytes(before)
        else:
            path.unlink()

    @rule(namespace=namespaces, tokens=some_tokens, pinned=st.booleans())
    def pin(self, namespace: bytes, tokens: str, pinned: bool) -> None:
        self.home.ask(Pin(namespace, chain(tokens), pinned), Done)

    @rule(model=st.sampled_from(["", "one"]), really=rarely)
    def flush(self, model: str, really: bool) -> None:
        if really:
            self.home.ask(Flush(model), Done)

    @rule(really=rarely)
    def crash(self, really: bool) -> None:
        if not really:
            return
        before = self.found().keys()
        self.home.crash_and_recover()
        assert self.found().keys() >= before
        self.outlived += self.writes
        self.writes.clear()
        self.readings.clear()

    def found(self) -> dict[tuple[bytes, bytes], int]:
        """The slot of every block in memory."""
        return {
            (namespace, key): slot
            for namespace, known in self.home.index._namespaces.items()
            for node in known.tree.nodes()
            for key, slot in zip(keys_of(node.keys), node.slots, strict=False)
        }

    @invariant()
    def every_slot_is_somebodys(self) -> None:
        self.home.check_slots()

    @invariant()
    def every_block_in_memory_is_whole(self) -> None:
        for (namespace, key), slot in self.found().items():
            self.check_block(slot, key, namespace)

    def check_block(self, slot: int, key: bytes, namespace: bytes) -> None:
        layout = LAYOUTS[namespace]
        whole = self.home.is_whole(slot, key, namespace, layout)
        assert whole or self.damaged.intersection(pages(slot, layout))

    @invariant()
    def every_lease_keeps_its_blocks(self) -> None:
        for reading in self.readings.values():
            for slot, key in reading.slots:
                self.check_block(slot, key, reading.namespace)

    @invariant()
    def the_quota_holds(self) -> None:
        store = self.home.store
        assert store.memory.held_bytes(store.memory.spaces.of_model(MODELS[OTHER])) <= QUOTA

    @invariant()
    def the_ssd_is_within_its_capacity(self) -> None:
        assert self.home.ssd is not None
        assert self.home.ssd.used_bytes <= self.home.ssd_bytes


def test_no_interleaving_leaks_a_slot_or_shows_wrong_bytes() -> None:
    run_state_machine_as_test(
        AnyInterleaving,
        settings=settings(max_examples=60, stateful_step_count=40, deadline=None),
    )
