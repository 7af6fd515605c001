from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.parser import text_string_to_metric_families

from loomserve.kvstore.metrics import KvStoreMetrics
from loomserve.platform.access.token_meter import KeyMetrics
from loomserve.platform.adapters.messages import Adapter, AdapterRoute
from loomserve.platform.batch.metrics import BatchMetrics
from loomserve.platform.disaggregation.metrics import HandoffMetrics
from loomserve.platform.elastic.cold_start_queue import WaitingMetrics
from loomserve.platform.engine.footprint import Footprint
from loomserve.platform.front_end.metrics import ContinuationMetrics
from loomserve.platform.http.exposition import merge, split_gauges
from loomserve.platform.lending.messages import LentReport, LoanReport
from loomserve.platform.lending.metrics import LendingMetrics
from loomserve.platform.rebalancing.metrics import RebalancingMetrics
from loomserve.platform.rebalancing.plans.reports import (
    ActionCount,
    DeviceLoad,
    ModelScaling,
    RebalancingState,
    ScalingCount,
    ScalingReport,
)
from loomserve.platform.rebalancing.policy.heat import Level
from loomserve.platform.rebalancing.policy.measured import Flaw, Unfit
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.scheduling.metrics import PreemptionMetrics, ScheduledRequestMetrics
from loomserve.platform.state import (
    BatchLaneState,
    BatchState,
    KvModelState,
    KvNetworkState,
    KvPeerState,
    KvState,
    ModelStatus,
    OfflineModelState,
    ShardState,
)
from loomserve.platform.usage.files import UsageRecord
from loomserve.platform.usage.meter import UsageMetrics

CATALOG = Path(__file__).parents[2] / "docs" / "metrics.md"

KV_STATE = KvState(
    capacity_bytes=100, used_bytes=40, ssd_capacity_bytes=1000, ssd_used_bytes=500, leases=1,
    writers=2, corrupt_blocks=3,
    models=(
        KvModelState(
            model="chat", blocks_in_memory=4, blocks_on_ssd=5, bytes_in_memory=40,
            bytes_on_ssd=50, hit_blocks=6, missed_blocks=7, evicted_blocks=8,
        ),
    ),
    network=KvNetworkState(
        node="n1",
        peers=(KvPeerState(node="n2", fetches=9, setup_s=0.002, bytes_per_s=1e9),),
        directory_blocks=10, missed_messages=11, fetched_blocks=12, fetched_bytes=13,
        failed_fetches={"gone": 14},
    ),
)  # fmt: skip

BATCH_STATE = BatchLaneState(
    batches=(
        BatchState(
            id="batch_1", api_key="", status="in_progress", endpoint="/v1/completions",
            created_at=1, expires_at=2, total=10, completed=2, failed=1, in_flight=2,
            eta_s=60, late=True,
        ),
    ),
    by_status={"in_progress": 1, "completed": 4}, answered_lines=30, failed_lines=3, retries=1,
    offline_models=(
        OfflineModelState(name="old", ready=True, problem=None, batches=7, splits=2),
    ),
)  # fmt: skip

REBALANCING_STATE = RebalancingState(
    mode="auto", paused=False, problem=None, running=None,
    devices=(DeviceLoad(device="core0", compute=0.9, memory=0.4, level=Level.HOT),),
    flaws=(Flaw(Unfit.STALE, "r1"), Flaw(Unfit.PARTIAL, "chat")),
    actions=(ActionCount(kind="requests", outcome="done", count=3),),
    rejected={"no_gain": 7}, moved_bytes={"requests": 4096}, paused_s=0.5,
    scaling=ScalingReport(
        models=(ModelScaling(model="chat", replicas=2, load=1.5),),
        decisions=(ScalingCount(model="chat", direction="up", reason="requests", count=4),),
    ),
)  # fmt: skip

Sample = tuple[str, frozenset[tuple[str, str]], str]


