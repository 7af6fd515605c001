"""How fast is the KV store, against what the machine's memory and disk can do?

Without an engine: blocks of the demo model's shape go from a KV cache into the store and back
through the very transfer threads that a worker runs, layer by layer, checksums included, against
plain copies of the same pieces between the same places. A worker's first writes to shared memory
also map its pages, once, and are told apart ("put_first"). The SSD tier's reads stand against
sequential ``O_DIRECT`` reads of a file, block by block, by as many threads. Lookups go through the
socket.

Every figure is taken ``--runs`` times, each run's ratio against that run's own baseline. The last
line of the output is one JSON object, also written to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine import BLOCK_TOKENS, running_store
from benchmarks.report import Spread
from benchmarks.result_files import machine, publish, said_by
from loomserve.kvstore.engine.transfers.copies import Load, Save
from loomserve.kvstore.engine.transfers.loader import Loader
from loomserve.kvstore.engine.transfers.memory import KvMemory, stream_for
from loomserve.kvstore.engine.transfers.saver import Saver
from loomserve.kvstore.server.client import StoreClient
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.protocol import (
    Commit,
    Done,
    Flush,
    Found,
    Lookup,
    Release,
    Reserve,
    Reserved,
    decode_slots,
)
from loomserve.kvstore.storage.arena import Arena
from loomserve.kvstore.storage.checksum import BlockHeader, BlockLayout
from loomserve.kvstore.storage.ssd import SsdTier

LAYERS, KV_HEADS, HEAD_BYTES = 30, 3, 2 * 64 * 4
LAYER_BYTES = KV_HEADS * BLOCK_TOKENS * HEAD_BYTES
BLOCKS = 128
LOOKUPS_A_RUN = 200
SPACE, SMALL = b"benchmark-store-", b"benchmark-lookup"
CONCURRENCY = (1, 2, 4, 8)
LOOKUPS = (1, 100, 10_000)
REPEATS = 5
"""Of each copy within a run, in turn; the run's figure is their median."""


def chain(seed: int, blocks: int) -> bytes:
    return np.random.default_rng(seed).bytes(16 * blocks)


def gigabytes_per_s(size: int, work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return size / (time.perf_counter() - begin) / 1e9


class Engine:
    """A worker's side of the store, with a KV cache and no model."""

    def __init__(self, store_options: StoreOptions) -> None:
        cache = torch.randint(
            0, 255, (LAYERS, BLOCKS, KV_HEADS, BLOCK_TOKENS, HEAD_BYTES), dtype=torch.uint8
        )
        self.caches = {f"layer{i}": cache[i] for i in range(LAYERS)}
        self.memory = KvMemory(self.caches)
        self.arena = Arena.attach(store_options.arena)
        stream = stream_for(self.memory.device)
        self.loader = Loader(self.memory, self.arena, stream, StoreClient(store_options.address))
        self.saver = Saver(
            self.memory, self.arena, stream, StoreClient(store_options.address), "bench"
        )
        self.client = StoreClient(store_options.address, timeout_ms=10_000)

    def put(self, keys: bytes) -> None:
        self.saver.start([Save(SPACE, keys, list(range(BLOCKS)), 0.03)])
        for layer in range(LAYERS):
            self.saver.layer_done(layer)
        self.saver.finish(sound=True)

    def find(self, keys: bytes, skip: int = 0) -> Found:
        return self.client.ask(Lookup(SPACE, keys, skip, 60.0, promote=True), Found)

    def get(self, keys: bytes, found: Found) -> None:
        slots = decode_slots(found.slots)
        self.loader.start([Load(SPACE, keys, 0, slots, list(range(len(slots))), found.lease)])
        for layer in range(LAYERS):
            self.loader.wait_layer(layer)
        if failed := self.loader.finish():
            raise RuntimeError(f"blocks {sorted(failed)} came back wrong")

    def copy(self, slots: Sequence[int]) -> None:
        """What :meth:`get` must at least do: every piece from its slot to its block."""
        layout = BlockLayout(LAYERS, LAYER_BYTES)
        rows = [cache.numpy().reshape(BLOCKS, LAYER_BYTES) for cache in self.caches.values()]
        for layer in range(LAYERS):
            for block, slot in enumerate(slots):
                view = self.arena.view(slot, layout.slot_bytes)
                np.copyto(rows[layer][block], layout.piece(view, layer))


def memory_run(store_options: StoreOptions, run: int) -> dict[str, float]:
    """Put, plain copies and get of the same blocks, in turn."""
    engine = Engine(store_options)
    size = BLOCKS * LAYERS * LAYER_BYTES
    source, target = (np.empty(size, np.uint8) for _ in range(2))
    source[:] = 1
    target[:] = 0
    first = gigabytes_per_s(size, lambda: engine.put(chain(run, BLOCKS)))
    taken: dict[str, list[float]] = {"put": [], "memcpy": [], "get": [], "memcpy_large": []}
    for repeat in range(REPEATS):
        engine.client.ask(Flush(""), Done)
        keys = chain(1000 * (run + 1) + repeat, BLOCKS)
        taken["put"].append(gigabytes_per_s(size, partial(engine.put, keys)))
        found = wait_for(engine, keys, BLOCKS)
        slots = decode_slots(found.slots)
        taken["memcpy"].append(gigabytes_per_s(size, partial(engine.copy, slots)))
        taken["get"].append(gigabytes_per_s(size, partial(engine.get, keys, found)))
        taken["memcpy_large"].append(gigabytes_per_s(size, lambda: np.copyto(target, source)))
    medians = {f"{name}_gbps": statistics.median(of) for name, of in taken.items()}
    return medians | {"put_first_gbps": first}


def wait_for(engine: Engine, keys: bytes, blocks: int) -> Found:
    """A save is committed a moment after its step."""
    until = time.monotonic() + 10
    while (found := engine.find(keys)).in_memory < blocks:
        if time.monotonic() > until:
            raise RuntimeError(f"{found.in_memory} of {blocks} blocks are in memory after 10 s")
        engine.client.ask(Release([found.lease]), Done)
        time.sleep(0.01)
    return found


def ssd_run(folder: Path, threads: int) -> dict[str, float]:
    """Reads of a tier and of a plain file on the same disk, block by block by so many threads."""
    slot_bytes = BlockLayout(LAYERS, LAYER_BYTES).slot_bytes
    size = BLOCKS * slot_bytes
    views = [np.frombuffer(mmap.mmap(-1, slot_bytes), np.uint8) for _ in range(BLOCKS)]
    for number, view in enumerate(views):
        view[:] = np.random.default_rng(number).integers(0, 255, slot_bytes, np.uint8)
    keys = [chain(number, 1) for number in range(BLOCKS)]
    tier = SsdTier(folder / "tier", 4 * size, 2**28)
    raw = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        locations: list[int] = []

        def write() -> None:
            for key, view in zip(keys, views, strict=True):
                locations.append(tier.write(BlockHeader(SPACE, key, bytes(16), 0), view))

        put = gigabytes_per_s(size, write)
        for number, view in enumerate(views):
            os.pwritev(raw, [view.data], number * slot_bytes)
        os.fsync(raw)

        def read_raw(number: int) -> None:
            os.preadv(raw, [views[number].data], number * slot_bytes)

        def read_tier(number: int) -> None:
            if not tier.read(locations[number], views[number], SPACE, keys[number]):
                raise RuntimeError("a block came back wrong from SSD")

        return {
            "ssd_put_gbps": put,
            "ssd_raw_gbps": gigabytes_per_s(size, lambda: in_threads(threads, read_raw)),
            "ssd_get_gbps": gigabytes_per_s(size, lambda: in_threads(threads, read_tier)),
        }
    finally:
        os.close(raw)
        (folder / "raw").unlink()
        while tier.used_bytes:
            tier.drop_oldest_segment()
        tier.close()


def in_threads(threads: int, work: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(BLOCKS)))


