"""The three-stage pipeline: layer i computes while layer i+1 loads and layer i-1 is saved.

BanaServe, section 4.3.3. With N layers, a forward pass of T_F seconds of which a share r is left
to compute, and S bytes of KV a token and layer, a layer's transfer hides behind a layer's
computation when S * L * r / B <= T_F * r / N at L tokens and B bytes a second.

The forward pass runs in the worker's main thread; a thread each copies for it. The main thread
only ever waits for one layer's event, or at the end of a step for the last layer's copy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from loomserve.kvstore.arena import Arena
from loomserve.kvstore.checksum import BlockLayout, seed
from loomserve.kvstore.client import StoreAwayError, StoreClient
from loomserve.kvstore.memory import HostStream, KvMemory
from loomserve.kvstore.protocol import (
    Abandon,
    Commit,
    Corrupt,
    Done,
    Release,
    Reserve,
    Reserved,
)
from loomserve.kvstore.radix import KEY_BYTES
from loomserve.kvstore.slots import decode_slots

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Load:
    """Blocks ``[first, first + len(slots))`` of a chain go from their slots to ``blocks``."""

    namespace: bytes
    keys: bytes
    first: int
    slots: Sequence[int]
    blocks: Sequence[int]
    lease: int


@dataclass(frozen=True)
class Save:
    """The engine holds the whole chain in ``blocks``; what the store lacks is to be saved.

    ``recompute_s`` predicts the time to compute one of the blocks again.
    """

    namespace: bytes
    keys: bytes
    blocks: Sequence[int]
    recompute_s: float


@dataclass(frozen=True)
class Copy:
    """One block between the engine's memory and a slot."""

    block: int
    slot: int
    seed: int


@dataclass
class TransferTime:
    """Seconds and bytes since the last reading; ``waited_s`` is what the forward pass lost."""

    copied_bytes: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0

    @property
    def hidden_share(self) -> float:
        """Share of the transfer that ran beside computation."""
        return 1.0 - min(1.0, self.waited_s / self.busy_s) if self.busy_s else 1.0


class Lane:
    """What loading and saving share: a thread, an event a layer, and the time they took."""

    def __init__(
        self, memory: KvMemory, arena: Arena, stream: HostStream, store: StoreClient
    ) -> None:
        self._memory = memory
        self._arena = arena
        self._layout = BlockLayout(memory.layers, memory.layer_bytes)
        self._stream = stream
        self._store = store
        # One thread, so that the store is asked in the order of the steps.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=type(self).__name__)
        self._events = [threading.Event() for _ in range(memory.layers)]
        self._running: Future[None] | None = None
        self.time = TransferTime()

    def _begin(self) -> None:
        for event in self._events:
            event.clear()

    def _wait(self, event: threading.Event) -> None:
        if not event.is_set():
            begin = time.perf_counter()
            event.wait()
            self.time.waited_s += time.perf_counter() - begin

    def _tell(self, message: Release | Abandon | Commit | Corrupt) -> None:
        try:
            self._store.ask(message, Done)
        except StoreAwayError as error:
            # Its leases and reservations expire by themselves.
            _logger.debug("%s", error)

    def close(self) -> None:
        self._thread.shutdown()
        self._store.close()


class Loader(Lane):
    """Fills an engine's blocks, layer by layer, ahead of the forward pass."""

    def start(self, loads: Sequence[Load]) -> None:
        """Begin; every layer must then be waited for, and :meth:`finish` called."""
        self._begin()
        self._failed: set[int] = set()
        self._running = self._thread.submit(self._run, loads)

    def wait_layer(self, layer: int) -> None:
        if self._running is not None:
            self._wait(self._events[layer])

    def finish(self) -> set[int]:
        """Wait for the end; return the engine's blocks that hold wrong bytes."""
        if self._running is None:
            return set()
        self._wait(self._events[-1])
        self._running = None
        return self._failed

    def _run(self, loads: Sequence[Load]) -> None:
        try:
            copies = [copy for load in loads for copy in copies_of(load)]
            with self._stream:
                for layer, event in enumerate(self._events):
                    begin = time.perf_counter()
                    self._load_layer(layer, copies)
                    self.time.busy_s += time.perf_counter() - begin
                    event.set()
        except Exception:
            _logger.exception("loading KV blocks failed; they are computed instead")
            self._failed |= {block for load in loads for block in load.blocks}
        finally:
            for event in self._events:
                event.set()
        self._report(loads)

    def _load_layer(self, layer: int, copies: Sequence[Copy]) -> None:
        for copy in copies:
            view = self._arena.view(copy.slot, self._layout.slot_bytes)
            self._memory.from_host(layer, copy.block, self._layout.piece(view, layer))
        self._stream.settle()
        # Checked after the copy: a slot that changed hands before or meanwhile is found out.
        for copy in copies:
            view = self._arena.view(copy.slot, self._layout.slot_bytes)
            if not self._layout.check_layer(view, layer, copy.seed):
                self._failed.add(copy.block)
        self.time.copied_bytes += len(copies) * self._memory.layer_bytes

    def _report(self, loads: Sequence[Load]) -> None:
        for load in loads:
            bad = [i for i, block in enumerate(load.blocks) if block in self._failed]
            if bad:
                end = (load.first + bad[0] + 1) * KEY_BYTES
                self._tell(Corrupt(load.namespace, load.keys[:end]))
        self._tell(Release([load.lease for load in loads]))


