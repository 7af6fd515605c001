"""KV blocks that are copied by batches of addresses, as a GPU's are: the same bytes as one by one.

The copies are made here by the CPU, in the place of CUDA's.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from loomserve.kvstore.engine.transfers import memory as engine_memory
from loomserve.kvstore.engine.transfers.batched_memory import BatchedMemory, memory_of
from loomserve.kvstore.engine.transfers.memory import BlockPieces, CudaStream, KvMemory, pinned
from loomserve.kvstore.storage.checksum import BlockLayout
from tests.unit.kvstore.engine.transfers.test_transfer import (
    BLOCKS,
    LAYER_BYTES,
    LAYERS,
    Engine,
    Store,
    chain,
    random_caches,
    save_of,
)

HEADS, TOKENS, HEAD = 2, 4, 16
# Orders of layers, blocks, heads, tokens and a head's numbers in memory, by vLLM's names.
LAYOUTS = ("LBNHC", "LBHNC", "BLHNC", "BLNHC", "LHBNC")
RUNS = {"LHBNC": HEADS}
"""In which a block's bytes of a layer lie, where it is not one."""


@dataclass
class ByCpu:
    """Makes the copies of a batch, and keeps their sizes."""

    calls: list[list[int]] = field(default_factory=list)

    def __call__(
        self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, /
    ) -> None:
        assert {each.dtype for each in (sources, targets, sizes)} == {torch.int64}
        self.calls.append(sizes.tolist())
        for source, target, size in torch.stack([sources, targets, sizes], 1).tolist():
            ctypes.memmove(target, source, size)


