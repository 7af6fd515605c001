"""Serve applications that KubeRay starts: a ``serveConfigV2`` names these builders.

Serve calls each in a task of its own, on any node, with the arguments that the chart gives:
``config``, the configuration's path in the pods; ``digest``, of the text that it must have; and
``node`` of a gateway that is not the head's. What they do not agree on by themselves, such as the
token that processes ask each other for, comes from the pods' environment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException

from loomserve.deployments.batch.standby import StandbyBatchLane
from loomserve.deployments.controller.pod_controller import PodController
from loomserve.deployments.gateway_apps import build_gateway_app
from loomserve.deployments.kvstore.kv_store import store_plan
from loomserve.deployments.ray_node import keep_calls_on_node
from loomserve.deployments.serve_options import single
from loomserve.platform.access.keys import with_given_hashes
from loomserve.platform.base.errors import StartError
from loomserve.platform.base.reply import Reply
from loomserve.platform.batch.folder import batch_folder
from loomserve.platform.config import Config
from loomserve.platform.config.loader import parse
from loomserve.platform.fleet.messages import (
    BATCH_DEPLOYMENT,
    CONTROLLER_APP,
    CONTROLLER_DEPLOYMENT,
    READY_DEPLOYMENT,
)
from loomserve.platform.http.audit_log import audit_log_path
from loomserve.platform.kubernetes.pods import internal_token, read_config
from loomserve.platform.run.ending import in_a_paragraph
from loomserve.platform.state import ModelState, ModelStatus, PlatformState

_LOOK_S = 0.5
_TELL_S = 60.0
_ANSWER_S = 10.0
# Whoever asks for a model that sleeps or is not loaded has it come.
_ANSWERING = frozenset(
    {ModelStatus.READY, ModelStatus.DEGRADED, ModelStatus.ASLEEP, ModelStatus.UNLOADED}
)


class Ready:
    """Serve deployment whose start lasts until the configured models answer."""

    async def __init__(self, models: Collection[str]) -> None:  # type: ignore[misc]  # Serve awaits it
        """``models`` are the names of the configured ones."""
        keep_calls_on_node()
        controller = serve.get_deployment_handle(CONTROLLER_DEPLOYMENT, CONTROLLER_APP)
        told_at = time.monotonic()
        while True:
            waits = "for the controller"
            try:
                async with asyncio.timeout(_ANSWER_S):
                    reply: Reply[PlatformState] = await controller.state.remote()
                waits = waiting_for(models, reply.get().models)
            except TimeoutError:
                pass  # it is busy, as when engines start
            if not waits:
                return
            if time.monotonic() - told_at > _TELL_S:
                told_at = time.monotonic()
                _log.warning("no traffic yet: waiting %s", waits)
            await asyncio.sleep(_LOOK_S)


def waiting_for(names: Collection[str], models: Collection[ModelState]) -> str:
    """What traffic waits for, for the end of a sentence; empty: for nothing. A configured model
    that is not among those that there are was unloaded by an operator."""
    late = [
        f"{model.name} ({model.status}{f': {model.message}' if model.message else ''})"
        for model in models
        if model.name in names and model.status not in _ANSWERING
    ]
    return f"for {', '.join(late)}" if late else ""


_log = logging.getLogger("ray.serve")

# Kubernetes brings a changed Secret to its pods within a minute or so.
_CONFIG_TIMEOUT_S = 180.0

Builder = Callable[[dict[str, str]], Any]


def _told_in_a_paragraph(build: Builder) -> Builder:
    """A builder whose errors are the application's message as they are. Serve puts the traceback of
    any other exception than its own there, after four attempts."""

    @wraps(build)
    def built(args: dict[str, str]) -> Any:
        try:
            return build(args)
        except Exception as error:
            _log.error("an application cannot be built", exc_info=error)
            told = in_a_paragraph(error, "Serve's log in the head's pod shows where")
            raise RayServeException(told) from None

    return built


@_told_in_a_paragraph
def controller(args: dict[str, str]) -> Any:
    """The controller, which waits for the nodes and checks them before it runs."""
    config, base = _given(args)
    return single(PodController, CONTROLLER_DEPLOYMENT, config).bind(
        config.model_dump(mode="json"), internal_token(), str(base)
    )


@_told_in_a_paragraph
def gateway(args: dict[str, str]) -> Any:
    """The gateways of a node; without one, those of the head."""
    config, base = _given(args)
    plan = store_plan(config, base)
    store = plan.here() if plan is not None else None
    return build_gateway_app(config, internal_token(), store, args.get("node"))


@_told_in_a_paragraph
def batch(args: dict[str, str]) -> Any:
    """The batch lane, which runs before it has its folder."""
    config, base = _given(args)
    folder = batch_folder(config, base)
    if config.batch is None or folder is None:
        raise StartError("the configuration has no section batch")
    return single(StandbyBatchLane, BATCH_DEPLOYMENT, config).bind(
        config.batch.model_dump(mode="json"),
        [],
        str(folder),
        config.server.model_dump(mode="json"),
        internal_token(),
    )


@_told_in_a_paragraph
def ready(args: dict[str, str]) -> Any:
    """Runs once the configured models answer, and holds traffic back until then."""
    config, _ = _given(args)
    return single(Ready, READY_DEPLOYMENT, config).bind([model.name for model in config.models])


def _given(args: Mapping[str, str]) -> tuple[Config, Path]:
    """The configuration and the folder of its paths; StartError: the pods have another one."""
    path = Path(args["config"])
    config = with_given_hashes(
        parse(read_config(path, args["digest"], _CONFIG_TIMEOUT_S), str(path))
    )
    audit_log = str(audit_log_path(config.server, path.parent))
    server = config.server.model_copy(update={"audit_log": audit_log})
    return config.model_copy(update={"server": server}), path.parent