def lookup_us(store_options: StoreOptions, blocks: int, times: int = LOOKUPS_A_RUN) -> float:
    """Median time of a lookup through the socket that finds and leases so many blocks.

    The blocks are of a page each, since 10,000 of the demo model's would need 15 GB.
    """
    client = StoreClient(store_options.address, timeout_ms=10_000)
    keys = chain(0, blocks)
    room = client.ask(Reserve(SMALL, keys, "small", 1, 1024), Reserved)
    if room.writer:
        client.ask(Commit(room.writer, 0.03), Done)
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        found = client.ask(Lookup(SMALL, keys, 0, 60.0, promote=False), Found)
        taken.append(time.perf_counter() - begin)
        if len(decode_slots(found.slots)) != blocks:
            raise RuntimeError(f"{found.in_memory} of {blocks} blocks are in memory")
        client.ask(Release([found.lease]), Done)
    client.close()
    return 1e6 * statistics.median(taken)


def spread(values: Sequence[float]) -> dict[str, float]:
    return asdict(Spread.of(values))


def benchmark(store_options: StoreOptions, disk: Path, runs: int) -> dict[str, Any]:
    in_memory = [memory_run(store_options, run) for run in range(runs)]
    on_ssd = {threads: [ssd_run(disk, threads) for _ in range(runs)] for threads in CONCURRENCY}
    lookups = {
        blocks: [lookup_us(store_options, blocks) for _ in range(runs)] for blocks in LOOKUPS
    }
    best = {threads: statistics.median(r["ssd_get_gbps"] for r in of)
            for threads, of in on_ssd.items()}  # fmt: skip
    threads = max(best, key=lambda threads: best[threads])
    figures = {name: spread([run[name] for run in in_memory]) for name in in_memory[0]} | {
        name: spread([run[name] for run in on_ssd[threads]])
        for name in ("ssd_get_gbps", "ssd_raw_gbps", "ssd_put_gbps")
    }
    return {
        **{name: of["median"] for name, of in figures.items()},
        **{
            f"{name}_over_memcpy": spread(
                [run[f"{name}_gbps"] / run["memcpy_gbps"] for run in in_memory]
            )
            for name in ("get", "put")
        },
        "ssd_get_over_raw": spread(
            [run["ssd_get_gbps"] / run["ssd_raw_gbps"] for run in on_ssd[threads]]
        ),
        "lookup_us_p50": {str(blocks): asdict(Spread.of(of)) for blocks, of in lookups.items()},
        "lookup_us_n": LOOKUPS_A_RUN,
        "runs": runs,
        "spread": figures,
        "ssd_threads": threads,
        "ssd_by_threads": {
            str(threads): {name: statistics.median(run[name] for run in of) for name in of[0]}
            for threads, of in on_ssd.items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--disk", type=Path, help="folder on the disk to measure")
    options = parser.parse_args()
    facts = machine()
    with (
        tempfile.TemporaryDirectory(dir=options.disk or Path.home()) as folder,
        running_store(Path(folder)) as store_options,
    ):
        figures = benchmark(store_options, Path(folder), options.runs)
    # That benchmark takes its parts from this one.
    from benchmarks.transfer import measured_hidden_share

    with tempfile.TemporaryDirectory() as folder, running_store(Path(folder)) as store_options:
        figures["hidden_share"] = measured_hidden_share(store_options)
    publish("store", figures, setup=said_by(options, "disk"), facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