def text_of(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


def samples(text: str, **added: str) -> set[Sample]:
    """What the reference parser reads, with values as text so that NaN equals NaN."""
    return {
        (sample.name, frozenset({**sample.labels, **added}.items()), str(float(sample.value)))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(registry: CollectorRegistry, name: str, labels: Mapping[str, str]) -> float | None:
    return registry.get_sample_value(name, dict(labels))


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> GatewayMetrics:
    metrics = GatewayMetrics(registry)
    metrics.set_models({"chat": ["r1"]})
    return metrics


def use_everything(metrics: GatewayMetrics) -> None:
    metrics.finished("chat", "/v1/completions", 200, 1.5, 2000.0)
    metrics.streamed("chat", ttft_s=0.05, stream_s=1.0, chunks=11)
    metrics.client_disconnected("chat")
    metrics.rejected("unauthorized")
    metrics.set_decisions({("chat", "load_aware", "coolest"): 3})
    metrics.length_predicted("chat", "made")
    metrics.length_observed("chat", 1.0)
    metrics.refused_late("chat")
    metrics.alias_chosen("canary", "chat")
    one = Adapter(name="sql", model="chat", id=1, digest="d", source="s", rank=8)
    metrics.adapters.set_adapters([AdapterRoute(adapter=one)])
    metrics.adapters.finished("chat", "sql", 200)


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        (
            "loomserve_requests_total",
            {"model": "chat", "endpoint": "/v1/completions", "status": "200"},
        ),
        ("loomserve_rejected_requests_total", {"reason": "unauthorized"}),
        ("loomserve_time_to_first_token_seconds_count", {"model": "chat"}),
        ("loomserve_time_to_first_token_seconds_bucket", {"model": "chat", "le": "0.06"}),
        ("loomserve_time_per_output_token_seconds_bucket", {"model": "chat", "le": "0.1"}),
        ("loomserve_request_duration_seconds_bucket", {"model": "chat", "le": "1.5"}),
        ("loomserve_client_disconnects_total", {"model": "chat"}),
        ("loomserve_slo_deadline_seconds_bucket", {"model": "chat", "le": "2.0"}),
        ("loomserve_slo_met_total", {"model": "chat", "met": "true"}),
        ("loomserve_length_predictions_total", {"model": "chat", "outcome": "made"}),
        ("loomserve_length_observed_total", {"model": "chat"}),
        ("loomserve_length_error_tokens_total", {"model": "chat"}),
        ("loomserve_refused_late_total", {"model": "chat"}),
        ("loomserve_alias_requests_total", {"alias": "canary", "model": "chat"}),
    ],
)
def test_each_event_is_counted_once_under_its_labels(
    registry: CollectorRegistry, metrics: GatewayMetrics, name: str, labels: dict[str, str]
) -> None:
    before = value(registry, name, labels) or 0.0
    use_everything(metrics)
    assert value(registry, name, labels) == before + 1
    use_everything(metrics)
    assert value(registry, name, labels) == before + 2


def test_a_time_is_not_counted_in_the_buckets_below_it(
    registry: CollectorRegistry, metrics: GatewayMetrics
) -> None:
    use_everything(metrics)
    for name, below in [
        ("loomserve_time_to_first_token_seconds_bucket", "0.04"),
        ("loomserve_time_per_output_token_seconds_bucket", "0.075"),
        ("loomserve_request_duration_seconds_bucket", "1.0"),
        ("loomserve_slo_deadline_seconds_bucket", "1.0"),
    ]:
        assert value(registry, name, {"model": "chat", "le": below}) == 0


@pytest.mark.parametrize(
    ("status", "duration_s", "met"),
    [(200, 0.5, "true"), (200, 1.0, "true"), (200, 1.1, "false"), (503, 0.1, "false")],
)
def test_a_deadline_is_met_by_a_success_in_time(
    registry: CollectorRegistry, metrics: GatewayMetrics, status: int, duration_s: float, met: str
) -> None:
    metrics.finished("chat", "/v1/completions", status, duration_s, 1000.0)
    for label in ("true", "false"):
        labels = {"model": "chat", "met": label}
        assert value(registry, "loomserve_slo_met_total", labels) == (label == met)


def test_a_request_without_a_deadline_counts_neither_as_met_nor_as_missed(
    registry: CollectorRegistry, metrics: GatewayMetrics
) -> None:
    metrics.finished("chat", "/v1/completions", 200, 0.5, None)
    assert value(registry, "loomserve_slo_deadline_seconds_count", {"model": "chat"}) == 0
    for met in ("true", "false"):
        labels = {"model": "chat", "met": met}
        assert value(registry, "loomserve_slo_met_total", labels) == 0


