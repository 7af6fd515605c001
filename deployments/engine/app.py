"""Builds the Serve applications of a model's replicas, and hands them to Serve."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from loomserve.deployments.engine.engine_replica import EngineReplica, engines_of
from loomserve.deployments.serve_options import serve_options, start_apps
from loomserve.platform.adapters.table import ROOM
from loomserve.platform.base.errors import LoomserveError
from loomserve.platform.config import Model, Simulated
from loomserve.platform.devices.gpus import FREE_AT_START
from loomserve.platform.devices.machine import cpu_dtype
from loomserve.platform.engine.options.known import of_engine
from loomserve.platform.engine.options.model_check import check_model, check_options
from loomserve.platform.engine.process.environment import VLLM_ENVIRONMENT
from loomserve.platform.fleet.messages import (
    ENGINE_DEPLOYMENT,
    EngineOrder,
    EngineSpec,
    FrontEndSpec,
    replica_app,
)
from loomserve.platform.models import catalog
from loomserve.platform.models.chat_files import choose_parsers, fetch_from_hub
from loomserve.platform.models.policy.parsers import options_of
from loomserve.platform.nodes.resources import on_devices, on_state
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


_ONE_AT_A_TIME = threading.Lock()
"""In CPython 3.11 two threads that parse Python at once may fail (``AST constructor recursion
depth``)."""
_PICKLES = threading.Lock()
"""Serve notes for the whole process what it pickles by value while it makes a deployment's
configuration, as it does for each that it has when it tells their states; a second thread that
makes one then fails with "is not registered for pickle by value"."""


@dataclass(frozen=True)
class Handed:
    """What came of handing a model to Serve.

    Attributes:
        problem: What is wrong with the model in one sentence; None: nothing.
    """

    front_end: FrontEndSpec | None = None
    problem: str | None = None


def takes_long(spec: EngineSpec) -> bool:
    """Whether weights are to be fetched or converted first, or layers to be divided. That imports
    torch, for seconds and hundreds of megabytes that the controller should not keep."""
    return spec.model.pipeline is not None or not catalog.is_here(spec.path)


def hand_to_serve(spec: EngineSpec, devices: Sequence[str], base: str) -> Handed:
    """Check a model and hand it to Serve, which starts its replicas in the background.

    Args:
        spec: its path is the model's source as configured, and a pipeline's stages are missing.
        devices: which of its devices get a replica; of a pipeline, the first stands for all.
        base: folder to which the configuration's paths are relative.
    """
    if isinstance(here := catalog.files_here(spec.path, Path(base)), str):
        fetch_from_hub(here, spec.model.revision)  # no other model waits for the hub
    try:
        with _ONE_AT_A_TIME:
            resolved = _resolved(spec, Path(base))
            orders = {device: order_of(resolved, device) for device in devices}
        begin(orders.values())
        with _ONE_AT_A_TIME, _PICKLES:
            apps = {device: build_replica_app(order) for device, order in orders.items()}
            run_replicas(resolved, apps)
    except LoomserveError as error:
        return Handed(problem=str(error))
    return Handed(front_end_of(resolved))


def applications() -> Mapping[str, Any]:
    """All of Serve's applications with their states, by name."""
    with _PICKLES:
        found: Mapping[str, Any] = serve.status().applications
    return found


hand_to_serve_elsewhere = ray.remote(num_cpus=0, max_retries=0, resources=on_state())(hand_to_serve)
"""The same in a process of its own."""


def _resolved(spec: EngineSpec, base: Path) -> EngineSpec:
    """With the folder of the weights, which are fetched if need be, the parsers of what the model
    writes, and a pipeline's stages."""
    check_options(spec.model)  # before anything is fetched
    weights = catalog.resolve(spec.path, base, revision=spec.model.revision)
    on_cpu = all(device.kind == "cpu" for device in spec.devices)
    check_model(spec.model, weights, on_cpu=on_cpu)
    parsers = choose_parsers(weights, spec.model.engine, revision=spec.model.revision)
    resolved = spec.model_copy(update={"path": str(weights), "parsers": parsers})
    if spec.model.pipeline is None:
        return resolved
    from loomserve.platform.placement.configured import stages_of  # it imports torch

    stages = stages_of(spec.model, base)
    there = {device.name: device for device in spec.devices}
    return resolved.model_copy(
        update={
            "devices": tuple(there[name] for name, _ in stages),
            "stage_layers": tuple(layers for _, layers in stages),
        }
    )
