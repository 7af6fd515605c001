"""Ledger of a process: requests that it has open on each replica, its decisions, and prefixes.

Requests go straight to the engines, past Ray Serve's channel, so Serve's queue lengths do not see
them. Any thread may use the ledger.

A request is booked *when it is routed*, by the router, not when the gateway has the answer: of a
burst of requests every one sees those before it. Who sends it ends the booking; see
:class:`~loomserve.routers.ticket.RoutingTicket`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

from loomserve.routers.prefix_index import PrefixIndex


class Assigned(NamedTuple):
    """Sequences of requests open on a replica, and the tokens of KV cache they may come to need."""

    requests: int = 0
    tokens: int = 0


NOTHING = Assigned()


class Booking:
    """Entry of the ledger for one attempt of one request; only the ledger touches its fields.

    The booking itself records that it has ended. So a router that comes too late does no harm: a
    request cancelled before it was routed is never booked, and nothing is left over.
    """

    _replica_id: str | None = None
    _booked = NOTHING
    _finished = False


Follower = Callable[[str, Assigned], None]
"""Told of a replica, and what is open on it from then on; it must not call the ledger."""


class _Record:
    """What a replica had open, and since when; the first entry answers for earlier times, too."""

    __slots__ = ("log", "now")

    def __init__(self) -> None:
        self.now = NOTHING
        self.log: deque[tuple[float, Assigned]] = deque([(0.0, NOTHING)])

    def change(self, requests: int, tokens: int, at: float, retain_s: float) -> None:
        log, last = self.log, self.now
        self.now = Assigned(last.requests + requests, last.tokens + tokens)
        log.append((max(at, log[-1][0]), self.now))  # threads come here in another order
        while len(log) > 1 and log[1][0] <= at - retain_s:
            log.popleft()

    def at(self, time: float) -> Assigned:
        # Nearly always it is asked for of a moment ago.
        return next((were for since, were in reversed(self.log) if since <= time), self.log[0][1])


class InFlight:
    """Thread-safe ledger of open requests by replica.

    A replica without open requests is forgotten ``retain_s`` seconds after its last
    change. Times are monotonic seconds of this process.
    """

    def __init__(self, retain_s: float = 60.0) -> None:
        self._retain_s = retain_s
        self._lock = Lock()
        self._records: dict[str, _Record] = {}
        # When the replicas without open requests changed last, the longest ago first.
        self._idle: dict[str, float] = {}
        self._followers: dict[str, tuple[Follower, ...]] = {}
        self._decisions: Counter[tuple[str, str, str]] = Counter()
        self._prefixes: dict[str, PrefixIndex] = {}

    def started(
        self, booking: Booking, replica_id: str, tokens: int, now: float, *, sequences: int = 1
    ) -> None:
        """Book a request on a replica.

        A request that is booked elsewhere moves; one that has finished is not booked again.
        ``tokens`` is the request's prompt plus its expected output, ``sequences`` the answers that
        the replica has at work at once for it, each as much as a request.
        """
        with self._lock:
            if booking._finished:
                return
            self._release(booking, now)
            if self._idle:
                self._drop_idle(now)
            self._change(replica_id, sequences, tokens, now)
            booking._replica_id, booking._booked = replica_id, Assigned(sequences, tokens)

    def finished(self, booking: Booking, now: float) -> None:
        """End a request's booking, if there is one, and allow no other. Idempotent."""
        with self._lock:
            self._release(booking, now)
            booking._finished = True

    def of(self, replica_id: str, at: float | None = None) -> Assigned:
        """Requests open on a replica now, or at an earlier time up to ``retain_s`` ago."""
        with self._lock:
            record = self._records.get(replica_id)
            if record is None:
                return NOTHING
            return record.now if at is None else record.at(at)

    def follow(self, replica_id: str, follower: Follower) -> Assigned:
        """Have the follower told of each change from now on; what is open on the replica now."""
        with self._lock:
            self._followers[replica_id] = (*self._followers.get(replica_id, ()), follower)
            record = self._records.get(replica_id)
            return NOTHING if record is None else record.now

    def unfollow(self, replica_id: str, follower: Follower) -> None:
        with self._lock:
            others = tuple(x for x in self._followers.pop(replica_id, ()) if x != follower)
            if others:
                self._followers[replica_id] = others

    def decided(self, model: str, policy: str, reason: str) -> None:
        """Count a routing decision."""
        with self._lock:
            self._decisions[model, policy, reason] += 1

    def decisions(self) -> Counter[tuple[str, str, str]]:
        """Decisions since the process started, by (model, policy, reason)."""
        with self._lock:
            return self._decisions.copy()

    def prefixes(self, model: str) -> PrefixIndex:
        """Index of the prompts that the model's replicas were sent by this process."""
        with self._lock:
            index = self._prefixes.get(model)
            if index is None:
                index = self._prefixes[model] = PrefixIndex()
            return index

    def replicas(self) -> frozenset[str]:
        """Ids of the replicas that have a record."""
        with self._lock:
            return frozenset(self._records)

    def _release(self, booking: Booking, now: float) -> None:
        if booking._replica_id is not None:
            self._change(
                booking._replica_id, -booking._booked.requests, -booking._booked.tokens, now
            )
            booking._replica_id = None

    def _change(self, replica_id: str, requests: int, tokens: int, now: float) -> None:
        record = self._records.get(replica_id)
        if record is None:
            record = self._records[replica_id] = _Record()
        record.change(requests, tokens, now, self._retain_s)
        self._idle.pop(replica_id, None)
        if not record.now.requests:
            self._idle[replica_id] = record.log[-1][0]
        for follower in self._followers.get(replica_id, ()):
            follower(replica_id, record.now)

    def _drop_idle(self, now: float) -> None:
        while self._idle:
            replica_id, at = next(iter(self._idle.items()))
            if at >= now - self._retain_s:
                return
            del self._idle[replica_id], self._records[replica_id]
