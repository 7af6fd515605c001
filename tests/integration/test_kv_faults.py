"""Engines and a store that are killed or hang: no wrong token, and no hang."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import torch

from loomserve.kvstore.engine.transfers.memory import HostStream, KvMemory
from loomserve.kvstore.engine.transfers.saver import Saver
from loomserve.kvstore.engine.transfers.transfer import Save
from loomserve.kvstore.server import grants
from loomserve.kvstore.server.client import StoreClient
from loomserve.kvstore.server.opening import open_store
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.protocol import Done, Found, Inspect, Lookup, Release, StoreUsage
from loomserve.kvstore.server.server import StoreServer
from loomserve.kvstore.storage.arena import Arena
from tests.integration.conftest import StoredEngine
from tests.waiting import PATIENCE_S, within

pytestmark = pytest.mark.timeout(300)

SPAWN = multiprocessing.get_context("spawn")
SPACE = b"n" * 16
LAYERS, BLOCKS = 3, 8


def options_in(folder: Path) -> StoreOptions:
    return StoreOptions(
        folder=folder,
        arena=folder / "arena",
        memory=2**24,
        ssd_folder=None,
        ssd=0,
        eviction="lru",
        quotas={},
    )


# An engine.


def keys_of(name: int) -> bytes:
    return np.random.default_rng(name).bytes(16 * BLOCKS)


def worker(options: StoreOptions) -> Saver:
    """What copies in an engine's worker."""
    caches = torch.randn((LAYERS, BLOCKS, 2, 4, 16), generator=torch.Generator().manual_seed(1))
    memory = KvMemory({f"layer {i}": caches[i] for i in range(LAYERS)})
    client = StoreClient(options.address, timeout_ms=5000)
    return Saver(memory, Arena.attach(options.arena), HostStream(), client, "model")


def save(saver: Saver, name: int, layers: int = LAYERS) -> None:
    """A step's forward pass, or its beginning."""
    saver.start([Save(SPACE, keys_of(name), list(range(BLOCKS)), 0.03)])
    for layer in range(layers):
        saver.layer_done(layer)
    if layers == LAYERS:
        saver.finish(sound=True)


def save_until_killed(options: StoreOptions, pipe: Connection) -> None:
    saver = worker(options)
    save(saver, 1)
    save(saver, 2, layers=LAYERS - 1)
    pipe.send("in the middle")
    signal.pause()


def test_an_engine_killed_in_the_middle_of_a_save_leaves_what_it_had_saved_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grants, "WRITE_S", 1.0)
    options = options_in(tmp_path)
    server = StoreServer(open_store(options), options.address)
    server.start()
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=save_until_killed, args=(options, there))
    process.start()
    assert here.recv() == "in the middle"
    client = StoreClient(options.address, timeout_ms=5000)

    def found(name: int) -> int:
        found = client.ask(Lookup(SPACE, keys_of(name), 0, 10.0, False), Found)
        client.ask(Release([found.lease]), Done)
        return found.resident

    within(10, lambda: found(1) == BLOCKS)
    kill(process)
    assert found(2) == 0
    within(10, lambda: client.ask(Inspect(), StoreUsage).state.writers == 0)
    assert (found(1), found(2)) == (BLOCKS, 0)
    usage = client.ask(Inspect(), StoreUsage).state
    assert usage.used_bytes == usage.models[0].blocks_in_memory * 4096
    with closing(worker(options)) as other:
        save(other, 2)
        within(10, lambda: found(2) == BLOCKS)
    server.stop()


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join()


# A store, while an engine runs.


def serve_until_killed(options: StoreOptions, pipe: Connection) -> None:
    StoreServer(open_store(options), options.address).start()
    pipe.send("up")
    signal.pause()


@contextmanager
def running_store(options: StoreOptions) -> Iterator[BaseProcess]:
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=serve_until_killed, args=(options, there))
    process.start()
    try:
        assert here.recv() == "up"
        yield process
    finally:
        kill(process)


def prompt(seed: int, tokens: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1000, 40000) for _ in range(tokens)]


@pytest.mark.engine
@pytest.mark.slow
def test_while_the_store_hangs_or_is_dead_engines_compute_and_use_it_again_afterwards(
    stored_engine: StoredEngine,
) -> None:
    engine = stored_engine
    engine.stop_store()
    texts = [prompt(100 + i, 100) for i in range(2)]

    def answers_as_before(signal_: signal.Signals, process: BaseProcess) -> None:
        """The store gets the signal in the middle of a batch, and another batch follows."""
        assert process.pid is not None
        engine.forget()
        timer = threading.Timer(0.2, os.kill, (process.pid, signal_))
        timer.start()
        begin = time.monotonic()
        assert [answer.tokens for answer in engine.answer(texts, 12)] == first
        timer.join()
        engine.forget()
        away = engine.answer(texts, 12)
        assert time.monotonic() - begin < 3 * took + PATIENCE_S
        assert [(answer.cached, answer.tokens) for answer in away] == [(0, of) for of in first]

    with running_store(engine.options) as process:
        time.sleep(1.1)  # until engines ask a store again that was away
        engine.forget()
        begin = time.monotonic()
        first = [answer.tokens for answer in engine.answer(texts, 12)]
        took = time.monotonic() - begin
        within(5, lambda: blocks(engine) >= 2 * 3)
        answers_as_before(signal.SIGSTOP, process)
        os.kill(process.pid or 0, signal.SIGCONT)
        comes_back(engine, texts, first)
        answers_as_before(signal.SIGKILL, process)
    with running_store(engine.options):
        comes_back(engine, texts, first)


def comes_back(engine: StoredEngine, texts: list[list[int]], first: list[list[int]]) -> None:
    time.sleep(1.1)
    engine.forget()
    again = engine.answer(texts, 12)
    assert [(answer.cached, answer.tokens) for answer in again] == [(96, of) for of in first]


def blocks(engine: StoredEngine) -> int:
    return sum(model.blocks_in_memory for model in engine.usage().models)
