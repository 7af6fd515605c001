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
from loomserve.routers.ticket import RoutingTicket

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


def chooser(policy: RoutingPolicy = "prefix_aware", model: str = "m") -> ReplicaChooser:
    return ReplicaChooser(model, policy, load_limit=1.6, stale_after_s=10)


class Sender:
    """Sends one request after another, each ended as soon as it is routed."""

    def __init__(self, policy: RoutingPolicy = "prefix_aware") -> None:
        self.ledger = InFlight()
        self.chooser = chooser(policy)
        self.stats: dict[str, RoutingStats | None] = {id_: stats() for id_ in "abc"}

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
            decision = self.chooser.decide(self.stats, ticket)
        return None if decision is None else decision.replica_id

    def reasons(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for (_, _, reason), count in self.ledger.decisions().items():
            found[reason] += count
        return found


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_books_what_it_chooses_and_names_the_others(policy: RoutingPolicy) -> None:
    ledger = InFlight()
    with RoutingTicket(ledger, prompt_tokens=7, output_tokens=3, sequences=2) as ticket:
        decision = chooser(policy).decide(
            {"a": None, "b": stats(), "c": stats(draining=True)}, ticket
        )
        assert decision is not None
        assert {decision.replica_id, *decision.others} == {"a", "b"}
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
    sender.stats[home] = stats(draining=True)
    for _ in range(10):
        assert sender.send(STORY) not in (None, home)
    assert sender.send(STORY, exclude=frozenset("abc")) is None
    assert sender.send(STORY, pinned_to="gone") is None


def test_prompts_that_begin_alike_go_to_one_replica() -> None:
    sender = Sender()
    sender.stats["b"] = stats(running=1)
    assert sender.send(STORY) == "a"
    sender.stats["a"] = stats(running=1)
    assert sender.send([*STORY, 1]) == "a"
    assert sender.send([*STORY, *STORY]) == "a"
    assert sender.send(STORY[::-1]) == "c"
    assert sender.reasons() == {"least_loaded": 2, "prefix": 2}


def test_unequal_loads_outweigh_a_prefix() -> None:
    sender = Sender()
    assert sender.send(STORY) == "a"
    sender.stats["a"] = stats(running=9)
    assert sender.send(STORY) == "b"
    sender.stats["a"] = stats()
    assert sender.send(STORY) in {"a", "b"}
    assert sender.reasons() == {"least_loaded": 2, "prefix": 1}


def test_a_tenant_never_follows_another() -> None:
    sender = Sender()
    assert sender.send(STORY, salt="alice") == "a"
    sender.stats["a"] = stats(running=1)
    assert sender.send(STORY, salt="bob") == "b"
    assert sender.send(STORY) == "b"
    sender.stats = {"a": stats(running=1), "b": stats(running=1), "c": stats()}
    assert sender.send(STORY, salt="alice") == "a"
    assert sender.send(STORY, salt="bob") == "b"


def test_choosers_of_one_ledger_see_what_each_other_sent() -> None:
    sender = Sender()
    assert sender.send(STORY) == "a"
    sender.stats["a"] = stats(running=1)
    sender.chooser = chooser()
    assert sender.send(STORY) == "a"
    sender.chooser = chooser(model="another")
    assert sender.send(STORY) == "b"


def test_what_a_replica_was_sent_is_forgotten_when_it_is_gone_or_its_cache_is_full() -> None:
    sender = Sender()
    assert sender.send(STORY) == "a"
    there = sender.stats.pop("a")
    assert sender.send(STORY[::-1]) == "b"
    sender.stats = {"a": there, "b": stats(running=1), "c": stats(running=1)}
    sender.send(STORY)
    assert sender.reasons()["prefix"] == 0

    index = sender.ledger.prefixes("m")
    sender.stats = {"a": stats(capacity=3 * BLOCK_TOKENS)}
    sender.send(STORY)
    assert index.sizes() == {"a": 3}


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "prefix_aware"])
def test_policies_that_do_not_look_at_prompts_hash_none(policy: RoutingPolicy) -> None:
    def fail() -> tuple[bytes, ...]:
        raise AssertionError("hashed in vain")

    with RoutingTicket(InFlight(), hash_prompt=fail) as ticket:
        assert chooser(policy).decide({"a": stats(), "b": stats()}, ticket) is not None


def test_a_prompt_is_hashed_once() -> None:
    hashed = []

    def once() -> tuple[bytes, ...]:
        hashed.append(1)
        return token_keys(STORY, model="m", salt=None)

    with RoutingTicket(InFlight(), hash_prompt=once) as ticket:
        for _ in range(3):
            chooser().decide({"a": stats(), "b": stats()}, ticket)
    assert hashed == [1]
