"""KV blocks between an engine's caches and a real store: exact, or reported, or not kept."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from loomserve.kvstore.engine.transfers import loader, saver
from loomserve.kvstore.engine.transfers.loader import Loader
from loomserve.kvstore.engine.transfers.memory import BlockPieces, HostStream, KvMemory, KvRows
from loomserve.kvstore.engine.transfers.saver import Saver
from loomserve.kvstore.engine.transfers.transfer import BlockRun, Copied, Load, Save
from loomserve.kvstore.index.eviction import lru
from loomserve.kvstore.index.index import Index
from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.server import grants
from loomserve.kvstore.server.client import StoreClient
from loomserve.kvstore.server.protocol import (
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
from loomserve.kvstore.server.server import StoreServer
from loomserve.kvstore.server.store import BlockStore
from loomserve.kvstore.storage.arena import Arena, ArenaOwner
from loomserve.kvstore.storage.checksum import BlockLayout, layer_digest
from loomserve.platform.state.kvstore import KvState
from tests.waiting import PATIENCE_S

SPACE = b"n" * 16
LAYERS, BLOCKS = 3, 16
SHAPE = (LAYERS, BLOCKS, 2, 4, 16)
LAYER_BYTES = 2 * 4 * 16 * 2
EXTENT = 16 * 4096


def chain(name: str, blocks: int) -> bytes:
    return b"".join(
        hashlib.sha256(f"{name} {block}".encode()).digest()[:KEY_BYTES] for block in range(blocks)
    )


def random_caches(number: int) -> torch.Tensor:
    """All layers' caches as vLLM lays them out on CPUs: layer-major, in one piece."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(SHAPE, generator=generator).to(torch.bfloat16)


class Spoiler(HostStream):
    """Something that flips a bit of ``target`` after each layer's copy, before its check."""

    target: NDArray[np.uint8] | None = None

    def settle(self) -> None:
        if self.target is not None:
            self.target[-1] ^= 1


class Engine:
    """A worker's caches and its two lanes."""

    def __init__(
        self,
        store: Store,
        number: int,
        stream: HostStream | None = None,
        # More than in service, so that a busy machine does not look like a store away.
        timeout_ms: int = round(1000 * PATIENCE_S),
        make: Callable[[Mapping[str, torch.Tensor]], KvMemory] = KvMemory,
    ) -> None:
        self.caches = random_caches(number)
        memory = make({f"layer {i}": self.caches[i] for i in range(LAYERS)})
        arena = Arena.attach(store.folder / "arena")
        stream = stream or HostStream()
        clients = [StoreClient(store.address, timeout_ms) for _ in range(2)]
        self.loader = Loader(memory, arena, stream, clients[0])
        self.saver = Saver(memory, arena, stream, clients[1], "model")

    def save(
        self, saves: Sequence[Save], values: torch.Tensor | None = None, *, sound: bool = True
    ) -> None:
        """A forward pass that computes these values, a layer at a time."""
        self.saver.start(saves)
        for layer in range(LAYERS):
            if values is not None:
                self.caches[layer] = values[layer]
            self.saver.layer_done(layer)
        self.saver.finish(sound=sound)

    def load(self, loads: Sequence[Load]) -> set[int]:
        self.loader.start(loads)
        for layer in range(LAYERS):
            self.loader.wait_layer(layer)
        return self.loader.finish()

    def close(self) -> None:
        self.loader.close()
        self.saver.close()


@dataclass
class Store:
    folder: Path
    server: StoreServer
    client: StoreClient

    @property
    def address(self) -> str:
        return f"ipc://{self.folder / 'store.sock'}"

    def look(self, keys: bytes) -> Found:
        return self.client.ask(Lookup(SPACE, keys, 0, 60.0, False), Found)

    def found(self, keys: bytes) -> int:
        found = self.look(keys)
        self.client.ask(Release([found.lease]), Done)
        return found.in_memory

    def usage(self) -> KvState:
        return self.client.ask(Inspect(), StoreUsage).state

    def load(self, keys: bytes, blocks: Sequence[int]) -> Load:
        found = self.look(keys)
        assert found.in_memory == len(blocks)
        return Load(SPACE, keys, 0, decode_slots(found.slots), blocks, found.lease)

    def settled(self) -> None:
        """No engine is writing any more."""
        until(lambda: self.usage().writers == 0)


