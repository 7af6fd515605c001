"""Requests to an engine on another node, and what becomes of them when it is cut off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from vllm.v1.engine import FinishReason

from loomserve.platform.engine.core.network_sockets import SILENCE_MS, NetworkSockets
from loomserve.platform.run.engine_address import EngineAddress, EngineNetwork
from tests.unit.platform.front_end.engine.peer import PeerEngine
from tests.unit.platform.front_end.engine.scene import BOUNDS, Scene, played, request, until

GONE_S = 1 + SILENCE_MS / 1000 + 2
"""Heartbeats come every second; the rest is the test's own."""


class Cable:
    """Passes bytes between two ends on this machine, until it is pulled: then nothing comes."""

    def __init__(self) -> None:
        self._plugged = asyncio.Event()
        self._plugged.set()
        self._passing: set[asyncio.Task[None]] = set()

    def pull(self) -> None:
        self._plugged.clear()

    def plug_in(self) -> None:
        """What was on its way before is lost, as are its connections."""
        for task in self._passing:
            task.cancel()
        self._plugged.set()

    async def to(self, endpoint: str) -> str:
        """An endpoint that leads to another one."""
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._plugged.wait()
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
            ways = ((reader, there_writer), (there_reader, writer))
            tasks = {asyncio.create_task(self._pass(*way)) for way in ways}
            self._passing |= tasks
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            writer.close()
            there_writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while piece := await source.read(65536):
            await self._plugged.wait()
            sink.write(piece)


@asynccontextmanager
async def far_engine(made: Scene, name: str) -> AsyncIterator[Cable]:
    """An engine that can be reached by a cable only."""
    engine = PeerEngine(made.folder, network=NetworkSockets("127.0.0.1")).start()
    network = engine.address.network
    assert network is not None
    cable = Cable()
    seen: EngineNetwork = replace(
        network, input=await cable.to(network.input), output=await cable.to(network.output)
    )
    nowhere = f"ipc://{made.folder}/of-another-node"
    engine.address = EngineAddress(nowhere, nowhere, seen)
    made.engines[name] = engine
    yield cable


def test_it_answers_as_one_on_this_node_does() -> None:
    async def play(made: Scene) -> None:
        async with far_engine(made, "a"):
            await made.have("a")
            await made.ask(request("r", 3), request("s", 200))
            await made.engines["a"].step(3)
            await until(lambda: made.finished == {"r": FinishReason.LENGTH})
            assert made.got["r"] == [0, 1, 2]
            await made.client.abort_requests_async(["s"])
            await until(lambda: made.engines["a"].aborted == ["s"])

    played(play)


def test_its_requests_go_on_within_seconds_when_it_is_cut_off_and_it_is_used_again() -> None:
    async def play(made: Scene) -> None:
        async with far_engine(made, "a") as cable:
            await made.have("a", "b")
            await made.ask(request("r", 6))
            await made.engines["a"].step(2)
            await until(lambda: made.got == {"r": [0, 1]})
            cable.pull()
            began = time.monotonic()
            b = made.engines["b"]
            await until(lambda: set(b.work) == {"r#1"})
            assert time.monotonic() - began < BOUNDS.silence_s + 2
            await b.step(4)
            await until(lambda: made.finished == {"r": FinishReason.LENGTH})
            assert made.got == {"r": [0, 1, 2, 3, 4, 5]}
            # It is not only left: the connection ends, although nobody says so.
            await until(lambda: "a" not in made.client.replicas, GONE_S)
            cable.plug_in()
            await until(lambda: "a" in made.client.replicas)
            await made.ask(request("s", 1))
            await made.engines["a"].step()
            await until(lambda: "s" in made.finished)

    played(play)
