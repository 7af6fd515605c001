"""Makes models ready, asleep or unloaded: calls to their replicas, and Serve's applications."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Set
from typing import Any

from loomserve.deployments.controller.models import ModelLifecycle
from loomserve.deployments.controller.replica_calls import ReplicaCalls, ReplicaUnreachableError
from loomserve.platform.base.errors import Conflict
from loomserve.platform.elastic.policy.snapshot import PresenceChange
from loomserve.platform.fleet.fleet import Fleet
from loomserve.platform.fleet.snapshot import ReplicaRecord
from loomserve.platform.state import ModelEvent, Presence

_log = logging.getLogger("ray.serve")

# Until then gateways know that a model goes, and their requests wait.
_GATEWAYS_KNOW_S = 0.1
# Loans end with heartbeats; then an engine that lent may sleep.
_LOANS_END_S = 10.0
_POLL_S = 0.5
_EVENTS_KEPT = 1000


class PresenceMover:
    """Carries out one change of a model at a time; a later one takes the place of those before."""

    def __init__(
        self,
        fleet: Fleet,
        models: ModelLifecycle,
        calls: ReplicaCalls,
        publish: Callable[[], Awaitable[None]],
        drain_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            publish: tells gateways.
            drain_s: so long a model that is to go may go on with the requests that it has.
        """
        self._fleet, self._models, self._calls = fleet, models, calls
        self._publish, self._drain_s, self._clock = publish, drain_s, clock
        self.wake_s: dict[str, float] = {}
        """How long models took to come back from sleep, each the last time."""
        self.events: deque[ModelEvent] = deque(maxlen=_EVENTS_KEPT)
        """What models were to be, the newest last."""
        self._moving: Counter[str] = Counter()
        self._ready_since: dict[str, float] = {}
        self._busy: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def moving(self) -> Set[str]:
        """Models whose change is under way."""
        return {name for name, count in self._moving.items() if count}

    def begin(self, name: str, presence: Presence, why: str, *, drains: bool = False) -> None:
        """Begin a change in the background; with ``drains`` it waits for the model's requests."""
        self._do(self.change(name, presence, why, drains=drains))

    def begin_on(self, device: str, change: PresenceChange) -> None:
        self._fleet.registry.record(change.model).move((device,), change.why_there)
        self.begin(change.model, change.presence, change.why)

    def change(
        self, name: str, presence: Presence, why: str, *, drains: bool = False
    ) -> Coroutine[Any, Any, None]:
        """Set what a model is to be; returns the work that makes it so. The work raises
        ``Conflict``, and the model stays, if it has requests, for too long with ``drains``."""
        _log.info("model %s is to be %s: %s", name, presence, why)
        record = self._fleet.registry.record(name)
        if record.presence is Presence.READY:
            self._ready_since[name] = record.since
        if record.presence is not presence:
            self.note(name, presence, why)
        self._fleet.registry.set_presence(name, presence, self._clock(), why)
        self._moving[name] += 1
        return self._carry_out(name, presence, drains)

    def follow(self, name: str) -> None:
        """Have Serve's replicas be those of the engines that serve."""
        self._do(self._models.place(name))

    async def ask_for_loads(self) -> None:
        """Refresh the loads of replicas that had requests."""
        now = self._clock()
        busy = [
            each
            for each in self._fleet.registry.snapshot(now).replicas
            if each.heartbeat.stats.load is None or not each.heartbeat.stats.load.idle_s
        ]
        await asyncio.gather(*(self._ask_for_load(each) for each in busy))

    async def _ask_for_load(self, replica: ReplicaRecord) -> None:
        with contextlib.suppress(ReplicaUnreachableError):
            stats = await self._calls.stats(replica.heartbeat.address)
            replica = self._fleet.registry.find(replica.id) or replica
            replica.note_stats(stats.received(self._clock()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._calls.close()

    async def _carry_out(self, name: str, presence: Presence, drains: bool) -> None:
        """Raises Conflict if it has requests, and stays."""
        try:
            await self._publish()
            async with self._busy[name]:
                if self._is_to_be(name, presence):
                    await self._move(name, presence, drains)
        finally:
            self._moving[name] -= 1
            await self._publish()

    async def _move(self, name: str, presence: Presence, drains: bool) -> None:
        if presence is Presence.READY:
            await self._wake(name)
            if not self._fleet.registry.model(name, self._clock()).settled:
                await self._models.place(name)
            return
        await asyncio.sleep(_GATEWAYS_KNOW_S)
        try:
            await self._put_to_sleep(name, presence, drains)
        except Conflict as error:
            if presence is Presence.UNLOADED and not self._has_requests(name):
                _log.info("model %s ends without sleeping first: %s", name, error)
            else:
                self._stay(name, str(error))
                raise
        if not self._is_to_be(name, presence):
            return
        if presence is Presence.UNLOADED:
            await self._models.place(name)
            self._fleet.registry.forget_replicas(name)
        elif not self._fleet.registry.live(name, self._clock()):
            # Its engine has ended while it slept; the next one is put to sleep once it is there.
            await self._models.place(name)

    def _is_to_be(self, name: str, presence: Presence) -> bool:
        registry = self._fleet.registry
        return name in registry and registry.record(name).presence is presence

    def _has_requests(self, name: str) -> bool:
        live = self._fleet.registry.live(name, self._clock())
        return any(each.heartbeat.in_flight for each in live)

    def _stay(self, name: str, why: str) -> None:
        if name in self._fleet.registry:
            # It has not come anew.
            since = self._ready_since.get(name, self._clock())
            self._fleet.registry.set_presence(name, Presence.READY, since, why)
            self.note(name, Presence.READY, f"it stays: {why}")

    def note(self, name: str, presence: Presence, why: str) -> None:
        self.events.append(ModelEvent(at=time.time(), model=name, presence=presence, why=why))

    async def _wake(self, name: str) -> None:
        began = self._clock()
        replicas = self._fleet.registry.live(name, began)
        asleep = [each for each in replicas if each.asleep]
        for each in asleep:
            try:
                await self._calls.set_awake(each.heartbeat.address, True)
            except (Conflict, ReplicaUnreachableError) as error:
                # Serve starts another in the place of one that has ended.
                _log.warning("replica %s does not wake: %s", each.id, error)
            else:
                self._note_asleep(each.id, False)
        if asleep:
            self.wake_s[name] = self._clock() - began
            await self._publish()

    async def _put_to_sleep(self, name: str, presence: Presence, drains: bool) -> None:
        """Raises Conflict if a replica has requests, or cannot sleep."""
        began = self._clock()
        for each in self._fleet.registry.live(name, began):
            while self._is_to_be(name, presence):
                try:
                    await self._calls.set_awake(each.heartbeat.address, False)
                except ReplicaUnreachableError as error:
                    _log.warning("replica %s cannot be asked to sleep: %s", each.id, error)
                except Conflict:
                    if self._clock() - began > self._patience_s(name, drains):
                        raise
                    await asyncio.sleep(_POLL_S)
                    continue
                else:
                    self._note_asleep(each.id, True)
                break

    def _patience_s(self, name: str, drains: bool) -> float:
        """How long replicas may refuse to sleep."""
        if drains and self._has_requests(name):
            return self._drain_s
        return _LOANS_END_S if self._takes_part_in_loans(name) else -1.0

    def _note_asleep(self, replica_id: str, asleep: bool) -> None:
        # It may have sent a heartbeat meanwhile, of which there is another record.
        replica = self._fleet.registry.find(replica_id)
        if replica is not None:
            replica.note_asleep(asleep)

    def _takes_part_in_loans(self, name: str) -> bool:
        live = self._fleet.registry.live(name, self._clock())
        return any(each.heartbeat.lent or each.heartbeat.loans for each in live)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Conflict as error:
        _log.info("a model stays as it is: %s", error)
    except Exception as error:
        _log.error("a model could not be changed", exc_info=error)
