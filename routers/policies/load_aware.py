"""Load-aware dispatch: BanaServe, algorithm 4-2."""

from __future__ import annotations

from loomserve.routers.base import Candidates, Choice
from loomserve.routers.policy import RoutedRequest, RoutingPolicy


def pick(candidates: Candidates, *, load_limit: float) -> Choice:
    """The least loaded replica if it is below the limit, else the one with the shortest queue.

    The least loaded is the first by (utilisation, queue length) (lines 5 and 7), the shortest
    queue the first by (queue length, utilisation) (line 12); what is still equal goes to the
    smallest id. The load is raised by the request's estimate (line 10) as the router books the
    request in the ledger, which the table follows.

    A replica of unknown load, new or silent, is taken below the limit only if none is known. Above
    it all compete by queue length, so a new replica relieves full ones at once, and a dead one
    gathers no more than the others have queued.
    """
    utilisation, _, row = next(candidates.by_load())
    if utilisation < load_limit:
        return Choice(candidates.place(row), "least_loaded")
    *_, row = next(candidates.by_queue())
    return Choice(candidates.place(row), "shortest_queue")


class LoadAware(RoutingPolicy):
    def pick(self, candidates: Candidates, request: RoutedRequest) -> Choice:
        return pick(candidates, load_limit=self.model.load_limit)
