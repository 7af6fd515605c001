"""Puts a model's application on Serve, in a worker process of its own.

Building a model's deployment imports vLLM, which costs seconds and hundreds of megabytes; neither
the command line nor the controller should carry that for good.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from loomserve.platform.base.errors import LoomserveError


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def deploy_model(
    model: dict[str, Any],
    devices: list[dict[str, Any]],
    replicas: int,
    internal_token: str,
    drain_timeout_s: float,
    base: str,
    kv_transfer_config: dict[str, Any] | None,
    scheduling: dict[str, Any],
    lending: dict[str, Any] | None,
) -> str | None:
    """Check a model and hand it to Serve, which starts it in the background.

    Returns:
        None, or what is wrong with the model in one sentence.
    """
    from loomserve.deployments.engine.app import build_model_app, run_model
    from loomserve.platform.config import Device, Model
    from loomserve.platform.engine import options
    from loomserve.platform.fleet.messages import EngineSpec
    from loomserve.platform.models import catalog
    from loomserve.platform.placement.configured import stages_of
    from loomserve.platform.scheduling.options import SchedulerOptions
    from loomserve.platform.state.lending_options import LendingOptions

    spec_model = Model.model_validate(model)
    try:
        options.check(spec_model.name, spec_model.engine)
        path = str(catalog.resolve(spec_model.source, Path(base)))
        there = {each.name: each for each in map(Device.model_validate, devices)}
        stages = [(name, 0) for name in there]
        if spec_model.pipeline is not None:
            stages = stages_of(spec_model, Path(base))
        spec = EngineSpec(
            model=spec_model,
            devices=tuple(there[name] for name, _ in stages),
            stage_layers=tuple(layers for _, layers in stages) if spec_model.pipeline else (),
            path=path,
            internal_token=internal_token,
            drain_timeout_s=drain_timeout_s,
            kv_transfer_config=kv_transfer_config,
            scheduling=SchedulerOptions.model_validate(scheduling),
            lending=LendingOptions.model_validate(lending) if lending else None,
        )
        run_model(spec, build_model_app(spec, replicas))
    except LoomserveError as error:
        return str(error)
    return None