def saved(saver: Saver, store: Store) -> None:
    """All that was to be saved is."""
    saver._thread.submit(int).result()
    store.settled()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def save_of(name: str, blocks: Sequence[int]) -> Save:
    return Save(SPACE, chain(name, len(blocks)), blocks, 0.03)


def store_in(folder: Path, extents: int = 8) -> Store:
    arena = ArenaOwner.create(folder / "arena", extents * EXTENT, EXTENT)
    blocks = BlockStore(arena, Index(lru), None, folder / "spaces.json", {})
    address = f"ipc://{folder / 'store.sock'}"
    server = StoreServer(blocks, address)
    server.start()
    return Store(folder, server, StoreClient(address, timeout_ms=round(1000 * PATIENCE_S)))


@pytest.fixture
def engines(store: Store) -> Iterator[tuple[Engine, Engine]]:
    one, other = Engine(store, 1), Engine(store, 2)
    yield one, other
    one.close()
    other.close()


def test_every_byte_of_every_layer_and_block_arrives_and_no_other_changes(
    store: Store, engines: tuple[Engine, Engine]
) -> None:
    one, other = engines
    values, before = random_caches(3), other.caches.clone()
    one.save([save_of("a", [7, 2, 9, 0, 4]), save_of("b", [15, 1])], values)
    store.settled()
    loads = [
        store.load(chain("a", 5), [1, 3, 5, 7, 15]),
        store.load(chain("b", 2), [0, 2]),
    ]
    assert other.load(loads) == set()
    into, out_of = [1, 3, 5, 7, 15, 0, 2], [7, 2, 9, 0, 4, 15, 1]
    assert torch.equal(other.caches[:, into], values[:, out_of])
    rest = [block for block in range(BLOCKS) if block not in into]
    assert torch.equal(other.caches[:, rest], before[:, rest])
    until(lambda: store.usage().leases == 0)


@pytest.mark.parametrize("together", [1, 3, BLOCKS])
@pytest.mark.parametrize(
    "blocks", [list(range(8)), [12, 13, 14, 3, 4, 9, 8, 7], [8, 7, 6, 5, 4, 3, 2, 1]]
)
def test_blocks_in_a_row_and_scattered_ones_arrive_alike(
    store: Store,
    engines: tuple[Engine, Engine],
    monkeypatch: pytest.MonkeyPatch,
    blocks: list[int],
    together: int,
) -> None:
    monkeypatch.setattr(KvMemory, "copy_bytes", together * LAYER_BYTES)
    one, other = engines
    one.save([save_of("a", blocks)])
    store.settled()
    before = other.caches.clone()
    assert other.load([store.load(chain("a", 8), list(range(2, 10)))]) == set()
    assert torch.equal(other.caches[:, 2:10], one.caches[:, blocks])
    rest = [block for block in range(BLOCKS) if not 2 <= block < 10]
    assert torch.equal(other.caches[:, rest], before[:, rest])


def test_a_part_of_a_chain_is_loaded_into_its_own_blocks(
    store: Store, engines: tuple[Engine, Engine]
) -> None:
    one, other = engines
    one.save([save_of("a", [0, 1, 2, 3])])
    store.settled()
    whole = store.load(chain("a", 4), [0, 0, 0, 0])
    assert other.load([Load(SPACE, whole.keys, 2, whole.slots[2:], [8, 9], whole.lease)]) == set()
    assert torch.equal(other.caches[:, [8, 9]], one.caches[:, [2, 3]])


