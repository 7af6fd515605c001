"""KV memory is taken behind an engine's start, and holds what is written to it."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest
import torch

from loomserve.platform.engine import kv_memory
from loomserve.platform.engine.kv_memory import KvFilling, UntouchedKv
from loomserve.platform.engine.sleeping.memory import give_back_pages
from tests.waiting import within

SIZE = 2**26


def taken(memory: mmap.mmap) -> int:
    """Bytes of it that are there."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    there, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(each, 16) for each in bounds.groups())
            inside = begin < address + len(memory) and address < end
        elif inside and line.startswith("Rss:"):
            there += int(line.split()[1]) * 1024
    return there


@pytest.fixture
def kv() -> tuple[torch.Tensor, mmap.mmap]:
    with UntouchedKv() as made:
        cache = torch.zeros(SIZE, dtype=torch.int8, device=torch.device("cpu"))
    assert made.memory is not None
    return cache, made.memory


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "FIRST_REQUESTS_S", 0.0)


def test_it_is_zero_and_takes_memory_with_the_first_write(
    kv: tuple[torch.Tensor, mmap.mmap],
) -> None:
    cache, memory = kv
    assert cache.shape == (SIZE,)
    assert taken(memory) < SIZE // 8
    cache[: SIZE // 4] = 7
    assert SIZE // 4 <= taken(memory) < SIZE // 2
    assert cache.sum(dtype=torch.int64) == 7 * SIZE // 4


def test_all_else_is_made_as_ever() -> None:
    with UntouchedKv() as made:
        assert torch.zeros(4, 5, dtype=torch.float32).shape == (4, 5)
        assert torch.zeros(4, dtype=torch.int8, device="meta").device.type == "meta"
        assert torch.ones(4, dtype=torch.int8).sum() == 4
    assert made.memory is None


def test_it_is_taken_beside_requests_and_keeps_what_they_wrote(
    kv: tuple[torch.Tensor, mmap.mmap],
) -> None:
    cache, memory = kv
    cache[::4096] = 3
    cache[-1] = 5
    filling = KvFilling(memory)
    filling.begin()
    within(5, lambda: taken(memory) >= SIZE)
    assert cache.sum(dtype=torch.int64) == 3 * SIZE // 4096 + 5
    filling.end()


def test_what_sleeps_takes_none_until_it_is_awake(kv: tuple[torch.Tensor, mmap.mmap]) -> None:
    cache, memory = kv
    filling = KvFilling(memory)
    for _ in range(2):
        filling.begin()
        within(5, lambda: taken(memory) >= SIZE)
        filling.end()
        give_back_pages([cache])
        assert taken(memory) == 0


def test_none_is_taken_before_the_first_requests(
    kv: tuple[torch.Tensor, mmap.mmap], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_memory, "FIRST_REQUESTS_S", 3600.0)
    filling = KvFilling(kv[1])
    filling.begin()
    filling.end()
    assert taken(kv[1]) == 0
