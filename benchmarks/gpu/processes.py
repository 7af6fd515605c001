"""A loan between two processes that map each other's memory of the GPU, as engines have it.

Form B of :mod:`benchmarks.gpu.lend`, with both ends as engines have them: a thread of the lender's
process looks for tasks by a kernel, and queues what serves them. On one GPU without MPS the
processes take turns, so times are worth something between two GPUs, or with MPS.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu.host_memory import HostMemory
from benchmarks.gpu.step import DEVICE, HAS_GPU, Results, main, spread

# isort: split
import torch

from loomserve.platform.lending.device.memory import CudaMemory
from loomserve.platform.lending.device.server import kernel_leaf
from loomserve.platform.lending.leaf import Leaf
from loomserve.platform.lending.ring.borrower import Borrower
from loomserve.platform.lending.ring.geometry import GPU, Geometry
from loomserve.platform.lending.ring.lent_ring import LentRing
from loomserve.platform.lending.ring.words import RingStats

GEOMETRY = Geometry(
    layers=8 if HAS_GPU else 2,
    query_heads=32 if HAS_GPU else 4,
    kv_heads=8 if HAS_GPU else 2,
    head_size=128 if HAS_GPU else 32,
    block_size=16,
    dtype="bfloat16" if HAS_GPU else "float32",
    scale=(128 if HAS_GPU else 32) ** -0.5,
    isa=GPU,
)
PROMPT = 64 if HAS_GPU else 20
ROWS, CONTEXT = (32, 1024) if HAS_GPU else (2, 32)
STEPS = 50 if HAS_GPU else 1
PATIENCE_S = 20.0
MOST_ERROR = 2e-2 if HAS_GPU else 1e-5


def leaf() -> Leaf:
    return kernel_leaf(CudaMemory() if HAS_GPU else HostMemory())


def lend(path: Path, borrower: Connection) -> None:
    """The lender's process: serve one ring until the borrower says that it has ended."""
    blocks = ROWS * CONTEXT // GEOMETRY.block_size
    size = (blocks, GEOMETRY.kv_heads, GEOMETRY.block_size, 2 * GEOMETRY.head_size)
    dtype = getattr(torch, GEOMETRY.dtype)
    memory = [torch.zeros(size, dtype=dtype, device=DEVICE) for _ in range(GEOMETRY.layers)]
    caches = [(one[..., : GEOMETRY.head_size], one[..., GEOMETRY.head_size :]) for one in memory]
    most = CONTEXT // GEOMETRY.block_size
    ring = LentRing.create(path, GEOMETRY, max(PROMPT, ROWS), ROWS, most)
    ring.granted = blocks
    server = leaf().server()
    server.open(ring, caches)
    borrower.send("open")
    borrower.recv()
    server.close(ring)
    server.stop()


def prompt_error(borrower: Borrower) -> float:
    """One prompt in one step: the greatest difference from attention by torch, in float32."""
    blocks = -(-PROMPT // GEOMETRY.block_size)
    table = torch.randperm(blocks, device=DEVICE).to(torch.int32)[None]
    places = torch.arange(PROMPT, device=DEVICE)
    of = table[0][places // GEOMETRY.block_size].long()
    slots = of * GEOMETRY.block_size + places % GEOMETRY.block_size
    borrower.begin_step(
        torch.tensor([0, PROMPT], dtype=torch.int32, device=DEVICE),
        torch.tensor([PROMPT], dtype=torch.int32, device=DEVICE),
        table,
        slots,
    )
    query, key, value = rows(PROMPT)
    borrower.post(0, query, key, value)
    output = torch.full_like(query, torch.nan)
    borrower.wait(output, PATIENCE_S)
    group = GEOMETRY.query_heads // GEOMETRY.kv_heads
    keys, values = (part.float().repeat_interleave(group, 1) for part in (key, value))
    logits = torch.einsum("qhd,khd->hqk", query.float(), keys) * GEOMETRY.scale
    later = torch.ones(PROMPT, PROMPT, dtype=torch.bool, device=DEVICE).triu(1)
    weights = logits.masked_fill(later, -torch.inf).softmax(-1)
    whole = torch.einsum("hqk,khd->qhd", weights, values)
    return float((output.float() - whole).abs().max())


def layer_us(borrower: Borrower) -> list[float]:
    """Microseconds of a layer's post and wait, in steps of decoding."""
    table = torch.arange(ROWS * CONTEXT // GEOMETRY.block_size, dtype=torch.int32, device=DEVICE)
    table = table.view(ROWS, -1)
    metadata = (
        torch.arange(ROWS + 1, dtype=torch.int32, device=DEVICE),
        torch.full((ROWS,), CONTEXT, dtype=torch.int32, device=DEVICE),
        table,
        table[:, -1].long() * GEOMETRY.block_size + GEOMETRY.block_size - 1,
    )
    query, key, value = rows(ROWS)
    output = torch.empty_like(query)
    taken = []
    for _ in range(STEPS):
        borrower.begin_step(*metadata)
        settle()
        begin = time.perf_counter()
        for layer in range(GEOMETRY.layers):
            borrower.post(layer, query, key, value)
            borrower.wait(output, PATIENCE_S)
        settle()
        taken.append(1e6 * (time.perf_counter() - begin) / GEOMETRY.layers)
    return taken


def of_a_task(stats: RingStats) -> dict[str, float]:
    """Means of both ends' own counts."""
    return {
        "waited for": stats.wait_ns / max(stats.tasks, 1) / 1e3,
        "until picked up": stats.pickup_ns / max(stats.idled, 1) / 1e3,
        "served, by the host's clock": stats.service_ns / max(stats.idled, 1) / 1e3,
    }


def rows(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype = getattr(torch, GEOMETRY.dtype)
    heads = (GEOMETRY.query_heads, GEOMETRY.kv_heads, GEOMETRY.kv_heads)
    query, key, value = (
        torch.randn(number, of, GEOMETRY.head_size, dtype=dtype, device=DEVICE) for of in heads
    )
    return query, key, value


def settle() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def processes(results: Results) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "ring")
        lender = context.Process(target=lend, args=(path, theirs))
        lender.start()
        try:
            if not ours.poll(60):
                raise RuntimeError("the lender did not begin")
            borrower = leaf().borrower(path, PATIENCE_S)
            error = prompt_error(borrower)
            results.add("greatest error", error)
            reason = borrower.ring.closed.name
            results.add("the ring is", reason)
            if not error <= MOST_ERROR:
                raise RuntimeError(f"an error of {error:.2g}, and the ring is {reason}")
            taken = layer_us(borrower)
            if HAS_GPU:
                results.add("a layer's post and wait, us", spread(taken))
                results.add("of a task, us", of_a_task(borrower.ring.stats()))
            results.add("tasks", borrower.ring.stats().tasks)
            results.add("the ring is", borrower.ring.closed.name)
            ours.send("ended")
        finally:
            lender.join(20)
            lender.kill()
    median = f", a layer {spread(taken)['median']:.0f} us" if HAS_GPU else ""
    results.end(f"greatest error {error:.1e}{median}")


if __name__ == "__main__":
    main(processes)