def test_a_block_that_the_pass_will_write_into_is_whole_before_it_begins(
    store: Store, engines: tuple[Engine, Engine]
) -> None:
    one, other = engines
    one.save([save_of("a", [0, 1, 2])])
    store.settled()
    other.loader.start([replace(store.load(chain("a", 3), [4, 5, 6]), ahead=True)])
    assert torch.equal(other.caches[:, 6], one.caches[:, 2])
    written = other.caches[:, 6].clone()
    for layer in range(LAYERS):
        other.caches[layer, 6, 0, 0] = written[layer, 0, 0] = layer
        other.loader.wait_layer(layer)
    assert other.loader.finish() == set()
    assert torch.equal(other.caches[:, 6], written)
    assert torch.equal(other.caches[:, [4, 5]], one.caches[:, [0, 1]])


def test_a_damaged_block_is_reported_though_it_was_loaded_ahead(
    store: Store, engines: tuple[Engine, Engine]
) -> None:
    one, other = engines
    one.save([save_of("a", [0, 1])])
    store.settled()
    load = replace(store.load(chain("a", 2), [4, 5]), ahead=True)
    Arena.attach(store.folder / "arena").view(load.slots[1], 4096)[7] ^= 1
    assert other.load([load]) == {5}
    until(lambda: store.found(chain("a", 2)) == 1)


def test_only_what_the_store_lacks_is_copied(store: Store, engines: tuple[Engine, Engine]) -> None:
    one, _ = engines
    one.save([save_of("a", [0, 1, 2])])
    store.settled()
    one.save([save_of("a", [0, 1, 2, 3, 4])])
    store.settled()
    assert store.found(chain("a", 5)) == 5
    assert one.saver.copied.size == 5 * LAYERS * LAYER_BYTES


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_bad_layer_condemns_exactly_its_block_and_the_store_forgets_it(
    store: Store, engines: tuple[Engine, Engine], layer: int
) -> None:
    one, other = engines
    one.save([save_of("a", [0, 1, 2, 3]), save_of("b", [4, 5])])
    store.settled()
    bad, good = store.load(chain("a", 4), [10, 11, 12, 13]), store.load(chain("b", 2), [14, 15])
    layout = BlockLayout(LAYERS, LAYER_BYTES)
    view = Arena.attach(store.folder / "arena").view(bad.slots[2], layout.slot_bytes)
    layout.pieces(view)[layer][-1] ^= 1
    assert other.load([bad, good]) == {12}
    assert torch.equal(other.caches[:, [10, 11, 13, 14, 15]], one.caches[:, [0, 1, 3, 4, 5]])
    until(lambda: store.found(chain("a", 4)) == 2)
    assert store.found(chain("b", 2)) == 2
    assert store.usage().corrupt_blocks == 1


def test_bytes_that_are_spoilt_on_their_way_into_the_engine_condemn_their_block(
    store: Store,
) -> None:
    stream = Spoiler()
    writer, reader = Engine(store, 1), Engine(store, 2, stream)
    writer.save([save_of("a", [0, 1])])
    store.settled()
    stream.target = reader.caches[1, 8].reshape(-1).view(torch.uint8).numpy()
    assert reader.load([store.load(chain("a", 2), [8, 9])]) == {8}
    for engine in (writer, reader):
        engine.close()


def test_a_slot_that_changes_after_its_bytes_were_copied_harms_nobody(store: Store) -> None:
    stream = Spoiler()
    engine = Engine(store, 1, stream)
    engine.save([save_of("a", [0, 1])])
    store.settled()
    load = store.load(chain("a", 2), [8, 9])
    # The last layer's: after two layers it is as before, after the third it is wrong.
    stream.target = Arena.attach(store.folder / "arena").view(load.slots[0], LAYERS * LAYER_BYTES)
    assert engine.load([load]) == set()
    assert torch.equal(engine.caches[:, [8, 9]], engine.caches[:, [0, 1]])
    engine.close()


