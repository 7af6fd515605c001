"""An engine's sleep: between two steps, without requests, and ended by the next one that comes.

For its kernels on a CPU, vLLM packs the weights of every linear operator, and frees what it packed.
Those of embeddings and output heads it keeps both ways: they are looked up by row, and tied to each
other. So their packed copies can go at any time, and be made of the same numbers when they are used
next. Those of embeddings beside a head are never used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class EngineSleep:
    """Gives an engine's memory back, and takes it again; called by its core's thread alone.

    A CPU engine gives its KV memory back, a GPU's what vLLM's level says: at level 1 its weights
    move to the host's memory, at level 2 they are dropped.
    """

    def __init__(self, core: Any) -> None:
        """``core`` is vLLM's ``EngineCore``."""
        self._core = core

    @property
    def asleep(self) -> bool:
        return bool(self._core.model_executor.is_sleeping)

    @cached_property
    def dropped_bytes(self) -> int:
        """Bytes of weights that its workers' sleep frees, asked for once, before the first step."""
        return sum(self._core.model_executor.collective_rpc(dropped_bytes))

    def fall_asleep(self, level: int = 1) -> None:
        """Give memory back; nothing happens if it sleeps already. Raises ValueError if requests are
        open, blocks are lent or being copied, or the engine was not started so that it can
        sleep."""
        if self.asleep:
            return
        core = self._core
        self._check_can_sleep()
        if core.scheduler.requests or core.batch_queue:
            raise ValueError("it has requests")
        # Blocks of the KV store outlive the engine's sleep, so its connector keeps what it knows.
        if not core.scheduler.reset_prefix_cache():
            raise ValueError("some of its KV blocks are lent, or being copied")
        core.reset_encoder_cache()
        core.model_executor.sleep(level)

    def wake(self) -> None:
        if self.asleep:
            self._core.model_executor.wake_up(None)

    def _check_can_sleep(self) -> None:
        config = self._core.vllm_config
        on_cpu = config.device_config.device_type == "cpu"
        if not on_cpu and not config.model_config.enable_sleep_mode:
            raise ValueError("it was started without vLLM's enable_sleep_mode")


class PackedOnUse:
    """The linear operator of a layer, whose packed weights exist from one use until a drop."""

    def __init__(self, layer: Any) -> None:
        """``layer`` has been packed by vLLM, and keeps its weights."""
        self._layer = layer
        self._linear: Linear | None = layer.cpu_linear

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if self._linear is None:
            self._linear = _packed(self._layer.weight)
        return self._linear(x, weight, bias)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights, which are about as many as before packing."""
        return 0 if self._linear is None else int(self._layer.weight.nbytes)

    def drop(self) -> None:
        self._linear = None

    def restore(self) -> None:
        """It comes with its next use."""


def pack_on_use(model: torch.nn.Module) -> list[PackedOnUse]:
    """Let what can be packed again be packed when it is used, and free what is never used.
    ``model`` is vLLM's, whose weights are loaded. Returns the operators, whose copies may be
    dropped between two steps."""
    found = []
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
            operator = PackedOnUse(layer)
            if not isinstance(layer, ParallelLMHead):
                operator.drop()
            layer.cpu_linear = operator
            found.append(operator)
    return found


def _packed(weight: torch.Tensor) -> Linear:
    holder: Any = torch.nn.Module()
    holder.weight = torch.nn.Parameter(weight.data, requires_grad=False)
    dispatch_cpu_unquantized_gemm(holder, remove_weight=False)
    linear: Linear = holder.cpu_linear
    return linear


def dropped_bytes(worker: Any) -> int:
    """Bytes of weights that a worker's sleep frees; called in the worker's process."""
    return sum(each.nbytes for each in getattr(worker, "sleeping_weights", ()))
