"""Load-aware dispatch: BanaServe, algorithm 4-2."""

from __future__ import annotations

from collections.abc import Sequence

from loomserve.routers.base import Decision, Replica


def pick(replicas: Sequence[Replica], *, load_limit: float) -> Decision:
    """The least loaded replica if it is below the limit, else the one with the shortest queue.

    The least loaded is the first by (utilisation, queue length) (lines 5 and 7), the shortest
    queue the first by (queue length, utilisation) (line 12); what is still equal goes to the
    smallest id. The load is raised by the request's estimate (line 10) as the router books the
    request in the ledger, from which the next snapshot comes.

    A replica of unknown load, new or silent, comes after those of known load: it is taken below
    the limit only if none is known. Above the limit all compete by queue length, so a new replica
    relieves full ones at once, and a dead one gathers no more than the others have queued.
    """
    least = min(replicas, key=lambda r: (r.load is None, r.utilisation, r.queue_length, r.id))
    if least.utilisation < load_limit:
        return Decision(least.id, "least_loaded")
    shortest = min(replicas, key=lambda r: (r.queue_length, r.utilisation, r.id))
    return Decision(shortest.id, "shortest_queue")
