"""Has models come and go: what is asked for is made ready, what is idle sleeps or ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from loomserve.deployments.controller.presence_mover import PresenceMover
from loomserve.platform.base.errors import Conflict, LoomserveError, Unavailable, UnknownModel
from loomserve.platform.base.periodic import every
from loomserve.platform.config import Config, Model
from loomserve.platform.devices.memory import gpus_of, is_on_gpus
from loomserve.platform.elastic.observe import ElasticObserver
from loomserve.platform.elastic.policy.decide import decide
from loomserve.platform.elastic.policy.growth import grow
from loomserve.platform.elastic.policy.snapshot import HOST, ElasticDecision, NoRoom
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.messages import Heartbeat
from loomserve.platform.fleet.snapshot import FleetModel, ModelRecord
from loomserve.platform.http.engine_errors import model_failed
from loomserve.platform.models import catalog
from loomserve.platform.placement import model_files
from loomserve.platform.state import ModelEvents, Presence

_log = logging.getLogger("ray.serve")

_TICK_S = 0.5
# A gateway whose requests wait for a model says so every two seconds.
_DEMAND_EXPIRES_S = 6.0
# Replicas that are there are told again, and Serve is asked for those that are not.
_RETRY_S, _PLACE_AGAIN_S = 1.0, 10.0
# One that wakes or falls asleep may do the other soon, and Serve's replicas follow later.
_FOLLOW_S = 5.0
# A model that could not be loaded is tried again with the first request after so long, after four
# times as long, and so on; then, and where it does not answer, an operator has to say so.
_FAILED_S, _LONGER, _TRIES = 15.0, 4, 3


class ModelPresence:
    """Carries out which models are ready, asleep or unloaded, for requests and for operators."""

    def __init__(
        self,
        config: Config,
        base: Path,
        fleet: Fleet,
        mover: PresenceMover,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``base`` is the folder to which sources are relative."""
        self._base, self._fleet, self._mover, self._clock = base, fleet, mover, clock
        self._rules = config.elastic
        budgets = {each.name: float(each.memory) for each in config.devices if each.memory}
        budgets |= {
            each.name + HOST: float(each.host_memory) for each in config.devices if each.host_memory
        }
        self._gpus = gpus_of(config.devices)
        self._observer = ElasticObserver(fleet, budgets, mover.wake_s, self._gpus)
        self._sizes_matter = bool(budgets)
        self._demands: dict[str, float] = {}
        self._waiting_at: Mapping[str, str] = {}
        self._asked_at: dict[str, float] = {}
        self._failures = Failures(fleet)
        self._tried_at: dict[str, float] = {}
        self._unheld_since: dict[str, float] = {}

    async def run(self) -> None:
        try:
            await every(_TICK_S, self._look, failed=_log.exception)
        finally:
            await self._mover.close()

    def events(self, limit: int) -> ModelEvents:
        """The latest changes of what models are to be, the newest first."""
        latest = itertools.islice(reversed(self._mover.events), limit)
        return ModelEvents(events=tuple(latest))

    def observe(self, heartbeat: Heartbeat) -> None:
        """Keep an event if a replica's heartbeat is the first to say that it ends."""
        before = self._fleet.registry.find(heartbeat.replica_id)
        if heartbeat.ends and not (before is not None and before.heartbeat.ends):
            why = f"replica {heartbeat.replica_id} kills its engine: {heartbeat.ends}"
            self._mover.note(heartbeat.model.name, Presence.READY, why)

    def take_problem(self, heartbeat: Heartbeat) -> None:
        """Have a model fail whose replica does not answer, if no other one does."""
        if self._failures.takes(heartbeat, self._clock()):
            name = heartbeat.model.name
            _log.error("model %s has failed: %s", name, heartbeat.problem)
            self._give_up(name, "it does not answer")

    # What gateways and operators ask for

    async def want(self, name: str) -> None:
        """Requests wait for a model: have it come, or say why it does not. Raises UnknownModel if
        there is no such model, or it is being unloaded; Unavailable if there is no room for it,
        or it cannot be loaded."""
        record = self._record(name)
        await self._learn_size(record.model)
        now = self._clock()
        self._failures.check(record, now)
        if self._demanded(name) is None:
            return
        # Who has requests may have had its last one since its heartbeat.
        await self._mover.ask_for_loads()
        refused = self._demanded(name)
        if refused is not None:
            raise Unavailable(
                f"there is no room for model {name!r} now: {refused.why}",
                reason="no_room",
                retry_after_s=refused.retry_after_s,
            )

    async def begin(self, model: Model) -> None:
        """Have a model come that was loaded over HTTP, if there is room and it names no devices."""
        if not model.is_placed and model.start != "on_demand":
            with contextlib.suppress(Unavailable):  # then the first request has it come
                await self.want(model.name)

    def _demanded(self, name: str) -> NoRoom | None:
        """Decide with a demand for this model; its refusal, if it is refused."""
        now = self._clock()
        self._demands.setdefault(name, now)
        self._asked_at[name] = now
        decision = self._decide(now)
        return next((each for each in decision.refused if each.model == name), None)

    async def set(self, name: str, presence: Presence) -> None:
        """Have a model be ready, asleep or unloaded, as an operator wishes. Raises UnknownModel if
        there is no such model, or it is being unloaded; Unavailable if there is no room for it;
        Conflict if it has requests, or no engine that could sleep."""
        record = self._record(name)
        if presence is Presence.READY:
            await self._begin_anew(record)
            await self.want(name)
            return
        if presence is Presence.ASLEEP and record.presence is Presence.UNLOADED:
            raise Conflict(f"model {name!r} has no engine that could sleep: wake it first")
        self._demands.pop(name, None)
        if record.presence is not presence:
            await self._mover.change(name, presence, "an operator put it away")

    def room_for(self, name: str, device: str) -> str:
        """Have room for one more replica of a model on a device; why there is none yet, or ``""``.
        Models that are idle for long may go for it."""
        now = self._clock()
        snapshot = self._observer.snapshot(now, self._demands, self._mover.moving)
        growth = grow(snapshot, self._rules, name, device)
        for change in growth.changes:
            self._mover.begin(change.model, change.presence, change.why)
        return growth.why

    def _record(self, name: str) -> ModelRecord:
        record = self._fleet.registry.record(name)
        if record.unload_deadline is not None:
            raise UnknownModel(f"The model {name!r} is being unloaded.", param="model")
        return record

    async def _begin_anew(self, record: ModelRecord) -> None:
        """Try a model that has failed again at once, as an operator wishes."""
        name = record.model.name
        if record.failure is None or self._fleet.registry.model(name, self._clock()).answers:
            return
        # What Serve has left of it would be taken for what is wished.
        await self._mover.change(name, Presence.UNLOADED, "an operator has it loaded anew")
        self._failures.forget(name)
        self._fleet.registry.set_failure(name, None)

    async def _learn_size(self, model: Model) -> None:
        if self._sizes_matter and not self._observer.sizes.knows(model.name):
            on_gpus = is_on_gpus(model, self._gpus)
            size = await asyncio.to_thread(_held_bytes, model, self._base, on_gpus=on_gpus)
            self._observer.sizes.set_weights(model.name, size)

    # What is decided

    async def _look(self) -> None:
        for model in self._fleet.registry.models:
            await self._learn_size(model)
        now = self._clock()
        for name, asked_at in list(self._asked_at.items()):
            if now - asked_at > _DEMAND_EXPIRES_S or name not in self._fleet.registry:
                self._demands.pop(name, None)
                del self._asked_at[name]
        self._give_up_failed(now)
        self._decide(now)
        self._reconcile(now)

    def _decide(self, now: float) -> ElasticDecision:
        for name in list(self._demands):
            if name not in self._fleet.registry or self._is_ready(name, now):
                del self._demands[name]
                self._failures.forget(name)
        moving = self._mover.moving
        snapshot = self._observer.snapshot(now, self._demands, moving, self._waiting_at)
        decision = decide(snapshot, self._rules)
        self._waiting_at = decision.waiting_at
        for refused in decision.refused:
            self._demands.pop(refused.model, None)
        for change in decision.changes:
            if change.device is not None:
                self._mover.begin_on(change.device, change)
            else:
                self._mover.begin(change.model, change.presence, change.why, drains=change.drains)
        return decision

    def _give_up_failed(self, now: float) -> None:
        """Free what was kept for models that could not be loaded."""
        for record in self._fleet.registry.records:
            name = record.model.name
            failed = record.failure is not None and record.presence is Presence.READY
            if failed and record.on_demand and not self._fleet.registry.live(name, now):
                self._failures.note(name, now)
                self._give_up(name, "it could not be loaded")

    def _give_up(self, name: str, why: str) -> None:
        # A demand from before would have it loaded again at the next look.
        self._demands.pop(name, None)
        self._mover.begin(name, Presence.UNLOADED, why)

    def _is_ready(self, name: str, now: float) -> bool:
        model = self._fleet.registry.model(name, now)
        is_to_be = model.record.presence is Presence.READY and name not in self._mover.moving
        return is_to_be and model.settled

    def _reconcile(self, now: float) -> None:
        """What replicas are not, although they are to be, is done anew: one was started again, a
        call was lost, or an engine was woken by a request."""
        for model in self._fleet.registry.snapshot(now).models:
            name, record = model.name, model.record
            if name in self._mover.moving or record.unload_deadline is not None:
                continue
            if model.settled:
                self._tried_at.pop(name, None)
                self._follow(model, now)
            elif self._is_due(record, bool(model.replicas), now):
                self._tried_at[name] = now
                self._mover.begin(name, record.presence, record.why)

    def _follow(self, model: FleetModel, now: float) -> None:
        """Have Serve start replicas of engines that serve, and end those of others."""
        if model.is_held:
            self._unheld_since.pop(model.name, None)
        elif now - self._unheld_since.setdefault(model.name, now) > _FOLLOW_S:
            del self._unheld_since[model.name]
            self._mover.follow(model.name)

    def _is_due(self, record: ModelRecord, has_replicas: bool, now: float) -> bool:
        """Whether it is time to try again; Serve starts by itself what merely has ended."""
        if record.presence is Presence.ASLEEP and not has_replicas:
            # Its engine has ended, unless a new controller has not heard of it yet.
            return now - self._tried_at.setdefault(record.model.name, now) >= _PLACE_AGAIN_S
        comes = record.presence is Presence.READY
        if comes and not (record.on_demand and record.failure is None):
            return False
        pause_s = _RETRY_S if has_replicas else _PLACE_AGAIN_S
        return now - self._tried_at.get(record.model.name, record.since) >= pause_s


