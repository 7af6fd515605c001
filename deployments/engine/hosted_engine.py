"""One engine of a node's host: its process, and its care. Its front ends are in the gateways.

The engine only computes. Here it is started, told what is wished of it and ended, and what it is
and how loaded is told of it. Nothing here imports vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from pathlib import Path
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from loomserve.deployments.engine.adapters import ReplicaAdapters
from loomserve.deployments.engine.heartbeat import HeartbeatSender, ToldAnswer
from loomserve.deployments.peer_weights import fetch_from_peers
from loomserve.deployments.ray_node import node_address
from loomserve.kvstore.server.options import on_this_node
from loomserve.platform.base.errors import Conflict, TakenOver
from loomserve.platform.base.loopback import is_loopback
from loomserve.platform.devices.binding import engine_environment, pipeline_environment
from loomserve.platform.devices.shortage import (
    memory_bounds,
    note_given_back,
    room_for_engine,
    used_share,
)
from loomserve.platform.engine.core.host import EngineHost, MoveOrders
from loomserve.platform.engine.core.messages import EngineStart
from loomserve.platform.engine.footprint import Footprint, OwnMemory, constants
from loomserve.platform.fleet.messages import (
    AWAKE_PATH,
    LOAD_PATH,
    AwakeOrder,
    DesiredState,
    EngineOrder,
    EngineSpec,
    Heartbeat,
)
from loomserve.platform.http.protocol import INTERNAL
from loomserve.platform.http.server import GuardedApp, HttpServer
from loomserve.platform.lending.replica.agent import LoanAgent
from loomserve.platform.models import catalog
from loomserve.platform.run.engine_address import EngineAddress
from loomserve.platform.run.folder import own_run
from loomserve.platform.run.node_gate import NodeGate
from loomserve.platform.run.sockets import listen_locally
from loomserve.platform.state import ReplicaLoad, StageState
from loomserve.platform.state.roles import configured_role
from loomserve.routers.snapshot import RoutingStats

_START_TIMEOUT_S = 1800.0
# One that sleeps has nothing to tell, but that a request has woken it.
_STATS_PERIOD_S, _ASLEEP_PERIOD_S = 1.0, 4.0
_STATS_TIMEOUT_S = 5.0
# A step may take long, and loans are looked after between two.
_LOANS_TIMEOUT_S = 60.0
# On a GPU weights may have to come back from the host's memory.
_AWAKE_TIMEOUT_S = 60.0
# vLLM's: weights stay at hand.
_SLEEP_LEVEL = 1
_EMPTY_POLL_S = 0.25
_STOP_TIMEOUT_S = 5.0
# What is left to do when an engine has ended asks only its own host and lenders.
_LEAVE_TIMEOUT_S = 2.0
# Where memory is short, requests have so long to go on elsewhere.
_GIVE_BACK_S = 5.0

_log = logging.getLogger("ray.serve")


class HostedEngine:
    """An engine from its start to its end, in the event loop of its host."""

    def __init__(self, order: EngineOrder, heartbeats: HeartbeatSender) -> None:
        self.order = order
        self.id = secrets.token_hex(4)
        self.replica: int | None = None
        """The process of Serve's replica that holds it; None: none does."""
        self.stays = False
        """Whether it is to stay when its replica goes the next time."""
        self.ends = False
        """Whether it has ended, or is about to."""
        self.started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why it could not start, or nothing, once that is known."""
        self._spec = order.spec
        self._device = order.spec.devices[0]
        self._role = configured_role(self._spec.model, self._device.name)
        self._heartbeats = heartbeats
        self._draining = False
        self._has_left = False
        self._kills_for = ""
        self._stop_timeout_s = self._spec.server.drain_timeout_s
        self._metrics = CollectorRegistry()
        self._watching: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._made = contextlib.AsyncExitStack()
        self._part_s: float | None = _LEAVE_TIMEOUT_S
        self._stop_s = 0.0
        self.living = asyncio.create_task(self._live())

    @property
    def pid(self) -> int:
        return self._engine.pid

    @property
    def serves(self) -> bool:
        return self.started.done() and not self.started.result() and not self._has_left

    # Its life

    async def _live(self) -> None:
        try:
            await self._start()
            self.started.set_result("")
            await self._tell()
            how = await self._engine.ended()
            if self._ending is None:
                _log.error("the engine of %s has ended: %s", self._spec.model.name, how)
        except Exception as error:
            if not self.started.done():
                self.started.set_result(str(error) or repr(error))
        finally:
            self.ends = self._has_left = True
            await self._made.aclose()

    async def end(self) -> None:
        """Have requests go on elsewhere, then stop the engine."""
        if self._ending is None:
            self.ends = True
            self._ending = asyncio.create_task(self._end())
        await asyncio.wait([self._ending])

    async def _end(self) -> None:
        if not self.started.done():
            self.started.set_result("it is not wanted any more")
            self.living.cancel()
        elif self.serves:
            await self._loans.take_back()
            await self._until_empty()
            self._part_s, self._stop_s = None, _STOP_TIMEOUT_S
            await self._made.aclose()
        await asyncio.wait([self.living])

    async def _give_back(self) -> None:
        """End; another is started in its place, which waits for memory."""
        note_given_back(own_run().path, self._spec.model.name, await self._memory())
        self._stop_timeout_s = _GIVE_BACK_S
        await self._end()

    async def _until_empty(self) -> None:
        """Gateways learn of it with the next heartbeat, and move what can go on elsewhere."""
        deadline = time.monotonic() + self._stop_timeout_s
        await self._tell()
        while self._engine.alive and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError, RuntimeError):  # it is slow, and has requests
                await self._read_load()
                if not _open_requests(self._load):
                    return
            await asyncio.sleep(_EMPTY_POLL_S)

    async def _part(self) -> None:
        """Leave those that it has loans with, though its engine may have ended."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._part_s):
                await self._loans.take_back()
                await self._loans.give_back()

    async def _stop(self) -> None:
        await self._engine.stop(self._stop_s)

    async def _start(self) -> None:
        began = time.monotonic()
        self._path = await asyncio.to_thread(_weights_here, self._spec)
        await room_for_engine(own_run().path, self._spec.model.name, _log.warning)
        self._engine = await self._launched()
        self._made.push_async_callback(self._stop)
        self._load = await self._engine.stats(_START_TIMEOUT_S)
        self._loans = LoanAgent(self._call_loans, self._spec, self.id, self._metrics)
        self._made.push_async_callback(self._part)
        self._adapters = ReplicaAdapters(
            self._engine, self._spec, is_asleep=lambda: self._load.asleep, changed=self._tell
        )
        self._first = ToldAnswer(changed=self._tell)
        self._moves = MoveOrders(self._engine, self._tell)
        self._made.push_async_callback(self._moves.close)
        await self._listen()
        self._own = OwnMemory(self._engine.pid)
        self._footprint = Footprint(
            constants(self._path, self._engine.facts, _kv_bytes(self._spec)),
            start_s=time.monotonic() - began,
            measure=self._memory,
            registry=self._metrics,
        )
        self._watch(watches=not self._load.asleep)
        self._made.callback(lambda: self._watch(watches=False))
        works = (
            self._footprint.keep(),
            self._follow_load(),
            self._loans.run(),
            self._adapters.run(),
        )
        for work in works:
            self._made.callback(asyncio.ensure_future(work).cancel)

    async def _launched(self) -> EngineHost:
        options, store = self.order.options, self._spec.kv_transfer_config
        if store is not None and (node := self._device.node):
            options = {**options, "kv_transfer_config": on_this_node(store, node)}
        start = EngineStart(
            options={**options, "model": self._path, "served_model_name": [self._spec.model.name]},
            address=EngineAddress.in_folder(own_run().sockets),
            host=None if is_loopback(node_address()) else node_address(),
            simulated=self._spec.model.is_simulated,
            device=self._device.name,
        )
        environment = {**self.order.environment, **_place(self._spec)}
        # A pipeline's engine on GPUs starts its workers by itself, as vLLM does, and has not been
        # forked.
        fork = self._device.kind == "cpu" or not self._spec.stage_layers
        return await EngineHost.start(start, environment, _START_TIMEOUT_S, fork=fork)

    def _watch(self, *, watches: bool) -> None:
        """Have it killed if it stands still; one that sleeps has nothing to do."""
        if watches and self._watching is None:
            watching = self._engine.end_if_wedged(self._tell_end)
            self._watching = asyncio.create_task(watching)
        elif not watches and self._watching is not None:
            self._watching.cancel()
            self._watching = None

    async def _tell_end(self, why: str) -> None:
        self._kills_for = why
        await self._tell()

    # What it is asked

    async def _listen(self) -> None:
        app = Starlette(
            routes=[
                Route(LOAD_PATH, self._show_load),
                Route("/metrics", self._show_metrics),
                Route(AWAKE_PATH, self._set_awake, methods=["PUT"]),
                *self._loans.routes,
                *self._adapters.routes,
                *self._first.routes,
            ]
        )
        sock, address = listen_locally(f"replica-{self.id}", node_address())
        guarded = GuardedApp(app, self._spec.internal_token)
        self._http = HttpServer(guarded, sock, bounds=INTERNAL)
        await self._http.start()
        self._made.push_async_callback(self._http.stop, 0)
        self._gate = await NodeGate.open(address, self._spec.internal_token)
        self._made.push_async_callback(self._gate.close)

    async def _show_load(self, request: Request) -> Response:
        await self._read_load()
        return Response(self._stats().model_dump_json(), media_type="application/json")

    async def _show_metrics(self, request: Request) -> Response:
        page = await self._engine.metrics(_STATS_TIMEOUT_S)
        return PlainTextResponse(page + generate_latest(self._metrics).decode())

    async def _set_awake(self, request: Request) -> Response:
        order = AwakeOrder.model_validate_json(await request.body())
        try:
            self._heartbeats.controllers.check(order.generation)
            if order.awake:
                await self._engine.wake(timeout_s=_AWAKE_TIMEOUT_S)
            else:
                await self._engine.sleep(_SLEEP_LEVEL, timeout_s=_AWAKE_TIMEOUT_S)
        except ValueError as error:
            refused = Conflict(f"the engine does not sleep: {error}")
            return JSONResponse(refused.body(), status_code=refused.status)
        except TakenOver as error:
            return JSONResponse(error.body(), status_code=error.status)
        await self._read_load()
        if order.awake:
            self._adapters.look_again()
        return JSONResponse({"asleep": self._load.asleep})

    async def _follow_load(self) -> None:
        while True:
            await asyncio.sleep(_ASLEEP_PERIOD_S if self._load.asleep else _STATS_PERIOD_S)
            with contextlib.suppress(Exception):  # its end is seen elsewhere
                await self._read_load()

    async def _read_load(self) -> None:
        self._load = await self._engine.stats(_STATS_TIMEOUT_S)
        if not self._has_left:
            self._watch(watches=not self._load.asleep)

    async def _call_loans(self, name: str, /, *given: Any) -> Any:
        (answer,) = await self._engine.collective_rpc(
            f"loans.{name}", *given, timeout_s=_LOANS_TIMEOUT_S
        )
        return answer

    async def _memory(self) -> int:
        """Bytes that it has of its device's memory."""
        if self._device.kind == "cpu":
            return await asyncio.to_thread(self._own.read)
        return sum(await self._engine.collective_rpc("taken_bytes", timeout_s=_STATS_TIMEOUT_S))

    # What it tells the controller

    async def _tell(self) -> None:
        await self._heartbeats.send_now(self)

    def heartbeat(self) -> Heartbeat:
        if self.replica is not None and not psutil.pid_exists(self.replica):
            self.replica = None  # it was killed, and Serve starts another
        return Heartbeat(
            model=self._spec.model,
            replica_id=self.id,
            device=self._device.name,
            stages=_stages_of(self._spec),
            address=self._gate.address,
            pid=self.replica or os.getpid(),
            held=self.replica is not None,
            engine_pid=self._engine.pid,
            max_model_len=self._engine.facts.max_model_len,
            in_flight=_open_requests(self._load),
            memory_used=used_share(memory_bounds()),
            stats=self._stats(),
            borrowing=self._loans.borrowing,
            lent=self._loans.lent,
            footprint=self._footprint.state,
            engine=self._engine.address,
            front_end=self.order.front_end,
            moved=self._moves.last,
            adapters=self._adapters.reports,
            ends=self._kills_for,
            answers=self._first.answers,
            problem=self._first.problem,
        )

    def _stats(self) -> RoutingStats:
        facts = self._engine.facts
        return RoutingStats(
            load=self._load,
            max_running=facts.max_running,
            kv_capacity_tokens=facts.blocks * facts.block_tokens,
            draining=self._draining or self.ends or bool(self._kills_for),
            role=self._role,
            told_at=time.monotonic(),
        )

    def apply(self, desired: DesiredState) -> None:
        self._draining, self._role = desired.draining, desired.role
        self._loans.apply(desired)
        self._moves.apply(desired.move)
        self._adapters.apply(desired)
        if self._ending is not None:
            return
        self._stop_timeout_s = desired.stop_timeout_s
        if desired.gives_back:
            _log.error("the engine of %s ends: %s", self._spec.model.name, desired.gives_back)
            self.ends, self._ending = True, asyncio.create_task(self._give_back())


def _open_requests(load: ReplicaLoad) -> int:
    return load.running + load.waiting


def _kv_bytes(spec: EngineSpec) -> int:
    return spec.model.kv_cache_memory + (spec.lending.borrow_bytes if spec.lending else 0)


def _place(spec: EngineSpec) -> dict[str, str]:
    """What binds an engine's processes to their devices."""
    if spec.stage_layers:
        return pipeline_environment(spec.devices, spec.stage_layers)
    return engine_environment(spec.devices[0])


def _weights_here(spec: EngineSpec) -> str:
    """Folder or hub id of the weights, which are fetched if need be; raises LoomserveError."""
    if not Path(spec.path).is_absolute() or Path(spec.path).exists():
        return spec.path
    model = spec.model
    fetch_from_peers(model.source)
    return str(catalog.resolve(model.source, Path(spec.base), revision=model.revision))


def _stages_of(spec: EngineSpec) -> tuple[StageState, ...]:
    """The stages of a pipeline; else none."""
    return tuple(
        StageState(device=device.name, layers=layers)
        for device, layers in zip(
            spec.devices[: len(spec.stage_layers)], spec.stage_layers, strict=True
        )
    )
