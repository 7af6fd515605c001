"""Announces this node's blocks to the stores of others."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

from loomserve.kvstore.index.journal import Change, Run, as_changes
from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.peers.messages import Announcement
from loomserve.kvstore.storage.checksum import Space

BATCH_S = 0.01
_KEPT_BYTES = 2**24
"""Of messages, for those who are behind; who is further behind gets all contents."""
_MOST_FRAMES = 64
_MOST_CONTENTS_BYTES = 2**25
"""Of keys: two million blocks. What a node has beyond those is not announced at once."""


class Announcer:
    """Numbers what changes, and keeps the last messages for all that follow. The store's thread
    calls ``note``, ``tick`` and ``provide``; each connection's thread waits in ``frames_after``."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.epoch = 1 + secrets.randbits(62)
        self._condition = threading.Condition()
        self._encoding = threading.Lock()
        self._seq = 0
        # Numbers and encoded messages.
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._contents: tuple[int, bytes] | None = None
        self.contents_wanted = False
        """Whether someone waits for all contents."""
        # What they are to be made of, by the first thread that wants them.
        self._runs: tuple[int, list[Run], dict[bytes, Space]] | None = None
        self._changes: list[Change] = []
        self._spaces: dict[bytes, Space] = {}
        self._announced_at = 0.0

    @property
    def waiting(self) -> bool:
        """Whether changes wait to be announced, or someone for all contents."""
        return bool(self._changes or self._spaces or self.contents_wanted)

    def note(self, changes: list[Change], spaces: Mapping[bytes, Space] | None = None) -> None:
        """Take changes and new namespaces that are to be announced."""
        self._changes += changes
        self._spaces.update(spaces or {})

    def tick(self, now: float) -> None:
        """Announce what waits, as one message, unless the last one was just now."""
        if now - self._announced_at >= BATCH_S:
            self._announced_at = now
            self._announce()

    def provide(self, runs: list[Run], spaces: Iterable[tuple[bytes, Space]]) -> None:
        """Tell those that wait for it what there is; all that was noted is a part of it."""
        self._announce()
        with self._condition:
            self._runs = self._seq, runs, dict(spaces)
            self.contents_wanted = False
            self._condition.notify_all()

    def frames_after(self, epoch: int, seq: int, wait_s: float) -> tuple[list[bytes], int, int]:
        """Encoded messages that follow those heard, with the epoch and number of the last. None
        come if nothing happened within ``wait_s`` seconds."""
        until = time.monotonic() + wait_s
        while True:
            self._encode_contents()
            with self._condition:
                frames, at = self._frames(epoch, seq)
                left_s = until - time.monotonic()
                if frames:
                    return frames, self.epoch, at
                if left_s <= 0:
                    return [], epoch, seq
                if self._runs is None:
                    self._condition.wait(left_s)

    def _frames(self, epoch: int, seq: int) -> tuple[list[bytes], int]:
        """What follows, and the number of its last message; none, and contents may be wanted."""
        if epoch == self.epoch and self._goes_on_from(seq):
            behind = [(at, frame) for at, frame in self._kept if at > seq][:_MOST_FRAMES]
            return [frame for _, frame in behind], behind[-1][0] if behind else seq
        if self._contents is not None and self._goes_on_from(self._contents[0]):
            at, frame = self._contents
            return [frame], at
        self.contents_wanted = True
        return [], seq

    def _encode_contents(self) -> None:
        """Make a message of the contents, while others that want them wait, but not the store."""
        with self._encoding:
            runs = self._runs
            if runs is None:
                return
            contents = self._encoded(*runs)
            with self._condition:
                self._contents = contents
                if self._runs is runs:
                    self._runs = None
                self._condition.notify_all()

    def _encoded(self, seq: int, runs: list[Run], spaces: dict[bytes, Space]) -> tuple[int, bytes]:
        """All contents, up to a bound, as a message."""
        changes: list[Change] = []
        room = _MOST_CONTENTS_BYTES
        for change in as_changes(runs):
            if len(change.keys) > room:
                changes.append(change._replace(keys=change.keys[: room // KEY_BYTES * KEY_BYTES]))
                break
            changes.append(change)
            room -= len(change.keys)
        contents = Announcement(self.node, self.epoch, seq, changes, spaces, whole=True)
        return seq, msgspec.msgpack.encode(contents)

    def _goes_on_from(self, seq: int) -> bool:
        """Whether all messages after this one are kept."""
        return self._seq - len(self._kept) <= seq <= self._seq

    def _announce(self) -> None:
        if not (self._changes or self._spaces):
            return
        changes, self._changes = self._changes, []
        spaces, self._spaces = self._spaces, {}
        message = Announcement(self.node, self.epoch, self._seq + 1, changes, spaces)
        frame = msgspec.msgpack.encode(message)
        with self._condition:
            self._seq += 1
            self._kept.append((self._seq, frame))
            self._kept_bytes += len(frame)
            while self._kept_bytes > _KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popleft()[1])
            if self._contents is not None and not self._goes_on_from(self._contents[0]):
                self._contents = None
            self._condition.notify_all()
