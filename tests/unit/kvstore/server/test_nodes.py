"""Stores of two nodes: each finds what the other has, and whatever breaks is computed again."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.peers.messages import Member
from loomserve.kvstore.peers.network import PeerNetwork
from loomserve.kvstore.server.opening import start_server
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.protocol import (
    Abandon,
    Flush,
    Found,
    HotChains,
    Hottest,
    Lookup,
    Release,
)
from loomserve.kvstore.server.server import StoreServer
from loomserve.platform.state.kvstore import KvNetworkState
from tests.unit.kvstore.server.test_server import (
    LAYOUT,
    MEMORY,
    SPACE,
    SPAWN,
    Engine,
    chain,
)
from tests.unit.stopping import stopped
from tests.waiting import PATIENCE_S, fastest, within

# It takes long, so that it begins first.
pytestmark = pytest.mark.xdist_group("stores of nodes")

TOKEN = "the run's token"
BLOCK_S = 0.1
"""An engine so slow that every fetch is worth it."""


@dataclass
class Node:
    """A node's store, and an engine of that node."""

    name: str
    options: StoreOptions
    server: StoreServer
    network: PeerNetwork
    engine: Engine

    def ask(self, keys: bytes, block_s: float = BLOCK_S, holder: str = "") -> Found:
        request = Lookup(SPACE, keys, 0, 10.0, True, block_s=block_s, holder=holder)
        found = self.engine.client.ask(request, Found)
        self.engine.client.ask(Release([found.lease]), object)
        return found

    def wait_for(self, keys: bytes, blocks: int, holder: str = "") -> None:
        """Ask until so many blocks are in memory, as an engine does whose request waits."""
        within(5, lambda: self.ask(keys, holder=holder).in_memory >= blocks)

    def usage(self) -> KvNetworkState:
        network = self.engine.usage().network
        assert network is not None
        return network

    def knows(self, keys: bytes) -> int:
        """Blocks of a chain that its directory has of another node."""
        held = self.network.directory.holdings(SPACE, keys)
        return max((holding.resident for holding in held), default=0)


def options_of(
    folder: Path, name: str, host: str, *, ssd: int = 0, memory: int = MEMORY
) -> StoreOptions:
    own = folder / name
    own.mkdir()
    return StoreOptions(
        folder=own,
        arena=own / "arena",
        memory=memory,
        ssd_folder=own / "ssd" if ssd else None,
        ssd=ssd,
        node=name,
        host=host,
    )


@contextmanager
def node(folder: Path, name: str, host: str, **sizes: int) -> Iterator[Node]:
    options = options_of(folder, name, host, **sizes)
    server, network = start_server(options, TOKEN)
    assert network is not None
    with closing(Engine.of(options).client) as client:
        yield Node(name, options, server, network, Engine(client, Engine.of(options).arena))
    if server.alive:
        server.stop()


def acquaint(*nodes: Node) -> None:
    members = [one.network.member for one in nodes]
    for one in nodes:
        one.network.set_members(members)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    with node(tmp_path, "n1", "127.0.0.1") as first, node(tmp_path, "n2", "127.0.0.2") as second:
        acquaint(first, second)
        yield first, second


def test_a_block_of_one_node_is_found_on_the_other_and_comes_with_its_bytes(
    pair: tuple[Node, Node],
) -> None:
    first, second = pair
    keys = chain("shared", 20)
    first.engine.save(keys)
    within(5, lambda: second.knows(keys) == 20)
    found = second.ask(keys)
    assert (found.in_memory, found.remote) == (0, 20)
    assert 0 < found.ready_s < 1
    second.wait_for(keys, 20)
    assert second.engine.read(keys) == 20
    within(5, lambda: first.knows(keys) == 20)
    usage = second.usage()
    assert (usage.fetched_blocks, usage.failed_fetches) == (20, {})
    assert usage.fetched_bytes == 20 * LAYOUT.slot_bytes
    (link,) = usage.peers
    assert (link.node, link.fetches) == ("n1", 1)
    assert second.engine.usage().models[0].model == "model"


def test_what_a_node_that_leaves_has_used_last_is_fetched_by_another(
    pair: tuple[Node, Node],
) -> None:
    first, second = pair
    chains = [chain(f"hot {number}", 4) for number in range(5)]
    for keys in chains:
        first.engine.save(keys)
    first.ask(chains[1], block_s=0.0)
    told = first.engine.client.ask(Hottest(8 * LAYOUT.block_bytes), HotChains).chains
    assert len(told) == 2
    assert told[0].keys == chains[1]
    assert {each.block_bytes for each in told} == {LAYOUT.block_bytes}
    for each in told:
        within(5, lambda keys=each.keys: second.knows(keys) == 4)
        assert second.ask(each.keys, block_s=1000.0).remote == 4
        second.wait_for(each.keys, 4)
    assert second.usage().fetched_blocks == 8


