"""A simulated engine's process, as its replica and a client see it."""

from __future__ import annotations

import asyncio
import functools
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio

from loomserve.platform.base.errors import StartError
from loomserve.platform.engine.core.addresses import BEAT, DEAD, HELLO, READY
from loomserve.platform.engine.core.departures import MOVE_TO
from loomserve.platform.engine.core.host import EngineEnded, EngineHost
from loomserve.platform.engine.core.messages import EngineStart
from loomserve.platform.run.engine_address import EngineAddress
from loomserve.platform.run.folder import own_run
from loomserve.platform.simulated import wire
from loomserve.platform.simulated.options import SIMULATED_CONFIG
from loomserve.platform.state.load_report import LoadReport, read_load_report
from tests.waiting import PATIENCE_S as TIMEOUT_S

# It takes long, so that it begins first.
pytestmark = pytest.mark.xdist_group("simulated engines")

OPTIONS = {
    "kv_cache_memory_bytes": 2**28,
    "max_model_len": 4096,
    "additional_config": {SIMULATED_CONFIG: {"step_ms": 1, "token_ms": 0.01}},
}


def with_simulated(**fields: Any) -> dict[str, Any]:
    return {**OPTIONS, "additional_config": {SIMULATED_CONFIG: fields}}


SLOW = with_simulated(step_ms=50)


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


class FrontEnd:
    """Speaks vLLM's frames to an engine."""

    def __init__(self, address: EngineAddress) -> None:
        context = zmq.asyncio.Context.instance()
        self._sockets = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        for socket, where in zip(self._sockets, (address.input, address.output), strict=True):
            socket.set(zmq.IDENTITY, b"client")
            socket.connect(where)
        self.loads: list[LoadReport] = []
        self.beats: list[list[float]] = []
        self.dead = False

    async def begin(self) -> None:
        """Say that it is there, and hear what the engine says of itself."""
        await self.hello()
        first, said = await asyncio.wait_for(self._sockets[1].recv_multipart(), TIMEOUT_S)
        assert first == READY
        self.facts: dict[str, Any] = msgspec.msgpack.decode(said)

    async def hello(self) -> None:
        await self._sockets[1].send_multipart([HELLO, b"1"])

    async def send(self, kind: bytes, value: Any) -> None:
        await self._sockets[0].send_multipart([kind, msgspec.msgpack.encode(value)])

    async def add(self, name: str, tokens: int, **params: Any) -> None:
        given = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **params}
        await self.send(
            wire.ADD, wire.WireRequest(name, [5, 6, 7], None, given, None, 0.0, None, None)
        )

    async def take(self) -> list[Any] | None:
        """The next message of outputs; None: it was another one."""
        frames = await asyncio.wait_for(self._sockets[1].recv_multipart(), TIMEOUT_S)
        if frames == [DEAD]:
            self.dead = True
            return None
        if frames[0] == BEAT:
            self.beats.append(msgspec.msgpack.decode(frames[1]))
            return None
        load = read_load_report(frames[0])
        if load is not None:
            self.loads.append(load)
            frames = frames[1:]
        return msgspec.msgpack.decode(frames[0]) if frames else None

    async def outputs(self) -> list[Any]:
        while (taken := await self.take()) is None:
            assert not self.dead, "the engine has ended"
        return taken

    async def answer(self) -> list[list[Any]]:
        """Outputs until one request has ended."""
        found = []
        while True:
            found += (await self.outputs())[1]
            if len(found[-1]) > 5 and found[-1][5] is not None:
                return found

    async def call(self, method: str, *args: Any) -> Any:
        """What a utility returns."""
        await self.send(wire.UTILITY, (0, 7, method, args))
        while True:
            taken = await self.outputs()
            if len(taken) > 4:
                call_id, failed, result = taken[4]
                assert call_id == 7
                return failed or result[1]

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)


@asynccontextmanager
async def running(options: dict[str, Any] = OPTIONS) -> AsyncIterator[tuple[EngineHost, FrontEnd]]:
    """An engine, and a client that it knows."""
    address = EngineAddress.in_folder(own_run().sockets)
    start = EngineStart(options=options, address=address, simulated=True)
    host = await EngineHost.start(start, {}, TIMEOUT_S)
    client = FrontEnd(host.address)
    try:
        await client.begin()
        yield host, client
    finally:
        client.close()
        await host.stop(0)


