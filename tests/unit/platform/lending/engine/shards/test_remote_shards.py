"""KV that leaves with a shard and is taken back is the same, and what stays is whole meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from loomserve.platform.lending.engine.memory.paged import PagedMemory
from loomserve.platform.lending.engine.shards.heads import (
    RemoteHeads,
    geometry_of_heads,
    room_without_heads,
)
from loomserve.platform.lending.engine.shards.layers import (
    RemoteLayers,
    check_layers,
    decoder_layers,
)
from loomserve.platform.lending.engine.shards.shard import LocalKv
from loomserve.platform.lending.ring.geometry import Geometry
from loomserve.platform.lending.ring.words import RingTask

LAYERS, SIZE, HEAD, GROUP = 3, 4, 2, 2
HEAD_BYTES = 2 * SIZE * HEAD * 4
Rows = tuple[torch.Tensor, torch.Tensor]


@dataclass
class LenderMemory:
    """Stands for a borrower's end of a ring: what is written there by (layer, block)."""

    geometry: Geometry
    most_copied: int = 2
    closed_after: int | None = None
    kept: dict[tuple[int, int], Rows] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)
    tasks: int = 0

    @property
    def ring(self) -> Any:
        return SimpleNamespace(geometry=self.geometry, most_copied=self.most_copied)

    def begin_copy(self, blocks: list[int], work: RingTask) -> None:
        assert 0 < len(blocks) <= self.most_copied
        self.blocks = list(blocks)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, timeout_s: float) -> bool:
        for at, block in enumerate(self.blocks):
            self.kept[layer, block] = key[at].clone(), value[at].clone()
        return self._open()

    def read(self, layer: int, timeout_s: float) -> Rows | None:
        rows = [self.kept[layer, block] for block in self.blocks]
        key, value = (torch.stack(each) for each in zip(*rows, strict=True))
        return (key, value) if self._open() else None

    def _open(self) -> bool:
        self.tasks += 1
        return self.closed_after is None or self.tasks < self.closed_after


def geometry(kv_heads: int, layers: int = LAYERS) -> Geometry:
    return Geometry(layers, GROUP * kv_heads, kv_heads, HEAD, SIZE, "float32", 1.0, "vec")


class FakePages:
    """Pages that are poisoned where they are not mapped, and counted; kept ones come back as they
    were, at other places."""

    def __init__(self, page: int = HEAD_BYTES) -> None:
        self.page = page
        self.kept: list[torch.Tensor] = []
        self.made = 0
        self.mapped: set[int] = set()

    def reserve(self, pages: int) -> torch.Tensor:
        self.memory = torch.full((pages, self.page), 255, dtype=torch.uint8)
        return self.memory.view(-1)

    def map(self, pages: range) -> None:
        for page in pages:
            assert page not in self.mapped
            if not self.kept:
                self.made += 1
            self.memory[page] = self.kept.pop() if self.kept else torch.zeros_like(self.memory[0])
            self.mapped.add(page)

    def unmap(self, pages: range) -> None:
        for page in pages:
            self.mapped.remove(page)
            self.kept.append(self.memory[page].clone())
            self.memory[page] = 255


