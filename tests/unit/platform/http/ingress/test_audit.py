"""Which requests have a line in the audit log, and what it says and leaves out."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from loomserve.platform.access.keys import hash_key
from loomserve.platform.base.errors import Conflict
from loomserve.platform.config import Server
from loomserve.platform.http.ingress import exception_handlers, ingress_middleware
from loomserve.platform.http.ingress.audit import STRANGERS_A_MINUTE, Audit

TOKEN = "lsk-admin-0123456789"
OPERATOR = {"Authorization": f"Bearer {TOKEN}"}


@dataclass
class Admin:
    """An admin API behind the ingress, and the lines that it had written."""

    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        api = FastAPI(exception_handlers=exception_handlers)

        @api.api_route("/admin/v1/models/{name}", methods=["GET", "POST", "PUT", "DELETE"])
        def change(name: str) -> dict[str, str]:
            if name == "loading":
                raise Conflict("it is loading")
            if name == "broken":
                raise RuntimeError
            return {}

        @api.post("/v1/chat/completions")
        def chat() -> dict[str, str]:
            return {}

        self.app = ingress_middleware(
            api,
            Server(admin_token_hash=hash_key(TOKEN)),
            rejected=lambda _: None,
            audit=self.lines.append,
        )

    def ask(
        self,
        method: str,
        path: str = "/admin/v1/models/chat",
        *,
        headers: dict[str, str] = OPERATOR,
        body: bytes | None = None,
        times: int = 1,
    ) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, False, client=("10.1.2.3", 4))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as to:
                for _ in range(times - 1):
                    await to.request(method, path, headers=headers, content=body)
                return await to.request(method, path, headers=headers, content=body)

        return asyncio.run(send())

    def entry(self) -> dict[str, Any]:
        """The one that was written since the last."""
        (line,) = self.lines
        self.lines.clear()
        assert "\n" not in line
        entry: dict[str, Any] = json.loads(line)
        return entry


@pytest.fixture
def admin() -> Admin:
    return Admin()


def test_a_change_has_a_line_that_says_who_did_what_and_when(admin: Admin) -> None:
    answer = admin.ask("POST", "/admin/v1/models/chat?x=secret", body=b'{"replicas": 2}')
    entry = admin.entry()
    assert datetime.fromisoformat(entry.pop("time")).utcoffset() == datetime.min - datetime.min
    assert entry == {
        "request_id": answer.headers["x-request-id"],
        "who": "admin",
        "client": "10.1.2.3",
        "method": "POST",
        "path": "/admin/v1/models/chat",
        "status": 200,
        "body_bytes": 15,
        "body": {"replicas": 2},
    }


@pytest.mark.parametrize(
    ("path", "headers", "status", "who"),
    [
        ("/admin/v1/models/chat", {}, 401, None),
        ("/admin/v1/models/chat", {"Authorization": "Bearer wrong"}, 401, None),
        ("/admin/v1/models/chat", {**OPERATOR, "Host": "evil.example"}, 403, "admin"),
        ("/admin/v1/nothing", OPERATOR, 404, "admin"),
        ("/admin/v1/models/loading", OPERATOR, 409, "admin"),
        ("/admin/v1/models/broken", OPERATOR, 500, "admin"),
    ],
)
def test_what_is_refused_or_fails_has_a_line_too(
    admin: Admin, path: str, headers: dict[str, str], status: int, who: str | None
) -> None:
    assert admin.ask("DELETE", path, headers=headers).status_code == status
    entry = admin.entry()
    assert (entry["status"], entry["who"], entry["path"]) == (status, who, path)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_every_method_that_may_change_something_has_a_line(admin: Admin, method: str) -> None:
    admin.ask(method)
    assert admin.entry()["method"] == method


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/admin/v1/models/chat"),
        ("HEAD", "/admin/v1/models/chat"),
        ("OPTIONS", "/admin/v1/models/chat"),
        ("POST", "/v1/chat/completions"),
    ],
)
def test_nothing_else_has_a_line(admin: Admin, method: str, path: str) -> None:
    admin.ask(method, path, body=b"{}")
    assert admin.lines == []


def test_secrets_and_what_users_wrote_are_left_out(admin: Admin) -> None:
    mark = "MARKED"
    body = {
        "engine": {
            "hf_token": mark,
            "max_num_batched_tokens": 512,
            "tokenizer": "t",
            "env": [{"API_KEY": mark, "aws-secret": {"x": mark}, "Authorization": mark}],
        },
        "api_keys": [mark],
        "password": mark,
        "messages": [{"role": "user", "content": mark}],
        "prompt": [1, mark],
    }
    admin.ask("POST", body=json.dumps(body).encode())
    assert mark not in admin.lines[0]
    engine = admin.entry()["body"]["engine"]
    assert (engine["max_num_batched_tokens"], engine["tokenizer"]) == (512, "t")
    assert engine["env"] == [
        {"API_KEY": "(left out)", "aws-secret": "(left out)", "Authorization": "(left out)"}
    ]


def test_tokens_are_left_out_right_or_wrong(admin: Admin) -> None:
    for token in (TOKEN, "lsk-of-somebody"):
        admin.ask("POST", headers={"Authorization": f"Bearer {token}"})
        assert token not in admin.lines.pop()


@pytest.mark.parametrize(
    "body",
    [
        b"not JSON",
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b"[" * 10_000,
        b"[" * 950 + b"]" * 950,
        b'"' + b"x" * 20_000 + b'"',
    ],
    ids=["text", "bytes", "NaN", "infinity", "brackets", "nested", "large"],
)
def test_a_body_that_is_no_json_or_large_is_counted_only(admin: Admin, body: bytes) -> None:
    admin.ask("POST", body=body)
    entry = admin.entry()
    assert (entry["body_bytes"], entry["body"]) == (len(body), None)


def test_a_path_cannot_make_lines_or_fill_the_file(admin: Admin) -> None:
    admin.ask("POST", "/admin/v1/%0A%22%7D" + "x" * 5000, headers={})
    assert len(admin.lines[0]) < 1000
    assert admin.entry()["path"].startswith('/admin/v1/\n"}x')


def test_strangers_do_not_push_operators_out() -> None:
    lines: list[str] = []
    now_s = 1000 * 60.0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401})

    async def send(message: Any) -> None:
        pass

    audit = Audit(app, lines.append, lambda headers: bool(headers), lambda: now_s)

    def ask(times: int, **headers: str) -> None:
        scope = {
            "method": "POST",
            "path": "/admin/v1/models",
            "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
            "state": {"request_id": "r"},
        }
        for _ in range(times):
            asyncio.run(audit(scope, send, send))

    ask(STRANGERS_A_MINUTE + 30)
    assert len(lines) == STRANGERS_A_MINUTE
    ask(2, token="right")
    told = [json.loads(line) for line in lines[-2:]]
    assert [one["who"] for one in told] == ["admin", "admin"]
    assert [one.get("strangers_left_out") for one in told] == [30, None]
    now_s += 60
    ask(STRANGERS_A_MINUTE + 1)
    assert len(lines) == 2 * STRANGERS_A_MINUTE + 2