def test_a_slot_that_went_to_another_block_is_reported_and_harms_nobody(
    tmp_path: Path,
) -> None:
    store = store_in(tmp_path, extents=1)
    engine = Engine(store, 1)
    engine.save([save_of("a", [0, 1])])
    store.settled()
    late = store.load(chain("a", 2), [8, 9])
    store.client.ask(Release([late.lease]), Done)
    engine.save([save_of("b", list(range(15)))])
    store.settled()
    assert store.found(chain("b", 15)) == 15
    assert engine.load([late]) == {8, 9}
    until(lambda: engine.loader._thread._work_queue.empty())
    engine.close()
    assert store.found(chain("b", 15)) == 15
    store.server.stop()


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers whose checksums readers have computed."""
    checked: list[int] = []

    def digest(piece: memoryview, layer: int, block_seed: int) -> int:
        checked.append(layer)
        return layer_digest(piece, layer, block_seed)

    monkeypatch.setattr(loader, "layer_digest", digest)
    return checked


def test_what_another_process_wrote_is_checked_once_and_what_this_one_wrote_never(
    store: Store, engines: tuple[Engine, Engine], checks: list[int]
) -> None:
    one, other = engines
    one.save([save_of("a", [0, 1])])
    store.settled()
    for _ in range(2):
        assert one.load([store.load(chain("a", 2), [8, 9])]) == set()
    assert checks == []
    for _ in range(2):
        assert other.load([store.load(chain("a", 2), [8, 9])]) == set()
        assert torch.equal(other.caches[:, [8, 9]], one.caches[:, [0, 1]])
    assert checks == [layer for layer in range(LAYERS) for _ in range(2)]


def test_a_block_that_comes_again_is_checked_again(
    store: Store, engines: tuple[Engine, Engine], checks: list[int]
) -> None:
    one, other = engines
    for _ in range(2):
        one.save([save_of("a", [0])])
        store.settled()
        assert other.load([store.load(chain("a", 1), [8])]) == set()
        until(lambda: store.usage().leases == 0)
        store.client.ask(Flush(""), Done)
    assert len(checks) == 2 * LAYERS


class Evictor(HostStream):
    """Something that gives the slots of a load to another block, after its first layer's copy."""

    def __init__(self) -> None:
        self.evict: Callable[[], None] | None = None

    def settle(self) -> None:
        evict, self.evict = self.evict, None
        if evict is not None:
            evict()


def test_a_checked_block_whose_slot_is_given_away_while_it_is_read_is_not_used(
    store: Store, engines: tuple[Engine, Engine]
) -> None:
    one, _ = engines
    stream = Evictor()
    reader = Engine(store, 2, stream)
    one.save([save_of("a", [0, 1])])
    store.settled()
    assert reader.load([store.load(chain("a", 2), [8, 9])]) == set()
    load = store.load(chain("a", 2), [8, 9])

    def evict() -> None:
        """As if its lease had ended while the reader was stopped; the same block comes again."""
        store.client.ask(Release([load.lease]), Done)
        store.client.ask(Flush(""), Done)
        one.save([save_of("a", [0])])
        store.settled()

    stream.evict = evict
    assert reader.load([load]) == {8, 9}
    reader.close()


def test_where_a_writer_that_was_given_up_may_still_write_every_load_is_checked(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grants, "WRITE_S", 0.0)
    reserve = Reserve(SPACE, chain("late", 1), "model", LAYERS, LAYER_BYTES)
    (slot,) = decode_slots(store.client.ask(reserve, Reserved).slots)
    store.settled()
    monkeypatch.undo()
    engine = Engine(store, 1)
    engine.save([save_of("a", [0])])
    store.settled()
    load = store.load(chain("a", 1), [8])
    assert load.slots == [slot]
    assert engine.load([load]) == set()
    # Though this engine wrote the block, and has checked it.
    Arena.attach(store.folder / "arena").view(slot, 4096)[0] ^= 1
    assert engine.load([store.load(chain("a", 1), [8])]) == {8}
    engine.close()


def test_after_a_store_has_died_every_load_is_checked(
    store: Store, engines: tuple[Engine, Engine]
) -> None:
    one, _ = engines
    store.server.stop()
    arena = ArenaOwner.reopen(store.folder / "arena")
    server = StoreServer(
        BlockStore(arena, Index(lru), None, store.folder / "spaces.json", {}), store.address
    )
    server.start()
    one.save([save_of("a", [0])])
    store.settled()
    load = store.load(chain("a", 1), [8])
    arena.view(load.slots[0], 4096)[0] ^= 1
    assert one.load([load]) == {8}
    # It reports to the store behind the load, and would wait for an answer until its patience ends.
    one.close()
    server.stop()


