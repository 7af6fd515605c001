"""Where requests wait for models that are not ready, in a gateway.

However many wait for a model, the controller is asked for it once, and again only for as long as
it does not come.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping

from prometheus_client import CollectorRegistry, Gauge, Histogram

from loomserve.platform.base.errors import RequestError, Unavailable, UnknownModel
from loomserve.platform.config import Elastic
from loomserve.platform.fleet.messages import ModelRoute
from loomserve.platform.state import ModelStatus

_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300)


class WaitingMetrics:
    """Described for operators in ``docs/metrics.md``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._state = Gauge(
            "loomserve_model_state",
            "1 for the state that a model is in, 0 for all others.",
            ["model", "state"],
            registry=registry,
        )
        self._waited = Histogram(
            "loomserve_model_wait_seconds",
            "Time that requests waited for a model that was not ready, by how that ended.",
            ["model", "outcome"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._known: dict[str, ModelStatus] = {}

    def set_states(self, states: Mapping[str, ModelStatus]) -> None:
        for name in self._known.keys() - states.keys():
            for state in ModelStatus:
                self._state.remove(name, state)
        for name, status in states.items():
            if self._known.get(name) is not status:
                for state in ModelStatus:
                    self._state.labels(name, state).set(state is status)
        self._known = dict(states)

    def waited(self, model: str, outcome: str, seconds: float) -> None:
        self._waited.labels(model, outcome).observe(seconds)


_log = logging.getLogger("ray.serve")

# A controller that was asked may have ended, and the next one does not know.
_ASK_AGAIN_S = 2.0
_RETRY_AFTER_S = 5.0
_SERVING = frozenset({ModelStatus.READY, ModelStatus.DEGRADED})

AskFor = Callable[[str], Awaitable[None]]
"""Has the controller make a model ready, by its name; raises a ``RequestError`` if it will not."""


class _Queue:
    """The requests that wait for one model, in the order in which they came."""

    def __init__(self) -> None:
        self.waiting: dict[asyncio.Future[None], None] = {}
        self.asks_now = asyncio.Event()
        self.asking: asyncio.Task[None] | None = None

    def end(self, error: RequestError | None) -> None:
        """Let all go on, or end them with the error."""
        waiting, self.waiting = self.waiting, {}
        for each in waiting:
            if each.done():
                continue
            if error is None:
                each.set_result(None)
            else:
                each.set_exception(error)


class ColdStartQueue:
    """The queues of all models; all of it runs on one event loop."""

    def __init__(self, ask: AskFor, bounds: Elastic, metrics: WaitingMetrics) -> None:
        self._ask, self._bounds, self._metrics = ask, bounds, metrics
        self._routes: dict[str, ModelRoute] = {}
        self._queues: dict[str, _Queue] = {}

    def apply(self, routes: Collection[ModelRoute]) -> None:
        """Set which models there are; who waited for one that is ready, or gone, goes on."""
        self._routes = {route.name: route for route in routes}
        self._metrics.set_states({route.name: route.status for route in routes})
        for name, queue in self._queues.items():
            route = self._routes.get(name)
            if route is None or route.status is ModelStatus.UNLOADING:
                queue.end(_gone(name))
            elif not self.waits_for(name):
                queue.end(None)
            elif route.status is ModelStatus.FAILED:
                queue.asks_now.set()

    def waits_for(self, model: str) -> bool:
        route = self._routes.get(model)
        return route is not None and route.on_demand and route.status not in _SERVING

    async def until_ready(self, model: str) -> None:
        """Wait until the model is ready, which whoever comes first has it made. Raises Unavailable
        if there is no room for the model, it cannot be loaded, too many wait, or it took too long;
        UnknownModel if it was unloaded meanwhile."""
        if not self.waits_for(model):
            return
        queue = self._queues.setdefault(model, _Queue())
        if len(queue.waiting) >= self._bounds.max_waiting:
            raise Unavailable(
                f"{len(queue.waiting)} requests wait for model {model!r} already; try again later",
                reason="too_many_waiting",
                retry_after_s=_RETRY_AFTER_S,
            )
        began = time.monotonic()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not queue.waiting:
            queue.asks_now.set()
        queue.waiting[turn] = None
        if queue.asking is None or queue.asking.done():
            queue.asking = asyncio.create_task(self._keep_asking(model, queue))
        outcome = "refused"
        try:
            async with asyncio.timeout(self._bounds.wait_timeout_s):
                await turn
            outcome = "ready"
        except TimeoutError:
            outcome = "too_late"
            raise self._too_late(model) from None
        except asyncio.CancelledError:
            outcome = "left"
            raise
        finally:
            queue.waiting.pop(turn, None)
            self._metrics.waited(model, outcome, time.monotonic() - began)

    def waiting(self, model: str) -> int:
        queue = self._queues.get(model)
        return len(queue.waiting) if queue is not None else 0

    async def close(self) -> None:
        for queue in self._queues.values():
            if queue.asking is not None:
                queue.asking.cancel()
            queue.end(Unavailable("the gateway ends; try again", retry_after_s=_RETRY_AFTER_S))

    async def _keep_asking(self, model: str, queue: _Queue) -> None:
        while queue.waiting:
            queue.asks_now.clear()
            try:
                await self._ask(model)
            except RequestError as error:
                queue.end(error)
                return
            except Exception as error:  # whoever waits has a bound of its own
                _log.warning("model %s could not be asked for: %r", model, error)
            try:
                async with asyncio.timeout(_ASK_AGAIN_S):
                    await queue.asks_now.wait()
            except TimeoutError:
                pass

    def _too_late(self, model: str) -> Unavailable:
        route = self._routes.get(model)
        status = route.status if route is not None else "gone"
        return Unavailable(
            f"model {model!r} is {status} still after {self._bounds.wait_timeout_s:g} s; try again "
            "later, or ask the operator to raise elastic.wait_timeout_s",
            reason="model_not_ready",
            retry_after_s=_RETRY_AFTER_S,
        )


def _gone(model: str) -> UnknownModel:
    return UnknownModel(
        f"The model {model!r} was unloaded while the request waited.", param="model"
    )
