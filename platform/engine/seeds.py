"""Seeded sampling on a CPU: what is drawn for a token that does not count is taken back.

vLLM draws for every request of a step. For a prompt of which a part is still to be computed it
takes the draw back by moving the generator's offset, which only GPUs' generators have: on a CPU, a
seeded request with a prompt of more than one step ends the engine. For a token that the scheduler
drops, because a lender or the KV store has failed in its step, vLLM takes nothing back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from loomserve.platform.engine.resumption.model_runner import ResumesRequests


class _Drawn(NamedTuple):
    """The state of a request's generator before the draw that followed so many output tokens."""

    after: int
    state: torch.Tensor


class SeedKeepingModelRunner(ResumesRequests, CPUModelRunner):  # type: ignore[misc]
    """CPU model runner whose seeded requests draw once for each of their tokens.

    It takes requests that go on here, too.
    """

    _drawn: dict[str, _Drawn]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._drawn = {}

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        for finished in scheduler_output.finished_req_ids:
            self._drawn.pop(finished, None)
        known = scheduler_output.scheduled_cached_reqs
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
