"""The replica's side of an engine's process, with a child that computes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from loomserve.platform.base.errors import StartError
from loomserve.platform.base.processes import own_log
from loomserve.platform.engine.core.host import EngineEnded, EngineHost
from loomserve.platform.engine.core.messages import EngineStart
from loomserve.platform.engine.process import engine_process as process
from loomserve.platform.engine.process.fork_server import follow_environment
from loomserve.platform.engine.process.kept_fork_server import FORK_SERVER, KeptForkServer
from loomserve.platform.run.engine_address import EngineAddress
from loomserve.platform.run.folder import RUN_VARIABLE
from tests.fork_servers import fork_server_of, kill
from tests.waiting import PATIENCE_S, within

# It takes long, so that it begins first.
pytestmark = pytest.mark.xdist_group("hosts")

CHILD = "tests.unit.platform.engine.core.fake_engine"


@pytest.fixture(autouse=True)
def _child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_CHILD", CHILD)


@pytest.fixture(scope="module")
def kept() -> Iterator[tuple[str, KeptForkServer]]:
    """One that no test ends, for it takes a second to start."""
    with fork_server_of([CHILD]) as started:
        yield started


@pytest.fixture(autouse=True, params=["spawned", "forked"])
def fork_server(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[KeptForkServer | None]:
    """All of it holds of an engine that a fork server has forked, and of one that is spawned.

    ``apart`` is one of a test's own, which may end or stop it.
    """
    monkeypatch.delenv(RUN_VARIABLE, raising=False)
    if request.param == "spawned":
        yield None
        return
    own = fork_server_of([CHILD]) if request.param == "apart" else None
    with own or nullcontext(request.getfixturevalue("kept")) as (folder, server):
        monkeypatch.setenv(RUN_VARIABLE, folder)
        yield server


def start(folder: Path, mode: str, timeout_s: float = 30) -> Any:
    made = EngineStart(options={"mode": mode}, address=EngineAddress.in_folder(folder))
    return EngineHost.start(made, {"LOOMSERVE_TEST": mode}, timeout_s)


def engines() -> list[int]:
    """Processes of engines that this test has left; other tests' helpers may run beside it."""
    own = psutil.Process()
    return [
        child.pid
        for child in own.children(recursive=True)
        if process._CHILD in (words := command_line(child))
        and not (FORK_SERVER in words and child.ppid() == own.pid)
    ]


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
        assert await call(engine, "environment", "LOOMSERVE_TEST") == ["lives"]
        assert await call(engine, "echo", 1, "b", {"c": [2]}) == [[1, "b", {"c": [2]}]]
        with pytest.raises(ValueError, match=r"^refused$"):
            await call(engine, "refuse")
        with pytest.raises(RuntimeError, match=r"^LookupError: odd$"):
            await call(engine, "odd")
        assert (await engine.stats(timeout_s=PATIENCE_S)).running == 2
        assert await engine.metrics(timeout_s=PATIENCE_S) == "oldest 2\n"
        with pytest.raises(TimeoutError):
            await call(engine, "sleep", 0.5, timeout_s=0.1)
        assert await call(engine, "echo", "later") == [["later"]]
        await engine.stop(5)
        assert not engine.alive
        with pytest.raises(EngineEnded, match="status 0"):
            await call(engine, "echo")

    asyncio.run(run())


def test_requests_are_moved_as_far_as_clients_move_them_in_time(tmp_path: Path) -> None:
    async def run() -> None:
        engine = await start(tmp_path, "lives")
        began = time.monotonic()
        assert await engine.move_requests("b", 2, timeout_s=PATIENCE_S) == 2
        assert time.monotonic() - began < PATIENCE_S / 2
        assert await engine.move_requests("b", 5, timeout_s=0.3) == 3
        await engine.stop(5)

    asyncio.run(run())


def test_who_waits_for_an_engine_that_ends_is_told_how(tmp_path: Path) -> None:
    async def run() -> None:
        engine = await start(tmp_path, "lives")
        with pytest.raises(EngineEnded, match="status 3"):
            await call(engine, "exit", 3)
        assert await engine.ended() == f"its process ended with status 3; {own_log()} says why"
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
        (
            "dies",
            30,
            r"^the engine cannot start: its process was ended by SIGABRT; .*says why$",
        ),
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
        assert time.monotonic() - began < PATIENCE_S
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


def test_an_engine_writes_where_its_replica_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        engine = await start(tmp_path, "lives")
        await call(engine, "say", "here")
        await engine.stop(5)

    asyncio.run(run())
    assert capfd.readouterr().out == "here\n"


@pytest.mark.parametrize("wedged", ["stopped", "sleeps"])
def test_an_engine_that_stands_still_for_ever_is_killed_and_says_why(
    wedged: str, tmp_path: Path
) -> None:
    async def run() -> None:
        engine = await start(tmp_path, "lives")
        if wedged == "stopped":
            os.kill(engine.pid, signal.SIGSTOP)
        else:
            with pytest.raises(TimeoutError):
                await call(engine, "sleep", 600, timeout_s=0)
        told: list[str] = []

        async def tell(why: str) -> None:
            assert engine.alive
            told.append(why)

        await engine.end_if_wedged(tell, limit_s=1, look_s=0.2)
        (why,) = told
        assert why.startswith(f"its process {'is stopped' if wedged == 'stopped' else 'slept'} and")
        assert await engine.ended() == f"{why}, so it was killed"
        await engine.stop(5)

    asyncio.run(run())


