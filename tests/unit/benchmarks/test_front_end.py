"""What the benchmark of one front end waits for, and what it does not take for a measurement."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from aiohttp.typedefs import Handler

from benchmarks.front_end import (
    ARMS,
    AtOnce,
    NotReadyError,
    Plan,
    load,
    parse,
    plan_of,
    report,
    served,
)
from benchmarks.harness import NotMeasuredError
from loomserve.platform.simulated.options import EngineOptions
from loomserve.platform.simulated.wire import WireRequest

PLAN = Plan(
    streams=2,
    period_s=0.01,
    seconds=0.2,
    warmup=0.1,
    max_tokens=3,
    path="/v1/completions",
    stream_interval=1,
    stream=True,
    bare=False,
)


def asked(handler: Handler, question: Callable[[int], Coroutine[Any, Any, Any]]) -> None:
    async def ask() -> None:
        app = web.Application()
        app.router.add_post(PLAN.path, handler)
        async with TestServer(app) as server:
            await question(server.port or 0)

    asyncio.run(ask())


async def answer(_: web.Request) -> web.Response:
    return web.Response(text='data: {"choices": []}\n\ndata: [DONE]\n\n')


async def silence(_: web.Request) -> web.Response:
    await asyncio.sleep(60)
    raise AssertionError


def test_the_load_waits_for_an_engine_that_starts() -> None:
    count = itertools.count()

    async def starting(request: web.Request) -> web.Response:
        return web.Response(status=503) if next(count) < 2 else await answer(request)

    asked(starting, lambda port: served(port, PLAN))
    assert next(count) == 3


def test_an_engine_that_never_starts_is_told_within_the_bound() -> None:
    async def unready(_: web.Request) -> web.Response:
        return web.Response(status=503, text="no engine")

    with pytest.raises(NotReadyError, match="no engine"):
        asked(unready, lambda port: served(port, PLAN, timeout_s=0.3))


def test_a_request_that_is_refused_is_told_at_once() -> None:
    async def refused(_: web.Request) -> web.Response:
        return web.Response(status=404, text="no such path")

    with pytest.raises(NotMeasuredError, match="no such path"):
        asked(refused, lambda port: served(port, PLAN))


def test_a_window_in_which_nothing_came_is_no_measurement() -> None:
    with pytest.raises(NotMeasuredError, match="nothing came"):
        asked(silence, lambda port: load(port, PLAN, psutil.Process()))


def test_each_arm_has_its_own_plan() -> None:
    plans = {arm: plan_of(arm, parse([])) for arm in ARMS}
    assert {arm for arm, plan in plans.items() if plan.bare} == {"chunks_bare", "whole_bare"}
    assert {arm for arm, plan in plans.items() if plan.stream} == {"chunks", "chunks_bare"}


def test_whole_answers_come_from_the_engine_in_one_step() -> None:
    given = {"kv_cache_memory_bytes": 2**28, "max_model_len": 256}
    engine = AtOnce(EngineOptions.of(given))
    params = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}
    for name in ("a", "b"):
        engine.add(WireRequest(name, [5, 6, 7], None, params, None, 0.0, None, None), 1, 0.0)
    engine.begin(0.0)
    answers = engine.end(1.0)[1].outputs
    assert [(len(each.new_token_ids), each.finished) for each in answers] == [(48, True)] * 2
    assert engine.is_idle


def test_the_front_end_is_compared_with_the_bare_layer_run_by_run() -> None:
    counts = {"chunks": [8.0, 12.0, 9.0], "chunks_bare": [10.0, 12.0, 12.0], "whole": [5.0] * 3}
    found = report({arm: [{"per_core_s": n} for n in runs] for arm, runs in counts.items()})
    assert found["per_core_s"]["chunks"]["median"] == 9.0
    assert found["over_bare"]["chunks"]["all"] == (0.8, 1.0, 0.75)
    assert set(found["over_bare"]) == {"chunks"}