class Failures:
    """What became of models that were to be loaded; times are of the fleet's clock."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._failed_at: dict[str, float] = {}
        self._tries: Counter[str] = Counter()
        """How often requests have had a model tried again since it was ready last."""

    def note(self, name: str, now: float) -> None:
        self._failed_at[name] = now

    def forget(self, name: str) -> None:
        """A model is ready, gone, or to be tried again."""
        self._failed_at.pop(name, None)
        del self._tries[name]

    def takes(self, heartbeat: Heartbeat, now: float) -> bool:
        """Whether a replica's not answering is the model's failure, which is noted."""
        name = heartbeat.model.name
        if not heartbeat.problem or name not in self._fleet.registry:
            return False
        record = self._fleet.registry.record(name)
        goes = record.presence is not Presence.READY or record.unload_deadline is not None
        if goes or self._fleet.registry.model(name, now).answers:
            return False
        self._fleet.registry.set_failure(name, heartbeat.problem)
        self._tries[name] = _TRIES
        return True

    def check(self, record: ModelRecord, now: float) -> None:
        """Let a failed model be tried again for a request; raises Unavailable if it is too soon."""
        name = record.model.name
        if record.failure is None or self._fleet.registry.model(name, now).answers:
            return
        pause_s = _FAILED_S * _LONGER ** self._tries[name]
        too_soon = now - self._failed_at.setdefault(name, now) < pause_s
        if self._tries[name] >= _TRIES or too_soon:
            raise model_failed(name)
        del self._failed_at[name]
        self._tries[name] += 1
        self._fleet.registry.set_failure(name, None)


def _held_bytes(model: Model, base: Path, *, on_gpus: bool) -> int:
    """What an engine of a model holds of its weights; 0 where that cannot be told."""
    try:
        path = catalog.resolve(model.source, base, revision=model.revision)
        return model_files.held_bytes(path, model, on_gpus=on_gpus)
    except (LoomserveError, OSError):
        return 0