class Saver(Lane):
    """Copies the blocks that a step fills, layer by layer, behind the forward pass.

    ``model`` is the name that the store's figures and quotas know.
    """

    def __init__(
        self,
        memory: KvMemory,
        arena: Arena,
        stream: HostStream,
        store: StoreClient,
        model: str,
    ) -> None:
        super().__init__(memory, arena, stream, store)
        self._model = model

    def start(self, saves: Sequence[Save]) -> None:
        """Begin; every layer must then be reported, and :meth:`finish` called."""
        self._begin()
        self._marks: list[object] = [None] * self._memory.layers
        self._sound = threading.Event()
        self._copied = threading.Event()
        self._void = False
        self._running = self._thread.submit(self._run, saves)

    def layer_done(self, layer: int) -> None:
        """The forward pass has computed the layer's KV."""
        if self._running is not None:
            self._marks[layer] = self._stream.mark()
            self._events[layer].set()

    def finish(self, *, sound: bool) -> None:
        """Wait until the engine may overwrite its blocks.

        What was copied is kept only if it is ``sound``: a step that computed from blocks that did
        not load has computed wrong KV, and so has one that did not reach its last layer.
        """
        if self._running is None:
            return
        self._void |= not sound or not self._events[-1].is_set()
        for event in self._events:
            event.set()
        self._wait(self._copied)
        self._sound.set()
        self._running = None

    def _run(self, saves: Sequence[Save]) -> None:
        writers: list[tuple[int, float]] = []
        try:
            copies = list(self._reserve(saves, writers))
            with self._stream:
                for layer, event in enumerate(self._events):
                    event.wait()
                    begin = time.perf_counter()
                    self._save_layer(layer, copies)
                    self.time.busy_s += time.perf_counter() - begin
        except Exception:
            _logger.exception("saving KV blocks failed")
            self._void = True
        finally:
            self._copied.set()
        self._sound.wait()
        for writer, recompute_s in writers:
            self._tell(Abandon(writer) if self._void else Commit(writer, recompute_s))

    def _reserve(self, saves: Sequence[Save], writers: list[tuple[int, float]]) -> Iterator[Copy]:
        for save in saves:
            try:
                room = self._store.ask(
                    Reserve(
                        save.namespace,
                        save.keys,
                        self._model,
                        self._memory.layers,
                        self._memory.layer_bytes,
                    ),
                    Reserved,
                )
            except StoreAwayError as error:
                _logger.debug("%s", error)
                continue
            if room.writer:
                writers.append((room.writer, save.recompute_s))
            for position, slot in enumerate(decode_slots(room.slots), room.first):
                key = save.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]
                yield Copy(save.blocks[position], slot, seed(save.namespace, key))

    def _save_layer(self, layer: int, copies: Sequence[Copy]) -> None:
        if not copies or self._void:
            return
        self._stream.wait(self._marks[layer])
        views = [self._arena.view(copy.slot, self._layout.slot_bytes) for copy in copies]
        for copy, view in zip(copies, views, strict=True):
            self._memory.to_host(layer, copy.block, self._layout.piece(view, layer))
        self._stream.settle()
        for copy, view in zip(copies, views, strict=True):
            self._layout.seal_layer(view, layer, copy.seed)
        self.time.copied_bytes += len(copies) * self._memory.layer_bytes


def copies_of(load: Load) -> Iterator[Copy]:
    for offset, (slot, block) in enumerate(zip(load.slots, load.blocks, strict=True)):
        start = (load.first + offset) * KEY_BYTES
        yield Copy(block, slot, seed(load.namespace, load.keys[start : start + KEY_BYTES]))
