"""vLLM's engine client over several replicas of a model, which come and go.

It keeps what each open request was and has got, so that one whose replica is lost is sent to
another with its tokens so far, under another id, which tells late outputs apart.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from loomserve.platform.engine.process.attentive_clock import AttentiveClock
from loomserve.platform.front_end.engine.adapters import AdapterBook
from loomserve.platform.front_end.engine.handoffs import Handoffs
from loomserve.platform.front_end.engine.replica import ConnectedReplica
from loomserve.platform.front_end.engine.request_book import RequestBook
from loomserve.platform.front_end.engine.utilities import UtilityClient
from loomserve.platform.front_end.metrics import ModelContinuationMetrics
from loomserve.platform.front_end.policy.continuation import ContinuationBounds, Loss
from loomserve.platform.front_end.routing import Choose, Left, nothing, routing_context
from loomserve.platform.http.engine_errors import no_replica
from loomserve.platform.run.engine_address import EngineAddress
from loomserve.platform.state.load_report import LoadReport

_log = logging.getLogger(__name__)

_WATCH_EVERY_S = 0.25

Loaded = Callable[[str, LoadReport, float], None]
"""Gets a replica's id and load, and until when (monotonic seconds) bookings here are in it."""


class ReplicaSetClient(UtilityClient):
    """The engine client of one model; all of it runs on one event loop."""

    def __init__(
        self,
        model: str,
        choose: Choose,
        metrics: ModelContinuationMetrics,
        *,
        left: Left = nothing,
        loaded: Loaded = nothing,
        bounds: ContinuationBounds | None = None,
        handoffs: Handoffs | None = None,
    ) -> None:
        self.on_ready: Callable[[ConnectedReplica], None] = nothing
        """A replica takes requests from here on; its ``facts`` say what it is."""
        self.on_removed: Callable[[ConnectedReplica], None] = nothing
        """The platform has a replica no more."""
        self.outputs_queue: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._model, self._loaded = model, loaded
        self._clock = AttentiveClock(time.monotonic, 2 * _WATCH_EVERY_S)
        self._identity = uuid.uuid4().hex.encode()
        super().__init__(encoder := MsgpackEncoder())
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._replicas: dict[str, ConnectedReplica] = {}
        self._indexes = 0
        self.handoffs = handoffs or Handoffs()
        self.adapters = AdapterBook()
        self.requests = RequestBook(
            model,
            self._replicas,
            choose,
            left,
            metrics,
            bounds or ContinuationBounds(),
            self._clock,
            encoder,
            self.handoffs,
            self.adapters,
        )
        self.requests.on_ended = self._put
        self._some_ready = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watching = False

    # Replicas

    def set_replicas(self, addresses: Mapping[str, EngineAddress]) -> None:
        """Set which replicas there are; requests of those that are not go on with others."""
        self._start()
        for replica in list(self._replicas.values()):
            if addresses.get(replica.id) != replica.connection.address:
                self._remove(replica)
        for replica_id, address in addresses.items():
            if replica_id not in self._replicas:
                replica = ConnectedReplica(
                    replica_id, self._indexes, address, self._identity, self, self._clock
                )
                self._indexes += 1
                self._replicas[replica_id] = replica
                replica.connection.open()

    async def drain(self, replica_id: str, timeout_s: float) -> int:
        """Move a replica's requests to others as these can take them; how many are left after so
        long."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return 0
        replica.draining = True
        self.requests.watch()
        try:
            async with asyncio.timeout(timeout_s):
                await replica.empty.wait()
        except TimeoutError:
            _log.warning("replica %s still has %d requests", replica_id, len(replica.open))
        return len(replica.open)

    def undrain(self, replica_id: str) -> None:
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.draining = False
            self.requests.watch()

    @property
    def replicas(self) -> dict[str, ConnectedReplica]:
        """The replicas that are connected; each has ``facts``."""
        return {each.id: each for each in self._replicas.values() if each.facts is not None}

    async def wait_for_replica(self, timeout_s: float) -> EngineCoreReadyResponse:
        """What a connected engine said of itself; raises Unavailable if none connected in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._some_ready.wait()
        except TimeoutError:
            raise no_replica(self._model) from None
        return self._any().facts

    def on_connected(self, replica: ConnectedReplica) -> None:
        facts = replica.facts
        assert facts is not None
        self.requests.max_model_len = min(self.requests.max_model_len, facts.max_model_len)
        self._some_ready.set()
        self.on_ready(replica)
        self.requests.watch()

    def on_gone(self, replica: ConnectedReplica, *, ended: bool) -> None:
        _log.warning(
            "%s replica %s of model %s has ended; %d requests go on elsewhere",
            "the engine of" if ended else "the connection to",
            replica.id,
            self._model,
            len(replica.open),
        )
        self._lose_all(replica, Loss.GONE if ended else Loss.CUT)

    def on_forgotten(self, replica: ConnectedReplica) -> None:
        _log.warning("replica %s of model %s had let this front end go", replica.id, self._model)
        self._lose_all(replica, Loss.FORGOTTEN)

    def _lose_all(self, replica: ConnectedReplica, lost: Loss) -> None:
        self._gone(replica.id)
        self.requests.lose_all(replica, lost)
        if not self.replicas:
            self._some_ready.clear()

    def _remove(self, replica: ConnectedReplica) -> None:
        replica.draining = True
        self._lose_all(replica, Loss.DRAINED)
        del self._replicas[replica.id]
        if not self.replicas:
            self._some_ready.clear()
        self.on_removed(replica)
        self._do(replica.connection.close())

    # Requests

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Place a request; one that has to wait for a replica does not keep the caller."""
        self._start()
        context = routing_context.get()
        if request.cache_salt is None and context is not None:
            request.cache_salt = context.salt
        self.requests.add(request, context)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.requests.abort(request_ids)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self.outputs_queue.get()

    def on_outputs(self, replica: ConnectedReplica, frames: Sequence[Any]) -> None:
        outputs: EngineCoreOutputs = self._decoder.decode(frames)
        if outputs.utility_output is not None:
            self._answered(outputs.utility_output)
            return
        now = time.monotonic()
        take = self.requests.take
        outputs.outputs = [each for each in outputs.outputs if take(replica, each, now)]
        outputs.engine_index = replica.index
        if outputs.outputs or outputs.scheduler_stats:
            self.outputs_queue.put_nowait(outputs)

    def on_loaded(self, replica: ConnectedReplica, load: LoadReport, counted_until: float) -> None:
        self._loaded(replica.id, load, counted_until)

    def _put(self, output: EngineCoreOutput) -> None:
        self.outputs_queue.put_nowait(EngineCoreOutputs(outputs=[output]))

    # vLLM's client

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return tuple(await self._ask(self._any(), "get_supported_tasks"))

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        self._any()
        asked = self.replicas.values()
        return await asyncio.gather(*(self._ask(each, method, *args) for each in asked))

    async def _ask(self, replica: ConnectedReplica, method: str, *args: Any) -> Any:
        return await self._call(replica.id, replica.connection.send, method, args)

    def _any(self) -> ConnectedReplica:
        for replica in self.replicas.values():
            return replica
        raise no_replica(self._model)

    def dp_engines_running(self) -> bool:
        return bool(self.requests.open)

    def shutdown(self, timeout: float | None = None) -> None:
        """End all connections; engines then abort what they had from here."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return  # the loop has ended, and with it all that ran on it
        for task in self._tasks:
            task.cancel()
        for replica in self._replicas.values():
            self._do(replica.connection.close())
        self._replicas.clear()

    async def closed(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            self._clock.tick()
            for replica in self._replicas.values():
                replica.tick()
            try:
                self.requests.watch()
            except Exception:  # the next look may go well, and all requests depend on it
                _log.exception("the watch over the replicas of model %s failed", self._model)

    def _start(self) -> None:
        if not self._watching:
            self._watching = True
            self._do(self._keep_watch())

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
