"""The controller of a cluster that KubeRay has started, where no command stands ahead of it."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from loomserve.deployments.controller.controller import Controller
from loomserve.deployments.kvstore.kv_store import store_plan
from loomserve.deployments.kvstore.node_stores import start_node_stores
from loomserve.deployments.planning import plan
from loomserve.deployments.ray_node import living_nodes, wishes_folder
from loomserve.platform.base.errors import LoomserveError
from loomserve.platform.base.files import replace_private
from loomserve.platform.base.reply import Reply
from loomserve.platform.config import Config, Model
from loomserve.platform.fleet.wishes import has_wishes

_log = logging.getLogger("ray.serve")

_LOOK_S = 1.0
_TELL_S = 60.0
_MODELS = TypeAdapter(list[Model])


class PodController(Controller):
    """Does first what ``loomserve serve`` does: waits for nodes, checks them, plans replicas.

    What is wrong is raised, and shown by ``kubectl describe rayservice``. One that is started anew
    goes on with what there is; with another configuration it loads models that are new in it, and
    unloads those that are gone.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: dict[str, Any], internal_token: str, base: str
    ) -> None:
        """Raises LoomserveError if a node cannot do what the configuration asks of it."""
        checked = Config.model_validate(config)
        kept = store_plan(checked, Path(base))
        first = not await asyncio.to_thread(has_wishes, wishes_folder(), internal_token)
        replicas: dict[str, int] = {}
        if first:
            await asyncio.to_thread(await_nodes, checked.nodes)
            with _told_without_traceback():
                replicas = await asyncio.to_thread(plan, checked, Path(base), _log.warning)
                if kept is not None:
                    stores = kept.model_copy(update={"nodes": checked.nodes})
                    await asyncio.to_thread(start_node_stores, stores, internal_token)
        await super().__init__(
            config,
            replicas,
            internal_token,
            base,
            kept.here().model_dump(mode="json") if kept is not None else None,
            stores_on=checked.nodes,
        )
        configured = ConfiguredModels(wishes_folder() / "configured.json")
        if first:
            await self.load_configured()
        else:
            await self._follow(checked, configured.read())
        configured.write(checked.models)

    async def _follow(self, config: Config, before: Mapping[str, Model]) -> None:
        """Load and unload what the configuration has gained and lost since it was ``before``."""
        there, now = {model.name for model in self._fleet.registry.models}, set[str]()
        for model in config.models:
            now.add(model.name)
            if model.name in before and model != before[model.name]:
                _log.warning(
                    "%s goes on as it was: unload it, and load it as the configuration has it now",
                    model.name,
                )
            elif before and model.name not in before and model.name not in there:
                _tell_refusal(model.name, await self.load(model))
        for name in before.keys() - now & there:
            _tell_refusal(name, await self.unload(name, None))


class ConfiguredModels:
    """The models of the configuration with which a controller started last, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, Model]:
        """By name; empty: it is not known."""
        try:
            return {each.name: each for each in _MODELS.validate_json(self._path.read_bytes())}
        except (OSError, ValueError):
            return {}

    def write(self, models: Collection[Model]) -> None:
        replace_private(self._path, _MODELS.dump_json(list(models)).decode())


@contextmanager
def _told_without_traceback() -> Iterator[None]:
    """Have Serve's message be what is wrong, and its log say where that was found. Serve makes the
    message of the traceback with which a replica's start fails, and ends its process. Python leaves
    frames out of those that are made from here on."""
    try:
        yield
    except LoomserveError:
        _log.exception("the controller cannot start")
        sys.tracebacklimit = 0
        raise


def _tell_refusal(name: str, reply: Reply[Any]) -> None:
    if reply.error is not None:
        _log.warning("%s is not as the configuration has it: %s", name, reply.error)


def await_nodes(names: tuple[str, ...]) -> None:
    """Wait until these nodes are up, however long Kubernetes takes."""
    told_at = 0.0
    while missing := [name for name in names if name not in living_nodes()]:
        if time.monotonic() - told_at > _TELL_S:
            told_at = time.monotonic()
            _log.warning("waiting for nodes: %s", ", ".join(missing))
        time.sleep(_LOOK_S)
