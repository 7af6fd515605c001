"""Part of an engine's attention that a lender keeps and computes: what its worker does for any."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from loomserve.platform.lending.ring.borrower import Borrower
from loomserve.platform.lending.ring.ring import RingTask


def room(blocks: int, shares: int, moved: int, freed: int = 0) -> int:
    """How many blocks there is room for where so many were, once ``moved`` of each block's equal
    ``shares`` have left, and as much memory else as ``freed`` shares take."""
    return (blocks * shares + freed) // (shares - moved)


class RemoteShard(ABC):
    """Of one worker and one lender. Until :meth:`leave` nothing is computed elsewhere.

    Args:
        attention: vLLM's attention layers, in order.
        kv_caches: the model runner's, a layer each, [blocks, kv_heads, block_size, 2 * head_size];
            they are replaced while the part is away.
        release: lets go of the memory of some blocks' parts, which are zero from then on.
        numbers: of blocks that there is address space for behind the first of each layer.
        borrower: its ring has the geometry of the part that moves, and a block of it for each block
            here, under the same number.
        patience_s: after which the lender is given up.
    """

    def __init__(
        self,
        attention: Sequence[Any],
        kv_caches: list[torch.Tensor],
        release: Callable[[torch.Tensor], None],
        numbers: int,
        borrower: Borrower,
        patience_s: float,
    ) -> None:
        self.borrower = borrower
        self._attention = attention
        self._kv_caches = kv_caches
        self._whole = list(kv_caches)
        self._release = release
        self._numbers = numbers
        self._patience_s = patience_s
        self._whole_blocks = len(kv_caches[0])

    @property
    def blocks(self) -> int:
        """That there is room for here while the part is away."""
        return min(room(self._whole_blocks, *self._shares), self._numbers)

    @property
    @abstractmethod
    def _shares(self) -> tuple[int, int, int]:
        """Of how many equal shares of a block how many move, and how many else there is room for
        then."""

    def send(self, blocks: Sequence[int]) -> bool:
        """Copy the part's share of these blocks to the lender; False if its ring has closed."""
        return all(self._send(some) for some in self._some(blocks))

    def fetch(self, blocks: Sequence[int]) -> bool:
        """Copy the part's share of these blocks back, beside what is in use; False as above."""
        return all(self._fetch(some) for some in self._some(blocks))

    @abstractmethod
    def leave(self) -> None:
        """Have the lender compute the part from now on; all KV has been sent."""

    @abstractmethod
    def let_go(self) -> bool:
        """Give back some of the memory that the part took here; whether that was the last of it."""

    def prepare_home(self) -> bool:
        """Do a step's worth of what coming home needs beside KV; whether all of it is done."""
        return True

    def come_home(self) -> None:
        """Compute the part here from now on; all KV has been fetched, or is lost."""
        for layer, whole in enumerate(self._whole):
            self._release(self._longer(layer)[self._whole_blocks :])
            self._use(layer, whole)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """Copy each pair's first block onto its second, here and there, while the part is away;
        False if the lender's ring has closed."""
        self._copy_here([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        return all(
            self._copy_there([pair[0] for pair in some], [pair[1] for pair in some])
            for some in self._some(pairs)
        )

    # Whole blocks, while the part is away

    @property
    def layers_here(self) -> frozenset[int]:
        """Layers that are computed here, at least in part."""
        return frozenset(range(len(self._kv_caches)))

    @abstractmethod
    def write_whole(self, layer: int, blocks: range, rows: torch.Tensor) -> bool:
        """Put one layer of whole blocks where their parts are.

        Args:
            layer: from 0.
            blocks: no more than ``borrower.ring.most_copied``.
            rows: [blocks, kv_heads, 2 * block_size, head_size].

        Returns:
            False if the lender's ring has closed.
        """

    @abstractmethod
    def read_whole(self, layer: int, blocks: range, rows: torch.Tensor) -> bool:
        """Fill ``rows`` with one layer of whole blocks; arguments and result as above."""

    def _write_there(self, number: int, blocks: range, rows: torch.Tensor) -> bool:
        """One of the borrower's layers."""
        key, value = rows.chunk(2, dim=2)
        self.borrower.begin_copy(blocks, RingTask.WRITE)
        done = self.borrower.write(number, key, value, self._patience_s)
        self.borrower.resume_step()
        return done

    def _read_there(self, number: int, blocks: range, rows: torch.Tensor) -> bool:
        self.borrower.begin_copy(blocks, RingTask.READ)
        found = self.borrower.read(number, self._patience_s)
        if found is not None:
            torch.cat(found, dim=2, out=rows)
        self.borrower.resume_step()
        return found is not None

    @abstractmethod
    def _moved(self, number: int) -> torch.Tensor:
        """Of the part in one of the borrower's layers, the memory that it has at home, [blocks,
        kv_heads, 2 * block_size, head_size]."""

    def _send(self, blocks: list[int]) -> bool:
        self.borrower.begin_copy(blocks, RingTask.WRITE)
        for number in range(self.borrower.ring.geometry.layers):
            key, value = self._moved(number)[blocks].chunk(2, dim=2)
            if not self.borrower.write(number, key, value, self._patience_s):
                return False
        return True

    def _fetch(self, blocks: list[int]) -> bool:
        self.borrower.begin_copy(blocks, RingTask.READ)
        for number in range(self.borrower.ring.geometry.layers):
            rows = self.borrower.read(number, self._patience_s)
            if rows is None:
                return False
            self._moved(number)[blocks] = torch.cat(rows, dim=2)
        return True

    def _copy_here(self, sources: list[int], targets: list[int]) -> None:
        for layer in self.layers_here:
            cache = self._kv_caches[layer]
            cache[targets] = cache[sources]

    def _copy_there(self, sources: list[int], targets: list[int]) -> bool:
        borrower, layers = self.borrower, range(self.borrower.ring.geometry.layers)
        # The ring's areas hold one task, so what is read leaves it before it is written.
        borrower.begin_copy(sources, RingTask.READ)
        read = []
        for layer in layers:
            rows = borrower.read(layer, self._patience_s)
            if rows is None:
                return False
            read.append((rows[0].clone(), rows[1].clone()))
        borrower.begin_copy(targets, RingTask.WRITE)
        return all(borrower.write(layer, *read[layer], self._patience_s) for layer in layers)

    def _longer(self, layer: int) -> torch.Tensor:
        """A layer's cache with more blocks behind those that there are without the part."""
        whole = self._whole[layer]
        return whole.as_strided((self.blocks, *whole.shape[1:]), whole.stride())

    def _here(self, layer: int) -> torch.Tensor:
        return self._by_part(self._kv_caches[layer])

    def _by_part(self, cache: torch.Tensor) -> torch.Tensor:
        """As keys and values of a head, one behind the other."""
        blocks, heads, size, both = cache.shape
        return cache.view(blocks, heads, 2 * size, both // 2)

    def _use(self, layer: int, cache: torch.Tensor) -> None:
        self._kv_caches[layer] = cache
        self._attention[layer].kv_cache = cache

    def _some(self, blocks: Sequence[Any]) -> list[list[Any]]:
        most = self.borrower.ring.most_copied
        return [list(blocks[at : at + most]) for at in range(0, len(blocks), most)]
