"""How fast is the KV store, against what the machine's memory and disk can do?

How, and what was found: ``benchmarks/store.md``.
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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine import BLOCK_TOKENS, running_store
from benchmarks.harness import parser_of, ratios, run, spread
from loomserve.kvstore.engine.transfers.loader import Loader
from loomserve.kvstore.engine.transfers.memory import KvMemory, stream_for
from loomserve.kvstore.engine.transfers.saver import Saver
from loomserve.kvstore.engine.transfers.transfer import Load, Save
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
                np.copyto(rows[layer][block], layout.pieces(view)[layer])


def memory_run(store_options: StoreOptions, run: int) -> dict[str, float]:
    """Put, plain copies and get of the same blocks, in turn."""
    engine = Engine(store_options)
    size = BLOCKS * LAYERS * LAYER_BYTES
    # A worker's first writes to shared memory also map its pages, once.
    engine.put(chain(run, BLOCKS))
    taken: dict[str, list[float]] = {"put": [], "memcpy": [], "get": []}
    for repeat in range(REPEATS):
        engine.client.ask(Flush(""), Done)
        keys = chain(1000 * (run + 1) + repeat, BLOCKS)
        taken["put"].append(gigabytes_per_s(size, partial(engine.put, keys)))
        found = wait_for(engine, keys, BLOCKS)
        slots = decode_slots(found.slots)
        taken["memcpy"].append(gigabytes_per_s(size, partial(engine.copy, slots)))
        taken["get"].append(gigabytes_per_s(size, partial(engine.get, keys, found)))
    return {f"{name}_gbps": statistics.median(of) for name, of in taken.items()}


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


def benchmark(store_options: StoreOptions, disk: Path, runs: int) -> dict[str, Any]:
    in_memory = [memory_run(store_options, number) for number in range(runs)]
    on_ssd = {threads: [ssd_run(disk, threads) for _ in range(runs)] for threads in CONCURRENCY}
    lookups = {
        blocks: [lookup_us(store_options, blocks) for _ in range(runs)] for blocks in LOOKUPS
    }
    by_threads = {
        threads: {name: statistics.median(one[name] for one in of) for name in of[0]}
        for threads, of in on_ssd.items()
    }
    threads = max(by_threads, key=lambda threads: by_threads[threads]["ssd_get_gbps"])
    best = on_ssd[threads]

    def over(of: Sequence[dict[str, float]], name: str, base: str) -> dict[str, Any]:
        return ratios([one[name] for one in of], [one[base] for one in of])

    return {
        "get_over_memcpy": over(in_memory, "get_gbps", "memcpy_gbps"),
        "put_over_memcpy": over(in_memory, "put_gbps", "memcpy_gbps"),
        "ssd_get_over_raw": over(best, "ssd_get_gbps", "ssd_raw_gbps"),
        "lookup_us_p50": {str(blocks): spread(of) for blocks, of in lookups.items()},
        "lookup_us_n": LOOKUPS_A_RUN,
        "runs": runs,
        "spread": {
            name: spread(one[name] for one in of) for of in (in_memory, best) for name in of[0]
        },
        "ssd_threads": threads,
        "ssd_by_threads": by_threads,
    }


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(dir=options.disk or Path.home()) as disk,
        running_store(folder) as store_options,
    ):
        return benchmark(store_options, Path(disk), options.runs)


def main() -> int:
    parser = parser_of("store", __doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--disk", type=Path, help="folder on the disk to measure")
    return run("store", parser.parse_args(), measured, without=("disk",))


if __name__ == "__main__":
    sys.exit(main())
