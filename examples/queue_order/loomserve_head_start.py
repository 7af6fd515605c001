"""First come, first served, with a head start for requests that are short beside others."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from loomserve.platform.scheduling.policy.queue import QueuedRequest, QueuePolicy


class HeadStart(QueuePolicy):
    """Remembers how long requests were; a short one passes those that came little earlier."""

    class Options(QueuePolicy.Options):
        head_start_s: float = Field(10.0, gt=0, description="By which short requests came sooner.")

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.mean_tokens = 0.0

    def priority(self, request: QueuedRequest, now: float) -> float:
        short = request.tokens < self.mean_tokens
        return (self.options.head_start_s if short else 0.0) - request.arrived_s

    def ended(self, request: QueuedRequest) -> None:
        mean = self.mean_tokens or request.tokens
        self.mean_tokens = mean + 0.1 * (request.tokens - mean)
