"""The input and output of routing policies: candidates in, a choice among them out.

A policy is filter → score → pick: :meth:`loomserve.routers.table.ReplicaTable.candidates` filters
and scores, and the policy picks (:class:`loomserve.routers.policy.RoutingPolicy`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loomserve.platform.state import ReplicaLoad

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Order:
    """Rows by rising keys of two figures, and where these are equal, by row.

    A heap in which a row has an entry for each key that it had; the last one counts.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, float, int]] = []
        self._now: dict[int, tuple[float, float, int]] = {}

    def put(self, row: int, first: float, second: float) -> None:
        """Set the key of a row, wherever it was before."""
        entry = self._now[row] = first, second, row
        heappush(self._heap, entry)
        if len(self._heap) > 4 * len(self._now) + 64:
            self._heap = list(self._now.values())
            heapify(self._heap)

    def drop(self, row: int) -> None:
        self._now.pop(row, None)

    def __iter__(self) -> Iterator[tuple[float, float, int]]:
        """Keys with their rows, the least first, while nothing is put or dropped."""
        heap, now = self._heap, self._now
        taken = []
        try:
            while heap:
                entry = heappop(heap)
                if now.get(entry[2]) is entry:
                    taken.append(entry)
                    yield entry
        finally:
            for entry in taken:
                heappush(heap, entry)


class Orders:
    """The orders of some rows: by load, those of known and of unknown load; and by queue."""

    def __init__(self) -> None:
        self.loaded, self.unknown, self.queued = Order(), Order(), Order()

    def put(self, row: int, utilisation: float, queue_length: int, *, known: bool) -> None:
        here, there = (self.loaded, self.unknown) if known else (self.unknown, self.loaded)
        here.put(row, utilisation, queue_length)
        there.drop(row)
        self.queued.put(row, queue_length, utilisation)

    def drop(self, row: int) -> None:
        for order in (self.loaded, self.unknown, self.queued):
            order.drop(row)


class Columns:
    """Figures of all rows of a table, each written as it changes."""

    def __init__(self, size: int) -> None:
        self.utilisation = np.zeros(size)
        self.queue_length = np.zeros(size, np.int64)
        self.known = np.zeros(size, np.bool_)
        self.kv_capacity_tokens = np.zeros(size, np.int64)
        self.most_capacity = 0
        """No row's capacity is greater."""
        self.answering = np.ones(size, np.bool_)
        """Whether the row takes clients' requests."""


class Candidates:
    """The replicas that may take a request, with a place for each in the order of ids.

    They hold until the next report or booking, and nobody writes to their columns, which are made
    as they are asked for: :meth:`by_load` and :meth:`by_queue` have the first without those.
    """

    def __init__(
        self,
        columns: Columns,
        orders: Orders,
        answering: Sequence[int],
        out: Sequence[int] = (),
        *,
        all_answer: bool = False,
    ) -> None:
        """
        Args:
            columns: Of all rows.
            answering: Rows that are in the orders, ascending.
            out: Those of them that are no candidates, ascending.
            all_answer: Those rows are all that the columns call answering.
        """
        self.columns, self._orders = columns, orders
        self._answering, self._out, self._all_answer = answering, out, all_answer

    def __len__(self) -> int:
        return len(self._answering) - len(self._out)

    def by_load(self) -> Iterator[tuple[float, float, int]]:
        """Utilisation, queue length and row, the least first; those of unknown load at the end."""
        return self._but_out(chain(self._orders.loaded, self._orders.unknown))

    def by_queue(self) -> Iterator[tuple[float, float, int]]:
        """Queue length, utilisation and row, the least first."""
        return self._but_out(self._orders.queued)

    def _but_out(
        self, order: Iterable[tuple[float, float, int]]
    ) -> Iterator[tuple[float, float, int]]:
        out = self._out
        return (each for each in order if each[2] not in out) if out else iter(order)

    def row(self, place: int) -> int:
        """The row at a place."""
        for row in self._out:
            place += self._answering[place] >= row
        return self._answering[place]

    def place(self, row: int) -> int:
        """The place of a row."""
        return bisect_left(self._answering, row) - bisect_left(self._out, row)

    def among(self, rows: Ints) -> Ints:
        """Those of the rows that are candidates."""
        if not self._all_answer:
            return rows[np.isin(rows, self.rows)]
        rows = rows[self.columns.answering[rows]]
        return rows[~np.isin(rows, self._out)] if self._out else rows

    @cached_property
    def rows(self) -> Ints:
        """Their rows in the table."""
        rows = np.array(self._answering, np.int64)
        return np.delete(rows, np.searchsorted(rows, self._out)) if self._out else rows

    @cached_property
    def utilisation(self) -> Floats:
        """BanaServe's U = C/C_max + M/M_max (eq. 4-33), of requests and of KV cache.

        The paper's C is what the hardware does, hence U ≤ 2. Here C is demand: requests waiting
        beyond those that run at once raise U above 2, or a flooded replica would pass for a full
        one.
        """
        return self.columns.utilisation.take(self.rows)

    @cached_property
    def queue_length(self) -> Ints:
        """Requests running or waiting."""
        return self.columns.queue_length.take(self.rows)

    @cached_property
    def known(self) -> Bools:
        """Whether there is a load report that is not too old to count."""
        return self.columns.known.take(self.rows)

    @cached_property
    def kv_capacity_tokens(self) -> Ints:
        """Tokens that its KV cache holds; 0 until it has said."""
        return self.columns.kv_capacity_tokens.take(self.rows)


class Choice(NamedTuple):
    """A place among the candidates, and why."""

    place: int
    reason: str
    """Label of ``loomserve_route_decisions_total``."""


class Replica(NamedTuple):
    """The chosen replica as its router saw it, without the request."""

    id: str
    load: ReplicaLoad | None = None
    """The last report; None: there is none, or it is too old to count."""
    max_running: int = 1
    """Requests the engine runs at once (``max_num_seqs``); 1 until it has said."""
    kv_capacity_tokens: int | None = None
    """Tokens that its KV cache holds; None until it has said."""
    queue_length: int = 0
    """Requests running or waiting."""


class Decision(NamedTuple):
    replica_id: str
    reason: str
    """Label of ``loomserve_route_decisions_total``."""


def least(*columns: Floats | Ints) -> int:
    """The first place of the least value in the first column; later columns tell ties apart."""
    first, *others = columns
    # Of a thousand, argmin takes half of the time of min.
    ties = np.flatnonzero(first == first[first.argmin()])
    for column in others:
        if len(ties) == 1:
            break
        values = column[ties]
        ties = ties[values == values[values.argmin()]]
    return int(ties[0])
