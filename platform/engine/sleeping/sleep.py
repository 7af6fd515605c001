"""An engine's sleep: between two steps, without requests, and ended by the next one that comes."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Any, Protocol

from loomserve.platform.engine.sleeping.weights import dropped_bytes

_logger = logging.getLogger(__name__)


class SleepingCore(Protocol):
    """vLLM's engine core, as its sleep sees it."""

    scheduler: Any
    model_executor: Any
    vllm_config: Any
    batch_queue: Any

    def reset_encoder_cache(self) -> None: ...


class EngineSleep:
    """Gives an engine's memory back, and takes it again; called by its core's thread alone.

    A CPU engine gives its KV memory back, a GPU's what vLLM's level says: at level 1 its weights
    move to the host's memory, at level 2 they are dropped.
    """

    def __init__(self, core: SleepingCore) -> None:
        self._core = core

    @property
    def asleep(self) -> bool:
        return bool(self._core.model_executor.is_sleeping)

    @cached_property
    def dropped_bytes(self) -> int:
        """What its workers' sleep frees of their weights, asked for once, before the first step."""
        return sum(self._core.model_executor.collective_rpc(dropped_bytes))

    def fall_asleep(self, level: int = 1) -> None:
        """Give memory back; nothing happens if it sleeps already.

        Raises:
            ValueError: requests are open, blocks are lent or being copied, or the engine was not
                started so that it can sleep.
        """
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
        """Take memory again; nothing happens if it does not sleep."""
        if self.asleep:
            self._core.model_executor.wake_up(None)

    def _check_can_sleep(self) -> None:
        config = self._core.vllm_config
        on_cpu = config.device_config.device_type == "cpu"
        if not on_cpu and not config.model_config.enable_sleep_mode:
            raise ValueError("it was started without vLLM's enable_sleep_mode")