def test_loads_that_cannot_be_carried_out_fail_all_their_blocks(
    store: Store, engines: tuple[Engine, Engine]
) -> None:
    one, _ = engines
    assert one.load([Load(SPACE, chain("a", 2), 0, [1], [3, 4], 0)]) == {3, 4}
    assert one.load([]) == set()


def test_an_unsound_step_leaves_nothing(store: Store, engines: tuple[Engine, Engine]) -> None:
    one, _ = engines
    one.save([save_of("a", [0, 1, 2])], sound=False)
    store.settled()
    assert store.found(chain("a", 3)) == 0
    assert store.usage().used_bytes == 0


def test_a_layer_that_was_not_computed_leaves_nothing(
    store: Store, engines: tuple[Engine, Engine]
) -> None:
    one, _ = engines
    one.saver.start([save_of("a", [0, 1])])
    for layer in (0, LAYERS - 1):
        one.saver.layer_done(layer)
    one.saver.finish(sound=True)
    store.settled()
    assert store.usage().used_bytes == 0


def test_a_forward_pass_that_raises_leaves_nothing_and_the_next_one_works(
    store: Store, engines: tuple[Engine, Engine]
) -> None:
    one, _ = engines
    one.saver.start([save_of("a", [0, 1])])
    one.saver.layer_done(0)
    one.save([save_of("b", [2, 3])])
    store.settled()
    assert (store.found(chain("a", 2)), store.found(chain("b", 2))) == (0, 2)


def test_an_engine_closes_in_the_middle_of_a_step(store: Store) -> None:
    engine = Engine(store, 1)
    engine.saver.start([save_of("a", [0, 1])])
    engine.saver.layer_done(0)
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert store.usage().writers == 0
    assert store.usage().used_bytes == 0


