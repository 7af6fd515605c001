"""The replicas of a model as columns: what routing decides on, kept up to date as it changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from loomserve.platform.state import ReplicaLoad
from loomserve.platform.state.roles import Role
from loomserve.routers.base import Bools, Candidates, Floats, Ints, Replica
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
    load: ReplicaLoad | None = None
    """That of the last report; None: there is none, or it is too old to count."""
    then: Assigned = NOTHING
    """Open here when the load was measured."""
    here: Assigned = NOTHING
    """Open here now."""

    @property
    def max_running(self) -> int:
        return 1 if self.stats is None else self.stats.max_running

    @property
    def kv_capacity_tokens(self) -> int | None:
        return None if self.stats is None else self.stats.kv_capacity_tokens

    @property
    def queue_length(self) -> int:
        here, load = self.here.requests, self.load
        if load is None:
            return here
        # Requests on the wire at the measurement are in neither term; what is open here is a floor.
        return max(here, load.running + load.waiting + here - self.then.requests)

    @property
    def kv_share(self) -> float:
        load, capacity, tokens = self.load, self.kv_capacity_tokens, self.here.tokens
        measured = 0.0 if load is None else load.kv_cache_usage
        if not capacity:
            return measured
        if load is not None:
            tokens -= self.then.tokens
        return min(1.0, max(0.0, measured + tokens / capacity))


@dataclass(slots=True)
class _Columns:
    """Figures of all rows; ``measured_at`` is infinite where there is no load, or none any more."""

    utilisation: Floats
    queue_length: Ints
    known: Bools
    kv_capacity_tokens: Ints
    node: Ints
    """Place among the nodes."""
    prefill_token_s: Floats
    """Seconds of a prompt's token; 0 until it has said."""
    measured_at: Floats
    willing: Bools
    """Not draining."""
    answering: Bools
    """Willing, and not a prefill replica."""
    rows: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.rows = np.arange(len(self.known))

    @classmethod
    def of(cls, size: int) -> _Columns:
        return cls(
            utilisation=np.zeros(size),
            queue_length=np.zeros(size, np.int64),
            known=np.zeros(size, np.bool_),
            kv_capacity_tokens=np.zeros(size, np.int64),
            node=np.zeros(size, np.int64),
            prefill_token_s=np.zeros(size),
            measured_at=np.full(size, np.inf),
            willing=np.ones(size, np.bool_),
            answering=np.ones(size, np.bool_),
        )

    def among(self, rows: Ints) -> Candidates:
        if len(rows) == len(self.rows):
            return self._all()
        return Candidates(
            self.utilisation.take(rows),
            self.queue_length.take(rows),
            self.known.take(rows),
            self.kv_capacity_tokens.take(rows),
            rows,
        )

    def _all(self) -> Candidates:
        return Candidates(
            self.utilisation,
            self.queue_length,
            self.known,
            self.kv_capacity_tokens,
            self.rows,
        )


