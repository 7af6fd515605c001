"""Who writes which blocks, and until when."""

from __future__ import annotations

import subprocess

import pytest

from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.server.grants import Reservation, Writers
from loomserve.kvstore.server.protocol import WRITE_S

ONE, OTHER = b"1" * 16, b"2" * 16
KEYS = b"".join(bytes([letter]) * KEY_BYTES for letter in b"abcd")


def reserved(first: int, blocks: int, namespace: bytes = ONE) -> Reservation:
    return Reservation(namespace, KEYS, first, list(range(10, 10 + blocks)), 0)


@pytest.fixture
def writers() -> Writers:
    return Writers()


def test_a_block_is_being_written_until_its_writer_ends(writers: Writers) -> None:
    writer = writers.begin(reserved(1, 2), 0.0)
    assert [writers.first_unwritten(ONE, KEYS, at) for at in range(5)] == [0, 3, 3, 3, 4]
    assert writers.first_unwritten(OTHER, KEYS, 1) == 1
    assert writers.end(writer) == reserved(1, 2)
    assert writers.end(writer) is None
    assert writers.first_unwritten(ONE, KEYS, 1) == 1
    assert len(writers) == 0


def test_a_writer_of_an_earlier_store_is_nobody(writers: Writers) -> None:
    earlier = Writers().begin(reserved(0, 1), 0.0)
    writers.begin(reserved(0, 1), 0.0)
    assert writers.end(earlier) is None
    assert len(writers) == 1


def test_a_write_ends_with_its_process_if_that_can_be_seen(writers: Writers) -> None:
    process = subprocess.Popen(["sleep", "600"])
    writer = writers.begin(reserved(0, 1), 0.0, process.pid)
    unseen = writers.begin(reserved(1, 1), 0.0, 2**22)
    assert writers.end_dead() == []
    process.kill()
    process.wait()
    assert writers.end_dead() == [reserved(0, 1)]
    assert writers.end(writer) is None
    assert writers.end(unseen) == reserved(1, 1)


def test_writers_whose_time_is_up_give_back_what_they_reserved(writers: Writers) -> None:
    writers.begin(reserved(0, 1), 0.0)
    last = writers.begin(reserved(1, 3), 1.0)
    assert writers.end_expired(WRITE_S - 1) == []
    assert writers.end_expired(WRITE_S) == [reserved(0, 1)]
    assert writers.first_unwritten(ONE, KEYS, 0) == 0
    assert writers.end(last) == reserved(1, 3)
