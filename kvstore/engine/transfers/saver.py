"""Saves of an engine's KV blocks in the store, layer by layer."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from ctypes import PyDLL, c_size_t, c_void_p, memmove
from dataclasses import dataclass, field

from loomserve.kvstore.engine.transfers.memory import BlockMemory, HostStream, KvRows, LayerPieces
from loomserve.kvstore.engine.transfers.staging import Staged, Staging
from loomserve.kvstore.engine.transfers.transfer import (
    NOT_HELD,
    BlockRun,
    Save,
    Saved,
    TransferThread,
    layer_bytes,
)
from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.index.recovery import header_at
from loomserve.kvstore.server.client import StoreAwayError, StoreClient
from loomserve.kvstore.server.protocol import (
    WRITE_S,
    Abandon,
    Commit,
    Reserve,
    Reserved,
    decode_slots,
)
from loomserve.kvstore.storage.arena import Arena
from loomserve.kvstore.storage.checksum import layer_digest, seal
from loomserve.kvstore.wire import Refused

_logger = logging.getLogger(__name__)

WORTH_A_WAKE = 2**20
"""Bytes: to copy fewer takes less time than to wake a thread for them."""
_MOST_TOGETHER = 2**26
"""Bytes, behind which it is looked whether there is still time."""

_LONG = 2**16
"""Bytes. To copy fewer takes less time than to wait for the interpreter again, which the engine's
thread takes whenever this one lets go of it."""
_short_memmove = PyDLL(None).memmove
_short_memmove.argtypes, _short_memmove.restype = (c_void_p, c_void_p, c_size_t), None

# Chains whose requests have ended stay among the lost ones.
_MOST_LOST = 1024


@dataclass
class SaveStep:
    """State of a step's saves: of each its own, since the next may begin before it ends.

    ``computed`` and ``marks`` have one entry a layer: set once it is computed, and the forward
    pass's position then. At ``give_up_at`` (``time.monotonic()``) the store gives the slots to
    others. ``copied``: the engine may overwrite its blocks. ``sound``, whether the step computed
    right KV, is known once ``judged``.
    """

    memory: BlockMemory
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

    ``model`` is the model's name in the store's figures and quotas. With ``staging``, computed
    blocks for which that has room are saved without any wait of the engine.
    """

    _step: SaveStep | None = None

    def __init__(
        self,
        memory: BlockMemory,
        arena: Arena,
        stream: HostStream,
        store: StoreClient,
        model: str,
        staging: Staging | None = None,
    ) -> None:
        super().__init__(memory, arena, stream, store)
        self._model = model
        self._staging = staging
        # Chains of which the store has lost blocks that were saved before, by their first keys.
        self._lost: set[bytes] = set()
        self._refused: set[str] = set()
        self.saved = Saved()

    @property
    def running(self) -> bool:
        return self._step is not None

    def start(self, saves: Sequence[Save]) -> None:
        """Begin a step's saves; the caller reports each layer, and calls :meth:`finish`. A step
        before that was not finished, since its forward pass raised, counts as unsound."""
        self.finish(sound=False)
        self._lost -= {save.keys[:KEY_BYTES] for save in saves}
        self._step = self._begin(self.memory, None)
        self._thread.submit(self._run, saves, self._step)

    def _begin(self, memory: BlockMemory, mark: object) -> SaveStep:
        marks = [mark] * memory.layers
        return SaveStep(memory, self._events(), marks, time.monotonic() + WRITE_S)

    def layer_done(self, layer: int) -> None:
        """Report that the forward pass has computed the layer's KV."""
        if self._step is not None:
            self._step.marks[layer] = self._stream.mark()
            self._step.computed[layer].set()

    def stages(self, saves: Sequence[Save]) -> bool:
        """Whether the engine would not wait for :meth:`save_computed`, now or later."""
        return (
            self._staging is not None
            and self._staging.of is self.memory
            and self._staging.fits(saves)
            and self._lost.isdisjoint(save.keys[:KEY_BYTES] for save in saves)
        )

    def save_computed(self, saves: Sequence[Save]) -> None:
        """Save blocks that a step has filled; what is issued after it may overwrite them."""
        if self._staging is not None and self.stages(saves):
            self.finish(sound=False)
            self._thread.submit(self._run_staged, self._staging, self._staging.stage(saves))
            return
        self.start(saves)
        for layer in range(self.memory.layers):
            self.layer_done(layer)
        self.finish(sound=True)

    def give_back(self) -> None:
        """Wait until all is saved, and give back what it was staged in, until the next save."""
        if self._staging is not None:
            self._thread.submit(self._staging.give_back).result()

    def finish(self, *, sound: bool) -> None:
        """Wait until the engine may overwrite its blocks. The store keeps the copies only if the
        step is ``sound``: one that used blocks which did not load has computed wrong KV, and so has
        one that did not reach all layers."""
        step, self._step = self._step, None
        if step is None:
            return
        step.sound = sound and all(event.is_set() for event in step.computed)
        for event in step.computed:
            event.set()
        step.copied.wait()
        step.judged.set()

    def close(self) -> None:
        self.finish(sound=False)
        super().close()

    def _run_staged(self, staging: Staging, staged: Staged) -> None:
        step = self._begin(staging.memory, staged.mark)
        for event in (*step.computed, step.judged):
            event.set()
        try:
            self._run(staged.saves, step)
        finally:
            staging.free(staged.part)

    def _run(self, saves: Sequence[Save], step: SaveStep) -> None:
        begin = time.thread_time()
        writers: list[tuple[Reserved, Save]] = []
        copies: list[list[BlockRun]] = []
        whole = False
        try:
            copies = self._copies(list(self._reserve(saves, writers)))
            with self._stream:
                whole = all(
                    self._save_layers(layers, copies, step) for layers in self._groups(copies, step)
                )
        except Exception:
            _logger.exception("saving KV blocks failed")
        finally:
            step.copied.set()
        kept = step.in_time(step.judged) and step.sound and whole
        if kept:
            for room, save in writers:
                self._note_own(room, save)
        self._store.tell_all(
            Commit(room.writer, save.recompute_s, save.keep_s, save.outdated)
            if kept
            else Abandon(room.writer)
            for room, save in writers
        )
        blocks = sum(len(run.slots) for runs in copies for run in runs)
        core_s = self.saved.core_s + time.thread_time() - begin
        self.saved = Saved(self.saved.blocks + blocks, core_s)

    def _note_own(self, room: Reserved, save: Save) -> None:
        """Note the headers that the blocks written there will have: they need no check by us."""
        for at, slot in enumerate(decode_slots(room.slots), room.first):
            header = header_at(save.namespace, save.keys, at).packed(room.generation)
            self._arena.checked[slot] = seal(header, slot)

    def _reserve(
        self, saves: Sequence[Save], writers: list[tuple[Reserved, Save]]
    ) -> Iterator[BlockRun]:
        for save, room in self._rooms(saves):
            slots = decode_slots(room.slots)
            blocks = save.blocks[room.first : room.first + len(slots)]
            if NOT_HELD in blocks:
                # The chain's next save is of all its blocks, in the engine's own memory.
                self._store.tell(Abandon(room.writer))
                if len(self._lost) == _MOST_LOST:
                    self._lost.clear()
                self._lost.add(save.keys[:KEY_BYTES])
                continue
            if room.writer:
                writers.append((room, save))
            yield from self._runs(
                save.namespace, save.keys[room.first * KEY_BYTES :], slots, blocks
            )

    def _rooms(self, saves: Sequence[Save]) -> Iterator[tuple[Save, Reserved]]:
        """Yield the slots of each save that the store has any for."""
        asked = (
            Reserve(
                save.namespace,
                save.keys,
                self._model,
                self.memory.layers,
                self.memory.layer_bytes,
                os.getpid(),
            )
            for save in saves
        )
        replies = self._store.ask_all(asked)
        try:
            for save, reply in zip(saves, replies, strict=False):
                if isinstance(reply, Reserved):
                    yield save, reply
                elif isinstance(reply, Refused):
                    self._warn_once(reply.message)
        except StoreAwayError as error:
            _logger.debug("%s", error)

    def _warn_once(self, refusal: str) -> None:
        # The refusal stands until the configuration changes, and would repeat in every step.
        if refusal not in self._refused:
            self._refused.add(refusal)
            _logger.warning("nothing of this model is saved: %s", refusal)

    def _groups(self, copies: Sequence[Sequence[BlockRun]], step: SaveStep) -> Iterator[range]:
        """Layers that are saved once all of them are computed: of few bytes several together, and
        all that are computed already."""
        layers, end, size = self.memory.layers, 0, max(1, layer_bytes(copies))
        while end < layers:
            first, most = end, min(end + _MOST_TOGETHER // size, layers)
            end = min(end + max(1, WORTH_A_WAKE // size), layers)
            while end < most and step.computed[end].is_set():
                end += 1
            yield range(first, end)

    def _save_layers(
        self, layers: range, copies: Sequence[Sequence[BlockRun]], step: SaveStep
    ) -> bool:
        """Save layers once they are computed; returns whether their bytes are whole there."""
        if not copies:
            return True
        last = layers[-1]
        if not (step.in_time(step.computed[last]) and step.sound):
            return False
        begin = time.perf_counter()
        self._stream.wait(step.marks[last])
        whole, rows = True, step.memory.rows
        for runs in copies:
            if rows is not None:
                _copy_rows(rows, layers, runs)
                self._stream.settle()
                continue
            most = max(1, step.memory.copy_bytes // layer_bytes([runs]))
            for first in range(0, len(layers), most):
                whole = self._save_together(layers[first : first + most], runs, step) and whole
        copied = len(layers) * layer_bytes(copies)
        self._count(copied, time.perf_counter() - begin)
        return whole

    def _save_together(self, layers: range, runs: Sequence[BlockRun], step: SaveStep) -> bool:
        pieces: list[LayerPieces] = [(layer, [run.of(layer) for run in runs]) for layer in layers]
        step.memory.layers_to_host(pieces)
        self._stream.settle()
        for run in runs:
            for at, seed in enumerate(run.seeds):
                digests = [
                    layer_digest(run.sealed_bytes(None, at, layer), layer, seed) for layer in layers
                ]
                run.checksums[at, layers.start : layers.stop] = digests
        # A writer that the store gave up may still write there, even after the copy.
        return step.memory.layers_equal_host(pieces)


def _copy_rows(rows: Sequence[KvRows], layers: range, runs: Sequence[BlockRun]) -> None:
    """Copy the layers of these blocks to their slots, and seal them there.

    NumPy takes several times as long for the few bytes of a small model's layer. A block's
    checksums are of the engine's bytes, for a writer that the store gave up may still write to the
    slot, and are computed while the processor's cache has them.
    """
    for run in runs:
        size, slot = run.pieces.shape[2], run.pieces.ctypes.data
        copy = memmove if size > _LONG else _short_memmove
        for at, seed in enumerate(run.seeds):
            digests = []
            for layer in layers:
                address, apart, view = rows[layer]
                begin = (run.first + at) * apart
                copy(slot + layer * size, address + begin, size)
                digests.append(layer_digest(view[begin : begin + size], layer, seed))
            run.checksums[at, layers.start : layers.stop] = digests
            slot += run.pieces.strides[0]