class ReplicaTable:
    """The replicas of one model, a row each in the order of their ids.

    A report or a booking changes one row, so that a decision finds all figures as they are. It
    belongs to one thread, which reports, books and decides. Times are monotonic seconds.
    """

    def __init__(self, ledger: InFlight, *, stale_after_s: float) -> None:
        """
        Args:
            ledger: has the requests of this process; the table follows it.
            stale_after_s: a report counts in full until it is so old (the ledger keeps it current
                until then) and not at all afterwards.
        """
        self.ids: tuple[str, ...] = ()
        """Of all replicas, by row."""
        self.known_ids: frozenset[str] = frozenset()
        """The same, as a set."""
        self.nodes: tuple[str, ...] = ()
        """The nodes that have any; none are named where there is but one."""
        self._ledger = ledger
        self._stale_after_s = stale_after_s
        self._rows: list[_Row] = []
        self._row_of: dict[str, int] = {}
        self._columns = _Columns.of(0)
        self._answering = self._columns.rows
        """Rows of the replicas that take clients' requests."""
        # No load was measured earlier.
        self._oldest = np.inf

    def set_replicas(self, ids: Iterable[str], nodes: Mapping[str, str] | None = None) -> None:
        """Set which replicas there are; reports of those that stay are kept.

        ``nodes``: where each is; None: all on one.
        """
        wanted = frozenset(ids)
        if wanted == self.known_ids:
            return
        for gone in self.known_ids - wanted:
            self._ledger.unfollow(gone, self._assigned)
        there = {row.id: row for row in self._rows if row.id in wanted}
        for new in wanted - self.known_ids:
            there[new] = _Row(new, here=self._ledger.follow(new, self._assigned))
        self.known_ids, self.ids = wanted, tuple(sorted(wanted))
        self._rows = [there[id_] for id_ in self.ids]
        self._row_of = {id_: place for place, id_ in enumerate(self.ids)}
        self._columns = _Columns.of(len(self.ids))
        if nodes is not None:
            self.nodes = tuple(sorted({nodes[id_] for id_ in self.ids}))
            at = {name: place for place, name in enumerate(self.nodes)}
            self._columns.node[:] = [at[nodes[id_]] for id_ in self.ids]
        for place in range(len(self.ids)):
            self._write_report(place)
        self._note_roles()

    def places(self, rows: Ints) -> tuple[Ints, Floats]:
        """Of rows: the places of their nodes, and the seconds in which they compute a token."""
        return self._columns.node[rows], self._columns.prefill_token_s[rows]

    def report(self, replica_id: str, stats: RoutingStats) -> None:
        """Take in a report by this process's clock; one of a replica that is gone is ignored."""
        place = self._row_of.get(replica_id)
        if place is None:
            return
        row, load = self._rows[place], stats.load
        before, row.stats, row.load = row.stats, stats, load
        row.then = NOTHING if load is None else self._ledger.of(replica_id, load.measured_at)
        self._write_report(place)
        if before is None or (before.draining, before.role) != (stats.draining, stats.role):
            self._note_roles()

    def stats(self, replica_id: str) -> RoutingStats | None:
        """The replica's last report; None: it has sent none."""
        place = self._row_of.get(replica_id)
        return None if place is None else self._rows[place].stats

    def role(self, replica_id: str) -> Role | None:
        """What the replica said last that it is; None: it has sent no report."""
        stats = self.stats(replica_id)
        return None if stats is None else stats.role

    def replica(self, row: int) -> Replica:
        """A replica as it is now."""
        its = self._rows[row]
        return Replica(
            id=its.id,
            load=its.load,
            max_running=its.max_running,
            kv_capacity_tokens=its.kv_capacity_tokens,
            queue_length=its.queue_length,
        )

    def candidates(
        self, *, exclude: frozenset[str], pinned_to: str | None = None, now: float
    ) -> Candidates:
        """The replicas that may take a request.

        Prefill replicas take clients' requests only if no other replica can.
        """
        if now - self._oldest > self._stale_after_s:
            self._forget_stale(now)
        columns = self._columns
        if pinned_to is not None:
            return columns.among(self._pinned(pinned_to, exclude))
        if not exclude and len(self._answering):
            return columns.among(self._answering)
        answering = columns.answering.copy()
        excluded = [place for id_ in exclude if (place := self._row_of.get(id_)) is not None]
        answering[excluded] = False
        rows = np.flatnonzero(answering)
        if not len(rows):
            willing = columns.willing.copy()
            willing[excluded] = False
            rows = np.flatnonzero(willing)
        return columns.among(rows)

    def _pinned(self, replica_id: str, exclude: frozenset[str]) -> Ints:
        place = self._row_of.get(replica_id)
        takes = place is not None and replica_id not in exclude and self._columns.willing[place]
        return np.array([place] if takes else [], np.int64)

    def _assigned(self, replica_id: str, here: Assigned) -> None:
        place = self._row_of[replica_id]
        self._rows[place].here = here
        self._write_load(place)

    def _write_report(self, place: int) -> None:
        row, columns = self._rows[place], self._columns
        load = row.load
        columns.known[place] = load is not None
        columns.measured_at[place] = np.inf if load is None else load.measured_at
        columns.kv_capacity_tokens[place] = row.kv_capacity_tokens or 0
        if load is not None and load.pace is not None:
            columns.prefill_token_s[place] = load.pace.prefill_token_s
        if row.stats is not None:
            columns.willing[place] = not row.stats.draining
            columns.answering[place] = not (row.stats.draining or row.stats.role is Role.PREFILL)
        if load is not None:
            self._oldest = min(self._oldest, load.measured_at)
        self._write_load(place)

    def _write_load(self, place: int) -> None:
        row, columns = self._rows[place], self._columns
        queue_length = row.queue_length
        columns.queue_length[place] = queue_length
        columns.utilisation[place] = queue_length / row.max_running + row.kv_share

    def _note_roles(self) -> None:
        self._answering = np.flatnonzero(self._columns.answering)

    def _forget_stale(self, now: float) -> None:
        columns = self._columns
        for place in np.flatnonzero(now - columns.measured_at > self._stale_after_s):
            self._rows[place].load = None
            self._write_report(int(place))
        self._oldest = float(columns.measured_at.min(initial=np.inf))
