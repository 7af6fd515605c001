"""When a request would end on a replica, so that one that comes too late is refused at once."""

from __future__ import annotations

from dataclasses import dataclass

from loomserve.routers.base import Replica


@dataclass(frozen=True, slots=True)
class Finish:
    """Predicted seconds from now: until the request starts, and from there to its end."""

    wait_s: float
    run_s: float

    @property
    def total_s(self) -> float:
        return self.wait_s + self.run_s


def finish(replica: Replica, prompt_tokens: int, tokens: float) -> Finish | None:
    """When a request with an answer of so many ``tokens`` would end, at the replica's pace of late.

    First come, first served: the request starts as soon as enough others have ended. The replica
    runs ``max_running`` at once, or, if some wait, as many as it does now, since its memory is
    full; one ends every ``request_s`` over that number. Then come its prompt and its answer. A
    replica whose load is unknown, or where no request has ended yet, predicts nothing: None.
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
