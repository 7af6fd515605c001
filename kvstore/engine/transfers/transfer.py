"""Copies of KV blocks between engine and store: layer i computes while i+1 loads and i-1 is saved.

BanaServe, section 4.3.3. With N layers, a forward pass of T_F seconds of which a share r is left
to compute, and S bytes of KV a token and layer, a layer's transfer hides behind a layer's
computation if S * L * r / B <= T_F * r / N at L tokens and B bytes a second.

The forward pass runs in the worker's main thread; one thread loads for it and another saves. The
main thread waits only for the event of one layer, or at the end of a step for the last copy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from loomserve.kvstore.engine.transfers.memory import BlockMemory, BlockPieces, HostStream
from loomserve.kvstore.engine.transfers.transfer_time import TransferTime
from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.server.client import StoreAwayError, StoreClient, StoreRefusedError
from loomserve.kvstore.server.protocol import (
    WRITE_S,
    Abandon,
    Commit,
    Corrupt,
    Done,
    Release,
    Reserve,
    Reserved,
    decode_slots,
)
from loomserve.kvstore.storage.arena import Arena
from loomserve.kvstore.storage.checksum import PAGE, BlockLayout, layer_digest, seed

_logger = logging.getLogger(__name__)

WORTH_A_WAKE = 2**20
"""Bytes: to copy fewer takes less time than to wake a thread for them."""


@dataclass(frozen=True)
class Load:
    """Copy of blocks ``[first, first + len(slots))`` of a chain from their slots to ``blocks``.

    ``ahead``: the last block is loaded before the forward pass begins, which will write into it.
    vLLM writes a layer's new KV before it waits for the layer's load.
    """

    namespace: bytes
    keys: bytes
    first: int
    slots: Sequence[int]
    blocks: Sequence[int]
    lease: int
    ahead: bool = False


@dataclass(frozen=True)
class Save:
    """Copy of a chain, which the engine holds in ``blocks``, as far as the store lacks it.

    ``recompute_s`` predicts the seconds to compute one of the blocks again. A reader is on its way,
    so the blocks stay in memory for ``keep_s``. ``outdated`` is the key of a block, not full, that
    the first of those which the store lacks takes the place of.
    """

    namespace: bytes
    keys: bytes
    blocks: Sequence[int]
    recompute_s: float
    keep_s: float = 0.0
    outdated: bytes = b""


@dataclass(frozen=True)
class BlockRun:
    """Blocks that are contiguous in the engine's memory, from ``first`` on, and in the arena.

    ``pieces``, ``[blocks, layers, layer_bytes]``, and ``checksums``, ``[blocks, layers]``, are
    views of their slots.
    """

    first: int
    pieces: NDArray[np.uint8]
    checksums: NDArray[np.uint64]
    seeds: Sequence[int]

    def of(self, layer: int) -> BlockPieces:
        return BlockPieces(self.first, self.pieces[:, layer])


class TransferThread:
    """Thread that copies blocks between an engine and the arena, in the order of the steps."""

    def __init__(
        self, memory: BlockMemory, arena: Arena, stream: HostStream, store: StoreClient
    ) -> None:
        self.memory = memory
        """Replaceable, while nothing is copied, by memory with blocks of the same size."""
        self._arena = arena
        self._layout = BlockLayout(memory.layers, memory.layer_bytes)
        self._stream = stream
        self._store = store
        # One thread, so that the store is asked in the order of the steps.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=type(self).__name__)
        self.time = TransferTime()

    def _events(self) -> list[threading.Event]:
        return [threading.Event() for _ in range(self.memory.layers)]

    def _wait(self, event: threading.Event) -> None:
        if not event.is_set():
            begin = time.perf_counter()
            event.wait()
            self.time.waited_s += time.perf_counter() - begin

    @property
    def _most_blocks(self) -> int:
        """Of a copy."""
        return max(1, self.memory.copy_bytes // self.memory.layer_bytes)

    def _runs(
        self, namespace: bytes, keys: bytes, slots: Sequence[int], blocks: Sequence[int]
    ) -> Iterator[BlockRun]:
        """Copies between ``slots`` and ``blocks``, as few as contiguity allows."""
        pages, most = self._layout.slot_bytes // PAGE, self._most_blocks

        def run_of(at: tuple[int, tuple[int, int]]) -> tuple[int, int, int]:
            number, (slot, block) = at
            return slot - number * pages, block - number, number // most

        for _, group in groupby(enumerate(zip(slots, blocks, strict=True)), run_of):
            numbers, places = zip(*group, strict=True)
            slot, block = places[0]
            view = self._arena.view(slot, len(places) * self._layout.slot_bytes)
            view = view.reshape(len(places), self._layout.slot_bytes)
            seeds = [seed(namespace, keys[n * KEY_BYTES :][:KEY_BYTES]) for n in numbers]
            yield BlockRun(block, self._layout.pieces(view), self._layout.checksums(view), seeds)

    def _copies(self, runs: Iterable[BlockRun]) -> list[list[BlockRun]]:
        """The runs, together as far as a copy goes."""
        most = self._most_blocks
        copies: list[list[BlockRun]] = []
        blocks = most
        for run in runs:
            blocks += len(run.seeds)
            if blocks > most:
                copies.append([])
                blocks = len(run.seeds)
            copies[-1].append(run)
        return copies

    def _tell(self, message: Release | Abandon | Commit | Corrupt) -> None:
        try:
            self._store.ask(message, Done)
        except StoreAwayError as error:
            # Leases and reservations expire in the store.
            _logger.debug("%s", error)

    def close(self) -> None:
        self._thread.shutdown()
        self._store.close()


@dataclass(frozen=True)
class LoadStep:
    """State of a step's loads. Each step has its own, since the next may begin before it ends.

    ``mark`` is the forward pass's position at the start: until it, other requests may use the
    blocks.
    """

    loaded: list[threading.Event]
    mark: object
    ahead: threading.Event = field(default_factory=threading.Event)
    failed: set[int] = field(default_factory=set)


class Loader(TransferThread):
    """Thread that fills an engine's blocks, layer by layer, ahead of the forward pass."""

    _step: LoadStep | None = None

    def start(self, loads: Sequence[Load]) -> None:
        """Begin a step's loads; the caller waits for each layer, and calls :meth:`finish`."""
        self._step = LoadStep(self._events(), self._stream.mark())
        self._thread.submit(self._run, loads, self._step)
        if any(load.ahead for load in loads):
            self._wait(self._step.ahead)

    def fetch(self, load: Load) -> Future[set[int]]:
        """Fill blocks that no step uses yet; the result is the blocks that hold wrong bytes."""
        return self._thread.submit(self._run, [load], LoadStep(self._events(), self._stream.mark()))

    def wait_layer(self, layer: int) -> None:
        if self._step is not None:
            self._wait(self._step.loaded[layer])

    def wait(self) -> None:
        """Wait for all layers, before a forward pass beside which nothing may be copied."""
        self.wait_layer(-1)

    def finish(self) -> set[int]:
        """Wait for the step's loads; returns the engine's blocks that hold wrong bytes."""
        step, self._step = self._step, None
        if step is None:
            return set()
        self._wait(step.loaded[-1])
        return step.failed

    def _run(self, loads: Sequence[Load], step: LoadStep) -> set[int]:
        try:
            ahead: list[BlockRun] = []
            copies = self._copies([run for load in loads for run in self._split(load, ahead)])
            copies_ahead = self._copies(ahead)
            with self._stream:
                self._stream.wait(step.mark)
                for layer in range(self.memory.layers):
                    step.failed.update(self._load_layer(layer, copies_ahead))
                step.ahead.set()
                for layer, event in enumerate(step.loaded):
                    step.failed.update(self._load_layer(layer, copies))
                    event.set()
        except Exception:
            _logger.exception("loading KV blocks failed; they are computed instead")
            step.failed.update(block for load in loads for block in load.blocks)
        finally:
            for event in (step.ahead, *step.loaded):
                event.set()
        self._report(loads, step.failed)
        return step.failed

    def _split(self, load: Load, ahead: list[BlockRun]) -> Iterator[BlockRun]:
        keys = load.keys[load.first * KEY_BYTES :]
        rest = len(load.slots) - load.ahead
        yield from self._runs(load.namespace, keys, load.slots[:rest], load.blocks[:rest])
        keys = keys[rest * KEY_BYTES :]
        ahead += self._runs(load.namespace, keys, load.slots[rest:], load.blocks[rest:])

    def _load_layer(self, layer: int, copies: Sequence[Sequence[BlockRun]]) -> list[int]:
        """Load a layer; returns the engine's blocks that hold wrong bytes of it."""
        begin = time.perf_counter()
        failed: list[int] = []
        for runs in copies:
            self.memory.from_host(layer, [run.of(layer) for run in runs])
            self._stream.settle()
            for run in runs:
                failed += self._wrong(layer, run)
        self.time.add(_layer_bytes(layer, copies), time.perf_counter() - begin)
        return failed

    def _wrong(self, layer: int, run: BlockRun) -> Iterator[int]:
        """The engine's blocks whose bytes of the layer do not match their checksum.

        The check follows the copy, so it notices a slot that was given to others before or
        meanwhile. It is of the engine's own bytes, if the CPU can read them.
        """
        own = self.memory.on_host(layer, run.first, len(run.seeds))
        pieces = run.pieces[:, layer] if own is None else own
        sealed = run.checksums[:, layer].tolist()
        for block, (piece, checksum, block_seed) in enumerate(
            zip(pieces, sealed, run.seeds, strict=True), run.first
        ):
            if layer_digest(piece, layer, block_seed) != checksum:
                yield block

    def _report(self, loads: Sequence[Load], failed: set[int]) -> None:
        for load in loads:
            bad = [i for i, block in enumerate(load.blocks) if block in failed]
            if bad:
                end = (load.first + bad[0] + 1) * KEY_BYTES
                self._tell(Corrupt(load.namespace, load.keys[:end]))
        self._tell(Release([load.lease for load in loads]))


