"""KV memory that is taken when it is written, and given back in parts."""

from __future__ import annotations

import mmap

import psutil
import torch

from loomserve.platform.lending.engine.memory.mapped import MappedMemory

PAGES = 4096


def test_zeros_take_memory_when_they_are_written_and_give_it_back_in_parts() -> None:
    memory, process = MappedMemory(), psutil.Process()
    with memory:
        taken = torch.zeros(PAGES * mmap.PAGESIZE, dtype=torch.int8)
        other = torch.ones(8)
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
    assert other.sum() == 8


def test_a_page_that_is_released_in_part_stays() -> None:
    memory = MappedMemory()
    with memory:
        taken = torch.zeros(3 * mmap.PAGESIZE // 2, dtype=torch.float16)
    taken.fill_(1)
    memory.release(taken[8 : mmap.PAGESIZE + 8])
    first, second, third = taken.view(3, -1)
    assert (first == 1).all()
    assert not second.any()
    assert (third == 1).all()
    memory.release(taken[:0])
    assert first.sum() == mmap.PAGESIZE // 2
