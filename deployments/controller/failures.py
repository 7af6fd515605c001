"""When a model that has failed is tried again: not at once, and not for ever."""

from __future__ import annotations

from collections import Counter

from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.messages import Heartbeat
from loomserve.platform.fleet.registry import ModelRecord
from loomserve.platform.http.engine_errors import model_failed
from loomserve.platform.state import Presence

# A model that could not be loaded is tried again with the first request after so long, after four
# times as long, and so on; then, and where it does not answer, an operator has to say so.
_FAILED_S, _LONGER, _TRIES = 15.0, 4, 3


class Failures:
    """What became of models that were to be loaded; times are of the fleet's clock."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._failed_at: dict[str, float] = {}
        self._tries: Counter[str] = Counter()
        """How often requests have had a model tried again since it was ready last."""

    def note(self, name: str, now: float) -> None:
        """A model could not be loaded."""
        self._failed_at[name] = now

    def forget(self, name: str) -> None:
        """A model is ready, gone, or to be tried anew."""
        self._failed_at.pop(name, None)
        del self._tries[name]

    def takes(self, heartbeat: Heartbeat, now: float) -> bool:
        """Whether a replica's not answering is the model's failure, which is noted."""
        name = heartbeat.model.name
        if not heartbeat.problem or name not in self._fleet.registry:
            return False
        record = self._fleet.registry.record(name)
        goes = record.presence is not Presence.READY or record.unload_deadline is not None
        if goes or self.answers(name, now):
            return False
        self._fleet.registry.set_failure(name, heartbeat.problem)
        self._tries[name] = _TRIES
        return True

    def answers(self, name: str, now: float) -> bool:
        """Whether some replica of a model is there and has answered."""
        return any(each.heartbeat.answers for each in self._fleet.registry.live(name, now))

    def check(self, record: ModelRecord, now: float) -> None:
        """Let a model that could not be loaded be tried again for a request, if it is time.

        Raises:
            Unavailable: it is not.
        """
        name = record.model.name
        if record.failure is None or self.answers(name, now):
            return
        pause_s = _FAILED_S * _LONGER ** self._tries[name]
        too_soon = now - self._failed_at.setdefault(name, now) < pause_s
        if self._tries[name] >= _TRIES or too_soon:
            raise model_failed(name)
        del self._failed_at[name]
        self._tries[name] += 1
        self._fleet.registry.set_failure(name, None)
