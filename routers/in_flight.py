"""Ledger of a process: requests that it has open on each replica, its decisions, and prefixes.

Requests go straight to the engines, so Ray Serve's queue lengths do not see them. Any thread may
use the ledger. A request is booked when it is routed: of a burst every one sees those before it.
Who sends it ends the booking; see :class:`~loomserve.routers.policy_choice.RoutingTicket`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from math import inf
from threading import Lock
from typing import NamedTuple

from loomserve.routers.prefix_index import PrefixIndex


class Assigned(NamedTuple):
    """Sequences of requests open on a replica, and the tokens of KV cache they may come to need."""

    requests: int = 0
    tokens: int = 0


NOTHING = Assigned()


class Booking:
    """Entry of the ledger for one attempt of one request; only the ledger touches its fields. It
    records that it has ended, so that a request cancelled before it was routed is never booked."""

    _replica_id: str | None = None
    _booked = 0, 0
    _finished = False


Follower = Callable[[str, int, int], None]
"""Told of a replica, and the sequences and tokens that are open on it then; it must not call the
ledger."""


class _Record:
    """What a replica had open, and since when; the first entry answers for earlier times, too."""

    __slots__ = ("log", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = self.tokens = 0
        self.log = deque([(0.0, 0, 0)])

    def at(self, time: float) -> Assigned:
        for since, requests, tokens in reversed(self.log):
            if since <= time:  # Nearly always it is asked for of a moment ago.
                return Assigned(requests, tokens)
        return Assigned(*self.log[0][1:])


class InFlight:
    """Thread-safe ledger of open requests by replica. One without any is forgotten ``retain_s``
    seconds after its last change. Times are monotonic seconds of this process."""

    def __init__(self, retain_s: float = 60.0) -> None:
        self._retain_s = retain_s
        self._lock = Lock()
        self._records: dict[str, _Record] = {}
        # When the replicas without open requests changed last, the longest ago first.
        self._idle: dict[str, float] = {}
        self._next_drop = 0.0
        self._followers: dict[str, tuple[Follower, ...]] = {}
        self._decisions: Counter[tuple[str, str, str]] = Counter()
        self._prefixes: dict[str, PrefixIndex] = {}

    def started(
        self, booking: Booking, replica_id: str, tokens: int, now: float, *, sequences: int = 1
    ) -> None:
        """Book a request on a replica, and end an earlier booking; one that has finished is not
        booked again. ``tokens``: of its prompt and expected output; ``sequences``: answers that the
        replica has at work at once for it, each as much as a request."""
        with self._lock:
            if booking._finished:
                return
            if booking._replica_id is not None:
                self._release(booking, now)
            if now > self._next_drop:
                self._drop_idle(now)
            self._change(replica_id, sequences, tokens, now)
            booking._replica_id, booking._booked = replica_id, (sequences, tokens)

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
            return record.at(inf if at is None else at)

    def follow(self, replica_id: str, follower: Follower) -> Assigned:
        """Have the follower told of each change from now on; what is open on the replica now."""
        with self._lock:
            self._followers[replica_id] = (*self._followers.get(replica_id, ()), follower)
            record = self._records.get(replica_id)
            return NOTHING if record is None else record.at(inf)

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
        index = self._prefixes.get(model)
        if index is None:
            with self._lock:
                index = self._prefixes.setdefault(model, PrefixIndex())
        return index

    def _release(self, booking: Booking, now: float) -> None:
        if booking._replica_id is not None:
            requests, tokens = booking._booked
            self._change(booking._replica_id, -requests, -tokens, now)
            booking._replica_id = None

    def _change(self, replica_id: str, requests: int, tokens: int, now: float) -> None:
        record = self._records.get(replica_id)
        if record is None:
            record = self._records[replica_id] = _Record()
        log = record.log
        record.requests += requests
        record.tokens += tokens
        # Threads come here in another order.
        log.append((max(now, log[-1][0]), record.requests, record.tokens))
        while len(log) > 1 and log[1][0] <= now - self._retain_s:
            log.popleft()
        self._idle.pop(replica_id, None)
        if not record.requests:
            self._idle[replica_id] = log[-1][0]
        for follower in self._followers.get(replica_id, ()):
            follower(replica_id, record.requests, record.tokens)

    def _drop_idle(self, now: float) -> None:
        # Not at each request: the first of a dictionary lies behind those that have left it.
        self._next_drop = now + self._retain_s / 64
        while self._idle:
            replica_id, at = next(iter(self._idle.items()))
            if at >= now - self._retain_s:
                return
            del self._idle[replica_id], self._records[replica_id]
