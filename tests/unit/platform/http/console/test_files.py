"""The console's files: which there are, under which headers, and that nothing else is served."""

from __future__ import annotations

import asyncio
import posixpath
import re
import tomllib
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.types import Message

from loomserve.platform.access.keys import hash_key
from loomserve.platform.base.errors import NotFound
from loomserve.platform.config import Server
from loomserve.platform.http.console.files import FOLDER, ConsoleFiles, console_routes, read_files
from loomserve.platform.http.ingress import exception_handlers, ingress_middleware

ROOT = Path(__file__).parents[5]
FILES = read_files()
PAGES = [name for name in FILES if name.startswith("pages/")]
STRANGE = [
    *("none.js", "pages", "pages/", "pages/none.js", "index.html/", "Index.html", "index.html\0"),
    *("../files.py", "..", "pages/../../files.py", "..\\files.py", "pages/../main.js", "./main.js"),
    *("/etc/passwd", "//etc/passwd", "pages//fleet.js", "static/main.js", "files.py", "main.js "),
]


def ask(path: str, method: str = "GET", headers: dict[str, str] | None = None) -> httpx.Response:
    """What the console answers behind the middleware, without a token."""
    server = Server.model_validate({"admin_token_hash": hash_key("token")})
    app = ingress_middleware(
        Starlette(routes=console_routes(), exception_handlers=exception_handlers),
        server,
        rejected=lambda _: None,
    )

    async def answer() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(answer())


def test_every_file_of_the_folder_is_served() -> None:
    there = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file()}
    assert set(FILES) == there
    assert len(PAGES) == 9


@pytest.mark.parametrize("name", ["", *FILES])
def test_a_file_is_what_it_is_and_may_do_no_more_than_it_must(name: str) -> None:
    answer = ask(f"/console/{name}")
    assert answer.status_code == 200
    assert answer.content == (FOLDER / (name or "index.html")).read_bytes()
    policy = dict(
        each.strip().split(" ", 1) for each in answer.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert policy["frame-ancestors"] == policy["trusted-types"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"


def test_every_file_is_in_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["loomserve.platform.http.console"]
    folder = FOLDER.parent
    packed = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    assert {path.relative_to(FOLDER).as_posix() for path in packed} == set(FILES)


def test_types_are_those_that_browsers_run() -> None:
    assert ask("/console/").headers["content-type"].startswith("text/html")
    assert ask("/console/main.js").headers["content-type"].startswith("text/javascript")
    assert ask("/console/base.css").headers["content-type"].startswith("text/css")
    assert ask("/console/icon.svg").headers["content-type"] == "image/svg+xml"


def test_what_a_browser_has_is_not_sent_again() -> None:
    tag = ask("/console/main.js").headers["etag"]
    for known in (tag, f'"other", {tag}'):
        again = ask("/console/main.js", headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
    assert ask("/console/main.js", headers={"If-None-Match": '"other"'}).status_code == 200


def test_the_path_without_its_slash_leads_to_the_console() -> None:
    answer = ask("/console")
    assert answer.status_code == 308
    assert answer.url.join(answer.headers["location"]).path == "/console/"


@pytest.mark.parametrize("name", STRANGE)
def test_no_other_name_is_a_file(name: str) -> None:
    # As the server gives it: decoded, and not made shorter as clients do.
    scope = {"type": "http", "method": "GET", "path": f"/console/{name}", "headers": []}
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def send(message: Message) -> None:
        sent.append(message)

    with pytest.raises(NotFound):
        asyncio.run(ConsoleFiles(FILES)(scope, receive, send))
    assert sent == []


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_files_are_only_read(method: str) -> None:
    answer = ask("/console/main.js", method)
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


def test_no_file_needs_what_the_policy_forbids() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|"
        r"\.setAttribute\(\"style|style:|https?://(?!www\.w3\.org/2000/svg)"
    )
    html = FILES["index.html"].content.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)
    for name, file in FILES.items():
        assert forbidden.search(file.content.decode()) is None, name


def test_every_module_that_is_imported_is_there() -> None:
    for name, file in FILES.items():
        for to in re.findall(r"""from "(\.[^"]+)";""", file.content.decode()):
            assert posixpath.normpath(f"{posixpath.dirname(name)}/{to}").lstrip("/") in FILES, name
