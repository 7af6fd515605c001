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

    def __init__(self, options: Mapping[str, Any], rank: int) -> None:
        self._options = options
        self._rank = rank
        self._failed: set[int] = set()
        self._threads: tuple[Loader, Loader, Saver] | None = None
        self._fetches: dict[str, Future[set[int]]] = {}
        self._reported = Transferred(0, 0.0, 0, 0.0, 0, 0.0)
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
        self._threads = (
            Loader(memory, arena, stream_for(device), StoreClient(address)),
            # What is fetched must not keep a step's loads waiting.
            Loader(memory, arena, stream_for(device), StoreClient(address)),
            Saver(memory, arena, stream_for(device), StoreClient(address), model, staging),
        )

    def settle(self) -> None:
        """Drain copies that run beside steps, before blocks are remapped."""
        for fetch in self._fetches.values():
            fetch.result()

    def use(self, memory: BlockMemory) -> None:
        """Copy from and to this memory from now on; call it between steps, after :meth:`settle`."""
        self.memory = memory
        for thread in self.threads:
            thread.memory = memory

    def swap_out(self, saves: list[dict[int, Save]]) -> None:
        if saves:
            *_, saver = self.threads
            saver.save_computed([save[self._rank] for save in saves])

    def start_loads(self, transfers: StepTransfers, *, one_graph: bool) -> None:
        loader, fetcher, _ = self.threads
        self._one_graph = one_graph
        if transfers.loads:
            loader.start([load[self._rank] for load in transfers.loads])
            if one_graph or not self.memory.beside_steps:
                loader.wait()
        for request_id, load in transfers.fetches.items():
            self._fetches[request_id] = fetcher.fetch(load[self._rank])
            if not self.memory.beside_steps:
                self._fetches[request_id].result()

    def take_fetched(self) -> set[str] | None:
        ended = {name for name, fetch in self._fetches.items() if fetch.done()}
        for name in ended:
            self._failed |= self._fetches.pop(name).result()
        return ended or None

    def take_transferred(self) -> Transferred | None:
        """Copies since the last call; None if there were none."""
        loader, fetcher, saver = self.threads
        out, loaded, fetched = saver.time.copied, loader.time.copied, fetcher.time.copied
        in_bytes, in_s = loaded.size + fetched.size, loaded.busy_s + fetched.busy_s
        total = Transferred(*out, in_bytes, in_s, *saver.time.saved)
        new, self._reported = total.since(self._reported), total
        return new if new.out_bytes or new.in_bytes or new.out_core_s else None

    def before_layer(self, layer_name: str, saves: list[dict[int, Save]]) -> None:
        loader, _, saver = self.threads
        # That is decided once, before the first layer.
        if saves and not self._computed and not saver.running and self.memory.beside_steps:
            mine = [save[self._rank] for save in saves]
            if not saver.stages(mine):
                saver.start(mine)
        loader.wait_layer(self.memory.layer_of[layer_name])

    def after_layer(self, layer_name: str) -> None:
        *_, saver = self.threads
        layer = self.memory.layer_of[layer_name]
        self._computed.add(layer)
        saver.layer_done(layer)

    def end_step(self, saves: list[dict[int, Save]], *, sound: bool) -> None:
        """``sound``: the forward pass did not raise."""
        loader, _, saver = self.threads
        failed = loader.finish()
        self._failed |= failed
        sound = sound and not failed
        computed, self._computed = self._computed, set()
        if saver.running:
            saver.finish(sound=sound)
        elif saves and sound and (self._one_graph or computed >= self.memory.layers_here):
            saver.save_computed([save[self._rank] for save in saves])

    def give_back(self) -> None:
        """Do without the GPU's memory that is there for saves, until the next step."""
        *_, saver = self.threads
        saver.give_back()

    def take_failed(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    @property
    def threads(self) -> tuple[Loader, Loader, Saver]:
        assert self._threads is not None, "register_kv_caches() comes first"
        return self._threads

    def close(self) -> None:
        if self._threads is not None:
            for thread in self._threads:
                thread.close()
            self._threads = None
        self._closing.close()
