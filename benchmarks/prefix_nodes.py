"""How much of an endless cache's hits do the KV stores of several nodes have together?

A simulation of a real trace of prompts: eight nodes, each with a replica and a KV store. Which
node gets a request, what its store keeps, what it fetches of another's and what it throws away is
decided by the platform's own code (``routers/``, ``kvstore/index/``); computing, fetching and the
passing of time are not carried out, but taken at given rates. Blocks are the trace's, of 512
tokens.

A block counts as hit if its node's store has it, or fetches it sooner than it is computed. The goal
is that of hits of one cache that never forgets, for stores that hold the trace's blocks together;
smaller ones are shown beside it. Arms: requests go where :mod:`routers.policies.prefix_aware` sends
them, which weighs fetches, or by loads alone.

The last line of the output is one JSON object. Run it as ``python -m benchmarks.prefix_nodes`` or
``make bench-prefix-nodes``.
"""

from __future__ import annotations

import argparse
import heapq
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.result_files import machine, publish, said_by
from benchmarks.workload import trace_rows
from loomserve.kvstore.index.directory import Directory
from loomserve.kvstore.index.eviction import cost
from loomserve.kvstore.index.index import Index
from loomserve.kvstore.index.journal import ChangeList
from loomserve.platform.state import Pace, ReplicaLoad
from loomserve.platform.state.roles import Role
from loomserve.routers.in_flight import InFlight
from loomserve.routers.policy import KvLink, NodesKv
from loomserve.routers.policy_choice import ReplicaChooser
from loomserve.routers.snapshot import RoutingStats
from loomserve.routers.table import ReplicaTable
from loomserve.routers.ticket import RoutingTicket

SPACE = b"m" * 16
BLOCK_TOKENS, KEYS_A_BLOCK = 512, 8
# An 8B model on a GPU, as the trace's were: KV of a token, and seconds of one of a prompt.
TOKEN_BYTES, PREFILL_TOKEN_S, OUTPUT_TOKEN_S = 128 * 1024, 1 / 20_000, 0.02
KV_CAPACITY_TOKENS, MAX_RUNNING = 400_000, 128
GOAL = 0.95


class Prompt(NamedTuple):
    at_s: float
    tokens: int
    output_tokens: int
    keys: bytes
    """Of its blocks, 16 bytes each."""

    @property
    def blocks(self) -> int:
        return len(self.keys) // 16

    @property
    def router_keys(self) -> tuple[int, ...]:
        """The router's blocks are smaller."""
        blocks = (int.from_bytes(self.keys[at : at + 16]) for at in range(0, len(self.keys), 16))
        return tuple(key * KEYS_A_BLOCK + part for key in blocks for part in range(KEYS_A_BLOCK))


def read(path: Path, most: int | None) -> list[Prompt]:
    return [_prompt(row) for row in trace_rows(path)][:most]


