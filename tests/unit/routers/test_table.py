"""The table decides as the rules written down replica by replica do, whatever happened before."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any

import pytest

from loomserve.platform.state import ReplicaLoad
from loomserve.platform.state.roles import Role
from loomserve.routers.base import Decision
from loomserve.routers.in_flight import Booking, InFlight
from loomserve.routers.policies import load_aware, power_of_two, prefix_aware, round_robin
from loomserve.routers.policy import NodesKv
from loomserve.routers.policy_choice import ReplicaChooser, RoutingTicket
from loomserve.routers.snapshot import RoutingStats
from loomserve.routers.table import ReplicaTable
from tests.unit.routers import reference
from tests.unit.routers.policies.fleets import Pick

STALE_S = 10.0
NOBODY: frozenset[str] = frozenset()


class Scene:
    """Replicas that come, report, take requests, fall silent and go, beside what is told of them.

    Figures are few, so that many replicas are equal.
    """

    def __init__(self, seed: int, most: int) -> None:
        self.rng = random.Random(seed)
        self.now = 1_000.0
        self.ledger = InFlight()
        self.table = ReplicaTable(self.ledger, stale_after_s=STALE_S)
        self.stats: dict[str, RoutingStats | None] = {}
        self._names = [f"r{number}" for number in range(most)]
        self._open: list[Booking] = []

    def goes_on(self) -> None:
        self.now += self.rng.choice([1e-6, 0.001, 0.3, 0.3, 5.0, 70.0])
        self.rng.choice([self._come_or_go, *[self._report] * 4, *[self._book] * 8, self._end])()

    def _come_or_go(self) -> None:
        there = self.rng.sample(self._names, self.rng.randrange(len(self._names) + 1))
        self.stats = {id_: self.stats.get(id_) for id_ in there}
        self.table.set_replicas(there)

    def _report(self) -> None:
        rng = self.rng
        for id_ in rng.sample(sorted(self.stats), min(len(self.stats), 3)):
            load = ReplicaLoad(
                running=rng.randrange(3),
                waiting=rng.choice([0, 0, 1, 30]),
                waiting_tokens=rng.choice([0, 200, 5_000]),
                kv_cache_usage=rng.choice([0.0, 0.5, rng.random(), 1.0]),
                step_time_s=0.1,
                measured_at=self.now - rng.choice([0.0, 0.2, 3.0, STALE_S, 11.0]),
            )
            stats = RoutingStats(
                load=rng.choice([load, load, load, None]),
                max_running=rng.choice([2, 2, 10]),
                kv_capacity_tokens=rng.choice([None, 1_000, 1_000]),
                draining=rng.random() < 0.2,
                role=rng.choice([Role.UNIFIED, Role.UNIFIED, Role.DECODE, Role.PREFILL]),
                told_at=0.0,
            )
            self.stats[id_] = stats
            self.table.report(id_, stats)

    def _book(self) -> None:
        booking = Booking()
        self._open.append(booking)
        self.ledger.started(
            booking,
            self.rng.choice(self._names),
            self.rng.choice([0, 100, 900]),
            self.now,
            sequences=self.rng.choice([1, 1, 3]),
        )

    def _end(self) -> None:
        self.rng.shuffle(self._open)
        for booking in self._open[len(self._open) // 2 :]:
            self.ledger.finished(booking, self.now)
        del self._open[len(self._open) // 2 :]

    def seen(self, exclude: frozenset[str], pinned_to: str | None) -> list[reference.ReplicaSeen]:
        replicas = [reference.snapshot(id_, self.stats[id_], self.ledger) for id_ in self.stats]
        return sorted(
            reference.candidates(
                replicas,
                exclude=exclude,
                pinned_to=pinned_to,
                now=self.now,
                stale_after_s=STALE_S,
            ),
            key=lambda each: each.id,
        )

    def decided(
        self, exclude: frozenset[str], pinned_to: str | None, pick: Pick
    ) -> Decision | None:
        candidates = self.table.candidates(exclude=exclude, pinned_to=pinned_to, now=self.now)
        if not len(candidates):
            return None
        if len(candidates) == 1:
            return Decision(self.table.ids[candidates.rows[0]], "only_candidate")
        choice = pick(candidates)
        return Decision(self.table.ids[candidates.rows[choice.place]], choice.reason)


def missing_of(blocks: int, prompt: int, has: Any) -> Any:
    return (1 - has / blocks) * prompt


@pytest.mark.parametrize(
    ("most", "cases"), [(3, 3_400), (8, 3_400), (40, 3_400), (200, 3_400), (900, 300)]
)
def test_ten_thousand_decisions_are_those_of_the_rules(most: int, cases: int) -> None:
    scene, rng = Scene(most, most), random.Random(0)
    reasons = set()
    for case in range(cases):
        scene.goes_on()
        ids = sorted(scene.stats)
        exclude = rng.choice([NOBODY, frozenset(rng.sample(ids, len(ids) // 2)), frozenset("x")])
        pinned_to = rng.choice([None] * 9 + ids[:1])
        limit, prompt, blocks = rng.choice([0.5, 1.6]), rng.choice([1, 300, 1_500]), 8
        some = rng.choice([[0, 0, 5, 8], [0] * 20 + [2, 8], [8, 8, 5], [*[0] * 99, 1]])
        matched = {id_: rng.choice(some) for id_ in ids} if case % 3 else {}
        seen = scene.seen(exclude, pinned_to)
        held = reference.held(matched, scene.table.ids)
        missing = partial(missing_of, blocks, prompt)
        of_prefixes = {"prompt_tokens": prompt, "load_limit": limit}
        for by_rule, pick in (
            (
                partial(reference.load_aware, load_limit=limit),
                partial(load_aware.pick, load_limit=limit),
            ),
            (
                partial(reference.prefix_aware, matched=matched, blocks=blocks, **of_prefixes),
                partial(prefix_aware.pick, held=held, missing=missing, **of_prefixes),
            ),
            (
                partial(reference.round_robin, turn=case),
                partial(round_robin.pick, turn=case),
            ),
            (
                partial(reference.power_of_two, rng=random.Random(case)),
                partial(power_of_two.pick, rng=random.Random(case)),
            ),
        ):
            expected = reference.decide(seen, by_rule)
            assert scene.decided(exclude, pinned_to, pick) == expected
            reasons.add(expected.reason if expected is not None else "none")
    assert reasons - {"none"} == {
        "only_candidate", "least_loaded", "shortest_queue", "prefix", "round_robin",
        "power_of_two",
    }  # fmt: skip


def told(rng: random.Random, now: float) -> RoutingStats:
    return RoutingStats(
        load=ReplicaLoad(
            running=rng.randrange(3),
            waiting=rng.choice([0, 0, 0, 9]),
            kv_cache_usage=rng.random() / 10,
            step_time_s=0.1,
            measured_at=now,
        ),
        max_running=rng.choice([10, 40]),
        kv_capacity_tokens=rng.choice([None, 40_000, 80_000, 80_000]),
        draining=False,
        role=Role.UNIFIED,
        told_at=0.0,
    )


@pytest.mark.parametrize("stored", [False, True])
def test_prompts_are_sent_where_the_rules_say_of_all_that_was_sent(stored: bool) -> None:
    rng, ledger = random.Random(0), InFlight()
    table = ReplicaTable(ledger, stale_after_s=1e9)
    chooser = ReplicaChooser("m", "prefix_aware", table, load_limit=0.1)
    sent: dict[str, set[int]] = {}
    reports: dict[str, RoutingStats | None] = {}
    if stored:
        chooser.model.kv = NodesKv(1.0, 1e9, {}, load_share=0.5)
    tickets: list[RoutingTicket] = []
    reasons = set()
    for turn in range(4_000):
        if turn % 500 == 0:
            ids = [f"r{number}" for number in range(rng.randrange(2, 60))]
            table.set_replicas(ids)
            sent = {id_: sent.get(id_, set()) for id_ in ids}
            reports = {id_: reports.get(id_) for id_ in ids}
            silent = turn == 2_000
        for id_ in rng.sample(ids, 0 if silent else 2):
            reports[id_] = told(rng, time.monotonic())
            table.report(id_, reports[id_])
        # They are so few that no replica forgets any.
        path = [rng.randrange(4), *(rng.randrange(2) for _ in range(rng.randrange(6)))]
        keys = tuple(hash(tuple(path[: end + 1])) for end in range(len(path)))
        ticket = RoutingTicket(ledger, len(keys) * 640, lambda keys=keys: keys, 10)  # type: ignore[misc]
        seen = [reference.snapshot(id_, reports[id_], ledger) for id_ in sorted(ids)]
        matched = reference.matched_blocks(keys, sent)
        expected = reference.prefix_aware(
            seen,
            matched=matched,
            blocks=len(keys),
            prompt_tokens=ticket.prompt_tokens,
            load_limit=0.1,
            load_share=0.5 if stored else None,
        )
        assert chooser.decide(ticket) == expected
        reasons.add(expected.reason)
        sent[expected.replica_id].update(keys)
        tickets.append(ticket)
        if len(tickets) > 40:
            tickets.pop(rng.randrange(40)).close()
    assert reasons == {"prefix", "least_loaded", "shortest_queue"}


@pytest.mark.parametrize("most", [3, 8, 40])
def test_the_chosen_replica_is_told_as_it_is(most: int) -> None:
    scene = Scene(most, most)
    for _ in range(1_000):
        scene.goes_on()
        candidates = scene.table.candidates(exclude=NOBODY, now=scene.now)
        for place, each in enumerate(scene.seen(NOBODY, None)):
            row = int(candidates.rows[place])
            told = scene.table.replica(row)
            assert (told.id, told.load, told.max_running) == (each.id, each.load, each.max_running)
            assert told.kv_capacity_tokens == each.kv_capacity_tokens
            assert told.queue_length == each.queue_length == candidates.queue_length[place]
            assert candidates.utilisation[place] == each.utilisation
            assert candidates.known[place] == (each.load is not None)


def stats(role: Role = Role.UNIFIED) -> RoutingStats:
    return RoutingStats(
        load=None,
        max_running=4,
        kv_capacity_tokens=None,
        draining=False,
        role=role,
        told_at=0.0,
    )


def test_replicas_that_are_gone_are_not_followed_and_their_late_reports_are_ignored() -> None:
    ledger = InFlight()
    table = ReplicaTable(ledger, stale_after_s=STALE_S)
    table.set_replicas(["b", "a"])
    table.report("a", stats(Role.DECODE))
    assert (table.ids, table.role("a"), table.role("b")) == (("a", "b"), Role.DECODE, None)
    table.set_replicas(["b"])
    table.report("a", stats())
    ledger.started(Booking(), "a", 10, 1.0)
    ledger.started(Booking(), "b", 10, 1.0)
    assert (table.ids, table.role("a")) == (("b",), None)
    assert table.candidates(exclude=NOBODY, now=1.0).queue_length.tolist() == [1]


def test_two_tables_follow_one_ledger() -> None:
    ledger = InFlight()
    tables = [ReplicaTable(ledger, stale_after_s=STALE_S) for _ in range(2)]
    for table in tables:
        table.set_replicas(["a"])
    ledger.started(Booking(), "a", 10, 1.0)
    tables[0].set_replicas([])
    ledger.started(Booking(), "a", 10, 1.0)
    assert tables[1].candidates(exclude=NOBODY, now=1.0).queue_length.tolist() == [2]
