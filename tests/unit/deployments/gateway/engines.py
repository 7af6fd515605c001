"""What endpoints are answered by, in the place of front ends and engines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import aiohttp
from starlette.types import Message, Receive, Send

from loomserve.deployments.gateway.answering import CollectedAnswer, ForwardRequest, never_gone
from loomserve.platform.base.errors import RequestError
from loomserve.platform.fleet.messages import ModelRoute, ReplicaRoute
from loomserve.platform.run.engine_address import EngineAddress
from loomserve.routers.in_flight import InFlight

Answer = Sequence[Message] | RequestError
Behave = Callable[[ForwardRequest], Awaitable[Answer]]


def answered(*pieces: bytes, status: int = 200) -> list[Message]:
    """The messages of a whole answer."""
    return [
        {"type": "http.response.start", "status": status, "headers": []},
        *({"type": "http.response.body", "body": piece, "more_body": True} for piece in pieces),
        {"type": "http.response.body", "body": b"", "more_body": False},
    ]


async def good(request: ForwardRequest) -> Answer:
    return answered(b"{}")


def one_model() -> Any:
    """Routes that lead each request to one model, ``m``."""
    route = SimpleNamespace(
        name="m",
        asked="m",
        adapter=None,
        predictor=None,
        max_concurrent_requests=9,
        max_model_len=None,
    )
    return SimpleNamespace(choose=lambda fields, key, preferred=None: route)


class AnsweringEngines:
    """Keeps what it is asked; ``behave`` gives each answer, or the error that it ends with."""

    def __init__(self, behave: Behave = good) -> None:
        self.behave = behave
        self.ledger = InFlight()
        self.asked: list[ForwardRequest] = []

    @property
    def session(self) -> aiohttp.ClientSession:
        raise AssertionError("there is no other process")

    async def get(self, address: str, path: str, timeout_s: float) -> str:
        raise AssertionError("there is no replica")

    async def forward(self, request: ForwardRequest, receive: Receive, send: Send) -> None:
        self.asked.append(request)
        answer = await self.behave(request)
        if isinstance(answer, RequestError):
            raise answer
        for message in answer:
            await send(message)

    async def collect(
        self, request: ForwardRequest, receive: Receive = never_gone
    ) -> tuple[int, bytes]:
        collected = CollectedAnswer()
        await self.forward(request, receive, collected.send)
        return collected.status, bytes(collected.body)

    def set_models(self, routes: Collection[ModelRoute]) -> None:
        pass

    def is_set_up(self, model: str) -> bool:
        return True

    def pages(self, model: str, replica_id: str) -> Sequence[str]:
        return ()

    async def close(self) -> None:
        pass


def replica_route(replica_id: str, address: str = "a") -> ReplicaRoute:
    engine = EngineAddress(f"ipc://{replica_id}.in", f"ipc://{replica_id}.out")
    return ReplicaRoute(id=replica_id, device="d", address=address, engine=engine)
