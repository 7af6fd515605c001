"""The connector's half in a worker: the copies of each step."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from loomserve.kvstore.engine.messages import StepTransfers, Transferred
from loomserve.kvstore.engine.transfers.batched_memory import BatchedMemory, memory_of
from loomserve.kvstore.engine.transfers.loader import Loader
from loomserve.kvstore.engine.transfers.memory import BlockMemory, pinned, stream_for
from loomserve.kvstore.engine.transfers.saver import Saver
from loomserve.kvstore.engine.transfers.staging import Staging
from loomserve.kvstore.engine.transfers.transfer import Save
from loomserve.kvstore.server.client import StoreClient
from loomserve.kvstore.storage.arena import Arena


class StoreConnectorWorker:
    """Makes each step's copies between this rank's blocks and the store's arena.

    Copies run beside the forward pass. They come before and after it where the memory allows none
    beside it, and where the pass is one CUDA graph, which makes no calls around its layers. Saves
    of few blocks on a GPU are staged at its end, and no step waits for them.
    """

    memory: BlockMemory
    _loader: Loader
    # What is fetched must not keep a step's loads waiting.
    _fetcher: Loader
    _saver: Saver

    def __init__(self, options: Mapping[str, Any], rank: int) -> None:
        self._options = options
        self._rank = rank
        self._failed: set[int] = set()
        self._fetches: dict[str, Future[set[int]]] = {}
        self._reported = Transferred(0, 0.0, 0, 0.0, 0, 0.0)
        self._reported_of: tuple[object, ...] = ()
        self._computed: set[int] = set()
        self._one_graph = False
        self._closing = ExitStack()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        memory = memory_of(kv_caches)
        device = memory.device
        arena = Arena.attach(Path(self._options["arena"]))
        self._closing.enter_context(pinned(device, arena.base_address, arena.nbytes))
        address = self._options["address"]
        self.memory = memory
        staging = Staging(memory, stream_for(device)) if isinstance(memory, BatchedMemory) else None
        model = self._options["model"]
        # A stream each, so that a GPU copies both ways at once.
        self._loader = Loader(memory, arena, stream_for(device), StoreClient(address))
        self._fetcher = Loader(memory, arena, stream_for(device), StoreClient(address))
        self._saver = Saver(memory, arena, stream_for(device), StoreClient(address), model, staging)
        for thread in (self._loader, self._fetcher, self._saver):
            self._closing.callback(thread.close)

    def settle(self) -> None:
        """Drain copies that run beside steps, before blocks are remapped."""
        for fetch in self._fetches.values():
            fetch.result()

    def use(self, memory: BlockMemory) -> None:
        """Copy from and to this memory from now on; call it between steps, after :meth:`settle`."""
        self.memory = memory
        for thread in (self._loader, self._fetcher, self._saver):
            thread.memory = memory

    def swap_out(self, saves: list[dict[int, Save]]) -> None:
        if saves:
            self._saver.save_computed([save[self._rank] for save in saves])

    def start_loads(self, transfers: StepTransfers, *, one_graph: bool) -> None:
        self._one_graph = one_graph
        if transfers.loads:
            self._loader.start([load[self._rank] for load in transfers.loads])
            if one_graph or not self.memory.beside_steps:
                self._loader.wait()
        for request_id, load in transfers.fetches.items():
            self._fetches[request_id] = self._fetcher.fetch(load[self._rank])
            if not self.memory.beside_steps:
                self._fetches[request_id].result()

    def take_fetched(self) -> set[str] | None:
        if not self._fetches:
            return None
        ended = {name for name, fetch in self._fetches.items() if fetch.done()}
        for name in ended:
            self._failed |= self._fetches.pop(name).result()
        return ended or None

    def take_transferred(self) -> Transferred | None:
        """Copies since the last call; None if there were none."""
        copies = (self._saver.copied, self._saver.saved, self._loader.copied, self._fetcher.copied)
        if copies == self._reported_of:
            return None
        self._reported_of = copies
        out, saved, loaded, fetched = copies
        in_bytes, in_s = loaded.size + fetched.size, loaded.busy_s + fetched.busy_s
        total = Transferred(*out, in_bytes, in_s, *saved)
        new, self._reported = total.since(self._reported), total
        return new if new.out_bytes or new.in_bytes or new.out_core_s else None

    def before_layer(self, layer_name: str, saves: list[dict[int, Save]]) -> None:
        # That is decided once, before the first layer.
        if saves and not self._computed and not self._saver.running and self.memory.beside_steps:
            mine = [save[self._rank] for save in saves]
            if not self._saver.stages(mine):
                self._saver.start(mine)
        self._loader.wait_layer(self.memory.layer_of[layer_name])

    def after_layer(self, layer_name: str) -> None:
        layer = self.memory.layer_of[layer_name]
        self._computed.add(layer)
        self._saver.layer_done(layer)

    def end_step(self, saves: list[dict[int, Save]], *, sound: bool) -> None:
        """``sound``: the forward pass did not raise."""
        failed = self._loader.finish()
        self._failed |= failed
        sound = sound and not failed
        computed, self._computed = self._computed, set()
        if self._saver.running:
            self._saver.finish(sound=sound)
        elif saves and sound and (self._one_graph or computed >= self.memory.layers_here):
            self._saver.save_computed([save[self._rank] for save in saves])

    def give_back(self) -> None:
        """Do without the GPU's memory that is there for saves, until the next step."""
        self._saver.give_back()

    def take_failed(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        self._closing.close()
