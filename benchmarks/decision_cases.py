"""What :mod:`benchmarks.decisions` times, one case a process."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from loomserve.deployments.gateway.dispatch import ModelRequest
from loomserve.deployments.gateway.load_reports import LoadReports
from loomserve.deployments.gateway.replica_choice import AnswerContext, ReplicaChoice
from loomserve.platform.base.heap import settle_heap
from loomserve.platform.config import Router
from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.front_end.routing import RoutingRequest, checked
from loomserve.platform.placement.policy.graph import Demand, DeviceNode, Graph
from loomserve.platform.placement.policy.helr import MODES, place
from loomserve.platform.rebalancing.policy.forecast import Corrections
from loomserve.platform.rebalancing.policy.heat import classify
from loomserve.platform.rebalancing.policy.planner import propose
from loomserve.platform.rebalancing.policy.snapshot import (
    DeviceSnapshot,
    EngineSnapshot,
    Link,
    ModelSnapshot,
    MoveKind,
    Snapshot,
)
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.state import ReplicaLoad
from loomserve.platform.state.load_report import LoadReport
from loomserve.platform.state.roles import Role
from loomserve.routers.in_flight import InFlight
from loomserve.routers.policies import load_aware
from loomserve.routers.prefix_index import BLOCK_TOKENS
from loomserve.routers.snapshot import RoutingStats
from loomserve.routers.table import ReplicaTable
from tests.routed_fleet import told_over_reported

GIB, MIB = 2**30, 2**20
LIMIT, STALE_S = 1.6, 10.0
PROMPTS, SHARED_BLOCKS, BLOCKS = 64, 8, 16
"""Prompts are of 16 blocks, of which the first eight are one of 64 beginnings."""
OPEN_PER_REPLICA = 4
WARM_UP = 400


class Fleet:
    """Replicas that report once a second while a thousand requests a second are routed.

    One of a hundred drains, and one request of ten has failed on a replica.
    """

    def __init__(self, replicas: int, policy: str) -> None:
        self._rng = random.Random(0)
        self.ids = [f"{number:04x}-replica" for number in range(replicas)]
        self.ledger = InFlight()
        self._usable = frozenset(self.ids)
        self.table = ReplicaTable(self.ledger, stale_after_s=STALE_S)
        self.table.set_replicas(self.ids)
        metrics = GatewayMetrics(CollectorRegistry())
        metrics.set_models({"m": self.ids})
        self.choice = ReplicaChoice("m", Router(policy=policy), self.ledger, metrics, self.table)
        for number in range(replicas):
            self._report(number)
        self._choose = checked(self.choice.choose)
        self._content = EngineRequest("/v1/completions", {"model": "m", "prompt": "a"})
        self._open: deque[tuple[RoutingRequest, str]] = deque()
        self._due, self._turns = 0.0, itertools.cycle(range(replicas))

    def report_those_due(self) -> None:
        self._due += len(self.ids) / 1_000
        while self._due >= 1:
            self._due -= 1
            self._report(next(self._turns))

    def request(self) -> RoutingRequest:
        rng = self._rng
        prompt = rng.randrange(PROMPTS)
        tokens = [*range(prompt, prompt + SHARED_BLOCKS * BLOCK_TOKENS)]
        tokens += [rng.randrange(50_000)] * ((BLOCKS - SHARED_BLOCKS) * BLOCK_TOKENS)
        ended_with = frozenset([rng.choice(self.ids)] if rng.random() < 0.1 else ())
        context = AnswerContext.of(ModelRequest("m", self._content, "id"))
        return RoutingRequest("id", "id", tokens, 256, self._usable, ended_with, context=context)

    def decide(self, request: RoutingRequest) -> float:
        """Seconds of a decision; the request stays until so many others have come."""
        begin = time.thread_time()
        chosen = self._choose(request)
        took_s = time.thread_time() - begin
        assert chosen is not None
        self._open.append((request, chosen))
        if len(self._open) > OPEN_PER_REPLICA * len(self.ids):
            self.choice.left(*self._open.popleft())
        return took_s

    def _report(self, number: int) -> None:
        rng = self._rng
        load = ReplicaLoad(
            running=rng.randrange(64),
            waiting=0,
            kv_cache_usage=rng.random(),
            step_time_s=0.02,
            measured_at=time.monotonic(),
        )
        stats = RoutingStats(
            load=load,
            max_running=64,
            kv_capacity_tokens=200_000,
            draining=number % 100 == 99,
            role=Role.UNIFIED,
            told_at=0.0,
        )
        self.table.report(self.ids[number], stats)


def decisions(replicas: int, policy: str, most: int, most_s: float) -> list[float]:
    """Microseconds of decisions, from a request with its tokens to its booking."""
    fleet = Fleet(replicas, policy)
    settle_heap()  # as in a front end
    took, end = [], time.monotonic() + most_s
    for number in range(most + WARM_UP):
        fleet.report_those_due()
        took.append(1e6 * fleet.decide(fleet.request()))
        if number > 2 * WARM_UP and time.monotonic() > end:
            break
    return took[WARM_UP:]


def tells(replicas: int, policy: str, most: int) -> list[float]:
    """Microseconds in which a load is taken in that an engine tells with a step's outputs."""
    fleet, rng, took = Fleet(replicas, policy), random.Random(1), []

    async def never(address: str, path: str, timeout_s: float) -> str:
        return await asyncio.Future()

    async def run() -> None:
        reports = LoadReports(never, fleet.table)
        reports.set_replicas(dict.fromkeys(fleet.ids, ""))
        for number in range(replicas):
            fleet._report(number)
        settle_heap()
        for step in range(most + WARM_UP):
            if step % 10 == 0:
                fleet.decide(fleet.request())
            load = LoadReport(step, 0, rng.randrange(64), 0, rng.random())
            told = rng.choice(fleet.ids), load, time.monotonic()
            begin = time.thread_time()
            reports.pushed(*told)
            took.append(1e6 * (time.thread_time() - begin))
        reports.close()

    asyncio.run(run())
    return took[WARM_UP:]


