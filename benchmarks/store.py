"""How fast is the KV store, against what the machine's memory and disk can do?

Without an engine: blocks of the demo model's shape go from a KV cache into the store and back
through the very pipeline that a worker runs, layer by layer, checksums included, against plain
copies of the same pieces between the same places. The SSD tier's reads stand against sequential
``O_DIRECT`` reads of a file, block by block, by as many threads. Lookups go through the socket.

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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine import BLOCK_TOKENS, offline_engine
from benchmarks.report import Spread, machine, publish
from loomserve.kvstore.actor import StorePlan, open_store
from loomserve.kvstore.arena import Arena
from loomserve.kvstore.checksum import BlockHeader, BlockLayout
from loomserve.kvstore.client import StoreClient
from loomserve.kvstore.memory import KvMemory, stream_for
from loomserve.kvstore.pipeline import Load, Loader, Save, Saver, TransferTime
from loomserve.kvstore.protocol import (
    Commit,
    Done,
    Flush,
    Found,
    Lookup,
    Release,
    Reserve,
    Reserved,
)
from loomserve.kvstore.server import StoreServer
from loomserve.kvstore.slots import decode_slots
from loomserve.kvstore.ssd import SsdTier
from loomserve.platform import catalog

RESULTS = Path(__file__).parent / "results"
LAYERS, KV_HEADS, HEAD_BYTES = 30, 3, 2 * 64 * 4
LAYER_BYTES = KV_HEADS * BLOCK_TOKENS * HEAD_BYTES
BLOCKS = 128
SPACE, SMALL = b"benchmark-store-", b"benchmark-lookup"
CONCURRENCY = (1, 2, 4, 8)
LOOKUPS = (1, 100, 10_000)
LENGTHS = (512, 1024, 2048)
HIT_SHARES = (0.5, 0.9)


def chain(seed: int, blocks: int) -> bytes:
    return np.random.default_rng(seed).bytes(16 * blocks)


def gigabytes_per_s(size: int, work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return size / (time.perf_counter() - begin) / 1e9


class Engine:
    """A worker's side of the store, with a KV cache and no model."""

    def __init__(self, plan: StorePlan) -> None:
        cache = torch.randint(
            0, 255, (LAYERS, BLOCKS, KV_HEADS, BLOCK_TOKENS, HEAD_BYTES), dtype=torch.uint8
        )
        self.caches = {f"layer{i}": cache[i] for i in range(LAYERS)}
        self.memory = KvMemory(self.caches)
        self.arena = Arena.attach(plan.arena)
        stream = stream_for(self.memory.device)
        self.loader = Loader(self.memory, self.arena, stream, StoreClient(plan.address))
        self.saver = Saver(self.memory, self.arena, stream, StoreClient(plan.address), "bench")
        self.client = StoreClient(plan.address, timeout_ms=10_000)

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


def memory_run(plan: StorePlan, run: int) -> dict[str, float]:
    """Put, get and plain copies of the same blocks, one right after the other."""
    engine = Engine(plan)
    size = BLOCKS * LAYERS * LAYER_BYTES
    engine.client.ask(Flush(""), Done)
    keys = chain(run, BLOCKS)
    put = gigabytes_per_s(size, lambda: engine.put(keys))
    found = wait_for(engine, keys, BLOCKS)
    slots = decode_slots(found.slots)
    engine.copy(slots)
    copied = gigabytes_per_s(size, lambda: engine.copy(slots))
    source, target = (np.empty(size, np.uint8) for _ in range(2))
    source[:] = 1
    target[:] = 0
    whole = gigabytes_per_s(size, lambda: np.copyto(target, source))
    got = gigabytes_per_s(size, lambda: engine.get(keys, found))
    return {"put_gbps": put, "get_gbps": got, "memcpy_gbps": copied, "memcpy_large_gbps": whole}


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
            os.pwritev(raw, [view], number * slot_bytes)
        os.fsync(raw)

        def read_raw(number: int) -> None:
            os.preadv(raw, [views[number]], number * slot_bytes)

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


def lookup_us(plan: StorePlan, blocks: int, times: int = 200) -> float:
    """Median time of a lookup through the socket that finds and leases so many blocks.

    The blocks are of a page each, since 10,000 of the demo model's would need 15 GB.
    """
    client = StoreClient(plan.address, timeout_ms=10_000)
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


