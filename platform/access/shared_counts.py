"""What gateways of one platform count together, so that a limit holds over all of them.

Each gateway has a file in shared memory, which it alone writes and all others read. So nobody
waits for anybody: what one has counted, the others see at once. Two that admit in the very same
microseconds do not see each other, so of ``n`` gateways ``n - 1`` may each admit one too many.

A file, in words of 64 bits::

    0           records that there are
    1           open connections
    8 ...       open connections by a hash of their client
    then        records of 8 words: digest of a name (2), requests, running, tokens

Requests and tokens only grow, over restarts too: a gateway that takes over the file of one that
ended goes on with them. Whoever sees that a gateway has ended sets what it had running to none.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import struct
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

_log = logging.getLogger("ray.serve")

POLL_INTERVAL_S = 0.5
"""How often a gateway looks at what others have: so long the end of one goes unseen."""

_ADDRESSES = 8192
_RECORDS = 4096
_RECORD_WORDS = 8
_WORD = 8
_CONNECTIONS_AT = 1
_ADDRESSES_AT = 8
_RECORDS_AT = _ADDRESSES_AT + _ADDRESSES
_WORDS = _RECORDS_AT + _RECORDS * _RECORD_WORDS
# One that is stopped still has its place while another has been started for it.
_PLACES_PER_GATEWAY = 2

_NO_CONNECTIONS = memoryview(bytes((_RECORDS_AT - _CONNECTIONS_AT) * _WORD)).cast("q")

_Digest = tuple[int, int]


class Count(IntEnum):
    """Fields of a record."""

    REQUESTS = 2
    RUNNING = 3
    TOKENS = 4


class Counts:
    """What a gateway counts together with others; these are of one that is alone."""

    def add(self, name: str, count: Count, more: int) -> None:
        """Count ``more`` for a key or a model."""

    def running_elsewhere(self, name: str) -> int:
        """What other gateways have running for a name."""
        return 0

    def news(self, name: str, count: Count) -> int:
        """What others have counted for a name since this was asked last; not for ``RUNNING``."""
        return 0

    def add_connections(self, client: str, more: int) -> None:
        """Count connections of a client."""

    def connections_elsewhere(self, client: str) -> int:
        """A client's connections to other gateways; in rare cases with those of another one."""
        return 0

    @property
    def all_connections_elsewhere(self) -> int:
        return 0

    def look(self) -> None:
        """See which gateways have ended; to be called every ``POLL_INTERVAL_S``."""


def of_key(name: str) -> str:
    """The name under which an API key's requests and tokens are counted."""
    return f"key {name}"


class NoPlaceError(Exception):
    """As many gateways run as there may be."""


class SharedCounts(Counts):
    """The counts of one of several gateways, from its start to :meth:`close`."""

    def __init__(self, folder: Path, gateways: int) -> None:
        """Take a place in a folder of this run; NoPlaceError: other gateways have all."""
        folder.mkdir(mode=0o700, exist_ok=True)
        files = [_File(folder / str(n)) for n in range(gateways * _PLACES_PER_GATEWAY)]
        own = next((n for n, file in enumerate(files) if file.take()), None)
        if own is None:
            for file in files:
                file.close()
            raise NoPlaceError(f"{len(files)} gateways run, and no more may")
        self.place = own
        """Its number, which no other gateway that runs has."""
        self._own = files.pop(own)
        self._own.end_running()
        self._others = files
        # What others counted before is over, or in the file of the day's tokens.
        self._known = {
            (other, digest, count): other.words[at + count]
            for other in files
            for digest, at in other.records()
            for count in (Count.REQUESTS, Count.TOKENS)
        }
        self._told = False

    def close(self) -> None:
        """Leave the place; what runs is no longer counted."""
        self._own.end_running()
        for file in (self._own, *self._others):
            file.close()

    @property
    def places(self) -> list[int]:
        """Numbers of the other gateways that run, as of the last :meth:`look`."""
        return [other.number for other in self._others if other.runs]

    def add(self, name: str, count: Count, more: int) -> None:
        at = self._own.at(_digest(name), make=True)
        if at:
            self._own.words[at + count] += more
        elif not self._told:
            self._told = True
            _log.error("limits of more than %d keys and models hold in each gateway", _RECORDS)

    def running_elsewhere(self, name: str) -> int:
        digest = _digest(name)
        return sum(other.value(digest, Count.RUNNING) for other in self._others)

    def news(self, name: str, count: Count) -> int:
        digest, new = _digest(name), 0
        for other in self._others:
            value = other.value(digest, count)
            if value:
                new += value - self._known.get((other, digest, count), 0)
                self._known[other, digest, count] = value
        return new

    def add_connections(self, client: str, more: int) -> None:
        self._own.words[_CONNECTIONS_AT] += more
        self._own.words[_address_at(client)] += more

    def connections_elsewhere(self, client: str) -> int:
        at = _address_at(client)
        return sum(other.words[at] for other in self._others)

    @property
    def all_connections_elsewhere(self) -> int:
        return sum(other.words[_CONNECTIONS_AT] for other in self._others)

    def look(self) -> None:
        for other in self._others:
            other.look()


class _File:
    """The counts of one place, of which the gateway that has taken it holds the lock."""

    def __init__(self, path: Path) -> None:
        self.number = int(path.name)
        self.runs = False
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        # Making it longer than it is, twice over, changes nothing.
        os.ftruncate(self._descriptor, _WORDS * _WORD)
        self._memory = mmap.mmap(self._descriptor, _WORDS * _WORD)
        # A word is read and written as a whole.
        self.words = memoryview(self._memory).cast("q")
        self._at: dict[_Digest, int] = {}

    def close(self) -> None:
        self.words.release()
        self._memory.close()
        os.close(self._descriptor)

    def take(self) -> bool:
        """Take the place until :meth:`close` or this process's end; False: another has it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def look(self) -> None:
        """See whether it is taken; what ran with one that has ended runs no longer."""
        try:
            # Together with others that look, while nobody takes it.
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self.runs = True
            return
        self.runs = False
        self.end_running()
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def end_running(self) -> None:
        """Set what runs to none; who has taken the place does it."""
        self.words[_CONNECTIONS_AT:_RECORDS_AT] = _NO_CONNECTIONS
        for _, at in self.records():
            self.words[at + Count.RUNNING] = 0

    def records(self) -> Iterator[tuple[_Digest, int]]:
        for number in range(self.words[0]):
            at = _RECORDS_AT + number * _RECORD_WORDS
            yield (self.words[at], self.words[at + 1]), at

    def value(self, digest: _Digest, count: Count) -> int:
        at = self.at(digest)
        return self.words[at + count] if at else 0

    def at(self, digest: _Digest, *, make: bool = False) -> int:
        """Where the record of a name is; 0: there is none, nor, if one is to be made, room."""
        at = self._at.get(digest, 0)
        if at:
            return at
        # Records stay where they are, and only come to be more.
        number = self.words[0]
        if len(self._at) < number:
            self._at = dict(self.records())
            at = self._at.get(digest, 0)
        if at or not make or number == _RECORDS:
            return at
        at = _RECORDS_AT + number * _RECORD_WORDS
        self.words[at], self.words[at + 1] = digest
        self.words[0] = number + 1
        self._at[digest] = at
        return at


def _digest(name: str) -> _Digest:
    one, two = struct.unpack("qq", hashlib.blake2b(name.encode(), digest_size=16).digest())
    return one, two


def _address_at(client: str) -> int:
    (number,) = struct.unpack("Q", hashlib.blake2b(client.encode(), digest_size=8).digest())
    return int(_ADDRESSES_AT + number % _ADDRESSES)