def test_what_is_there_of_a_chain_is_not_fetched_again(pair: tuple[Node, Node]) -> None:
    first, second = pair
    keys = chain("longer", 12)
    second.engine.save(keys[: 5 * KEY_BYTES])
    first.engine.save(keys)
    within(5, lambda: second.knows(keys) == 12)
    found = second.ask(keys)
    assert (found.in_memory, found.remote) == (5, 7)
    second.wait_for(keys, 12)
    assert second.usage().fetched_blocks == 7
    assert second.engine.read(keys) == 12


def test_nothing_is_fetched_that_is_computed_sooner(pair: tuple[Node, Node]) -> None:
    first, second = pair
    keys = chain("cheap", 6)
    first.engine.save(keys)
    within(5, lambda: second.knows(keys) == 6)
    assert second.ask(keys, block_s=1e-9).remote == 0
    assert second.ask(keys, block_s=0.0).remote == 0, "a peer that asks is fetched nothing for"
    assert second.usage().fetched_blocks == 0


def test_what_leaves_one_node_leaves_the_directory_of_the_other(pair: tuple[Node, Node]) -> None:
    first, second = pair
    keys = chain("gone", 6)
    first.engine.save(keys)
    within(5, lambda: second.knows(keys) == 6)
    first.engine.client.ask(Flush(""), object)
    within(5, lambda: second.knows(keys) == 0)
    assert second.ask(keys).remote == 0


def test_a_store_that_comes_later_learns_what_there_was_before(tmp_path: Path) -> None:
    keys = [chain(str(at), 8) for at in range(20)]
    with node(tmp_path, "n1", "127.0.0.1") as first:
        for one in keys:
            first.engine.save(one)
        with node(tmp_path, "n2", "127.0.0.2") as second:
            acquaint(first, second)
            within(5, lambda: all(second.knows(one) == 8 for one in keys))
            second.wait_for(keys[3], 8)


def test_what_an_engine_hands_over_is_fetched_before_it_is_announced(
    pair: tuple[Node, Node],
) -> None:
    first, second = pair
    first.engine.save(chain("known", 1))
    within(5, lambda: second.knows(chain("known", 1)) == 1)
    keys = chain("handed over", 6)
    room = first.engine.reserve(keys)
    found = second.ask(keys, holder="n1")
    assert found.remote == 6, "it waits for its commit at the holder"
    first.engine.client.ask(Abandon(room.writer), object)
    first.engine.save(keys)
    second.wait_for(keys, 6, holder="n1")
    assert second.engine.read(keys) == 6


def test_a_damaged_block_ends_what_is_taken_over_and_its_holder_forgets_it(
    pair: tuple[Node, Node],
) -> None:
    first, second = pair
    keys = chain("damaged", 10)
    first.engine.save(keys)
    within(5, lambda: second.knows(keys) == 10)
    slots = np.frombuffer(first.engine.look(keys).slots, "<i8")
    first.engine.arena.view(int(slots[4]), LAYOUT.slot_bytes)[100] ^= np.uint8(1)
    assert second.ask(keys).remote == 10
    second.wait_for(keys, 4)
    within(5, lambda: second.usage().failed_fetches == {"corrupt": 1})
    assert second.engine.read(keys) == 4
    within(5, lambda: first.engine.usage().corrupt_blocks == 1)
    within(5, lambda: second.knows(keys) == 4)
    assert second.ask(keys).remote == 0


def test_a_hint_that_is_not_true_any_more_costs_one_question(pair: tuple[Node, Node]) -> None:
    first, second = pair
    keys = chain("stale", 4)
    first.engine.save(keys)
    within(5, lambda: second.knows(keys) == 4)
    second.network._followers["n1"].stop()
    first.engine.client.ask(Flush(""), object)
    assert second.ask(keys).remote == 4
    within(5, lambda: second.usage().failed_fetches == {"missing": 1})
    within(5, lambda: second.ask(keys).remote == 0)


def test_blocks_on_a_peers_ssd_come_too(tmp_path: Path) -> None:
    keys = [chain(str(at), 20) for at in range(14)]
    with (
        node(tmp_path, "n1", "127.0.0.1", ssd=2**28) as first,
        node(tmp_path, "n2", "127.0.0.2", memory=2**26) as second,
    ):
        for at, one in enumerate(keys):
            first.engine.save(one)
            # Memory holds ten of them, and the rest must not be lost before it is written.
            within(10, lambda at=at: _on_ssd(first) >= 20 * (at - 8))
        acquaint(first, second)
        first.engine.wait_for_ssd(100)
        within(5, lambda: all(second.knows(one) == 20 for one in keys))
        holdings = [second.network.directory.holdings(SPACE, one)[0] for one in keys]
        assert any(holding.in_memory < holding.resident for holding in holdings)
        for one in keys:
            second.wait_for(one, 20)
            assert second.engine.read(one) == 20


