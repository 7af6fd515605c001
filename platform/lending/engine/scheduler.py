"""The scheduler of an engine that lends or borrows."""

from __future__ import annotations

from functools import partial
from pkgutil import resolve_name
from typing import Any

from vllm.config import VllmConfig

from loomserve.platform.engine import scheduler as engine_scheduler
from loomserve.platform.engine.scheduler import AdaptiveScheduler
from loomserve.platform.engine.scheduler_calls import SchedulerCalls
from loomserve.platform.engine.scheduling.costs import block_bytes
from loomserve.platform.lending.engine.block_partitions import (
    PartitionedKVCacheManager,
    borrowed_partitions,
)
from loomserve.platform.lending.engine.scheduling.borrower import BorrowerHooks
from loomserve.platform.lending.engine.scheduling.calls import EngineLoanCalls
from loomserve.platform.lending.engine.scheduling.lender import LenderHooks
from loomserve.platform.lending.engine.worker import TakesPartInLending
from loomserve.platform.state.lending_options import LENDING_CONFIG, LendingOptions


def make_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> AdaptiveScheduler:
    """What ``scheduler_cls`` names for an engine that lends or borrows. ``ValueError`` if its
    worker, which a configuration may name for another kind of device, takes no part in that."""
    worker = vllm_config.parallel_config.worker_cls
    if not issubclass(resolve_name(worker), TakesPartInLending):
        raise ValueError(
            f"worker_cls: {worker} neither lends nor borrows: derive it from "
            f"{TakesPartInLending.__module__}.{TakesPartInLending.__name__}, or leave lending out"
        )
    scheduler = engine_scheduler.make_scheduler(vllm_config, **kwargs)
    options = LendingOptions.model_validate(vllm_config.additional_config[LENDING_CONFIG])
    scheduler.calls = take_part(scheduler, options)
    return scheduler


def take_part(scheduler: AdaptiveScheduler, options: LendingOptions) -> SchedulerCalls:
    """Divide the scheduler's blocks into partitions, and hook lending into its steps."""
    config, caching = scheduler.kv_cache_config, scheduler.cache_config.enable_prefix_caching
    partitions = borrowed_partitions(config, options)
    borrower = BorrowerHooks(scheduler, partitions, options, config, prefix_caching=caching)
    scheduler.kv_cache_manager = PartitionedKVCacheManager(
        scheduler.kv_cache_manager, partitions, borrower.placement.start_on
    )
    for blocks in partitions.ranges[1:]:
        borrower.use.pool.withhold(blocks)
    lender = LenderHooks(scheduler, partitions, options, config)
    # A lender gets back what it lacks before anything else is decided.
    scheduler.hooks = (lender, borrower)
    answerer = partial(
        EngineLoanCalls,
        borrower,
        lender,
        block_size=scheduler.block_size,
        block_bytes=block_bytes(config),
        stall_s=options.patience_ms / 2000,
        prefix_caching=caching,
    )
    return SchedulerCalls(scheduler.vllm_config, EngineLoanCalls, answerer)
