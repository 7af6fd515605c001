"""What endpoints are answered by, in the place of the dispatcher."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from starlette.types import Message, Receive, Send

from loomserve.deployments.gateway.dispatch import Dispatching, ModelRequest
from loomserve.platform.base.errors import RequestError
from loomserve.platform.fleet.messages import ModelRoute, ReplicaRoute
from loomserve.platform.run.engine_address import EngineAddress
from loomserve.platform.state import ModelStatus
from tests.unit.platform.fleet.heartbeats import served_model

Answer = Sequence[Message] | RequestError
Behave = Callable[[ModelRequest], Awaitable[Answer]]


def answered(*pieces: bytes, status: int = 200) -> list[Message]:
    """The messages of a whole answer."""
    return [
        {"type": "http.response.start", "status": status, "headers": []},
        *({"type": "http.response.body", "body": piece, "more_body": True} for piece in pieces),
        {"type": "http.response.body", "body": b"", "more_body": False},
    ]


async def good(request: ModelRequest) -> Answer:
    return answered(b"{}")


def one_model() -> Any:
    """Routes that lead each request to one model, ``m``."""
    route = ModelRoute(
        model=served_model(), status=ModelStatus.READY, max_model_len=None, replicas=()
    )
    return SimpleNamespace(choose=lambda fields, key, preferred=None: route)


class FakeEngines(Dispatching):
    """Keeps what it is asked; ``behave`` gives each answer, or the error that it ends with."""

    def __init__(self, behave: Behave = good) -> None:
        self.behave = behave
        self.asked: list[ModelRequest] = []

    async def dispatch(self, request: ModelRequest, receive: Receive, send: Send) -> None:
        self.asked.append(request)
        answer = await self.behave(request)
        if isinstance(answer, RequestError):
            raise answer
        for message in answer:
            await send(message)


def replica_route(replica_id: str, address: str = "a") -> ReplicaRoute:
    engine = EngineAddress(f"ipc://{replica_id}.in", f"ipc://{replica_id}.out")
    return ReplicaRoute(id=replica_id, device="d", address=address, engine=engine)
