"""Builds the Serve applications of a model's replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from loomserve.deployments.engine.engine_replica import EngineReplica, engines_of
from loomserve.deployments.serve_options import serve_options, start_apps
from loomserve.platform.adapters.table import ROOM
from loomserve.platform.config import Model, Simulated
from loomserve.platform.devices.gpus import FREE_AT_START
from loomserve.platform.devices.machine import cpu_dtype
from loomserve.platform.engine.options.known import of_engine
from loomserve.platform.engine.process.environment import VLLM_ENVIRONMENT
from loomserve.platform.fleet.messages import (
    ENGINE_DEPLOYMENT,
    EngineOrder,
    EngineSpec,
    FrontEndSpec,
    replica_app,
)
from loomserve.platform.models.policy.parsers import options_of
from loomserve.platform.nodes.resources import on_devices
from loomserve.platform.scheduling.options import ADDITIONAL_CONFIG
from loomserve.platform.simulated.options import SIMULATED_CONFIG
from loomserve.platform.state.lending_options import LENDING_CONFIG

# The actor of a node's engines may be starting.
_BEGIN_TIMEOUT_S = 20.0
# vLLM takes an empty list for all hosts; no host's name has a space.
_NO_HOST = "no host"
_LENDING_OPTIONS: dict[str, Any] = {
    "scheduler_cls": "loomserve.platform.lending.engine.scheduler.make_scheduler",
    # A lender looks for tasks between its model's operators; on a GPU no graph holds a step whose
    # rows are divided each time.
    "enforce_eager": True,
}
# By the kind of device, whose worker says what carries a loan's rows.
_LENDING_ON: dict[str, dict[str, Any]] = {
    "cpu": {"worker_cls": "loomserve.platform.lending.engine.cpu_worker.RemoteAttentionWorker"},
    "cuda": {
        "worker_cls": "loomserve.platform.lending.engine.gpu_worker.RemoteAttentionGpuWorker",
        "async_scheduling": False,
        "attention_backend": "FLASH_ATTN",
    },
}


def front_end_of(spec: EngineSpec) -> FrontEndSpec:
    """What gateways build the model's front end of."""
    return FrontEndSpec(path=spec.path, engine_options=_engine_options(spec), parsers=spec.parsers)


def order_of(spec: EngineSpec, device: str) -> EngineOrder:
    """The engine of one replica: on a device, or a pipeline over all of them."""
    front_end = front_end_of(spec)
    options = front_end.engine_options
    if not spec.stage_layers:
        own = tuple(each for each in spec.devices if each.name == device)
        spec = spec.model_copy(update={"devices": own})
    return EngineOrder(
        spec=spec,
        device=device,
        options=of_engine(options),
        environment=_environment(spec, options),
        front_end=front_end,
    )


def build_replica_app(order: EngineOrder) -> Any:
    """The application of the replica that holds an engine."""
    spec = order.spec
    deployment = serve.deployment(
        EngineReplica,
        name=ENGINE_DEPLOYMENT,
        num_replicas=1,
        # Requests do not pass through Serve; the gateway keeps the limit.
        max_ongoing_requests=1_000_000,
        graceful_shutdown_timeout_s=spec.server.drain_timeout_s + 15,
        ray_actor_options={"num_cpus": 0, "resources": on_devices(spec.devices)},
        **serve_options(spec.server.log_format),
    )
    return deployment.bind(
        spec.model.name, order.device, spec.devices[0].on, order.model_dump(mode="json")
    )


def begin(orders: Iterable[EngineOrder]) -> None:
    """Have nodes begin to start engines, which replicas hold that come meanwhile."""
    for order in orders:
        began = engines_of(order.spec.devices[0].on).start.remote(order.model_dump(mode="json"))
        # Where that fails, the replica has it start.
        with contextlib.suppress(RayError, RayServeException, TimeoutError):
            began.result(timeout_s=_BEGIN_TIMEOUT_S)


def run_replicas(spec: EngineSpec, apps: Mapping[str, Any]) -> None:
    """Hand applications to Serve, by device, and return at once."""
    start_apps({replica_app(spec.model.name, device): app for device, app in apps.items()})


def _engine_options(spec: EngineSpec) -> dict[str, Any]:
    """vLLM's options of the model's engines; the configuration's own override the devices'."""
    model, layers = spec.model, spec.stage_layers or (1,)
    options: dict[str, Any] = {
        # vLLM gives all stages the same, so the largest has the fewest blocks.
        "kv_cache_memory_bytes": model.kv_cache_memory * max(layers) // sum(layers),
        "pipeline_parallel_size": max(1, len(spec.stage_layers)),
        "allowed_media_domains": [*spec.server.media_hosts] or [_NO_HOST],
    }
    if not model.is_simulated:
        options["scheduler_cls"] = "loomserve.platform.engine.scheduler.make_scheduler"
        kind = spec.devices[0].kind
        options |= _cpu_options() if kind == "cpu" else _cuda_options(model)
        if spec.lending:
            options |= _LENDING_OPTIONS | _LENDING_ON[kind]
    if model.revision:
        options["revision"] = model.revision
    options |= model.engine
    if spec.parsers:
        options |= options_of(spec.parsers)
    additional = {
        **model.engine.get("additional_config", {}),
        ADDITIONAL_CONFIG: spec.scheduling.model_dump(),
    }
    if spec.lending:
        additional[LENDING_CONFIG] = spec.lending.model_dump()
    if simulated := model.simulated or (Simulated() if model.is_simulated else None):
        additional[SIMULATED_CONFIG] = simulated.model_dump()
    if adapters := model.adapters:
        options |= {
            "enable_lora": True,
            "max_loras": adapters.max_loras,
            "max_lora_rank": adapters.max_lora_rank,
            # One that is replaced is there until its requests have ended.
            "max_cpu_loras": ROOM * adapters.max_cpu_loras,
        }
    options["additional_config"] = additional
    if spec.kv_transfer_config:
        options["kv_transfer_config"] = spec.kv_transfer_config
    return options


def _cpu_options() -> dict[str, Any]:
    return {
        "dtype": cpu_dtype(),
        "worker_cls": "loomserve.platform.engine.worker.NonSpinningWorker",
    }


def _cuda_options(model: Model) -> dict[str, Any]:
    return {
        "gpu_memory_utilization": FREE_AT_START,
        "worker_cls": "loomserve.platform.engine.resumption.gpu_worker.ResumingGpuWorker",
        # vLLM then allocates what can be given back; others need not.
        **({"enable_sleep_mode": True} if model.idle_rules is not None else {}),
    }


def _environment(spec: EngineSpec, engine_options: Mapping[str, Any]) -> dict[str, str]:
    environment = dict(VLLM_ENVIRONMENT)
    if spec.devices[0].kind != "cpu":
        # Only the first sorts rows by their lenders.
        runner = 1 if spec.lending else spec.model.model_runner
        del environment["VLLM_USE_V2_MODEL_RUNNER"]
        if runner is not None:
            environment["VLLM_USE_V2_MODEL_RUNNER"] = str(runner - 1)
        return environment
    # On a CPU, vLLM 0.29 could not load what this saves ("no attribute 'finalize_loading'") and
    # compiled at each start, for 45 s; torch's own cache takes 12 s.
    environment["VLLM_USE_AOT_COMPILE"] = "0"
    if engine_options.get("enforce_eager"):
        # vLLM compiles the ranks of log probabilities all the same, with g++, within the first
        # step that asks for them: all streams stand still for ten to twenty seconds.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    return environment
