"""The input and output of routing policies: candidates in, a choice among them out.

A policy is filter → score → pick: :meth:`loomserve.routers.table.ReplicaTable.candidates` filters
and scores, and the policy picks (:class:`loomserve.routers.policy.RoutingPolicy`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
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

Key = tuple[float, float, int]
"""Two figures and a row."""

_SORTED = 64


class Order:
    """Rows by rising keys of two figures, and where these are equal, by row.

    The least are in a sorted list. The others are in a heap, where a row has an entry for each key
    that it had; the last one counts. So a change takes a few comparisons as a rule.
    """

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self.now = {key[2]: key for key in keys}
        self._least: list[Key] = []
        self._rest = list(self.now.values())
        heapify(self._rest)

    def put(self, row: int, first: float, second: float) -> None:
        """Set the key of a row, wherever it was before."""
        now, least = self.now, self._least
        last, key = now.get(row), (first, second, row)
        if last is not None and least and last <= least[-1]:
            del least[bisect_left(least, last)]
        now[row] = key
        if least and key < least[-1]:
            insort(least, key)
            if len(least) <= _SORTED:
                return
            key = least.pop()
        heappush(self._rest, key)
        if len(self._rest) > 4 * len(now) + 64:
            self._rest = [one for one in now.values() if not least or one > least[-1]]
            heapify(self._rest)

    def drop(self, row: int) -> None:
        key, least = self.now.pop(row, None), self._least
        if key is not None and least and key <= least[-1]:
            del least[bisect_left(least, key)]

    def __iter__(self) -> Iterator[Key]:
        """Keys with their rows, the least first, while nothing is put or dropped."""
        least, rest, now, at = self._least, self._rest, self.now, 0
        while True:
            while at < len(least):
                yield least[at]
                at += 1
            while rest and now.get(rest[0][2]) is not rest[0]:
                heappop(rest)
            if not rest:
                return
            least.append(heappop(rest))


class Orders:
    """The orders of some rows: by load, those of known and of unknown load; and by queue. Each is
    made from the columns when it is first asked for, and kept up to date from then on."""

    def __init__(self, columns: Columns, rows: Sequence[int] | None = None) -> None:
        """``rows``: None: those that the columns call answering."""
        self._columns, self._rows = columns, rows
        self._made: dict[bool | None, Order] = {}

    def get(self, known: bool | None) -> Order:
        """Those of known or of unknown load, by that and their queues; None: all, by queue."""
        order = self._made.get(known)
        if order is None:
            order = self._made[known] = self._make(known)
        return order

    def put(self, row: int, utilisation: float, queue_length: int, *, known: bool) -> None:
        """Set the keys of a row; one whose load becomes known or unknown is dropped before."""
        for which, order in self._made.items():
            if which is None:
                order.put(row, queue_length, utilisation)
            elif which is known:
                order.put(row, utilisation, queue_length)

    def drop(self, row: int) -> None:
        for order in self._made.values():
            order.drop(row)

    def _make(self, known: bool | None) -> Order:
        columns, some = self._columns, self._rows
        rows = np.flatnonzero(columns.answering) if some is None else np.array(some, np.int64)
        keys: tuple[Floats | Ints, ...] = columns.utilisation, columns.queue_length
        if known is None:
            keys = keys[::-1]
        else:
            rows = rows[columns.known[rows] == known]
        first, second = (each[rows].tolist() for each in keys)
        return Order(zip(first, second, rows.tolist(), strict=True))


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
    as they are asked for.
    """

    def __init__(
        self,
        columns: Columns,
        orders: Orders,
        answering: Sequence[int],
        out: Sequence[int] = (),
        others: Sequence[int] | None = None,
    ) -> None:
        """``answering``: rows in the orders, ascending. ``out``: those of them that are no
        candidates. ``others``: rows that are not in the orders; None: all but those."""
        self.columns, self._orders = columns, orders
        self._answering, self._out, self._others = answering, out, others

    def __len__(self) -> int:
        return len(self._answering) - len(self._out)

    def by_load(self, *, known: bool | None = None) -> Iterator[Key]:
        """Utilisation, queue length and row, the least first; those of unknown load at the end.
        ``known``: Only those of known, or of unknown load."""
        if known is None:
            return chain(self.by_load(known=True), self.by_load(known=False))
        return self._but_out(self._orders.get(known))

    def by_queue(self) -> Iterator[Key]:
        """Queue length, utilisation and row, the least first."""
        return self._but_out(self._orders.get(None))

    def _but_out(self, order: Iterable[Key]) -> Iterator[Key]:
        out = self._out
        return (each for each in order if each[2] not in out) if out else iter(order)

    def keys(self, rows: Iterable[int], *, known: bool) -> Iterator[Key]:
        """As of :meth:`by_load`: those of the rows that are candidates of known or unknown load."""
        now, out = self._orders.get(known).now, self._out
        return (key for row in rows if (key := now.get(row)) and row not in out)

    def not_among(self) -> Iterator[int]:
        """The rows that are no candidates."""
        others = self._others
        if others is None:
            others = sorted({*range(len(self.columns.known))}.difference(self._answering))
        return chain(others, self._out)

    def row(self, place: int) -> int:
        """The row at a place."""
        for row in self._out:
            place += self._answering[place] >= row
        return self._answering[place]

    def place(self, row: int) -> int:
        """The place of a row."""
        return bisect_left(self._answering, row) - bisect_left(self._out, row)

    @cached_property
    def rows(self) -> Ints:
        """Their rows in the table."""
        if self._others is None:
            rows = np.array(self._answering, np.int64)
        else:
            rows = np.flatnonzero(self.columns.answering)
        return np.delete(rows, np.searchsorted(rows, self._out)) if self._out else rows

    @cached_property
    def utilisation(self) -> Floats:
        """BanaServe's U = C/C_max + M/M_max (eq. 4-33), of requests and of KV cache. The paper's C
        is what the hardware does, hence U ≤ 2. Here it is demand: those that wait raise U above 2,
        or a flooded replica would pass for a full one."""
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
