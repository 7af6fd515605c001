"""Whoever follows a node hears everything in order, or is told all contents."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from loomserve.kvstore.index.directory import Directory
from loomserve.kvstore.index.journal import Change, Tier
from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.peers import announcer as module
from loomserve.kvstore.peers.announcer import BATCH_S, Announcer
from loomserve.kvstore.peers.messages import Announcement, well_formed
from loomserve.kvstore.storage.checksum import BlockLayout, Space
from tests.unit.kvstore.index.invariants import blocks_of
from tests.waiting import PATIENCE_S

SPACE = b"n" * 16
NEW = {SPACE: Space("m", BlockLayout(2, 64))}


def there(key: int, tier: Tier = Tier.MEMORY) -> Change:
    return Change(SPACE, tier, key.to_bytes(KEY_BYTES, "big"))


def decoded(frame: bytes) -> Announcement:
    return msgspec.msgpack.decode(frame, type=Announcement)


def announced(announcer: Announcer, *keys: int, now: float = 1e9) -> None:
    announcer.note([there(key) for key in keys])
    announcer.tick(now)


def test_changes_come_as_one_message_and_no_sooner_than_in_a_hundredth_of_a_second() -> None:
    announcer = Announcer("n1")
    assert not announcer.waiting
    announcer.note([there(1)])
    announcer.note([there(2)], NEW)
    assert announcer.waiting
    announcer.tick(100.0)
    announcer.note([there(3)])
    announcer.tick(100.0 + 0.9 * BATCH_S)
    frames, epoch, seq = announcer.frames_after(announcer.epoch, 0, 0.0)
    assert (epoch, seq) == (announcer.epoch, 1)
    (message,) = map(decoded, frames)
    assert not message.whole
    assert (message.node, message.seq, message.changes) == ("n1", 1, [there(1), there(2)])
    assert message.spaces == NEW
    announcer.tick(100.0 + 1.1 * BATCH_S)
    frames, *_ = announcer.frames_after(announcer.epoch, 1, 0.0)
    assert decoded(frames[0]).changes == [there(3)]
    assert not announcer.waiting


def test_who_waits_is_woken_and_who_waits_in_vain_comes_back() -> None:
    announcer = Announcer("n1")
    begin = time.monotonic()
    assert announcer.frames_after(announcer.epoch, 0, 0.05)[0] == []
    assert time.monotonic() - begin >= 0.05
    threading.Timer(0.05, announced, (announcer, 1)).start()
    frames, *_ = announcer.frames_after(announcer.epoch, 0, 3 * PATIENCE_S)
    assert len(frames) == 1
    assert time.monotonic() - begin < PATIENCE_S


@pytest.mark.parametrize(("epoch", "seq"), [(0, 0), (7, 3), (None, 99)])
def test_who_cannot_go_on_gets_all_contents_and_then_what_follows(
    epoch: int | None, seq: int
) -> None:
    announcer = Announcer("n1")
    announced(announcer, 1)
    announcer.note([there(2)])
    heard = announcer.epoch if epoch is None else epoch
    assert announcer.frames_after(heard, seq, 0.0)[0] == []
    assert announcer.contents_wanted
    keys = there(1).keys + there(2).keys
    announcer.provide([(SPACE, keys, KEY_BYTES)], NEW.items())
    assert not announcer.contents_wanted
    frames, epoch_, at = announcer.frames_after(heard, seq, 0.0)
    (message,) = map(decoded, frames)
    assert message.whole
    assert (epoch_, at) == (announcer.epoch, 2)
    assert (message.seq, message.changes) == (2, [there(1), there(2, Tier.SSD)])
    announced(announcer, 3, now=2e9)
    frames, *_ = announcer.frames_after(epoch_, at, 0.0)
    assert [decoded(frame).seq for frame in frames] == [3]
    again, _, at = announcer.frames_after(0, 0, 0.0)
    assert (again, at) == ([msgspec.msgpack.encode(message)], 2), "the next one gets the same"


def test_contents_have_a_bound_and_end_with_a_whole_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_CONTENTS_BYTES", 5 * KEY_BYTES + 3)
    announcer = Announcer("n1")
    announcer.frames_after(0, 0, 0.0)
    announcer.provide([(SPACE, bytes(3 * KEY_BYTES), 0)] * 3, [])
    frames, *_ = announcer.frames_after(0, 0, 0.0)
    assert [len(change.keys) for change in decoded(frames[0]).changes] == [48, 32]


class Heard(RuleBasedStateMachine):
    """A follower that falls behind by any number of messages, of which only the last are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.announcer = Announcer("n1")
        self.blocks: dict[bytes, Tier] = {}
        self.directory = Directory(1000)
        self.now = 0.0

    @rule(keys=st.dictionaries(st.integers(0, 20), st.sampled_from(Tier), min_size=1))
    def change(self, keys: dict[int, Tier]) -> None:
        changes = [there(key, tier) for key, tier in keys.items()]
        for _, tier, key in changes:
            self.blocks.pop(key, None)
            if tier is not Tier.GONE:
                self.blocks[key] = tier
        self.announcer.note(changes)
        self.tick()

    @rule()
    def tick(self) -> None:
        self.now += 1
        self.announcer.tick(self.now)

    @precondition(lambda self: self.announcer.contents_wanted)
    @rule()
    def provide(self) -> None:
        runs = [
            (SPACE, key, KEY_BYTES if tier is Tier.MEMORY else 0)
            for key, tier in self.blocks.items()
        ]
        self.announcer.provide(runs, [])

    @rule()
    def hear(self) -> None:
        epoch, seq = self.directory.heard("n1")
        for frame in self.announcer.frames_after(epoch, seq, 0.0)[0]:
            message = decoded(frame)
            if message.whole:
                self.directory.begin("n1", message.epoch, message.seq)
                self.directory.add("n1", message.changes)
            else:
                assert self.directory.apply("n1", message.epoch, message.seq, message.changes)

    def teardown(self) -> None:
        for _ in range(3):
            self.hear()
            if self.announcer.contents_wanted:
                self.provide()
        known = {key: tier for (_, key), tier in blocks_of(self.directory, "n1").items()}
        assert known == self.blocks
        assert self.directory.gaps == 0


def test_a_follower_knows_all_in_the_end_however_far_it_was_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_KEPT_BYTES", 400)
    run_state_machine_as_test(Heard, settings=settings(max_examples=60, stateful_step_count=40))


@pytest.mark.parametrize(
    "message",
    [
        Announcement("n", 1, 1, [Change(b"short", Tier.MEMORY, b"")]),
        Announcement("n", 1, 1, [Change(SPACE, Tier.MEMORY, b"short")]),
        Announcement("n", 1, 1, [], {SPACE: Space("m", BlockLayout(0, 64))}),
        Announcement("n", 1, 1, [], {b"": Space("m", BlockLayout(1, 64))}),
    ],
)
def test_a_message_whose_keys_are_none_is_not_taken_in(message: Announcement) -> None:
    assert not well_formed(message)
    assert well_formed(Announcement("n", 1, 1, [there(1)], NEW))