def test_an_answer_of_one_chunk_has_no_time_per_output_token(
    registry: CollectorRegistry, metrics: GatewayMetrics
) -> None:
    metrics.streamed("chat", ttft_s=0.1, stream_s=0.0, chunks=1)
    for name, count in (("to_first_token", 1), ("per_output_token", 0)):
        metric = f"loomserve_time_{name}_seconds_count"
        assert value(registry, metric, {"model": "chat"}) == count


def test_decisions_are_totals_and_never_counted_twice(
    registry: CollectorRegistry, metrics: GatewayMetrics
) -> None:
    name = "loomserve_route_decisions_total"
    labels = {"model": "chat", "policy": "load_aware", "reason": "coolest"}
    for total in (3, 3, 10):
        metrics.set_decisions({("chat", "load_aware", "coolest"): total})
        assert value(registry, name, labels) == total


def test_requests_are_in_flight_and_queued_only_inside_their_blocks(
    registry: CollectorRegistry, metrics: GatewayMetrics
) -> None:
    on_r1 = {"model": "chat", "replica": "r1"}
    with metrics.queued("chat"):
        assert value(registry, "loomserve_gateway_queue", {"model": "chat"}) == 1
    assert value(registry, "loomserve_gateway_queue", {"model": "chat"}) == 0
    metrics.in_flight("chat")["r1"] += 2
    assert value(registry, "loomserve_requests_in_flight", on_r1) == 2
    metrics.in_flight("chat")["r1"] -= 2
    assert value(registry, "loomserve_requests_in_flight", on_r1) == 0


def test_a_replica_that_is_gone_is_not_shown_even_when_its_requests_end_later(
    registry: CollectorRegistry, metrics: GatewayMetrics
) -> None:
    metrics.in_flight("chat")["r1"] += 1
    metrics.set_models({"chat": ["r2"]})
    metrics.in_flight("chat")["r1"] -= 1
    name = "loomserve_requests_in_flight"
    assert value(registry, name, {"model": "chat", "replica": "r1"}) is None
    assert value(registry, name, {"model": "chat", "replica": "r2"}) == 0


def test_an_unloaded_model_loses_its_replicas_and_counts_as_unknown(
    registry: CollectorRegistry, metrics: GatewayMetrics
) -> None:
    metrics.set_models({})
    metrics.client_disconnected("chat")
    in_flight = {"model": "chat", "replica": "r1"}
    assert value(registry, "loomserve_requests_in_flight", in_flight) is None
    assert value(registry, "loomserve_client_disconnects_total", {"model": "unknown"}) == 1
    assert value(registry, "loomserve_client_disconnects_total", {"model": "chat"}) == 0


@settings(deadline=None)
@given(st.lists(st.text(), max_size=20))
def test_no_client_can_make_a_new_model_label(asked: list[str]) -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    metrics.set_models({"chat": []})
    for model in asked:
        metrics.finished(model, "/v1/completions", 404, 0.1, None)
    assert {dict(labels)["model"] for _, labels, _ in samples(text_of(registry))} == {
        "chat",
        "unknown",
    }


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("loomserve_kv_up", {}, 1),
        ("loomserve_kv_capacity_bytes", {"tier": "memory"}, 100),
        ("loomserve_kv_capacity_bytes", {"tier": "ssd"}, 1000),
        ("loomserve_kv_used_bytes", {"tier": "memory"}, 40),
        ("loomserve_kv_used_bytes", {"tier": "ssd"}, 500),
        ("loomserve_kv_blocks", {"model": "chat", "tier": "memory"}, 4),
        ("loomserve_kv_blocks", {"model": "chat", "tier": "ssd"}, 5),
        ("loomserve_kv_hit_blocks_total", {"model": "chat"}, 6),
        ("loomserve_kv_missed_blocks_total", {"model": "chat"}, 7),
        ("loomserve_kv_evicted_blocks_total", {"model": "chat"}, 8),
        ("loomserve_kv_corrupt_blocks_total", {}, 3),
        ("loomserve_kv_peers", {"node": "n1"}, 1),
        ("loomserve_kv_directory_blocks", {"node": "n1"}, 10),
        ("loomserve_kv_missed_messages_total", {"node": "n1"}, 11),
        ("loomserve_kv_fetched_blocks_total", {"node": "n1"}, 12),
        ("loomserve_kv_fetched_bytes_total", {"node": "n1"}, 13),
        ("loomserve_kv_failed_fetches_total", {"node": "n1", "reason": "gone"}, 14),
        ("loomserve_kv_link_bytes_per_second", {"node": "n1", "peer": "n2"}, 1e9),
    ],
)
def test_the_kv_stores_figures_are_shown_while_it_answers(
    registry: CollectorRegistry, name: str, labels: dict[str, str], expected: int
) -> None:
    metrics = KvStoreMetrics(registry)
    metrics.set_states({labels.get("node", ""): KV_STATE})
    assert value(registry, name, labels) == expected
    metrics.set_states({})
    assert value(registry, name, labels) == (0 if name == "loomserve_kv_up" else None)


