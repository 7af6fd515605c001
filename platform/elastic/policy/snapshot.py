"""What the coming and going of models is decided on, and the decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loomserve.platform.state import Presence

HOST = "/host"
"""After the name of a GPU: the memory of its host that is there for engines on it."""


@dataclass(frozen=True)
class ElasticModel:
    """A model as the policy sees it; seconds are ages, bytes those of one device.

    A model on GPUs takes memory of their hosts, too, and more of it asleep, with its weights there,
    than ready. Both memories of each device are its pools.

    Attributes:
        presence: What it is to be.
        settled: Whether it is that already.
        since_s: For how long it has been so; while it is not settled, for how long it is to be.
        idle_s: For how long it has had no request; 0: it has some.
        returns_s: Mean time between its uses; None: unknown.
        devices: Where its replicas are, or come.
        choices: Devices of which it gets one if it is loaded now; none: those above.
        heat: Share of the last minute in which it had requests.
        held_bytes: What it takes now, and until it is settled.
        host_held_bytes: What it takes now of the host of a GPU.
        host_bytes: What it takes of it, by what it is; empty: it is on no GPU.
        wake_s: How long it takes to come back from sleep.
        pinned: Whether nobody may put it away.
        sleep_after_s: It sleeps after so long without requests; None: it does not.
        unload_after_s: Its engines end after so long without requests; None: they do not.
    """

    name: str
    presence: Presence
    settled: bool
    since_s: float
    idle_s: float
    devices: tuple[str, ...]
    held_bytes: float
    ready_bytes: float
    asleep_bytes: float
    wake_s: float
    load_s: float
    returns_s: float | None = None
    can_sleep: bool = True
    pinned: bool = False
    choices: tuple[str, ...] = ()
    heat: float = 0.0
    sleep_after_s: float | None = None
    unload_after_s: float | None = None
    host_held_bytes: float = 0.0
    host_bytes: Mapping[Presence, float] = field(default_factory=dict)

    @property
    def pools(self) -> tuple[str, ...]:
        """Its devices, and their hosts as far as it takes memory of those."""
        hosts = [device + HOST for device in self.devices if self.host_bytes]
        return (*self.devices, *hosts)

    @property
    def may_go(self) -> bool:
        """Whether it can be put away at all, whatever its requests and whoever asks for it."""
        return self.settled and not self.pinned and self.presence is not Presence.UNLOADED

    @property
    def away_s(self) -> float:
        """How long it will presumably not be asked for. One that has been idle for longer than
        usual stays so for about as long again."""
        return max(self.idle_s, self.returns_s or 0.0)

    def held_in(self, pool: str) -> float:
        """What it takes of one of its pools now."""
        return self.host_held_bytes if pool.endswith(HOST) else self.held_bytes

    def bytes_as(self, presence: Presence, pool: str) -> float:
        """What it takes of one of its pools once it is so."""
        if pool.endswith(HOST):
            return self.host_bytes.get(presence, 0.0)
        match presence:
            case Presence.READY:
                return self.ready_bytes
            case Presence.ASLEEP:
                return self.asleep_bytes
            case _:
                return 0.0


@dataclass(frozen=True)
class ModelDemand:
    """Requests that wait for a model, the first of them for ``waited_s``. ``device``: where others
    go already so that it may come; None: nowhere."""

    model: str
    waited_s: float
    device: str | None = None


@dataclass(frozen=True)
class ElasticSnapshot:
    """All models that are not being removed, demands in the order in which they came (one a model),
    and bytes that models may take together, by pool; other pools have no bound."""

    models: Sequence[ElasticModel]
    demands: Sequence[ModelDemand]
    budgets: Mapping[str, float]


@dataclass(frozen=True)
class PresenceChange:
    """A model that is to be ``presence`` from now on.

    Attributes:
        drains: It has requests, which end first; those that come meanwhile wait.
        device: Where it is loaded; None: where it is, or its devices say.
    """

    model: str
    presence: Presence
    why: str
    drains: bool = False
    device: str | None = None
    why_there: str = ""


@dataclass(frozen=True)
class NoRoom:
    """A demand that is refused."""

    model: str
    why: str
    retry_after_s: float


@dataclass(frozen=True)
class ElasticDecision:
    """Demands that are neither met by a change nor refused go on waiting; ``waiting_at``: where
    models come that may come to several devices."""

    changes: tuple[PresenceChange, ...] = ()
    refused: tuple[NoRoom, ...] = ()
    waiting_at: Mapping[str, str] = field(default_factory=dict)