@dataclass
class SaveStep:
    """State of a step's saves. Each step has its own, since the next may begin before it ends.

    Attributes:
        computed: Set when a layer is computed; one event a layer.
        marks: The forward pass's position at that moment; one a layer.
        give_up_at: Time (``time.monotonic()``) at which the store gives the slots to others.
        copied: Set when the engine may overwrite its blocks.
        judged: Set when ``sound`` is known.
        sound: Whether the step computed right KV.
    """

    computed: list[threading.Event]
    marks: list[object]
    give_up_at: float
    copied: threading.Event = field(default_factory=threading.Event)
    judged: threading.Event = field(default_factory=threading.Event)
    sound: bool = True

    def in_time(self, event: threading.Event) -> bool:
        return event.wait(self.give_up_at - time.monotonic())


class Saver(TransferThread):
    """Thread that saves the blocks that a step fills, layer by layer, behind the forward pass.

    ``model`` is the model's name in the store's figures and quotas.
    """

    _step: SaveStep | None = None

    def __init__(
        self,
        memory: BlockMemory,
        arena: Arena,
        stream: HostStream,
        store: StoreClient,
        model: str,
    ) -> None:
        super().__init__(memory, arena, stream, store)
        self._model = model
        self._refused: set[str] = set()

    @property
    def running(self) -> bool:
        """Whether a step's saves have begun and are not finished."""
        return self._step is not None

    def start(self, saves: Sequence[Save]) -> None:
        """Begin a step's saves; the caller reports each layer, and calls :meth:`finish`.

        A step before that was not finished, since its forward pass raised, counts as unsound.
        """
        self.finish(sound=False)
        self._step = SaveStep(
            self._events(), [None] * self.memory.layers, time.monotonic() + WRITE_S
        )
        self._thread.submit(self._run, saves, self._step)

    def layer_done(self, layer: int) -> None:
        """Report that the forward pass has computed the layer's KV."""
        if self._step is not None:
            self._step.marks[layer] = self._stream.mark()
            self._step.computed[layer].set()

    def save_computed(self, saves: Sequence[Save]) -> None:
        """Save blocks that an earlier step filled, and wait until they may be overwritten."""
        self.start(saves)
        for layer in range(self.memory.layers):
            self.layer_done(layer)
        self.finish(sound=True)

    def finish(self, *, sound: bool) -> None:
        """Wait until the engine may overwrite its blocks.

        The store keeps the copies only if the step is ``sound``: a step that used blocks which did
        not load has computed wrong KV, and so has one that did not reach all layers.
        """
        step, self._step = self._step, None
        if step is None:
            return
        step.sound = sound and all(event.is_set() for event in step.computed)
        for event in step.computed:
            event.set()
        self._wait(step.copied)
        step.judged.set()

    def close(self) -> None:
        self.finish(sound=False)
        super().close()

    def _run(self, saves: Sequence[Save], step: SaveStep) -> None:
        begin = time.thread_time()
        writers: list[tuple[int, Save]] = []
        copies: list[list[BlockRun]] = []
        whole = False
        try:
            copies = self._copies(list(self._reserve(saves, writers)))
            with self._stream:
                whole = all(
                    self._save_layer(layer, last, copies, step)
                    for layer, last in self._layers(copies)
                )
        except Exception:
            _logger.exception("saving KV blocks failed")
        finally:
            step.copied.set()
        kept = step.in_time(step.judged) and step.sound and whole
        for writer, save in writers:
            commit = Commit(writer, save.recompute_s, save.keep_s, save.outdated)
            self._tell(commit if kept else Abandon(writer))
        blocks = sum(len(run.seeds) for runs in copies for run in runs)
        self.time.add_saved(blocks, time.thread_time() - begin)

    def _reserve(
        self, saves: Sequence[Save], writers: list[tuple[int, Save]]
    ) -> Iterator[BlockRun]:
        for save in saves:
            try:
                room = self._store.ask(
                    Reserve(
                        save.namespace,
                        save.keys,
                        self._model,
                        self.memory.layers,
                        self.memory.layer_bytes,
                    ),
                    Reserved,
                )
            except StoreRefusedError as error:
                self._warn_once(str(error))
                continue
            except StoreAwayError as error:
                _logger.debug("%s", error)
                continue
            if room.writer:
                writers.append((room.writer, save))
            slots = decode_slots(room.slots)
            blocks = save.blocks[room.first : room.first + len(slots)]
            yield from self._runs(
                save.namespace, save.keys[room.first * KEY_BYTES :], slots, blocks
            )

    def _warn_once(self, refusal: str) -> None:
        # The refusal stands until the configuration changes, and would repeat in every step.
        if refusal not in self._refused:
            self._refused.add(refusal)
            _logger.warning("nothing of this model is saved: %s", refusal)

    def _layers(self, copies: Sequence[Sequence[BlockRun]]) -> Iterator[tuple[int, int]]:
        """Each layer with the one until which it waits: of few bytes several are saved at once."""
        layers = self.memory.layers
        together = max(1, WORTH_A_WAKE // max(1, _layer_bytes(0, copies)))
        for layer in range(layers):
            yield layer, min(layer // together * together + together, layers) - 1

    def _save_layer(
        self, layer: int, last: int, copies: Sequence[Sequence[BlockRun]], step: SaveStep
    ) -> bool:
        """Save a layer once ``last`` is computed; returns whether its bytes are whole there."""
        if not copies:
            return True
        if not (step.in_time(step.computed[last]) and step.sound):
            return False
        begin = time.perf_counter()
        self._stream.wait(step.marks[layer])
        whole = True
        for runs in copies:
            self.memory.to_host(layer, [run.of(layer) for run in runs])
            self._stream.settle()
            whole = self._seal(layer, runs) and whole
        self.time.add(_layer_bytes(layer, copies), time.perf_counter() - begin)
        return whole

    def _seal(self, layer: int, runs: Sequence[BlockRun]) -> bool:
        """Store the layer's checksums; returns whether the slots hold the engine's bytes.

        A writer that the store gave up may still write here, even after the copy. So the checksum
        is of the engine's bytes; if the CPU cannot read those, the slots are compared with them.
        """
        unread: list[BlockPieces] = []
        for run in runs:
            own = self.memory.on_host(layer, run.first, len(run.seeds))
            if own is None:
                unread.append(run.of(layer))
            pieces = run.pieces[:, layer] if own is None else own
            run.checksums[:, layer] = [
                layer_digest(piece, layer, block_seed)
                for piece, block_seed in zip(pieces, run.seeds, strict=True)
            ]
        return not unread or self.memory.equals_host(layer, unread)


def _layer_bytes(layer: int, copies: Sequence[Sequence[BlockRun]]) -> int:
    return sum(run.pieces[:, layer].nbytes for runs in copies for run in runs)
