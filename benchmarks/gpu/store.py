"""Copies of KV blocks between pinned host memory and the device, as the KV store makes them.

The store's arena has a slot for each block, with all of the block's layers in it; the engine has a
cache for each layer. So one layer of n blocks is n pieces a slot apart on the host, and n pieces
anywhere on the device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

from benchmarks.gpu.step import DEVICE, HAS_GPU, Results, main, times_us

# isort: split
import torch

LAYERS = 32
PIECE_BYTES = 64 * 1024 if HAS_GPU else 256
"""Of Llama-3-8B's block of 16 tokens, in one layer: 2 x 8 heads x 16 x 128 numbers of 2 bytes."""
COUNTS = (16, 256, 1024, 4096) if HAS_GPU else (4,)
LAYER = 5


class Blocks(NamedTuple):
    """Pieces of one layer at both ends.

    Attributes:
        arena: uint8 [blocks, LAYERS * PIECE_BYTES] of the host, pinned if there is a GPU.
        cache: uint8 [2 * blocks, PIECE_BYTES] of the device.
        at: The blocks' places in the cache, on the device.
    """

    arena: torch.Tensor
    cache: torch.Tensor
    at: torch.Tensor

    @classmethod
    def make(cls, count: int) -> Blocks:
        arena = torch.empty((count, LAYERS * PIECE_BYTES), dtype=torch.uint8, pin_memory=HAS_GPU)
        arena.view(torch.int64).random_()
        cache = torch.zeros((2 * count, PIECE_BYTES), dtype=torch.uint8, device=DEVICE)
        # Two runs, as a prefix and what was computed after it lie.
        places = torch.arange(count)
        places[count // 2 :] += count // 2
        return cls(arena, cache, places.to(DEVICE))

    def pieces(self) -> torch.Tensor:
        """Of the host, [blocks, PIECE_BYTES], a slot apart."""
        return self.arena[:, LAYER * PIECE_BYTES : (LAYER + 1) * PIECE_BYTES]


def by_index(blocks: Blocks) -> None:
    """As torch does it: strided host memory, then rows by index."""
    blocks.cache[blocks.at] = blocks.pieces().to(DEVICE, non_blocking=True)


def by_block(blocks: Blocks) -> None:
    """One contiguous copy a block."""
    for place, piece in zip(blocks.at.tolist(), blocks.pieces(), strict=True):
        blocks.cache[place].copy_(piece, non_blocking=True)


def batched(blocks: Blocks) -> None:
    """All copies by one call of the driver."""
    runtime = importlib.import_module("cuda.bindings.runtime")
    host, device = blocks.pieces(), blocks.cache
    count = len(host)
    sources = [host.data_ptr() + i * host.stride(0) for i in range(count)]
    targets = [device.data_ptr() + i * PIECE_BYTES for i in blocks.at.tolist()]
    attributes = runtime.cudaMemcpyAttributes()
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    answer = runtime.cudaMemcpyBatchAsync(
        targets, sources, [PIECE_BYTES] * count, count, [attributes], [0], 1,
        torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    if int(answer[0]):
        raise RuntimeError(f"cudaMemcpyBatchAsync: {answer[0]}")


WAYS: dict[str, Callable[[Blocks], None]] = {
    "by index": by_index,
    "by block": by_block,
    "batched": batched,
}


def check(blocks: Blocks, way: Callable[[Blocks], None]) -> None:
    blocks.cache.zero_()
    way(blocks)
    if HAS_GPU:
        torch.cuda.synchronize()
    if not torch.equal(blocks.cache[blocks.at].cpu(), blocks.pieces()):
        raise RuntimeError("the bytes that arrived are others")


def rate(count: int, work: Callable[[], None]) -> dict[str, float]:
    """Microseconds, and 10^9 bytes a second in the median."""
    taken = times_us(work)
    return {**taken, "GB/s": count * PIECE_BYTES / taken["median"] / 1e3}


def one_count(count: int) -> dict[str, Any]:
    blocks = Blocks.make(count)
    found: dict[str, Any] = {}
    for name, way in WAYS.items():
        if way is batched and not HAS_GPU:
            continue
        try:
            check(blocks, way)
            found[name] = rate(count, partial(way, blocks)) if HAS_GPU else "bytes agree"
        except (ImportError, TypeError, AttributeError, RuntimeError) as error:
            found[name] = f"failed: {type(error).__name__}: {error}"
    if HAS_GPU:
        found |= ceilings(count)
    return found


def ceilings(count: int) -> dict[str, Any]:
    """One contiguous pinned copy of as many bytes: each way, and both at once on two streams."""
    host = [torch.empty(count * PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(len(host[0]), dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both() -> None:
        main_stream = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(main_stream)
        with torch.cuda.stream(streams[0]):
            device[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host[1].copy_(device[1], non_blocking=True)
        for stream in streams:
            main_stream.wait_stream(stream)

    def in_turn() -> None:
        device[0].copy_(host[0], non_blocking=True)
        host[1].copy_(device[1], non_blocking=True)

    return {
        "ceiling: to the device": rate(count, lambda: device[0].copy_(host[0], non_blocking=True)),
        "ceiling: to the host": rate(count, lambda: host[1].copy_(device[1], non_blocking=True)),
        "both ways, one stream": rate(2 * count, in_turn),
        "both ways, two streams": rate(2 * count, both),
    }


def store(results: Results) -> None:
    failed = 0
    # The driver takes no batch for the default stream.
    stream = torch.cuda.stream(torch.cuda.Stream()) if HAS_GPU else nullcontext()
    for count in COUNTS:
        with stream:
            found = one_count(count)
        results.add(f"{count} blocks of one layer", found)
        failed += sum(isinstance(one, str) and one.startswith("failed") for one in found.values())
    results.end(f"{failed} ways failed" if failed else "all ways copy the same bytes")


if __name__ == "__main__":
    main(store)
