"""Size of a replica's engine, for those who decide what to move."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, Gauge

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.base.processes import with_descendants
from loomserve.platform.devices.shortage import memory_bounds, used_share
from loomserve.platform.engine.core.host import EngineEnded
from loomserve.platform.engine.core.messages import EngineFacts
from loomserve.platform.placement import model_files
from loomserve.platform.state import FootprintState

_PERIOD_S = 8.0
_EXACT_PERIOD_S = 120.0


class Footprint:
    def __init__(
        self,
        facts: dict[str, int],
        *,
        start_s: float,
        measure: Callable[[], Awaitable[int]],
        registry: CollectorRegistry,
    ) -> None:
        """``facts`` are the fields of :class:`FootprintState` that never change. ``measure``
        returns the bytes that it has of its devices' memory: :class:`OwnMemory` on a CPU, or as a
        GPU's workers say."""
        self.state: FootprintState | None = None
        self._facts: dict[str, Any] = {**facts, "start_s": start_s, "ready_at": time.monotonic()}
        self._measure = measure
        self._memory = Gauge(
            "loomserve_engine_memory_bytes",
            "What an engine has of its device's memory, KV included: of the host's on cores, else "
            "of GPUs.",
            registry=registry,
        )
        self._used = Gauge(
            "loomserve_host_memory_used_ratio",
            "Share of the node's memory that is used, or of its container's, if that has less "
            "left.",
            registry=registry,
        )

    async def keep(self) -> None:
        """Measure for ever; the last measurement stays while an engine does not answer."""
        while True:
            self._used.set(used_share(memory_bounds()))
            with contextlib.suppress(TimeoutError, EngineEnded):
                size = await self._measure()
                self._memory.set(size)
                self.state = FootprintState(
                    **self._facts, memory_bytes=size, memory_measured_at=time.monotonic()
                )
            await asyncio.sleep(_PERIOD_S)


class OwnMemory:
    """What an engine's process and its children have of memory that no other owns."""

    def __init__(self, engine_pid: int) -> None:
        self._pid = engine_pid
        self._exact = self._private = 0
        self._exact_at = -math.inf

    def read(self) -> int:
        """Bytes.

        That is a walk through page tables, some milliseconds a GiB. So it is made rarely, and what
        has come or gone since is added, as the kernel counts it: all that no file backs.
        """
        private = self._sum(_private)
        if time.monotonic() - self._exact_at > _EXACT_PERIOD_S:
            self._exact = self._sum(lambda each: int(each.memory_full_info().uss))
            self._private, self._exact_at = private, time.monotonic()
        return max(0, self._exact + private - self._private)

    def _sum(self, read: Callable[[psutil.Process], int]) -> int:
        found: list[int] = []
        with contextlib.suppress(OSError):
            found = list(with_descendants(self._pid))
        total = 0
        for pid in found:
            with contextlib.suppress(psutil.Error):  # it has just ended
                total += read(psutil.Process(pid))
        return total


def _private(process: psutil.Process) -> int:
    info = process.memory_info()
    return int(info.rss - info.shared)


def constants(path: str, facts: EngineFacts, kv_bytes: int) -> dict[str, int]:
    """Fields of a :class:`FootprintState` that never change. ``kv_bytes`` has what it may borrow in
    it: a borrower's blocks are numbered beyond its own memory."""
    return {
        "layers": facts.layers,
        "layer_bytes": layer_bytes(path, facts.item_bytes),
        "kv_heads": facts.kv_heads,
        "block_bytes": kv_bytes // max(1, facts.blocks),
        "block_tokens": facts.block_tokens,
        "dropped_bytes": facts.dropped_bytes,
    }


def layer_bytes(path: str, itemsize: int) -> int:
    """Weights of one layer of the model in this folder; 0 where that cannot be told."""
    try:
        return int(model_files.read(Path(path)).layer_parameters * itemsize)
    except (ConfigError, OSError):
        return 0
