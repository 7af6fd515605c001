"""Limits of one key and of a model over two nodes, each with one gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from loomserve.platform.access.allowances import Allowances
from loomserve.platform.access.policy.bank import LimitAnswer, LimitBank, LimitReport
from loomserve.platform.access.request_meter import ModelMeter, RequestMeter
from loomserve.platform.access.token_meter import KeyMetrics, TokenMeter
from loomserve.platform.base.errors import TooManyRequests
from loomserve.platform.config import ApiKey
from tests.waiting import PATIENCE_S

HASH = "sha256:" + "0" * 64
DAY_S = 86_400


class Nodes:
    def __init__(self, folder: Path, count: int = 2) -> None:
        self.now_s = 1000.0
        self.unix_s = 100 * DAY_S + 1000.0
        self.bank = LimitBank(self.now_s - 60)
        self.allowances = [Allowances(f"node {n}", self._clock) for n in range(count)]
        self.requests = [RequestMeter(clock=self._clock, allowances=a) for a in self.allowances]
        self.models = [ModelMeter(allowances=a) for a in self.allowances]
        self.tokens = [
            TokenMeter(
                KeyMetrics(CollectorRegistry()),
                folder / f"tokens-{n}.json",
                allowances=a,
                clock=self._clock,
                unix_clock=lambda: self.unix_s,
            )
            for n, a in enumerate(self.allowances)
        ]
        self.exchange()

    def _clock(self) -> float:
        return self.now_s

    def exchange(self, rounds: int = 1) -> None:
        """As many seconds pass, and each gateway asks once in each."""
        for _ in range(rounds):
            self.now_s += 1
            self.unix_s += 1
            for each in self.allowances:
                report = each.report()
                each.apply(report, self.bank.exchange(report, self.now_s))

    def admits(self, number: int, key: ApiKey) -> bool:
        try:
            self.requests[number].acquire(key)
        except TooManyRequests:
            return False
        return True

    def leaves_tokens(self, number: int, key: ApiKey) -> bool:
        try:
            self.tokens[number].check(key)
        except TooManyRequests:
            return False
        return True


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def test_a_rate_holds_over_both_and_says_when_it_is_over(nodes: Nodes) -> None:
    key = ApiKey(name="k", hash=HASH, requests_per_minute=60)
    admitted = 0
    for _ in range(60):
        nodes.exchange()
        for number in (0, 1):
            for _ in range(3):
                if nodes.admits(number, key):
                    admitted += 1
                    nodes.requests[number].release(key, 1)
    # Ten seconds' worth at once, and the small shares of both.
    assert 60 <= admitted <= 60 + 10 + 5
    while nodes.admits(0, key):
        pass
    with pytest.raises(TooManyRequests, match="60 requests a minute, over all nodes") as error:
        nodes.requests[0].acquire(key)
    assert error.value.retry_after_s is not None
    assert 0 < error.value.retry_after_s <= 5


def test_concurrency_holds_over_both_and_moves(nodes: Nodes) -> None:
    key = ApiKey(name="k", hash=HASH, max_concurrent=4)
    running = [0, 0]
    for _ in range(6):
        for number in (0, 1):
            running[number] += nodes.admits(number, key)
        nodes.exchange()
    assert sum(running) == 4
    for _ in range(running[0]):
        nodes.requests[0].release(key, 1)
    nodes.exchange(2)
    for _ in range(6):
        running[1] += nodes.admits(1, key)
        nodes.exchange()
    assert running[1] == 4
    with pytest.raises(TooManyRequests, match="4 over all nodes"):
        nodes.requests[0].acquire(key)


def test_a_request_of_many_sequences_needs_as_many_seats(nodes: Nodes) -> None:
    key = ApiKey(name="k", hash=HASH, max_concurrent=4)
    nodes.requests[0].acquire(key)
    nodes.exchange(2)
    nodes.requests[0].acquire_more(key, 2)
    nodes.exchange(2)
    assert nodes.admits(1, key)
    nodes.exchange(2)
    with pytest.raises(TooManyRequests):
        nodes.requests[1].acquire_more(key, 1)
    # The one that was refused more has not got it.
    nodes.requests[1].release(key, 1)
    nodes.requests[0].release(key, 3)


def test_tokens_of_a_minute_hold_over_both(nodes: Nodes) -> None:
    key = ApiKey(name="k", hash=HASH, tokens_per_minute=600)
    used = 0
    for _ in range(60):
        nodes.exchange()
        for number in (0, 1):
            if nodes.leaves_tokens(number, key):
                used += 50
                nodes.tokens[number].charge(key, 10, 40)
    headers = dict(nodes.tokens[0].headers(key))
    assert int(headers[b"x-ratelimit-remaining-tokens"]) <= 100
    # 100 at once, and what the last answers took too much.
    assert 500 <= used <= 600 + 100 + 2 * 50
    # An answer that was longer than all that was left is waited off on both.
    nodes.tokens[0].charge(key, 1000, 1000)
    nodes.exchange(2)
    assert not nodes.leaves_tokens(1, key)
    assert dict(nodes.tokens[1].headers(key))[b"x-ratelimit-remaining-tokens"] == b"0"
    nodes.exchange(100)
    assert not nodes.leaves_tokens(1, key)
    nodes.exchange(120)
    assert nodes.leaves_tokens(1, key)


def test_tokens_of_a_day_hold_over_both_until_midnight(nodes: Nodes) -> None:
    key = ApiKey(name="k", hash=HASH, tokens_per_day=1000)
    used = 0
    for _ in range(40):
        nodes.exchange()
        for number in (0, 1):
            if nodes.leaves_tokens(number, key):
                used += 50
                nodes.tokens[number].charge(key, 10, 40)
    assert 1000 <= used <= 1000 + 2 * 50
    with pytest.raises(TooManyRequests, match="1000 tokens of this day") as error:
        nodes.tokens[0].check(key)
    assert error.value.retry_after_s == pytest.approx(101 * DAY_S - nodes.unix_s, abs=2)
    # A new gateway of the node goes on with what the node has used.
    nodes.allowances[1].gateway = "another"
    nodes.exchange(2)
    assert not nodes.leaves_tokens(1, key)
    nodes.unix_s = 101 * DAY_S + 1
    assert nodes.leaves_tokens(1, key)


def test_a_models_limit_holds_over_both(nodes: Nodes) -> None:
    began = 0
    for _ in range(6):
        for meter in nodes.models:
            try:
                meter.check("m", 6, 1)
            except TooManyRequests as error:
                assert error.code == "model_overloaded"  # noqa: PT017 - in a loop
            else:
                meter.count("m", 6, 1)
                began += 1
        nodes.exchange()
    assert began == 6


def test_a_controller_that_is_away_is_asked_again() -> None:
    asked: list[LimitReport] = []

    async def ask(report: LimitReport) -> LimitAnswer:
        asked.append(report)
        if len(asked) < 3:
            raise TimeoutError
        return LimitAnswer((), 4)

    async def run() -> None:
        allowances = Allowances("node")
        keeping = asyncio.create_task(allowances.keep(ask))
        key = ApiKey(name="k", hash=HASH, requests_per_minute=1)
        meter = RequestMeter(allowances=allowances)
        async with asyncio.timeout(PATIENCE_S):
            while len(asked) < 4:
                # What is refused is asked for at once.
                for _ in range(2):
                    try:
                        meter.acquire(key)
                    except TooManyRequests:
                        await asyncio.sleep(0.01)
        assert not keeping.done()
        keeping.cancel()

    asyncio.run(run())
