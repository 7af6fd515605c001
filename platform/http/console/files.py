"""Serves the console's files, by name, under headers that let a page do no more than it must."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from loomserve.platform.base.errors import MethodNotAllowed, NotFound

ROOT = "/console"
FOLDER = Path(__file__).parent / "static"
START = "index.html"

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    # Nothing that comes from the server can become HTML, even by mistake.
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Asked for again at each visit, so that no page mixes the files of two versions.
    "Cache-Control": "no-cache",
}


class ConsoleFile(NamedTuple):
    """A file of the console: its bytes, and their hash in quotes."""

    content: bytes
    type: str
    tag: str


def read_files(folder: Path = FOLDER) -> dict[str, ConsoleFile]:
    """The console's files by their names from ``folder``, with slashes."""
    return {
        path.relative_to(folder).as_posix(): _read(path)
        for path in sorted(folder.rglob("*"))
        if path.suffix in _TYPES
    }


def console_routes() -> list[Route]:
    files = ConsoleFiles(read_files())
    return [Route(ROOT, files), Route(ROOT + "/{name:path}", files)]


class ConsoleFiles:
    """ASGI application at ``/console`` and below it, of files that were read once: ``files`` by
    their names below ``/console/``, with ``index.html`` for ``/console/`` itself."""

    def __init__(self, files: Mapping[str, ConsoleFile]) -> None:
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises MethodNotAllowed, or NotFound if there is no such file."""
        response = self._answer(scope["method"], scope["path"], Headers(scope=scope))
        await response(scope, receive, send)

    def _answer(self, method: str, path: str, headers: Headers) -> Response:
        if method not in ("GET", "HEAD"):
            raise MethodNotAllowed(f"{path} does not answer {method}. Use GET.", allow="GET, HEAD")
        if path == ROOT:
            # Not absolute: a proxy may have the console under another path.
            return RedirectResponse(f"{ROOT[1:]}/", 308, _HEADERS)
        file = self._files.get(path.removeprefix(f"{ROOT}/") or START)
        if file is None:
            raise NotFound(f"The console has no file at {path}. It begins at {ROOT}/.")
        known = {each.strip() for each in headers.get("if-none-match", "").split(",")}
        if file.tag in known:
            return Response(status_code=304, headers={**_HEADERS, "ETag": file.tag})
        return Response(file.content, headers={**_HEADERS, "ETag": file.tag}, media_type=file.type)


def _read(path: Path) -> ConsoleFile:
    content = path.read_bytes()
    tag = hashlib.sha256(content).hexdigest()[:32]
    return ConsoleFile(content, _TYPES[path.suffix], f'"{tag}"')
