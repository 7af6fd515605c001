"""Times the parts of a pipeline's stage in an engine: layers, ends, and the rest."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.model_executor.models.utils import PPMissingLayer

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import Device
from loomserve.platform.engine.profiling.step_timing import ProfiledEngine
from loomserve.platform.engine.worker import NonSpinningWorker
from loomserve.platform.placement.policy.device_times import StageTimes

_PROMPT, _OUTPUTS, _WARM_UP = 64, 24, 4


class StageStep(NamedTuple):
    """Times of a worker's step, in seconds. ``inputs_s`` includes waiting for the stage before."""

    tokens: int
    requests: int
    inputs_s: float
    embedding_s: float
    layers_s: float
    end_s: float
    """Time of last norm, output head and sampling."""


class StageTimingWorker(NonSpinningWorker):
    """CPU worker of vLLM that times its model's parts; the model must not be compiled."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.stage_steps: list[StageStep] = []
        self._at: dict[str, float] = {}
        model = self.model_runner.model
        layers = _layers(model)
        self.layer_count = len(layers)
        self._mark(model.register_forward_pre_hook, "begin")
        self._mark(layers[0].register_forward_pre_hook, "layers")
        self._mark(layers[-1].register_forward_hook, "end")

    def _mark(self, register: Any, name: str) -> None:
        def mark(*_: Any) -> None:
            self._at[name] = time.perf_counter()

        register(mark)

    def execute_model(self, scheduler_output: Any) -> Any:
        self._called = time.perf_counter()
        self._scheduled = scheduler_output
        output = super().execute_model(scheduler_output)
        self._executed = time.perf_counter()
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        called = time.perf_counter()
        output = super().sample_tokens(*args, **kwargs)
        at, scheduled = self._at, self._scheduled
        if scheduled.total_num_scheduled_tokens:
            self.stage_steps.append(
                StageStep(
                    tokens=scheduled.total_num_scheduled_tokens,
                    requests=len(scheduled.num_scheduled_tokens),
                    inputs_s=at["begin"] - self._called,
                    embedding_s=at["layers"] - at["begin"],
                    layers_s=at["end"] - at["layers"],
                    end_s=self._executed - at["end"] + time.perf_counter() - called,
                )
            )
        return output

    def take_stage_steps(self) -> tuple[int, list[tuple[float, ...]]]:
        """Number of the worker's layers, and its steps since the last call."""
        steps, self.stage_steps = self.stage_steps, []
        return self.layer_count, [tuple(step) for step in steps]


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    lists = (each for each in model.modules() if isinstance(each, torch.nn.ModuleList))
    longest = max(lists, key=len, default=torch.nn.ModuleList())
    here = [layer for layer in longest if not isinstance(layer, PPMissingLayer)]
    if not here:
        raise StartError("the model has no list of layers that could be timed")
    return here


def time_stages(
    model: str, device: Device, batches: Sequence[int], **options: Any
) -> list[StageTimes]:
    """Median times of decode steps of these batches, in an engine on a CPU device."""
    engine = ProfiledEngine(
        model,
        device,
        worker_cls=f"{__name__}.{StageTimingWorker.__name__}",
        **{
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": max(batches),
            "kv_cache_memory_bytes": 256 * 2**20,
            "block_size": 32,
            **options,
        },
    )
    try:
        return [_time_batch(engine, batch) for batch in sorted(batches)]
    finally:
        engine.close()


def _time_batch(engine: ProfiledEngine, batch: int) -> StageTimes:
    random = np.random.default_rng(batch)
    vocabulary = engine.config.model_config.get_vocab_size()
    for _ in range(batch):
        engine.add(random.integers(vocabulary, size=_PROMPT).tolist(), _OUTPUTS)
    for _ in engine.steps():
        pass
    ((layers, steps),) = engine.core.model_executor.collective_rpc("take_stage_steps")
    of: dict[str, list[float]] = defaultdict(list)
    decodes = [s for s in map(StageStep._make, steps) if s.tokens == s.requests == batch]
    for step in decodes[_WARM_UP:]:
        for name, value in step._asdict().items():
            of[name].append(value)
    return StageTimes(
        batch=batch,
        layer_s=statistics.median(of["layers_s"]) / layers,
        stage_s=statistics.median(of["inputs_s"]),
        first_s=statistics.median(of["embedding_s"]),
        last_s=statistics.median(of["end_s"]),
    )