def _on_ssd(node: Node) -> int:
    return node.engine.usage().models[0].blocks_on_ssd


def test_of_two_blocks_the_one_that_a_peer_has_too_leaves_memory_first(
    pair: tuple[Node, Node],
) -> None:
    first, second = pair
    shared, alone = chain("both", 40), chain("alone", 40)
    first.engine.save(shared)
    second.engine.save(shared)
    within(5, lambda: second.knows(shared) == 40)
    # The older one, which the order of use alone would take first.
    second.engine.save(alone)
    second.engine.read(shared)
    for at in range(6):
        second.engine.save(chain(f"more {at}", 40))
        second.engine.read(alone)
    kept = second.engine.client.ask(Lookup(SPACE, alone, 0, 1.0, False, use=False), Found)
    left = second.engine.client.ask(Lookup(SPACE, shared, 0, 1.0, False, use=False), Found)
    assert kept.in_memory == 40
    assert left.in_memory < 40


def test_a_node_that_is_no_member_any_more_is_forgotten(pair: tuple[Node, Node]) -> None:
    first, second = pair
    keys = chain("left", 3)
    first.engine.save(keys)
    within(5, lambda: second.knows(keys) == 3)
    second.network.set_members([second.network.member])
    assert second.knows(keys) == 0
    assert second.ask(keys).remote == 0
    assert second.ask(keys, holder="n1").remote == 3, "whoever says so is believed, and asked"
    within(5, lambda: second.usage().failed_fetches == {"gone": 1})
    acquaint(first, second)
    within(5, lambda: second.knows(keys) == 3)


def serve_until_killed(options: StoreOptions, pipe: Connection) -> None:
    _, network = start_server(options, TOKEN)
    assert network is not None
    pipe.send(network.member)
    signal.pause()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_ends_or_hangs_in_the_middle_of_a_fetch(
    tmp_path: Path, signal_number: int
) -> None:
    options = options_of(tmp_path, "n1", "127.0.0.1", memory=2**29)
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=serve_until_killed, args=(options, theirs), daemon=True)
    process.start()
    assert ours.poll(PATIENCE_S)
    member: Member = ours.recv()
    keys = [chain(str(at), 200) for at in range(10)]
    engine = Engine.of(options)
    for one in keys:
        engine.save(one)
    try:
        with node(tmp_path, "n2", "127.0.0.2", memory=2**29) as second:
            second.network.set_members([member])
            within(10, lambda: all(second.knows(one) == 200 for one in keys))
            assert second.ask(keys[0]).remote == 200
            second.wait_for(keys[0], 200)
            for one in keys[1:-1]:
                assert second.ask(one).remote == 200
            assert process.pid is not None
            pid = process.pid
            os.kill(pid, signal_number)
            ended = signal_number == signal.SIGKILL
            within(5, lambda: ended or stopped(pid))
            # Some of them may have come by now; this one cannot. The other store may have heard of
            # a peer's end before it is asked, and then asks it for nothing more.
            asks = second.ask(keys[-1]).remote
            assert asks == 200 or (ended and asks == 0)
            within(8, lambda: asks == 0 or second.usage().failed_fetches.get("gone", 0) > 0)
            within(8, lambda: second.knows(keys[-1]) == 0)
            second.engine.save(chain("on", 5))
            assert second.engine.read(chain("on", 5)) == 5
            for one in keys:
                # As much as came, and never wrong bytes.
                assert second.engine.read(one) <= (200 if one != keys[-1] else 0)
            others = itertools.count()
            assert fastest(lambda: second.ask(chain(f"quick{next(others)}", 100))) < 0.5
    finally:
        process.kill()
        process.join()
        engine.client.close()


def test_a_peer_that_comes_back_is_followed_again_from_its_new_start(tmp_path: Path) -> None:
    keys, later = chain("before", 4), chain("after", 4)
    with node(tmp_path, "n2", "127.0.0.2") as second:
        with node(tmp_path, "n1", "127.0.0.1") as first:
            acquaint(first, second)
            first.engine.save(keys)
            within(5, lambda: second.knows(keys) == 4)
            options = first.options
        within(5, lambda: second.knows(keys) == 0)
        server, network = start_server(options, TOKEN)
        assert network is not None
        with closing(Engine.of(options).client) as client:
            again = Node("n1", options, server, network, Engine(client, Engine.of(options).arena))
            acquaint(again, second)
            within(5, lambda: second.knows(keys) == 4)
            again.engine.save(later)
            within(5, lambda: second.knows(later) == 4)
        server.stop()
