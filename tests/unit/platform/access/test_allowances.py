"""Gateways that share limits through a bank, on one clock; messages may be lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loomserve.platform.access.allowances import Allowances
from loomserve.platform.access.policy.bank import LimitBank
from loomserve.platform.access.policy.pools import GONE_S, Limit, LimitKind

STEP_S = 0.1
RATE = 5.0
REQUESTS = Limit("key", LimitKind.REQUESTS, most=50, per_s=RATE)
SEATS = Limit("key", LimitKind.RUNNING, most=10)
DAY = Limit("key 1", LimitKind.DAY, most=1000)


@dataclass
class World:
    gateways: int
    seed: int = 0
    now: float = 1000.0
    lost: float = 0.0
    """Share of exchanges of which the answer is lost."""
    here: list[Allowances] = field(default_factory=list)
    admitted: list[float] = field(default_factory=list)
    """When."""
    cut_off: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.here = [Allowances(f"node {n}", lambda: self.now) for n in range(self.gateways)]
        for number, gateway in enumerate(self.here):
            gateway.gateway = str(number)
        self.bank = LimitBank(self.now - 60)
        self.next = [self.now + self.random.random() for _ in self.here]

    def restart_controller(self) -> None:
        self.bank = LimitBank(self.now)

    def step(self) -> None:
        self.now += STEP_S
        for number, gateway in enumerate(self.here):
            if self.now < self.next[number] or number in self.cut_off:
                continue
            self.next[number] += 1.0
            report = gateway.report()
            answer = self.bank.exchange(report, self.now)
            if self.random.random() >= self.lost:
                gateway.apply(report, answer)

    def ask(self, number: int, limit: Limit = REQUESTS, units: float = 1.0) -> bool:
        gateway = self.here[number]
        if gateway.room(limit) < 1:
            gateway.refused(limit, 1)
            return False
        gateway.use(limit, units)
        self.admitted += [self.now] * int(units)
        return True

    def run(self, seconds: float, rates: Sequence[float], limit: Limit = REQUESTS) -> list[int]:
        """Requests that each gateway admits of so many a second."""
        got = [0] * self.gateways
        for _ in range(round(seconds / STEP_S)):
            self.step()
            for number, rate in enumerate(rates):
                due = rate * STEP_S
                for _ in range(int(due) + (self.random.random() < due % 1)):
                    got[number] += self.ask(number, limit)
        return got

    def most_in(self, seconds: float) -> int:
        """Requests admitted in any window of this length."""
        first, most = 0, 0
        for last, at in enumerate(self.admitted):
            while self.admitted[first] < at - seconds:
                first += 1
            most = max(most, last - first + 1)
        return most

    @property
    def shares(self) -> float:
        """What gateways use at most before they have been told of a limit."""
        return self.gateways * max(1.0, REQUESTS.most / (2 * max(2, self.gateways)))


@given(
    st.integers(1, 6),
    st.integers(0, 2**16),
    st.sampled_from([0.0, 0.3]),
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 1.0, 20.0])), max_size=6),
)
@settings(max_examples=60)
def test_no_minute_sees_more_than_the_limit(
    gateways: int, seed: int, lost: float, changes: list[tuple[int, float]]
) -> None:
    world = World(gateways, seed, lost=lost)
    rates = [20.0] * gateways
    for number, rate in [*changes, (0, 20.0)]:
        rates[number % gateways] = rate
        world.run(15, rates)
    for window in (1.0, 10.0, 60.0):
        bound = REQUESTS.most + RATE * (window + STEP_S) + world.shares
        assert world.most_in(window) <= bound


@pytest.mark.parametrize("rates", [[20.0, 0, 0], [20.0, 20.0, 20.0], [20.0, 1.0, 0]])
def test_the_whole_rate_is_used_wherever_it_is_asked_for(rates: list[float]) -> None:
    world = World(3)
    world.run(30, rates)
    got = world.run(20, rates)
    assert sum(got) == pytest.approx(20 * RATE, rel=0.05)
    for count, rate in zip(got, rates, strict=True):
        # As of one bucket for all, at the least.
        assert count >= 0.8 * 20 * RATE * rate / sum(rates)


def test_demand_that_moves_takes_the_rate_along_within_two_seconds() -> None:
    world = World(4)
    world.run(30, [20.0, 0, 0, 0])
    world.run(2, [0, 0, 0, 20.0])
    assert world.run(5, [0, 0, 0, 20.0])[3] == pytest.approx(5 * RATE, rel=0.2)


def test_without_a_controller_each_goes_on_with_its_part() -> None:
    world = World(3)
    world.run(30, [20.0, 20.0, 1.0])
    world.cut_off = {0, 1, 2}
    got = world.run(40, [20.0, 20.0, 20.0])
    assert sum(got) <= REQUESTS.most + 40 * RATE
    assert sum(got) >= 0.8 * 40 * RATE
    assert min(got) >= 0.1 * 40 * RATE


def test_one_that_is_cut_off_adds_no_more_than_its_own_part() -> None:
    world = World(2)
    world.run(30, [20.0, 20.0])
    world.cut_off = {0}
    cut, other = world.run(60, [20.0, 20.0])
    assert cut <= 60 * RATE / 2 + REQUESTS.most / 2
    # The rest is another's once the one that says nothing counts as gone.
    assert other >= 0.8 * (60 - GONE_S) * RATE / 2
    assert cut + other <= REQUESTS.most + 60 * RATE * 1.5


def test_a_new_controller_begins_with_what_is_in_hand() -> None:
    world = World(3)
    world.run(30, [20.0, 2.0, 20.0])
    before = len(world.admitted)
    world.restart_controller()
    world.run(10, [20.0, 2.0, 20.0])
    assert len(world.admitted) - before <= 10 * RATE + REQUESTS.most / 2
    assert sum(world.run(20, [20.0, 2.0, 20.0])) == pytest.approx(20 * RATE, rel=0.1)


def test_a_key_that_rested_may_burst_at_any_gateway() -> None:
    world = World(3)
    world.run(3, [1.0, 0, 0])
    world.run(30, [0, 0, 0])
    assert sum(world.run(2.5, [40.0, 0, 0])) >= 0.8 * REQUESTS.most


@dataclass
class Seats(World):
    """Requests that run for a while."""

    limit: Limit = SEATS
    running: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.running = [[] for _ in self.here]
        self.most_running = 0

    def play(
        self,
        seconds: float,
        rates: Sequence[float],
        lasts_s: float = 1.5,
        refused: list[float] | None = None,
    ) -> list[int]:
        """Answers that each gateway gives; ``refused`` gets when it refused one."""
        got = [0] * self.gateways
        for _ in range(round(seconds / STEP_S)):
            self.step()
            for number, rate in enumerate(rates):
                for until in [each for each in self.running[number] if each <= self.now]:
                    self.running[number].remove(until)
                    self.here[number].end(self.limit, 1)
                if self.random.random() >= rate * STEP_S:
                    continue
                if self.ask(number, self.limit):
                    got[number] += 1
                    self.running[number].append(self.now + lasts_s)
                elif refused is not None:
                    refused.append(self.now)
            self.most_running = max(self.most_running, sum(map(len, self.running)))
        return got


@given(st.integers(1, 12), st.integers(0, 2**16))
@settings(max_examples=40)
def test_no_more_run_at_once_than_may_but_for_first_shares(gateways: int, seed: int) -> None:
    world = Seats(gateways, seed)
    world.play(4, [8.0] * gateways)
    world.most_running = 0
    got = world.play(30, [8.0] * gateways)
    assert world.most_running <= SEATS.most
    # A seat waits at most for an exchange before another has it.
    assert sum(got) >= 0.5 * 30 * min(8.0 * gateways, SEATS.most / 1.5)
    assert min(got) > 0


def test_seats_go_where_they_are_wanted() -> None:
    world = Seats(4)
    world.play(10, [0.2, 0.2, 0.2, 9.0])
    assert world.play(20, [0.0, 0.0, 0.0, 9.0])[3] >= 0.8 * 20 * SEATS.most / 1.5


def test_seats_of_a_gateway_that_died_come_back() -> None:
    world = Seats(2)
    world.play(10, [9.0, 1.0])
    world.cut_off = {0}
    world.play(GONE_S + 3, [0, 9.0])
    assert world.play(20, [0, 9.0])[1] >= 0.8 * 20 * SEATS.most / 1.5


@given(st.integers(1, 5), st.integers(0, 2**16))
@example(3, 534)
@settings(max_examples=40)
def test_a_days_tokens_end_once_and_for_all(gateways: int, seed: int) -> None:
    world = World(gateways, seed)
    for _ in range(600):
        world.step()
        for number in range(gateways):
            if world.random.random() < 0.3:
                world.ask(number, DAY, units=10)
        if world.random.random() < 0.005:
            world.cut_off = {world.random.randrange(gateways)}
    used = len(world.admitted)
    # Each may use one answer more than it has in hand, and before it is told its first share.
    assert used <= DAY.most + gateways * 10 + world.shares * DAY.most / REQUESTS.most
    if not world.cut_off:
        assert used >= 0.9 * DAY.most
        assert all(gateway.is_used_up(DAY) for gateway in world.here if gateway.room(DAY) < 1)


def test_a_limit_that_is_not_used_is_given_back_and_forgotten() -> None:
    world = World(2)
    world.run(5, [5.0, 5.0])
    world.run(65, [0, 0])
    assert world.here[0].report().uses == ()
    # Its burst is another's.
    assert sum(world.run(3, [0, 40.0])) >= 0.8 * REQUESTS.most


def test_the_wait_is_that_of_its_part_of_the_rate() -> None:
    world = World(2)
    world.run(60, [20.0, 20.0])
    gateway = world.here[0]
    while gateway.room(REQUESTS) >= 1:
        gateway.use(REQUESTS, 1)
    wait = gateway.refused(REQUESTS, 1)
    assert 0.1 <= wait <= 1.0
    gateway.use(REQUESTS, 10)
    assert gateway.refused(REQUESTS, 1) == pytest.approx(10 / (RATE / 2), rel=0.5)


ROOMY = Limit("model", LimitKind.RUNNING, most=512)


@given(st.integers(0, 2**16))
@settings(max_examples=40)
def test_a_limit_that_is_far_off_refuses_nobody_whoever_comes_anew(seed: int) -> None:
    world = Seats(3, seed, limit=ROOMY)
    refused: list[float] = []
    quietly = [0.0, 0.125, 0.125]
    world.play(40, quietly, 3.0, refused)
    # The controller's node is away, with its gateway, and comes back.
    world.cut_off = {0, 1, 2}
    world.play(33, quietly, 3.0, refused)
    world.restart_controller()
    world.here[0] = Allowances("node 0", lambda: world.now)
    world.cut_off = set()
    world.play(20, [0.125] * 3, 3.0, refused)
    assert refused == []