def test_a_step_that_outlasts_its_reservation_leaves_nothing(
    store: Store, engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = engines
    monkeypatch.setattr(saver, "WRITE_S", 0.05)
    one.saver.start([save_of("a", [0, 1])])
    store.settled()
    one.saver.layer_done(0)
    time.sleep(0.1)
    for layer in range(LAYERS):
        one.saver.layer_done(layer)
    one.saver.finish(sound=True)
    store.settled()
    assert store.found(chain("a", 2)) == 0


def test_what_another_writes_before_the_seal_is_found_out_by_the_reader(
    store: Store, engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = engines
    arena, digest = Arena.attach(store.folder / "arena"), saver.layer_digest

    def overwritten(piece: memoryview, layer: int, block_seed: int) -> int:
        # Slots are pages here, and the first page has their headers.
        for slot in range(1, EXTENT // 4096):
            arena.view(slot, 4096)[(LAYERS - 1) * LAYER_BYTES :][:LAYER_BYTES] = 1
        return digest(piece, layer, block_seed)

    monkeypatch.setattr(saver, "layer_digest", overwritten)
    one.save([save_of("a", [0, 1])])
    store.settled()
    assert other.load([store.load(chain("a", 2), [5, 6])]) == {5, 6}
    until(lambda: store.found(chain("a", 2)) == 0)


def test_short_steps_one_after_the_other_are_not_mixed_up(
    store: Store, engines: tuple[Engine, Engine]
) -> None:
    one, _ = engines
    for step in range(60):
        one.save([save_of(f"{step}", [step % BLOCKS])], sound=step % 2 == 0)
    store.settled()
    found = [store.found(chain(f"{step}", 1)) for step in range(60)]
    assert found == [1, 0] * 30


def test_loads_one_after_the_other_wait_for_their_own_bytes(
    store: Store, engines: tuple[Engine, Engine]
) -> None:
    one, other = engines
    for name in range(10):
        one.save([save_of(f"{name}", [name])])
    store.settled()
    for turn in range(200):
        load = store.load(chain(f"{turn % 10}", 1), [3])
        if turn % 3 == 0:
            load = Load(SPACE, chain("wrong", 1), 0, load.slots, [3], load.lease)
        other.caches[:, 3] = 0
        other.loader.start([load])
        for layer in range(LAYERS):
            other.loader.wait_layer(layer)
            assert torch.equal(other.caches[layer, 3], one.caches[layer, turn % 10])
        assert other.loader.finish() == ({3} if turn % 3 == 0 else set())


def test_without_a_store_engines_neither_hang_nor_raise(
    store: Store, engines: tuple[Engine, Engine]
) -> None:
    computed = engines[0]
    computed.save([save_of("a", [0, 1])])
    saved(computed.saver, store)
    one, other = (Engine(store, engine, timeout_ms=100) for engine in (3, 4))
    load = store.load(chain("a", 2), [8, 9])
    store.server.stop()
    begin = time.monotonic()
    for _ in range(5):
        one.save([save_of("b", [2, 3])])
        # Leased before the store went, and still whole.
        assert other.load([load]) == set()
    assert torch.equal(other.caches[:, [8, 9]], computed.caches[:, [0, 1]])
    assert time.monotonic() - begin < PATIENCE_S
    one.close()
    other.close()


def test_a_full_store_keeps_what_it_can(tmp_path: Path) -> None:
    store = store_in(tmp_path, extents=1)
    engine = Engine(store, 1)
    slots = 15
    engine.save([save_of("a", list(range(16)))])
    store.settled()
    assert store.found(chain("a", 16)) == slots
    engine.close()
    store.server.stop()


def test_all_layers_load_though_the_forward_pass_waits_for_none(
    store: Store, engines: tuple[Engine, Engine]
) -> None:
    one, other = engines
    one.save([save_of("a", list(range(BLOCKS)))])
    store.settled()
    other.loader.start([store.load(chain("a", BLOCKS), list(range(BLOCKS)))])
    until(lambda: other.loader.copied.size == BLOCKS * LAYERS * LAYER_BYTES)
    assert other.loader.copied.busy_s > 0
    assert other.loader.finish() == set()


class Onlooker(HostStream):
    """Reads the figures of a transfer thread after each copy, as the engine's thread may."""

    def __init__(self) -> None:
        self.thread: Loader | Saver | None = None
        self.seen: list[Copied] = []

    def settle(self) -> None:
        if self.thread is not None:
            self.seen.append(self.thread.copied)


@pytest.mark.parametrize(
    ("worth_a_wake", "copied_after"), [(1, (1, 2, 3)), (2, (0, 2, 3)), (9, (0, 0, 3))]
)
def test_layers_of_few_bytes_are_saved_together(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    worth_a_wake: int,
    copied_after: tuple[int, ...],
) -> None:
    monkeypatch.setattr(saver, "WORTH_A_WAKE", worth_a_wake * LAYER_BYTES)
    copied: list[int] = []

    copy = saver._copy_rows

    def watched(rows: Sequence[KvRows], layers: range, runs: Sequence[BlockRun]) -> None:
        copy(rows, layers, runs)
        copied.extend(layers)

    monkeypatch.setattr(saver, "_copy_rows", watched)
    engine = Engine(store, 1)
    engine.saver.start([save_of("a", [0])])
    for layer, expected in enumerate(copied_after):
        engine.saver.layer_done(layer)
        until = time.monotonic() + PATIENCE_S
        while len(copied) < expected and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.02)
        assert copied == list(range(expected))
    engine.saver.finish(sound=True)
    engine.close()


def test_layers_that_are_computed_already_are_saved_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "WORTH_A_WAKE", 1)
    groups: list[range] = []
    copy = saver._copy_rows

    def watched(rows: Sequence[KvRows], layers: range, runs: Sequence[BlockRun]) -> None:
        if not groups:
            # Those behind are computed while the first one is copied.
            for layer in range(1, LAYERS):
                engine.saver.layer_done(layer)
        groups.append(layers)
        copy(rows, layers, runs)

    monkeypatch.setattr(saver, "_copy_rows", watched)
    engine = Engine(store, 1)
    engine.saver.start([save_of("a", [0])])
    engine.saver.layer_done(0)
    until = time.monotonic() + PATIENCE_S
    while len(groups) < 2 and time.monotonic() < until:
        time.sleep(0.001)
    engine.saver.finish(sound=True)
    engine.close()
    assert groups == [range(1), range(1, LAYERS)]


@pytest.mark.parametrize("thread", ["loader", "saver"])
def test_bytes_are_never_told_without_the_seconds_that_they_took(
    store: Store, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "WORTH_A_WAKE", 1)
    monkeypatch.setattr(saver, "_MOST_TOGETHER", 1)
    onlooker = Onlooker()
    engine = Engine(store, 1, onlooker)
    onlooker.thread = getattr(engine, thread)
    # Apart in the engine's memory, so that a layer takes several copies.
    blocks = [0, 2, 4, 6]
    engine.save([save_of("a", blocks)])
    store.settled()
    assert engine.load([store.load(chain("a", 4), blocks)]) == set()
    per_layer = len(blocks) * LAYER_BYTES
    assert {copied.size % per_layer for copied in onlooker.seen} == {0}
    assert {copied.size for copied in onlooker.seen} > {0, per_layer}
    assert all(copied.busy_s > 0 for copied in onlooker.seen if copied.size)
    engine.close()


# The engine's memory.


def test_what_saving_costs_is_counted_with_its_blocks(
    store: Store, engines: tuple[Engine, Engine]
) -> None:
    one, _ = engines
    one.save([save_of("a", [0, 1]), save_of("b", [2, 3, 4])])
    until(lambda: one.saver.saved.blocks == 5)
    first = one.saver.saved
    assert 0 < first.core_s < 1
    # To ask a store that has them all costs something, too.
    one.save([save_of("a", [0, 1])])
    until(lambda: one.saver.saved != first)
    assert one.saver.saved.blocks == 5
    assert one.saver.saved.core_s > first.core_s


def test_blocks_whose_dimensions_are_permuted_move_whole() -> None:
    base = torch.arange(2 * 4 * 3 * 8, dtype=torch.int16).reshape(2, 4, 3, 8)
    memory = KvMemory({"layer": base.permute(0, 2, 1, 3)})
    pieces = np.zeros((1, 4 * 3 * 8 * 2), np.uint8)
    memory.to_host(0, [BlockPieces(1, pieces)])
    assert pieces.tobytes() == base[1].numpy().tobytes()
    memory.from_host(0, [BlockPieces(0, pieces)])
    assert torch.equal(base[0], base[1])
    assert memory.equals_host(0, [BlockPieces(0, pieces)])
    base[0, 3, 2, 7] += 1
    assert not memory.equals_host(0, [BlockPieces(0, pieces)])


def test_layers_that_share_their_kv_are_one() -> None:
    caches = random_caches(1)
    memory = KvMemory({"a": caches[0], "b": caches[1], "c": caches[0]})
    assert memory.layer_of == {"a": 0, "b": 1, "c": 0}
    assert (memory.layers, memory.layer_bytes) == (2, LAYER_BYTES)


def test_memory_that_cannot_be_moved_by_blocks_is_refused() -> None:
    apart = torch.zeros(8, 4, 6, 5)[:, :, :3, :2]
    with pytest.raises(ValueError, match="lies in too many pieces"):
        KvMemory({"layer": apart})
    with pytest.raises(ValueError, match="different sizes"):
        KvMemory({"a": torch.zeros(4, 8), "b": torch.zeros(4, 16)})


def test_a_model_whose_blocks_the_store_refuses_is_told_of_once(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    # A namespace has blocks of one shape.
    store.client.ask(Reserve(SPACE, chain("x", 1), "model", LAYERS, 2 * LAYER_BYTES), Reserved)
    engine = Engine(store, 1)
    with caplog.at_level(logging.WARNING):
        engine.save([save_of("a", [0, 1])])
        engine.save([save_of("b", [0, 1])])
        engine.close()
    (record,) = caplog.records
    assert "nothing of this model is saved" in record.getMessage()
    assert "another shape" in record.getMessage()