def test_the_kv_stores_of_several_nodes_are_told_apart(registry: CollectorRegistry) -> None:
    metrics = KvStoreMetrics(registry)
    more = KV_STATE.model_copy(update={"corrupt_blocks": 5, "models": ()})
    metrics.set_states({"n1": KV_STATE, "n2": more})
    assert value(registry, "loomserve_kv_corrupt_blocks_total", {"node": "n1"}) == 3
    assert value(registry, "loomserve_kv_corrupt_blocks_total", {"node": "n2"}) == 5
    hits = "loomserve_kv_hit_blocks_total"
    assert value(registry, hits, {"node": "n1", "model": "chat"}) == 6
    assert value(registry, hits, {"node": "n2", "model": "chat"}) is None


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("loomserve_batch_up", {}, 1),
        ("loomserve_batch_batches", {"status": "completed"}, 4),
        ("loomserve_batch_open_lines", {"at": "engine"}, 2),
        ("loomserve_batch_open_lines", {"at": "queue"}, 5),
        ("loomserve_batch_lines_total", {"outcome": "completed"}, 30),
        ("loomserve_batch_lines_total", {"outcome": "failed"}, 3),
        ("loomserve_batch_retries_total", {}, 1),
        ("loomserve_batch_eta_seconds", {}, 60),
        ("loomserve_batch_late", {}, 1),
        ("loomserve_batch_offline_up", {"model": "old"}, 1),
        ("loomserve_batch_offline_batches_total", {"model": "old", "outcome": "completed"}, 7),
        ("loomserve_batch_offline_batches_total", {"model": "old", "outcome": "out_of_memory"}, 2),
    ],
)
def test_the_batch_lanes_figures_are_shown_while_it_answers(
    registry: CollectorRegistry, name: str, labels: dict[str, str], expected: int
) -> None:
    metrics = BatchMetrics(registry)
    metrics.set_state(BATCH_STATE)
    assert value(registry, name, labels) == expected
    metrics.set_state(None)
    assert value(registry, name, labels) == (0 if name == "loomserve_batch_up" else None)


