"""A pipeline's later stages on a CPU, without compiling.

vLLM allocates the memory for a stage's incoming activations when it warms the model up for
compilation. An engine on a CPU that compiles nothing is not warmed up, and fails in its first step.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import get_pp_group

from loomserve.platform.engine.seeds import SeedKeepingModelRunner


class StageModelRunner(SeedKeepingModelRunner):
    """CPU model runner that can receive activations as soon as its model is loaded."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
