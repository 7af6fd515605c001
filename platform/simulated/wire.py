"""vLLM's frames between a client and an engine, without vLLM.

Its structures are arrays on the wire, so these have its fields in its order, and end where nothing
follows that a simulated engine reads or tells. A test holds them against vLLM's own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np

from loomserve.platform.engine.core.metering import (
    ABORT_REASON,
    ERROR_REASON,
    PREEMPTED_EVENT,
    SCHEDULED_EVENT,
)

ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"
"""What a client's message is: its first frame."""

MAX_TOKENS = 16
"""vLLM's default of ``max_tokens``, which is not sent; None, which is, leaves it to the engine."""

_RAW_VIEW = 3
"""vLLM's code of an array's bytes that stand in the frame itself."""


class FinishReason(IntEnum):
    STOP, LENGTH, ABORT, ERROR = 0, 1, ABORT_REASON, ERROR_REASON


class EventType(IntEnum):
    QUEUED, SCHEDULED, PREEMPTED = 1, SCHEDULED_EVENT, PREEMPTED_EVENT


class WireRequest(msgspec.Struct, array_like=True, gc=False):
    """``EngineCoreRequest``, as it is sent; its parameters are a mapping without defaults."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: Any
    sampling_params: dict[str, Any] | None
    pooling_params: Any
    arrival_time: float
    lora_request: Any
    cache_salt: str | None


class WireEvent(msgspec.Struct):
    type: int
    timestamp: float


class Prefill(msgspec.Struct):
    """``PrefillStats``."""

    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_local_cached_tokens: int
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


class Output(msgspec.Struct, array_like=True, gc=False):
    """``EngineCoreOutput``."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: None = None
    pooling_output: None = None
    finish_reason: int | None = None
    stop_reason: int | None = None
    events: list[WireEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: None = None
    trace_headers: None = None
    prefill_stats: Prefill | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class PrefixCacheStats(msgspec.Struct, omit_defaults=True):
    requests: int = 0
    queries: int = 0
    hits: int = 0


class SchedulerStats(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    prefix_cache_stats: PrefixCacheStats
    kv_connector_stats: dict[str, Any] | None = None
    num_skipped_waiting_reqs: int = 0


class UtilityAnswer(msgspec.Struct, array_like=True, gc=False):
    """``UtilityOutput``; a result stands behind its type, which is never told."""

    call_id: int
    failure_message: str | None = None
    result: tuple[None, Any] | None = None


class Outputs(msgspec.Struct, array_like=True, gc=False):
    """``EngineCoreOutputs``."""

    engine_index: int = 0
    outputs: list[Output] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityAnswer | None = None

    def __post_init__(self) -> None:
        if self.timestamp == 0.0:
            self.timestamp = time.monotonic()


_requests = msgspec.msgpack.Decoder(WireRequest)


def request_of(frames: Sequence[Any]) -> WireRequest:
    """The request of a message's frames after the first; else raises ``msgspec.DecodeError``."""
    return _requests.decode(frames[0])


def value_of(frames: Sequence[Any]) -> Any:
    """What is no request: ids, or a call."""
    return msgspec.msgpack.decode(frames[0])


def frames_of(outputs: Outputs) -> list[bytes]:
    return [msgspec.msgpack.encode(outputs)]


def logprobs(tokens: Sequence[int], values: Sequence[float]) -> tuple[Any, ...]:
    """``LogprobsLists`` of one token, the first, and of the likeliest, of which it is the first."""
    return (
        _array(np.array([tokens], np.int32)),
        _array(np.array([values], np.float32)),
        _array(np.ones(1, np.int32)),
        None,
    )


def _array(given: np.ndarray) -> tuple[str, tuple[int, ...], msgspec.msgpack.Ext]:
    return given.dtype.str, given.shape, msgspec.msgpack.Ext(_RAW_VIEW, given.tobytes())
