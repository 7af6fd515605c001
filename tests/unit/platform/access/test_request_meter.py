"""Limits of one key over two gateways."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from loomserve.platform.access.request_meter import RequestMeter
from loomserve.platform.access.shared_counts import SharedCounts
from loomserve.platform.access.token_meter import KeyMetrics, TokenMeter
from loomserve.platform.base.errors import BadRequest, TooManyRequests
from loomserve.platform.config import ApiKey

HASH = "sha256:" + "0" * 64


class Gateways:
    """Two or more on one clock."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 1000.0
        self._folder = folder
        self.counts: list[SharedCounts] = []
        self.requests: list[RequestMeter] = []
        self.tokens: list[TokenMeter] = []

    def start(self) -> None:
        counts = SharedCounts(self._folder / "gateways", 2)
        self.counts.append(counts)
        self.requests.append(RequestMeter(counts, clock=lambda: self.now_s))
        self.tokens.append(
            TokenMeter(
                KeyMetrics(CollectorRegistry()),
                self._folder / "tokens.json",
                counts=counts,
                clock=lambda: self.now_s,
                unix_clock=lambda: self.now_s,
            )
        )

    def look(self, key: ApiKey) -> None:
        for counts, requests, tokens in zip(self.counts, self.requests, self.tokens, strict=True):
            counts.look()
            requests.look([key])
            tokens.look([key])


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Gateways]:
    gateways = Gateways(tmp_path)
    gateways.start()
    gateways.start()
    yield gateways
    for counts in gateways.counts:
        counts.close()


def admitted(gateways: Gateways, key: ApiKey, attempts: int) -> int:
    """How many of so many requests, sent to one after another, are admitted."""
    count = 0
    for number in range(attempts):
        try:
            gateways.requests[number % 2].acquire(key)
        except TooManyRequests:
            continue
        count += 1
    return count


def test_a_rate_holds_over_both(two: Gateways) -> None:
    key = ApiKey(name="a", hash=HASH, requests_per_minute=60)
    assert admitted(two, key, 50) == 10
    two.now_s += 3
    assert admitted(two, key, 50) == 3


def test_a_bucket_that_one_empties_fills_for_the_other_meanwhile(two: Gateways) -> None:
    key = ApiKey(name="a", hash=HASH, requests_per_minute=60)
    for _ in range(100):
        two.requests[0].acquire(key)
        two.now_s += 1
        two.look(key)
    # All hundred at once would keep it waiting for a minute and a half.
    for _ in range(9):
        two.requests[1].acquire(key)


def test_concurrency_holds_over_both(two: Gateways) -> None:
    key = ApiKey(name="a", hash=HASH, max_concurrent=4)
    one, other = two.requests
    one.acquire(key)
    one.acquire_more(key, 2)
    other.acquire(key)
    with pytest.raises(TooManyRequests):
        other.acquire(key)
    with pytest.raises(TooManyRequests):
        other.acquire_more(key, 1)
    with pytest.raises(BadRequest):
        other.acquire_more(key, 4)
    one.release(key, 3)
    other.acquire_more(key, 3)


def test_what_a_gateway_that_ended_had_running_counts_no_longer(two: Gateways) -> None:
    key = ApiKey(name="a", hash=HASH, max_concurrent=1)
    two.requests[0].acquire(key)
    two.counts.pop(0).close()
    two.requests[1].acquire(key)


def test_tokens_hold_over_both(two: Gateways) -> None:
    key = ApiKey(name="a", hash=HASH, tokens_per_minute=600, tokens_per_day=1000)
    one, other = two.tokens
    one.charge(key, 60, 40)
    with pytest.raises(TooManyRequests, match="tokens a minute"):
        other.check(key)
    two.now_s += 10
    two.look(key)
    other.check(key)
    other.charge(key, 900, 0)
    with pytest.raises(TooManyRequests, match="of this day"):
        one.check(key)


def test_the_days_tokens_are_kept_by_both_in_one_file(two: Gateways) -> None:
    key = ApiKey(name="a", hash=HASH, tokens_per_day=1000)
    one, other = two.tokens
    one.charge(key, 600, 0)
    two.look(key)
    # It begins with what is in the file, and has not seen what was charged before.
    two.start()
    late = two.tokens[-1]
    late.charge(key, 300, 0)
    late.check(key)
    two.look(key)
    one.save()
    late.save()
    two.look(key)
    other.charge(key, 100, 0)
    for meter in two.tokens:
        with pytest.raises(TooManyRequests):
            meter.check(key)
        meter.save()
    two.start()
    with pytest.raises(TooManyRequests):
        two.tokens[-1].check(key)
