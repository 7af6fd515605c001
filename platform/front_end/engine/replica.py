"""A replica as a front end knows it: its connection, what it told, and who is open on it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from vllm.v1.engine import EngineCoreReadyResponse, EngineCoreRequestType
from vllm.v1.serial_utils import MsgpackEncoder

from loomserve.platform.engine.process.attentive_clock import PeerClock, ToldWork, Work
from loomserve.platform.front_end.engine.connection import EngineConnection
from loomserve.platform.front_end.engine.open_requests import OpenRequest
from loomserve.platform.front_end.policy.continuation import (
    ContinuationBounds,
    Loss,
    ReplicaView,
    loss,
)
from loomserve.platform.front_end.policy.send_times import SendTimes
from loomserve.platform.run.engine_address import EngineAddress
from loomserve.platform.state.told_load import ToldLoad

Clock = Callable[[], float]

# An engine that answers and steps more often than that is not looked at.
_LATE_S = 1.0


class ReplicaEvents(Protocol):
    """What a replica tells the client that has it."""

    def on_connected(self, replica: ConnectedReplica) -> None: ...

    def on_outputs(self, replica: ConnectedReplica, frames: Sequence[Any]) -> None: ...

    def on_loaded(
        self, replica: ConnectedReplica, load: ToldLoad, counted_until: float
    ) -> None: ...

    def on_gone(self, replica: ConnectedReplica, *, ended: bool) -> None: ...

    def on_forgotten(self, replica: ConnectedReplica) -> None: ...


class ConnectedReplica:
    """One replica of a model, for as long as the platform has it."""

    def __init__(
        self,
        replica_id: str,
        index: int,
        address: EngineAddress,
        identity: bytes,
        events: ReplicaEvents,
        clock: Clock,
    ) -> None:
        """``index`` is its number in statistics, unique in this front end."""
        self.id = replica_id
        self.index = index
        self.open: dict[str, OpenRequest] = {}
        """By their id on the wire."""
        self.facts: EngineCoreReadyResponse | None = None
        """What the engine said of itself; None: it does not take requests."""
        self.draining = False
        self.load = (0, 0)
        """Requests that it has running and waiting, whoever sent them, as it told last."""
        self.empty = asyncio.Event()
        self.empty.set()
        self._events = events
        self._told = ToldWork(clock)
        self._clock = PeerClock(clock, self._work)
        self._heard_at = self._stepped_at = self._clock()
        self.steps = -1
        """Of the engine since its start, as it told last."""
        self._hangs = False
        self._unwanted: list[str] = []
        self._sends = SendTimes()
        self.connection = EngineConnection(identity, address, self)

    def tick(self) -> None:
        """Have its clock go on; called a few times a second."""
        now = self._clock()
        late = now - self._heard_at > _LATE_S or (
            bool(self.open) and now - self._stepped_at > _LATE_S
        )
        self._clock.tick(late=late)

    def _work(self) -> Work | None:
        process = self.connection.process
        return process.work() if process is not None else self._told()

    def usable(self, bounds: ContinuationBounds) -> bool:
        """Whether it may get requests."""
        if self.facts is None:
            return False
        # Each choice of a replica asks all of them, and nearly all are well.
        now = self._clock()
        is_well = (
            not self.draining
            and now - self._heard_at <= bounds.silence_s
            and now - self._stepped_at <= bounds.hang_s
        )
        return is_well or self.loss(bounds) is None

    def loss(self, bounds: ContinuationBounds) -> Loss | None:
        """Why its requests have to leave it, if they have to."""
        # Its requests leave a loop that hangs, which is not well for that.
        busy = len(self.open) or int(self._hangs)
        view = ReplicaView(self._heard_at, self._stepped_at, busy, self.draining)
        lost = loss(view, self._clock(), bounds)
        self._hangs = self._hangs or lost is Loss.HUNG
        return lost

    def add(self, request: OpenRequest, frames: Sequence[Any]) -> bool:
        """Send a request; False: its connection ends."""
        if not self.connection.send((EngineCoreRequestType.ADD.value, *frames)):
            return False
        self._sends.sent(time.monotonic())
        if not self.open:
            self._stepped_at = self._clock()
        self.open[request.wire_id] = request
        self.empty.clear()
        return True

    def drop(self, wire_id: str, *, abort: bool) -> None:
        """A request has ended or leaves; with ``abort`` the engine is told by :meth:`flush`."""
        self.open.pop(wire_id, None)
        if not self.open:
            self.empty.set()
        if abort:
            self._unwanted.append(wire_id)

    def flush(self, encoder: MsgpackEncoder) -> None:
        """Tell the engine what it need not compute any more."""
        if self._unwanted:
            unwanted, self._unwanted = self._unwanted, []
            self.connection.send((EngineCoreRequestType.ABORT.value, *encoder.encode(unwanted)))

    # What its connection tells

    def ready(self, response: EngineCoreReadyResponse) -> None:
        self._heard_at = self._stepped_at = self._clock()
        self._hangs = False
        self._sends.begin_anew()
        forgotten, self.facts = self.facts is not None, response
        if forgotten:
            self._events.on_forgotten(self)
        else:
            self._events.on_connected(self)

    def beat(self, steps: int, running: int, waiting: int, cpu_s: float | None = None) -> None:
        if cpu_s is not None:
            self._told.told(cpu_s)
        self._heard_at = self._clock()
        self.load = running, waiting
        if steps != self.steps or not running + waiting:
            self._hangs = False
        if steps != self.steps or not (self.open or self._hangs):
            self.steps, self._stepped_at = steps, self._heard_at

    def stopped(self) -> None:
        # Silence that need not be waited for, until it beats.
        self._heard_at = -math.inf

    def outputs(self, frames: Sequence[Any]) -> None:
        self._heard_at = self._clock()
        self._events.on_outputs(self, frames)

    def loaded(self, load: ToldLoad) -> None:
        self.load = load.running, load.waiting
        until = self._sends.counted(load.counted, time.monotonic())
        self._events.on_loaded(self, load, until)

    def gone(self, *, ended: bool) -> None:
        self.facts = None
        self._unwanted.clear()
        self._events.on_gone(self, ended=ended)


class UsableReplicas:
    """Ids of a model's replicas that may get requests, as one set until the next look.

    They are looked at when one comes or goes and at each watch, which also has requests leave those
    that are not well; to look at a thousand for each request takes longer than to choose.
    """

    def __init__(
        self,
        replicas: Mapping[str, ConnectedReplica],
        bounds: ContinuationBounds,
    ) -> None:
        """``replicas`` are those that there are, whatever their state."""
        self._replicas, self._bounds = replicas, bounds
        self._ids: frozenset[str] = frozenset()

    def look(self) -> None:
        self._ids = frozenset(
            each.id for each in self._replicas.values() if each.usable(self._bounds)
        )

    def ids(self) -> frozenset[str]:
        if not self._ids:
            self.look()
        return self._ids
