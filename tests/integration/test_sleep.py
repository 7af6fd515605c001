"""A real engine sleeps: memory goes back, and its answers are as before when it wakes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence

import psutil
import pytest

from tests.integration.served_engine import (
    BareClient,
    ServedEngine,
    answers,
    connected,
    pump_until,
)
from tests.waiting import PATIENCE_S, fastest

pytestmark = pytest.mark.engine

MIB = 2**20
# Of the engine's 96 MiB; a prompt's token takes 46 KB.
USED = 64 * MIB
CALL_S = 30.0


@pytest.fixture(name="client")
def _client(served_engine: ServedEngine) -> Iterator[BareClient]:
    with connected(served_engine.address) as client:
        yield client


@pytest.fixture(autouse=True)
def _awake(served_engine: ServedEngine) -> Iterator[None]:
    yield
    served_engine.run(served_engine.host.wake(timeout_s=CALL_S))


def prompts(seed: int, count: int = 8, length: int = 250) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1000, 20000) for _ in range(length)] for _ in range(count)]


def told(client: BareClient, asked: Sequence[Sequence[int]], tokens: int = 8) -> list[list[int]]:
    names = [client.add(prompt, max_tokens=tokens, ignore_eos=True) for prompt in asked]
    return [stream.tokens for stream in answers(client, names)]


def sleep(engine: ServedEngine) -> None:
    """As soon as it has seen the last request off."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return engine.run(engine.host.sleep(1, timeout_s=CALL_S))
        except ValueError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def own_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_full_info().pss)


def asleep(engine: ServedEngine) -> bool:
    return engine.run(engine.host.stats(CALL_S)).asleep


def test_kv_memory_and_weights_go_back_and_answers_are_the_same_afterwards(
    served_engine: ServedEngine, client: BareClient
) -> None:
    asked = prompts(1)
    before = told(client, asked)
    pid = served_engine.host.facts.pid
    used = own_bytes(pid)
    sleep(served_engine)
    assert asleep(served_engine)
    # Its embeddings, which are its output head too, and that head packed.
    weights = served_engine.host.facts.dropped_bytes
    assert weights == 2 * 4 * 49152 * 576
    asleep_bytes = own_bytes(pid)
    assert used - asleep_bytes > USED + 0.95 * weights
    served_engine.run(served_engine.host.wake(timeout_s=CALL_S))
    assert not asleep(served_engine)
    awake = own_bytes(pid)
    assert awake < used - USED, "pages come back with what is written to them"
    assert awake > asleep_bytes + 0.45 * weights
    assert told(client, asked) == before
    assert served_engine.host.alive


def test_it_wakes_with_a_request_that_comes_meanwhile(
    served_engine: ServedEngine, client: BareClient
) -> None:
    asked = prompts(2, count=2)
    before = told(client, asked)
    sleep(served_engine)
    assert told(client, asked) == before
    assert not asleep(served_engine)


def test_it_does_not_sleep_while_it_has_requests(
    served_engine: ServedEngine, client: BareClient
) -> None:
    name = client.add(prompts(3)[0], max_tokens=100, ignore_eos=True)
    pump_until(lambda: bool(client.streams[name].tokens), client)
    asked = asyncio.run_coroutine_threadsafe(
        served_engine.host.sleep(1, timeout_s=CALL_S), served_engine.loop
    )
    # A client that says nothing for a while is let go.
    pump_until(asked.done, client)
    with pytest.raises(ValueError, match="it has requests"):
        asked.result()
    (stream,) = answers(client, [name])
    assert len(stream.tokens) == 100
    assert not asleep(served_engine)


def test_clients_stay_connected_and_hear_beats_while_it_sleeps(
    served_engine: ServedEngine, client: BareClient
) -> None:
    sleep(served_engine)
    heard = len(client.beats)
    pump_until(lambda: len(client.beats) >= heard + 4, client, within_s=10)
    assert len(client.ready) == 1
    assert not client.dead
    assert asleep(served_engine)


def test_sleeping_and_waking_take_milliseconds(served_engine: ServedEngine) -> None:
    def there_and_back() -> None:
        sleep(served_engine)
        served_engine.run(served_engine.host.wake(timeout_s=CALL_S))

    assert fastest(there_and_back, 3) < 2


def test_one_that_computes_or_sleeps_is_not_taken_for_one_that_stands_still(
    served_engine: ServedEngine, client: BareClient
) -> None:
    told_why: list[str] = []

    async def tell(why: str) -> None:
        told_why.append(why)

    async def watched() -> None:
        watch = asyncio.create_task(served_engine.host.end_if_wedged(tell, limit_s=2, look_s=0.25))
        await asyncio.sleep(5)
        for _ in range(3):
            await served_engine.host.turn()
        watch.cancel()

    watching = asyncio.run_coroutine_threadsafe(watched(), served_engine.loop)
    told(client, prompts(5), tokens=16)
    sleep(served_engine)
    watching.result(PATIENCE_S)
    assert asleep(served_engine)
    assert not told_why