def catalog() -> dict[str, set[str]]:
    """Metric name to label names, from the rows of the catalog's tables."""
    rows = re.findall(r"^\| `(loomserve_\w+)` \| ([^|]*) \|", CATALOG.read_text(), re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


@pytest.mark.parametrize(
    ("name", "labels", "shown"),
    [
        ("loomserve_rebalancing_utilisation", {"device": "core0", "of": "compute"}, 0.9),
        ("loomserve_rebalancing_utilisation", {"device": "core0", "of": "memory"}, 0.4),
        ("loomserve_rebalancing_flaws", {}, 2),
        ("loomserve_rebalancing_actions_total", {"kind": "requests", "outcome": "done"}, 3),
        ("loomserve_rebalancing_moved_bytes_total", {"kind": "requests"}, 4096),
        ("loomserve_rebalancing_pause_seconds_total", {}, 0.5),
        ("loomserve_rebalancing_rejected_total", {"reason": "no_gain"}, 7),
        ("loomserve_scaling_replicas", {"model": "chat"}, 2),
        ("loomserve_scaling_load", {"model": "chat"}, 1.5),
        (
            "loomserve_scaling_decisions_total",
            {"model": "chat", "direction": "up", "reason": "requests"},
            4,
        ),
    ],
)
def test_rebalancings_figures_are_shown_while_the_controller_answers(
    registry: CollectorRegistry, name: str, labels: dict[str, str], shown: float
) -> None:
    metrics = RebalancingMetrics(registry)
    metrics.set_state(REBALANCING_STATE)
    assert value(registry, name, labels) == shown
    assert value(registry, "loomserve_rebalancing_up", {}) == 1
    metrics.set_state(REBALANCING_STATE.model_copy(update={"problem": "another acts"}))
    assert value(registry, "loomserve_rebalancing_up", {}) == 0
    metrics.set_state(None)
    assert value(registry, name, labels) is None
    assert value(registry, "loomserve_rebalancing_up", {}) == 0


def page_of_everything() -> str:
    """A metrics page with a sample of each metric that there is."""
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    metrics.set_models({"chat": ["r1"]})
    use_everything(metrics)
    keys = KeyMetrics(registry)
    keys.used("alice", 1, 2)
    keys.set_file(up=True)
    UsageMetrics(registry).used(UsageRecord("", "alice", "chat", requests=1))
    KvStoreMetrics(registry).set_states({"": KV_STATE})
    BatchMetrics(registry).set_state(BATCH_STATE)
    RebalancingMetrics(registry).set_state(REBALANCING_STATE)
    waiting = WaitingMetrics(registry)
    waiting.set_states({"chat": ModelStatus.ASLEEP})
    waiting.waited("chat", "ready", 0.3)
    continuation = ContinuationMetrics(registry).of("chat")
    continuation.continued("gone")
    continuation.paused(0.1)
    continuation.ended("no_replica")
    engine = {"model": "chat", "replica": "r1", "device": "core0"}
    of_engine = CollectorRegistry()
    lending = LendingMetrics(of_engine)
    lending.borrowed([("cold", borrowed(shard=shard("away", 1)))], {"DIED": 1}, 0)
    lending.lent([("hot", lent())])
    handoff = HandoffMetrics(of_engine)
    handoff.prompt("local")
    handoff.prompt_tokens(stored=1, recomputed=0)
    Footprint({}, start_s=0.0, measure=AsyncMock(), registry=of_engine)
    preemptions = PreemptionMetrics(
        partial(Counter, registry=of_engine), partial(Gauge, registry=of_engine), ["model_name"]
    )
    preemptions.observe({}, ("demo",))
    engines_page = text_of(of_engine) + ScheduledRequestMetrics().page(oldest_waiting_s=0)
    return merge([({}, text_of(registry)), (engine, engines_page)])


def test_the_catalog_lists_every_metric_with_its_labels() -> None:
    exported: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page_of_everything()):
        name = family.name + ("_total" if family.type == "counter" else "")
        if not name.endswith("_created"):
            labels = {label for sample in family.samples for label in sample.labels}
            exported[name] = labels - {"le", "model_name"}
    assert catalog() == exported


def test_each_engine_has_scheduling_metrics_of_its_own() -> None:
    one, other = ScheduledRequestMetrics(), ScheduledRequestMetrics()
    one.finished(weighted_turnaround=1.5, preemptions=2)
    shown = {(name, value) for name, _, value in samples(one.page(oldest_waiting_s=7))}
    assert shown >= {
        ("loomserve_weighted_turnaround_sum", "1.5"),
        ("loomserve_request_preemptions_sum", "2.0"),
        ("loomserve_oldest_waiting_seconds", "7.0"),
    }
    untouched = {(name, value) for name, _, value in samples(other.page(oldest_waiting_s=0))}
    assert untouched >= {
        ("loomserve_weighted_turnaround_count", "0.0"),
        ("loomserve_request_preemptions_count", "0.0"),
        ("loomserve_oldest_waiting_seconds", "0.0"),
    }


def test_totals_of_an_engine_are_counted_once() -> None:
    registry = CollectorRegistry()
    metrics = PreemptionMetrics(
        partial(Counter, registry=registry), partial(Gauge, registry=registry), ["engine"]
    )
    for swapped, recomputed, used in [(2, 0, 9), (5, 1, 4), (5, 1, 0)]:
        numbers = {"swapped_out": swapped, "recomputed": recomputed, "swap_used_bytes": used}
        metrics.observe(numbers, ("0",))
    name = "loomserve_preemptions_total"
    assert registry.get_sample_value(name, {"engine": "0", "mode": "swap"}) == 5
    assert registry.get_sample_value(name, {"engine": "0", "mode": "recompute"}) == 1
    assert registry.get_sample_value("loomserve_swap_used_bytes", {"engine": "0"}) == 0


def borrowed(name: str = "loan-1", **changes: Any) -> LoanReport:
    loan = LoanReport(
        name=name, partition=1, usable_blocks=8, free_blocks=5, requests=2, open=True,
        phase="open", shard=None, most_tokens=99, tasks=10, post_ns=10**9, wait_ns=2 * 10**9,
        wait_max_ns=5 * 10**8, pickup_ns=0, service_ns=10**9,
    )  # fmt: skip
    return loan.model_copy(update=changes)


