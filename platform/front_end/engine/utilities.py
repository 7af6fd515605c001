"""Calls of an engine's own functions, which a front end makes to all replicas of its model."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine import EngineCoreRequestType, UtilityOutput
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.serial_utils import MsgpackEncoder

from loomserve.platform.base.errors import EngineGone, Unavailable

Send = Callable[[Sequence[Any]], bool]

_TIMEOUT_S = 120.0


class UtilityClient(EngineCoreClient):  # type: ignore[misc]
    """vLLM's client calls that are utilities, which it makes from three calls."""

    # AsyncLLM asks for it before each request; a lost replica is no dead front end.
    resources = SimpleNamespace(engine_dead=False)
    engine_ranks_managed = (0,)

    def __init__(self, encoder: MsgpackEncoder) -> None:
        self._encoder = encoder
        # By the number of a call that has not been answered: its replica.
        self._answers: dict[int, tuple[str, asyncio.Future[Any]]] = {}

    async def _call(self, replica_id: str, send: Send, method: str, args: Sequence[Any]) -> Any:
        """The answer; raises EngineGone, Unavailable, or Exception with the method's own."""
        call_id = uuid.uuid1().int >> 64
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[call_id] = replica_id, answer
        said = self._encoder.encode((0, call_id, method, args))
        try:
            if not send((EngineCoreRequestType.UTILITY.value, *said)):
                raise EngineGone(f"the engine of replica {replica_id} takes no calls")
            async with asyncio.timeout(_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise Unavailable(
                f"the engine of replica {replica_id} did not answer {method!r} within "
                f"{_TIMEOUT_S:g} s; see its log"
            ) from None
        finally:
            self._answers.pop(call_id, None)

    def _answered(self, output: UtilityOutput) -> None:
        _, answer = self._answers.get(output.call_id, ("", None))
        if answer is None or answer.done():
            return
        if output.failure_message is not None:
            answer.set_exception(Exception(output.failure_message))
        else:
            answer.set_result(output.result.result if output.result is not None else None)

    def _gone(self, replica_id: str) -> None:
        for asked, answer in self._answers.values():
            if asked == replica_id and not answer.done():
                answer.set_exception(EngineGone(f"the engine of replica {replica_id} ended"))

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all engines; their answers."""
        raise NotImplementedError

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        return (await self.call_utility_all_async(method, *args))[0]

    async def call_utility_consensus_async(self, method: str, *args: Any) -> Any:
        """The answer that all engines have in common; raises RuntimeError if they differ."""
        first, *others = await self.call_utility_all_async(method, *args)
        if any(other != first for other in others):
            raise RuntimeError(f"engines answer {method!r} differently: {[first, *others]}")
        return first

    pause_scheduler_async = AsyncMPClient.pause_scheduler_async
    resume_scheduler_async = AsyncMPClient.resume_scheduler_async
    is_scheduler_paused_async = AsyncMPClient.is_scheduler_paused_async
    profile_async = AsyncMPClient.profile_async
    reset_mm_cache_async = AsyncMPClient.reset_mm_cache_async
    reset_prefix_cache_async = AsyncMPClient.reset_prefix_cache_async
    reset_encoder_cache_async = AsyncMPClient.reset_encoder_cache_async
    sleep_async = AsyncMPClient.sleep_async
    wake_up_async = AsyncMPClient.wake_up_async
    is_sleeping_async = AsyncMPClient.is_sleeping_async
    set_weight_version_async = AsyncMPClient.set_weight_version_async
    get_weight_version_async = AsyncMPClient.get_weight_version_async
    add_lora_async = AsyncMPClient.add_lora_async
    remove_lora_async = AsyncMPClient.remove_lora_async
    list_loras_async = AsyncMPClient.list_loras_async
    pin_lora_async = AsyncMPClient.pin_lora_async
    save_sharded_state_async = AsyncMPClient.save_sharded_state_async
    collective_rpc_async = AsyncMPClient.collective_rpc_async
