"""Where the batch lane has a line computed: the way of a request from a gateway on.

What differs is whose name it comes in, which the lane says, and what bounds it: not the limits that
spread a client's own requests, and no time but its batch's window.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from loomserve.deployments.gateway.forward import ForwardRequest
from loomserve.platform.access.key_models import KnownKeys
from loomserve.platform.base.errors import BadRequest, BodyTooLarge, RequestError
from loomserve.platform.config import ApiKey, Server
from loomserve.platform.fleet.messages import BatchLine, ModelRoute
from loomserve.platform.requests.client_request import refuse_own_channels
from loomserve.platform.requests.scheduler_fields import as_background

FindRoute = Callable[[object, ApiKey | None], ModelRoute]
"""The route of a model that a key asks for, or why there is none."""
Isolate = Callable[[dict[str, Any], ApiKey | None, str], dict[str, Any]]
"""A key's request to a path, with what keeps its KV blocks apart."""
Collect = Callable[[ForwardRequest], Awaitable[tuple[int, bytes]]]
"""Forwards a request; its answer's status and body."""


class LineEndpoint:
    """Answers lines with a status and a body, errors too."""

    def __init__(
        self, server: Server, find_route: FindRoute, isolate: Isolate, collect: Collect
    ) -> None:
        self._max_body = server.max_body
        self._keys = KnownKeys(server.api_keys)
        self._find_route = find_route
        self._isolate = isolate
        self._collect = collect

    async def complete(self, line: BatchLine) -> tuple[int, bytes]:
        try:
            return await self._collect(self._request(line))
        except RequestError as error:
            return error.status, json.dumps(error.body()).encode()

    def _request(self, line: BatchLine) -> ForwardRequest:
        refuse_own_channels(line.body)
        if line.body.get("stream"):
            raise BadRequest("a batch's requests cannot stream; leave it out", param="stream")
        key = self._keys.named(line.owner)
        route = self._find_route(line.body.get("model"), key)
        request = as_background(self._isolate(line.body, key, line.path), line.path)
        body = json.dumps(request).encode()
        if len(body) > self._max_body:
            raise BodyTooLarge(
                f"The request is larger than {self._max_body} bytes. Send less, or ask the "
                "operator to raise server.max_body."
            )
        return ForwardRequest(
            model=route.name,
            policy=route.policy,
            path=line.path,
            body=body,
            parsed=request,
            request_id=line.request_id,
            content_type="application/json",
            # The lane has looked for room on one of them.
            exclude=frozenset(r.id for r in route.replicas if line.engine not in (None, r.id)),
        )
