"""The choice by a model's policy, from reports and a ticket to the booking, without Ray."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import get_args

import pytest

from loomserve.platform.config.router import RoutingPolicy
from loomserve.platform.state import ReplicaLoad
from loomserve.platform.state.roles import Role
from loomserve.routers.block_keys import BLOCK_TOKENS, token_keys
from loomserve.routers.in_flight import NOTHING, Assigned, InFlight
from loomserve.routers.policy_choice import ReplicaChooser
from loomserve.routers.snapshot import RoutingStats
from loomserve.routers.table import ReplicaTable
from loomserve.routers.ticket import RoutingTicket
from tests.unit.routers.tables import reported

POLICIES = get_args(RoutingPolicy)
STORY = list(range(10 * BLOCK_TOKENS))


def stats(running: int = 0, *, draining: bool = False, capacity: int = 10_000) -> RoutingStats:
    load = ReplicaLoad(
        running=running,
        waiting=0,
        kv_cache_usage=0.0,
        step_time_s=0.01,
        measured_at=time.monotonic(),
    )
    return RoutingStats(
        load=load,
        max_running=10,
        kv_capacity_tokens=capacity,
        draining=draining,
        role=Role.UNIFIED,
    )


def chooser(
    table: ReplicaTable, policy: RoutingPolicy = "prefix_aware", model: str = "m"
) -> ReplicaChooser:
    return ReplicaChooser(model, policy, table, load_limit=1.6)


class Sender:
    """Sends one request after another, each ended as soon as it is routed."""

    def __init__(self, policy: RoutingPolicy = "prefix_aware") -> None:
        self.ledger = InFlight()
        self.table = reported(self.ledger, {id_: stats() for id_ in "abc"})
        self.chooser = chooser(self.table, policy)

    def report(self, **reports: RoutingStats) -> None:
        """There are these replicas, and no others."""
        self.table.set_replicas(reports)
        for id_, report in reports.items():
            self.table.report(id_, report)

    def send(
        self,
        tokens: list[int],
        salt: str | None = None,
        exclude: frozenset[str] = frozenset(),
        pinned_to: str | None = None,
    ) -> str | None:
        hashed = partial(token_keys, tokens, model="m", salt=salt)
        with RoutingTicket(
            self.ledger,
            prompt_tokens=len(tokens),
            hash_prompt=hashed,
            exclude=exclude,
            pinned_to=pinned_to,
        ) as ticket:
            decision = self.chooser.decide(ticket)
        return None if decision is None else decision.replica_id

    def reasons(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for (_, _, reason), count in self.ledger.decisions().items():
            found[reason] += count
        return found


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_books_what_it_chooses(policy: RoutingPolicy) -> None:
    ledger = InFlight()
    table = reported(ledger, {"a": None, "b": stats(), "c": stats(draining=True)})
    with RoutingTicket(ledger, prompt_tokens=7, output_tokens=3, sequences=2) as ticket:
        decision = chooser(table, policy).decide(ticket)
        assert decision is not None
        assert decision.replica_id in {"a", "b"}
        assert ledger.of(decision.replica_id) == Assigned(2, 13)
        assert ticket.replica is not None
        assert ticket.replica.id == decision.replica_id
    assert ledger.of(decision.replica_id) == NOTHING
    assert ledger.decisions() == {("m", policy, decision.reason): 1}


@pytest.mark.parametrize("policy", POLICIES)
def test_draining_excluded_and_other_than_pinned_replicas_take_nothing(
    policy: RoutingPolicy,
) -> None:
    sender = Sender(policy)
    home = sender.send(STORY)
    assert home is not None
    for _ in range(10):
        assert sender.send(STORY, exclude=frozenset({home})) not in (None, home)
        assert sender.send(STORY, pinned_to="b") == "b"
    sender.table.report(home, stats(draining=True))
    for _ in range(10):
        assert sender.send(STORY) not in (None, home)
    assert sender.send(STORY, exclude=frozenset("abc")) is None
    assert sender.send(STORY, pinned_to="gone") is None


def test_prompts_that_begin_alike_go_to_one_replica() -> None:
    sender = Sender()
    sender.table.report("b", stats(running=1))
    assert sender.send(STORY) == "a"
    sender.table.report("a", stats(running=1))
    assert sender.send([*STORY, 1]) == "a"
    assert sender.send([*STORY, *STORY]) == "a"
    assert sender.send(STORY[::-1]) == "c"
    assert sender.reasons() == {"least_loaded": 2, "prefix": 2}


def test_unequal_loads_outweigh_a_prefix() -> None:
    sender = Sender()
    assert sender.send(STORY) == "a"
    sender.table.report("a", stats(running=9))
    assert sender.send(STORY) == "b"
    sender.table.report("a", stats())
    assert sender.send(STORY) in {"a", "b"}
    assert sender.reasons() == {"least_loaded": 2, "prefix": 1}


def test_a_tenant_never_follows_another() -> None:
    sender = Sender()
    assert sender.send(STORY, salt="alice") == "a"
    sender.table.report("a", stats(running=1))
    assert sender.send(STORY, salt="bob") == "b"
    assert sender.send(STORY) == "b"
    sender.report(a=stats(running=1), b=stats(running=1), c=stats())
    assert sender.send(STORY, salt="alice") == "a"
    assert sender.send(STORY, salt="bob") == "b"


def test_choosers_of_one_ledger_see_what_each_other_sent() -> None:
    sender = Sender()
    assert sender.send(STORY) == "a"
    sender.table.report("a", stats(running=1))
    sender.chooser = chooser(sender.table)
    assert sender.send(STORY) == "a"
    sender.chooser = chooser(sender.table, model="another")
    assert sender.send(STORY) == "b"


def test_what_a_replica_was_sent_is_forgotten_when_it_is_gone_or_its_cache_is_full() -> None:
    sender = Sender()
    assert sender.send(STORY) == "a"
    sender.report(b=stats(), c=stats())
    assert sender.send(STORY[::-1]) == "b"
    sender.report(a=stats(), b=stats(running=1), c=stats(running=1))
    sender.send(STORY)
    assert sender.reasons()["prefix"] == 0

    index = sender.ledger.prefixes("m")
    sender.report(a=stats(capacity=3 * BLOCK_TOKENS))
    sender.send(STORY)
    assert index.sizes() == {"a": 3}


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "prefix_aware"])
def test_policies_that_do_not_look_at_prompts_hash_none(policy: RoutingPolicy) -> None:
    def fail() -> tuple[bytes, ...]:
        raise AssertionError("hashed in vain")

    ledger = InFlight()
    table = reported(ledger, {"a": stats(), "b": stats()})
    with RoutingTicket(ledger, hash_prompt=fail) as ticket:
        assert chooser(table, policy).decide(ticket) is not None


def test_a_prompt_is_hashed_once() -> None:
    hashed = []

    def once() -> tuple[bytes, ...]:
        hashed.append(1)
        return token_keys(STORY, model="m", salt=None)

    ledger = InFlight()
    table = reported(ledger, {"a": stats(), "b": stats()})
    with RoutingTicket(ledger, hash_prompt=once) as ticket:
        for _ in range(3):
            chooser(table).decide(ticket)
    assert hashed == [1]