def picks(replicas: int, most: int) -> list[float]:
    """Microseconds in which load_aware filters and picks."""
    fleet = Fleet(replicas, "load_aware")
    took = []
    for _ in range(most):
        begin = time.thread_time()
        there = fleet.table.candidates(exclude=frozenset(), now=time.monotonic())
        load_aware.pick(there, load_limit=LIMIT)
        took.append(1e6 * (time.thread_time() - begin))
    return took


def fleet_of_devices(devices: int, a_node: int) -> Snapshot:
    """A device has an engine of a model of its own, with any load; links are within a node."""
    rng = random.Random(0)
    names = [f"d{at}" for at in range(devices)]
    engines = []
    for name in names:
        compute, used = rng.uniform(0.02, 1.2), rng.uniform(0, 0.85)
        engines.append(
            EngineSnapshot(
                id=f"m-{name}",
                model=f"m-{name}",
                device=name,
                prefill=0.2 * compute,
                attention=0.5 * compute,
                linear=0.3 * compute,
                kv_bytes=GIB,
                kv_used_bytes=int(used * GIB),
                kv_growth=2.0 * MIB,
                lend_bytes=GIB,
                borrow_bytes=GIB,
                layers=30,
                layer_bytes=8 * MIB,
                heads=4,
                tpot_s=0.05,
                sync_s=0.002,
                movable=frozenset(MoveKind),
                measured_at_s=0.0,
            )
        )
    return Snapshot(
        at_s=0.0,
        devices=tuple(
            DeviceSnapshot(
                name=name,
                node=f"n{at // a_node}",
                memory_bytes=4 * GIB,
                allocated_bytes=2 * GIB,
                measured_at_s=0.0,
            )
            for at, name in enumerate(names)
        ),
        models=tuple(
            ModelSnapshot(name=each.model, devices=(), replicas=1, replica_bytes=GIB)
            for each in engines
        ),
        engines=tuple(engines),
        links=tuple(
            Link(source=a, target=b, bytes_per_s=2e9, latency_s=1e-5, measured_at_s=0.0)
            for node in range(0, devices, a_node)
            for a in names[node : node + a_node]
            for b in names[node : node + a_node]
            if a != b
        ),
    )


def proposing(devices: int, a_node: int, least_gain: float) -> dict[str, Any]:
    """Seconds of a plan, and the plan as a digest; with a gain of 2 nothing passes."""
    options = Rebalancing(confirm_periods=1, settle_s=0.0, least_gain=least_gain)
    snapshot = fleet_of_devices(devices, a_node)
    begin = time.perf_counter()
    heat = classify({}, snapshot.loads, options)
    proposal = propose(snapshot, heat, Corrections(), options)
    took_s = time.perf_counter() - begin
    chosen = [each.action.model_dump(mode="json") for each in proposal.chosen]
    return {"s": took_s, "actions": len(chosen), "digest": _digest(chosen)}


def graph(devices: int, *, alike: bool) -> Graph:
    """Machines of eight; ``alike``: the devices of a machine are, else no two are of one speed."""
    rng = random.Random(0)
    types = ((40e9, 1e-3), (24e9, 2e-3), (80e9, 0.6e-3), (16e9, 3e-3))
    nodes = []
    for at in range(devices):
        memory, layer_s = types[at // 8 % len(types)]
        off = 1.0 if alike else rng.uniform(0.97, 1.03)
        nodes.append(DeviceNode(f"d{at}", memory, layer_s * off, 1e-4, 1e-4, 5e-4))
    return Graph(
        tuple(nodes),
        tuple(
            tuple(0.0 if a == b else 2e-5 if a // 8 == b // 8 else 2e-4 for b in range(devices))
            for a in range(devices)
        ),
    )


def placing(devices: int, alike: bool) -> dict[str, Any]:
    """Seconds until 80 layers of 140 GB are placed, by mode, and the maps as a digest."""
    demand = Demand(80, 140e9 / 80, stage_bytes=5e8, first_bytes=1e9, last_bytes=1e9)
    over = graph(devices, alike=alike)
    took, maps = {}, []
    for mode in MODES:
        begin = time.perf_counter()
        placement = place(demand, over, mode)
        took[mode] = time.perf_counter() - begin
        maps.append([(stage.node, stage.layers) for stage in placement.pipeline])
    return {"s": took, "digest": _digest(maps)}


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


CASES: dict[str, Callable[..., Any]] = {
    "told": lambda set_up: told_over_reported(set_up, 25, 4_000, ["0", "1", "2"]),
    "decisions": decisions,
    "tells": tells,
    "picks": picks,
    "propose": proposing,
    "helr": placing,
}


def main() -> None:
    name, given = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps(CASES[name](**given)))


if __name__ == "__main__":
    main()
