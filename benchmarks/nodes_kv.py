"""What does it take to find and fetch KV blocks of another node?

Without an engine: two stores in processes of their own, on 127.0.0.1 and 127.0.0.2, hold blocks of
the demo model's shape (30 pieces of 48 KiB, float32). Per run:

* chains of 64 blocks are fetched one after the other, each as a waiting request has it done: asked
  for, awaited, and found in memory, checksums verified. CPU seconds are those of both stores. The
  first fetch into an arena also maps its pages, once, and is told apart ("fetch_first").
* a chain that is in memory is looked up while others are fetched; and, to tell apart what that owes
  to the fetch and what to cores that are taken, while as many processes as cores only compute.
* commits at one store, of which the other's directory is watched: the time until an entry is there.
* chains of 128 blocks are looked up in a directory of a million blocks of eight nodes.

The last line of the output is one JSON object, also written to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import Spread, percentile
from benchmarks.result_files import machine, publish, said_by
from loomserve.kvstore.index.journal import Change, Tier
from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.peers.members import Member
from loomserve.kvstore.peers.network import PeerNetwork
from loomserve.kvstore.peers.shared_directory import SharedDirectory
from loomserve.kvstore.server.client import StoreClient
from loomserve.kvstore.server.opening import start_server
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.protocol import (
    Commit,
    Done,
    Flush,
    Found,
    Inspect,
    Lookup,
    Release,
    Reserve,
    Reserved,
    StoreUsage,
    decode_slots,
)
from loomserve.kvstore.storage.arena import Arena
from loomserve.kvstore.storage.checksum import BlockLayout, layer_digest, seed

SPACE = b"benchmark-nodes-"
LAYOUT = BlockLayout(30, 3 * 32 * 2 * 64 * 4)
SMALL = BlockLayout(1, 4000)
CHAIN, CHAINS = 64, 6
MEMORY = 768 * 2**20
BLOCK_S = 0.03
"""What an engine says that it computes a block for, until it has measured it."""
DIRECTORY_BLOCKS, DIRECTORY_NODES, DIRECTORY_CHAIN = 1_000_000, 8, 128
LOOKUPS, ENGINE_LOOKUPS, EVENTS = 20_000, 400, 500
_SPAWN = multiprocessing.get_context("spawn")


def chain(source: random.Random, blocks: int) -> bytes:
    return source.randbytes(blocks * KEY_BYTES)


def serve(options: StoreOptions, pipe: Connection) -> None:
    """A store in a process of its own."""
    _, network = start_server(options, "token")
    assert network is not None
    pipe.send(network.member)
    network.set_members(pipe.recv())
    pipe.recv()


@dataclass
class Node:
    """A store, and an engine's side of it."""

    process: psutil.Process
    client: StoreClient
    arena: Arena

    def save(self, space: bytes, keys: bytes, layout: BlockLayout) -> float:
        """Write blocks and commit them; returns when the store had answered that."""
        request = Reserve(space, keys, "bench", layout.layers, layout.layer_bytes)
        room = self.client.ask(request, Reserved)
        for at, slot in enumerate(decode_slots(room.slots), room.first):
            view = self.arena.view(slot, layout.slot_bytes)
            view[: layout.block_bytes].view("<u8")[:] = at
            block_seed = seed(space, keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])
            for layer in range(layout.layers):
                piece = layout.piece(view, layer)
                layout.checksums(view)[layer] = layer_digest(piece, layer, block_seed)
        self.client.ask(Commit(room.writer, BLOCK_S), Done)
        return time.perf_counter()

    def found(self, keys: bytes) -> Found:
        found = self.client.ask(Lookup(SPACE, keys, 0, 5.0, True, block_s=BLOCK_S), Found)
        if found.lease:
            self.client.ask(Release([found.lease]), Done)
        return found

    def await_memory(self, keys: bytes) -> None:
        """As a request waits: asked about again after what is predicted, 5 ms at the soonest."""
        while (found := self.found(keys)).in_memory * KEY_BYTES < len(keys):
            time.sleep(max(0.005, min(found.ready_s, 1.0)))

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def usage(self) -> StoreUsage:
        return self.client.ask(Inspect(), StoreUsage)


@contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[Node, Node, list[Member]]]:
    with ExitStack() as stack:
        nodes, pipes = [], []
        for name, host in (("n1", "127.0.0.1"), ("n2", "127.0.0.2")):
            own = folder / name
            own.mkdir()
            arena = Path(f"/dev/shm/loomserve-kv-bench-{os.getpid()}-{name}")
            stack.callback(arena.unlink, missing_ok=True)
            options = StoreOptions(folder=own, arena=arena, memory=MEMORY, node=name, host=host)
            ours, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(target=serve, args=(options, theirs), daemon=True)
            process.start()
            stack.callback(process.kill)
            pipes.append(ours)
            nodes.append((process, options))
        members = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(members)
        first, second = (
            Node(
                psutil.Process(process.pid),
                StoreClient(options.address, timeout_ms=10_000),
                Arena.attach(options.arena),
            )
            for process, options in nodes
        )
        yield first, second, members


def until(holds: Callable[[], object], pause_s: float) -> None:
    deadline = time.perf_counter() + 30
    while not holds():
        if time.perf_counter() > deadline:
            raise TimeoutError("the other store does not hear of it")
        time.sleep(pause_s)


def directory_blocks(node: Node) -> int:
    network = node.usage().network
    assert network is not None
    return network.directory_blocks


def fetch_run(first: Node, second: Node, chains: Sequence[bytes]) -> dict[str, float]:
    """Fetch what the second does not have; figures are over all chains."""
    second.client.ask(Flush(""), Done)
    until(lambda: directory_blocks(second) >= len(chains) * CHAIN, 0.01)
    cpu_s = first.cpu_s() + second.cpu_s()
    begin = time.perf_counter()
    for keys in chains:
        second.await_memory(keys)
    took_s = time.perf_counter() - begin
    gigabytes = len(chains) * CHAIN * LAYOUT.slot_bytes / 1e9
    return {
        "gb_per_s": gigabytes / took_s,
        "cpu_s_per_gb": (first.cpu_s() + second.cpu_s() - cpu_s) / gigabytes,
    }


def lookup_run(first: Node, second: Node, chains: Sequence[bytes]) -> list[float]:
    """Milliseconds of an engine's lookups while blocks come from the other node."""
    ready, took_ms = chains[0], list[float]()
    while len(took_ms) < ENGINE_LOOKUPS:
        second.client.ask(Flush(""), Done)
        until(lambda: directory_blocks(second) >= len(chains) * CHAIN, 0.01)
        second.await_memory(ready)
        for keys in chains[1:]:
            while second.found(keys).in_memory * KEY_BYTES < len(keys):
                took_ms.append(_timed_lookup(second, ready))
    return took_ms


def busy_run(node: Node, ready: bytes, lookups: int = ENGINE_LOOKUPS) -> list[float]:
    """Milliseconds of an engine's lookups while nothing is fetched and no core is free."""
    node.await_memory(ready)
    computes = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(computes) for _ in range(os.cpu_count() or 1)]
    try:
        time.sleep(0.5)
        return [_timed_lookup(node, ready) for _ in range(lookups)]
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _timed_lookup(node: Node, keys: bytes) -> float:
    asked = time.perf_counter()
    node.found(keys)
    # A lookup and the end of its lease, which engines send with their next step.
    took_ms = 500 * (time.perf_counter() - asked)
    time.sleep(0.001)
    return took_ms


def copy_run(first: Node, second: Node) -> float:
    """CPU seconds a gigabyte of plain copies between the two arenas: no transfer does better."""
    size = CHAIN * LAYOUT.slot_bytes
    begin = time.process_time()
    for _ in range(CHAINS):
        second.arena.view(0, size)[:] = first.arena.view(0, size)
    return (time.process_time() - begin) / (CHAINS * size / 1e9)


@contextmanager
def watcher(folder: Path) -> Iterator[PeerNetwork]:
    """A third store, in this process, whose directory can be watched."""
    own = folder / "n3"
    own.mkdir()
    arena = Path(f"/dev/shm/loomserve-kv-bench-{os.getpid()}-n3")
    options = StoreOptions(folder=own, arena=arena, memory=2**26, node="n3", host="127.0.0.3")
    server, network = start_server(options, "token")
    assert network is not None
    try:
        yield network
    finally:
        server.stop()
        arena.unlink()


def events_run(holder: Node, network: PeerNetwork, events: int) -> list[float]:
    """Milliseconds from the answer to a commit until its block is in the other's directory."""
    source = random.Random(time.time_ns())
    took_ms = []
    space = b"benchmark-events"
    for _ in range(events):
        keys = chain(source, 1)
        committed = holder.save(space, keys, SMALL)
        until(partial(network.directory.holders, space, keys), 0.0002)
        took_ms.append(1000 * (time.perf_counter() - committed))
        # Sometimes within a batch of events, sometimes after it.
        time.sleep(source.uniform(0, 0.03))
    return took_ms


