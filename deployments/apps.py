"""Starts the Serve applications: controller, gateway and batch lane, then the models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from loomserve.deployments.batch.lane import BatchLaneDeployment
from loomserve.deployments.controller.controller import Controller
from loomserve.deployments.engine.environment import GATEWAY_ENVIRONMENT
from loomserve.deployments.gateway.gateway import Gateway
from loomserve.deployments.serve_logging import QUIET
from loomserve.kvstore.server.options import StoreOptions
from loomserve.platform.batch.folder import batch_folder
from loomserve.platform.config import Config
from loomserve.platform.fleet.messages import (
    BATCH_APP,
    BATCH_DEPLOYMENT,
    CONTROLLER_APP,
    CONTROLLER_DEPLOYMENT,
    GATEWAY_APP,
    GATEWAY_DEPLOYMENT,
    KvAccess,
    OfflineSpec,
)
from loomserve.platform.models import catalog
from loomserve.platform.nodes.resources import on_devices, on_state


def run_platform(
    config: Config,
    replicas: dict[str, int],
    internal_token: str,
    base: str,
    store: StoreOptions | None,
) -> DeploymentHandle:
    """Hand all applications to Serve and return the controller's handle; engines start later."""
    targets = [
        (CONTROLLER_APP, _controller_app(config, replicas, internal_token, base, store)),
        (GATEWAY_APP, _gateway_app(config, internal_token, store)),
    ]
    if config.batch is not None:
        targets.append((BATCH_APP, _batch_app(config, internal_token, base)))
    serve.run_many(
        [
            serve.RunTarget(
                app,
                name=name,
                route_prefix=None,
                # The controller sets the number of gateways, as nodes come and go.
                external_scaler_enabled=(config.has_gateways_on_each_node and name == GATEWAY_APP),
            )
            for name, app in targets
        ],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=True,
    )
    controller = serve.get_deployment_handle(CONTROLLER_DEPLOYMENT, CONTROLLER_APP)
    controller.load_configured.remote().result(timeout_s=60)
    return controller


def _controller_app(
    config: Config,
    replicas: dict[str, int],
    internal_token: str,
    base: str,
    store: StoreOptions | None,
) -> Any:
    deployment = serve.deployment(
        Controller,
        name=CONTROLLER_DEPLOYMENT,
        num_replicas=1,
        max_ongoing_requests=1000,
        health_check_period_s=2,
        ray_actor_options={"num_cpus": 0, "resources": on_state()},
        logging_config=QUIET,
    )
    return deployment.bind(
        config.model_dump(mode="json"),
        replicas,
        internal_token,
        base,
        store.model_dump(mode="json") if store else None,
    )


def _gateway_app(config: Config, internal_token: str, store: StoreOptions | None) -> Any:
    deployment = serve.deployment(
        Gateway,
        name=GATEWAY_DEPLOYMENT,
        # Those of one node; the controller starts the others', where there are to be some.
        num_replicas=config.server.front_ends,
        max_replicas_per_node=(
            config.server.front_ends if config.has_gateways_on_each_node else None
        ),
        # Requests do not pass through Serve; of batches the lane sends only so many lines.
        max_ongoing_requests=1_000_000,
        health_check_period_s=2,
        graceful_shutdown_timeout_s=config.server.drain_timeout_s + 15,
        ray_actor_options={
            "num_cpus": 0,
            "resources": {} if config.has_gateways_on_each_node else on_state(),
            "runtime_env": {"env_vars": GATEWAY_ENVIRONMENT},
        },
        logging_config=QUIET,
    )
    access = KvAccess(address=store.address) if store else None
    return deployment.bind(
        config.server.model_dump(mode="json"),
        internal_token,
        access.model_dump(mode="json") if access else None,
        config.isolates_tenants,
        config.batch.model_dump(mode="json") if config.batch else None,
        config.has_gateways_on_each_node,
    )


def _batch_app(config: Config, internal_token: str, base: str) -> Any:
    assert config.batch is not None
    deployment = serve.deployment(
        BatchLaneDeployment,
        name=BATCH_DEPLOYMENT,
        num_replicas=1,
        max_ongoing_requests=1000,
        health_check_period_s=2,
        ray_actor_options={"num_cpus": 0, "resources": on_state()},
        logging_config=QUIET,
    )
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
