"""Prediction of when a request would end on a replica, so that a late one is refused at once."""

from __future__ import annotations

from dataclasses import dataclass

from loomserve.routers.base import Replica


@dataclass(frozen=True, slots=True)
class Finish:
    """Predicted seconds: from now until the request starts, and from there to its end."""

    wait_s: float
    run_s: float

    @property
    def total_s(self) -> float:
        return self.wait_s + self.run_s


def finish(replica: Replica, prompt_tokens: int, tokens: float) -> Finish | None:
    """Predict when a request whose answer has ``tokens`` tokens would end, at the recent pace.

    First come, first served: it starts as soon as enough others have ended, one every ``request_s``
    divided by those that run at once: ``max_running``, or as many as now if some wait, since memory
    is full. None: the replica's load is unknown, or no request has ended on it yet.
    """
    if replica.load is None or replica.load.pace is None:
        return None
    pace = replica.load.pace
    places = replica.max_running
    if replica.load.waiting and replica.load.running:
        places = min(places, replica.load.running)
    ahead = max(0, replica.queue_length - places + 1)
    return Finish(
        wait_s=ahead * pace.request_s / places,
        run_s=prompt_tokens * pace.prefill_token_s + tokens * pace.output_token_s,
    )