def local_kv(
    blocks: int,
    of: Geometry,
    numbers: int,
    layers: list[Any] | None = None,
    *,
    heads_apart: bool = False,
    page: int = HEAD_BYTES,
) -> LocalKv:
    """Of each layer so many blocks, with addresses for all numbers behind the first."""
    pages = FakePages(page)
    shape, inner = (of.layers, numbers, of.kv_heads), (SIZE, 2 * HEAD)
    if heads_apart:
        # Each head begins with a page.
        spaced = -(-numbers * HEAD_BYTES // page) * page // HEAD_BYTES
        shape = (of.layers, of.kv_heads, spaced)
    like = torch.empty(*shape, *inner, device="meta")
    memory = PagedMemory(like.nbytes, pages)
    whole = memory.tensor(like)
    own = [each[:blocks] for each in (whole.transpose(1, 2) if heads_apart else whole)]
    for cache in own:
        memory.back(cache)
        cache.normal_()
    return LocalKv(attention() if layers is None else layers, own, memory, numbers, of)


def pages_of(kv: LocalKv) -> FakePages:
    assert isinstance(kv.memory, PagedMemory)
    pages = kv.memory._pages
    assert isinstance(pages, FakePages)
    return pages


def attention() -> list[Any]:
    return [SimpleNamespace(kv_cache=None) for _ in range(LAYERS)]


def halves(cache: torch.Tensor, block: int) -> torch.Tensor:
    """Of a block, [kv_heads, 2 * block_size, head_size]: keys, then values."""
    return cache[block].view(cache.shape[1], 2 * SIZE, HEAD)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    """All KV heads, those that move, the blocks there are, and those in use."""
    heads = draw(st.integers(2, 5))
    blocks = draw(st.integers(1, 12))
    used = draw(st.sets(st.integers(0, blocks - 1), min_size=1))
    return heads, draw(st.integers(1, heads - 1)), blocks, sorted(used)


def test_heads_make_room_by_whole_pages_alone() -> None:
    def room(blocks: int, heads: int, **memory: Any) -> int:
        return room_without_heads(local_kv(blocks, geometry(heads), 99, **memory), 2)

    # 64 bytes a head.
    assert room(10, 3) == 30
    assert room(10, 4) == 20
    assert room(10, 3, page=2 * HEAD_BYTES) == 10
    # Each head has its own pages, of as many blocks.
    assert room(10, 3, heads_apart=True) == 30
    assert room(10, 3, heads_apart=True, page=5 * HEAD_BYTES) == 30
    # Three each, and the two whole ones of both heads that leave.
    assert room(10, 3, heads_apart=True, page=4 * HEAD_BYTES) == 4 * (3 + 2 * 2)
    # Two whole ones are too few for another of each head that stays.
    assert room(3, 5, heads_apart=True, page=2 * HEAD_BYTES) == 2 * 2
    assert room(3, 4, heads_apart=True, page=50 * HEAD_BYTES) == 50


@given(cases(), st.booleans(), st.integers(1, 4), st.booleans())
def test_heads_that_leave_and_come_home_are_as_they_were(
    case: tuple[int, int, int, list[int]], heads_apart: bool, of_page: int, lost: bool
) -> None:
    heads, moved, blocks, used = case
    layers = attention()
    page = of_page * HEAD_BYTES if heads_apart else HEAD_BYTES
    numbers = heads * (blocks + of_page)
    kv = local_kv(blocks, geometry(heads), numbers, layers, heads_apart=heads_apart, page=page)
    own, pages = kv.caches, pages_of(kv)
    before, made = [each.clone() for each in own], pages.made
    mapped = set(pages.mapped)
    lender = LenderMemory(geometry_of_heads(geometry(heads), moved))
    shard = RemoteHeads(kv, lender, 1.0)  # type: ignore[arg-type]

    assert shard.send(used)
    shard.hand_over()
    assert all(len(each) == shard.blocks for each in own)
    if page == HEAD_BYTES:
        assert shard.blocks == blocks * heads // (heads - moved)
    # A layer at a time, if any page is whole.
    pieces = LAYERS if shard.blocks > blocks else 1
    assert [shard.free_memory() for _ in range(pieces)] == [False] * (pieces - 1) + [True]
    for cache in own:
        cache[blocks:] = 5
        assert not cache.isnan().any()
    for layer, block in ((layer, block) for layer in range(LAYERS) for block in used):
        whole = halves(before[layer], block)
        assert torch.equal(halves(own[layer], block), whole[:-moved])
        assert torch.equal(torch.cat(lender.kept[layer, block], dim=1), whole[-moved:])
        assert layers[layer].kv_cache is own[layer]

    if not lost:
        assert [shard.prepare_return() for _ in range(pieces)] == [False] * (pieces - 1) + [True]
        assert shard.fetch(used)
    shard.take_back()
    # No more memory was taken at any time.
    assert (pages.made, pages.mapped) == (made, mapped)
    for now, then in zip(own, before, strict=True):
        assert len(now) == blocks
        assert lost or torch.equal(now[used], then[used])


class Weights:
    """Stands for those of layers: each as large as so many of a layer's blocks, and a bit."""

    def __init__(self, blocks: int, kv_heads: int) -> None:
        self._size = blocks * geometry(kv_heads).layer_block_bytes + 1
        self.released: set[int] = set()

    def size(self, layer: int) -> int:
        return self._size

    def release(self, layer: int) -> None:
        assert layer not in self.released
        self.released.add(layer)

    def restore(self, layer: int) -> None:
        self.released.remove(layer)


@given(st.integers(1, 2), st.integers(0, 5), cases(), st.booleans())
def test_layers_that_leave_and_come_home_are_as_they_were(
    count: int, freed: int, case: tuple[int, int, int, list[int]], lost: bool
) -> None:
    heads, _, blocks, used = case
    numbers = blocks + freed
    layers = attention()
    kv = local_kv(blocks, geometry(heads), numbers, layers)
    own = kv.caches
    before = [each.clone() for each in own]
    modules = nn.ModuleList(nn.Identity() for _ in range(LAYERS))
    at_first = list(modules)
    lender = LenderMemory(geometry(heads, count))
    away = range(1, 1 + count)
    weights = Weights(freed, heads)
    shard = RemoteLayers(
        kv,
        lender,  # type: ignore[arg-type]
        1.0,
        layers=away,
        modules=modules,
        weights=weights,  # type: ignore[arg-type]
    )

    assert shard.send(used)
    assert not weights.released
    shard.hand_over()
    room = (blocks * LAYERS + count * freed) // (LAYERS - count)
    assert len(own[0]) == shard.blocks == min(room, numbers)
    assert torch.equal(own[0][used], before[0][used])
    own[0][blocks:] = 5
    assert not any(own[layer].numel() for layer in away)
    assert [shard.free_memory() for _ in range(count + 1)] == [False] * count + [True]
    assert weights.released == set(away)

    if lost:
        shard.take_back()
        assert list(modules) == at_first
        assert not weights.released
        assert all(now.shape == then.shape for now, then in zip(own, before, strict=True))
        return
    assert [shard.prepare_return() for _ in away] == [False] * (count - 1) + [True]
    assert not weights.released
    assert shard.fetch(used)
    shard.take_back()
    for now, then in zip(own, before, strict=True):
        assert now.shape == then.shape
        assert torch.equal(now[used], then[used])
    assert list(modules) == at_first


@given(cases(), st.data())
def test_blocks_are_copied_here_and_there_while_heads_are_away(
    case: tuple[int, int, int, list[int]], data: st.DataObject
) -> None:
    heads, moved, blocks, used = case
    kv = local_kv(blocks, geometry(heads), heads * blocks)
    own = kv.caches
    before = [each.clone() for each in own]
    lender = LenderMemory(geometry_of_heads(geometry(heads), moved))
    shard = RemoteHeads(kv, lender, 1.0)  # type: ignore[arg-type]
    assert shard.send(used)
    shard.hand_over()
    free = sorted(set(range(shard.blocks)) - set(used))
    targets = data.draw(st.permutations(free))[: len(used)]
    pairs = list(zip(used, targets, strict=False))
    assert shard.copy(pairs)
    for layer, (source, target) in ((layer, pair) for layer in range(LAYERS) for pair in pairs):
        whole = halves(before[layer], source)
        assert torch.equal(halves(own[layer], target), whole[:-moved])
        assert torch.equal(torch.cat(lender.kept[layer, target], dim=1), whole[-moved:])


def test_a_lender_that_is_lost_while_it_is_sent_to_leaves_all_as_it_is() -> None:
    kv = local_kv(4, geometry(3), 4)
    own = kv.caches
    before = [each.clone() for each in own]
    lender = LenderMemory(geometry_of_heads(geometry(3), 1), closed_after=2)
    shard = RemoteHeads(kv, lender, 1.0)  # type: ignore[arg-type]
    assert not shard.send([0, 1, 2])
    assert all(torch.equal(now, then) for now, then in zip(own, before, strict=True))


@pytest.mark.parametrize("heads", [0, 3, 4])
def test_neither_none_nor_all_heads_move(heads: int) -> None:
    with pytest.raises(ValueError, match=f"{heads} of 3 KV heads cannot move"):
        geometry_of_heads(geometry(3), heads)


@pytest.mark.parametrize("layers", [range(0, 3), range(2, 2), range(1, 4), range(-1, 1)])
def test_neither_none_nor_all_nor_other_layers_move(layers: range) -> None:
    with pytest.raises(ValueError, match="at least one must stay"):
        check_layers(layers, geometry(3), 1)


def test_layers_of_an_architecture_that_passes_more_between_them_do_not_move() -> None:
    class Layer(nn.Module):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            return hidden_states + memory

    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList([Layer()])
    with pytest.raises(ValueError, match="cannot move: they take more than hidden states"):
        decoder_layers(model)
