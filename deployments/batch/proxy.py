"""Forwards requests to ``/v1/files`` and ``/v1/batches`` from a gateway to the batch lane.

Files pass through in pieces; neither side ever holds one whole in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import Receive, Scope, Send
from yarl import URL

from loomserve.platform.base.errors import (
    BodyTooLarge,
    NotFound,
    RequestError,
    RequestTimeout,
    Unavailable,
)
from loomserve.platform.base.reply import Reply
from loomserve.platform.batch.http import identity
from loomserve.platform.config import ApiKey
from loomserve.platform.fleet.messages import OWNER_HEADER, LanePlace
from loomserve.platform.http.asgi import ClientGoneError, while_connected

FILES = "/v1/files"
BATCHES = "/v1/batches"
# After a crash Serve needs some seconds for a new lane.
_LANE_TIMEOUT_S = 15.0
# Nothing that frames a message: what is read from a client and what is sent on are two messages.
_PASSED_ON = frozenset({b"content-type", b"range", b"x-request-id"})
_PASSED_BACK = frozenset(
    {b"content-type", b"content-length", b"content-range", b"accept-ranges", b"etag",
     b"last-modified", b"allow"}
)  # fmt: skip
# Room for what a form has beside its file.
_FORM_BYTES = 2**16


class BatchProxy:
    """ASGI application of the forwarded paths; it also calls the lane for the admin API."""

    def __init__(
        self,
        lane: DeploymentHandle | None,
        session: aiohttp.ClientSession,
        internal_token: str,
        *,
        max_file_bytes: int,
        idle_timeout_s: float,
    ) -> None:
        self._lane = lane
        self._session = session
        self._internal_token = internal_token
        self._max_bytes = max_file_bytes + _FORM_BYTES
        self._idle_timeout_s = idle_timeout_s
        self._address: str | None = None
        self._lane_ahead_s = 0.0
        """What the clock of the lane's node shows more than this one's."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises NotFound if the platform has no lane; BodyTooLarge if the upload is larger than
        ``max_file_bytes``; Unavailable if the lane does not answer."""
        if self._lane is None:
            raise NotFound(
                "there is no batch lane here: the operator adds a batch section to the "
                "configuration"
            )
        self._check_length(dict(scope["headers"]).get(b"content-length", b""))
        asking = self._ask_lane(scope, receive, send)
        if scope["state"]["body"] is None:
            # What reads the upload sees its client leave.
            await asking
            return
        with contextlib.suppress(ClientGoneError):
            await while_connected(asking, receive)

    async def _ask_lane(self, scope: Scope, receive: Receive, send: Send) -> None:
        # aiohttp turns errors of a body's source into errors of its connection.
        problem: list[Exception] = []
        target = identity.target_of(scope)
        began = False
        try:
            address = await self._where()
            async with self._session.request(
                scope["method"],
                # The lane must see the very path that is signed.
                URL(f"http://{address}{target}", encoded=True),
                headers=self._headers(scope, target),
                data=self._body(scope, receive, problem),
                allow_redirects=False,
            ) as response:
                began = True
                await _relay(response, send)
        except (aiohttp.ClientError, ConnectionError, RequestError, ClientGoneError) as error:
            if problem and isinstance(problem[0], ClientGoneError):
                return
            if problem or isinstance(error, RequestError):
                raise (problem or [error])[0] from None
            self._address = None
            if began:
                raise
            raise _away() from error

    async def ask(self, method: str, *given: Any) -> Reply[Any]:
        """Call a method of the lane. Raises NotFound if there is none, or Unavailable."""
        if self._lane is None:
            raise NotFound("there is no batch lane: add a batch section to the configuration")
        reply: Reply[Any] = await self._call(getattr(self._lane, method), *given)
        return reply

    async def _call(self, method: Any, *given: Any) -> Any:
        try:
            async with asyncio.timeout(_LANE_TIMEOUT_S):
                return await method.remote(*given)
        except (RayError, RayServeException, TimeoutError):
            raise _away() from None

    async def _where(self) -> str:
        if self._address is None:
            assert self._lane is not None
            asked_s = time.monotonic()
            place: LanePlace = await self._call(self._lane.place)
            self._address = place.address
            # It errs by half of the way there and back at most.
            self._lane_ahead_s = place.now_s - (asked_s + time.monotonic()) / 2
        return self._address

    def _headers(self, scope: Scope, target: str) -> list[tuple[str, str]]:
        key: ApiKey | None = scope["state"].get("api_key")
        passed = [(k.decode(), v.decode("latin-1")) for k, v in scope["headers"] if k in _PASSED_ON]
        owner = identity.sign(
            self._internal_token,
            key.name if key else "",
            scope["method"],
            target,
            time.monotonic() + self._lane_ahead_s,
        )
        return [*passed, (OWNER_HEADER, owner)]

    def _body(
        self, scope: Scope, receive: Receive, problem: list[Exception]
    ) -> AsyncIterator[bytes] | bytes | None:
        body: bytes | None = scope["state"]["body"]
        if body is None:
            return _noting(problem, self._stream(receive))
        return body or None

    async def _stream(self, receive: Receive) -> AsyncIterator[bytes]:
        size = 0
        while True:
            try:
                async with asyncio.timeout(self._idle_timeout_s):
                    message = await receive()
            except TimeoutError:
                raise RequestTimeout(
                    f"Nothing of the file came for {self._idle_timeout_s:g} s. Send it without "
                    "pauses."
                ) from None
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > self._max_bytes:
                raise self._too_large()
            if chunk:
                yield chunk
            if not message.get("more_body", False):
                return

    def _check_length(self, length: bytes) -> None:
        # The ingress middleware has seen that shorter bodies are within their own bound.
        if length.isdigit() and (len(length) > 18 or int(length) > self._max_bytes):
            raise self._too_large()

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"The file is larger than {self._max_bytes - _FORM_BYTES} bytes. Split it, or ask the "
            "operator to raise batch.max_file_bytes."
        )


async def _noting(problem: list[Exception], stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for chunk in stream:
            yield chunk
    except Exception as error:
        problem.append(error)
        raise


async def _relay(response: aiohttp.ClientResponse, send: Send) -> None:
    headers = [(k.lower(), v) for k, v in response.raw_headers if k.lower() in _PASSED_BACK]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    async for chunk in response.content.iter_any():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _away() -> Unavailable:
    return Unavailable(
        "the batch lane is being restarted; batches go on by themselves, try again shortly",
        reason="batch_lane_away",
        retry_after_s=5,
    )
