"""The replicas of a model: what routing decides on, kept up to date as it changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from loomserve.platform.state import ReplicaLoad
from loomserve.platform.state.roles import Role
from loomserve.routers.base import Candidates, Columns, Floats, Ints, Orders, Replica
from loomserve.routers.in_flight import NOTHING, Assigned, InFlight
from loomserve.routers.snapshot import RoutingStats


@dataclass(slots=True)
class _Row:
    """A replica: its last report, joined with what this process has open on it.

    The engine's report counts the requests of every gateway, but as of ``load.measured_at``; the
    ledger is exact and immediate, but knows only this process's own requests. So the estimate is
    the report plus what this process started, less what it finished, since the measurement.
    """

    id: str
    stats: RoutingStats | None = None
    last_load: ReplicaLoad | None = None
    load: ReplicaLoad | None = None
    """The last load; None: there is none, or it is too old to count."""
    max_running: int = 1
    kv_capacity_tokens: int | None = None
    willing: bool = True
    """Not draining."""
    answering: bool = True
    """Willing, and not a prefill replica."""
    looked_at: float = np.inf
    """When its load was measured, as far as the order of going stale has it."""
    requests: int = 0
    """Open here now, as are so many tokens."""
    tokens: int = 0
    more_requests: int = 0
    """What the load adds to these: what it counts, less what was open here when it was measured."""
    more_tokens: int = 0
    kv_usage: float = 0.0
    queue_length: int = 0
    """Requests running or waiting."""

    def take(self, stats: RoutingStats) -> None:
        self.stats = stats
        self.max_running, self.kv_capacity_tokens = stats.max_running, stats.kv_capacity_tokens
        self.willing = not stats.draining
        self.answering = self.willing and stats.role is not Role.PREFILL

    def count(self, load: ReplicaLoad | None, then: Assigned = NOTHING) -> None:
        """``then``: open here when the load was measured."""
        self.load = load
        if load is None:
            self.more_requests, self.more_tokens, self.kv_usage = 0, 0, 0.0
        else:
            self.more_requests = load.running + load.waiting - then.requests
            self.more_tokens = load.waiting_tokens - then.tokens
            self.kv_usage = load.kv_cache_usage


class ReplicaTable:
    """The replicas of one model, a row each in the order of their ids.

    A report or a booking moves one row in the orders of loads and queues, so that a decision finds
    the first of each without looking at the others. It belongs to one thread, which reports, books
    and decides. Times are monotonic seconds.
    """

    def __init__(self, ledger: InFlight, *, stale_after_s: float) -> None:
        """``stale_after_s``: a report counts in full until it is so old (the ledger, which is
        followed, keeps it current until then), and then not at all."""
        self.ids: tuple[str, ...] = ()
        """Of all replicas, by row."""
        self.known_ids: frozenset[str] = frozenset()
        self.nodes: tuple[str, ...] = ()
        """The nodes that have any; none are named where there is but one."""
        self.row_of: dict[str, int] = {}
        """The row of each id."""
        self._ledger = ledger
        self._stale_after_s = stale_after_s
        self._rows: list[_Row] = []
        self._node = np.zeros(0, np.int64)
        self._prefill_token_s = np.zeros(0)
        self._columns = Columns(0)
        self._orders = Orders(self._columns)
        self._answering: list[int] = []
        """Rows of the replicas that take clients' requests."""
        self._others: list[int] = []
        self._measured: list[tuple[float, int]] = []
        """Heap of when loads were measured, one a row: no later than its last."""

    def set_replicas(self, ids: Iterable[str], nodes: Mapping[str, str] | None = None) -> None:
        """Set which replicas there are; reports of those that stay are kept. ``nodes``: where each
        is; None: all on one."""
        wanted = frozenset(ids)
        if wanted == self.known_ids:
            return
        for gone in self.known_ids - wanted:
            self._ledger.unfollow(gone, self._assigned)
        there = {row.id: row for row in self._rows if row.id in wanted}
        for new in wanted - self.known_ids:
            requests, tokens = self._ledger.follow(new, self._assigned)
            there[new] = _Row(new, requests=requests, tokens=tokens)
        self.known_ids, self.ids = wanted, tuple(sorted(wanted))
        self._rows = [there[id_] for id_ in self.ids]
        self.row_of = {id_: place for place, id_ in enumerate(self.ids)}
        size = len(self.ids)
        self._columns, self._measured = Columns(size), []
        self._orders = Orders(self._columns)
        self._node, self._prefill_token_s = np.zeros(size, np.int64), np.zeros(size)
        if nodes is not None:
            self.nodes = tuple(sorted({nodes[id_] for id_ in self.ids}))
            at = {name: place for place, name in enumerate(self.nodes)}
            self._node[:] = [at[nodes[id_]] for id_ in self.ids]
        for place, row in enumerate(self._rows):
            row.looked_at = np.inf
            self._write_report(place)
            self._write_load(place)
        self._note_roles()

    def places(self, rows: Ints) -> tuple[Ints, Floats]:
        """Of rows: the places of their nodes, and the seconds in which they compute a token."""
        return self._node[rows], self._prefill_token_s[rows]

    def report(self, replica_id: str, stats: RoutingStats) -> None:
        """Take in a report by this process's clock; one of a replica that is gone is ignored."""
        place = self.row_of.get(replica_id)
        if place is None:
            return
        row = self._rows[place]
        before = row.answering
        row.take(stats)
        self._write_report(place)
        self._take_load(place, stats.load)
        if before != row.answering:
            self._note_roles()

    def report_load(self, replica_id: str, load: ReplicaLoad) -> None:
        """Take in another load than that of the last report."""
        self._take_load(self.row_of[replica_id], load)

    def last_load(self, replica_id: str) -> ReplicaLoad | None:
        """What the replica reported last, however long ago; None: it has reported none."""
        place = self.row_of.get(replica_id)
        return None if place is None else self._rows[place].last_load

    def role(self, replica_id: str) -> Role | None:
        """What the replica said last that it is; None: it has sent no report."""
        place = self.row_of.get(replica_id)
        stats = None if place is None else self._rows[place].stats
        return None if stats is None else stats.role

    def replica(self, row: int) -> Replica:
        """A replica as it is now."""
        its = self._rows[row]
        return Replica(its.id, its.load, its.max_running, its.kv_capacity_tokens, its.queue_length)

    def candidates(
        self, *, exclude: frozenset[str], pinned_to: str | None = None, now: float
    ) -> Candidates:
        """The replicas that may take a request. Prefill replicas take clients' requests only if no
        other replica can."""
        self._forget_stale(now)
        rows, row_of, answering = self._rows, self.row_of, self._answering
        if pinned_to is not None:
            place = row_of.get(pinned_to)
            takes = place is not None and pinned_to not in exclude and rows[place].willing
            return self._among([place] if takes and place is not None else [])
        if not exclude and answering:
            return Candidates(self._columns, self._orders, answering, (), self._others)
        left = {place for id_ in exclude if (place := row_of.get(id_)) is not None}
        out = sorted(place for place in left if rows[place].answering)
        if len(out) == len(answering):
            return self._among(
                [at for at, row in enumerate(rows) if row.willing and at not in left]
            )
        if len(out) > _FEW:
            return self._among([place for place in answering if place not in left])
        return Candidates(self._columns, self._orders, answering, out, self._others)

    def _among(self, rows: list[int]) -> Candidates:
        """These and no others, in orders of their own."""
        return Candidates(self._columns, Orders(self._columns, rows), rows)

    def _assigned(self, replica_id: str, requests: int, tokens: int) -> None:
        place = self.row_of[replica_id]
        row = self._rows[place]
        row.requests, row.tokens = requests, tokens
        self._weigh(place, row)

    def _take_load(self, place: int, load: ReplicaLoad | None) -> None:
        row = self._rows[place]
        row.last_load = load
        row.count(load, NOTHING if load is None else self._ledger.of(row.id, load.measured_at))
        self._write_load(place)

    def _write_report(self, place: int) -> None:
        row, columns = self._rows[place], self._columns
        columns.answering[place] = row.answering
        columns.kv_capacity_tokens[place] = capacity = row.kv_capacity_tokens or 0
        columns.most_capacity = max(columns.most_capacity, capacity)

    def _write_load(self, place: int) -> None:
        row, columns = self._rows[place], self._columns
        load = row.load
        if columns.known[place] != (load is not None):
            columns.known[place] = load is not None
            self._orders.drop(place)
        if load is not None:
            if load.pace is not None:
                self._prefill_token_s[place] = load.pace.prefill_token_s
            if load.measured_at < row.looked_at:
                row.looked_at = load.measured_at
                heappush(self._measured, (load.measured_at, place))
        self._weigh(place, row)

    def _weigh(self, place: int, row: _Row) -> None:
        """Set queue and utilisation; see :class:`~loomserve.routers.base.Candidates`."""
        columns = self._columns
        # Requests on the wire at the measurement are in neither term; what is open here is a floor.
        row.queue_length = queue_length = row.requests + max(0, row.more_requests)
        # The share of KV cache in use, or promised to requests that wait or are on their way.
        kv_share, capacity = row.kv_usage, row.kv_capacity_tokens
        if capacity:
            kv_share = min(1.0, max(0.0, kv_share + (row.tokens + row.more_tokens) / capacity))
        utilisation = queue_length / row.max_running + kv_share
        columns.queue_length[place] = queue_length
        columns.utilisation[place] = utilisation
        if row.answering:
            self._orders.put(place, utilisation, queue_length, known=row.load is not None)
        else:
            self._orders.drop(place)

    def _note_roles(self) -> None:
        self._answering = [at for at, row in enumerate(self._rows) if row.answering]
        self._others = [at for at, row in enumerate(self._rows) if not row.answering]

    def _forget_stale(self, now: float) -> None:
        measured = self._measured
        while measured and now - measured[0][0] > self._stale_after_s:
            at, place = heappop(measured)
            row = self._rows[place]
            if at != row.looked_at:
                continue
            row.looked_at = np.inf if row.load is None else row.load.measured_at
            if now - row.looked_at > self._stale_after_s:
                row.looked_at = np.inf
                row.count(None)
                self._write_load(place)
            elif row.load is not None:
                heappush(measured, (row.looked_at, place))


# Of more excluded replicas, those that are left are put in orders of their own.
_FEW = 64
