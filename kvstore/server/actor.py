"""Ray actor of the store: Ray restarts it when it dies, and the arena outlives it."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

from loomserve.kvstore.peers.messages import Member
from loomserve.kvstore.peers.network import PeerNetwork
from loomserve.kvstore.server.client import StoreAwayError, StoreClient
from loomserve.kvstore.server.opening import start_server
from loomserve.kvstore.server.options import StoreOptions, StorePlan
from loomserve.kvstore.server.protocol import Request
from loomserve.kvstore.server.server import StoreServer
from loomserve.platform.base.descriptors import raise_limit
from loomserve.platform.base.errors import StartError
from loomserve.platform.base.sqlite import LatestGeneration

ACTOR_NAME = "loomserve-kvstore"
_WATCH_S = 1.0
_ANSWER_TIMEOUT_MS = 1000
_RETRY_S = 5.0
"""Seconds between attempts of a store that cannot start."""


class StoreActor:
    """Runs the store's server, and leaves its process with it, so that Ray restarts it."""

    def __init__(self, options: dict[str, Any], token: str = "") -> None:
        """``token`` is what the stores of the run know, where there are several."""
        raise_limit()  # each segment on SSD takes a descriptor
        self._options = StoreOptions.model_validate(options)
        self._server: StoreServer | None = None
        self._network: PeerNetwork | None = None
        self._problem: str | None = None
        self._controllers = LatestGeneration()
        self._stopping = False
        try:
            _make_private(self._options.folder)
            self._server, self._network = start_server(self._options, token)
        except StartError as error:
            self._problem = str(error)
        threading.Thread(target=self._leave_without_server, daemon=True).start()

    def problem(self) -> str | None:
        """Why the store could not start; None: it did. It returns this, as Ray wraps exceptions."""
        return self._problem

    def member(self) -> Member | None:
        """How other nodes' stores know this one; None: there are no others, or it did not start."""
        return self._network.member if self._network is not None else None

    def set_members(self, members: list[Member], generation: int) -> None:
        """Take over which stores there are, this one or not, unless a later controller has."""
        if self._network is not None and self._controllers.admits(generation):
            self._network.set_members(members)

    def stop(self) -> None:
        """End the store and free its memory; blocks on SSD stay."""
        self._stopping = True
        if self._server is None:
            return
        self._server.stop()
        options = self._options
        spaces = [options.spaces] if options.ssd_folder is None else []
        for left in (options.arena, options.socket, *spaces):
            left.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others may have put files there
            options.folder.rmdir()

    def _leave_without_server(self) -> None:
        while self._server is not None and self._server.alive:
            time.sleep(_WATCH_S)
        if self._problem is not None:
            # The starter must be able to ask for the problem first.
            time.sleep(_RETRY_S)
        if not self._stopping:
            os._exit(1)


class NodeStoreActor(StoreActor):
    """The store of one of several nodes, which makes its options there."""

    def __init__(self, plan: dict[str, Any], node: str, host: str, token: str) -> None:
        """``node`` and ``host`` are the node's name and its address for the others."""
        options = StorePlan.model_validate(plan).here(node, host)
        super().__init__(options.model_dump(mode="json"), token)
        self._node = node
        self._client = StoreClient(options.address, _ANSWER_TIMEOUT_MS)

    def ask(self, request: Request) -> tuple[str, Any] | None:
        """The node's name and its store's answer, for who is elsewhere; None: it is away."""
        try:
            return self._node, self._client.ask(request, object)
        except StoreAwayError:
            return None


def _make_private(folder: Path) -> None:
    """Create the folder, or check that only this user can enter: blocks are users' prompts."""
    for one in (folder.parent, folder):
        one.mkdir(mode=0o700, exist_ok=True)
        status = one.lstat()
        if (status.st_uid, stat.filemode(status.st_mode)) != (os.getuid(), "drwx------"):
            raise StartError(f"{one} must be a folder of nobody but you: remove it")
