"""Starts the Serve applications: controller, gateway and batch lane, then the models."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatus

from loomserve.deployments.batch.lane import BatchLaneDeployment
from loomserve.deployments.controller.controller import Controller
from loomserve.deployments.engine.node_engines import build_engines_app
from loomserve.deployments.gateway_apps import build_gateway_app
from loomserve.deployments.ray_node import session_folder
from loomserve.deployments.serve_options import single, start_apps
from loomserve.kvstore.server.options import StoreOptions
from loomserve.platform.base.errors import StartError
from loomserve.platform.batch.folder import batch_folder
from loomserve.platform.config import Config
from loomserve.platform.fleet.messages import (
    BATCH_APP,
    BATCH_DEPLOYMENT,
    CONTROLLER_APP,
    CONTROLLER_DEPLOYMENT,
    GATEWAY_APP,
    OfflineSpec,
    engines_app,
)
from loomserve.platform.models import catalog
from loomserve.platform.nodes.resources import on_devices

_POLL_S = 0.2
_FAILED = frozenset({DeploymentStatus.UNHEALTHY, DeploymentStatus.DEPLOY_FAILED})


def run_platform(
    config: Config,
    replicas: dict[str, int],
    internal_token: str,
    base: str,
    store: StoreOptions | None,
    placed: dict[str, str],
) -> DeploymentHandle:
    """Hand all applications to Serve and return the controller's handle, once they run.

    Engines start meanwhile, and in a cluster the gateways of other nodes later. ``placed`` are the
    models that the platform has placed, with the reason. Raises StartError if one of them does not
    start.
    """
    apps = {
        **{
            engines_app(node): build_engines_app(node, config.server)
            for node in {each.on for each in config.devices if config.cluster is None}
        },
        CONTROLLER_APP: single(Controller, CONTROLLER_DEPLOYMENT, config).bind(
            config.model_dump(mode="json"),
            replicas,
            internal_token,
            base,
            store.model_dump(mode="json") if store else None,
            placed,
        ),
        GATEWAY_APP: build_gateway_app(config, internal_token, store, None),
    }
    if config.batch is not None:
        apps[BATCH_APP] = _batch_app(config, internal_token, base)
    start_apps(apps)
    _await_running([CONTROLLER_APP])
    controller = serve.get_deployment_handle(CONTROLLER_DEPLOYMENT, CONTROLLER_APP)
    # Gateways and engines then start side by side.
    controller.load_configured.remote().result(timeout_s=60)
    _await_running(apps)
    return controller


def _await_running(names: Collection[str]) -> None:
    """Raises StartError if an application does not start."""
    while True:
        found = serve.status().applications
        for name in names:
            if found[name].status is ApplicationStatus.DEPLOY_FAILED:
                raise StartError(f"{name} does not start: {why_failed(found[name])}")
        if all(found[name].status is ApplicationStatus.RUNNING for name in names):
            return
        time.sleep(_POLL_S)


def why_failed(app: ApplicationStatusOverview) -> str:
    """Why an application's deployment failed, in a line, and where all is that is known of it."""
    logs = session_folder() / "logs" / "serve"
    for deployment in app.deployments.values():
        if deployment.status in _FAILED and (lines := deployment.message.strip().splitlines()):
            # First it says how often it was tried, then the traceback, and at last the error.
            return f"{lines[-1].strip()} (more in {logs})"
    return f"{app.message} (more in {logs})"


def _batch_app(config: Config, internal_token: str, base: str) -> Any:
    assert config.batch is not None
    deployment = single(BatchLaneDeployment, BATCH_DEPLOYMENT, config)
    offline = [
        OfflineSpec(
            model=model,
            source=str(
                catalog.resolve(model.source, Path(base), _quietly, revision=model.revision)
            ),
            cores=config.device(model.device).cores,
            resources=on_devices([config.device(model.device)]),
        )
        for model in config.batch.offline_models
    ]
    return deployment.bind(
        config.batch.model_dump(mode="json"),
        [spec.model_dump(mode="json") for spec in offline],
        str(batch_folder(config, Path(base))),
        config.server.model_dump(mode="json"),
        internal_token,
    )


def _quietly(line: str) -> None:
    """The command has said it."""
