"""vLLM's server of a model as the gateway has it, in this process, and no engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, get_args

from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from starlette.types import Send
from vllm.exceptions import GracefulHTTPError

from loomserve.platform.base.errors import RequestError
from loomserve.platform.config import Server as ServerConfig
from loomserve.platform.front_end.engine.llm import FrontEndLLM
from loomserve.platform.front_end.engine.replica_client import ReplicaSetClient
from loomserve.platform.front_end.engine.serving import server_app, server_options
from loomserve.platform.front_end.metrics import ContinuationMetrics
from loomserve.platform.http.asgi import CollectedAnswer
from loomserve.platform.models import simulated
from loomserve.platform.requests.endpoints import ENDPOINTS
from loomserve.platform.requests.engine_request import EngineRequest

MAX_MODEL_LEN = 8192
TAKEN = 418
"""Status of a request that the front end would have sent to an engine."""


class Server:
    """Answers one request after the other, each until an engine would get it."""

    def __init__(self, tasks: tuple[str, ...] = ("generate",), **options: Any) -> None:
        """
        Args:
            tasks: what the model can do.
            options: vLLM's.
        """
        self.loop = asyncio.new_event_loop()
        self._app = self.loop.run_until_complete(self._made(tasks, options))

    async def _made(self, tasks: tuple[str, ...], options: Mapping[str, Any]) -> Any:
        folder: Path = simulated.fetch()
        args, config = server_options(
            "m", {"model": str(folder), "max_model_len": MAX_MODEL_LEN, **options}
        )
        metrics = ContinuationMetrics(CollectorRegistry()).of("m")
        self.client = client = ReplicaSetClient("m", lambda _: None, metrics)
        self.llm = llm = FrontEndLLM(config, client)

        async def taken(*_: Any) -> None:
            raise GracefulHTTPError("an engine would get it", HTTPStatus(TAKEN))

        async def can() -> tuple[str, ...]:
            return tasks

        client.add_request_async = taken  # type: ignore[method-assign]
        client.get_supported_tasks_async = can  # type: ignore[method-assign]
        return await server_app(llm, args, tasks)

    def request_classes(self, path: str) -> list[type[BaseModel]]:
        """What vLLM reads an endpoint's requests into; none: the model has no such endpoint."""
        for route in self._app.router.routes:
            if isinstance(route, APIRoute) and route.path == ENDPOINTS[path].at_engine:
                (field,) = route.dependant.body_params
                return _classes(field.field_info.annotation)
        return []

    def ask(self, path: str, body: Any) -> tuple[int, bytes]:
        """Status and body of the gateway's answer, and of vLLM's to what the gateway lets through.

        ``body``: JSON, or bytes as they are.
        """
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            request = EngineRequest.of(path, sent)
            request.check_sequences(ServerConfig().max_sequences)
            request.check_conversation(())
            request.check_texts(MAX_MODEL_LEN)
        except RequestError as error:
            return error.status, json.dumps(error.body()).encode()
        return self.loop.run_until_complete(self._ask(request.engine_path, request.encoded))

    async def _ask(self, path: str, body: bytes, **scoped: Any) -> tuple[int, bytes]:
        received = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if received:
                return received.pop()
            return await asyncio.get_running_loop().create_future()

        answer = CollectedAnswer()
        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
            "root_path": "", "query_string": b"", "scheme": "http", "http_version": "1.1",
            "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 0), "state": {},
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")], **scoped,
        }  # fmt: skip
        try:
            await self._app(scope, receive, self._sent_to(answer))
        except Exception:
            # vLLM answers first and raises then, as it does in a stream that has begun.
            if not answer.status:
                raise
        return answer.status, bytes(answer.body)

    def _sent_to(self, answer: CollectedAnswer) -> Send:
        return answer.send

    def close(self) -> None:
        """End what the server runs."""
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


def _classes(annotation: Any) -> list[type[BaseModel]]:
    inner = [each for one in get_args(annotation) for each in _classes(one)]
    is_one = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return [annotation] if is_one else inner
