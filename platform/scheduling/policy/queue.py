"""A queue order: who is served first in an engine, and preempted last. Pure.

All times are seconds of one clock.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from loomserve.platform.config.policies import PolicyOptions


class QueuedRequest(NamedTuple):
    """A request as its queue sees it, waiting or running.

    Attributes:
        arrived_s: When it entered the queue for the first time.
        tokens: Prompt tokens and predicted answer tokens; without a prediction, those that it has
            generated. At least 1.
        left: Tokens still to be computed until it ends; without a prediction, the most that it may
            generate are assumed.
        left_s: Predicted time until it ends, once it runs; 0 where nothing predicts its length, or
            the order does not ask for it.
        deadline_s: When its client wants to have the whole answer, if it said so.
        background: It comes after all requests that are not, whatever their priorities.
    """

    arrived_s: float
    tokens: int
    left: int
    left_s: float = 0.0
    deadline_s: float | None = None
    background: bool = False


class QueuePolicy:
    """A rule that gives requests priorities, and what it keeps for that.

    Each engine makes one, in its own process. It is asked in every step of the scheduler, for each
    request that runs and for some that wait, so it takes microseconds. It reads no clock.
    """

    class Options(PolicyOptions):
        """Reads ``scheduling.queue_options``; an order that takes some has its own."""

    as_they_came: ClassVar[bool] = False
    """The engine keeps vLLM's own order, in which what was preempted stands first; priorities only
    say who starts where some may not."""
    asks_left_s: ClassVar[bool] = False
    """Whether it looks at ``left_s``, which is predicted for such orders only."""

    def __init__(self, options: Any) -> None:
        self.options = options

    def priority(self, request: QueuedRequest, now: float) -> float:
        """The greatest is served first and preempted last."""
        raise NotImplementedError

    def ended(self, request: QueuedRequest) -> None:
        """Note that a request has left the engine, as it was at its end."""
