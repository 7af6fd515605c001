"""Ledger of a process: requests that it has open on each replica, its decisions, and prefixes.

Requests go straight to the engines, past Ray Serve's channel, so Serve's queue lengths do not see
them. Any thread may use the ledger.

A request is booked *when it is routed*, by the router, not when the gateway has the answer: of a
burst of requests every one sees those before it. Who sends it ends the booking; see
:class:`~loomserve.routers.ticket.RoutingTicket`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from loomserve.routers.prefix_index import PrefixIndex


class Assigned(NamedTuple):
    """Sequences of requests open on a replica, and the tokens of KV cache they may come to need."""

    requests: int = 0
    tokens: int = 0


NOTHING = Assigned()


@dataclass(eq=False)
class Booking:
    """Entry of the ledger for one attempt of one request; only the ledger touches its fields.

    The booking itself records that it has ended. So a router that comes too late does no harm: a
    request cancelled before it was routed is never booked, and nothing is left over.
    """

    _replica_id: str | None = None
    _tokens: int = 0
    _sequences: int = 0
    _finished: bool = False


Follower = Callable[[str, Assigned], None]
"""Told of a replica, and what is open on it from then on; it must not call the ledger."""


@dataclass(slots=True)
class _Record:
    # Parallel lists: at[i] (monotonic seconds, ascending) is when the replica's open requests
    # became were[i], which holds until at[i + 1]. The first entry answers for earlier times, too.
    at: list[float] = field(default_factory=lambda: [0.0])
    were: list[Assigned] = field(default_factory=lambda: [NOTHING])

    def change(self, requests: int, tokens: int, now: float, retain_s: float) -> None:
        last = self.were[-1]
        self.were.append(Assigned(last.requests + requests, last.tokens + tokens))
        self.at.append(max(now, self.at[-1]))  # threads come here in another order
        expired = max(0, bisect_right(self.at, now - retain_s) - 1)
        del self.at[:expired], self.were[:expired]


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
            self._drop_idle(now)
            self._change(replica_id, sequences, tokens, now)
            booking._replica_id, booking._tokens = replica_id, tokens
            booking._sequences = sequences

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
            if at is None:
                return record.were[-1]
            return record.were[max(0, bisect_right(record.at, at) - 1)]

    def follow(self, replica_id: str, follower: Follower) -> Assigned:
        """Have the follower told of each change from now on; what is open on the replica now."""
        with self._lock:
            self._followers[replica_id] = (*self._followers.get(replica_id, ()), follower)
            record = self._records.get(replica_id)
            return NOTHING if record is None else record.were[-1]

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
            self._change(booking._replica_id, -booking._sequences, -booking._tokens, now)
            booking._replica_id = None

    def _change(self, replica_id: str, requests: int, tokens: int, now: float) -> None:
        record = self._records.get(replica_id)
        if record is None:
            record = self._records[replica_id] = _Record()
        record.change(requests, tokens, now, self._retain_s)
        self._idle.pop(replica_id, None)
        if record.were[-1].requests == 0:
            self._idle[replica_id] = record.at[-1]
        for follower in self._followers.get(replica_id, ()):
            follower(replica_id, record.were[-1])

    def _drop_idle(self, now: float) -> None:
        while self._idle:
            replica_id, at = next(iter(self._idle.items()))
            if at >= now - self._retain_s:
                return
            del self._idle[replica_id], self._records[replica_id]
