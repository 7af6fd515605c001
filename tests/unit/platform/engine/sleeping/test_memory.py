"""Pages of tensors are given back, and are zero afterwards."""

from __future__ import annotations

import mmap

import psutil
import pytest
import torch

from loomserve.platform.engine.sleeping.memory import give_back_pages

MIB = 2**20


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def test_written_pages_are_given_back_and_read_as_zeros_and_can_be_written_again() -> None:
    whole = torch.zeros(64 * MIB, dtype=torch.int8)
    layers = [whole[: 32 * MIB].view(torch.float32), whole[32 * MIB :].view(torch.float32)]
    for layer in layers:
        layer.fill_(1.5)
    before = resident()
    given = give_back_pages(layers)
    assert 64 * MIB - 2 * mmap.PAGESIZE <= given <= 64 * MIB
    assert before - resident() > 56 * MIB
    # The ends of the allocation may share a page with something else.
    within = whole[mmap.PAGESIZE : -mmap.PAGESIZE]
    assert not within.any()
    layers[0].fill_(2.5)
    assert float(layers[0].sum()) == pytest.approx(2.5 * layers[0].numel())


def test_what_lies_in_lists_counts_and_what_shares_an_allocation_counts_once() -> None:
    one = torch.ones(4 * MIB, dtype=torch.int8)
    other = torch.ones(4 * MIB, dtype=torch.int8)
    given = give_back_pages([[one, one[MIB:]], [[other]]])
    assert given <= 8 * MIB
    assert given > 7 * MIB
    assert not one[mmap.PAGESIZE : -mmap.PAGESIZE].any()


def test_what_is_less_than_a_page_stays() -> None:
    small = torch.ones(16, dtype=torch.int8)
    assert give_back_pages([small]) == 0
    assert bool(small.all())
    assert give_back_pages([]) == 0
