"""Dispatches requests to the models' front ends in this process; importing this imports vLLM.

vLLM's serving layer runs here, once for all replicas of a model, so that a request goes on when its
engine ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Send

from loomserve.deployments.gateway.dispatch import Dispatching, ModelRequest
from loomserve.deployments.gateway.internal_client import InternalClient
from loomserve.deployments.gateway.load_reports import StoreReadings
from loomserve.deployments.gateway.model_front_end import ModelFrontEnd
from loomserve.deployments.gateway.relay import relay
from loomserve.deployments.gateway.replica_choice import AnswerContext
from loomserve.platform.base import heap
from loomserve.platform.base.errors import Unavailable
from loomserve.platform.config import Elastic
from loomserve.platform.elastic.cold_start_queue import AskFor, ColdStartQueue, WaitingMetrics
from loomserve.platform.engine.hooks import verify
from loomserve.platform.fleet.messages import FIRST_ANSWER_PATH, FirstAnswer, ModelRoute
from loomserve.platform.front_end.engine.serving import settle_environment
from loomserve.platform.front_end.metrics import ContinuationMetrics
from loomserve.platform.front_end.policy.continuation import ContinuationBounds
from loomserve.platform.http.asgi import ClientGoneError, while_connected
from loomserve.platform.http.held_answer import HeldAnswer, openai_event
from loomserve.platform.http.ingress.messages import anthropic_event
from loomserve.platform.requests.metrics import GatewayMetrics
from loomserve.platform.requests.policy.fields import is_of_messages
from loomserve.routers.in_flight import InFlight

_log = logging.getLogger("ray.serve")

_REPORT_TIMEOUT_S = 5.0


class RequestDispatcher(Dispatching):
    """Has the front end of each request's model answer it, once the model is ready."""

    def __init__(
        self,
        internal_token: str,
        metrics: GatewayMetrics,
        registry: CollectorRegistry,
        *,
        idle_timeout_s: float,
        ask_for: AskFor,
        elastic: Elastic,
        traced: bool = False,
    ) -> None:
        """
        Args:
            internal_token: what replicas' sockets ask for.
            registry: gets the metrics of requests that went on elsewhere, or waited for a model.
            idle_timeout_s: an answer that has begun ends after so long without a byte.
            ask_for: has the controller make a model ready.
            traced: vLLM's spans go where this process's do.
        """
        verify("vllm")
        settle_environment()
        self.ledger = InFlight()
        self._metrics = metrics
        self._continuation = ContinuationMetrics(registry)
        self._idle_timeout_s = idle_timeout_s
        self._bounds = ContinuationBounds(
            # An engine that hangs is left before its clients' answers are given up.
            hang_s=min(ContinuationBounds.hang_s, idle_timeout_s / 2),
            # However slowly another comes: a request waits for its model as long as it ever does.
            reroute_timeout_s=elastic.wait_timeout_s,
            begun_timeout_s=idle_timeout_s,
        )
        self._traced = traced
        self._comment_s = elastic.comment_s
        self._cold_starts = ColdStartQueue(ask_for, elastic, WaitingMetrics(registry))
        self.client = InternalClient(internal_token)
        self._models: dict[str, ModelFrontEnd] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def set_models(self, routes: Collection[ModelRoute]) -> None:
        """Set which models and replicas there are; ``routes`` has all models."""
        wanted = {route.name: route for route in routes if route.front_end is not None}
        for name, model in list(self._models.items()):
            if name not in wanted or model.spec != wanted[name].front_end or model.failed:
                self._do(_close(self._models.pop(name)))
        for name, route in wanted.items():
            if name not in self._models:
                self._models[name] = ModelFrontEnd(
                    route,
                    self.ledger,
                    self._metrics,
                    self._continuation.of(name),
                    get=self.client.get,
                    tell=self._report_first_answer,
                    bounds=self._bounds,
                    traced=self._traced,
                )
            self._models[name].apply(route)
        self._cold_starts.apply(routes)

    async def _report_first_answer(self, address: str, problem: str) -> None:
        report = FirstAnswer(problem=problem).model_dump_json()
        status, _ = await self.client.request(
            "PUT", address, FIRST_ANSWER_PATH, _REPORT_TIMEOUT_S, report
        )
        if status >= 400:
            raise aiohttp.ClientError(f"{address} refused the first answer: status {status}")

    def set_stores(self, stores: StoreReadings) -> None:
        for model in self._models.values():
            model.set_stores(stores)

    def is_set_up(self, model: str) -> bool:
        return model in self._models and self._models[model].is_set_up

    def pages(self, model: str, replica_id: str) -> list[str]:
        front_end = self._models.get(model)
        page = front_end.page(replica_id) if front_end is not None else None
        return [] if page is None else [page]

    async def dispatch(self, request: ModelRequest, receive: Receive, send: Send) -> None:
        """Have the model's front end answer, or stop as soon as the client is gone. Raises NotFound
        if the model does not answer the endpoint; Unavailable if the model is not set up, or has
        no replica in time; TooManyRequests if it is predicted to end after
        ``request.refuse_after``; EngineGone if engines ended with it, or its answer stood still;
        InternalError if the front end or an engine failed on it."""
        if (front_end := self._models.get(request.model)) is not None:
            # No model has to come to refuse a request.
            front_end.check_endpoint(request.content.engine_path)
        try:
            async with self._once_ready(request, receive, send) as held_send:
                front_end = self._models.get(request.model)
                if front_end is None:
                    raise Unavailable(
                        f"model {request.model!r} is being set up; try again shortly",
                        reason="model_not_ready",
                        retry_after_s=5,
                    )
                await relay(
                    front_end.app,
                    AnswerContext.of(request),
                    receive,
                    held_send,
                    self._metrics,
                    idle_timeout_s=self._idle_timeout_s,
                )
        except ClientGoneError:
            self._metrics.client_disconnected(request.model)

    @asynccontextmanager
    async def _once_ready(
        self, request: ModelRequest, receive: Receive, send: Send
    ) -> AsyncIterator[Send]:
        """The request's ``send`` once its model is ready; a stream gets comments meanwhile."""
        if not self._cold_starts.waits_for(request.model):
            yield send
            return
        trace, content = request.recorded, request.content
        span = trace.during("wait_for_model", {"loomserve.model": request.model}) if trace else None
        of_messages = is_of_messages(content.path)
        held = HeldAnswer(send, anthropic_event if of_messages else openai_event)
        async with held.comments(self._comment_s) if content.streams else nullcontext():
            with span or nullcontext():
                await while_connected(self._cold_starts.until_ready(request.model), receive)
            yield held.send

    async def close(self) -> None:
        await self._cold_starts.close()
        while self._models:
            self._do(self._models.popitem()[1].close())
        await asyncio.gather(*self._closing)
        await self.client.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_logged(work))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _close(model: ModelFrontEnd) -> None:
    await model.close()
    del model
    heap.settle_heap()


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception:
        _log.exception("a front end could not be closed")
