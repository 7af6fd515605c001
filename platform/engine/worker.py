"""vLLM's CPU worker and its model runner, for devices that are cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from loomserve.platform.base.heap import give_back_freed
from loomserve.platform.engine.adapters.segments import compute_by_segments, refuse_experts
from loomserve.platform.engine.blocking_wait import sleep_instead_of_spinning
from loomserve.platform.engine.core.cores import bind_worker_to_stage
from loomserve.platform.engine.kv_memory import KvFilling, UntouchedKv
from loomserve.platform.engine.process.lone_groups import groups_without_ports
from loomserve.platform.engine.resumption.model_runner import ResumesRequests
from loomserve.platform.engine.sleeping.memory import RereadWeight, give_back_pages, reread_weights
from loomserve.platform.engine.sleeping.sleep import PackedOnUse, pack_on_use
from loomserve.platform.run.fate import end_with_parent


class _Drawn(NamedTuple):
    """The state of a request's generator before the draw that followed so many output tokens."""

    after: int
    state: torch.Tensor


class SeedKeepingModelRunner(ResumesRequests, CPUModelRunner):  # type: ignore[misc]
    """CPU model runner whose seeded requests draw once for each of their tokens.

    vLLM draws for every request of a step. For a prompt of which a part is still to be computed it
    takes the draw back by moving the generator's offset, which only GPUs' generators have: on a
    CPU, a seeded request with a prompt of more than one step ends the engine. For a token that the
    scheduler drops, because a lender or the KV store has failed in its step, vLLM takes nothing
    back. Here both draws are taken back.
    """

    _drawn: dict[str, _Drawn]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._drawn = {}

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        for finished in scheduler_output.finished_req_ids:
            self._drawn.pop(finished, None)
        known = scheduler_output.scheduled_cached_reqs
        if self._drawn:
            for name, tokens in zip(known.req_ids, known.num_output_tokens, strict=True):
                drawn = self._drawn.get(name)
                if drawn is not None and drawn.after == tokens:
                    self.requests[name].generator.set_state(drawn.state)
        return super()._update_states(scheduler_output)

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        for place, generator in batch.generators.items():
            name = batch.req_ids[place]
            after = len(self.requests[name].output_token_ids)
            self._drawn[name] = _Drawn(after, generator.get_state())
        return super()._sample(*args, **kwargs)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators = generators


class StageModelRunner(SeedKeepingModelRunner):
    """CPU model runner that can receive activations as soon as its model is loaded.

    vLLM allocates the memory for them when it warms the model up for compilation. An engine on a
    CPU that compiles nothing is not warmed up, and fails in its first step as a later stage.
    """

    kv_filling: KvFilling | None = None
    """Of KV memory that has not been touched when the engine starts."""

    def initialize_kv_cache_tensors(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        with UntouchedKv() as kv:
            found: dict[str, torch.Tensor] = super().initialize_kv_cache_tensors(*args, **kwargs)
        if kv.memory is not None:
            self.kv_filling = KvFilling(kv.memory)
            self.kv_filling.begin()
        return found

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )


class NonSpinningWorker(CPUWorker):  # type: ignore[misc]
    """CPU worker that leaves its core to another engine, or the gateway, while it waits."""

    runner_class = StageModelRunner

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        end_with_parent()
        super().__init__(*args, **kwargs)
        self.sleeping_weights: list[PackedOnUse | RereadWeight] = []
        # vLLM makes the queue on which this process waits once the model is loaded.
        sleep_instead_of_spinning()

    def init_device(self) -> None:
        if threads := bind_worker_to_stage(self.local_rank):
            torch.set_num_threads(threads)
        with groups_without_ports(self.vllm_config.parallel_config.world_size_across_dp):
            super().init_device()
        if self.vllm_config.lora_config is not None:
            compute_by_segments()
        self.model_runner: Any
        if type(self.model_runner) is CPUModelRunner:
            # It holds nothing yet.
            self.model_runner = self.runner_class(self.vllm_config, torch.device("cpu"))

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        model, folder = self.model_runner.model, Path(self.vllm_config.model_config.model)
        if self.vllm_config.lora_config is not None:
            refuse_experts(model)
        self.sleeping_weights = [*pack_on_use(model), *reread_weights(model, folder)]
        # Packing has left much of it behind.
        give_back_freed()

    def sleep(self, level: int = 1) -> None:
        """Give back KV memory, and weights that can be made or read again, whatever the level."""
        if filling := self._kv_filling:
            filling.end()
        give_back_pages(self.model_runner.kv_caches)
        for each in self.sleeping_weights:
            each.drop()
        give_back_freed()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Have weights again; KV memory comes back by itself, with the first write to each page."""
        for each in self.sleeping_weights:
            each.restore()
        if filling := self._kv_filling:
            filling.begin()

    @property
    def _kv_filling(self) -> KvFilling | None:
        return getattr(self.model_runner, "kv_filling", None)
