"""When a controller has heard of too few replicas to say which are gone."""

from __future__ import annotations

from loomserve.platform.fleet.registry import HEARTBEAT_EXPIRES_S

# After a controller's end its replicas find the next one; after a node's end that takes longest.
_LEARNS_S = 20.0


class ReplicaLearning:
    """Whether a controller still learns of replicas, whose heartbeats come to it one by one."""

    def __init__(self, now: float) -> None:
        self._until = self._seen_at = now

    def begin(self, now: float) -> None:
        """It knows nobody."""
        self._until = now + _LEARNS_S

    def lasts(self, now: float) -> bool:
        """Asked at each look at the fleet: one that stood still meanwhile has heard of nobody."""
        if now - self._seen_at > HEARTBEAT_EXPIRES_S:
            self.begin(now)
        self._seen_at = now
        return now < self._until

    def end(self) -> None:
        """It has heard of all that there should be."""
        self._until = self._seen_at
