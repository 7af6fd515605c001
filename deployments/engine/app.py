"""Builds the Serve application of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.llm import LLMConfig, build_llm_deployment

from loomserve.deployments.engine.engine_replica import EngineReplica
from loomserve.deployments.engine.environment import VLLM_ENVIRONMENT
from loomserve.deployments.engine.server import EngineServer
from loomserve.deployments.serve_logging import QUIET
from loomserve.platform.config import LOCAL_PROMPT_TOKENS
from loomserve.platform.engine.options import of_engine
from loomserve.platform.engine.precision import cpu_dtype
from loomserve.platform.fleet.messages import (
    ENGINE_DEPLOYMENT,
    EngineSpec,
    FrontEndSpec,
    model_app,
)
from loomserve.platform.scheduling.options import ADDITIONAL_CONFIG
from loomserve.platform.state.lending_options import LENDING_CONFIG
from loomserve.routers.serve.choice import request_router_config

# vLLM takes an empty list for all hosts; no host's name has a space.
_NO_HOST = "no host"


def build_model_app(spec: EngineSpec, replicas: int) -> Any:
    """The application of one model: ``replicas`` engines, each on a device of its own."""
    return build_llm_deployment(
        _llm_config(spec),
        bind_kwargs={"spec": spec.model_dump(mode="json")},
        deployment_cls=EngineServer,
        override_serve_options=_serve_options(spec, replicas),
    )


def build_engine_app(spec: EngineSpec, replicas: int) -> Any:
    """The same with engines whose front ends are in the gateways."""
    engine_options = _engine_options(spec)
    roles = spec.model.roles
    front_end = FrontEndSpec(
        path=spec.path,
        engine_options=engine_options,
        local_prompt_tokens=roles.local_prompt_tokens if roles else LOCAL_PROMPT_TOKENS,
    )
    deployment = serve.deployment(
        EngineReplica,
        **_serve_options(spec, replicas),
        ray_actor_options={
            "num_cpus": 0,
            "runtime_env": {"env_vars": _environment(spec, engine_options)},
        },
    )
    return deployment.bind(
        spec.model_dump(mode="json"),
        of_engine(engine_options),
        front_end.model_dump(mode="json"),
    )


def _serve_options(spec: EngineSpec, replicas: int) -> dict[str, Any]:
    return {
        "name": ENGINE_DEPLOYMENT,
        "num_replicas": replicas,
        # Requests do not pass through Serve; the gateway keeps the limit.
        "max_ongoing_requests": 1_000_000,
        "health_check_period_s": 2,
        "health_check_timeout_s": 15,
        "graceful_shutdown_timeout_s": spec.drain_timeout_s + 15,
        "request_router_config": RequestRouterConfig(
            **request_router_config(spec.model.router, spec.model.name)
        ),
        "logging_config": QUIET,
    }


def run_model(spec: EngineSpec, app: Any) -> None:
    """Hand the application to Serve and return at once."""
    serve.run_many(
        [
            serve.RunTarget(
                app,
                name=model_app(spec.model.name),
                route_prefix=None,
                external_scaler_enabled=True,
            )
        ],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def _cpu_options() -> dict[str, str]:
    return {
        "dtype": cpu_dtype(),
        "worker_cls": "loomserve.platform.engine.worker.NonSpinningWorker",
    }


def _lending_options() -> dict[str, Any]:
    return {
        "worker_cls": "loomserve.platform.lending.engine.worker.RemoteAttentionWorker",
        "scheduler_cls": "loomserve.platform.lending.engine.scheduler.make_scheduler",
        # A lender looks for tasks between its model's operators.
        "enforce_eager": True,
    }


def _kv_bytes_of_a_worker(spec: EngineSpec) -> int:
    """KV bytes of a stage: vLLM gives all the same, so the largest has the fewest blocks."""
    layers = spec.stage_layers or (1,)
    return spec.model.kv_cache_memory * max(layers) // sum(layers)


def _engine_options(spec: EngineSpec) -> dict[str, Any]:
    return {
        "kv_cache_memory_bytes": _kv_bytes_of_a_worker(spec),
        "pipeline_parallel_size": max(1, len(spec.stage_layers)),
        **(_cpu_options() if spec.devices[0].kind == "cpu" else {}),
        "scheduler_cls": "loomserve.platform.engine.scheduler.make_scheduler",
        **({"revision": spec.model.revision} if spec.model.revision else {}),
        "allowed_media_domains": [*spec.media_hosts] or [_NO_HOST],
        **spec.model.engine,
        **(_lending_options() if spec.lending else {}),
        "additional_config": {
            **spec.model.engine.get("additional_config", {}),
            ADDITIONAL_CONFIG: spec.scheduling.model_dump(),
            **({LENDING_CONFIG: spec.lending.model_dump()} if spec.lending else {}),
        },
        **({"kv_transfer_config": store} if (store := spec.kv_transfer_config) else {}),
    }


def _environment(spec: EngineSpec, engine_options: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables of an engine's processes."""
    environment = dict(VLLM_ENVIRONMENT)
    if spec.devices[0].kind == "cpu" and engine_options.get("enforce_eager"):
        # vLLM compiles the ranks of log probabilities all the same, with g++, within the first
        # step that asks for them: all streams stand still for ten to twenty seconds.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    return environment


def _llm_config(spec: EngineSpec) -> LLMConfig:
    engine_options = _engine_options(spec)
    return LLMConfig(
        model_loading_config={"model_id": spec.model.name, "model_source": spec.path},
        # "cpu" means here: no GPU resources of Ray's, vLLM's own process executor. The replica
        # binds the engine to its device itself, so that several models can share one.
        accelerator_config={"kind": "cpu"},
        engine_kwargs=engine_options,
        log_engine_metrics=False,
        # The catalog has put local models in place, and vLLM fetches hub models itself; Ray's own
        # step would start one more process that imports vLLM, for nothing.
        callback_config={"callback_class": "loomserve.deployments.engine.ray_engine.NoNodeInit"},
        runtime_env={"env_vars": _environment(spec, engine_options)},
    )
