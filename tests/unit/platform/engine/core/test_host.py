"""The replica's side of an engine's process, with a child that computes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from loomserve.platform.base.errors import StartError
from loomserve.platform.engine.core import host as host_module
from loomserve.platform.engine.core.host import EngineEnded, EngineHost
from loomserve.platform.engine.core.messages import EngineStart
from loomserve.platform.run.engine_address import EngineAddress


@pytest.fixture(autouse=True)
def _child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "_CHILD", "tests.unit.platform.engine.core.fake_engine")


def start(folder: Path, mode: str, timeout_s: float = 30) -> Any:
    made = EngineStart(options={"mode": mode}, address=EngineAddress.in_folder(folder))
    return EngineHost.start(made, {"LOOMSERVE_TEST": mode}, timeout_s)


def engines() -> list[int]:
    """Processes of engines that this test has left; other tests' helpers may run beside it."""
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if host_module._CHILD in command_line(child)]


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


async def call(engine: EngineHost, *args: Any, timeout_s: float = 5) -> Any:
    return await engine.collective_rpc(*args, timeout_s=timeout_s)


def test_an_engine_is_called_and_stopped(tmp_path: Path) -> None:
    async def run() -> None:
        engine = await start(tmp_path, "lives")
        assert engine.alive
        assert engine.facts.max_model_len == 8
        assert engine.facts.pid == engine.pid
        environment = psutil.Process(engine.pid).environ()
        assert environment["LOOMSERVE_TEST"] == "lives"
        assert await call(engine, "echo", 1, "b", {"c": [2]}) == [[1, "b", {"c": [2]}]]
        with pytest.raises(ValueError, match=r"^refused$"):
            await call(engine, "refuse")
        with pytest.raises(RuntimeError, match=r"^LookupError: odd$"):
            await call(engine, "odd")
        assert (await engine.stats(timeout_s=5)).running == 2
        assert await engine.metrics(timeout_s=5) == "oldest 2\n"
        with pytest.raises(TimeoutError):
            await call(engine, "sleep", 0.5, timeout_s=0.1)
        assert await call(engine, "echo", "later") == [["later"]]
        await engine.stop(5)
        assert not engine.alive
        with pytest.raises(EngineEnded, match="status 0"):
            await call(engine, "echo")

    asyncio.run(run())


def test_requests_are_moved_as_far_as_front_ends_move_them_in_time(tmp_path: Path) -> None:
    async def run() -> None:
        engine = await start(tmp_path, "lives")
        began = time.monotonic()
        assert await engine.move_requests("b", 2, timeout_s=5) == 2
        assert time.monotonic() - began < 2
        assert await engine.move_requests("b", 5, timeout_s=0.3) == 3
        await engine.stop(5)

    asyncio.run(run())


def test_who_waits_for_an_engine_that_ends_is_told_how(tmp_path: Path) -> None:
    async def run() -> None:
        engine = await start(tmp_path, "lives")
        with pytest.raises(EngineEnded, match="status 3"):
            await call(engine, "exit", 3)
        assert await engine.ended() == "its process ended with status 3; its log says why"
        await engine.stop(5)

        engine = await start(tmp_path, "lives")
        os.kill(engine.pid, signal.SIGKILL)
        assert await engine.ended() == "its process was ended by SIGKILL"
        assert not engine.alive
        await engine.stop(5)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("mode", "timeout_s", "told"),
    [
        ("fails", 30, r"^the engine cannot start: OSError: no weights$"),
        ("dies", 30, r"^the engine cannot start: its process was ended by SIGABRT$"),
        ("hangs", 3, r"^the engine was not ready after 3 s"),
    ],
)
def test_an_engine_that_does_not_start_says_why(
    mode: str, timeout_s: float, told: str, tmp_path: Path
) -> None:
    with pytest.raises(StartError, match=told):
        asyncio.run(start(tmp_path, mode, timeout_s))
    assert not engines()


def test_an_engine_that_hears_nothing_is_killed(tmp_path: Path) -> None:
    async def run() -> None:
        engine = await start(tmp_path, "lives")
        os.kill(engine.pid, signal.SIGSTOP)
        began = time.monotonic()
        await engine.stop(0.5)
        assert time.monotonic() - began < 3
        assert not engine.alive

    asyncio.run(run())


def test_an_engine_ends_with_its_replica(tmp_path: Path) -> None:
    async def run() -> None:
        engine = await start(tmp_path, "lives")
        # As if the replica had ended: the channel is closed.
        engine._writer.close()
        assert await engine.ended()
        await engine.stop(5)

    asyncio.run(run())