def hidden_run(engine: Any, length: int, hit_share: float, seed: int) -> dict[str, float]:
    """How much of a prompt's transfers the forward pass hid, with a real engine.

    A prompt of ``length`` tokens, ``hit_share`` of which the store has: so much is loaded, and the
    rest is computed and saved, in one step.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    one = SamplingParams(temperature=0, max_tokens=1)
    source = np.random.default_rng(seed)
    tokens = source.integers(1000, 40000, length).tolist()
    engine.generate([TokensPrompt(prompt_token_ids=tokens[: int(length * hit_share)])], one,
                    use_tqdm=False)  # fmt: skip
    time.sleep(0.2)
    engine.reset_prefix_cache()
    before = engine.collective_rpc(transfer_times)[0]
    begin = time.perf_counter()
    engine.generate([TokensPrompt(prompt_token_ids=tokens)], one, use_tqdm=False)
    took = time.perf_counter() - begin
    after = engine.collective_rpc(transfer_times)[0]
    spent = TransferTime(
        *(
            sum(lane[what] for lane in after) - sum(lane[what] for lane in before)
            for what in ("copied_bytes", "busy_s", "waited_s")
        )
    )
    return {
        "length": length,
        "hit_share": hit_share,
        "step_s": took,
        "transfer_s": spent.busy_s,
        "waited_s": spent.waited_s,
        "hidden_share": spent.hidden_share,
        # BanaServe, section 4.3.3: hidden as long as a layer's transfer is below a layer's pass.
        "predicted_hidden_share": min(1.0, took / max(spent.busy_s, 1e-9)),
    }


def transfer_times(worker: Any) -> list[dict[str, Any]]:
    """Runs in the engine's worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return [asdict(lane.time) for lane in get_kv_transfer_group().copier.lanes]


def real_engine(plan: StorePlan) -> Any:
    # For transfer_times, which travels to the worker.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return offline_engine(
        str(catalog.resolve("demo", Path.cwd())),
        plan.kv_transfer_config("demo"),
        max_model_len=2560,
        max_num_seqs=4,
        max_num_batched_tokens=2560,
        kv_cache_memory_bytes=512 * 2**20,
    )


def spread(values: Sequence[float]) -> dict[str, float]:
    return asdict(Spread.of(values))


def benchmark(plan: StorePlan, disk: Path, runs: int) -> dict[str, Any]:
    in_memory = [memory_run(plan, run) for run in range(runs)]
    on_ssd = {threads: [ssd_run(disk, threads) for _ in range(runs)] for threads in CONCURRENCY}
    lookups = {blocks: [lookup_us(plan, blocks) for _ in range(runs)] for blocks in LOOKUPS}
    engine = real_engine(plan)
    hidden_run(engine, 512, 0.5, seed=10**6)
    hidden = [
        hidden_run(engine, length, share, 1000 * run + length + int(100 * share))
        for run in range(runs)
        for length in LENGTHS
        for share in HIT_SHARES
    ]
    best = {threads: statistics.median(r["ssd_get_gbps"] for r in of)
            for threads, of in on_ssd.items()}  # fmt: skip
    threads = max(best, key=lambda threads: best[threads])
    figures = {
        name: spread([run[name] for run in in_memory])
        for name in ("put_gbps", "get_gbps", "memcpy_gbps", "memcpy_large_gbps")
    } | {
        name: spread([run[name] for run in on_ssd[threads]])
        for name in ("ssd_get_gbps", "ssd_raw_gbps", "ssd_put_gbps")
    }
    return {
        **{name: of["median"] for name, of in figures.items()},
        "get_over_memcpy": spread([run["get_gbps"] / run["memcpy_gbps"] for run in in_memory]),
        "ssd_get_over_raw": spread(
            [run["ssd_get_gbps"] / run["ssd_raw_gbps"] for run in on_ssd[threads]]
        ),
        "hidden_share": statistics.median(one["hidden_share"] for one in hidden),
        "lookup_us_p50": {str(blocks): statistics.median(of) for blocks, of in lookups.items()},
        "runs": runs,
        "spread": figures,
        "ssd_threads": threads,
        "ssd_by_threads": {
            str(threads): {name: statistics.median(run[name] for run in of) for name in of[0]}
            for threads, of in on_ssd.items()
        },
        "hidden": hidden,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--disk", type=Path, help="folder on the disk to measure")
    options = parser.parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory(dir=options.disk or Path.home()) as folder:
        plan = StorePlan(
            folder=Path(folder),
            arena=Path(f"/dev/shm/loomserve-kv-bench-{os.getpid()}"),
            memory=768 * 2**20,
            ssd_folder=None,
            ssd=0,
            eviction="lru",
            quotas={},
        )
        server = StoreServer(open_store(plan), plan.address)
        server.start()
        try:
            figures = benchmark(plan, Path(folder), options.runs)
        finally:
            server.stop()
            plan.arena.unlink()
    publish("store", {"benchmark": "store", **figures, "machine": facts}, RESULTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
