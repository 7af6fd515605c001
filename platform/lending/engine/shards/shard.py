"""A shard of an engine's attention that a lender computes, as the engine's worker sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loomserve.platform.lending.engine.memory.lent import keys_and_values
from loomserve.platform.lending.engine.memory.mapped import AddressSpace
from loomserve.platform.lending.ring.borrower import Borrower
from loomserve.platform.lending.ring.geometry import Geometry
from loomserve.platform.lending.ring.words import RingTask


def room(blocks: int, shares: int, remote: int, freed: int = 0) -> int:
    """Return how many blocks fit into the memory of ``blocks`` once a shard has left it: ``remote``
    of the ``shares`` equal ones of each block, and other memory, ``freed``, in such shares."""
    return (blocks * shares + freed) // (shares - remote)


@dataclass(frozen=True)
class LocalKv:
    """An engine's own KV memory, and the attention layers that use it. ``caches`` are the model
    runner's, one a layer, ``[blocks, kv_heads, block_size, 2 * head_size]``, whose entries are
    replaced while a shard is away. They lie in ``memory``; each layer has address space for
    ``numbers`` blocks."""

    attention: Sequence[Any]
    caches: list[torch.Tensor]
    memory: AddressSpace
    numbers: int
    geometry: Geometry


class RemoteShard(ABC):
    """Heads or layers that one lender computes for all requests, from :meth:`hand_over` on. The
    borrower's ring has the shard's geometry, and the lender has a block of it for each block here,
    under the same number."""

    def __init__(self, kv: LocalKv, borrower: Borrower, patience_s: float, room: int) -> None:
        """``room``: blocks that fit into the memory here while the shard is away."""
        self.borrower = borrower
        self.blocks = min(room, kv.numbers)
        """Blocks that there are here while it is away."""
        self._attention = kv.attention
        self._kv_caches = kv.caches
        self._geometry = kv.geometry
        self._whole = list(kv.caches)
        self._memory = kv.memory
        self._patience_s = patience_s
        self._whole_blocks = len(kv.caches[0])

    def send(self, blocks: Sequence[int]) -> bool:
        """Copy the shard's share of these blocks to the lender; False if its ring has closed."""
        return all(self._send(some) for some in self._some(blocks))

    def fetch(self, blocks: Sequence[int]) -> bool:
        """Copy the shard's share of these blocks back; False if the lender's ring has closed. They
        are copied to where they will be used, beside what is in use meanwhile."""
        return all(self._fetch(some) for some in self._some(blocks))

    @abstractmethod
    def hand_over(self) -> None:
        """Have the lender compute the shard from now on; all KV has been sent."""

    @abstractmethod
    def free_memory(self) -> bool:
        """Give back a piece of the memory that the shard took here; True after the last piece."""

    def prepare_return(self) -> bool:
        """Do a step's worth of what the return needs beside KV; True once all of it is done."""
        return True

    def take_back(self) -> None:
        """Compute the shard here from now on; all KV has been fetched, or is lost."""
        for layer, whole in enumerate(self._whole):
            self._memory.release(self._more(layer))
            self._memory.back(whole)
            self._use(layer, whole)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """Copy blocks, pairs of source and target, here and at the lender, while the shard is away;
        False if the lender's ring has closed."""
        self._copy_here([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        return all(
            self._copy_there([pair[0] for pair in some], [pair[1] for pair in some])
            for some in self._some(pairs)
        )

    # Whole blocks, while the shard is away

    @property
    def layers_here(self) -> frozenset[int]:
        """Layers of which at least some heads are computed here."""
        return frozenset(range(len(self._kv_caches)))

    @abstractmethod
    def write_whole(self, layer: int, blocks: range, rows: torch.Tensor) -> bool:
        """Write one layer of whole blocks, here and at the lender; False if its ring has closed.
        There are at most ``borrower.ring.most_copied`` of them; ``rows`` is ``[blocks, kv_heads,
        block_size, 2 * head_size]``, as in a cache."""

    @abstractmethod
    def read_whole(self, layer: int, blocks: range, rows: torch.Tensor) -> bool:
        """Fill ``rows`` with one layer of whole blocks; arguments and result as above."""

    def _write_there(self, number: int, blocks: range, rows: torch.Tensor) -> bool:
        self.borrower.begin_copy(blocks, RingTask.WRITE)
        done = self.borrower.write(number, *self._by_kind(rows), self._patience_s)
        self.borrower.resume_step()
        return done

    def _read_there(self, number: int, blocks: range, rows: torch.Tensor) -> bool:
        self.borrower.begin_copy(blocks, RingTask.READ)
        found = self.borrower.read(number, self._patience_s)
        if found is not None:
            for kind, some in zip(self._by_kind(rows), found, strict=True):
                kind.copy_(some)
        self.borrower.resume_step()
        return found is not None

    @abstractmethod
    def _remote(self, number: int) -> torch.Tensor:
        """Return the memory that one of the shard's layers has here when it is not away,
        ``[blocks, kv_heads, block_size, 2 * head_size]``."""

    def _send(self, blocks: list[int]) -> bool:
        self.borrower.begin_copy(blocks, RingTask.WRITE)
        for number in range(self.borrower.ring.geometry.layers):
            key, value = (kind[blocks] for kind in self._by_kind(self._remote(number)))
            if not self.borrower.write(number, key, value, self._patience_s):
                return False
        return True

    def _fetch(self, blocks: list[int]) -> bool:
        self.borrower.begin_copy(blocks, RingTask.READ)
        for number in range(self.borrower.ring.geometry.layers):
            rows = self.borrower.read(number, self._patience_s)
            if rows is None:
                return False
            for kind, some in zip(self._by_kind(self._remote(number)), rows, strict=True):
                kind[blocks] = some.to(kind.device)
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
        whole = self._whole[layer]
        return whole.as_strided((self.blocks, *whole.shape[1:]), whole.stride())

    def _more(self, layer: int) -> torch.Tensor:
        """Blocks of a layer that there are only while the shard is away."""
        return self._longer(layer)[self._whole_blocks :]

    def _by_kind(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return keys_and_values(cache, self._geometry)

    def _use(self, layer: int, cache: torch.Tensor) -> None:
        self._kv_caches[layer] = cache
        self._attention[layer].kv_cache = cache

    def _some(self, blocks: Sequence[Any]) -> list[list[Any]]:
        most = self.borrower.ring.most_copied
        return [list(blocks[at : at + most]) for at in range(0, len(blocks), most)]
