"""Which replicas take no requests any more, and for whom."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from loomserve.platform.fleet.messages import Heartbeat


@dataclass
class Drains:
    """Replicas, by their ids, that are drained.

    Attributes:
        replicas: Those that operators drain.
        devices: Of which all are drained.
        leaving: Those that are to be ended, and count among those that there are to be still.
        ending: Those that are ended, and do not count any more.
    """

    replicas: set[str] = field(default_factory=set)
    devices: frozenset[str] = frozenset()
    leaving: set[str] = field(default_factory=set)
    ending: set[str] = field(default_factory=set)

    def covers(self, heartbeat: Heartbeat) -> bool:
        """Whether a replica is drained."""
        if heartbeat.device in self.devices:
            return True
        return any(
            heartbeat.replica_id in each for each in (self.replicas, self.leaving, self.ending)
        )

    def has_left(self, replica_id: str) -> None:
        """Count a drained replica no more, which is about to be ended."""
        self.leaving.discard(replica_id)
        self.ending.add(replica_id)

    def forget(self, gone: Collection[str]) -> None:
        """Forget those that have ended."""
        self.leaving.difference_update(gone)
        self.ending.difference_update(gone)
