"""Times activations from core to core: a message, and a copy in shared memory."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory

import numpy as np
from numpy.typing import NDArray

_BYTES = 16 * 2**20
_ROUNDS = 200
_COPIES = 10


def time_link(source: Sequence[int], target: Sequence[int]) -> tuple[float, float]:
    """Latency in seconds of a message to a sleeping process on other cores, and bytes a second. The
    median of half a round trip; and of copies that the target makes of what the source wrote."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    memory = SharedMemory(create=True, size=_BYTES)
    other = context.Process(target=_answer, args=(theirs, memory.name, tuple(target)), daemon=True)
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, source)
        other.start()
        theirs.close()
        ours.recv()
        return _latency_s(ours), _bytes_per_s(ours, memory)
    finally:
        os.sched_setaffinity(0, before)
        ours.close()  # which ends the other process
        other.join()
        memory.close()
        memory.unlink()


def _latency_s(ours: Connection) -> float:
    times = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        ours.send("ping")
        ours.recv()
        times.append((time.perf_counter() - begin) / 2)
    return statistics.median(times)


def _bytes_per_s(ours: Connection, memory: SharedMemory) -> float:
    seconds: list[float] = []
    for value in range(_COPIES):
        _bytes(memory)[:] = value
        ours.send("copy")
        seconds.append(ours.recv())
    return _BYTES / statistics.median(seconds)


def _bytes(memory: SharedMemory) -> NDArray[np.uint8]:
    return np.ndarray((_BYTES,), np.uint8, memory.buf)


def _answer(connection: Connection, name: str, cores: tuple[int, ...]) -> None:
    os.sched_setaffinity(0, cores)
    memory = SharedMemory(name)
    copy = np.empty(_BYTES, dtype=np.uint8)
    connection.send("ready")
    try:
        while True:
            if connection.recv() == "copy":
                begin = time.perf_counter()
                copy[:] = _bytes(memory)
                connection.send(time.perf_counter() - begin)
            else:
                connection.send("pong")
    except EOFError:
        memory.close()