def test_it_imports_none_of_what_takes_seconds() -> None:
    code = (
        "import sys, loomserve.platform.simulated.child\n"
        "print({'vllm', 'torch', 'ray', 'transformers', 'sklearn', 'scipy'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"


def oom_adjustment(pid: int) -> str:
    return Path(f"/proc/{pid}/oom_score_adj").read_text()


@in_a_loop
async def test_it_may_have_many_descriptors_and_is_the_kernels_first_choice() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        async with running() as (host, _):
            most, _ = psutil.Process(host.pid).rlimit(psutil.RLIMIT_NOFILE)
            assert most > 1024
            assert int(oom_adjustment(host.pid)) >= 800
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@in_a_loop
async def test_it_answers_with_its_load_and_counts_who_asked() -> None:
    async with running() as (host, client):
        assert client.facts["max_model_len"] == host.facts.max_model_len == 4096
        await client.add("r", 5)
        answer = await client.answer()
        assert [len(each[1]) for each in answer] == [1] * 5
        assert client.loads[-1].counted == 1
        assert (client.loads[-1].running, client.loads[-1].steps) == (0, 5)
        load = await host.stats(TIMEOUT_S)
        assert (load.requests, load.running) == (1, 0)
        assert load.work is not None
        assert load.work.tokens == 8
        assert "loomserve_request_preemptions_count 1.0" in await host.metrics(TIMEOUT_S)
        await client.hello()
        while not client.beats:
            await client.take()
        *counts, computed_s = client.beats[-1]
        assert counts == [5, 0, 0]
        assert computed_s == pytest.approx(5 * 0.001, rel=0.5), "it pretends to have computed"


@in_a_loop
async def test_who_is_gone_has_no_requests_there() -> None:
    async with running(SLOW) as (host, client):
        await client.add("a", 4000)
        await client.add("b", 4000)
        await client.outputs()
        await client.send(wire.ABORT, ["a"])
        await _until(host, lambda load: load.running == 1)
        client.close()
        await _until(host, lambda load: load.running == 0)


async def _until(host: EngineHost, right: Callable[[Any], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not right(await host.stats(TIMEOUT_S)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@in_a_loop
async def test_a_grammar_is_refused_as_an_engine_does() -> None:
    async with running() as (_, client):
        await client.add("r", 5, structured_outputs={"json": "{}"})
        (ended,) = await client.answer()
        assert ended[:2] == ["r", []]
        assert ended[5] == wire.FinishReason.ERROR


@in_a_loop
async def test_it_does_what_clients_call() -> None:
    async with running() as (_, client):
        assert await client.call("get_supported_tasks") == ["generate"]
        await client.call("sleep", 1)
        assert await client.call("is_sleeping") is True
        await client.call("wake_up")
        assert await client.call("reset_prefix_cache", False) is True
        assert "simulated engine has no profile" in await client.call("profile", True)


@in_a_loop
async def test_it_sleeps_until_a_request_wakes_it_and_not_with_one() -> None:
    async with running(SLOW) as (host, client):
        await host.sleep(1, timeout_s=TIMEOUT_S)
        assert (await host.stats(TIMEOUT_S)).asleep
        await client.add("r", 4000)
        await client.outputs()
        assert not (await host.stats(TIMEOUT_S)).asleep
        with pytest.raises(ValueError, match="it has requests"):
            await host.sleep(1, timeout_s=TIMEOUT_S)


@in_a_loop
async def test_requests_are_asked_to_move_and_have_left_once_they_are_aborted() -> None:
    async with running(SLOW) as (host, client):
        await client.add("r", 4000)
        await client.outputs()
        moving = asyncio.create_task(host.move_requests("r2", 1, timeout_s=TIMEOUT_S))
        while True:
            (output, *_) = (await client.outputs())[1]
            if len(output) > 8 and (output[8] or {}).get(MOVE_TO):
                break
        assert output[8][MOVE_TO] == "r2"
        await client.send(wire.ABORT, ["r"])
        assert await moving == 1


@in_a_loop
async def test_it_hangs_slows_down_and_dies_when_it_is_told() -> None:
    async with running() as (host, client):
        await client.call("slow_down", 100)
        await client.add("r", 4000)
        first, second = [(await client.outputs())[3] for _ in range(2)]
        assert second - first > 0.1, "a step of one millisecond"
        await client.send(wire.UTILITY, (0, 8, "hang", (1000,)))
        client.beats.clear()
        while len(client.beats) < 3:
            await client.hello()
            await client.take()
        assert client.beats[-1][0] == client.beats[-2][0], "it beats, and takes no steps"
        assert host.alive
    async with running() as (host, client):
        await client.send(wire.UTILITY, (0, 8, "die", ()))
        assert "SIGKILL" in await host.ended()


@contextmanager
def busy_cores() -> Iterator[None]:
    """Neighbours that take all cores there are."""
    spin = [sys.executable, "-c", "while True: pass"]
    with ExitStack() as ended:
        for _ in range(os.cpu_count() or 1):
            ended.callback(subprocess.Popen(spin).kill)
        yield


@in_a_loop
async def test_one_that_sends_slowly_beside_busy_neighbours_is_not_ended() -> None:
    async def tell(why: str) -> None:
        raise AssertionError(why)

    async with running() as (host, front_end):
        # Its steps make hundreds of messages meanwhile.
        await front_end.call("slow_outputs", 0.2)
        await front_end.add("r", 4000)
        watch = asyncio.create_task(host.end_if_wedged(tell, look_s=0.02))
        with busy_cores():
            sent = [await front_end.outputs() for _ in range(15)]
        assert len(sent) == 15
        assert not watch.done()
        assert host.alive
        watch.cancel()


@in_a_loop
async def test_it_has_the_faults_of_its_configuration() -> None:
    slow = {"what": "slow_down", "after_requests": 1, "factor": 100}
    dies = {"what": "die", "after_requests": 2}
    async with running(with_simulated(step_ms=1, faults=[slow, dies])) as (host, client):
        await client.add("r", 4000)
        first, second = [(await client.outputs())[3] for _ in range(2)]
        assert second - first > 0.1, "a step of one millisecond"
        await client.add("s", 1)
        assert "SIGKILL" in await host.ended()
    hangs = {"what": "hang", "after_s": 0.01}
    async with running(with_simulated(step_ms=1, faults=[hangs])) as (host, client):
        await client.add("r", 4000)
        while len({steps for steps, *_ in client.beats[-3:]}) != 1 or len(client.beats) < 3:
            await client.hello()
            await client.take()
            await asyncio.sleep(0.1)
        assert client.beats[-1][0] < 4000, "it hangs, and has not answered"
        assert host.alive


@in_a_loop
async def test_clients_are_told_when_it_is_stopped() -> None:
    async with running() as (host, client):
        await host.stop(TIMEOUT_S)
        while not client.dead:
            await client.take()
        with pytest.raises(EngineEnded):
            await host.stats(TIMEOUT_S)


@in_a_loop
async def test_what_it_cannot_be_is_said_in_the_replicas_terms() -> None:
    with pytest.raises(StartError, match="KV memory holds"):
        async with running({**OPTIONS, "max_model_len": 10**7}):
            pass


def test_it_ends_with_its_replica() -> None:
    folder = own_run().sockets
    code = f"""
import asyncio, os, time
from pathlib import Path
from loomserve.platform.engine.core.host import EngineHost
from loomserve.platform.engine.core.messages import EngineStart
from loomserve.platform.run.engine_address import EngineAddress
async def main():
    address = EngineAddress.in_folder(Path({str(folder)!r}))
    start = EngineStart(options={OPTIONS!r}, address=address, simulated=True)
    host = await EngineHost.start(start, {{}}, {TIMEOUT_S})
    print(host.pid, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as replica:
        assert replica.stdout is not None
        engine = psutil.Process(int(replica.stdout.readline()))
        os.kill(replica.pid, signal.SIGKILL)
        engine.wait(TIMEOUT_S)
