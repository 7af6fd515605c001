"""What a replica's engine is made of and takes, for those who decide what to move."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import psutil

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.placement import model_files
from loomserve.platform.state import FootprintState

_PERIOD_S = 8.0
"""Reading what is a process's own walks its page tables: some milliseconds a GiB."""


class Footprint:
    """The last measurement of a replica's process and its engine's."""

    def __init__(
        self, facts: dict[str, int], *, engine_pid: int, start_s: float, on_cpu: bool
    ) -> None:
        """
        Args:
            facts: the fields of :class:`FootprintState` that never change.
            engine_pid: the engine's process; this one is the replica's.
            start_s: how long the replica took to start.
            on_cpu: whether its device's memory is that of processes.
        """
        self.state: FootprintState | None = None
        self._facts: dict[str, Any] = {**facts, "start_s": start_s, "ready_at": time.monotonic()}
        self._engine_pid = engine_pid
        self._on_cpu = on_cpu

    async def keep(self) -> None:
        """Measure for ever."""
        while True:
            size = await asyncio.to_thread(self._own_bytes) if self._on_cpu else None
            self.state = FootprintState(
                **self._facts, memory_bytes=size, memory_measured_at=time.monotonic()
            )
            await asyncio.sleep(_PERIOD_S)

    def _own_bytes(self) -> int:
        """What the processes have for themselves; shared memory has another owner."""
        total = 0
        for one in self._processes():
            with contextlib.suppress(psutil.Error):  # it has just ended
                total += one.memory_full_info().uss
        return total

    def _processes(self) -> set[psutil.Process]:
        """The replica's and the engine's, with their children; one that was forked is no child."""
        found: set[psutil.Process] = set()
        for pid in (os.getpid(), self._engine_pid):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                found |= {process, *process.children(recursive=True)}
        return found


def constants(
    path: str,
    *,
    layers: int,
    item_bytes: int,
    kv_heads: int,
    kv_bytes: int,
    blocks: int,
    block_tokens: int,
    dropped_bytes: int,
) -> dict[str, int]:
    """Fields of a :class:`FootprintState` that never change.

    ``kv_bytes`` has what it may borrow in it: a borrower's blocks are numbered beyond its own
    memory.
    """
    return {
        "layers": layers,
        "layer_bytes": layer_bytes(path, item_bytes),
        "kv_heads": kv_heads,
        "block_bytes": kv_bytes // max(1, blocks),
        "block_tokens": block_tokens,
        "dropped_bytes": dropped_bytes,
    }


def layer_bytes(path: str, itemsize: int) -> int:
    """Weights of one layer of the model in this folder; 0 where that cannot be told."""
    try:
        return int(model_files.read(Path(path)).layer_parameters * itemsize)
    except (ConfigError, OSError):
        return 0