def directory_run(lookups: int) -> dict[str, float]:
    """Chains that several nodes have to different depths, of a million blocks of eight nodes."""
    source = random.Random(1)
    directory = SharedDirectory(2 * DIRECTORY_BLOCKS)
    chains = [
        chain(source, DIRECTORY_CHAIN) for _ in range(DIRECTORY_BLOCKS // DIRECTORY_CHAIN // 3)
    ]
    # By node, how many blocks it has of which chain.
    held: list[dict[int, int]] = [{} for _ in range(DIRECTORY_NODES)]
    missing = DIRECTORY_BLOCKS
    while missing > 0:
        of, at = source.choice(held), source.randrange(len(chains))
        blocks = source.randint(1, DIRECTORY_CHAIN)
        missing -= max(0, blocks - of.get(at, 0))
        of[at] = max(blocks, of.get(at, 0))
    for number, of in enumerate(held):
        contents = [
            Change(SPACE, Tier.MEMORY, chains[at][: blocks * KEY_BYTES])
            for at, blocks in of.items()
        ]
        directory.take_contents(f"n{number}", 1, 0, contents)
    took_us = []
    begin = time.perf_counter()
    for _ in range(lookups):
        keys = source.choice(chains)
        asked = time.perf_counter_ns()
        directory.holdings(SPACE, keys)
        took_us.append((time.perf_counter_ns() - asked) / 1000)
    return {
        "p50": percentile(took_us, 50),
        "p99": percentile(took_us, 99),
        "per_s": lookups / (time.perf_counter() - begin),
        "blocks": float(len(directory)),
    }


def benchmark(folder: Path, runs: int) -> dict[str, Any]:
    directory = [directory_run(LOOKUPS) for _ in range(runs)]
    source = random.Random(2)
    chains = [chain(source, CHAIN) for _ in range(CHAINS)]
    with two_nodes(folder) as (first, second, members), watcher(folder) as network:
        for keys in chains:
            first.save(SPACE, keys, LAYOUT)
        cold = fetch_run(first, second, chains)
        warm = [fetch_run(first, second, chains) for _ in range(runs)]
        lookups = [lookup_run(first, second, chains) for _ in range(runs)]
        busy = [busy_run(second, chains[0]) for _ in range(runs)]
        copies = [copy_run(first, second) for _ in range(runs)]
        network.set_members(members)
        first.client.ask(Flush(""), Done)
        events_run(first, network, 20)
        visible = [events_run(first, network, EVENTS) for _ in range(runs)]
    figures = {
        "directory_chain128_us_p99": [run["p99"] for run in directory],
        "directory_chain128_us_p50": [run["p50"] for run in directory],
        "directory_lookups_per_s": [run["per_s"] for run in directory],
        "event_visible_ms_p50": [percentile(run, 50) for run in visible],
        "event_visible_ms_p99": [percentile(run, 99) for run in visible],
        "fetch_cpu_s_per_gb": [run["cpu_s_per_gb"] for run in warm],
        "lookup_beside_fetch_ms_p50": [percentile(run, 50) for run in lookups],
        "lookup_beside_fetch_ms_p99": [percentile(run, 99) for run in lookups],
        "lookup_beside_busy_cores_ms_p50": [percentile(run, 50) for run in busy],
        "lookup_beside_busy_cores_ms_p99": [percentile(run, 99) for run in busy],
        "fetch_gb_per_s": [run["gb_per_s"] for run in warm],
        "copy_cpu_s_per_gb": copies,
    }
    spreads = {name: Spread.of(values) for name, values in figures.items()}
    return {
        **{name: of.median for name, of in spreads.items()},
        "fetch_first": cold,
        "directory_blocks": directory[0]["blocks"],
        "runs": runs,
        "directory_chain128_us_n": LOOKUPS,
        "event_visible_ms_n": len(visible[0]),
        "lookup_beside_fetch_ms_n": min(map(len, lookups)),
        "lookup_beside_busy_cores_ms_n": min(map(len, busy)),
        "spread": {name: asdict(of) for name, of in spreads.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.nodes_kv", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory() as folder:
        figures = benchmark(Path(folder), options.runs)
    publish("nodes_kv", figures, setup=said_by(options), facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
