"""Seeded sampling on a CPU, where a generator's state cannot be moved back by an offset.

vLLM draws for every request of a step, and takes the draw back for a prompt of which a part is
still to be computed. It does so by moving the generator's offset, which only GPUs' generators have:
on a CPU, a seeded request with a prompt of more than one step ends the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from loomserve.platform.engine.resumption.model_runner import ResumesRequests


class SeedKeepingModelRunner(ResumesRequests, CPUModelRunner):  # type: ignore[misc]
    """CPU model runner that takes draws back by restoring the generator's whole state.

    It takes requests that go on here, too.
    """

    _states: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        self._states = tuple((each, each.get_state()) for each in self._drawn_in_vain())
        return super()._sample(*args, **kwargs)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        for generator, state in self._states:
            generator.set_state(state)
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators = generators

    def _drawn_in_vain(self) -> Iterator[torch.Generator]:
        """Yield the generators of requests whose prompts this step does not complete."""
        batch = self.input_batch
        for place in np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0]:
            generator = batch.generators.get(int(place))
            if generator is not None:
                yield generator
