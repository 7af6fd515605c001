"""Measurements of an engine."""

from __future__ import annotations

from pydantic import Field

from loomserve.platform.state.base import StateModel


class SchedulingState(StateModel):
    """Preemptions by an engine's scheduler since it started."""

    queue: str = Field(description="Policy of the order in which requests are served.")
    preemption: str = Field(description="Policy of how a request leaves memory.")
    swapped_out: int = Field(description="Requests preempted to swap space.")
    swapped_in: int = Field(description="Requests that came back from there.")
    recomputed: int = Field(description="Requests preempted to be computed again.")
    swap_used_bytes: int
    swap_capacity_bytes: int
    step_time_error: float | None = Field(
        description="Mean absolute error of predicted step times, a share; None before any."
    )
    swap_time_error: float | None = Field(
        description="Mean absolute error of predicted swap times."
    )


class Pace(StateModel):
    """Pace at which an engine served the requests that ended lately."""

    prefill_token_s: float = Field(description="Mean time of a prompt token that was computed.")
    output_token_s: float = Field(description="Mean time between two tokens of an answer.")
    request_s: float = Field(description="Mean time from a request's start to its end.")


class WorkState(StateModel):
    """Sums of an engine's work since it started; the difference of two tells what a while took."""

    prefill_s: float = Field(description="Seconds of prefill.")
    attention_s: float = Field(description="Seconds of attention of decode.")
    linear_s: float = Field(description="Seconds of all else in decode.")
    tokens: int = Field(description="Tokens whose KV was written, of prompts and answers.")


class FootprintState(StateModel):
    """Size of an engine, and its memory."""

    layers: int
    layer_bytes: int = Field(description="Weights of a layer; 0 where the files do not tell.")
    kv_heads: int = Field(description="KV heads of a layer.")
    block_bytes: int = Field(description="Bytes of a KV block, all layers.")
    block_tokens: int
    memory_bytes: int = Field(
        description="Its own memory, KV included: its processes', or that of its GPUs."
    )
    dropped_bytes: int = Field(
        0, description="Of that, weights which it has only while it does not sleep."
    )
    memory_measured_at: float = Field(description="Monotonic seconds of whoever holds this.")
    start_s: float = Field(description="Seconds from the start of the replica until it served.")
    ready_at: float = Field(
        description="When it served, in monotonic seconds of whoever holds this."
    )

    @property
    def token_bytes(self) -> float:
        """Bytes of a token's KV, all layers."""
        return self.block_bytes / self.block_tokens


class ReplicaLoad(StateModel):
    """Load of an engine."""

    running: int = Field(description="Requests in the running batch.")
    waiting: int = Field(description="Requests in the engine's queue.")
    waiting_tokens: int = Field(
        0, description="Tokens of requests for which they have no KV memory yet."
    )
    kv_cache_usage: float = Field(description="Share of KV blocks in use, 0 to 1.")
    step_time_s: float = Field(description="Mean time of recent steps; 0 before the first.")
    oldest_waiting_s: float = Field(
        0.0, description="Age of the oldest request that waits; 0 if none does."
    )
    weighted_turnaround: float | None = Field(
        None,
        description="Mean of recent requests: time in the engine over time since first scheduled.",
    )
    pace: Pace | None = Field(None, description="None before a request has ended.")
    scheduling: SchedulingState | None = Field(
        None, description="None for an engine without the KV store."
    )
    work: WorkState | None = Field(None, description="None for an engine that counts none.")
    asleep: bool = Field(False, description="Whether it has given its memory back.")
    requests: int = Field(0, description="Requests that it has taken since it started.")
    idle_s: float = Field(0.0, description="Seconds for which it has had no request.")
    measured_at: float = Field(
        description="When it was measured, in monotonic seconds of whoever holds this."
    )
