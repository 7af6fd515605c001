"""What a gateway counts of its requests comes into files and metrics, and outlives failures."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from loomserve.platform.config import ApiKey
from loomserve.platform.requests.usage import RequestUsage
from loomserve.platform.usage.files import UsageFiles, UsageRecord
from loomserve.platform.usage.meter import UsageMeter, UsageMetrics

ALICE = ApiKey(name="alice", hash="sha256:" + "0" * 64)
ALL = ("1970-01-01T00:00Z", "2100-01-01T00:00Z")


def used(prompt: int = 100, cached: int = 40, answer: int = 20, **more: float) -> RequestUsage:
    usage = RequestUsage(completion_tokens=answer, **more)  # type: ignore[arg-type]
    usage.add_prompt("p", prompt, cached)
    return usage


class Gateway:
    def __init__(self, folder: Path) -> None:
        self.now_s = 30.0
        self.registry = CollectorRegistry()
        metrics = UsageMetrics(self.registry)
        self.meter = UsageMeter(metrics, UsageFiles(folder), clock=lambda: self.now_s)

    def kept(self) -> list[UsageRecord]:
        return list(self.meter.read(*ALL))

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"loomserve_usage_{name}_total", labels)


@pytest.fixture
def gateway(tmp_path: Path) -> Gateway:
    return Gateway(tmp_path / "usage")


def test_requests_of_a_minute_are_one_line_for_each_key_and_model(gateway: Gateway) -> None:
    for key, model in ((ALICE, "chat"), (ALICE, "chat"), (ALICE, "code"), (None, "chat")):
        gateway.meter.charge(key, model, used(device_s=0.5, timed_tokens=80))
    gateway.now_s = 90
    gateway.meter.charge(ALICE, "chat", used(device_s=0.5, timed_tokens=80))
    minutes = [(each.minute[-6:-1], each.key, each.model) for each in gateway.kept()]
    assert sorted(minutes) == [
        ("00:00", "", "chat"),
        ("00:00", "alice", "chat"),
        ("00:00", "alice", "code"),
        ("00:01", "alice", "chat"),
    ]
    first = next(each for each in gateway.kept() if each.requests == 2)
    assert (first.prompt_tokens, first.cached_tokens, first.completion_tokens) == (200, 80, 40)
    assert first.device_seconds == 1.0


def test_metrics_have_the_sums(gateway: Gateway) -> None:
    for _ in range(2):
        gateway.meter.charge(ALICE, "chat", used(device_s=0.5, timed_tokens=80))
    labels = {"key": "alice", "model": "chat"}
    assert gateway.metric("requests", **labels) == 2
    assert gateway.metric("tokens", kind="prompt", **labels) == 200
    assert gateway.metric("tokens", kind="completion", **labels) == 40
    assert gateway.metric("cached_tokens", **labels) == 80
    assert gateway.metric("device_seconds", **labels) == 1.0


def test_what_no_engine_has_begun_is_not_counted(gateway: Gateway) -> None:
    gateway.meter.charge(ALICE, "chat", RequestUsage())
    assert gateway.kept() == []


def test_a_time_that_no_engine_told_is_estimated_by_the_models_others(gateway: Gateway) -> None:
    gateway.meter.charge(ALICE, "chat", used(untimed_tokens=80))
    gateway.meter.charge(ALICE, "chat", used(device_s=0.8, timed_tokens=80))
    gateway.meter.charge(ALICE, "other", used(device_s=9.0, timed_tokens=80))
    gateway.meter.charge(ALICE, "chat", used(untimed_tokens=40, device_s=0.2, timed_tokens=20))
    labels = {"key": "alice", "model": "chat"}
    # Of the first nothing was known; the last has 40 tokens at a hundredth of a second.
    assert gateway.metric("device_seconds", **labels) == pytest.approx(0 + 0.8 + 0.2 + 0.4)


def test_a_gateway_that_starts_anew_has_what_was_kept(gateway: Gateway, tmp_path: Path) -> None:
    gateway.meter.charge(ALICE, "chat", used())
    gateway.meter.save()
    gateway.meter.save()
    again = Gateway(tmp_path / "usage")
    again.meter.charge(ALICE, "chat", used())
    assert sum(each.requests for each in again.kept()) == 2


def test_what_cannot_be_written_waits_and_is_read_all_the_same(
    gateway: Gateway, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "usage").touch()
    for _ in range(2):
        gateway.meter.charge(ALICE, "chat", used())
        gateway.meter.save()
    assert caplog.text.count("usage cannot be written") == 1
    (tmp_path / "usage").unlink()
    gateway.meter.charge(ALICE, "chat", used())
    gateway.meter.save()
    (tmp_path / "usage").chmod(0o500)
    assert [each.requests for each in gateway.kept()] == [3]
