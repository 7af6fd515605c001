"""The choice by a model's policy, from reports and a ticket to the booking, without Ray."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing
from functools import partial
from typing import get_args

import pytest

from loomserve.platform.state import Pace, ReplicaLoad
from loomserve.platform.state.roles import Role
from loomserve.routers.in_flight import NOTHING, Assigned, InFlight
from loomserve.routers.policy import KvLink, NodesKv
from loomserve.routers.policy_choice import ReplicaChooser, RoutingTicket
from loomserve.routers.prefix_index import BLOCK_TOKENS, token_keys
from loomserve.routers.snapshot import RoutingStats
from loomserve.routers.table import ReplicaTable
from tests.unit.routers.tables import RoutingPolicy, reported

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
        told_at=0.0,
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
        ticket = RoutingTicket(
            self.ledger,
            prompt_tokens=len(tokens),
            hash_prompt=hashed,
            exclude=exclude,
            pinned_to=pinned_to,
        )
        with closing(ticket):
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
    with closing(RoutingTicket(ledger, prompt_tokens=7, output_tokens=3, sequences=2)) as ticket:
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
    sender.report(a=stats(capacity=3 * BLOCK_TOKENS), c=stats())
    sender.send(STORY, pinned_to="a")
    assert len(index._sent["a"]) == 3


@pytest.mark.parametrize(
    ("policy", "replicas"),
    [*((policy, "ab") for policy in POLICIES if policy != "prefix_aware"), ("prefix_aware", "a")],
)
def test_prompts_are_hashed_only_to_compare_replicas_by_them(
    policy: RoutingPolicy, replicas: str
) -> None:
    def fail() -> tuple[int, ...]:
        raise AssertionError("hashed in vain")

    ledger = InFlight()
    table = reported(ledger, {id_: stats() for id_ in replicas})
    with closing(RoutingTicket(ledger, hash_prompt=fail)) as ticket:
        assert chooser(table, policy).decide(ticket) is not None


def test_a_prompt_is_hashed_once() -> None:
    hashed = []

    def once() -> tuple[int, ...]:
        hashed.append(1)
        return token_keys(STORY, model="m", salt=None)

    ledger = InFlight()
    table = reported(ledger, {"a": stats(), "b": stats()})
    with closing(RoutingTicket(ledger, hash_prompt=once)) as ticket:
        for _ in range(3):
            chooser(table).decide(ticket)
    assert hashed == [1]


def on_two_nodes(bytes_per_s: float, *, capacity: int = 10_000) -> Sender:
    """Replicas a and b on nodes x and y, with stores of ten stories; tokens take a ms each."""
    sender = Sender()
    sender.table.set_replicas("ab", {"a": "x", "b": "y"})
    paced(sender, a=0, b=0, capacity=capacity)
    link = KvLink(0.0, bytes_per_s)
    sender.chooser.model.kv = NodesKv(1.0, 10.0 * len(STORY), {("x", "y"): link, ("y", "x"): link})
    return sender


def paced(sender: Sender, *, capacity: int = 10_000, **running: int) -> None:
    """Report so many requests on each, of a busy engine."""
    for id_, requests in running.items():
        report = stats(running=requests, capacity=capacity)
        assert report.load is not None
        pace = Pace(prefill_token_s=0.001, output_token_s=0.01, request_s=1.0)
        load = report.load.model_copy(update={"pace": pace})
        sender.table.report(id_, report.model_copy(update={"load": load}))


@pytest.mark.parametrize(
    ("bytes_per_s", "expected"), [(1e6, "b"), (1e3, "a")], ids=["a fast link", "a slow link"]
)
def test_a_prompt_goes_to_a_less_loaded_node_if_its_kv_comes_along(
    bytes_per_s: float, expected: str
) -> None:
    sender = on_two_nodes(bytes_per_s)
    assert sender.send(STORY, pinned_to="a") == "a"
    # Computing all of it would cost 0.26 of a replica.
    paced(sender, a=2)
    assert sender.send(STORY) == expected


def test_what_an_engine_has_forgotten_its_nodes_store_still_has() -> None:
    prompts = [[number, *STORY] for number in range(8)]
    sender = on_two_nodes(1e3, capacity=2 * len(STORY))
    for prompt in prompts:
        assert sender.send(prompt, pinned_to="b") == "b"
    paced(sender, b=1, capacity=2 * len(STORY))
    assert sender.send(prompts[0]) == "b"
    other = Sender()
    other.table.set_replicas("ab")
    paced(other, a=0, b=0, capacity=2 * len(STORY))
    for prompt in prompts:
        other.send(prompt, pinned_to="b")
    paced(other, b=1, capacity=2 * len(STORY))
    assert other.send(prompts[0]) == "a"