def shard(phase: str, copied_bytes: int) -> ShardState:
    return ShardState(phase=phase, pause_s=0.25, copied_bytes=copied_bytes)


def lent(name: str = "loan-1") -> LentReport:
    return LentReport(
        name=name, blocks=3, most_blocks=6, taken_back_blocks=0, closed="OPEN", slicing={},
        polled=6, idled=4, service_ns=10**9, pickup_ns=10**8,
    )  # fmt: skip


def of_lending(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"loomserve_lending_{name}", labels)


def test_a_shard_is_shown_while_its_loan_is_open_and_its_bytes_are_counted() -> None:
    metrics = LendingMetrics(registry := CollectorRegistry())
    for phase, copied, away in (("leaving", 100, 0), ("away", 400, 1), ("returning", 500, 1)):
        metrics.borrowed([("of-part", borrowed(shard=shard(phase, copied)))], {}, 0)
        assert of_lending(registry, "shard_away", lender="of-part") == away
        assert of_lending(registry, "shard_pause_seconds", lender="of-part") == 0.25
        assert of_lending(registry, "shard_copied_bytes_total", lender="of-part") == copied
    metrics.borrowed([("of-part", borrowed("loan-2"))], {}, 0)
    assert of_lending(registry, "shard_away", lender="of-part") is None
    assert of_lending(registry, "shard_copied_bytes_total", lender="of-part") == 500


def test_counters_of_loans_go_on_from_one_loan_to_the_next() -> None:
    metrics = LendingMetrics(registry := CollectorRegistry())
    for loans in (
        [borrowed(tasks=10)],
        [borrowed(tasks=15)],
        [],
        [borrowed("loan-2", tasks=4, wait_ns=10**9)],
    ):
        metrics.borrowed([("counted", loan) for loan in loans], {}, 0)
    assert of_lending(registry, "tasks_total", lender="counted") == 19
    assert of_lending(registry, "wait_seconds_total", lender="counted") == pytest.approx(3)


def test_gauges_of_loans_show_only_those_there_are() -> None:
    metrics = LendingMetrics(registry := CollectorRegistry())
    metrics.borrowed([("gone", borrowed()), ("there", borrowed("loan-2"))], {}, 0)
    assert of_lending(registry, "borrowed_blocks", lender="gone") == 8
    assert of_lending(registry, "longest_wait_seconds", lender="gone") == 0.5
    metrics.borrowed([("there", borrowed("loan-2"))], {}, 0)
    assert of_lending(registry, "borrowed_blocks", lender="gone") is None
    metrics.lent([("sums", lent()), ("sums", lent("loan-2"))])
    assert of_lending(registry, "lent_blocks", borrower="sums") == 6


def test_broken_loans_are_counted_once() -> None:
    metrics = LendingMetrics(registry := CollectorRegistry())
    for count in (1, 1, 3):
        metrics.borrowed([], {"REVOKED": count}, 0)
    assert of_lending(registry, "broken_loans_total", reason="REVOKED") == 3


def test_the_engine_metrics_in_the_catalog_exist_in_the_installed_vllm() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    folder = Path(spec.origin).parent / "v1" / "metrics"
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    named = set(re.findall(r"`(vllm:\w+)`", CATALOG.read_text()))
    assert named
    assert {name for name in named if f'"{name.removesuffix("_total")}"' not in source} == set()


label_values = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
floats = st.floats(width=32)


@st.composite
def processes(draw: st.DrawFn) -> list[tuple[dict[str, str], str]]:
    """Processes of one program: the same families, each with samples of its own."""
    parts = []
    for replica in draw(st.lists(label_values, max_size=3, unique=True)):
        registry = CollectorRegistry()
        gauge = Gauge("vllm:g", draw(label_values), ["engine", "kind"], registry=registry)
        for labels in draw(st.lists(st.tuples(label_values, label_values), max_size=3)):
            gauge.labels(*labels).set(draw(floats))
        counter = Counter("c", "Counts.", ["le_kind"], registry=registry)
        for label in draw(st.lists(label_values, max_size=3)):
            counter.labels(label).inc()
        Histogram("h", "Times.", registry=registry).observe(draw(floats))
        parts.append(({"replica": replica, "model": draw(label_values)}, text_of(registry)))
    return parts


