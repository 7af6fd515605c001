"""Sends lines to the platform's engines, through a gateway like all requests."""

from __future__ import annotations

import asyncio
import json
import logging
import time

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from loomserve.deployments.serve_options import ended_with_caller
from loomserve.platform.base.errors import QUERY_OF_DEATH, EngineGone, TooManyRequests, Unavailable
from loomserve.platform.batch.executor import (
    AliasedModels,
    KnownModels,
    LineAnswer,
    LineCall,
    LineOutcome,
)
from loomserve.platform.fleet.messages import LineRequest, ServedEngines

_log = logging.getLogger("ray.serve")

# Engines report every two seconds.
_FRESH_S = 0.5
_ANSWER_S = 5.0
_BY_CODE = {EngineGone.reason: LineOutcome.ENGINE_ENDED, QUERY_OF_DEATH: LineOutcome.DEADLY}
_GATEWAY_FAILED = (
    b'{"error": {"message": "The server failed on this request. Send it again.", '
    b'"type": "server_error", "param": null, "code": "internal_error"}}'
)
_GATEWAY_AWAY = b'{"error": {"message": "no gateway answers", "code": "gateway_away"}}'


class GatewayExecutor:
    """The :class:`~loomserve.platform.batch.executor.LineExecutor` of the platform's engines."""

    def __init__(
        self,
        gateway: DeploymentHandle,
        controller: DeploymentHandle,
        line_timeout_s: float,
        generation: int,
    ) -> None:
        """``line_timeout_s``: an engine gives a line no token for so long at most."""
        self._generation = generation
        self._gateway = gateway
        self._controller = controller
        self._line_timeout_s = line_timeout_s
        self._models: KnownModels = {}
        self._asked_s = float("-inf")

    async def models(self) -> KnownModels | None:
        now = time.monotonic()
        if now - self._asked_s < _FRESH_S:
            return self._models
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer: ServedEngines = await self._controller.engines.remote()
        except (RayError, RayServeException, TimeoutError) as error:
            _log.warning("the controller does not say what engines have free: %r", error)
            return None
        self._asked_s = now
        # It errs by half of the way there and back at most.
        told_at = (now + time.monotonic()) / 2
        served = {name: model.received(told_at) for name, model in answer.models.items()}
        aliases = {name: AliasedModels(alias.models) for name, alias in answer.aliases.items()}
        self._models = {**aliases, **served}
        return self._models

    async def execute(self, call: LineCall) -> LineAnswer:
        line = call.model_dump(include=set(LineRequest.model_fields))
        line |= {"generation": self._generation, "timeout_s": self._line_timeout_s}
        response = self._gateway.complete_line.remote(line)
        try:
            # A gateway that is stopped is ended by Serve, and its lines with it.
            status, body = await ended_with_caller(response)
        except RayTaskError as error:
            _log.warning("a gateway has failed on a batch's line: %r", error)
            return LineAnswer(LineOutcome.ENGINE_FAILED, 500, _GATEWAY_FAILED)
        except (RayError, RayServeException) as error:
            _log.warning("a gateway has not answered a batch's line: %r", error)
            return LineAnswer(LineOutcome.AWAY, 503, _GATEWAY_AWAY)
        return LineAnswer(outcome(status, body), status, body)


def outcome(status: int, body: bytes) -> LineOutcome:
    """What a gateway's answer means for another attempt."""
    if status == TooManyRequests.status:
        return LineOutcome.AWAY
    if status < 500:
        return LineOutcome.ANSWERED
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return LineOutcome.ENGINE_FAILED
    if status == Unavailable.status:
        return LineOutcome.AWAY
    return _BY_CODE.get(code, LineOutcome.ENGINE_FAILED)
