"""Serve applications that KubeRay starts: a ``serveConfigV2`` names these builders.

Serve calls each in a task of its own, on any node, with the arguments that the chart gives:
``config``, the configuration's path in the pods; ``digest``, of the text that it must have; and
``node`` of a gateway that is not the head's. What they do not agree on by themselves, such as the
token that processes ask each other for, comes from the pods' environment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from ray.serve.exceptions import RayServeException

from loomserve.deployments.batch.standby import StandbyBatchLane
from loomserve.deployments.controller.pod_controller import PodController
from loomserve.deployments.gateway_apps import build_gateway_app
from loomserve.deployments.kvstore.kv_store import store_plan
from loomserve.deployments.readiness import Ready
from loomserve.deployments.serve_options import single
from loomserve.platform.access.keys import with_given_hashes
from loomserve.platform.base.errors import StartError
from loomserve.platform.batch.folder import batch_folder
from loomserve.platform.config import Config
from loomserve.platform.config.loader import parse
from loomserve.platform.fleet.messages import (
    BATCH_DEPLOYMENT,
    CONTROLLER_DEPLOYMENT,
    READY_DEPLOYMENT,
)
from loomserve.platform.http.audit_log import audit_log_path
from loomserve.platform.kubernetes.pods import internal_token, read_config
from loomserve.platform.run.ending import in_a_paragraph

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
