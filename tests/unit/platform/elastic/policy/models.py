"""Models and snapshots that tests of the policy are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loomserve.platform.elastic.policy.decide import decide
from loomserve.platform.elastic.policy.snapshot import (
    ElasticDecision,
    ElasticModel,
    ElasticRules,
    ElasticSnapshot,
    ModelDemand,
)
from loomserve.platform.state import Presence

RULES = ElasticRules(residence_s=20, patience_s=60)


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


def decided(
    models: Sequence[ElasticModel], *demands: str, budget: float = 10.0, waited_s: float = 0.0
) -> ElasticDecision:
    asked = [ModelDemand(name, waited_s) for name in demands]
    return decide(ElasticSnapshot(models, asked, {"d": budget}), RULES)


def changes(decision: ElasticDecision) -> dict[str, Presence]:
    return {each.model: each.presence for each in decision.changes}
