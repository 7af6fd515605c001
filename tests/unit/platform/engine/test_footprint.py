"""What a replica says of its memory, while its engine answers and while it does not."""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from prometheus_client import CollectorRegistry

from loomserve.platform.engine import footprint
from loomserve.platform.engine.core.host import EngineEnded
from loomserve.platform.engine.footprint import Footprint, OwnMemory
from tests.waiting import PATIENCE_S

FACTS = {"layers": 2, "layer_bytes": 1, "kv_heads": 1, "block_bytes": 1, "block_tokens": 1}


def test_the_last_measurement_stays_while_an_engine_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(footprint, "_PERIOD_S", 0.01)
    answers: Iterator[int | Exception] = iter((7, TimeoutError(), EngineEnded("it has"), 9))
    asked: list[int | None] = []
    registry = CollectorRegistry()

    async def scenario() -> None:
        enough = asyncio.Event()

        async def measure() -> int:
            asked.append(kept.state.memory_bytes if kept.state else None)
            if len(asked) == 5:
                enough.set()
            answer = next(answers, 9)
            if isinstance(answer, Exception):
                raise answer
            return answer

        kept = Footprint(FACTS, start_s=3.0, measure=measure, registry=registry)
        keeping = asyncio.create_task(kept.keep())
        await asyncio.wait_for(enough.wait(), PATIENCE_S)
        keeping.cancel()

    asyncio.run(scenario())
    assert asked[:5] == [None, 7, 7, 7, 9]
    assert registry.get_sample_value("loomserve_engine_memory_bytes") == 9


def test_a_processs_own_memory_grows_with_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 64 * 2**20
    memory = OwnMemory(os.getpid())
    before = memory.read()
    assert before == pytest.approx(psutil.Process().memory_full_info().uss, rel=0.1)
    # Its page tables are not walked through for that, nor other processes looked at.
    for expensive in ("memory_full_info", "children"):
        monkeypatch.setattr(psutil.Process, expensive, lambda *_: pytest.fail("takes long"))
    # Of the kernel itself: an allocator may have that much at hand, written long ago.
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as written:
        written.write(b"x" * size)
        assert memory.read() - before > 0.9 * size
    assert memory.read() - before < 0.1 * size


def test_children_count_and_an_engine_that_has_ended_has_no_memory() -> None:
    assert OwnMemory(2**22 + 1).read() == 0
    alone = OwnMemory(os.getpid()).read()
    command = [sys.executable, "-c", "x = bytearray(b'x') * 2**26; print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        assert OwnMemory(os.getpid()).read() - alone > 2**26
        child.stdin.close()
