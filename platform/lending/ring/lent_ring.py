"""A task ring as its lender maps it, with a page of which no borrower knows."""

from __future__ import annotations

import mmap
import os
from io import FileIO
from pathlib import Path
from typing import Self

import torch

from loomserve.platform.base.errors import StartError
from loomserve.platform.lending.ring.geometry import Geometry
from loomserve.platform.lending.ring.held import hold
from loomserve.platform.lending.ring.ring import Ring
from loomserve.platform.lending.ring.words import LINE_WORDS, ControlLine, RingStats

_PAGE = 4096
GRANTED, STATS = 0, 1
"""Words of the page: what the lender grants, and the first of its counters in the order of
:class:`RingStats`."""


class LentRing(Ring):
    """The lender's view: what it grants and counts stands in a page that its worker and its
    scheduler alone map, and on the ring as a copy for the borrower. The worker makes it, and the
    scheduler attaches, upon which the page's name is removed."""

    own: torch.Tensor
    """The page, int64; gone after :meth:`close`."""

    def __init__(self, path: Path, file: FileIO) -> None:
        super().__init__(path, file)
        page = _page(path)
        try:
            with FileIO(page, "r+") as own:
                hold(own)
                mapping = mmap.mmap(own.fileno(), _PAGE)
        except (OSError, ValueError) as error:
            raise StartError(f"cannot map the lender's page {page}: {error}") from error
        self.own_words = memoryview(mapping).cast("q")
        self.own = torch.frombuffer(mapping, dtype=torch.int64, count=LINE_WORDS)

    @classmethod
    def create(
        cls, path: Path, geometry: Geometry, max_tokens: int, max_requests: int, max_blocks: int
    ) -> Self:
        page = _page(path)
        page.unlink(missing_ok=True)
        try:
            with FileIO(page, "x+", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                os.posix_fallocate(file.fileno(), 0, _PAGE)
            return super().create(path, geometry, max_tokens, max_requests, max_blocks)
        except BaseException:
            page.unlink(missing_ok=True)
            raise

    @classmethod
    def attach(cls, path: Path) -> Self:
        ring = super().attach(path)
        _page(path).unlink(missing_ok=True)
        return ring

    def close(self) -> None:
        super().close()
        self.own_words.release()
        self.__dict__.pop("own", None)

    def unlink(self) -> None:
        super().unlink()
        _page(self.path).unlink(missing_ok=True)

    @property
    def granted(self) -> int:
        """Blocks of the loan that the borrower may use now, whatever the ring says."""
        return self.own_words[GRANTED]

    @granted.setter
    def granted(self, blocks: int) -> None:
        self.own_words[GRANTED] = blocks
        self.words[ControlLine.GRANTED * LINE_WORDS] = blocks

    def stats(self) -> RingStats:
        """The borrower's counts as it shows them, and the lender's own."""
        return RingStats(*super().stats()[:4], *self.own_words[STATS : STATS + 4])


def _page(path: Path) -> Path:
    return path.with_name(f"{path.name}.lender")
