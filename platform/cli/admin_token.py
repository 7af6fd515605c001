"""The admin token of this machine's platforms: a file that its user alone can read.

``loomserve serve`` makes it, and gives the platform its hash alone; the other commands find it by
themselves.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from loomserve.platform.access.keys import hash_key
from loomserve.platform.base.errors import StartError
from loomserve.platform.base.loopback import check_listeners, is_loopback
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.config import Config

_MOST_BYTES = 1024
_ELSEWHERE = "set LOOMSERVE_HOME to a folder of your own, or set server.admin_token_hash"


def token_path() -> Path:
    """The token's file: ``admin-token`` in the user's cache folder."""
    return cache_folder() / "admin-token"


def with_admin_token(config: Config, say: Callable[[str], None]) -> Config:
    """The configuration with its own admin token's hash or the user's; StartError: a bad file."""
    if config.server.admin_token_hash is not None:
        return config
    token = read_token() or _make_token()
    say(f"the admin token is in {token_path()}; commands on this machine find it by themselves")
    server = config.server.model_copy(update={"admin_token_hash": hash_key(token)})
    return config.model_copy(update={"server": server})


def token_for(url: str) -> str | None:
    """The user's token, if ``url`` is of this machine; StartError: another user listens there."""
    token = read_token() if on_this_machine(url) else None
    if token is not None:
        check_listeners(httpx.URL(url).host, _port(httpx.URL(url)))
    return token


def only_to_own_user(url: str) -> dict[str, Any]:
    """Extensions of a request of httpx's with a token: who took its connection is looked at before
    anything is sent; the request raises StartError. Beyond this machine nobody can tell.
    """

    def look(event: str, info: Mapping[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            try:
                host, port, *_ = info["return_value"].get_extra_info("server_addr")
            except OSError as error:
                raise httpx.ConnectError(str(error)) from None
            check_listeners(host, port, connected=True)

    return {"trace": look} if on_this_machine(url) else {}


def on_this_machine(url: str) -> bool:
    """Whether requests to ``url`` stay on this machine; not if it is no URL."""
    try:
        return is_loopback(httpx.URL(url).host)
    except httpx.InvalidURL:
        return False


def _port(url: httpx.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def read_token() -> str | None:
    """The user's token; None: there is none yet. StartError: others can read or write it."""
    path = token_path()
    try:
        # A link or a pipe is none of ours; opening a pipe would wait for its writer.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            _check(os.fstat(handle))
            token = os.read(handle, _MOST_BYTES).decode("ascii", "replace").strip()
        finally:
            os.close(handle)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refused(f"cannot be read ({error.strerror})", _ELSEWHERE) from None
    if not token or not token.isascii() or not token.isprintable():
        raise _refused("holds no token", "delete it, and loomserve serve makes a new one")
    return token


def _check(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _refused("is not a file", f"delete it, or {_ELSEWHERE}")
    if status.st_uid != os.geteuid():
        raise _refused("belongs to another user", _ELSEWHERE)
    if status.st_mode & 0o077:
        raise _refused(
            f"is open to other users (mode {stat.S_IMODE(status.st_mode):04o})",
            "they may know it, so delete it, and loomserve serve makes a new one",
        )


def _make_token() -> str:
    path = token_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Another platform may start at the same time; its token is as good.
        with contextlib.suppress(FileExistsError):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(handle, "w", encoding="ascii") as file:
                file.write(f"lsk-admin-{secrets.token_urlsafe(32)}\n")
    except OSError as error:
        raise _refused(f"cannot be written ({error.strerror})", _ELSEWHERE) from None
    token = read_token()
    assert token is not None
    return token


def _refused(what: str, remedy: str) -> StartError:
    return StartError(f"the admin token {token_path()} {what}: {remedy}")
