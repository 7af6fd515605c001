"""The batch lane as a Serve deployment: one replica, which owns the lane's folder."""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve

from loomserve.deployments.batch.executor import GatewayExecutor
from loomserve.deployments.batch.offline_worker import RayOfflineWorker
from loomserve.deployments.ray_node import keep_calls_on_node, node_address
from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.base.reply import replies
from loomserve.platform.batch.executors import CombinedExecutor
from loomserve.platform.batch.folder import BatchFolder
from loomserve.platform.batch.http.api import BatchApi
from loomserve.platform.batch.lane import BatchLane
from loomserve.platform.batch.offline.queue import OfflineQueue
from loomserve.platform.batch.store.store import BatchStore
from loomserve.platform.config import Batch, Server
from loomserve.platform.fleet.messages import (
    CONTROLLER_APP,
    CONTROLLER_DEPLOYMENT,
    GATEWAY_APP,
    GATEWAY_DEPLOYMENT,
    LanePlace,
    OfflineSpec,
)
from loomserve.platform.http.protocol import INTERNAL
from loomserve.platform.http.server import HttpServer
from loomserve.platform.run.node_gate import NodeGate
from loomserve.platform.run.sockets import listen_locally
from loomserve.platform.state import BatchLaneState, BatchState

# A lane that Serve takes for dead may live on for a while, and keeps the folder until it ends.
_CLAIM_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0


class BatchLaneDeployment:
    """Deployment of the lane, with its API for gateways on a socket of its own."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        options: dict[str, Any],
        offline: list[dict[str, Any]],
        folder: str,
        server: dict[str, Any],
        internal_token: str,
    ) -> None:
        keep_calls_on_node()
        self._folder = BatchFolder(Path(folder))
        await asyncio.to_thread(self._folder.claim, _CLAIM_TIMEOUT_S)
        self._store = BatchStore(self._folder.database)
        known = self._store.files.ids()
        with self._store.owned():
            self._folder.sweep(known)
        checked = Batch.model_validate(options)
        front = Server.model_validate(server)
        queues = {
            spec.model.name: _offline_queue(spec, checked.concurrency)
            for spec in map(OfflineSpec.model_validate, offline)
        }
        self._queues = tuple(queues.values())
        gateway = GatewayExecutor(
            serve.get_deployment_handle(GATEWAY_DEPLOYMENT, GATEWAY_APP),
            serve.get_deployment_handle(CONTROLLER_DEPLOYMENT, CONTROLLER_APP),
            checked.line_timeout_s,
            self._store.generation,
        )
        self._keys = LiveKeys(front)
        executor = CombinedExecutor(gateway, queues, self._keys)
        self._lane = BatchLane(
            self._store, self._folder, executor, checked, max_body=front.max_body
        )
        api = BatchApi(self._lane, self._store, self._folder, checked)
        sock, address = listen_locally("lane", node_address())
        self._http = HttpServer(api.app(internal_token), sock, bounds=INTERNAL)
        await self._http.start()
        self._gate = await NodeGate.open(address, internal_token)
        self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keys.follow())
            group.create_task(self._lane.run())
            for queue in self._queues:
                group.create_task(queue.run())

    async def place(self) -> LanePlace:
        """Where its API is; elsewhere after each start."""
        return LanePlace(self._gate.address, time.monotonic())

    @replies
    async def state(self) -> BatchLaneState:
        self._check_open()
        state = await self._lane.state()
        offline = tuple(queue.state for queue in self._queues)
        return state.model_copy(update={"offline_models": offline})

    @replies
    async def show(self, batch_id: str) -> BatchState:
        self._check_open()
        return self._lane.state_of(await self._lane.call(self._store.batches.get, None, batch_id))

    @replies
    async def cancel(self, batch_id: str) -> BatchState:
        """Cancel any key's batch."""
        self._check_open()
        return self._lane.state_of(await self._lane.cancel(None, batch_id))

    def _check_open(self) -> None:
        """Raise Unavailable if it does not have its folder yet."""

    async def check_health(self) -> None:
        if not self._http.alive or self._running.done():
            raise RuntimeError("the batch lane has ended")

    async def __del__(self) -> None:
        """Stop at Serve's last call; after a restart, engines compute open lines again."""
        if hasattr(self, "_running"):
            await self._gate.close()
            await self._http.stop(_STOP_TIMEOUT_S)
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._running
            self._store.close()
            self._folder.release()


def _offline_queue(spec: OfflineSpec, places: int) -> OfflineQueue:
    kv_bytes = spec.model.kv_cache_memory
    return OfflineQueue(
        spec.model.name,
        partial(
            RayOfflineWorker, spec.source, spec.model.revision, spec.cores, kv_bytes, spec.resources
        ),
        kv_bytes,
        places=places,
        rules=spec.model.batching,
        predictor=spec.model.lengths.predictor if spec.model.lengths else None,
    )
