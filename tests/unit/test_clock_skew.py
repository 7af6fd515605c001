"""Engines on other machines, whose clocks show other times: loads are as old as they are."""

from __future__ import annotations

import asyncio
import time

import pytest

from loomserve.deployments.gateway.load_reports import LoadReports
from loomserve.platform.batch.dispatch import engines
from loomserve.platform.state import ReplicaLoad
from loomserve.platform.state.roles import Role
from loomserve.routers.base import Replica
from loomserve.routers.in_flight import InFlight
from loomserve.routers.policy_choice import RoutingTicket
from loomserve.routers.snapshot import RoutingStats
from loomserve.routers.table import ReplicaTable
from tests.unit.platform.fleet import heartbeats
from tests.unit.platform.rebalancing.test_observe import footprint

NOBODY: frozenset[str] = frozenset()
STALE_S = 5.0
SKEWS_S = (-1e6, -10.0, 0.0, 10.0, 1e6)

skews = pytest.mark.parametrize("skew_s", SKEWS_S)


def report(skew_s: float, age_s: float = 0.0, running: int = 3) -> RoutingStats:
    """As an engine tells it whose clock shows ``skew_s`` more than this process's."""
    clock_s = time.monotonic() + skew_s
    load = ReplicaLoad(
        running=running,
        waiting=0,
        kv_cache_usage=0.5,
        step_time_s=0.1,
        measured_at=clock_s - age_s,
    )
    return RoutingStats(
        load=load,
        max_running=4,
        kv_capacity_tokens=1_000,
        draining=False,
        role=Role.UNIFIED,
        told_at=clock_s,
    )


def asked(skew_s: float, age_s: float, ledger: InFlight) -> ReplicaTable:
    """A table after one report."""
    table = ReplicaTable(ledger, stale_after_s=STALE_S)

    async def get(address: str, path: str, timeout_s: float) -> str:
        return report(skew_s, age_s).model_dump_json()

    async def run() -> None:
        reports = LoadReports(get, table)
        reports.set_replicas({"r": "there"})
        await asyncio.sleep(0.02)

    asyncio.run(run())
    return table


@skews
def test_a_gateway_adds_what_it_has_sent_since_the_measurement_and_nothing_twice(
    skew_s: float,
) -> None:
    ledger = InFlight()
    RoutingTicket(ledger, prompt_tokens=100).book(Replica("r"), time.monotonic())
    time.sleep(0.01)
    table = asked(skew_s, 0.0, ledger)
    assert table.replica(0).queue_length == 3, "the first is among the three"
    time.sleep(0.01)
    RoutingTicket(ledger, prompt_tokens=100).book(Replica("r"), time.monotonic())
    assert table.replica(0).queue_length == 4
    (utilisation,) = table.candidates(exclude=NOBODY, now=time.monotonic()).utilisation
    assert utilisation == pytest.approx(4 / 4 + 0.5 + 0.1)


@skews
@pytest.mark.parametrize("age_s", [0.0, STALE_S - 1, STALE_S + 1])
def test_a_load_counts_until_it_is_too_old_by_the_gateways_clock(
    skew_s: float, age_s: float
) -> None:
    table = asked(skew_s, age_s, InFlight())
    (known,) = table.candidates(exclude=NOBODY, now=time.monotonic()).known
    assert bool(known) == (age_s < STALE_S)


@skews
def test_the_controller_and_the_lane_take_a_load_as_old_as_it_is(skew_s: float) -> None:
    fleet, now = heartbeats.fleet(1), time.monotonic()
    beat = heartbeats.report(
        told_at=now + skew_s,
        load=report(skew_s).load,
        footprint=footprint(memory_measured_at=now + skew_s - 2, ready_at=now + skew_s - 60),
    )
    fleet.report(beat, now)
    (record,) = fleet.registry.snapshot(now).replicas
    kept = record.heartbeat
    assert kept.stats.load is not None
    assert kept.stats.load.measured_at == pytest.approx(now, abs=0.5)
    assert kept.footprint is not None
    assert kept.footprint.memory_measured_at == pytest.approx(now - 2, abs=0.5)
    assert kept.footprint.ready_at == pytest.approx(now - 60, abs=0.5)
    # The lane's machine shows yet another time, and asks three seconds later.
    answer = fleet.views.engines(now + 3)
    lane_s = now + 3 + 2 * skew_s
    live = answer.models[beat.model.name].received(lane_s).engines
    (engine,) = engines(live, (), lane_s)
    assert engine.running == 3
    assert engines(live, (), lane_s + 8) == []
