"""Loads of KV blocks from the store into an engine's memory, layer by layer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain

from loomserve.kvstore.engine.transfers.transfer import BlockRun, Load, TransferThread, layer_bytes
from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.server.protocol import Release
from loomserve.kvstore.storage.checksum import is_trusted, layer_digest
from loomserve.kvstore.wire import Corrupt

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadStep:
    """State of a step's loads: of each its own, since the next may begin before it ends.

    ``mark`` is the forward pass's position at the start: until it, other requests may use the
    blocks. ``headers`` are slot and header of each block as they were then; blocks in ``checked``
    have been checked since they were written.
    """

    loaded: list[threading.Event]
    mark: object
    ahead: threading.Event = field(default_factory=threading.Event)
    failed: set[int] = field(default_factory=set)
    headers: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    checked: set[int] = field(default_factory=set)


class Loader(TransferThread):
    """Thread that fills an engine's blocks, layer by layer, ahead of the forward pass."""

    _step: LoadStep | None = None

    def start(self, loads: Sequence[Load]) -> None:
        """Begin a step's loads; the caller waits for each layer, and calls :meth:`finish`."""
        self._step = LoadStep(self._events(), self._stream.mark())
        self._thread.submit(self._run, loads, self._step)
        if any(load.ahead for load in loads):
            self._step.ahead.wait()

    def fetch(self, load: Load) -> Future[set[int]]:
        """Fill blocks that no step uses yet; the result is the blocks that hold wrong bytes."""
        return self._thread.submit(self._run, [load], LoadStep(self._events(), self._stream.mark()))

    def wait_layer(self, layer: int) -> None:
        if self._step is not None:
            self._step.loaded[layer].wait()

    def wait(self) -> None:
        """Wait for all layers, before a forward pass beside which nothing may be copied."""
        self.wait_layer(-1)

    def finish(self) -> set[int]:
        """Wait for the step's loads; returns the engine's blocks that hold wrong bytes."""
        step, self._step = self._step, None
        if step is None:
            return set()
        step.loaded[-1].wait()
        return step.failed

    def _run(self, loads: Sequence[Load], step: LoadStep) -> set[int]:
        try:
            ahead: list[BlockRun] = []
            copies = self._copies([run for load in loads for run in self._split(load, ahead)])
            copies_ahead = self._copies(ahead)
            for run in chain.from_iterable((*copies_ahead, *copies)):
                self._note_headers(run, step)
            with self._stream:
                self._stream.wait(step.mark)
                for layer in range(self.memory.layers):
                    self._load_layer(layer, copies_ahead, step)
                step.ahead.set()
                for layer, event in enumerate(step.loaded):
                    self._load_layer(layer, copies, step)
                    if event is step.loaded[-1]:
                        self._compare_headers(step)
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

    def _note_headers(self, run: BlockRun, step: LoadStep) -> None:
        for block, (slot, key) in enumerate(zip(run.slots, run.keys, strict=True), run.first):
            header = self._arena.header(slot, self._layout.slot_bytes)
            if header.startswith(run.namespace + key):
                step.headers[block] = slot, header
                if self._arena.checked.get(slot) == header:
                    step.checked.add(block)

    def _compare_headers(self, step: LoadStep) -> None:
        """Fail blocks that were not checked and whose slots were given to others meanwhile. What
        was checked, and still is there, needs no check the next time."""
        for block, (slot, header) in step.headers.items():
            if self._arena.header(slot, self._layout.slot_bytes) != header:
                step.failed.update({block} & step.checked)
            elif block not in step.failed and is_trusted(header):
                self._arena.checked[slot] = header

    def _load_layer(self, layer: int, copies: Sequence[Sequence[BlockRun]], step: LoadStep) -> None:
        begin = time.perf_counter()
        for runs in copies:
            self.memory.from_host(layer, [run.of(layer) for run in runs])
            self._stream.settle()
            for run in runs:
                if not step.checked.issuperset(range(run.first, run.first + len(run.slots))):
                    step.failed.update(self._wrong(layer, run))
        self._count(layer_bytes(copies), time.perf_counter() - begin)

    def _wrong(self, layer: int, run: BlockRun) -> Iterator[int]:
        """The engine's blocks whose bytes of the layer do not match their checksum. The check
        follows the copy, so it notices a slot that was given to others before or meanwhile. It is
        of the engine's own bytes, if the CPU can read them."""
        rows = self.memory.rows
        sealed = run.checksums[:, layer].tolist()
        for at, (checksum, block_seed) in enumerate(zip(sealed, run.seeds, strict=True)):
            if layer_digest(run.sealed_bytes(rows, at, layer), layer, block_seed) != checksum:
                yield run.first + at

    def _report(self, loads: Sequence[Load], failed: set[int]) -> None:
        for load in loads:
            bad = [i for i, block in enumerate(load.blocks) if block in failed]
            if bad:
                end = (load.first + bad[0] + 1) * KEY_BYTES
                self._store.tell(Corrupt(load.namespace, load.keys[:end]))
        self._store.tell(Release([load.lease for load in loads]))