def test_an_engine_that_computes_or_has_nothing_to_do_is_not_wedged(tmp_path: Path) -> None:
    async def run() -> None:
        engine = await start(tmp_path, "lives")
        told: list[str] = []

        async def tell(why: str) -> None:
            told.append(why)

        watch = asyncio.create_task(engine.end_if_wedged(tell, limit_s=0.5, look_s=0.1))
        await asyncio.sleep(1)
        # Far longer than the limit, and beside neighbours longer still.
        await call(engine, "compute", 1.5, timeout_s=PATIENCE_S)
        assert await call(engine, "echo", 1) == [[1]]
        assert (told, watch.done()) == ([], False)
        os.kill(engine.pid, signal.SIGKILL)
        await watch
        assert not told, "it has ended by itself"
        assert await engine.ended() == "its process was ended by SIGKILL"
        await engine.stop(5)

    asyncio.run(run())


@pytest.mark.parametrize("fork_server", ["apart"], indirect=True)
def test_a_forked_engine_outlives_its_fork_server_and_the_next_waits_for_another(
    tmp_path: Path, fork_server: KeptForkServer
) -> None:
    async def run() -> None:
        first = await start(tmp_path, "lives")
        before = fork_server.pid
        assert psutil.Process(first.pid).ppid() == before
        kill(fork_server)
        assert await call(first, "echo", 1) == [[1]]
        waiting = asyncio.create_task(start(tmp_path, "lives"))
        while fork_server.pid == before:
            await asyncio.sleep(0.05)
            fork_server.look()
        second = await waiting
        assert psutil.Process(second.pid).ppid() == fork_server.pid
        for engine in (first, second):
            await engine.stop(5)
            assert not engine.alive

    asyncio.run(run())


@pytest.mark.parametrize("fork_server", ["apart"], indirect=True)
def test_an_engine_that_no_fork_server_takes_is_spawned(
    tmp_path: Path, fork_server: KeptForkServer
) -> None:
    async def run() -> None:
        assert fork_server.pid is not None
        # It ends with the request in its hands.
        os.kill(fork_server.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(start(tmp_path, "lives"))
        await asyncio.sleep(0.5)
        kill(fork_server)
        fork_server.stop()
        engine = await waiting
        assert psutil.Process(engine.pid).ppid() == os.getpid()
        await engine.stop(5)

    asyncio.run(run())


@pytest.mark.parametrize("fork_server", ["apart"], indirect=True)
@pytest.mark.parametrize("server_ends", [False, True])
def test_a_forked_engine_that_does_not_look_ends_with_its_replica_nevertheless(
    tmp_path: Path, fork_server: KeptForkServer, server_ends: bool
) -> None:
    script = """
import asyncio, os, signal, sys
from pathlib import Path
from loomserve.platform.engine.process.engine_process import start_process

async def main():
    _, started = await start_process({}, 30)
    os.kill(started.pid, signal.SIGSTOP)
    print(started.pid, flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe) as asker:
        assert asker.stdout is not None
        engine = psutil.Process(int(asker.stdout.readline()))
        if server_ends:
            kill(fork_server)
        assert is_alive(engine)
        asker.communicate()
    within(30, lambda: not is_alive(engine))


def is_alive(process: psutil.Process) -> bool:
    try:
        # Nobody may wait for one whose fork server has ended.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("fork_server", ["apart"], indirect=True)
def test_an_engine_whose_replica_ended_while_it_was_asked_for_does_not_begin(
    tmp_path: Path, fork_server: KeptForkServer
) -> None:
    script = """
import os, socket, sys
from loomserve.platform.engine.process import forking

def gone(*_):
    os.kill(os.getpid(), 9)

forking.socket.recv_fds = gone
forking.fork(sys.argv[1], ["forked"], os.environ, 0, 30)
"""
    assert fork_server.pid is not None
    os.kill(fork_server.pid, signal.SIGSTOP)
    subprocess.run([sys.executable, "-c", script, process._CHILD], check=False)
    os.kill(fork_server.pid, signal.SIGCONT)

    async def run() -> None:
        # They are taken one after the other.
        engine = await start(tmp_path, "lives")
        await engine.stop(5)

    asyncio.run(run())
    within(30, lambda: not engines())


@pytest.mark.parametrize("fork_server", ["apart"], indirect=True)
def test_a_fork_server_bears_that_engines_and_replicas_end_at_once(
    tmp_path: Path, fork_server: KeptForkServer
) -> None:
    async def run() -> None:
        for _ in range(5):
            engine = await start(tmp_path, "lives")
            # It sees both ends in one look when it goes on.
            os.kill(fork_server.pid, signal.SIGSTOP)
            os.kill(engine.pid, signal.SIGKILL)
            engine._process._connection.shutdown(socket.SHUT_RDWR)
            os.kill(fork_server.pid, signal.SIGCONT)
            await engine.stop(5)
        again = await start(tmp_path, "lives")
        assert psutil.Process(again.pid).ppid() == fork_server.pid
        await again.stop(5)

    asyncio.run(run())


def test_an_engine_is_put_to_sleep_and_woken_unless_it_refuses(tmp_path: Path) -> None:
    async def run() -> None:
        engine = await start(tmp_path, "lives")
        await engine.sleep(2, timeout_s=PATIENCE_S)
        assert await call(engine, "level") == [2]
        await engine.wake(timeout_s=PATIENCE_S)
        assert await call(engine, "level") == [0]
        await engine.call("move_requests", "other", 3, timeout_s=PATIENCE_S)
        with pytest.raises(ValueError, match="it has requests"):
            await engine.sleep(1, timeout_s=PATIENCE_S)
        await engine.stop(5)

    asyncio.run(run())


def test_a_child_compiles_nothing_where_its_environment_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imported = types.ModuleType("torch._dynamo.config")
    monkeypatch.setitem(sys.modules, "torch._dynamo.config", imported)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for wanted in ("0", "1"):
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", wanted)
        follow_environment()
        assert getattr(imported, "disable", False) is (wanted == "1")
