"""Part of a worker that borrows from lenders, and lends to borrowers, while it runs its own steps.

Its engine's scheduler divides the same block address space (:mod:`.scheduling.borrower`,
:mod:`.scheduling.lender`) and calls the methods below by name, through vLLM's ``collective_rpc``.
The work is done by a plain object for each kind of loan.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig

from loomserve.kvstore.engine.connector import own_worker
from loomserve.platform.lending.engine.attention import LendingContext, share_context
from loomserve.platform.lending.engine.block_partitions import OWN, borrowed_partitions
from loomserve.platform.lending.engine.borrower_worker import BorrowerWorker, StepLimits
from loomserve.platform.lending.engine.lender_worker import LenderWorker
from loomserve.platform.lending.engine.shard_worker import ShardWorker
from loomserve.platform.lending.engine.shards.layers import OwnModel
from loomserve.platform.lending.engine.shards.shard import LocalKv
from loomserve.platform.lending.leaf import Leaf
from loomserve.platform.lending.ring.geometry import Geometry
from loomserve.platform.state.lending_options import LENDING_CONFIG, LendingOptions, ShardSpec


class TakesPartInLending(ABC):
    """Part of the worker of an engine that takes part in lending. ``_borrower``, ``_shards`` and
    ``_lender`` exist once there is KV memory."""

    vllm_config: Any
    model_config: Any
    cache_config: Any
    model_runner: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._options = LendingOptions.model_validate(
            self.vllm_config.additional_config[LENDING_CONFIG]
        )
        self.use_remote_attention()
        self._context = LendingContext(patience_s=self._options.patience_ms / 1000)
        self._leaf = self.leaf()
        self._server = self._leaf.server()

    # Of the kind of device

    @abstractmethod
    def use_remote_attention(self) -> None:
        """Have attention layers be of a backend that leaves rows to lenders."""

    @abstractmethod
    def leaf(self) -> Leaf:
        """Return what carries loans' rows between this worker's device and its lenders'."""

    @abstractmethod
    def isa(self, layer: Any) -> str:
        """Return what ``Geometry`` says of how a layer's attention packs blocks."""

    # vLLM's start

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        self.model_runner.lending = self._context

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        share_context(self.vllm_config.compilation_config.static_forward_context, self._context)

    def determine_available_memory(self) -> int:
        """Return the bytes of its own and of lenders together, since vLLM makes one block address
        space of them."""
        own: int = super().determine_available_memory()  # type: ignore[misc]
        return own + self._options.borrow_bytes

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self._context.partitions = partitions = borrowed_partitions(kv_cache_config, self._options)
        own = len(partitions.ranges[OWN])
        self._check_own(kv_cache_config, own)
        # A layer's memory begins where the one before would end if it had a block for each number.
        of_own = replace(kv_cache_config, num_blocks=own)
        super().initialize_from_config(of_own)  # type: ignore[misc]
        self._prepare_loans()

    def _check_own(self, config: KVCacheConfig, own: int) -> None:
        longest = self.model_config.max_model_len
        size = config.kv_cache_groups[0].kv_cache_spec.block_size
        if own * size < longest:
            raise ValueError(
                f"its own KV memory holds {own * size} tokens, fewer than one request's "
                f"{longest}: raise kv_cache_memory or lower max_model_len"
            )

    def _prepare_loans(self) -> None:
        context, runner = self._context, self.model_runner
        by_name = self.vllm_config.compilation_config.static_forward_context
        names = runner.kv_cache_config.kv_cache_groups[0].layer_names
        attention = [by_name[name] for name in names]
        kv = LocalKv(
            attention=attention,
            caches=runner.kv_caches,
            memory=runner.kv_memory,
            numbers=context.partitions.ranges[-1].stop,
            geometry=self._geometry(attention),
        )
        scheduler = self.vllm_config.scheduler_config
        limits = StepLimits(
            # Blocks are copied by rows of a step, whole.
            max_tokens=max(scheduler.max_num_batched_tokens, self.cache_config.block_size),
            max_requests=scheduler.max_num_seqs,
            max_blocks=int(runner.input_batch.block_table[0].block_table.np.shape[1]),
        )
        model = OwnModel(runner.get_model(), self.vllm_config)
        self._borrower = BorrowerWorker(context, kv, limits, self._leaf)
        self._shards = ShardWorker(context, kv, model, limits, self._leaf, own_worker)
        self._lender = lender = LenderWorker(context, self._server, kv, model.module)
        self.borrow, self.move_blocks = self._borrower.borrow, self._borrower.move_blocks
        self.lend, self.end_lending = lender.lend, lender.end_lending
        self.slicing_plans = lender.slicing_plans

    def _geometry(self, attention: list[Any]) -> Geometry:
        layer = attention[0]
        return Geometry(
            layers=len(attention),
            query_heads=layer.impl.num_heads,
            kv_heads=layer.impl.num_kv_heads,
            head_size=layer.impl.head_size,
            block_size=self.cache_config.block_size,
            dtype=str(self.model_config.dtype).removeprefix("torch."),
            scale=layer.impl.scale,
            isa=self.isa(layer),
        )

    def compile_or_warm_up_model(self) -> Any:
        if self._options.lend_bytes:
            # Timing and packing take seconds, which requests would wait at the first loan.
            self.look_for_tasks(self._options.polling)
        return super().compile_or_warm_up_model()  # type: ignore[misc]

    # Borrowing

    def borrowing(self, shard: ShardSpec | None = None) -> dict[str, Any]:
        """Return what a lender must know of this engine's attention, blocks and steps to keep some
        whole requests, or to compute a shard of all. ``ValueError`` if that shard cannot be lent.
        """
        if not shard:
            return self._borrower.requirements()
        if "layers" in shard and not self._leaf.on_cpus:
            raise ValueError("layers move between CPU devices only")
        return self._shards.requirements(shard)

    def end_loan(self, partition: int) -> None:
        if not self._shards.end_loan(partition):
            self._borrower.end_loan(partition)

    def shard(self, call: str, partition: int, *given: Any) -> Any:
        """Call this method of :class:`ShardWorker` for the shard of a partition."""
        return getattr(self._shards, call)(partition, *given)

    # Lending

    def look_for_tasks(self, polling: str) -> dict[str, Any]:
        return self._lender.look_for_tasks(polling if self._leaf.on_cpus else "steps")

    def process_id(self) -> int:
        return os.getpid()

    # Steps

    def execute_model(self, scheduler_output: Any) -> Any:
        self._server.busy()
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        if output is not None:
            # Nothing to sample, so sample_tokens is not called.
            self._server.idle()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        try:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        finally:
            self._server.idle()

    def shutdown(self) -> None:
        self._server.stop()
        super().shutdown()  # type: ignore[misc]


class SortsRows:
    """Part of a model runner: sorts the rows of each batch by partition, own ones first."""

    lending: LendingContext
    """Set by the worker that makes this runner."""
    input_batch: Any

    def _may_reorder_batch(self, scheduler_output: Any) -> None:
        super()._may_reorder_batch(scheduler_output)  # type: ignore[misc]
        if self.lending.borrowers:
            batch = self.input_batch
            first = batch.block_table[0].block_table.np[: batch.num_reqs, 0]
            _sort_rows(batch, [self.lending.partitions.of(block) for block in first.tolist()])


def _sort_rows(batch: Any, partitions: list[int]) -> None:
    """Sort the batch's rows by partition, with as many swaps as rows are out of place."""
    for place, partition in enumerate(sorted(partitions)):
        if partitions[place] != partition:
            other = max(i for i, each in enumerate(partitions) if each == partition)
            batch.swap_states(place, other)
            partitions[place], partitions[other] = partitions[other], partitions[place]