def _prompt(row: dict[str, Any]) -> Prompt:
    # A trace's key stands for its block and all before it, as ours do. The last one is not full.
    whole = row["hash_ids"][: row["input_length"] // BLOCK_TOKENS]
    keys = b"".join(int(each).to_bytes(16, "big") for each in whole)
    return Prompt(row["timestamp"] / 1000, row["input_length"], row["output_length"], keys)


def different_blocks(prompts: Sequence[Prompt]) -> int:
    return len({p.keys[at : at + 16] for p in prompts for at in range(0, len(p.keys), 16)})


class Store:
    """A node's store, as far as its index decides."""

    def __init__(self, node: str, blocks: int, directory: Directory, link: KvLink) -> None:
        self._node, self._directory, self._link = node, directory, link
        self.journal = ChangeList()
        self.index = Index(cost, self.journal, self._refetch_s)
        self.index.add_namespace(SPACE, TOKEN_BYTES * BLOCK_TOKENS)
        self._free = list(range(blocks))
        self._seq = 0
        directory.begin(node, 1, 0)

    def take(self, prompt: Prompt, now: float) -> tuple[int, int]:
        """Have a prompt's blocks; returns how many were here, and how many were fetched."""
        here = self.index.lookup(SPACE, prompt.keys, now).in_memory
        held = (
            each.in_memory
            for each in self._directory.holdings(SPACE, prompt.keys)
            if each.node != self._node
        )
        more = max(0, max(held, default=0) - here)
        size = more * BLOCK_TOKENS * TOKEN_BYTES
        fetch_s = self._link.setup_s + size / self._link.bytes_per_s
        fetched = more if fetch_s < more * BLOCK_TOKENS * PREFILL_TOKEN_S else 0
        self._keep(prompt, here, now)
        return here, fetched

    def _keep(self, prompt: Prompt, here: int, now: float) -> None:
        wanted = prompt.blocks - here
        if wanted <= 0:
            return
        lease = self.index.lease(SPACE, prompt.keys, here, 0, now, math.inf) if here else None
        if wanted > len(self._free):
            freed = self.index.evict(wanted - len(self._free), now)
            self._free += freed.slots
        slots = [self._free.pop() for _ in range(min(wanted, len(self._free)))]
        block_s = BLOCK_TOKENS * PREFILL_TOKEN_S
        self._free += self.index.insert(SPACE, prompt.keys, here, slots, now, block_s)
        if lease is not None:
            self._free += self.index.release(lease.id)
        self._announce()

    def _announce(self) -> None:
        if changes := self.journal.take():
            self._seq += 1
            self._directory.apply(self._node, 1, self._seq, changes)

    def _refetch_s(self, namespace: bytes, key: bytes, block_bytes: int) -> float | None:
        others = [one for one in self._directory.holders(namespace, key) if one != self._node]
        return block_bytes / self._link.bytes_per_s if others else None


@dataclass
class Fleet:
    """Nodes with a replica and a store each, and a router."""

    nodes: int
    blocks: int
    policy: str
    link: KvLink
    hits: int = 0
    fetched: int = 0
    most_running: int = 0
    """On one replica at once."""
    _open: list[tuple[float, int, ExitStack]] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [f"n{number}" for number in range(self.nodes)]
        directory = Directory(2**22)
        self._stores = {name: Store(name, self.blocks, directory, self.link) for name in names}
        self._ledger = InFlight()
        table = ReplicaTable(self._ledger, stale_after_s=math.inf)
        table.set_replicas(names, {name: name for name in names})
        for name in names:
            table.report(name, _stats())
        self._router = ReplicaChooser("m", self.policy, table, load_limit=1.6)
        links = {(to, of): self.link for to in names for of in names if to != of}
        self._router.kv = NodesKv(TOKEN_BYTES, self.blocks * BLOCK_TOKENS * TOKEN_BYTES, links)

    def run(self, prompts: Sequence[Prompt]) -> None:
        for number, prompt in enumerate(prompts):
            while self._open and self._open[0][0] <= prompt.at_s:
                heapq.heappop(self._open)[2].close()
            self._answer(number, prompt)

    def _answer(self, number: int, prompt: Prompt) -> None:
        booking = ExitStack()
        ticket = booking.enter_context(
            RoutingTicket(
                self._ledger,
                prompt_tokens=prompt.tokens,
                hash_prompt=lambda: prompt.router_keys,
                output_tokens=prompt.output_tokens,
            )
        )
        decision = self._router.decide(ticket)
        assert decision is not None
        here, fetched = self._stores[decision.replica_id].take(prompt, prompt.at_s)
        self.hits += here + fetched
        self.fetched += fetched
        computed = prompt.tokens - (here + fetched) * BLOCK_TOKENS
        takes_s = computed * PREFILL_TOKEN_S + prompt.output_tokens * OUTPUT_TOKEN_S
        heapq.heappush(self._open, (prompt.at_s + takes_s, number, booking))
        open_there = self._ledger.of(decision.replica_id, time.monotonic()).requests
        self.most_running = max(self.most_running, open_there)


def _stats() -> RoutingStats:
    pace = Pace(prefill_token_s=PREFILL_TOKEN_S, output_token_s=OUTPUT_TOKEN_S, request_s=5)
    load = ReplicaLoad(
        running=0,
        waiting=0,
        kv_cache_usage=0,
        step_time_s=OUTPUT_TOKEN_S,
        pace=pace,
        measured_at=time.monotonic(),
    )
    return RoutingStats(
        load=load,
        max_running=MAX_RUNNING,
        kv_capacity_tokens=KV_CAPACITY_TOKENS,
        draining=False,
        role=Role.UNIFIED,
    )


def arms(
    prompts: Sequence[Prompt], nodes: int, shares: Sequence[float], gb_per_s: Sequence[float]
) -> Iterator[dict[str, Any]]:
    asked, different = sum(each.blocks for each in prompts), different_blocks(prompts)
    policies = ("prefix_aware", "load_aware")
    for rate in gb_per_s:
        for share in shares:
            for policy in policies:
                blocks = max(1, round(share * different / nodes))
                fleet = Fleet(nodes, blocks, policy, KvLink(0.001, rate * 1e9))
                began = time.perf_counter()
                fleet.run(prompts)
                yield {
                    "policy": policy,
                    "stores_share_of_blocks": share,
                    "link_gb_per_s": rate,
                    "hit_rate": fleet.hits / asked,
                    "of_endless": fleet.hits / (asked - different),
                    "fetched_of_hits": fleet.fetched / max(1, fleet.hits),
                    "most_running": fleet.most_running,
                    "took_s": time.perf_counter() - began,
                }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trace",
        type=Path,
        required=True,
        help="Mooncake's conversation trace (mooncake_conversation.jsonl.gz)",
    )
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--requests", type=int, help="the first so many only")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.5, 0.25, 0.1])
    parser.add_argument("--gb-per-s", type=float, nargs="+", default=[10.0, 1.2])
    options = parser.parse_args()
    facts = machine()
    prompts = read(options.trace, options.requests)
    asked, different = sum(each.blocks for each in prompts), different_blocks(prompts)
    rows = []
    for row in arms(prompts, options.nodes, options.shares, options.gb_per_s):
        rows.append(row)
        print({name: round(v, 3) if isinstance(v, float) else v for name, v in row.items()})
    best = next(
        row
        for row in rows
        if row["policy"] == "prefix_aware" and row["link_gb_per_s"] == max(options.gb_per_s)
    )
    result = {
        "prompts": len(prompts),
        "blocks": asked,
        "different_blocks": different,
        # A cache that never forgets misses each block once.
        "endless_hit_rate": (asked - different) / asked,
        "prefix_hit_of_endless": best["of_endless"],
        "goal": GOAL,
        "rows": rows,
    }
    publish("prefix_nodes", result, setup=said_by(options), facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
