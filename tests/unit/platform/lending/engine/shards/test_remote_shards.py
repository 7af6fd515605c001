"""KV that leaves with a shard and is taken back is the same, and what stays is whole meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from loomserve.platform.lending.engine.memory.mapped import page_bytes
from loomserve.platform.lending.engine.shards import heads as remote_heads
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
from loomserve.platform.lending.ring.ring import RingTask

LAYERS, SIZE, HEAD, GROUP = 3, 4, 2, 2
CPU = torch.device("cpu")
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


def caches(blocks: int, kv_heads: int, numbers: int) -> list[torch.Tensor]:
    """Of each layer so many blocks, with room for all numbers behind the first."""
    shape = (numbers, kv_heads, SIZE, 2 * HEAD)
    return [torch.randn(shape)[:blocks] for _ in range(LAYERS)]


def zero(rows: torch.Tensor) -> None:
    rows.zero_()


def heads_of(
    layers: list[Any], own: list[torch.Tensor], of: Geometry, lender: LenderMemory
) -> RemoteHeads:
    numbers = own[0].untyped_storage().nbytes() // own[0][0].nbytes
    kv = LocalKv(layers, own, zero, numbers, of)
    return RemoteHeads(kv, lender, 1.0)  # type: ignore[arg-type]


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


@pytest.fixture(autouse=True, scope="module")
def small_pages() -> Iterator[None]:
    """Only whole ones are given back."""
    with patch.object(remote_heads, "page_bytes", lambda _: 2 * SIZE * HEAD * 4):
        yield


def test_heads_that_share_pages_with_others_make_no_room() -> None:
    with patch.object(remote_heads, "page_bytes", lambda _: 4 * SIZE * HEAD * 4):
        assert room_without_heads(10, geometry(3), 2, CPU) == 10
    assert room_without_heads(10, geometry(3), 2, CPU) == 30


def test_heads_make_no_room_on_a_gpu_whose_pages_hold_many_of_them() -> None:
    # 32 tokens of 128 numbers, keys and values, in float32: 32 KiB a head.
    of = Geometry(4, 8, 4, 128, 32, "float32", 1.0, "vec")
    with patch.object(remote_heads, "page_bytes", page_bytes):
        assert room_without_heads(12, of, 2, CPU) == 24
        assert room_without_heads(12, of, 2, torch.device("cuda")) == 12


@given(cases())
def test_heads_that_leave_and_come_home_are_as_they_were(
    case: tuple[int, int, int, list[int]],
) -> None:
    heads, moved, blocks, used = case
    own, layers = caches(blocks, heads, heads * blocks), attention()
    before = [each.clone() for each in own]
    lender = LenderMemory(geometry_of_heads(geometry(heads), moved))
    shard = heads_of(layers, own, geometry(heads), lender)

    assert shard.send(used)
    shard.hand_over()
    assert all(len(each) == shard.blocks == blocks * heads // (heads - moved) for each in own)
    assert [shard.free_memory() for _ in range(LAYERS)] == [False] * (LAYERS - 1) + [True]
    for cache in own:
        cache[blocks:] = 5
    for layer, block in ((layer, block) for layer in range(LAYERS) for block in used):
        whole = halves(before[layer], block)
        assert torch.equal(halves(own[layer], block), whole[:-moved])
        assert torch.equal(torch.cat(lender.kept[layer, block], dim=1), whole[-moved:])
        assert layers[layer].kv_cache is own[layer]

    assert shard.fetch(used)
    shard.take_back()
    for now, then in zip(own, before, strict=True):
        assert torch.equal(now[used], then[used])


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
    own, layers = caches(blocks, heads, numbers), attention()
    before = [each.clone() for each in own]
    modules = nn.ModuleList(nn.Identity() for _ in range(LAYERS))
    at_first = list(modules)
    lender = LenderMemory(geometry(heads, count))
    away = range(1, 1 + count)
    weights = Weights(freed, heads)
    shard = RemoteLayers(
        LocalKv(layers, own, zero, numbers, geometry(heads)),
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
    own = caches(blocks, heads, heads * blocks)
    before = [each.clone() for each in own]
    lender = LenderMemory(geometry_of_heads(geometry(heads), moved))
    shard = heads_of(attention(), own, geometry(heads), lender)
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
    own = caches(4, 3, 4)
    before = [each.clone() for each in own]
    lender = LenderMemory(geometry_of_heads(geometry(3), 1), closed_after=2)
    shard = heads_of(attention(), own, geometry(3), lender)
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
