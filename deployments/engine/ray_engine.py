"""Ray Serve LLM's vLLM engine, started as the platform wants it."""

from __future__ import annotations

from typing import Any

from ray.llm._internal.common.callbacks.base import CallbackBase
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.serve.llm import LLMConfig

from loomserve.platform.disaggregation.engine.prefill_decode import PrefillDecodeLLM
from loomserve.platform.engine.executor import executor_class
from loomserve.platform.engine.footprint import constants
from loomserve.platform.engine.hooks import verify
from loomserve.platform.engine.load import LoadMeter
from loomserve.platform.state.roles import Role
from loomserve.routers.snapshot import RoutingStats


class MeteredEngine(VLLMEngine):  # type: ignore[misc]
    """Ray's vLLM engine with our load meter beside vLLM's own Prometheus metrics."""

    def __init__(self, llm_config: LLMConfig) -> None:
        super().__init__(llm_config)
        self.meter = LoadMeter()

    def _start_async_llm_engine(
        self, vllm_engine_args: Any, vllm_engine_config: Any, placement_group: Any
    ) -> PrefillDecodeLLM:
        verify("vllm")
        vllm_engine_config.parallel_config.placement_group = placement_group
        return PrefillDecodeLLM(
            vllm_config=vllm_engine_config,
            executor_class=executor_class(vllm_engine_config),
            log_requests=vllm_engine_args.enable_log_requests,
            log_stats=True,
            stat_loggers=[self.meter.stat_logger],
        )

    @property
    def llm(self) -> PrefillDecodeLLM:
        assert isinstance(self._engine_client, PrefillDecodeLLM), "start() comes first"
        return self._engine_client

    async def call_loans(self, name: str, *given: Any) -> Any:
        """Call a method of ``LoanCalls`` in EngineCore; errors are plain exceptions."""
        (answer,) = await self.llm.collective_rpc(f"loans.{name}", args=given)
        return answer

    @property
    def max_model_len(self) -> int:
        return int(self._engine_client.model_config.max_model_len)

    def facts(self, path: str, borrowed_bytes: int, kv_bytes: int) -> dict[str, int]:
        """Constant fields of a :class:`loomserve.platform.state.FootprintState`."""
        config = self.llm.vllm_config
        model, cache = config.model_config, config.cache_config
        return constants(
            path,
            layers=model.get_total_num_hidden_layers(),
            item_bytes=model.dtype.itemsize,
            kv_heads=model.get_total_num_kv_heads(),
            kv_bytes=kv_bytes + borrowed_bytes,
            blocks=cache.num_gpu_blocks or 0,
            block_tokens=cache.block_size,
        )

    def routing_stats(self, role: Role, *, draining: bool) -> RoutingStats:
        config = self.llm.vllm_config
        blocks = config.cache_config.num_gpu_blocks or 0
        return RoutingStats(
            load=self.meter.read(self.llm.turnaround),
            max_running=config.scheduler_config.max_num_seqs,
            kv_capacity_tokens=blocks * config.cache_config.block_size,
            draining=draining,
            role=role,
        )


class NoNodeInit(CallbackBase):  # type: ignore[misc]
    """Tells Ray's engine that the weights need no fetching."""

    async def on_before_node_init(self) -> None:
        self.ctx.run_init_node = False
