"""A replica of a model: one engine's process, and its care. Its front ends are in the gateways.

The engine only computes. The replica starts it, tells what it is and how loaded, keeps its loans,
and ends it. It imports no vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest
from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from loomserve.deployments.engine.adapters import ReplicaAdapters
from loomserve.deployments.engine.heartbeat import HeartbeatSender, ToldAnswer
from loomserve.deployments.peer_weights import fetch_from_peers
from loomserve.deployments.ray_node import keep_calls_on_node, node_address, session_folder
from loomserve.kvstore.server.options import on_this_node
from loomserve.platform.base.errors import Conflict, TakenOver
from loomserve.platform.base.loopback import is_loopback
from loomserve.platform.base.periodic import every
from loomserve.platform.devices.claims import (
    DeviceClaim,
    claim,
    engine_environment,
    pipeline_environment,
)
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
    EngineSpec,
    FrontEndSpec,
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
_STATS_PERIOD_S = 1.0
_STATS_TIMEOUT_S = 5.0
# A step may take long, and loans are looked after between two.
_LOANS_TIMEOUT_S = 60.0
# On a GPU weights may have to come back from the host's memory.
_AWAKE_TIMEOUT_S = 60.0
# vLLM's: weights stay at hand.
_SLEEP_LEVEL = 1
_EMPTY_POLL_S = 0.25
_STOP_TIMEOUT_S = 5.0
# What is left to do when an engine has ended asks only its own replica and lenders.
_LEAVE_TIMEOUT_S = 2.0
# Where memory is short, requests have so long to go on elsewhere.
_GIVE_BACK_S = 5.0

_log = logging.getLogger("ray.serve")


class EngineReplica:
    """Serve's deployment class of a model."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        spec: dict[str, Any],
        engine_options: dict[str, Any],
        environment: dict[str, str],
        front_end: dict[str, Any],
    ) -> None:
        """
        Args:
            spec: an EngineSpec.
            engine_options: vLLM's, of the engine alone.
            environment: variables of the engine's processes.
            front_end: a FrontEndSpec.
        """
        keep_calls_on_node()
        began = time.monotonic()
        self._spec = EngineSpec.model_validate(spec)
        self._front_end = FrontEndSpec.model_validate(front_end)
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._draining = self._stopping = False
        self._ends = ""
        self._stop_timeout_s = self._spec.server.drain_timeout_s
        self._claim = await _claim_device(self._spec)
        self._path = await asyncio.to_thread(_weights_here, self._spec)
        self._role = configured_role(self._spec.model, self._claim.device.name)
        await room_for_engine(own_run().path, self._spec.model.name, _log.warning)
        self._engine = await self._started(engine_options, environment)
        self._load = await self._engine.stats(_START_TIMEOUT_S)
        self._loans = LoanAgent(self._call_loans, self._spec, self._replica_id)
        self._adapters = ReplicaAdapters(
            self._engine,
            self._spec,
            is_asleep=lambda: self._load.asleep,
            changed=lambda: self._heartbeats.send_now(),
        )
        self._first = ToldAnswer(changed=lambda: self._heartbeats.send_now())
        await self._listen()
        self._own_bytes = partial(asyncio.to_thread, OwnMemory(self._engine.pid).read)
        self._footprint = Footprint(
            constants(self._path, self._engine.facts, _kv_bytes(self._spec)),
            start_s=time.monotonic() - began,
            measure=self._own_bytes if self._claim.device.kind == "cpu" else self._gpu_bytes,
        )
        self._heartbeats = HeartbeatSender(self._heartbeat, self._apply)
        self._moves = MoveOrders(self._engine, self._heartbeats.send_now)
        self._heart = asyncio.create_task(self._heartbeats.run())
        self._tasks = [
            self._heart,
            *(
                asyncio.create_task(work)
                for work in (
                    self._footprint.keep(),
                    every(_STATS_PERIOD_S, self._read_load, failed=lambda _: None),
                    self._loans.run(),
                    self._adapters.run(),
                    self._engine.end_if_wedged(self._tell_end),
                )
            ),
        ]
        self._ending = asyncio.create_task(self._end_with_engine())

    async def _started(self, options: dict[str, Any], environment: dict[str, str]) -> EngineHost:
        store = self._spec.kv_transfer_config
        if store is not None and (node := self._claim.device.node):
            options = {**options, "kv_transfer_config": on_this_node(store, node)}
        start = EngineStart(
            options={**options, "model": self._path, "served_model_name": [self._spec.model.name]},
            address=EngineAddress.in_folder(own_run().sockets),
            host=None if is_loopback(node_address()) else node_address(),
            simulated=self._spec.model.is_simulated,
            device=self._claim.device.name,
        )
        # What binds it to its device is in this process's own environment. A pipeline's engine on
        # GPUs starts its workers by itself, as vLLM does, and has not been forked.
        fork = self._claim.device.kind == "cpu" or not self._spec.stage_layers
        return await EngineHost.start(start, environment, _START_TIMEOUT_S, fork=fork)

    async def _call_loans(self, name: str, /, *given: Any) -> Any:
        (answer,) = await self._engine.collective_rpc(
            f"loans.{name}", *given, timeout_s=_LOANS_TIMEOUT_S
        )
        return answer

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
        sock, address = listen_locally(f"replica-{self._replica_id}", node_address())
        guarded = GuardedApp(app, self._spec.internal_token)
        self._http = HttpServer(guarded, sock, bounds=INTERNAL)
        await self._http.start()
        self._gate = await NodeGate.open(address, self._spec.internal_token)

    async def _gpu_bytes(self) -> int:
        return sum(await self._engine.collective_rpc("taken_bytes", timeout_s=_STATS_TIMEOUT_S))

    async def check_health(self) -> None:
        """Serve's hook: it starts another replica in the place of one that fails here."""
        if not self._engine.alive:
            raise RuntimeError(f"the engine has ended: {await self._engine.ended()}")
        if not self._http.alive or self._heart.done():
            raise RuntimeError("the replica's HTTP server or its heartbeats have ended")

    async def _end_with_engine(self) -> None:
        """End this process when its engine has ended, which no call of Serve's asked for: Serve
        replaces a replica that is gone within 2 s, and one that is unhealthy after 6 s."""
        how = await self._engine.ended()
        _log.error("the engine of %s has ended: %s", self._spec.model.name, how)
        await self._end()

    async def _tell_end(self, why: str) -> None:
        self._ends = why
        await self._heartbeats.send_now()

    async def _end(self) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                await self._loans.take_back()
                await self._leave()
                await self._engine.stop(0)
        os._exit(1)

    async def _show_load(self, request: Request) -> Response:
        await self._read_load()
        return Response(self._stats().model_dump_json(), media_type="application/json")

    async def _show_metrics(self, request: Request) -> Response:
        page = await self._engine.metrics(_STATS_TIMEOUT_S) + generate_latest().decode()
        return PlainTextResponse(page)

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

    async def _read_load(self) -> None:
        self._load = await self._engine.stats(_STATS_TIMEOUT_S)

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            model=self._spec.model,
            replica_id=self._replica_id,
            device=self._claim.device.name,
            stages=_stages_of(self._spec),
            address=self._gate.address,
            pid=os.getpid(),
            engine_pid=self._engine.pid,
            max_model_len=self._engine.facts.max_model_len,
            in_flight=_open_requests(self._load),
            memory_used=used_share(memory_bounds()),
            stats=self._stats(),
            borrowing=self._loans.borrowing,
            lent=self._loans.lent,
            footprint=self._footprint.state,
            engine=self._engine.address,
            front_end=self._front_end,
            moved=self._moves.last,
            adapters=self._adapters.reports,
            ends=self._ends,
            answers=self._first.answers,
            problem=self._first.problem,
        )

    def _stats(self) -> RoutingStats:
        facts = self._engine.facts
        return RoutingStats(
            load=self._load,
            max_running=facts.max_running,
            kv_capacity_tokens=facts.blocks * facts.block_tokens,
            draining=self._draining or self._stopping or bool(self._ends),
            role=self._role,
            told_at=time.monotonic(),
        )

    def _apply(self, desired: DesiredState) -> None:
        self._draining = desired.draining
        self._role = desired.role
        self._stop_timeout_s = desired.stop_timeout_s
        self._loans.apply(desired)
        self._moves.apply(desired.move)
        self._adapters.apply(desired)
        if desired.gives_back and not self._stopping:
            _log.error("this replica ends: %s", desired.gives_back)
            self._stopping, self._stop_timeout_s = True, _GIVE_BACK_S
            self._ending.cancel()
            self._ending = asyncio.create_task(self._give_back())

    async def _give_back(self) -> None:
        """Have requests go on elsewhere, and end; Serve starts another, which waits for memory."""
        note_given_back(own_run().path, self._spec.model.name, await self._own_bytes())
        with contextlib.suppress(Exception):
            await self._until_empty()
        await self._end()

    async def __del__(self) -> None:
        """Serve's last call: have requests go on elsewhere, then stop the engine."""
        if hasattr(self, "_tasks"):
            self._ending.cancel()
            self._stopping = True
            await self._loans.take_back()
            await self._until_empty()
            await self._leave()
        if hasattr(self, "_engine"):
            await self._engine.stop(_STOP_TIMEOUT_S)

    async def _leave(self) -> None:
        await self._moves.close()
        for task in self._tasks:
            task.cancel()
        await self._loans.give_back()
        await self._gate.close()
        await self._http.stop(0)

    async def _until_empty(self) -> None:
        """Gateways learn of it with the next heartbeat, and move what can go on elsewhere."""
        deadline = time.monotonic() + self._stop_timeout_s
        await self._heartbeats.send_now()
        while self._engine.alive and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):  # it is slow, and has requests
                await self._read_load()
                if not _open_requests(self._load):
                    return
            await asyncio.sleep(_EMPTY_POLL_S)


def _open_requests(load: ReplicaLoad) -> int:
    return load.running + load.waiting


def _kv_bytes(spec: EngineSpec) -> int:
    return spec.model.kv_cache_memory + (spec.lending.borrow_bytes if spec.lending else 0)


async def _claim_device(spec: EngineSpec) -> DeviceClaim:
    """One of the model's devices; processes that this one starts from here on are to run on it."""
    claimed = await claim(
        spec.model.name,
        # A pipeline is its model's only replica, so its first device stands for all.
        spec.devices[:1] if spec.stage_layers else spec.devices,
        session_folder() / "loomserve-devices",
        spec.server.drain_timeout_s + 15,
    )
    # Engine processes inherit the environment of the replica that starts them.
    os.environ.update(
        pipeline_environment(spec.devices, spec.stage_layers)
        if spec.stage_layers
        else engine_environment(claimed.device)
    )
    return claimed


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
