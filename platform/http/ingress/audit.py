"""Audit of the admin API: who asked for which change, and how it was answered."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ADMIN = "/admin"
# They change nothing.
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_SECRET = re.compile(
    r"(?:^|[_-])(?:token|(?:key|secret|password|credential|hash)s?|authorization)$", re.IGNORECASE
)
# What users wrote is not the operator's doing.
_TEXTS = frozenset({"messages", "prompt", "text", "input"})
_LEFT_OUT = "(left out)"
_MOST_BODY_BYTES = 16 * 2**10
_MOST_PATH = 256
STRANGERS_A_MINUTE = 20
"""Logged requests without the admin token: more must not push the others out of the files."""


@dataclass(eq=False)
class Audit:
    """Writes a line for each request for a change by the admin API."""

    app: ASGIApp
    write: Callable[[str], None]
    """Takes a line without its end."""
    is_operator: Callable[[dict[bytes, bytes]], bool]
    """Whether headers have the admin token."""
    clock: Callable[[], float] = time.time
    _minute: int = field(default=0, init=False)
    _strangers: int = field(default=0, init=False)
    _left_out: int = field(default=0, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in _SAFE_METHODS or not scope["path"].startswith(_ADMIN):
            await self.app(scope, receive, send)
            return
        status: int | None = None

        async def send_noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, send_noting)
        finally:
            self._note(scope, status)

    def _note(self, scope: Scope, status: int | None) -> None:
        now_s = self.clock()
        operator = self.is_operator(dict(scope["headers"]))
        if not operator and self._is_one_too_many(now_s):
            self._left_out += 1
            return
        client = scope.get("client")
        body: bytes = scope["state"].get("body") or b""
        entry = {
            "time": datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds"),
            "request_id": scope["state"]["request_id"],
            "who": "admin" if operator else None,
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"][:_MOST_PATH],
            "status": status,
            "body_bytes": len(body),
        }
        if self._left_out:
            entry["strangers_left_out"], self._left_out = self._left_out, 0
        self.write(_line(entry, body))

    def _is_one_too_many(self, now_s: float) -> bool:
        minute = int(now_s // 60)
        if minute != self._minute:
            self._minute, self._strangers = minute, 0
        self._strangers += 1
        return self._strangers > STRANGERS_A_MINUTE


def _line(entry: dict[str, Any], body: bytes) -> str:
    if 0 < len(body) <= _MOST_BODY_BYTES:
        try:
            told = json.loads(body, object_pairs_hook=_without_secrets)
            return json.dumps({**entry, "body": told}, allow_nan=False)
        except (ValueError, RecursionError):
            pass  # then it was refused, too
    return json.dumps({**entry, "body": None})


def _without_secrets(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    private = {name for name, _ in pairs if name in _TEXTS or _SECRET.search(name)}
    return {name: _LEFT_OUT if name in private else value for name, value in pairs}
