"""Hooks into a scheduler's steps, and their view of the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from vllm.v1.request import Request

from loomserve.platform.engine.scheduling.costs import EngineCosts
from loomserve.platform.engine.scheduling.gated_queue import GatedQueue


class HookedScheduler(Protocol):
    """A scheduler as its hooks see it, with requests, blocks and limits of vLLM's."""

    running: list[Request]
    waiting: GatedQueue
    deferred: Iterable[Request]
    """Waiting requests beside ``waiting``; among them are all whose KV is being loaded."""
    blocked: list[Request]
    """Requests in ``waiting`` whose grammar is not there yet."""
    requests: Mapping[str, Request]
    kv_cache_manager: Any
    most_running: int
    """How many requests may run at once."""
    max_model_len: int

    costs: EngineCosts
    step_began: float
    """When the last step's schedule began, by ``time.perf_counter``."""

    def preempt(self, request: Request, *, drop_output: bool = False) -> None:
        """Let a running request leave; it may start again in the next step. ``drop_output``: of a
        step in flight, nothing that concerns the request is right."""

    def sort_running(self) -> None:
        """Put running requests in the order of their priorities as of now."""

    def most_blocks(self, request: Request) -> int:
        """Blocks that the request may come to hold."""

    def is_swapped_out(self, request: Request) -> bool:
        """Whether the request's KV waits in swap space."""

    def has_unfinished_requests(self) -> bool: ...


class StepHooks(Protocol):
    """Calls in each step of a scheduler, in this order; what is inherited does nothing."""

    def before_schedule(self) -> bool:
        """Get ready for a step; returns whether waiting requests may start in it."""
        return True

    def before_update(self, scheduled_tokens: int) -> None:
        """Learn that a step of so many tokens has ended, before its output is looked at."""
        return

    def after_update(self, scheduled_tokens: int) -> None:
        """Learn that a step has ended, after requests that are finished have left their blocks."""
        return

    def in_own_memory(self, request: Request) -> bool:
        """Whether the request's blocks are in this engine's memory."""
        return True

    def keeps_kv(self, request: Request) -> bool:
        """Whether the KV of a request that is being preempted has been kept already."""
        return False

    def on_free(self, request: Request) -> None:
        """Forget a request that is finished."""
        return
