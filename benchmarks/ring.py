"""What does a task of lending cost beyond its attention?

Decode steps of the demo model's shape between two processes, each on a core of its own: in each
layer the borrower posts all rows and waits for the lender, with no work of its own in between, so
that nothing is hidden. "beyond" is what post and wait last longer than the lender's writing of the
cache and its kernel; "ratio" is post and wait over the same attention computed by the borrower
itself, right before. Lenders that poll without end ("polling") stand for hooks between operators,
whose distance is left out, against lenders that leave it to their idle thread ("idle"). The Python
fallback stands beside the native ring. "empty_poll_ns" is a poll where nothing is posted.

Figures are µs: a run's is its median layer's, as a machine that halts now and then would else be
measured, and of ``--runs`` runs the median and the extremes are told. The last line of the output
is one JSON object, also written to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import torch
from vllm import _custom_ops as ops

from benchmarks.report import Spread
from benchmarks.result_files import machine, publish, said_by
from loomserve.platform.lending.ring import native
from loomserve.platform.lending.ring.attention_server import AttentionServer
from loomserve.platform.lending.ring.borrower import Borrower
from loomserve.platform.lending.ring.geometry import Geometry
from loomserve.platform.lending.ring.lent_ring import LentRing
from loomserve.platform.lending.ring.ring import Ring

SHAPE = Geometry(30, 9, 3, 64, 32, "float32", 64**-0.5, "vec")
BATCHES = (1, 8, 32)
CONTEXT = 256
STEPS = 20
LENDERS = ("polling", "idle")
IMPLEMENTATIONS = ("native", "python")
BORROWER_CORE, LENDER_CORE = 0, 1
PATIENCE_S = 60.0

Caches = list[tuple[torch.Tensor, torch.Tensor]]


def caches(requests: int) -> Caches:
    """Of all layers, side by side in each block, as they lie in a lender's memory."""
    blocks = requests * CONTEXT // SHAPE.block_size
    shape = (blocks, SHAPE.layers, SHAPE.kv_heads, 2 * SHAPE.block_size, SHAPE.head_size)
    key, value = torch.zeros(shape).chunk(2, dim=3)
    return [(key[:, layer], value[:, layer]) for layer in range(SHAPE.layers)]


class Batch:
    """One decode row for each request, at the end of its context."""

    def __init__(self, requests: int) -> None:
        width = CONTEXT // SHAPE.block_size
        heads = (SHAPE.query_heads, SHAPE.kv_heads, SHAPE.kv_heads)
        # Views of one tensor, as the model's projection makes them.
        qkv = torch.randn(requests, sum(heads), SHAPE.head_size)
        self.query, self.key, self.value = qkv.split(heads, dim=1)
        self.starts = torch.arange(requests + 1, dtype=torch.int32)
        self.lens = torch.full((requests,), CONTEXT, dtype=torch.int32)
        self.table = torch.arange(requests * width, dtype=torch.int32).view(requests, width)
        self.slots = (self.table[:, -1].long() + 1) * SHAPE.block_size - 1
        self.output = torch.empty(requests, SHAPE.query_heads, SHAPE.head_size)

    def local_us(self, own: Caches) -> float:
        """The median layer's attention without a ring."""
        metadata = ops.cpu_attn_get_scheduler_metadata(
            len(self.lens), SHAPE.query_heads, SHAPE.kv_heads, SHAPE.head_size, self.lens,
            self.query.dtype, self.starts, True, -1, SHAPE.isa, True,
        )  # fmt: skip
        taken = []
        for key, value in own * STEPS:
            begin = time.perf_counter_ns()
            ops.cpu_attn_reshape_and_cache(self.key, self.value, key, value, self.slots, SHAPE.isa)
            ops.cpu_attention_with_kv_cache(
                self.query, key, value, self.output, self.starts, self.lens, SHAPE.scale,
                True, None, -1, self.table, 0.0, metadata, None,
            )  # fmt: skip
            taken.append(time.perf_counter_ns() - begin)
        return statistics.median(taken) / 1e3

    def lent_us(self, ring: Ring, borrower: Borrower) -> dict[str, float]:
        """The medians of what the ring counts for a layer."""
        counted = [ring.stats()]
        for _ in range(STEPS):
            borrower.begin_step(self.starts, self.lens, self.table, self.slots)
            for layer in range(SHAPE.layers):
                borrower.post(layer, self.query, self.key, self.value)
                if not borrower.wait(self.output, PATIENCE_S):
                    raise RuntimeError(f"the ring is closed: {ring.closed.name}")
                counted.append(ring.stats())
        tasks = list(itertools.pairwise(counted))
        post, wait, service, pickup = (
            [getattr(after, name) - getattr(before, name) for before, after in tasks]
            for name in ("post_ns", "wait_ns", "service_ns", "pickup_ns")
        )
        beyond = [a + b - c for a, b, c in zip(post, wait, service, strict=True)]
        parts = {"post": post, "wait": wait, "service": service, "pickup": pickup, "beyond": beyond}
        return {f"{name}_us": statistics.median(of) / 1e3 for name, of in parts.items()}


