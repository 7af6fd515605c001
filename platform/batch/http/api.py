"""OpenAI's ``/v1/files`` and ``/v1/batches`` within the lane's process.

Gateways forward requests to it. They sign the name of the request's API key in
:data:`~loomserve.platform.fleet.messages.OWNER_HEADER`.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import AsyncIterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from loomserve.platform.base.errors import BadRequest, Forbidden, RequestError, Unavailable
from loomserve.platform.batch.folder import BatchFolder
from loomserve.platform.batch.http import identity
from loomserve.platform.batch.http.upload import Upload, expiry_seconds, paced
from loomserve.platform.batch.lane import BatchLane
from loomserve.platform.batch.policy.objects import (
    ENDPOINTS,
    INPUT,
    BatchRecord,
    FileRecord,
    new_id,
    window_seconds,
)
from loomserve.platform.batch.policy.quota import BatchQuota
from loomserve.platform.batch.store.store import BatchStore
from loomserve.platform.config import Batch
from loomserve.platform.fleet.messages import OWNER_HEADER
from loomserve.platform.http.ingress import exception_handlers
from loomserve.platform.http.ingress.responses import as_request_error, error_response

_DAY_S = 86_400
# How much of an upload comes between two looks at the room in the folder.
_LOOK_BYTES = 4 * 2**20
_MOST_FILES, _MOST_BATCHES = 10_000, 100
_LONGEST_WINDOW_S = 14 * _DAY_S
_METADATA_PAIRS, _METADATA_KEY, _METADATA_VALUE = 16, 64, 512


class CreateBatch(BaseModel):
    model_config = ConfigDict(extra="forbid")
    input_file_id: StrictStr
    endpoint: StrictStr
    completion_window: StrictStr
    metadata: dict[StrictStr, StrictStr] | None = None
    output_expires_after: dict[str, Any] | None = Field(None)


class BatchApi:
    """The endpoints; they keep everything in the lane's store and folder."""

    def __init__(
        self, lane: BatchLane, store: BatchStore, folder: BatchFolder, options: Batch
    ) -> None:
        self._lane, self._store, self._folder, self._options = lane, store, folder, options
        self._quota = BatchQuota(
            options.max_bytes_per_key, options.max_batches_per_key, options.max_unended_lines
        )

    def app(self, internal_token: str) -> ASGIApp:
        """The ASGI application; it answers requests that are signed with the token only."""
        routes = [
            Route("/v1/files", self._upload, methods=["POST"]),
            Route("/v1/files", self._list_files),
            Route("/v1/files/{id}", self._file),
            Route("/v1/files/{id}", self._delete_file, methods=["DELETE"]),
            Route("/v1/files/{id}/content", self._content),
            Route("/v1/batches", self._create, methods=["POST"]),
            Route("/v1/batches", self._list_batches),
            Route("/v1/batches/{id}", self._batch),
            Route("/v1/batches/{id}/cancel", self._cancel, methods=["POST"]),
        ]
        handlers = {**exception_handlers, RequestError: _respond}
        app = Starlette(routes=routes, exception_handlers=handlers)
        # Another path is another request, which nobody has signed.
        app.router.redirect_slashes = False
        return _Guarded(app, internal_token)

    # Files

    async def _upload(self, request: Request) -> Response:
        file_id, owner = new_id("file-"), _owner(request)
        incoming = self._folder.incoming(file_id)
        kept = await self._lane.call(self._store.files.bytes_of, owner)
        try:
            with incoming.open("wb") as target:
                upload = Upload(target, self._options.max_file_bytes)
                stream = self._bounded(request.stream(), upload, kept)
                await upload.read(request.headers.get("content-type", ""), paced(stream))
            record = self._record(file_id, owner, upload)
            self._folder.publish(file_id)
        except OSError as error:
            raise Unavailable(
                f"the file cannot be kept ({error.strerror}); tell the operator",
                reason="batch_folder_full",
            ) from None
        finally:
            incoming.unlink(missing_ok=True)
        try:
            await self._lane.call(self._store.files.add, record, self._quota)
        except (RequestError, sqlite3.Error):
            self._folder.remove(file_id)
            raise
        return JSONResponse(record.to_openai())

    async def _bounded(
        self, stream: AsyncIterator[bytes], upload: Upload, kept: int
    ) -> AsyncIterator[bytes]:
        """The stream of an upload, while the folder and its owner's quota have room for it."""
        looked_at = -_LOOK_BYTES
        async for chunk in stream:
            if upload.size - looked_at >= _LOOK_BYTES:
                looked_at = upload.size
                self._folder.check_room(self._options.min_free_space)
            self._quota.check_bytes(kept + max(1, upload.size))
            yield chunk

    def _record(self, file_id: str, owner: str, upload: Upload) -> FileRecord:
        purpose = upload.fields.get("purpose")
        if purpose != INPUT:
            raise BadRequest(
                f"The purpose must be {INPUT!r}; files are kept for batches only.", param="purpose"
            )
        given = {
            name: upload.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds")
        }
        now = int(self._lane.now())
        kept_s = expiry_seconds(given) or int(self._options.retention_days * _DAY_S)
        return FileRecord(
            id=file_id,
            owner=owner,
            filename=upload.filename or "",
            purpose=INPUT,
            bytes=upload.size,
            created_at=now,
            expires_at=now + kept_s,
        )

    async def _list_files(self, request: Request) -> Response:
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise BadRequest("The order is asc or desc.", param="order")
        files, more = await self._lane.call(
            lambda: self._store.files.page(
                _owner(request),
                purpose=request.query_params.get("purpose"),
                after=request.query_params.get("after"),
                limit=_limit(request, _MOST_FILES, _MOST_FILES),
                newest_first=order == "desc",
            )
        )
        return _page([file.to_openai() for file in files], more)

    async def _file(self, request: Request) -> Response:
        return JSONResponse((await self._known_file(request)).to_openai())

    async def _delete_file(self, request: Request) -> Response:
        file_id = request.path_params["id"]
        await self._lane.call(self._store.files.delete, _owner(request), file_id)
        self._folder.remove(file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def _content(self, request: Request) -> Response:
        file = await self._known_file(request)
        return FileResponse(self._folder.blob(file.id), media_type="application/octet-stream")

    async def _known_file(self, request: Request) -> FileRecord:
        return await self._lane.call(
            self._store.files.get, _owner(request), request.path_params["id"]
        )

    # Batches

    async def _create(self, request: Request) -> Response:
        asked = await _asked(request)
        now = int(self._lane.now())
        window_s = window_seconds(asked.completion_window)
        if asked.endpoint not in ENDPOINTS:
            raise BadRequest(
                f"The endpoint {asked.endpoint!r} is none of: {', '.join(ENDPOINTS)}.",
                param="endpoint",
            )
        if window_s is None or window_s > _LONGEST_WINDOW_S:
            raise BadRequest(
                "The completion_window is a number and s, m, h or d, at most 14d, such as 24h.",
                param="completion_window",
            )
        _check_metadata(asked.metadata)
        batch = BatchRecord(
            id=new_id("batch_"),
            owner=_owner(request),
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            output_expires_s=expiry_seconds(asked.output_expires_after or {}),
            metadata=asked.metadata,
            created_at=now,
            expires_at=now + window_s,
        )
        await self._lane.call(self._store.batches.add, batch, self._quota)
        self._lane.nudge()
        return JSONResponse(batch.to_openai())

    async def _list_batches(self, request: Request) -> Response:
        limit = _limit(request, 20, _MOST_BATCHES)
        after = request.query_params.get("after")
        batches, more = await self._lane.call(
            lambda: self._store.batches.page(_owner(request), after=after, limit=limit)
        )
        return _page([batch.to_openai() for batch in batches], more)

    async def _batch(self, request: Request) -> Response:
        batch = await self._lane.call(
            self._store.batches.get, _owner(request), request.path_params["id"]
        )
        return JSONResponse(batch.to_openai())

    async def _cancel(self, request: Request) -> Response:
        batch = await self._lane.cancel(_owner(request), request.path_params["id"])
        return JSONResponse(batch.to_openai())


class _Guarded:
    """ASGI application that answers gateways only, in the name of the owner that they sign."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        field = dict(scope["headers"]).get(OWNER_HEADER.encode(), b"").decode("latin-1")
        try:
            owner = identity.owner_of(
                self._token, field, scope["method"], identity.target_of(scope), time.monotonic()
            )
        except Forbidden as error:
            await error_response(error)(scope, receive, send)
            return
        scope["state"] = {**scope.get("state", {}), "owner": owner}
        try:
            await self._app(scope, receive, send)
        except (ClientDisconnect, RequestError):
            return  # answered, as far as there is anybody to answer


async def _respond(_: Request, error: Exception) -> Response:
    return error_response(as_request_error(error))


def _owner(request: Request) -> str:
    owner: str = request.state.owner
    return owner


async def _asked(request: Request) -> CreateBatch:
    body = await request.body()
    try:
        return CreateBatch.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        message = {
            "missing": f"Missing required parameter: '{place}'.",
            "extra_forbidden": f"Unknown parameter: '{place}'.",
        }.get(problem["type"], f"{place}: {problem['msg']}" if place else problem["msg"])
        raise BadRequest(message, param=place or None) from None


def _check_metadata(metadata: dict[str, str] | None) -> None:
    for key, value in (metadata or {}).items():
        if len(key) > _METADATA_KEY or len(value) > _METADATA_VALUE:
            raise BadRequest(
                f"A key of metadata has at most {_METADATA_KEY} characters, and a value "
                f"{_METADATA_VALUE}.",
                param="metadata",
            )
    if metadata is not None and len(metadata) > _METADATA_PAIRS:
        raise BadRequest(f"metadata has at most {_METADATA_PAIRS} pairs.", param="metadata")


def _limit(request: Request, default: int, most: int) -> int:
    given = request.query_params.get("limit")
    if given is None:
        return default
    if not re.fullmatch("[0-9]{1,6}", given) or not 1 <= int(given) <= most:
        raise BadRequest(f"The limit is a number from 1 to {most}.", param="limit")
    return int(given)


def _page(data: list[dict[str, Any]], more: bool) -> Response:
    return JSONResponse(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": more,
        }
    )
