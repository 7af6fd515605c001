"""Two real engines, each with its node's store: blocks come from the other, tokens the same."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine import end
from loomserve.kvstore.peers.messages import Member
from loomserve.kvstore.peers.network import PeerNetwork
from loomserve.kvstore.server.opening import start_server
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.protocol import (
    HANDED_OVER,
    HANDED_OVER_BY,
    HANDS_OVER,
)
from loomserve.kvstore.storage.arena import Arena
from loomserve.platform.state.kvstore import KvNetworkState
from tests.integration.conftest import StoredEngine, exact_engine
from tests.waiting import PATIENCE_S, within

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

SPAWN = multiprocessing.get_context("spawn")
TOKEN = "the run's token"


def prompt(seed: int, tokens: int) -> list[int]:
    """Sequences that differ from the first token on, of the vocabulary's plain words."""
    source = random.Random(seed)
    return [source.randrange(1000, 40000) for _ in range(tokens)]


def serve(options: StoreOptions, pipe: Connection) -> None:
    """A store in a process of its own, which is told its peers."""
    _, network = start_server(options, TOKEN)
    assert network is not None
    pipe.send(network.member)
    while True:
        network.set_members(pipe.recv())


@dataclass
class Nodes:
    """Engine and store of node n1, whose store is a process, and of n2, whose store is here."""

    first: StoredEngine
    second: StoredEngine
    process: BaseProcess
    pipe: Connection
    network: PeerNetwork

    def acquaint(self) -> None:
        """Start n1's store, if it does not run, and make the two known to each other."""
        if not self.process.is_alive():
            self.process, self.pipe = started(self.first.options)
        member: Member = self.pipe.recv()
        self.pipe.send([self.network.member])
        self.network.set_members([member])

    def forget(self) -> None:
        for one in (self.first, self.second):
            within(20, lambda one=one: one.usage().leases == 0)
            one.flush_store()
            one.forget()
        within(5, lambda: len(self.network.directory) == 0)

    def known(self, blocks: int) -> None:
        within(5, lambda: len(self.network.directory) == blocks)

    def usage(self) -> KvNetworkState:
        network = self.second.usage().network
        assert network is not None
        return network


def started(options: StoreOptions) -> tuple[BaseProcess, Connection]:
    """The store's process, whose arena an engine can open, and the pipe on which it says so."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=serve, args=(options, theirs), daemon=True)
    process.start()
    assert ours.poll(60)
    return process, ours


@pytest.fixture(scope="module", name="nodes")
def _nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("nodes")
    options = [
        StoreOptions(
            folder=folder / name,
            arena=Path(f"/dev/shm/loomserve-kv-test-{os.getpid()}-{name}"),
            memory=128 * 2**20,
            node=name,
            host=host,
        )
        for name, host in (("n1", "127.0.0.1"), ("n2", "127.0.0.2"))
    ]
    with ExitStack() as stack:
        for one in options:
            one.folder.mkdir()
            stack.callback(one.arena.unlink, missing_ok=True)
        process, pipe = started(options[0])
        server, network = start_server(options[1], TOKEN)
        assert network is not None
        stack.callback(server.stop)
        engines = []
        for one in options:
            llm = exact_engine(folder, one.kv_transfer_config("demo"))
            stack.callback(end, llm)
            engines.append(StoredEngine(llm, one))
        nodes = Nodes(*engines, process, pipe, network)
        stack.callback(lambda: nodes.process.kill())
        nodes.acquaint()
        yield nodes


@pytest.fixture(autouse=True)
def _forgotten(nodes: Nodes) -> None:
    nodes.forget()


def test_a_prompt_that_one_node_computed_is_loaded_on_the_other(nodes: Nodes) -> None:
    text = prompt(1, 800)
    first = nodes.first.answer([text])[0]
    assert first.cached == 0
    nodes.known(25)
    before = nodes.usage()
    there = nodes.second.answer([text])[0]
    assert (there.cached, there.tokens) == (768, first.tokens)
    assert nodes.usage().fetched_blocks - before.fetched_blocks == 24
    nodes.second.forget()
    again = nodes.second.answer([text])[0]
    assert (again.cached, again.tokens) == (768, first.tokens)
    assert nodes.usage().fetched_blocks - before.fetched_blocks == 24, "they are its own by now"


def test_what_is_computed_on_top_of_it_goes_back(nodes: Nodes) -> None:
    text = prompt(2, 400)
    longer = text + prompt(3, 500)
    nodes.first.answer([text])
    nodes.known(12)
    whole = nodes.second.answer([longer])[0]
    assert whole.cached == 384
    nodes.first.forget()
    hits = nodes.second.usage().models[0].hit_blocks
    within(5, lambda: nodes.second.usage().models[0].blocks_in_memory == 28)
    time.sleep(0.5)  # until it is announced
    back = nodes.first.answer([longer])[0]
    assert (back.cached, back.tokens) == (896, whole.tokens)
    assert nodes.second.usage().models[0].hit_blocks == hits, "a peer's fetch is no engine's hit"


@pytest.mark.parametrize("tokens", [800, 768, 420])
def test_a_prompt_is_handed_over_to_another_node_to_its_last_token(
    nodes: Nodes, tokens: int
) -> None:
    text = prompt(80 + tokens, tokens)
    whole = nodes.first.answer([text], tokens=12)[0].tokens
    nodes.forget()
    (first,) = nodes.first.answer([text], tokens=1, kv_transfer={HANDS_OVER: True})[0].tokens
    assert first == whole[0]
    told = {HANDED_OVER: tokens, HANDED_OVER_BY: "n1"}
    rest = nodes.second.answer([[*text, first]], tokens=11, kv_transfer=told)[0]
    assert (rest.cached, rest.tokens) == (tokens, whole[1:])


def test_a_block_that_was_damaged_at_its_holder_is_computed_again(nodes: Nodes) -> None:
    text = prompt(40, 800)
    first = nodes.first.answer([text])[0]
    nodes.known(25)
    arena = Arena.attach(nodes.first.options.arena)
    everything = arena.view(0, arena.capacity_bytes)
    everything[2**16 :: 4096] ^= np.uint8(255)
    there = nodes.second.answer([text])[0]
    assert there.tokens == first.tokens
    assert there.cached < 768
    assert nodes.usage().failed_fetches["corrupt"] > 0
    within(5, lambda: nodes.first.usage().corrupt_blocks > 0)
    everything[2**16 :: 4096] ^= np.uint8(255)


def test_a_store_that_hangs_and_is_killed_in_the_middle_of_a_fetch(nodes: Nodes) -> None:
    text = prompt(50, 400)
    first = nodes.first.answer([text])[0]
    nodes.known(12)
    pid = nodes.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    killed = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    killed.start()
    alone = nodes.second.answer([text])[0]
    assert (alone.cached, alone.tokens) == (0, first.tokens)
    assert time.monotonic() - begin < PATIENCE_S
    killed.join()
    within(5, lambda: nodes.usage().failed_fetches.get("gone", 0) > 0)
    within(5, lambda: len(nodes.network.directory) == 0)
    nodes.process.join()
    # Its blocks are in its arena still, and it is followed from its new start.
    nodes.acquaint()
    nodes.second.flush_store()
    nodes.second.forget()
    nodes.known(12)
    again = nodes.second.answer([text])[0]
    assert (again.cached, again.tokens) == (384, first.tokens)
