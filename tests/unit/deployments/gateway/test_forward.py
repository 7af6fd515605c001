"""Requests that engines end with, refuse or leave half answered, over real connections."""

from __future__ import annotations

import asyncio
import json
import logging
import time

import pytest

from loomserve.deployments.gateway.forward import CollectedAnswer, ForwardRequest, never_gone
from loomserve.platform.base.errors import EngineGone, InternalError, Unavailable
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.routers.block_keys import BLOCK_BYTES
from tests.unit.deployments.gateway.engines import (
    GOOD,
    Engine,
    answered,
    dies,
    gateway,
    good,
)

pytestmark = pytest.mark.anyio
KILLER = b'{"model": "m", "prompt": "kill"}'
HARMLESS = b'{"model": "m", "prompt": "live"}'


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def request(body: bytes = KILLER, pinned_to: str | None = None) -> ForwardRequest:
    content = EngineRequest("/v1/completions", json.loads(body), body)
    return ForwardRequest("m", content, "id-1", pinned_to=pinned_to, received=body)


async def killed_by_its_body(engine: Engine, body: bytes) -> bytes | None:
    return await dies(engine, body) if body == KILLER else await good(engine, body)


async def test_of_one_request_at_most_two_engines_end_and_a_third_is_never_asked() -> None:
    async with gateway(*[killed_by_its_body] * 4) as (forwarder, model, engines):
        for attempt in range(5):
            with pytest.raises(EngineGone) as gone:
                await forwarder.collect(request(), model)
            assert gone.value.code == ("query_of_death" if attempt else "engine_gone")
            assert "id-1" in gone.value.message
        assert [engine.dead for engine in engines] == [True, True, False, False]
        assert sum(len(engine.asked) for engine in engines) == 2
        # Others are served, by the engines that are left.
        assert await forwarder.collect(request(HARMLESS), model) == (200, GOOD)


async def test_the_same_request_is_known_again_whatever_the_platform_adds_to_it() -> None:
    async with gateway(*[killed_by_its_body] * 3) as (forwarder, model, engines):
        for _ in range(2):
            with pytest.raises(EngineGone):
                await forwarder.collect(request(), model)
        later = EngineRequest("/v1/completions", {**json.loads(KILLER), "hint": time.time()})
        with pytest.raises(EngineGone, match="very request"):
            await forwarder.collect(ForwardRequest("m", later, "id-2", received=KILLER), model)
        assert not engines[2].dead


async def test_a_request_that_another_engine_ended_with_is_not_sent_on() -> None:
    async with gateway(*[killed_by_its_body] * 3) as (forwarder, model, engines):
        with pytest.raises(EngineGone):
            await forwarder.collect(request(pinned_to="r1"), model)
        assert [engine.dead for engine in engines] == [True, False, False]
        model.engines = engines[1:]
        with pytest.raises(EngineGone):
            await forwarder.collect(request(), model)
        assert [engine.dead for engine in engines] == [True, True, False]


async def test_an_engine_that_ended_by_chance_costs_the_request_nothing() -> None:
    async with gateway(dies, good, good) as (forwarder, model, engines):
        for _ in range(3):
            assert await forwarder.collect(request(), model) == (200, GOOD)
        # It was answered, so it may be sent on again.
        engines[1].behave = dies
        assert await forwarder.collect(request(), model) == (200, GOOD)
        assert len(engines[2].asked) == 1


async def test_what_no_engine_has_taken_goes_to_the_next_as_often_as_need_be() -> None:
    async def full(engine: Engine, body: bytes) -> bytes:
        return answered(503, b"{}")

    async with gateway(good, full, good) as (forwarder, model, engines):
        await engines[0].end()
        for _ in range(5):
            assert await forwarder.collect(request(), model) == (200, GOOD)
        assert len(engines[2].asked) == 5
        engines[2].behave = full
        with pytest.raises(Unavailable) as away:
            await forwarder.collect(request(), model)
        assert (away.value.code, away.value.headers()) == ("no_replica", {"Retry-After": "5"})


async def test_an_engine_that_says_that_it_ended_with_a_request_counts_as_one() -> None:
    async def ended(engine: Engine, body: bytes) -> bytes:
        engine.dead = True
        return answered(502, b"{}")

    async with gateway(ended, ended, ended) as (forwarder, model, engines):
        for _ in range(3):
            with pytest.raises(EngineGone):
                await forwarder.collect(request(), model)
        assert [engine.dead for engine in engines] == [True, True, False]


async def test_a_failure_of_an_engine_is_answered_at_once_without_the_engines_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fails(engine: Engine, body: bytes) -> bytes:
        return answered(500, b'{"error": {"message": "secret of /opt/engine.py"}}')

    async with gateway(fails, good) as (forwarder, model, engines):
        with caplog.at_level(logging.ERROR), pytest.raises(InternalError) as failed:
            await forwarder.collect(request(), model)
        assert not engines[1].asked
    assert "id-1" in failed.value.message
    assert "secret" not in failed.value.message
    assert any("id-1" in text and "secret of" in text for text in caplog.messages)


