"""Saves that are staged on their GPU, which a CPU is here: no wait for them, the same bytes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from loomserve.kvstore.engine.transfers import staging
from loomserve.kvstore.engine.transfers.batched_memory import BatchedMemory
from loomserve.kvstore.engine.transfers.memory import HostStream
from loomserve.kvstore.engine.transfers.saver import Saver
from loomserve.kvstore.engine.transfers.staging import Staging
from loomserve.kvstore.engine.transfers.transfer import Save
from loomserve.kvstore.server.client import StoreClient
from loomserve.kvstore.storage.arena import Arena
from tests.unit.kvstore.engine.transfers.test_batched_memory import ByCpu
from tests.unit.kvstore.engine.transfers.test_transfer import (
    LAYER_BYTES,
    LAYERS,
    Engine,
    Store,
    chain,
    random_caches,
    save_of,
    saved,
)
from tests.waiting import PATIENCE_S

PART = 3
"""Blocks of a step for which there is room."""


class Gpu:
    """A worker's caches, and the thread that saves them."""

    def __init__(self, store: Store) -> None:
        self.caches = random_caches(1)
        self.memory = BatchedMemory(dict(zip("abc", self.caches, strict=True)), ByCpu())
        arena = Arena.attach(store.folder / "arena")
        client = StoreClient(store.address, timeout_ms=round(1000 * PATIENCE_S))
        stages = Staging(self.memory, HostStream())
        self.saver = Saver(self.memory, arena, HostStream(), client, "model", stages)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The thread saves nothing meanwhile."""
        gate = threading.Event()
        self.saver._thread.submit(gate.wait)
        yield
        gate.set()


@pytest.fixture(name="gpu")
def _gpu(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setattr(staging, "STEP_BYTES", PART * LAYERS * LAYER_BYTES)
    gpu = Gpu(store)
    yield gpu
    gpu.saver.close()


def assert_stored(store: Store, gpu: Gpu, name: str, values: torch.Tensor) -> None:
    """The chain has these bytes, ``[layers, blocks, ...]``, and no block more."""
    saved(gpu.saver, store)
    count = values.shape[1]
    assert store.found(chain(name, count + 1)) == count
    reader = Engine(store, 2)
    assert reader.load([store.load(chain(name, count), list(range(count)))]) == set()
    assert torch.equal(reader.caches[:, :count], values)
    reader.close()


def test_the_engine_overwrites_blocks_before_they_are_saved(store: Store, gpu: Gpu) -> None:
    before = gpu.caches.clone()
    with gpu.busy():
        gpu.saver.save_computed([save_of("a", [7, 2]), save_of("b", [9])])
        gpu.caches[:] = 0
    assert_stored(store, gpu, "a", before[:, [7, 2]])
    assert_stored(store, gpu, "b", before[:, [9]])


def test_only_new_blocks_of_a_chain_take_room(store: Store, gpu: Gpu) -> None:
    blocks = [7, 2, 9, 4, 11, 5]
    for end in (PART, 2 * PART):
        save = replace(save_of("a", blocks[:end]), first=end - PART)
        assert gpu.saver.stages([save])
        gpu.saver.save_computed([save])
    assert_stored(store, gpu, "a", gpu.caches[:, blocks])


def test_room_is_used_again_and_what_does_not_fit_is_waited_for(store: Store, gpu: Gpu) -> None:
    small = [save_of(name, [number]) for number, name in enumerate("abc")]
    large = save_of("large", [8, 6, 3, 1])
    assert not gpu.saver.stages([large])
    with gpu.busy():
        for save in small[:2]:
            gpu.saver.save_computed([save])
        assert not gpu.saver.stages([small[2]])
    before = gpu.caches.clone()
    for save in (small[2], large):
        gpu.saver.save_computed([save])
    gpu.caches[:] = 0
    for number, name in enumerate("abc"):
        assert_stored(store, gpu, name, before[:, [number]])
    assert_stored(store, gpu, "large", before[:, large.blocks])
    assert gpu.saver.stages(small)


def test_a_chain_that_the_store_has_lost_is_saved_anew_by_its_next_save(
    store: Store, gpu: Gpu
) -> None:
    blocks = [7, 2, 9, 4]
    gpu.saver.save_computed([replace(save_of("a", blocks[:3]), first=2), save_of("b", [5])])
    saved(gpu.saver, store)
    assert (store.found(chain("a", 3)), store.found(chain("b", 1))) == (0, 1)
    save: Save = replace(save_of("a", blocks), first=3)
    assert not gpu.saver.stages([save])
    gpu.saver.save_computed([save])
    assert_stored(store, gpu, "a", gpu.caches[:, blocks])
    assert gpu.saver.stages([replace(save_of("a", [*blocks, 1]), first=4)])


def test_a_chain_without_new_blocks_is_saved_if_the_store_lacks_it(store: Store, gpu: Gpu) -> None:
    save = replace(save_of("a", [7, 2]), first=2)
    for staged in (True, False, True):
        assert gpu.saver.stages([save]) == staged
        gpu.saver.save_computed([save])
        saved(gpu.saver, store)
    assert_stored(store, gpu, "a", gpu.caches[:, [7, 2]])


def test_other_memory_than_that_which_is_staged_is_waited_for(store: Store, gpu: Gpu) -> None:
    other = random_caches(4)
    gpu.saver.memory = BatchedMemory(dict(zip("abc", other, strict=True)), ByCpu())
    assert not gpu.saver.stages([save_of("a", [1])])
    gpu.saver.save_computed([save_of("a", [1])])
    assert_stored(store, gpu, "a", other[:, [1]])


def test_an_engine_that_sleeps_does_without_the_room_until_it_saves_again(
    store: Store, gpu: Gpu
) -> None:
    staged = gpu.saver._staging
    assert staged is not None
    gpu.saver.save_computed([save_of("a", [1, 2])])
    rows = weakref.ref(staged.memory)
    # It waits for what is still to be saved.
    gpu.saver.give_back()
    assert rows() is None
    assert_stored(store, gpu, "a", gpu.caches[:, [1, 2]])
    gpu.saver.save_computed([save_of("b", [3])])
    assert_stored(store, gpu, "b", gpu.caches[:, [3]])
