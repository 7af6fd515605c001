"""Rebuilds the index after a crash, from the block headers in memory and on SSD."""

from __future__ import annotations

from loomserve.kvstore.index.index import Index
from loomserve.kvstore.index.recovery import chain_runs
from loomserve.kvstore.server.allocator import UNKNOWN_RECOMPUTE_S
from loomserve.kvstore.server.spaces import Spaces
from loomserve.kvstore.storage.arena import ArenaOwner
from loomserve.kvstore.storage.checksum import BlockHeader
from loomserve.kvstore.storage.ssd import SsdTier


def rebuild(
    index: Index, arena: ArenaOwner, ssd: SsdTier | None, spaces: Spaces, now: float
) -> None:
    """Put every block whose ancestors are all there into the empty index; free other slots."""
    in_memory = _in_memory(arena, spaces)
    on_ssd = {
        entry.header: entry.location
        for entry in (ssd.entries() if ssd else ())
        if entry.header.namespace in spaces
    }
    everywhere = [*in_memory, *on_ssd]
    reached: set[int] = set()
    for run in chain_runs(in_memory, in_memory):
        arena.free(index.insert(*run, now, UNKNOWN_RECOMPUTE_S))
        reached.update(run.places)
    arena.free(set(in_memory.values()) - reached)
    for run in chain_runs(on_ssd, everywhere):
        index.insert_ssd(*run, now, UNKNOWN_RECOMPUTE_S)


def _in_memory(arena: ArenaOwner, spaces: Spaces) -> dict[BlockHeader, int]:
    """The slot of each block of a known namespace; other published slots are freed."""
    found: dict[BlockHeader, int] = {}
    lost: list[int] = []
    for slot, header in list(arena.headers()):
        namespace = header.namespace
        fits = namespace in spaces and spaces.slot_bytes(namespace) == arena.slot_bytes(slot)
        if fits and header not in found:
            found[header] = slot
        else:
            lost.append(slot)
    arena.free(lost)
    return found
