"""The input and output of routing policies: columns of candidates in, a choice among them out.

A policy is filter → score → pick: :meth:`loomserve.routers.table.ReplicaTable.candidates` filters
and scores, and the policy picks (:class:`loomserve.routers.policy.RoutingPolicy`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loomserve.platform.state import ReplicaLoad

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The replicas that may take a request: columns, with a place for each in the order of ids.

    The columns may be the table's own: they hold until the next report or booking, and nobody
    writes to them.
    """

    utilisation: Floats
    """BanaServe's U = C/C_max + M/M_max (eq. 4-33), of requests and of KV cache.

    The paper's C is what the hardware does, hence U ≤ 2. Here C is demand: requests waiting beyond
    those that run at once raise U above 2, or a flooded replica would pass for a full one.
    """
    queue_length: Ints
    """Requests running or waiting."""
    known: Bools
    """Whether there is a load report that is not too old to count."""
    kv_capacity_tokens: Ints
    """Tokens that its KV cache holds; 0 until it has said."""
    rows: Ints
    """Their rows in the table."""

    @property
    def some_unknown(self) -> bool:
        """Whether only some loads are known, so that those of the others are not compared."""
        return 0 < int(np.count_nonzero(self.known)) < len(self.known)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Choice:
    """A place among the candidates, and why."""

    place: int
    reason: str
    """Label of ``loomserve_route_decisions_total``."""


@dataclass(frozen=True, slots=True)
class Replica:
    """The chosen replica as its router saw it, without the request."""

    id: str
    load: ReplicaLoad | None = None
    """The last report; None: there is none, or it is too old to count."""
    max_running: int = 1
    """Requests the engine runs at once (``max_num_seqs``); 1 until it has said."""
    kv_capacity_tokens: int | None = None
    """Tokens that its KV cache holds; None until it has said."""
    queue_length: int = 0
    """Requests running or waiting."""


@dataclass(frozen=True, slots=True)
class Decision:
    replica_id: str
    reason: str
    """Label of ``loomserve_route_decisions_total``."""


def least(*columns: Floats | Ints) -> int:
    """The first place of the least value in the first column; later columns tell ties apart.

    All policies that take the best take it here, and nowhere else.
    """
    first, *others = columns
    # Of a thousand, argmin takes half of the time of min.
    ties = np.flatnonzero(first == first[first.argmin()])
    for column in others:
        if len(ties) == 1:
            break
        values = column[ties]
        ties = ties[values == values[values.argmin()]]
    return int(ties[0])
