"""Many tiny tasks between two processes, each result checked, and either of them killed at random.

``LOOMSERVE_RING_TASKS=1000000`` asks for so many tasks instead of some thousands.
"""

from __future__ import annotations

import os
import random
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from loomserve.platform.lending.ring.attention_server import AttentionServer
from loomserve.platform.lending.ring.borrower import Borrower
from loomserve.platform.lending.ring.geometry import Geometry
from loomserve.platform.lending.ring.lent_ring import LentRing
from loomserve.platform.lending.ring.ring import Ring
from loomserve.platform.lending.ring.words import Closed
from tests.unit.platform.lending.ring.test_ring import shm, started
from tests.waiting import PATIENCE_S

# The processes of both files are forked from one that has imported vLLM.
pytestmark = pytest.mark.xdist_group("rings")

__all__ = ["shm"]

TASKS = 10_000
ASKED = os.environ.get("LOOMSERVE_RING_TASKS")
KILLS = 4
LAYERS, REQUESTS, BLOCK, HEAD = 2, 3, 32, 32
TINY = Geometry(LAYERS, 1, 1, HEAD, BLOCK, "float32", 1.0, "vec")


class Workload:
    """Requests that grow by a token a step, and whose attention is known beforehand.

    With queries and keys of zero each token attends alike to all, so a result is the mean of the
    values so far, in its layer and request. Values differ from task to task in no regular way, so
    that whatever is lost, repeated, stale or torn makes a mean wrong.
    """

    def __init__(self, borrower: Borrower) -> None:
        self.borrower = borrower
        self.task = 0
        self._at = 0
        self._sums: NDArray[np.float64] = np.zeros((LAYERS, REQUESTS))
        self._zeros = torch.zeros(REQUESTS, 1, HEAD)
        self._value = torch.zeros(REQUESTS, 1, HEAD)
        self._output = torch.zeros(REQUESTS, 1, HEAD)

    def step(self) -> bool:
        """One token more for each request; False if the ring closed meanwhile."""
        if self._at == BLOCK:
            self._at = 0
            self._sums[:] = 0
        blocks = torch.arange(REQUESTS)
        self.borrower.begin_step(
            torch.arange(REQUESTS + 1),
            torch.full((REQUESTS,), self._at + 1),
            blocks[:, None],
            blocks * BLOCK + self._at,
        )
        self._at += 1
        return all(self._attend(layer) for layer in range(LAYERS))

    def _attend(self, layer: int) -> bool:
        self.task += 1
        values = 1024 + (self.task + np.arange(REQUESTS) * 331) ** 2 % 1021
        self._value.numpy()[:, 0, :] = values[:, None]
        self._output.fill_(-1)
        self.borrower.post(layer, self._zeros, self._zeros, self._value)
        if not self.borrower.wait(self._output, PATIENCE_S):
            return False
        self._sums[layer] += values
        expected = self._sums[layer] / self._at
        wrong = np.abs(self._output.numpy()[:, 0, :] - expected[:, None]).max()
        assert wrong < 0.01, f"task {self.task}: off by {wrong}"
        return True


def tiny_ring(folder: Path) -> LentRing:
    made = LentRing.create(folder / "ring", TINY, REQUESTS, REQUESTS, 1)
    made.granted = REQUESTS
    return made


def tiny_lender(path: Path, ready: Connection) -> None:
    """Lives as an engine does: some polls, then idle for a while, now and then long."""
    torch.set_num_threads(1)
    ring, server = LentRing.attach(path), AttentionServer()
    key, value = torch.zeros(LAYERS, REQUESTS, 1, 2 * BLOCK, HEAD).chunk(2, dim=3)
    server.open(ring, [(key[layer], value[layer]) for layer in range(LAYERS)])
    ready.send(None)
    engine = random.Random(0)
    while True:
        server.busy()
        for _ in range(engine.randrange(2000)):
            server.poll()
        server.idle()
        time.sleep(engine.choice((0, 1e-5, 1e-4, 1e-3)))


def tiny_borrower(path: Path, ready: Connection) -> None:
    torch.set_num_threads(1)
    workload = Workload(Borrower(Ring.attach(path)))
    ready.send(None)
    while workload.step():
        pass


@pytest.mark.timeout(900)
def test_no_task_is_lost_repeated_stale_or_torn(shm: Path) -> None:
    made = tiny_ring(shm)
    tasks = int(ASKED or TASKS)
    with started(tiny_lender, made.path):
        workload = Workload(Borrower(Ring.attach(made.path)))
        while workload.task < tasks:
            assert workload.step(), made.closed
    stats = made.stats()
    assert stats.tasks == stats.polled + stats.idled == workload.task
    assert stats.polled > 0
    assert stats.idled > 0


def test_a_lender_killed_at_any_moment_gives_no_wrong_result(shm: Path) -> None:
    moments = random.Random(1)
    for _ in range(KILLS):
        made = tiny_ring(shm)
        with started(tiny_lender, made.path) as lender:
            workload = Workload(Borrower(Ring.attach(made.path)))
            assert workload.step()
            killer = threading.Timer(moments.uniform(0, 0.2), lender.kill)
            killer.start()
            while workload.step():
                pass
            killer.join()
        assert made.closed is Closed.DIED


def test_a_server_takes_up_the_successors_of_borrowers_killed_at_any_moment(shm: Path) -> None:
    moments = random.Random(2)
    server = AttentionServer()
    memory = torch.zeros(LAYERS, REQUESTS, 1, 2 * BLOCK, HEAD)
    key, value = memory.chunk(2, dim=3)
    for _ in range(KILLS):
        made = tiny_ring(shm)
        server.open(made, [(key[layer], value[layer]) for layer in range(LAYERS)])
        with started(tiny_borrower, made.path) as borrower:
            time.sleep(moments.uniform(0, 0.2))
            # It ends by itself only if a result was wrong.
            assert borrower.is_alive()
            borrower.kill()
            until = time.monotonic() + PATIENCE_S
            while not server.dead() and time.monotonic() < until:
                time.sleep(0.01)
        assert server.dead() == [made]
        assert made.closed is Closed.DIED
        server.close(made)
        untouched = memory.clone()
        time.sleep(0.02)
        assert torch.equal(memory, untouched)
    server.stop()