@settings(deadline=None)
@given(processes())
def test_a_merged_page_holds_exactly_the_samples_of_its_parts(
    parts: list[tuple[dict[str, str], str]],
) -> None:
    page = merge(parts)
    expected = {
        ("loomserve_scrape_up", frozenset(labels.items()), "1.0") for labels, _ in parts
    }.union(*(samples(text, **labels) for labels, text in parts))
    assert samples(page) == expected
    types = re.findall(r"^# TYPE (\S+)", page, re.MULTILINE)
    assert len(types) == len(set(types))


@settings(deadline=None)
@given(processes())
def test_merging_a_merged_page_adds_only_its_own_scrape_sample(
    parts: list[tuple[dict[str, str], str]],
) -> None:
    once = merge(parts)
    again = samples(merge([({"page": "1"}, once)]))
    up = ("loomserve_scrape_up", frozenset({("page", "1")}), "1.0")
    assert again == samples(once, page="1") | {up}


GOOD = ({"replica": "good"}, "# HELP up Is it up.\n# TYPE up gauge\nup 1\n")


@pytest.mark.parametrize(
    "text",
    [
        None,
        "<html>502 Bad Gateway</html>",
        "up one\n",
        "up1\n",
        "up 1_0\n",
        'up{a="b} 1\n',
        'up{a="\\q"} 1\n',
        'up{a="b",a="c"} 1\n',
        "up{a=b} 1\n",
        "up 1\nup 2\n",
        'up{a="1",b="2"} 1\nup{b="2",a="1"} 1\n',
        "# TYPE up counter\nup 1\n",
        "# TYPE up sometimes\nup 1\n",
        "up 1\n# TYPE up gauge\n",
        "# TYPE up gauge\n# TYPE up counter\nup 1\n",
        "# TYPE latency histogram\nlatency 1\n",
    ],
)
def test_a_part_that_cannot_be_merged_is_left_out_and_reported(text: str | None) -> None:
    page = merge([GOOD, ({"replica": "bad"}, text)])
    assert samples(page) == {
        ("up", frozenset({("replica", "good")}), "1.0"),
        ("loomserve_scrape_up", frozenset({("replica", "good")}), "1.0"),
        ("loomserve_scrape_up", frozenset({("replica", "bad")}), "0.0"),
    }


def test_two_processes_with_the_same_labels_do_not_give_a_sample_twice() -> None:
    assert samples(merge([GOOD, GOOD])) == {
        ("up", frozenset({("replica", "good")}), "1.0"),
        ("loomserve_scrape_up", frozenset({("replica", "good")}), "0.0"),
    }


def test_a_label_that_would_be_hidden_is_kept_under_another_name() -> None:
    page = merge([({"model": "chat"}, 'x{model="inner",engine="0"} 1\n')])
    labels = {("model", "chat"), ("exported_model", "inner"), ("engine", "0")}
    assert ("x", frozenset(labels), "1.0") in samples(page)


def test_spaces_timestamps_and_comments_of_the_format_are_understood() -> None:
    text = '# a comment\n\n#\n  x { a = "}" , b = "," , }  1e3  1700000000000\ny{} +Inf\nz\tNaN\n'
    assert samples(merge([({}, text)])) >= {
        ("x", frozenset({("a", "}"), ("b", ",")}), "1000.0"),
        ("y", frozenset(), "inf"),
        ("z", frozenset(), "nan"),
    }


def test_nothing_merges_to_an_empty_page() -> None:
    assert merge([]) == ""


def test_gauges_are_told_from_what_is_counted() -> None:
    registry = CollectorRegistry()
    Counter("asked", "Asked.", ["who"], registry=registry).labels("a").inc(2)
    Gauge("open", "Open.", registry=registry).set(3)
    Histogram("took", "Took.", registry=registry).observe(1)
    Gauge("free", "Free.", ["where"], registry=registry).labels("a # TYPE b").set(4)
    page = generate_latest(registry).decode()
    counted, gauges = split_gauges(page)
    of_counted = {one.name for one in text_string_to_metric_families(counted)}
    assert of_counted == {"asked", "took"}
    assert {"open", "free"} <= {one.name for one in text_string_to_metric_families(gauges)}
    assert sorted(f"{counted}\n{gauges}".split("\n")) == sorted(page.split("\n"))
