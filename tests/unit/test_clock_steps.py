"""The time of day is set anew while the platform runs: it decides as if it had not been."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from loomserve.platform.base.errors import TooManyRequests
from loomserve.platform.batch.policy.objects import BatchStatus
from loomserve.platform.costs.step_time import StepTimes
from loomserve.platform.costs.transfer_time import TransferTimes
from loomserve.platform.engine.core.metering import CoreMeter
from loomserve.platform.engine.scheduling.costs import EngineCosts
from loomserve.platform.engine.scheduling.order import QueueOrder
from loomserve.platform.rebalancing.runner import RebalancingRunner
from loomserve.platform.scheduling.options import SchedulerOptions
from loomserve.platform.scheduling.policy.hints import DEADLINE, deadline_of
from loomserve.platform.state.roles import Role
from loomserve.routers.base import Replica
from loomserve.routers.in_flight import InFlight
from loomserve.routers.policy_choice import ReplicaChooser, RoutingTicket
from loomserve.routers.snapshot import RoutingStats
from tests.unit.deployments.gateway.test_lengths import asked
from tests.unit.deployments.gateway.test_refuse_late import Choice, busy
from tests.unit.platform.batch.test_lane import Bench, Engines, hurry, requests
from tests.unit.platform.rebalancing.test_admin import runner
from tests.unit.routers.tables import reported

__all__ = ["runner"]

HOUR_S = 3600.0
Step = Callable[[], None]


@pytest.fixture(params=[-HOUR_S, HOUR_S, 48 * HOUR_S], ids=["-1h", "+1h", "+2d"])
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Step:
    real, real_ns, by = time.time, time.time_ns, request.param

    def apply() -> None:
        monkeypatch.setattr(time, "time", lambda: real() + by)
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(by * 1e9))

    return apply


def test_a_deadline_stays_as_far_away_as_its_client_said(step: Step) -> None:
    before = time.monotonic()
    in_time, late = Choice(busy()), Choice(busy())
    request, _, _ = asked(slo_ms=5000.0)
    step()
    deadline = deadline_of(json.loads(request.content.encoded)["vllm_xargs"])
    assert deadline is not None
    assert before + 5 <= deadline <= time.monotonic() + 5
    assert in_time.choose(within_s=60.0) == "r1"
    with pytest.raises(TooManyRequests) as refused:
        late.choose(within_s=8.0)
    assert refused.value.body()["error"]["code"] == "deadline_unreachable"


def test_a_load_report_is_as_old_as_it_is(step: Step) -> None:
    ledger, meter = InFlight(), CoreMeter()
    earlier, later, last = (RoutingTicket(ledger) for _ in range(3))
    earlier.book(Replica("r1"), time.monotonic())
    stats = RoutingStats(
        load=meter.read(), max_running=4, kv_capacity_tokens=None, draining=False,
        role=Role.UNIFIED,
        told_at=0.0,
    )  # fmt: skip
    step()
    later.book(Replica("r1"), time.monotonic())
    sent = RoutingStats.model_validate(stats.model_dump(mode="json"))
    table = reported(ledger, {"r1": sent})
    chooser = ReplicaChooser("m", "load_aware", table, load_limit=1.6)
    assert chooser.decide(last) is not None
    replica = last.replica
    assert replica is not None
    assert replica.load is not None, "it is not out of date"
    assert replica.load.running + replica.load.waiting == 0
    assert replica.queue_length == 2


def request(name: str, **extra: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[1] * 10,
        sampling_params=SamplingParams(max_tokens=10, extra_args=extra),
        pooling_params=None,
        arrival_time=time.time(),
    )


@pytest.mark.parametrize("queue", ["fair", "deadline"])
def test_requests_that_wait_keep_their_order(step: Step, queue: Any) -> None:
    costs = EngineCosts(
        StepTimes.unprofiled(), TransferTimes.unprofiled(),
        block_size=16, block_bytes=1, step_tokens=64,
    )  # fmt: skip
    swap: Any = SimpleNamespace(tokens_of=lambda name: None)
    order = QueueOrder(costs, swap)
    order.use(SchedulerOptions(queue=queue, deadlines=True), foresees=False)
    now = time.monotonic()
    waiting = [request("first"), request("urgent", **{DEADLINE: now + 30}), request("last")]
    for each in waiting:
        order.on_arrival(each)
        time.sleep(0.001)

    def ranked() -> list[str]:
        at = time.monotonic() + 5
        return [each.request_id for each in sorted(waiting, key=lambda one: order.rank(one, at))]

    before = ranked()
    step()
    newest = request("newest")
    waiting.append(newest)
    order.on_arrival(newest)
    assert ranked() == [*before, "newest"]


def test_a_request_that_was_stamped_before_the_step_is_no_older_than_its_way(step: Step) -> None:
    came = request("came")
    step()
    swap: Any = SimpleNamespace(tokens_of=lambda name: None)
    costs: Any = None
    order = QueueOrder(costs, swap)
    order.use(SchedulerOptions(queue="fair"), foresees=False)
    order.on_arrival(came)
    assert -10.1 < order.seen(came).arrived_s - time.monotonic() <= 0


def test_plans_are_made_on_the_same_rates_and_nothing_is_stale(
    step: Step, runner: RebalancingRunner
) -> None:
    before = runner._observe(0.0).snapshot
    step()
    measured = runner._observe(0.0)
    assert before is not None
    assert measured.snapshot is not None
    assert [each.attention for each in measured.snapshot.engines] == [
        each.attention for each in before.engines
    ]
    assert not runner.rebalancer.state().flaws


def test_batches_go_on(step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)

    async def scenario() -> None:
        bench = Bench(tmp_path / "b", Engines())
        async with bench.running():
            batch_id = bench.submit(requests(20))
            step()
            batch = await bench.ended(batch_id)
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 20)

    asyncio.run(scenario())
