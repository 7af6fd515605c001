"""KV memory of a device whose driver maps pages into addresses on demand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch

from loomserve.platform.lending.device.pages import Pages
from loomserve.platform.lending.engine.memory.mapped import runs, view_as


class PagedMemory:
    """Addresses for ``nbytes``, of which only those that are backed may be read or written. Pages
    that are given back are kept for those that are backed later, so no one else takes them before a
    shard comes home; what they held is there still."""

    def __init__(self, nbytes: int, pages: Pages) -> None:
        self.page = pages.page
        self._pages = pages
        self._backed: set[int] = set()
        self._most = 0
        self._bytes = pages.reserve(-(-nbytes // self.page)).view(torch.int8)

    @property
    def nbytes(self) -> int:
        """Memory that it has, mapped or kept."""
        return self._most * self.page

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        return view_as(self._bytes, like)

    def back(self, rows: torch.Tensor) -> None:
        missing = {
            page
            for begin, end in runs(rows)
            for page in range(begin // self.page, -(-end // self.page))
        } - self._backed
        for some in _together(missing):
            self._pages.map(some)
        self._backed |= missing
        self._most = max(self._most, len(self._backed))

    def release(self, rows: torch.Tensor) -> None:
        whole = {
            page
            for begin, end in runs(rows)
            for page in range(-(-begin // self.page), end // self.page)
        } & self._backed
        for some in _together(whole):
            self._pages.unmap(some)
        self._backed -= whole


def _together(pages: set[int]) -> Iterator[range]:
    """Yield the runs of consecutive numbers."""
    for _, run in groupby(enumerate(sorted(pages)), lambda each: each[1] - each[0]):
        numbers = [number for _, number in run]
        yield range(numbers[0], numbers[-1] + 1)
