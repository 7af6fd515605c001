"""Builds the Serve applications of a model's replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve

from loomserve.deployments.ending import EMPTY_LOOK_S, HEALTH_CHECKS
from loomserve.deployments.engine.engine_replica import EngineReplica
from loomserve.deployments.serve_logging import serve_logging
from loomserve.platform.adapters.table import ROOM
from loomserve.platform.config import LOCAL_PROMPT_TOKENS, Adapters, Model, Simulated
from loomserve.platform.devices.gpus import FREE_AT_START
from loomserve.platform.devices.precision import cpu_dtype
from loomserve.platform.engine.options.names import of_engine
from loomserve.platform.engine.process.environment import KEEPS_GPUS_VISIBLE, VLLM_ENVIRONMENT
from loomserve.platform.fleet.messages import (
    ENGINE_DEPLOYMENT,
    EngineSpec,
    FrontEndSpec,
    replica_app,
)
from loomserve.platform.models.policy.parsers import options_of
from loomserve.platform.nodes.resources import on_devices
from loomserve.platform.scheduling.options import ADDITIONAL_CONFIG
from loomserve.platform.simulated.options import SIMULATED_CONFIG
from loomserve.platform.state.lending_options import LENDING_CONFIG

# vLLM takes an empty list for all hosts; no host's name has a space.
_NO_HOST = "no host"


def front_end_of(spec: EngineSpec) -> FrontEndSpec:
    """What gateways answer requests of the model with."""
    roles = spec.model.roles
    return FrontEndSpec(
        path=spec.path,
        engine_options=_engine_options(spec),
        parsers=spec.parsers,
        local_prompt_tokens=roles.local_prompt_tokens if roles else LOCAL_PROMPT_TOKENS,
    )


def build_replica_app(spec: EngineSpec, device: str) -> Any:
    """The application of one replica: an engine on a device, or a pipeline over all of them."""
    front_end = front_end_of(spec)
    engine_options = front_end.engine_options
    if not spec.stage_layers:
        own = tuple(each for each in spec.devices if each.name == device)
        spec = spec.model_copy(update={"devices": own})
    deployment = serve.deployment(
        EngineReplica,
        **_serve_options(spec),
        ray_actor_options={
            "num_cpus": 0,
            "resources": on_devices(spec.devices),
            **_runtime_env(spec),
        },
    )
    return deployment.bind(
        spec.model_dump(mode="json"),
        of_engine(engine_options),
        _environment(spec, engine_options),
        front_end.model_dump(mode="json"),
    )


def _serve_options(spec: EngineSpec) -> dict[str, Any]:
    return {
        "name": ENGINE_DEPLOYMENT,
        "num_replicas": 1,
        # Requests do not pass through Serve; the gateway keeps the limit.
        "max_ongoing_requests": 1_000_000,
        **HEALTH_CHECKS,
        "graceful_shutdown_timeout_s": spec.drain_timeout_s + 15,
        "graceful_shutdown_wait_loop_s": EMPTY_LOOK_S,
        "logging_config": serve_logging(spec.log_format),
    }


def run_replicas(spec: EngineSpec, apps: Mapping[str, Any]) -> None:
    """Hand applications to Serve, by device, and return at once."""
    name = spec.model.name
    serve.run_many(
        [
            serve.RunTarget(app, name=replica_app(name, device), route_prefix=None)
            for device, app in apps.items()
        ],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def _cpu_options() -> dict[str, str]:
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


def _lending_options() -> dict[str, Any]:
    return {
        "worker_cls": "loomserve.platform.lending.engine.cpu_worker.RemoteAttentionWorker",
        "scheduler_cls": "loomserve.platform.lending.engine.scheduler.make_scheduler",
        # A lender looks for tasks between its model's operators.
        "enforce_eager": True,
    }


def _adapter_options(adapters: Adapters) -> dict[str, Any]:
    return {
        "enable_lora": True,
        "max_loras": adapters.max_loras,
        "max_lora_rank": adapters.max_lora_rank,
        # One that is replaced is there until its requests have ended.
        "max_cpu_loras": ROOM * adapters.max_cpu_loras,
    }


def _kv_bytes_of_a_worker(spec: EngineSpec) -> int:
    """KV bytes of a stage: vLLM gives all the same, so the largest has the fewest blocks."""
    layers = spec.stage_layers or (1,)
    return spec.model.kv_cache_memory * max(layers) // sum(layers)


def _device_options(spec: EngineSpec) -> dict[str, Any]:
    if spec.model.is_simulated:
        return {}
    return {
        **(_cpu_options() if spec.devices[0].kind == "cpu" else _cuda_options(spec.model)),
        "scheduler_cls": "loomserve.platform.engine.scheduler.make_scheduler",
    }


def _engine_options(spec: EngineSpec) -> dict[str, Any]:
    simulated = spec.model.simulated or (Simulated() if spec.model.is_simulated else None)
    return {
        "kv_cache_memory_bytes": _kv_bytes_of_a_worker(spec),
        "pipeline_parallel_size": max(1, len(spec.stage_layers)),
        **_device_options(spec),
        **({"revision": spec.model.revision} if spec.model.revision else {}),
        "allowed_media_domains": [*spec.media_hosts] or [_NO_HOST],
        **spec.model.engine,
        **(options_of(spec.parsers) if spec.parsers else {}),
        **(_lending_options() if spec.lending else {}),
        **(_adapter_options(adapters) if (adapters := spec.model.adapters) else {}),
        "additional_config": {
            **spec.model.engine.get("additional_config", {}),
            ADDITIONAL_CONFIG: spec.scheduling.model_dump(),
            **({LENDING_CONFIG: spec.lending.model_dump()} if spec.lending else {}),
            **({SIMULATED_CONFIG: simulated.model_dump()} if simulated is not None else {}),
        },
        **({"kv_transfer_config": store} if (store := spec.kv_transfer_config) else {}),
    }


def _runtime_env(spec: EngineSpec) -> dict[str, Any]:
    """What Ray has to know of before it starts a replica's process; it starts others sooner."""
    if spec.devices[0].kind == "cpu":
        return {}
    return {"runtime_env": {"env_vars": KEEPS_GPUS_VISIBLE}}


def _environment(spec: EngineSpec, engine_options: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables of an engine's processes."""
    environment = dict(VLLM_ENVIRONMENT)
    if spec.devices[0].kind != "cpu":
        environment["VLLM_USE_V2_MODEL_RUNNER"] = str(spec.model.model_runner - 1)
        return environment
    # On a CPU, vLLM 0.29 cannot load what this saves ("no attribute 'finalize_loading'") and
    # compiles at each start, for 45 s; torch's own cache takes 12 s.
    environment["VLLM_USE_AOT_COMPILE"] = "0"
    if engine_options.get("enforce_eager"):
        # vLLM compiles the ranks of log probabilities all the same, with g++, within the first
        # step that asks for them: all streams stand still for ten to twenty seconds.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    return environment
