"""ASGI pieces: endpoints past frameworks, requests of our own, work for a connected client."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

R = TypeVar("R")
ON_LEFT = "loomserve.on_left"
"""Key of a scope whose application may list there what is called when nobody waits for it."""


class DirectPosts:
    """ASGI application that gives POST requests to ``endpoints`` by their paths, all else to
    ``others``.

    A framework would look through its routes, and pass each chunk of a stream through each layer.
    """

    def __init__(self, endpoints: Mapping[str, ASGIApp], others: ASGIApp) -> None:
        self._endpoints, self._others = endpoints, others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._others
        if scope["type"] == "http" and scope["method"] == "POST":
            app = self._endpoints.get(scope["path"], app)
        await app(scope, receive, send)


def own_post(path: str, content_type: bytes, *headers: tuple[bytes, bytes]) -> Scope:
    """The scope of a request of this process's own to an application that it holds."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", content_type), *headers],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 80),
        "state": {},
    }


class CollectedAnswer:
    """A ``send`` that keeps the whole answer, for a request of the platform's own."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()

    async def send(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")


async def never_gone() -> Message:
    """A ``receive`` of a client that stays: the caller cancels instead."""
    never: Message = await asyncio.get_running_loop().create_future()
    return never


class ClientGoneError(Exception):
    """The client closed its connection, and the work was cancelled."""


async def while_connected(work: Coroutine[Any, Any, R], receive: Receive) -> R:
    """The result of ``work`` after the body was received; when the client disconnects it is
    cancelled, and ClientGoneError raised."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
            raise ClientGoneError
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
