"""One model's front end in the gateway's process: set up, given replicas, asked, closed."""

from __future__ import annotations

import asyncio
import logging
import uuid

from starlette.types import Receive, Scope, Send

from loomserve.deployments.gateway.dispatch import ModelRequest
from loomserve.deployments.gateway.load_reports import Get, LoadReports, StoreReadings
from loomserve.deployments.gateway.replica_choice import AnswerContext, ReplicaChoice
from loomserve.platform.base.errors import Unavailable
from loomserve.platform.config import LOCAL_NODE, LOCAL_PROMPT_TOKENS
from loomserve.platform.fleet.messages import ModelRoute
from loomserve.platform.front_end.engine.answers.first_answer import FirstAnswers, Tell
from loomserve.platform.front_end.engine.handoffs import Handoffs
from loomserve.platform.front_end.engine.replica_client import ReplicaSetClient
from loomserve.platform.front_end.engine.serving import ModelServing
from loomserve.platform.front_end.metrics import ModelContinuationMetrics
from loomserve.platform.front_end.policy.continuation import ContinuationBounds
from loomserve.platform.http.missing_endpoints import MissingEndpoints
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.state.roles import Role
from loomserve.routers.in_flight import InFlight
from loomserve.routers.policy import NodesKv
from loomserve.routers.table import ReplicaTable

_log = logging.getLogger("ray.serve")

_RETRY_S = 15.0
_DRAIN_TIMEOUT_S = 3600.0


class ModelFrontEnd:
    """A model's :class:`ModelServing` with its loads and its router. One that cannot be set up is
    tried again, and costs the gateway nothing else."""

    def __init__(
        self,
        route: ModelRoute,
        ledger: InFlight,
        metrics: GatewayMetrics,
        continuation: ModelContinuationMetrics,
        *,
        get: Get,
        tell: Tell,
        bounds: ContinuationBounds,
        traced: bool = False,
    ) -> None:
        assert route.front_end is not None
        self.spec = route.front_end
        self._name = route.name
        self._wait_s = bounds.reroute_timeout_s
        self._problem = ""
        self._route = route
        self._table = ReplicaTable(ledger, stale_after_s=route.model.router.stale_after_s)
        self._loads = LoadReports(get, self._table)
        roles = route.model.roles
        handoffs = Handoffs(
            self._role_of, roles.local_prompt_tokens if roles else LOCAL_PROMPT_TOKENS
        )
        self._choice = ReplicaChoice(route.name, route.model.router, ledger, metrics, self._table)
        client = ReplicaSetClient(
            route.name,
            self._choice.choose,
            continuation,
            left=self._choice.left,
            loaded=self._loads.pushed,
            bounds=bounds,
            handoffs=handoffs,
        )
        options = {**self.spec.engine_options, "model": self.spec.path}
        self._serving = ModelServing(route.name, options, client, traced=traced)
        self._first = FirstAnswers(route.name, self._serving, self._first_request, tell)
        self._choice.untried = lambda: self._first.untried
        self._app: MissingEndpoints | None = None
        self._draining: dict[str, asyncio.Task[int]] = {}
        self._set_up = asyncio.create_task(self._start())

    def apply(self, route: ModelRoute) -> None:
        """Take over which replicas there are, and which are drained."""
        self._route = route
        nodes = {each.id: each.node for each in route.replicas}
        several = set(nodes.values()) - {LOCAL_NODE}
        addresses = {each.id: each.address for each in route.replicas}
        self._loads.set_replicas(addresses, nodes if several else None)
        if self._set_up.done():
            self._connect()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises Unavailable if the model is not set up, has no replica in time, or does not
        answer."""
        if not self._first.some:
            await self._until_set_up()
            await self._first.until_some(self._wait_s)
        if self._app is None:
            await self._until_set_up()
            self._app = MissingEndpoints(self._name, await self._serving.server())
        await self._app(scope, receive, send)

    def check_endpoint(self, path: str) -> None:
        """Raise NotFound if the model does not answer the endpoint, as far as is known yet."""
        if self._app is not None:
            self._app.check(path)

    def set_stores(self, stores: StoreReadings) -> None:
        route = self._route
        if route.model.kvstore and route.kv_token_bytes:
            self._choice.set_kv(NodesKv(route.kv_token_bytes, stores.store_bytes, stores.links))

    @property
    def is_set_up(self) -> bool:
        return self._set_up.done()

    @property
    def failed(self) -> bool:
        """Whether it has to be made again."""
        return self._serving.failed

    def page(self, replica_id: str) -> str | None:
        """vLLM's metrics of a replica; None: it is not connected."""
        return self._serving.page(replica_id)

    async def close(self) -> None:
        self._set_up.cancel()
        self._first.close()
        for task in self._draining.values():
            task.cancel()
        self._loads.close()
        await self._serving.close()

    def _first_request(self, replica_id: str) -> AnswerContext:
        request = ModelRequest(
            self._name,
            EngineRequest("", {}),
            uuid.uuid4().hex,
            pinned_to=replica_id,
            carried_on=False,
            is_first=True,
        )
        return AnswerContext.of(request)

    def _role_of(self, replica_id: str) -> Role:
        """As it last said; a change is known within a second."""
        return self._table.role(replica_id) or Role.UNIFIED

    async def _start(self) -> None:
        while True:
            try:
                await self._serving.start()
            except Exception as error:
                self._problem = str(error)
                _log.exception("the front end of model %s cannot be set up", self._name)
                await asyncio.sleep(_RETRY_S)
            else:
                break
        self._connect()

    async def _until_set_up(self) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await asyncio.shield(self._set_up)
        except TimeoutError:
            why = f": {self._problem}" if self._problem else ""
            raise Unavailable(
                f"model {self._name!r} is not set up yet; try again shortly{why}",
                reason="model_not_ready",
                retry_after_s=5,
            ) from None

    def _connect(self) -> None:
        engines = {each.id: each.engine for each in self._route.replicas}
        draining = {each.id for each in self._route.replicas if each.draining}
        for replica_id in self._draining.keys() - draining:
            self._draining.pop(replica_id).cancel()
            self._serving.client.undrain(replica_id)
        self._serving.set_adapters(self._route.adapters)
        self._serving.client.set_replicas(engines)
        self._first.apply(self._route)
        for replica_id in draining - self._draining.keys():
            drained = self._serving.client.drain(replica_id, _DRAIN_TIMEOUT_S)
            self._draining[replica_id] = asyncio.create_task(drained)
