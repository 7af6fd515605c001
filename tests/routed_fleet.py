"""Engines that only simulate behind the platform's own router: what its decisions come to.

Each engine is the schedule's simulator, which has its own steps; the table, the ledger and the
policies are those of a gateway. It reads no clock.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from benchmarks.workload import azure_like
from loomserve.platform.config.router import ROUTING_POLICIES
from loomserve.platform.scheduling.simulator import (
    Costs,
    Limits,
    Policies,
    ScheduledStep,
    SimulatedRequest,
    Simulator,
)
from loomserve.platform.simulated.engine import PrefixCache
from loomserve.platform.state import ReplicaLoad
from loomserve.platform.state.roles import Role
from loomserve.routers.in_flight import InFlight
from loomserve.routers.policy import NodesKv, RoutedModel
from loomserve.routers.policy_choice import RoutingTicket
from loomserve.routers.prefix_index import BLOCK_TOKENS
from loomserve.routers.snapshot import RoutingStats
from loomserve.routers.table import ReplicaTable

NOBODY: frozenset[str] = frozenset()
_LOAD_SHARE = 0.02
"""Of the time to compute a token, what it takes to load it from a store."""


@dataclass(frozen=True)
class Asked:
    """A request; ``keys`` are those of its prompt's whole blocks."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[int, ...] = ()


@dataclass(frozen=True)
class Device:
    """What an engine is like: its sizes, and the seconds that its steps take."""

    kv_tokens: int = 120_000
    running: int = 256
    step_tokens: int = 2_048
    step_s: float = 0.014
    token_s: float = 7e-5
    context_token_s: float = 1.5e-7

    @property
    def limits(self) -> Limits:
        return Limits(
            blocks=self.kv_tokens // 16,
            block_tokens=16,
            block_bytes=1,
            running=self.running,
            step_tokens=self.step_tokens,
        )

    def seconds(self, step: ScheduledStep) -> float:
        tokens = sum(share.tokens for share in step.shares)
        context = sum(share.computed for share in step.shares)
        return self.step_s + self.token_s * tokens + self.context_token_s * context


@dataclass
class _Engine:
    schedule: Simulator
    cache: PrefixCache
    step: ScheduledStep | None = None
    told_at: float = 0.0


@dataclass
class Outcome:
    first_token_s: list[float] = field(default_factory=list)
    """Of each request, from its arrival."""
    computed_tokens: int = 0
    """Of prompts."""

    def quantile(self, share: float) -> float:
        times = sorted(self.first_token_s)
        return times[int(share * (len(times) - 1))]

    @property
    def mean(self) -> float:
        return sum(self.first_token_s) / len(self.first_token_s)


