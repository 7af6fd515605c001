"""The lane's HTTP API by itself: forms, pages, bounds, and what a file's lines must be."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import tempfile
import time
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from loomserve.deployments.batch.executor import outcome
from loomserve.platform.base.errors import BadRequest, BodyTooLarge
from loomserve.platform.batch.executor import LineOutcome
from loomserve.platform.batch.http import identity
from loomserve.platform.batch.http.api import BatchApi
from loomserve.platform.batch.http.upload import Upload, expiry_seconds
from loomserve.platform.batch.policy.lines import check
from loomserve.platform.fleet.messages import OWNER_HEADER
from loomserve.platform.requests.engine_request import EngineRequest
from loomserve.platform.scheduling.policy.hints import is_background
from tests.unit.platform.batch.test_lane import Bench, Engines, request

TOKEN = "secret"
ENDPOINT = "/v1/completions"


class SignedBy(httpx.Auth):
    """A gateway's signature under the requests of one key."""

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        target = request.url.raw_path.decode()
        request.headers[OWNER_HEADER] = identity.sign(
            TOKEN, self._owner, request.method, target, time.monotonic()
        )
        yield request


class Api:
    """The application and a client of one key."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.bench = Bench(folder, Engines(), **options)
        api = BatchApi(self.bench.make(), self.bench.store, self.bench.folder, self.bench.options)
        self.app = api.app(TOKEN)

    def ask(self, method: str, path: str, owner: str = "alice", **given: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://lane", auth=SignedBy(owner)
            ) as client:
                return await client.request(method, path, **given)

        return asyncio.run(go())

    def upload(self, text: str, owner: str = "alice", **fields: str) -> httpx.Response:
        return self.ask(
            "POST",
            "/v1/files",
            owner,
            files={"file": ("in.jsonl", text)},
            data={"purpose": "batch", **fields},
        )


@pytest.fixture
def api(tmp_path: Path) -> Api:
    return Api(tmp_path / "b", max_file_bytes=1000)


def test_what_is_uploaded_is_read_back_byte_by_byte_and_deleted(api: Api) -> None:
    text = request("ä") + "\r\n--not-a-boundary\r\n"
    file = api.upload(text).raise_for_status().json()
    assert (file["object"], file["bytes"], file["filename"]) == (
        "file",
        len(text.encode()),
        "in.jsonl",
    )
    assert api.ask("GET", f"/v1/files/{file['id']}").json() == file
    assert api.ask("GET", f"/v1/files/{file['id']}/content").content == text.encode()
    assert api.ask("GET", f"/v1/files/{file['id']}/content", "bob").status_code == 404
    assert api.ask("DELETE", f"/v1/files/{file['id']}").json()["deleted"] is True
    assert not api.bench.folder.blob(file["id"]).exists()


@pytest.mark.parametrize(
    ("text", "fields", "status", "param"),
    [
        ("x" * 1001, {}, 413, None),
        ("x", {"purpose": "assistants"}, 400, "purpose"),
        ("x", {"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, 400,
         "expires_after"),
        ("x", {"other": "y" * 2000}, 400, "other"),
    ],
)  # fmt: skip
def test_a_refused_upload_says_why_and_leaves_nothing(
    api: Api, text: str, fields: dict[str, str], status: int, param: str | None
) -> None:
    answer = api.upload(text, **fields)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
    assert list(api.bench.folder.incoming("x").parent.iterdir()) == []
    assert list(api.bench.folder.blob("x").parent.iterdir()) == []
    assert api.ask("GET", "/v1/files").json()["data"] == []


def test_pages_follow_each_other(api: Api) -> None:
    ids = [api.upload("x").json()["id"] for _ in range(3)]
    first = api.ask("GET", "/v1/files?limit=2").json()
    assert [file["id"] for file in first["data"]] == [ids[2], ids[1]]
    assert (first["has_more"], first["last_id"]) == (True, ids[1])
    rest = api.ask("GET", f"/v1/files?limit=2&after={ids[1]}").json()
    assert ([f["id"] for f in rest["data"]], rest["has_more"]) == ([ids[0]], False)
    for wrong in ("limit=0", "limit=x", "limit=" + "9" * 5000, "order=up", "after=file-0"):
        assert api.ask("GET", f"/v1/files?{wrong}").status_code in (400, 404)


def test_a_batch_is_made_shown_listed_and_cancelled(api: Api) -> None:
    file_id = api.upload(request("a")).json()["id"]
    wanted = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
    batch = api.ask("POST", "/v1/batches", json={**wanted, "metadata": {"a": "b"}}).json()
    assert (batch["object"], batch["status"]) == ("batch", "validating")
    assert batch["expires_at"] - batch["created_at"] == 86_400
    assert api.ask("GET", f"/v1/batches/{batch['id']}").json() == batch
    assert api.ask("GET", f"/v1/batches/{batch['id']}", "bob").status_code == 404
    assert api.ask("GET", "/v1/batches").json()["data"] == [batch]
    assert api.ask("DELETE", f"/v1/files/{file_id}").status_code == 409


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"[]", None),
        (b"\xff", None),
        (b"{}", "input_file_id"),
        (b'{"input_file_id": 3, "endpoint": "x", "completion_window": "1h"}', "input_file_id"),
        (b'{"input_file_id": "f", "endpoint": "x", "completion_window": "1h"}', "endpoint"),
    ],
)
def test_a_wrong_batch_is_refused(api: Api, body: bytes, param: str | None) -> None:
    answer = api.ask("POST", "/v1/batches", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_nobody_but_a_gateway_is_answered(api: Api) -> None:
    for field in ("", "guess", "1.2.3", "x.y.z", "é"):
        given: dict[str, Any] = {"auth": None, "headers": {OWNER_HEADER.encode(): field.encode()}}
        assert api.ask("GET", "/v1/files", **given).status_code == 403


def test_a_signature_is_good_for_the_very_request_that_it_was_made_for(api: Api) -> None:
    field = identity.sign(TOKEN, "alice", "GET", "/v1/files?limit=2", time.monotonic())
    given: dict[str, Any] = {"auth": None, "headers": {OWNER_HEADER: field}}
    assert api.ask("GET", "/v1/files?limit=2", **given).status_code == 200
    assert api.ask("GET", "/v1/files?limit=3", **given).status_code == 403
    assert api.ask("GET", "/v1/files/?limit=2", **given).status_code == 403
    assert api.ask("HEAD", "/v1/files?limit=2", **given).status_code == 403


def test_a_handshake_for_another_protocol_is_refused(api: Api) -> None:
    with pytest.raises(WebSocketDisconnect), TestClient(api.app).websocket_connect("/v1/files"):
        pass


async def pieces(form: bytes, cuts: list[int]) -> AsyncIterator[bytes]:
    places = [0, *sorted(cut % (len(form) + 1) for cut in cuts), len(form)]
    for begin, end in itertools.pairwise(places):
        yield form[begin:end]


FORM = (
    b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\none\r\n--Bee\r\ntwo\r\n--B--\r\n"
)
KIND = "multipart/form-data; boundary=B"


@given(st.lists(st.integers(0, 1000), max_size=20))
@settings(deadline=None, max_examples=30)
def test_a_form_is_the_same_however_it_is_cut(cuts: list[int]) -> None:
    with tempfile.TemporaryFile() as target:
        upload = Upload(target, 1000)
        asyncio.run(upload.read(KIND, pieces(FORM, cuts)))
        target.seek(0)
        assert target.read() == b"one\r\n--Bee\r\ntwo"
    assert (upload.fields, upload.filename) == ({"purpose": "batch"}, "a.jsonl")


@given(st.integers(0, len(FORM) - 10))
@settings(deadline=None, max_examples=30)
def test_a_form_that_is_cut_off_is_refused(end: int) -> None:
    with pytest.raises(BadRequest):
        asyncio.run(Upload(io.BytesIO(), 1000).read(KIND, pieces(FORM[:end], [])))


def test_a_file_that_is_too_large_ends_the_upload() -> None:
    with pytest.raises(BodyTooLarge, match=r"batch\.max_file_bytes"):
        asyncio.run(Upload(io.BytesIO(), 5).read(KIND, pieces(FORM, [])))


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data"])
def test_what_is_no_form_is_refused(kind: str) -> None:
    with pytest.raises(BadRequest):
        asyncio.run(Upload(io.BytesIO(), 5).read(kind, pieces(FORM, [])))


def test_expiry_is_within_its_bounds() -> None:
    assert expiry_seconds({}) is None
    assert expiry_seconds({"anchor": "created_at", "seconds": "3600"}) == 3600
    for seconds in ("60", "x", None, 10**9):
        with pytest.raises(BadRequest):
            expiry_seconds({"anchor": "created_at", "seconds": seconds})


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        ("{", "invalid_json_line", None),
        ("[]", "invalid_json_line", None),
        ("[" * 100_000, "line_too_long", None),
        ("[" * 5000, "invalid_json_line", None),
        ("{}", "missing_required_parameter", "custom_id"),
        (request("a").replace('"a"', "3"), "invalid_custom_id", "custom_id"),
        (request("\ud800"), "invalid_custom_id", "custom_id"),
        (request("a" * 513), "invalid_custom_id", "custom_id"),
        (request("a").replace("POST", "GET"), "invalid_method", "method"),
        (request("a").replace(ENDPOINT, "/v1/embeddings"), "invalid_url", "url"),
        (json.dumps({**json.loads(request("a")), "body": []}), "invalid_request", "body"),
        (request("a", model=""), "missing_required_parameter", "body.model"),
    ],
)
def test_each_mistake_of_a_line_has_its_code(line: str, code: str, param: str | None) -> None:
    text = request("good") + "\n" + line + "\n"
    found = check(io.BytesIO(text.encode()), ENDPOINT, max_lines=9, max_body=10_000)
    assert [(e.line, e.code, e.param) for e in found.errors] == [(2, code, param)]


def test_files_without_requests_and_with_too_many_are_wrong() -> None:
    def codes(text: str) -> list[str]:
        found = check(io.BytesIO(text.encode()), ENDPOINT, max_lines=2, max_body=1000)
        return [error.code for error in found.errors]

    assert codes("") == codes("\n \n") == ["empty_file"]
    assert codes("\n".join(request(f"c{n}") for n in range(2))) == []
    assert codes("\n".join(request(f"c{n}") for n in range(3))) == ["too_many_lines"]
    assert len(codes("{\n" * 5000)) == 100


@given(st.lists(st.text(max_size=5), max_size=10, unique=True))
def test_lines_are_found_again_where_they_are(ids: list[str]) -> None:
    ids = [name for name in ids if name] or ["x"]
    text = "\n\n".join(request(name) for name in ids).encode()
    found = check(io.BytesIO(text), ENDPOINT, max_lines=99, max_body=1000)
    assert [line.custom_id for line in found.lines] == ids
    for line in found.lines:
        again = json.loads(text[line.offset : line.offset + line.size])
        assert again["custom_id"] == line.custom_id
        assert (line.max_tokens, line.sequences, line.model) == (8, 1, "m")


@pytest.mark.parametrize(
    ("body", "sequences"),
    [({"n": 3}, 3), ({"n": 2, "prompt": ["a", "b"]}, 4), ({"prompt": [1, 2, 3]}, 1),
     ({"n": True}, 1), ({"n": "x", "prompt": []}, 1)],
)  # fmt: skip
def test_a_line_counts_the_sequences_it_asks_for(body: dict[str, Any], sequences: int) -> None:
    text = request("a", **body).encode()
    (line,) = check(io.BytesIO(text), ENDPOINT, max_lines=9, max_body=1000).lines
    assert line.sequences == sequences


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        (ENDPOINT, {"prompt": "a", "max_tokens": 5}, 5),
        (ENDPOINT, {"prompt": "a"}, None),
        ("/v1/chat/completions", {"max_tokens": 5, "max_completion_tokens": 4}, 4),
        ("/v1/chat/completions", {}, None),
        ("/v1/embeddings", {"input": ["a", "b"]}, 0),
    ],
)
def test_a_line_is_as_long_as_its_engine_makes_it(
    path: str, body: dict[str, Any], most: int | None
) -> None:
    line = {"custom_id": "a", "method": "POST", "url": path, "body": {"model": "m", **body}}
    text = json.dumps(line).encode()
    (read,) = check(io.BytesIO(text), path, max_lines=9, max_body=1000).lines
    assert (read.max_tokens, read.sequences) == (most, 1)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (200, None, LineOutcome.ANSWERED),
        (404, "model_not_found", LineOutcome.ANSWERED),
        (429, "rate_limit_exceeded", LineOutcome.AWAY),
        (503, "model_not_ready", LineOutcome.AWAY),
        (503, "no_replica", LineOutcome.AWAY),
        (502, "engine_gone", LineOutcome.ENGINE_ENDED),
        (502, "engine_stalled", LineOutcome.ENGINE_FAILED),
        (502, "query_of_death", LineOutcome.DEADLY),
        (500, "line_timeout", LineOutcome.ENGINE_FAILED),
        (500, "x", LineOutcome.ENGINE_FAILED),
    ],
)
def test_only_what_may_end_better_is_tried_again(
    status: int, code: str | None, expected: LineOutcome
) -> None:
    assert outcome(status, json.dumps({"error": {"code": code}}).encode()) is expected


def test_an_answer_that_cannot_be_read_is_an_engines_failure() -> None:
    assert outcome(503, b"<html>") is LineOutcome.ENGINE_FAILED


def test_a_line_tells_the_engine_that_it_may_wait_and_clients_cannot() -> None:
    own = EngineRequest(ENDPOINT, {"prompt": "x", "vllm_xargs": {"own": 1}})
    line = own.with_hints(background=True).fields
    assert is_background(line["vllm_xargs"])
    assert line["vllm_xargs"]["own"] == 1
    embedded = EngineRequest("/v1/embeddings", {"input": "x"})
    assert embedded.with_hints(background=True).fields == {"input": "x"}
    assert not is_background(None)
    with pytest.raises(BadRequest, match="the platform's own"):
        EngineRequest.of_fields(ENDPOINT, line)
