"""KV memory by the page: what it takes when heads leave and their memory becomes more blocks.

A few layers of Llama-3-8B's KV, laid out head by head. Half of the heads' memory is given back and
mapped behind the other heads' blocks, layer by layer, as an engine does between its steps. Without
a GPU the pages are the host's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.gpu.host_memory import HostPages
from benchmarks.gpu.step import DEVICE, HAS_GPU, Results, main, spread, times_us

# isort: split
import torch

from loomserve.platform.lending.device.pages import CudaPages
from loomserve.platform.lending.engine.memory.paged import PagedMemory

LAYERS, BLOCKS = (4, 8192) if HAS_GPU else (2, 32)
HEADS, TOKENS, CONTENT = 8, 16, 256
KEPT = HEADS // 2
QUEUED = 200
"""Products of a running step, some milliseconds of them."""


class Kv:
    """Addresses for twice as many blocks as there is memory for."""

    def __init__(self) -> None:
        like = torch.empty(
            (LAYERS, HEADS, 2 * BLOCKS, TOKENS, CONTENT), dtype=torch.bfloat16, device="meta"
        )
        self.memory = PagedMemory(like.nbytes, CudaPages() if HAS_GPU else HostPages())
        self.caches = self.memory.tensor(like).transpose(1, 2)
        self.pages = self.caches[0, :BLOCKS].nbytes // self.memory.page
        """Of a layer's own blocks."""

    def begin(self, layer: int) -> None:
        self.memory.back(self.caches[layer, :BLOCKS])

    def leave(self, layer: int) -> None:
        self.memory.release(self.caches[layer, :BLOCKS, KEPT:])
        self.memory.back(self.caches[layer, BLOCKS:, :KEPT])

    def come_home(self, layer: int) -> None:
        self.memory.release(self.caches[layer, BLOCKS:, :KEPT])
        self.memory.back(self.caches[layer, :BLOCKS, KEPT:])


def each_layer_ms(work: Callable[[int], None], step: Callable[[], None]) -> list[float]:
    """Milliseconds of the host for each layer, right behind what ``step`` queues."""
    taken = []
    for layer in range(LAYERS):
        step()
        begin = time.perf_counter()
        work(layer)
        taken.append(1e3 * (time.perf_counter() - begin))
    return taken


def nothing() -> None:
    """No step runs."""


def products() -> Callable[[], None]:
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device=DEVICE)

    def queue() -> None:
        for _ in range(QUEUED):
            matrix @ matrix

    return queue


def check(kv: Kv, blocks: range, heads: range, number: int) -> None:
    held = kv.caches[:, blocks.start : blocks.stop, heads.start : heads.stop]
    if not bool((held == number).all()):
        raise RuntimeError(f"heads {heads} of blocks {blocks} do not hold what was written there")


def pages(results: Results) -> None:
    kv, own, more = Kv(), range(BLOCKS), range(BLOCKS, 2 * BLOCKS)
    step = products() if HAS_GPU else nothing
    times = {"new": each_layer_ms(kv.begin, nothing)}
    kv.caches[:, :BLOCKS].fill_(1)
    times["heads leave"] = each_layer_ms(kv.leave, nothing)
    kv.caches[:, BLOCKS:, :KEPT].fill_(2)
    check(kv, own, range(KEPT), 1)
    check(kv, more, range(KEPT), 2)
    times["heads come home"] = each_layer_ms(kv.come_home, nothing)
    kv.caches[:, :BLOCKS, KEPT:].fill_(3)
    check(kv, own, range(KEPT), 1)
    check(kv, own, range(KEPT, HEADS), 3)
    if not HAS_GPU:
        results.end(f"{kv.pages} pages of {kv.memory.page} bytes a layer; heads left and came home")
        return
    times["heads leave behind a step"] = each_layer_ms(kv.leave, step)
    kv.come_home(0)
    results.add("page, bytes", kv.memory.page)
    results.add("pages of a layer", kv.pages)
    results.add("a layer, ms", {name: spread(values) for name, values in times.items()})
    results.add("a step, ms", times_us(step)["median"] / 1e3)
    # Memory by the page is no slower than torch's, or engines pay for it in each step.
    held = kv.caches[0, :BLOCKS, 0]
    plain, target = torch.empty_like(held), torch.empty_like(held)
    results.add("a copy of a head by the page, us", times_us(lambda: target.copy_(held)))
    results.add("a copy of a head of torch's memory, us", times_us(lambda: target.copy_(plain)))
    leave = spread(times["heads leave"])["median"]
    results.end(f"{leave:.2f} ms a layer of {kv.pages} pages when half of the heads leave")


if __name__ == "__main__":
    main(pages)