async def test_a_kept_connection_that_was_closed_is_no_engines_end() -> None:
    async with gateway(good, good) as (forwarder, model, engines):
        # Its server closes the kept connection just when it is used again.
        async def closes_once(engine: Engine, body: bytes) -> bytes | None:
            engine.behave = good
            return None

        for behave in (good, closes_once) * 3:
            engines[0].behave = behave
            assert await forwarder.collect(request(), model) == (200, GOOD)
        assert not engines[1].asked, "it was asked again, and not another"
        assert (engines[0].connections, len(engines[0].asked)) == (6, 9)


async def test_an_engine_that_ends_with_a_kept_connection_has_ended_with_the_request() -> None:
    async with gateway(*[killed_by_its_body] * 3) as (forwarder, model, engines):
        for engine in engines:
            model.engines = [engine]
            assert await forwarder.collect(request(HARMLESS), model) == (200, GOOD)
        model.engines = engines
        for _ in range(3):
            with pytest.raises(EngineGone):
                await forwarder.collect(request(), model)
        assert [engine.dead for engine in engines] == [True, True, False]


async def test_an_answer_that_breaks_off_is_not_begun_anew_but_remembered() -> None:
    async def breaks_off(engine: Engine, body: bytes) -> bytes | None:
        (writer,) = engine._writers
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
        await writer.drain()
        return await dies(engine, body)

    async with gateway(breaks_off, breaks_off, breaks_off) as (forwarder, model, engines):
        for died in (1, 2, 2):
            answer = CollectedAnswer()
            with pytest.raises(EngineGone):
                await forwarder.forward(request(), model, never_gone, answer.send)
            assert sum(engine.dead for engine in engines) == died
        assert not engines[2].asked


async def test_of_a_stream_that_breaks_off_within_an_event_whole_events_are_passed_on() -> None:
    async def breaks_off(engine: Engine, body: bytes) -> bytes | None:
        (writer,) = engine._writers
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"content-length: 1000\r\n\r\n")
        for part in (b'data: {"a": 1}\n\n', b'data: {"b"', b': 2}\n\ndata: {"c"'):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)
        return await dies(engine, body)

    async with gateway(breaks_off) as (forwarder, model, _):
        answer = CollectedAnswer()
        with pytest.raises(EngineGone):
            await forwarder.forward(request(), model, never_gone, answer.send)
    assert answer.body == b'data: {"a": 1}\n\ndata: {"b": 2}\n\n'


@pytest.mark.parametrize("pause_s", [0.1, None])
async def test_an_answer_that_stands_still_ends_and_one_that_is_slow_does_not(
    pause_s: float | None,
) -> None:
    async def slowly(engine: Engine, body: bytes) -> bytes | None:
        (writer,) = engine._writers
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n")
        # The first byte may take longer.
        await asyncio.sleep(0.6)
        for _ in range(12):
            writer.write(b"x")
            await asyncio.sleep(3 if pause_s is None else pause_s)
        return b""

    async with gateway(slowly, good, idle_timeout_s=0.4) as (forwarder, model, engines):
        began = time.monotonic()
        if pause_s is not None:
            assert await forwarder.collect(request(), model) == (200, b"x" * 12)
            return
        with pytest.raises(EngineGone) as stalled:
            await forwarder.collect(request(), model)
        assert stalled.value.code == "engine_stalled"
        assert 1.0 <= time.monotonic() - began < 2.0
        assert not engines[1].asked


async def test_a_client_that_does_not_read_is_not_taken_for_an_engine_that_stands_still() -> None:
    size = 2**22

    async def much(engine: Engine, body: bytes) -> bytes:
        return answered(200, b"x" * size)

    read = 0

    async def slow(message: object) -> None:
        nonlocal read
        assert isinstance(message, dict)
        if not read and message.get("body"):
            await asyncio.sleep(0.5)
        read += len(message.get("body", b""))

    async with gateway(much, idle_timeout_s=0.1) as (forwarder, model, _):
        await forwarder.forward(request(), model, never_gone, slow)
    assert read == size


async def test_the_router_is_told_how_the_prompt_begins_at_each_attempt() -> None:
    story = "Once upon a time there was a weaver. " * 50
    async with gateway(dies, good) as (forwarder, model, _):
        for ending in ("She sang.", "She slept."):
            body = json.dumps({"model": "m", "prompt": story + ending}).encode()
            await forwarder.collect(request(body), model)
    first, again, *others = (ticket.block_keys for ticket in model.tickets)
    assert first == again
    for other in others:
        assert len(set(first) & set(other)) == len(story) // BLOCK_BYTES > 5
