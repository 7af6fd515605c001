"""KV memory takes pages when they are written, and gives back any of them."""

from __future__ import annotations

import mmap
import random

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.lending.engine.memory.mapped import MappedMemory, runs

PAGES = 4096
CPU = torch.device("cpu")


def test_zeros_take_memory_when_they_are_written_and_give_it_back_in_parts() -> None:
    memory, process = MappedMemory(PAGES * mmap.PAGESIZE, CPU), psutil.Process()
    taken = memory.tensor(torch.empty(PAGES * mmap.PAGESIZE, dtype=torch.int8, device="meta"))
    before = process.memory_info().rss
    rows = taken.view(4, -1)
    assert not rows[1].any()
    rows.fill_(7)
    full = process.memory_info().rss
    assert full - before > rows[1:].nbytes
    memory.release(rows[1:3])
    assert full - process.memory_info().rss > rows[1].nbytes
    assert not rows[1:3].any()
    assert (rows[0] == 7).all()
    assert (rows[3] == 7).all()


def test_a_page_that_is_released_in_part_stays() -> None:
    memory = MappedMemory(3 * mmap.PAGESIZE, CPU)
    taken = memory.tensor(torch.empty(3 * mmap.PAGESIZE // 2, dtype=torch.float16, device="meta"))
    taken.fill_(1)
    memory.release(taken[8 : mmap.PAGESIZE + 8])
    first, second, third = taken.view(3, -1)
    assert (first == 1).all()
    assert not second.any()
    assert (third == 1).all()
    memory.release(taken[:0])
    assert first.sum() == mmap.PAGESIZE // 2


def test_a_tensor_lies_where_the_one_that_it_is_like_would_lie() -> None:
    memory = MappedMemory(2 * mmap.PAGESIZE, CPU)
    whole = memory.tensor(torch.empty(mmap.PAGESIZE, dtype=torch.float16, device="meta"))
    planned = torch.empty(mmap.PAGESIZE, dtype=torch.float16, device="meta")
    every_other = memory.tensor(planned[7:].as_strided((3, 2), (4, 1), 7))
    every_other.fill_(1)
    assert whole.nonzero().flatten().tolist() == [7, 8, 11, 12, 15, 16]
    assert every_other.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_an_engine_on_a_gpu_gets_no_memory_of_the_host_in_its_place() -> None:
    with pytest.raises(ValueError, match="of the host, and this engine on cuda:0"):
        MappedMemory(mmap.PAGESIZE, torch.device("cuda", 0))


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.data(),
)
def test_the_runs_of_a_view_are_its_bytes_and_no_others(
    shape: list[int], order: random.Random, data: st.DataObject
) -> None:
    dimensions = list(range(len(shape)))
    order.shuffle(dimensions)
    whole = torch.zeros(shape, dtype=torch.int16)
    view = whole.permute(dimensions)
    for dimension, size in enumerate(view.shape):
        first = data.draw(st.integers(0, size))
        view = view.narrow(dimension, first, data.draw(st.integers(0, size - first)))
    view.fill_(-1)
    found = torch.zeros(2 * whole.numel(), dtype=torch.bool)
    for begin, end in runs(view):
        assert not found[begin:end].any()
        found[begin:end] = True
    assert torch.equal(found, whole.view(-1).view(torch.uint8) == 255)


def test_blocks_that_lie_together_are_one_run() -> None:
    by_head = torch.zeros(3, 5, 4, 2).transpose(0, 1)
    assert list(runs(by_head)) == [(0, by_head.nbytes)]
    assert len(list(runs(by_head[:, 1:]))) == 1
    assert len(list(runs(by_head[:2]))) == 3
