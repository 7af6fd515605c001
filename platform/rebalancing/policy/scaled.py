"""The measurements that scaling is decided on: the models whose replicas come and go by load.

They are a part of what rebalancing measures (:class:`.snapshot.Measured`) which asks for less: no
profile of devices, and no rates of work, for which a replica has to be watched for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

from loomserve.platform.config.scaling import Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledReplica:
    """A replica that serves.

    Attributes:
        running: Requests in its batch.
        waiting: Requests in its queue.
        max_running: Requests that may run; 0: unknown.
        kv_share: Share of its KV blocks in use, those that it borrows among them.
        oldest_waiting_s: How long the oldest request has waited for its first token; 0: none does.
        tpot_s: Time of its steps, each of which is a token of all that run; 0: before the first.
        ready_at_s: When it served first.
        leaving: Whether it is drained, and will be ended.
        settled: Whether it takes nothing new, and has nothing open: neither requests nor loans.
    """

    id: str
    device: str
    running: int
    waiting: int
    max_running: int
    kv_share: float
    oldest_waiting_s: float
    tpot_s: float
    ready_at_s: float
    leaving: bool = False
    settled: bool = False

    @property
    def ongoing(self) -> int:
        return self.running + self.waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledModel:
    """A model whose load decides how many replicas it has.

    Attributes:
        most: Replicas that its devices allow.
        target: Replicas that there should be, those that leave among them.
        replicas: Those that serve.
        arrived_per_s: Requests a second that came to them; None: not measured yet.
        start_s: Time until one more would serve, as measured of those before.
    """

    name: str
    rules: Scaling
    most: int
    target: int
    replicas: tuple[ScaledReplica, ...]
    arrived_per_s: float | None = None
    start_s: float = 0.0

    @property
    def serving(self) -> tuple[ScaledReplica, ...]:
        """Replicas that take requests."""
        return tuple(each for each in self.replicas if not each.leaving)

    @property
    def leaving(self) -> tuple[ScaledReplica, ...]:
        return tuple(each for each in self.replicas if each.leaving)

    @property
    def kept(self) -> int:
        """Replicas that there should be once those that leave are gone."""
        return self.target - len(self.leaving)

    @property
    def ongoing(self) -> int:
        return sum(each.ongoing for each in self.replicas)