class RoutedFleet:
    """Replicas of one model on one node, to which requests are routed by a policy."""

    def __init__(
        self,
        engines: int,
        device: Device,
        policy: str = "load_aware",
        *,
        told_every_s: float = 0.03,
        each_step: bool = True,
        with_store: bool = False,
        counts_waiting: bool = True,
    ) -> None:
        """
        Args:
            told_every_s: An engine tells its load no more often, after a step if ``each_step``,
                else whether or not it steps.
            with_store: A store has what any of the engines has computed.
            counts_waiting: Engines tell the tokens of requests that wait.
        """
        self._device, self._told_every_s, self._each_step = device, told_every_s, each_step
        self._counts_waiting = counts_waiting
        costs = Costs(lambda tokens: 0.0, lambda tokens: 0.0, step_s=device.seconds)
        blocks = device.kv_tokens // BLOCK_TOKENS
        self._engines = {
            f"r{number:04}": _Engine(
                Simulator((), device.limits, Policies(), costs), PrefixCache(blocks, BLOCK_TOKENS)
            )
            for number in range(engines)
        }
        self._store = PrefixCache(100 * blocks if with_store else 0, BLOCK_TOKENS)
        self._ledger = InFlight(retain_s=1e6)
        self._table = ReplicaTable(self._ledger, stale_after_s=1e6)
        self._table.set_replicas(self._engines)
        kv = NodesKv(1.0, float(100 * device.kv_tokens), {}, _LOAD_SHARE) if with_store else None
        self._model = RoutedModel("m", self._table, 1.6, random.Random(0), turn=0, kv=kv)
        self._policy = ROUTING_POLICIES.make(policy, {}, self._model)
        self._numbers = itertools.count()
        self._tickets: dict[str, RoutingTicket] = {}
        self._asked: dict[str, Asked] = {}
        self._due: list[tuple[float, int, str]] = []
        self.outcome = Outcome()

    def run(self, arrivals: Iterable[Asked]) -> Outcome:
        for place, id_ in enumerate(self._engines):
            self._tell(id_, 0.0)
            if not self._each_step:
                first = self._told_every_s * (place + 1) / len(self._engines)
                heappush(self._due, (first, next(self._numbers), f"tell {id_}"))
        coming = iter(sorted(arrivals, key=lambda one: one.at_s))
        one = next(coming, None)
        while one is not None or self._tickets:
            if one is not None and (not self._due or one.at_s <= self._due[0][0]):
                self._route(one)
                one = next(coming, None)
            else:
                now, _, what = heappop(self._due)
                if what.startswith("tell "):
                    self._tell(what[5:], now)
                    heappush(self._due, (now + self._told_every_s, next(self._numbers), what))
                else:
                    self._end_step(what, now)
        return self.outcome

    def _route(self, one: Asked) -> None:
        now, name = one.at_s, str(next(self._numbers))
        ticket = RoutingTicket(
            self._ledger,
            prompt_tokens=one.prompt_tokens,
            hash_prompt=lambda: one.keys,
            output_tokens=256,
        )
        self._model.turn += 1
        candidates = self._table.candidates(exclude=NOBODY, now=now)
        choice = self._policy.pick(candidates, ticket)
        replica = self._table.replica(candidates.row(choice.place))
        ticket.book(replica, now)
        self._policy.sent(ticket, replica)
        engine = self._engines[replica.id]
        own, stored = engine.cache.cached(one.keys), self._store.cached(one.keys)
        cached = own + int((1 - _LOAD_SHARE) * max(0, stored - own))
        cached = min(cached, one.prompt_tokens - 1)
        self.outcome.computed_tokens += one.prompt_tokens - max(own, stored)
        self._tickets[name], self._asked[name] = ticket, one
        engine.schedule.add(
            SimulatedRequest(
                name,
                now,
                one.prompt_tokens,
                one.output_tokens,
                one.output_tokens,
                cached_tokens=cached,
            )
        )
        if engine.step is None:
            self._begin_step(replica.id, engine, now)

    def _begin_step(self, id_: str, engine: _Engine, now: float) -> None:
        step = engine.schedule.schedule(now)
        engine.step = step if step.shares else None
        if engine.step is not None:
            end_s = now + self._device.seconds(step)
            heappush(self._due, (end_s, next(self._numbers), id_))

    def _end_step(self, id_: str, now: float) -> None:
        engine = self._engines[id_]
        step = engine.step
        assert step is not None
        for share in step.shares:
            asked = self._asked.get(share.name)
            if asked is not None and share.computed + share.tokens >= asked.prompt_tokens:
                self.outcome.first_token_s.append(now - asked.at_s)
                engine.cache.add(asked.keys)
                self._store.add(asked.keys)
                del self._asked[share.name]
        engine.schedule.end(step, now)
        for name in list(engine.schedule.times):
            del engine.schedule.times[name]
            self._ledger.finished(self._tickets.pop(name), now)
        if self._each_step and now >= engine.told_at + self._told_every_s:
            self._tell(id_, now)
        self._begin_step(id_, engine, now)

    def _tell(self, id_: str, now: float) -> None:
        engine = self._engines[id_]
        engine.told_at, schedule = now, engine.schedule
        load = ReplicaLoad(
            running=schedule.running,
            waiting=schedule.waiting,
            waiting_tokens=schedule.waiting_tokens if self._counts_waiting else 0,
            kv_cache_usage=schedule.kv_usage,
            step_time_s=0.02,
            measured_at=now,
        )
        stats = RoutingStats(
            load=load,
            max_running=self._device.running,
            kv_capacity_tokens=self._device.kv_tokens,
            draining=False,
            role=Role.UNIFIED,
            told_at=now,
        )
        self._table.report(id_, stats)


A100 = Device()
H200 = Device(kv_tokens=400_000, step_s=0.006, token_s=2.4e-5, context_token_s=4e-8)
SET_UPS: Mapping[str, tuple[Device, str, float, int]] = {
    "conversation": (A100, "conversation", 8.0, 4_096),
    "conversation_untruncated": (A100, "conversation", 7.0, 16_384),
    "code": (A100, "code", 5.0, 8_192),
    "conversation_64_places": (replace(A100, running=64), "conversation", 8.0, 4_096),
    "conversation_h200": (H200, "conversation", 22.0, 8_192),
}
"""The engines, the kind of requests, how many come a second for each engine, and their longest."""


def like_azure(kind: str, rate: float, requests: int, longest: int, seed: str) -> list[Asked]:
    """Requests with the lengths of a public trace's, which come at random at such a rate."""
    rng, at_s = random.Random(seed), 0.0
    found: list[Asked] = []
    for one in azure_like(kind, requests=2 * requests, seed=seed):
        if one.prompt_tokens + one.output_tokens <= longest and len(found) < requests:
            at_s += rng.expovariate(rate)
            found.append(Asked(at_s, one.prompt_tokens, one.output_tokens))
    return found


def told_over_reported(
    set_up: str, engines: int, requests: int, seeds: Sequence[str], *, counts_waiting: bool = True
) -> float:
    """The p99 of first tokens with loads told at each step, over that with one each second."""
    device, kind, rate, longest = SET_UPS[set_up]
    times: list[list[float]] = [[], []]
    for seed in seeds:
        arrivals = like_azure(kind, rate * engines, requests, longest, seed)
        for of, each_step in zip(times, (True, False), strict=True):
            fleet = RoutedFleet(
                engines,
                device,
                each_step=each_step,
                told_every_s=0.03 if each_step else 1.0,
                counts_waiting=counts_waiting,
            )
            of += fleet.run(arrivals).first_token_s
    told, reported = (sorted(of)[int(0.99 * (len(of) - 1))] for of in times)
    return told / reported
