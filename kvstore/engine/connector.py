"""vLLM's connector to the store: an engine's blocks are loaded before a step and saved after it.

vLLM makes one connector in EngineCore, which decides (:class:`StoreConnectorScheduler`), and one
in each worker, which copies (:class:`StoreConnectorWorker`). The first knows requests and block
hashes, the second memory; per step the first sends the second a :class:`StepTransfers`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec

from loomserve.kvstore.engine.connector_scheduler import StoreConnectorScheduler
from loomserve.kvstore.engine.connector_worker import StoreConnectorWorker
from loomserve.kvstore.engine.messages import (
    SchedulingMetrics,
    SchedulingStats,
    StepTransfers,
    Transferred,
)
from loomserve.kvstore.engine.namespaces import Namespaces
from loomserve.kvstore.server.client import StoreClient

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.forward_context import ForwardContext
    from vllm.lora.request import LoRARequest
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


def own_worker() -> StoreConnectorWorker | None:
    """What copies this process's blocks to and from the store; None: its engine has no store."""
    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    return connector.connector_worker if isinstance(connector, StoreConnector) else None


class StoreConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Connector between one process of an engine and its node's store.

    vLLM finds it by ``kv_connector_module_path``. Its options, in ``kv_connector_extra_config``:
    the ``address`` of the store's socket, the path of its ``arena``, the ``model``'s name in the
    store's figures, the folder ``digests`` for digests of weights, and the store's ``node``.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        spec = _only_kind(kv_cache_config)
        self._scheduler: StoreConnectorScheduler | None = None
        self._worker: StoreConnectorWorker | None = None
        self._copies = False
        if role is KVConnectorRole.SCHEDULER:
            names = Namespaces(
                vllm_config, kv_cache_config.kv_cache_layout, spec, Path(options["digests"])
            )
            self._scheduler = StoreConnectorScheduler(
                StoreClient(options["address"]), names, options.get("node", "")
            )
        else:
            self._worker = StoreConnectorWorker(options, vllm_config.parallel_config.rank)

    @property
    def requires_kv_delivery(self) -> bool:
        # A cache: what is not saved is computed again.
        return False

    # In EngineCore.

    def learn_adapter(self, adapter: LoRARequest) -> None:
        """Read an adapter's files before a step has to; ``OSError`` if they are not there."""
        self.connector_scheduler.names.of_ranks(adapter)

    def on_new_request(self, request: Request) -> None:
        self.connector_scheduler.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self.connector_scheduler.matched_tokens(
            request, num_computed_tokens, time.monotonic()
        )
        return tokens, bool(tokens) and self.connector_scheduler.prefetches(request)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.connector_scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepTransfers:
        return self.connector_scheduler.step(scheduler_output, time.monotonic())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.connector_scheduler.step_done(time.monotonic())
        transferred = connector_output.kv_connector_worker_meta
        if isinstance(transferred, Transferred):
            self.connector_scheduler.on_transfer(transferred)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self.connector_scheduler.remove(request)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._scheduler.stats(time.monotonic()) if self._scheduler is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return SchedulingStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> KVConnectorPromMetrics:
        return SchedulingMetrics(*args, **kwargs)

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.connector_worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepTransfers)
        self.connector_worker.swap_out(kv_connector_metadata.swap_outs)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepTransfers)
        self._copies = bool(connector_metadata.loads or connector_metadata.saves)

    def has_connector_metadata(self) -> bool:
        # vLLM asks before each layer's calls, which most steps do without.
        return self._copies and super().has_connector_metadata()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        whole = forward_context.cudagraph_runtime_mode is CUDAGraphMode.FULL
        self.connector_worker.start_loads(self._transfers(), one_graph=whole)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._copies:
            self.connector_worker.before_layer(layer_name, self._transfers().saves)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        if self._copies:
            self.connector_worker.after_layer(layer_name)

    def wait_for_save(self) -> None:
        # vLLM calls this of a forward pass that raised, too, while the exception passes.
        raised = sys.exc_info()[0] is not None
        self.connector_worker.end_step(self._transfers().saves, sound=not raised)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.connector_worker.take_failed()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.connector_worker.take_fetched()

    def build_connector_worker_meta(self) -> Transferred | None:
        return self.connector_worker.take_transferred()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    @property
    def connector_scheduler(self) -> StoreConnectorScheduler:
        assert self._scheduler is not None, "only the connector in EngineCore decides what to load"
        return self._scheduler

    @property
    def connector_worker(self) -> StoreConnectorWorker:
        assert self._worker is not None, "only a worker's connector copies"
        return self._worker

    def _transfers(self) -> StepTransfers:
        transfers = self._get_connector_metadata()
        assert isinstance(transfers, StepTransfers)
        return transfers


def _only_kind(kv_cache_config: KVCacheConfig) -> KVCacheSpec:
    if len(kv_cache_config.kv_cache_groups) != 1:
        raise ValueError(
            "this model has several kinds of KV cache, which the KV store does not hold yet: "
            "set kvstore: false for it"
        )
    (group,) = kv_cache_config.kv_cache_groups
    if not isinstance(group.kv_cache_spec, FullAttentionSpec):
        # With blocks that were dropped, it would compute other tokens.
        raise ValueError(
            "this model's KV cache drops blocks, which the KV store does not hold yet: "
            "set kvstore: false for it"
        )
    return group.kv_cache_spec