def caches(layout: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """vLLM's views of each layer, ``[blocks, kv_heads, block_size, 2 * head_size]``."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": 2 * HEAD}
    random = torch.Generator().manual_seed(seed)
    whole = torch.randn([sizes[each] for each in layout], generator=random)
    by_layer = whole.permute([layout.index(each) for each in "LBHNC"])
    return {f"layer {number}": by_layer[number] for number in range(LAYERS)}


def slots(layout: BlockLayout, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """All layers' pieces of so many slots in a row, ``[slots, layers, layer_bytes]``."""
    return layout.pieces(np.zeros((count, layout.slot_bytes), np.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_names_each_block_and_its_piece_of_the_layer(layout: str) -> None:
    views = caches(layout)
    memory = BatchedMemory(views, ByCpu())
    pieces = slots(BlockLayout(LAYERS, memory.layer_bytes), 5)
    runs = [BlockPieces(7, pieces[:3, 1]), BlockPieces(0, pieces[3:, 1])]
    blocks = [7, 8, 9, 0, 1]
    heads = range(RUNS.get(layout, 1))
    assert memory.blocks_at(1, runs).tolist() == [
        views["layer 1"][block, head].data_ptr() for block in blocks for head in heads
    ]
    assert memory.pieces_at(runs).tolist() == [
        piece.ctypes.data for slot in range(5) for piece in np.split(pieces[slot, 1], len(heads))
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_batches_copy_is_what_copies_one_by_one_do(layout: str) -> None:
    copy = ByCpu()
    batched, plain = BatchedMemory(caches(layout, 1), copy), KvMemory(caches(layout, 1))
    assert (batched.layers, batched.layer_bytes) == (plain.layers, plain.layer_bytes)
    mine, theirs = (slots(BlockLayout(LAYERS, plain.layer_bytes), 6) for _ in range(2))
    for layer in range(LAYERS):
        for memory, pieces in ((batched, mine), (plain, theirs)):
            runs = [BlockPieces(10, pieces[:2, layer]), BlockPieces(3, pieces[2:, layer])]
            memory.to_host(layer, runs)
            assert memory.equals_host(layer, runs)
            # And into other blocks.
            memory.from_host(layer, [BlockPieces(0, pieces[:3, layer])])
    assert mine.tobytes() == theirs.tobytes()
    assert mine.any()
    for own, other in zip(batched._rows, plain._rows, strict=True):
        assert torch.equal(own, other)
    # Out, compared, in: one call each.
    runs_of = RUNS.get(layout, 1)
    of = [batched.layer_bytes // runs_of] * runs_of
    assert copy.calls == [6 * of, 6 * of, 3 * of] * LAYERS
    mine[5, 0, -1] ^= 1
    runs = [BlockPieces(12, mine[4:, 0])]
    assert not batched.equals_host(0, runs)


@pytest.mark.parametrize("saver", ["batched", "plain"])
def test_blocks_go_between_batches_and_copies_one_by_one(store: Store, saver: str) -> None:
    copy = ByCpu()

    def make(views: Mapping[str, torch.Tensor]) -> KvMemory:
        return BatchedMemory(views, copy)

    batched, plain = Engine(store, 1, make=make), Engine(store, 2)
    one, other = (batched, plain) if saver == "batched" else (plain, batched)
    values = random_caches(3)
    one.save([save_of("a", [7, 2, 9, 0, 4]), save_of("b", [15, 1])], values)
    store.settled()
    loads = [store.load(chain("a", 5), [1, 3, 5, 7, 15]), store.load(chain("b", 2), [0, 2])]
    assert other.load(loads) == set()
    assert torch.equal(other.caches[:, [1, 3, 5, 7, 15, 0, 2]], values[:, [7, 2, 9, 0, 4, 15, 1]])
    if saver == "batched":  # of few bytes all layers in a call, and one to compare them
        assert copy.calls == [[LAYER_BYTES] * 7 * LAYERS] * 2
    else:
        assert copy.calls == [[LAYER_BYTES] * 7] * LAYERS
    for engine in (batched, plain):
        engine.close()


def test_a_batch_has_no_more_bytes_than_its_memory_says(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = ByCpu()
    monkeypatch.setattr(BatchedMemory, "copy_bytes", 3 * LAYER_BYTES)
    engine = Engine(store, 1, make=lambda views: BatchedMemory(views, copy))
    # Runs of two, one, one and four blocks.
    engine.save([save_of("a", [1, 2, 5, 7, 9, 10, 11, 12])])
    store.settled()
    assert sum(map(sum, copy.calls)) == 2 * LAYERS * 8 * LAYER_BYTES
    assert max(map(len, copy.calls)) == 3
    assert len(copy.calls) < 2 * LAYERS * 8
    engine.close()


@pytest.mark.parametrize("apart", [64, 66], ids=["aligned", "not aligned"])
def test_blocks_are_gathered_whatever_lies_between_them(apart: int) -> None:
    cache = torch.randn(BLOCKS, apart).to(torch.bfloat16)[:, :64]
    memory = BatchedMemory({"layer": cache}, ByCpu())
    beside = memory.beside(5)
    beside.take(memory, [7, 0, 9], 1)
    pieces = slots(BlockLayout(1, memory.layer_bytes), 3)
    beside.to_host(0, [BlockPieces(1, pieces[:, 0])])
    assert (
        pieces[:, 0].tobytes() == cache[[7, 0, 9]].contiguous().view(torch.uint8).numpy().tobytes()
    )


@pytest.mark.parametrize("layout", [*LAYOUTS, "apart", "unequally apart"])
def test_blocks_of_all_layers_are_gathered_wherever_those_lie(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layout in LAYOUTS:
        views = caches(layout)
    else:
        whole = caches("LBNHC")
        order = (0, 2, 1) if layout == "unequally apart" else (0, 1, 2)
        views = {name: whole[f"layer {of}"] for name, of in zip(whole, order, strict=True)}
        if layout == "apart":
            views = {name: view.clone() for name, view in views.items()}
    memory = BatchedMemory(views, ByCpu())
    beside = memory.beside(6)
    calls: list[int] = []
    gather = torch.index_select
    monkeypatch.setattr(
        torch, "index_select", lambda *of, **to: (calls.append(of[1]), gather(*of, **to))
    )
    beside.take(memory, [7, 0, 9], 2)
    assert len(calls) == (1 if layout in LAYOUTS else LAYERS)
    for mine, theirs in zip(beside._rows, memory._rows, strict=True):
        assert torch.equal(mine[2:5], theirs[[7, 0, 9]])


def test_memory_of_a_cpu_is_copied_without_addresses() -> None:
    assert type(memory_of(caches("LBNHC"))) is KvMemory


# CUDA's own calls, of which stand-ins take a note: there is no GPU here.


class Cuda:
    """Notes what is asked of CUDA's streams and events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: self)
        monkeypatch.setattr(torch.cuda, "Event", lambda **how: Event(self.said, **how))
        monkeypatch.setattr(torch.cuda, "stream", lambda _: Current(self.said))
        step = SimpleNamespace(wait_event=lambda event: self.said.append("the step waits"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: step)

    def wait_event(self, event: Event) -> None:
        self.said.append(f"copies wait for {event.name}")


class Event:
    def __init__(self, said: list[str], *, blocking: bool = False) -> None:
        self.name = "copies" if blocking else "the step"
        self._said = said

    def record(self, *stream: Cuda) -> None:
        self._said.append(f"{self.name} recorded" + " on the copies' stream" * len(stream))

    def synchronize(self) -> None:
        self._said.append(f"waited for {self.name}")


class Current:
    def __init__(self, said: list[str]) -> None:
        self._said = said
        said.append("made")

    def __enter__(self) -> None:
        self._said.append("entered")

    def __exit__(self, *exception: object) -> None:
        self._said.append("left")


def test_copies_come_after_the_step_and_only_they_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda(monkeypatch)
    stream = CudaStream(torch.device("cuda", 0))
    mark = stream.mark()
    assert cuda.said == ["the step recorded"]
    # torch's context is made by the thread that copies, for each of its turns.
    for _ in range(2):
        cuda.said.clear()
        with stream:
            stream.wait(mark)
            stream.settle()
        assert cuda.said == [
            "made",
            "entered",
            "copies wait for the step",
            "copies recorded on the copies' stream",
            "waited for copies",
            "left",
        ]


def test_a_step_waits_for_copies_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    CudaStream(torch.device("cuda", 0)).hold()
    assert cuda.said == ["the step recorded on the copies' stream", "the step waits"]


@pytest.mark.parametrize("error", [0, 2])
def test_an_arena_is_pinned_until_its_mapping_goes(
    error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[tuple[object, ...]] = []

    def register(*given: int) -> SimpleNamespace:
        called.append(("on", *given))
        return SimpleNamespace(value=error)

    cudart = SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=lambda *given: called.append(("off", *given)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    with pinned(torch.device("cpu"), 4096, 8192):
        assert called == []
    with (
        caplog.at_level(logging.WARNING, engine_memory.__name__),
        pinned(torch.device("cuda", 0), 4096, 8192),
    ):
        assert called == [("on", 4096, 8192, 0)]
    assert called[1:] == ([] if error else [("off", 4096)])
    assert ("cannot be pinned (CUDA error 2)" in caplog.text) == bool(error)
