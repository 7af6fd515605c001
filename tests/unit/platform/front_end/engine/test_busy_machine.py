"""An engine that is slow is none that has ended: it is left late, and no request is blamed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

import pytest
from vllm.v1.engine import FinishReason

from loomserve.platform.engine.process.attentive_clock import Work
from loomserve.platform.engine.process.peer_process import PeerState
from loomserve.platform.front_end.engine import replica
from loomserve.platform.front_end.engine.request_book import LostRequestError
from tests.unit.platform.front_end.engine.scene import (
    BOUNDS,
    Scene,
    played,
    request,
    until,
)

# It takes long, so that it begins first.
pytestmark = pytest.mark.xdist_group("busy machine")

# Of these the second until it is looked at, and a tick or two, count whole.
SHORT = replace(BOUNDS, silence_s=3, hang_s=20)
BEATS = replace(BOUNDS, silence_s=20, hang_s=4)
HANGS = replace(BOUNDS, silence_s=20, hang_s=3)


@dataclass
class Process:
    """An engine's process as the kernel would tell of it."""

    share: float = 0.0
    """Of a core that it has."""
    wants: bool = False
    ended: bool = False
    looks: int = 0
    _since: float = field(default_factory=time.monotonic)

    def work(self) -> Work:
        return Work(self.share * (time.monotonic() - self._since), self.wants)

    def state(self) -> PeerState:
        self.looks += 1
        return PeerState.ENDS if self.ended else PeerState.RUNS

    def close(self) -> None:
        pass


def see(made: Scene, name: str, process: Process) -> Process:
    """Have the client see this process behind an engine's sockets."""
    made.client.replicas[name].connection.process = process  # type: ignore[assignment]
    return process


async def both(made: Scene, process: Process) -> None:
    await made.have("a", "b")
    see(made, "a", process)
    await made.ask(request("r"))


def reasons(made: Scene, *names: str) -> list[float]:
    return [made.count("continued_requests_total", reason=each) for each in names]


@pytest.mark.parametrize("process", [Process(wants=True), Process(share=0.5)])
def test_one_that_waits_for_a_core_or_computes_is_not_silent(process: Process) -> None:
    async def play(made: Scene) -> None:
        await both(made, process)
        a, b = made.engines["a"], made.engines["b"]
        a.silent = True
        await asyncio.sleep(3 * SHORT.silence_s)
        assert "r#1" not in b.work
        assert (made.client.requests._usable or made.client.requests._look()) == {"a", "b"}
        process.wants, process.share = False, 0.0
        await until(lambda: "r#1" in b.work)
        assert reasons(made, "silent", "hung") == [1, 0]

    played(play, SHORT)


@pytest.mark.parametrize("process", [Process(wants=True), Process(share=0.5)])
def test_one_that_takes_no_step_meanwhile_does_not_hang(process: Process) -> None:
    async def play(made: Scene) -> None:
        await both(made, process)
        await asyncio.sleep(3 * HANGS.hang_s)
        assert not made.engines["b"].added
        process.wants, process.share = False, 0.0
        await until(lambda: "r#1" in made.engines["b"].work)
        assert reasons(made, "silent", "hung") == [0, 1]

    played(play, HANGS)


def test_one_that_computes_for_ever_is_left_at_last() -> None:
    async def play(made: Scene) -> None:
        await both(made, Process(share=1.0))
        began = time.monotonic()
        await until(lambda: "r#1" in made.engines["b"].work, 25)
        assert time.monotonic() - began > BEATS.hang_s
        assert reasons(made, "hung") == [1]

    played(play, replace(HANGS, hang_s=2.5))


def test_a_request_is_not_deadly_of_which_engines_stood_still_but_did_not_end() -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b", "c")
        for each in ("a", "b"):
            see(made, each, Process())
        await made.ask(request("r"))
        await until(lambda: "r" in made.failed, 20)
        failed = made.failed["r"]
        assert isinstance(failed, LostRequestError)
        assert (failed.error.status, failed.error.code) == (502, "engine_stalled")
        assert not made.engines["c"].added, "a third one is not risked"
        assert made.count("uncontinued_requests_total", reason="stalled") == 1

    played(play, HANGS)


def test_a_connection_that_ends_is_no_end_of_an_engine() -> None:
    async def play(made: Scene) -> None:
        await both(made, Process())
        made.first = "b"
        for attempt, name in enumerate(("a", "b", "a"), 1):
            see(made, name, Process())
            made.client.replicas[name].connection._broken.set()
            there = made.engines["b" if name == "a" else "a"]
            await until(lambda there=there, attempt=attempt: f"r#{attempt}" in there.work)
            await until(lambda: len(made.client.replicas) == 2)
        assert reasons(made, "cut", "gone") == [3, 0]
        assert not made.failed

    played(play)


def test_a_process_that_has_ended_is_the_end_of_its_engine() -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b", "c")
        await made.ask(request("r"))
        for name, wire_id in (("a", "r"), ("b", "r#1")):
            see(made, name, Process(ended=True))
            await until(lambda name=name, wire_id=wire_id: wire_id in made.engines[name].work)
            made.client.replicas[name].connection._broken.set()
        await until(lambda: "r" in made.failed)
        failed = made.failed["r"]
        assert isinstance(failed, LostRequestError)
        assert failed.error.code == "query_of_death"

    played(play)


def test_an_engine_elsewhere_says_itself_that_it_computes() -> None:
    async def play(made: Scene) -> None:
        await made.have("a", "b")
        await made.ask(request("r"))
        replica, began = made.client.replicas["a"], time.monotonic()
        told = replica.beat

        def beat(steps: int, running: int, waiting: int, cpu_s: float | None = None) -> None:
            told(steps, running, waiting, time.monotonic() - began)

        replica.beat = beat  # type: ignore[method-assign]
        # What share of a core that is, two beats tell.
        await asyncio.sleep(2.5 * BEATS.hang_s)
        assert not made.engines["b"].added

    played(play, BEATS)


def test_one_without_requests_is_looked_at_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process()
    monkeypatch.setattr(replica, "_REST_INTERVAL_S", 1e6)
    monkeypatch.setattr(replica, "seen_process", lambda _: process)

    async def play(made: Scene) -> None:
        await made.have("a")
        await asyncio.sleep(5 * replica._POLL_INTERVAL_S)
        assert process.looks == 1
        await made.ask(request("r"))
        await until(lambda: process.looks > 5)
        await made.engines["a"].step(finish=FinishReason.LENGTH)
        await until(lambda: not made.client.replicas["a"].open)
        await asyncio.sleep(5 * replica._POLL_INTERVAL_S)
        looks = process.looks
        await asyncio.sleep(5 * replica._POLL_INTERVAL_S)
        assert process.looks == looks
        process.ended = True
        await made.ask(request("s"))
        await until(lambda: not made.client.replicas)

    played(play)
