"""The API keys as they are at present: those of the configuration and those of its keys file.

Each process that lets keys in has its own view, and looks for a new file twice a second. So keys
outlive each of these processes, and a key that is taken out of the file is refused within a
second, while the streams of others go on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from loomserve.platform.access.keys import KeyRing, is_over
from loomserve.platform.base.errors import ConfigError, Forbidden, Unavailable
from loomserve.platform.base.files import stamp
from loomserve.platform.base.periodic import every
from loomserve.platform.config import ApiKey, Server, load_keys

_log = logging.getLogger("ray.serve")

_FIELD = "server.api_keys_file"
_POLL_INTERVAL_S = 0.5
_RETRY_S = 5.0


def with_absolute_path(server: Server, base: Path) -> Server:
    """The section with the path of its keys file from anywhere; ``base`` is its folder."""
    if server.api_keys_file is None:
        return server
    path = (base / Path(server.api_keys_file).expanduser()).absolute()
    return server.model_copy(update={"api_keys_file": str(path)})


def read_keys(server: Server) -> tuple[ApiKey, ...]:
    """The keys of the configuration, then those of its keys file, whose path is absolute. Raises
    ConfigError if the file cannot be read or is wrong, others can open it, or it repeats a name or
    a hash of the configuration."""
    if server.api_keys_file is None:
        return server.api_keys
    path = Path(server.api_keys_file)
    _check_private(path)
    keys = load_keys(path)
    names = {key.name for key in server.api_keys}
    hashes = {each for key in server.api_keys for each in key.hashes}
    for key in keys:
        if key.name in names or not hashes.isdisjoint(key.hashes):
            raise ConfigError(
                f"{path}: the key {key.name!r} stands in server.api_keys too, by its name or its "
                "hash: take it out of one of them"
            )
    return (*server.api_keys, *keys)


class LiveKeys:
    """The keys at present. A file that is wrong changes nothing: the former keys hold."""

    def __init__(self, server: Server, *, clock: Callable[[], float] = time.time) -> None:
        """``clock``: Unix seconds. Of a file that is wrong from the start there are no keys."""
        self._server = server
        self._clock = clock
        self._seen = stamp(Path(server.api_keys_file)) if server.api_keys_file else None
        self.problem: str | None = None
        """Why the newest keys file is not in use; None: it is, or there is none."""
        self._use(server.api_keys)
        try:
            self._use(read_keys(server))
        except ConfigError as error:
            self._refuse(error)

    @property
    def all(self) -> tuple[ApiKey, ...]:
        return self._keys

    @property
    def ring(self) -> KeyRing:
        return self._ring

    def named(self, name: str) -> ApiKey | None:
        """Find a key, for work that is sent with its name; None: the platform needs no keys. Raises
        Forbidden if there is no such key any more, or it has expired; Unavailable if it may stand
        in the newest keys file, which cannot be used."""
        if not name and not self._server.asks_for_keys:
            return None
        key = next((key for key in self._keys if key.name == name), None)
        if key is None and self.problem is not None:
            raise Unavailable(
                "the operator's file of API keys is wrong; this waits until it is mended",
                reason="keys_file_wrong",
                retry_after_s=_RETRY_S,
            )
        if key is None:
            raise Forbidden(f"the API key {name!r} that sent this batch is no longer known here")
        if is_over(key, self._clock()):
            raise Forbidden(f"the API key {name!r} that sent this batch has expired")
        return key

    def refresh(self) -> None:
        """Take over a new keys file; a wrong one is logged, once."""
        path = self._server.api_keys_file
        if path is None or (seen := stamp(Path(path))) == self._seen:
            return
        self._seen = seen
        try:
            self._use(read_keys(self._server))
        except ConfigError as error:
            self._refuse(error)
        else:
            self.problem = None
            # Not as information, which Serve's deployments do not log.
            _log.warning("%s was read again: %d keys", path, len(self._keys))

    async def follow(self) -> NoReturn:
        # In a thread, since a file of many keys takes long to read.
        await every(_POLL_INTERVAL_S, lambda: asyncio.to_thread(self.refresh))

    def _use(self, keys: tuple[ApiKey, ...]) -> None:
        self._keys = keys
        self._ring = KeyRing(keys, required=self._server.asks_for_keys, clock=self._clock)

    def _refuse(self, error: ConfigError) -> None:
        self.problem = str(error)
        _log.error("%s; the keys stay that were known before", error)


def _check_private(path: Path) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(
            f"{_FIELD}: {path} cannot be read ({error.strerror}); loomserve key create NAME --add "
            "CONFIG makes it"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{_FIELD}: {path} is not a file")
    if status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{_FIELD}: {path} must be its user's alone (mode "
            f"{stat.S_IMODE(status.st_mode):04o}, uid {status.st_uid}), since whoever writes it "
            "lets clients in: chmod 600 it"
        )