def run(batch: Batch, own: Caches, ring: Ring, borrower: Borrower) -> dict[str, float]:
    local = batch.local_us(own)
    lent = batch.lent_us(ring, borrower)
    ratio = (lent["post_us"] + lent["wait_us"]) / local
    return lent | {"local_us": local, "ratio": ratio}


@contextmanager
def implemented(how: str) -> Iterator[None]:
    """Rings within are of this implementation."""
    if how == "python":
        with patch.object(native, "extension", return_value=None):
            yield
    else:
        native.load()
        yield


def on_core(core: int) -> None:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {core})


def lend(path: Path, how: str, lender: str, requests: int, ready: Connection) -> None:
    """The lender's process, until it is killed."""
    on_core(LENDER_CORE)
    with implemented(how):
        server = AttentionServer()
    server.open(LentRing.attach(path), caches(requests))
    if lender == "polling":
        server.busy()
    ready.send(None)
    while lender == "polling":
        server.poll()
    time.sleep(3600)


def measure(how: str, lender: str, requests: int, runs: int) -> dict[str, object]:
    path = Path(f"/dev/shm/loomserve-bench-ring-{os.getpid()}")
    width = CONTEXT // SHAPE.block_size
    ring = LentRing.create(path, SHAPE, requests, requests, width)
    ring.granted = requests * width
    context = mp.get_context("forkserver")
    mine, its = context.Pipe()
    process = context.Process(target=lend, args=(path, how, lender, requests, its))
    process.start()
    try:
        mine.recv()
        with implemented(how):
            borrower = Borrower(ring)
        batch, own = Batch(requests), caches(requests)
        run(batch, own, ring, borrower)
        figures = [run(batch, own, ring, borrower) for _ in range(runs)]
    finally:
        process.kill()
        process.join()
        ring.unlink()
    return {name: asdict(Spread.of([one[name] for one in figures])) for name in figures[0]}


def empty_poll_ns(runs: int) -> Spread:
    """With one ring open."""
    path = Path(f"/dev/shm/loomserve-bench-ring-{os.getpid()}")
    ring, server, calls = LentRing.create(path, SHAPE, 1, 1, 1), AttentionServer(), 100_000
    server.open(ring, caches(1))
    server.busy()
    taken = []
    for _ in range(runs):
        begin = time.perf_counter_ns()
        for _ in range(calls):
            server.poll()
        taken.append((time.perf_counter_ns() - begin) / calls)
    server.stop()
    ring.unlink()
    return Spread.of(taken)


def benchmark(runs: int) -> dict[str, object]:
    figures: dict[str, object] = {}
    for how in IMPLEMENTATIONS:
        for lender in LENDERS:
            for requests in BATCHES:
                found = measure(how, lender, requests, runs)
                figures[f"{how}_{lender}_{requests}"] = found
                print(f"{how} {lender} {requests}: {found}", flush=True)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ring", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    mp.set_forkserver_preload(["vllm._custom_ops"])
    facts = machine()
    on_core(BORROWER_CORE)
    result = {
        "runs": options.runs,
        "context_tokens": CONTEXT,
        "empty_poll_ns": asdict(empty_poll_ns(options.runs)),
        "us_a_layer": benchmark(options.runs),
    }
    publish("ring", result, setup=said_by(options), facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
