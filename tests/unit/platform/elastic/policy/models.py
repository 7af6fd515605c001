"""Models and snapshots that tests of the policy are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loomserve.platform.config import Elastic
from loomserve.platform.elastic.policy.decide import decide
from loomserve.platform.elastic.policy.snapshot import (
    HOST,
    ElasticDecision,
    ElasticModel,
    ElasticSnapshot,
    ModelDemand,
)
from loomserve.platform.state import Presence

RULES = Elastic(residence_s=20, wait_timeout_s=60)


def model(name: str, presence: Presence = Presence.READY, **changes: Any) -> ElasticModel:
    """Ready it takes 4 bytes, asleep 1, of device ``d``; it is long idle."""
    ready, asleep = changes.pop("ready", 4.0), changes.pop("asleep", 1.0)
    sizes = {Presence.READY: ready, Presence.ASLEEP: asleep, Presence.UNLOADED: 0.0}
    given = {
        "settled": True, "since_s": 100.0, "idle_s": 50.0, "devices": ("d",),
        "held_bytes": sizes[presence], "ready_bytes": ready, "asleep_bytes": asleep,
        "wake_s": 0.3, "load_s": 5.0,
    }  # fmt: skip
    return ElasticModel(name=name, presence=presence, **{**given, **changes})


def on_gpu(
    name: str, presence: Presence = Presence.READY, weights: float = 3.0, **changes: Any
) -> ElasticModel:
    """Of the host it takes 0.5 bytes, and its weights while it sleeps, which the GPU then lacks."""
    host = {Presence.READY: 0.5, Presence.ASLEEP: 0.5 + weights}
    held = changes.pop("host_held_bytes", host.get(presence, 0.0))
    return model(name, presence, host_bytes=host, host_held_bytes=held, **changes)


def decided(
    models: Sequence[ElasticModel],
    *demands: str,
    budget: float = 10.0,
    waited_s: float = 0.0,
    host: float | None = None,
) -> ElasticDecision:
    asked = [ModelDemand(name, waited_s) for name in demands]
    budgets = {"d": budget} if host is None else {"d": budget, "d" + HOST: host}
    return decide(ElasticSnapshot(models, asked, budgets), RULES)


def changes(decision: ElasticDecision) -> dict[str, Presence]:
    return {each.model: each.presence for each in decision.changes}
