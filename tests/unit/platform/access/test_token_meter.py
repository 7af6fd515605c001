from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from loomserve.platform.access.shared_counts import Counts
from loomserve.platform.access.token_meter import KeyMetrics, TokenMeter
from loomserve.platform.base.errors import TooManyRequests
from loomserve.platform.config import ApiKey

DAY_S = 86_400.0
ALICE = ApiKey(name="alice", hash="sha256:" + "0" * 64, tokens_per_day=100, tokens_per_minute=600)


class Gateway:
    """A meter with clocks that stand still."""

    def __init__(self, file: Path, unix_s: float = 20_000.5 * DAY_S) -> None:
        self.registry = CollectorRegistry()
        self.unix_s = unix_s
        self.meter = TokenMeter(
            KeyMetrics(self.registry), file, clock=lambda: 7.0, unix_clock=lambda: self.unix_s
        )

    def is_over(self) -> bool:
        try:
            self.meter.check(ALICE)
        except TooManyRequests:
            return True
        return False


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


def test_the_days_tokens_outlive_the_gateway(file: Path) -> None:
    first = Gateway(file)
    first.meter.charge(ALICE, 60, 39)
    first.meter.save()
    second = Gateway(file)
    second.meter.charge(ALICE, 1, 0)
    assert second.is_over()
    second.meter.save()
    assert Gateway(file).is_over()
    assert not Gateway(file, first.unix_s + DAY_S / 2).is_over()


def test_a_file_that_cannot_be_read_for_now_is_not_written_over(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meter() -> TokenMeter:
        metrics, counts = KeyMetrics(CollectorRegistry()), Counts()
        return TokenMeter(metrics, file, counts=counts, clock=lambda: 7.0, unix_clock=lambda: 1e9)

    one, other = meter(), meter()
    other.charge(ALICE, 60, 0)
    other.save()

    def none_left(*_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    one.charge(ALICE, 1, 0)
    with monkeypatch.context() as short:
        short.setattr(Path, "read_text", none_left)
        one.save()
    assert json.loads(file.read_text())["tokens"] == {"alice": 60}
    one.charge(ALICE, 60, 0)
    one.save()
    assert json.loads(file.read_text())["tokens"] == {"alice": 61}


def test_nothing_is_written_that_has_not_changed(file: Path) -> None:
    gateway = Gateway(file)
    gateway.meter.save()
    assert not file.exists()
    gateway.meter.charge(ALICE, 1, 1)
    gateway.meter.save()
    written = file.stat().st_ino
    gateway.meter.save()
    assert file.stat().st_ino == written


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"day": 1, "tokens": 3}', '{"day": 1, "tokens": {"alice": "x"}}']
)
def test_a_file_that_is_broken_counts_for_nothing_and_is_told(
    file: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text(text)
    assert not Gateway(file).is_over()
    assert str(file) in caplog.text


def test_a_full_disk_is_told_once_and_the_tokens_are_kept_when_there_is_room(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    away = file.parent / "away"
    gateway = Gateway(away / "tokens.json")
    gateway.meter.charge(ALICE, 60, 60)
    with caplog.at_level(logging.ERROR, "ray.serve"):
        gateway.meter.save()
        gateway.meter.save()
    assert len(caplog.records) == 1
    away.mkdir()
    gateway.meter.save()
    assert Gateway(away / "tokens.json").is_over()


def test_a_key_sees_what_it_has_left_and_operators_who_used_what(file: Path) -> None:
    gateway = Gateway(file)
    assert gateway.meter.headers(ALICE)[1] == (b"x-ratelimit-remaining-tokens", b"100")
    gateway.meter.charge(ALICE, 10, 20)
    assert gateway.meter.headers(ALICE) == [
        (b"x-ratelimit-limit-tokens", b"600"),
        (b"x-ratelimit-remaining-tokens", b"70"),
        (b"x-ratelimit-reset-tokens", b"3.000s"),
    ]
    assert gateway.meter.headers(ALICE.model_copy(update={"tokens_per_minute": None})) == []
    for kind, tokens in (("prompt", 10), ("completion", 20)):
        labels = {"key": "alice", "kind": kind}
        assert gateway.registry.get_sample_value("loomserve_key_tokens_total", labels) == tokens
