"""Plans by look-ups and changes are those of a search that looks through everything each time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.rebalancing.policy import planner
from loomserve.platform.rebalancing.policy.actions import Action, kind_of
from loomserve.platform.rebalancing.policy.candidates import candidates
from loomserve.platform.rebalancing.policy.effects import apply
from loomserve.platform.rebalancing.policy.forecast import Corrections, Factors, forecast
from loomserve.platform.rebalancing.policy.heat import Level, classify
from loomserve.platform.rebalancing.policy.limits import (
    engines_of,
    exceeded,
    over_budget,
    unable,
)
from loomserve.platform.rebalancing.policy.planner import Chosen, propose
from loomserve.platform.rebalancing.policy.snapshot import (
    Snapshot,
    compute_share,
    memory_share,
)
from tests.unit.platform.rebalancing.fleets import fleet, measured_at, mixed_fleet, mixed_options

CORRECTIONS = Corrections(
    factors={f"{kind} d0 d1": Factors(gain=0.5, cost_s=2.0) for kind in ("requests", "layers")}
)


def made_anew(snapshot: Snapshot) -> Snapshot:
    """The same without what it has looked up, or knows of the one from which it was changed."""
    return replace(snapshot)


class Plain:
    """The search written down plainly: it goes through all pairs, and through all of a fleet."""

    def __init__(self, start: Snapshot, options: Rebalancing) -> None:
        self.start, self.now, self.options = made_anew(start), made_anew(start), options
        self.heat = classify({}, start.loads, options)
        self.chosen: list[Chosen] = []
        self._done: set[object] = set()

    def run(self) -> None:
        while len(self.chosen) < self.options.most_actions and self._one_more():
            pass

    def _one_more(self) -> bool:
        loads = made_anew(self.now).loads
        for gap, source, target in sorted(self._pairs()):
            assert gap == loads[target] - loads[source]
            passed = [
                (chosen.predicted.cost_s, -chosen.predicted.gain, place, chosen, after)
                for place, action in enumerate(
                    candidates(self.start, made_anew(self.now), source, target, self.options)
                )
                if (found := self._passes(action, source, target)) is not None
                for chosen, after in [found]
            ]
            if passed:
                *_, chosen, after = min(passed, key=lambda each: each[:3])
                self._done.add(planner._touches(self.now, chosen.action))
                self.chosen.append(chosen)
                self.now = made_anew(after)
                return True
        return False

    def _pairs(self) -> Iterator[tuple[float, str, str]]:
        loads, falling = made_anew(self.now).loads, self.options.falling
        for source in loads:
            for target in loads:
                if (
                    self.heat[source].level is Level.HOT
                    and self.heat[target].level is Level.COLD
                    and loads[source] - min(loads.values()) > falling
                    and max(loads.values()) - loads[target] > falling
                    and loads[source] - loads[target] > falling
                ):
                    yield loads[target] - loads[source], source, target

    def _passes(self, action: Action, source: str, target: str) -> tuple[Chosen, Snapshot] | None:
        now, options = made_anew(self.now), self.options
        known = {each.id for each in self.start.engines}
        if planner._touches(now, action) in self._done or not engines_of(action) <= known:
            return None
        if unable(now, action, options):
            return None
        after = made_anew(apply(now, action))
        raw = forecast(now, after, action, source, target)
        predicted = CORRECTIONS.of(kind_of(action), source, target)(raw)
        earlier: list[tuple[Action, planner.Forecast]] = [
            (each.action, each.predicted) for each in self.chosen
        ]
        loads, later = now.loads, after.loads
        fallen = sum(x * x for x in loads.values()) - sum(x * x for x in later.values())
        if (
            exceeded(self.start, now, after, options)
            or over_budget(earlier, action, predicted, options)
            or predicted.gain < options.least_gain
            or max(later.values()) > max(loads.values()) + 1e-9
            or fallen < options.least_gain**2 / 4
            or predicted.gain < options.efficiency * predicted.cost_s
        ):
            return None
        return Chosen(
            action=action, source=source, target=target, raw=raw, predicted=predicted
        ), after


def planned(snapshot: Snapshot, options: Rebalancing) -> planner.Proposal:
    return propose(snapshot, classify({}, snapshot.loads, options), CORRECTIONS, options)


@pytest.mark.parametrize("listed_pairs", [planner.LISTED_PAIRS, 0], ids=["all", "pruned"])
@pytest.mark.parametrize("part", range(4))
def test_plans_of_small_fleets_are_those_of_the_plain_search(
    part: int, listed_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "LISTED_PAIRS", listed_pairs)
    chosen = 0
    for seed in range(25 * part, 25 * part + 25):
        rng = random.Random(seed)
        snapshot, options = mixed_fleet(rng), mixed_options(rng)
        for _ in range(2):
            plain = Plain(snapshot, options)
            plain.run()
            proposal = planned(snapshot, options)
            assert list(proposal.chosen) == plain.chosen
            assert proposal.after == plain.now
            chosen += len(plain.chosen)
            snapshot = measured_at(proposal.after, 0.0)
    assert chosen > 20


@pytest.mark.parametrize("seed", range(40))
def test_a_changed_snapshot_is_like_one_made_anew(seed: int) -> None:
    rng = random.Random(seed)
    snapshot, options = mixed_fleet(rng), mixed_options(rng)
    for _ in range(3):
        names = [device.name for device in snapshot.devices]
        actions = [
            action
            for source in names
            for target in names
            if source != target
            for action in candidates(snapshot, snapshot, source, target, options)
            if not unable(snapshot, action, options)
        ]
        for action in actions:
            after = apply(snapshot, action)
            fresh = made_anew(after)
            assert after.loads == {
                name: compute_share(fresh, name) + memory_share(fresh, name) for name in names
            }
            for id_ in (each.id for each in fresh.engines):
                assert after.engine(id_) is next(x for x in fresh.engines if x.id == id_)
                assert [*after.loans_at(id_)] == [x for x in fresh.loans if x.lender == id_]
                assert [*after.loans_of(id_)] == [x for x in fresh.loans if x.engine == id_]
            assert exceeded(snapshot, snapshot, after, options) == exceeded(
                snapshot, snapshot, fresh, options
            )
        if not actions:
            return
        snapshot = apply(snapshot, rng.choice(actions))


def test_a_thousand_devices_are_planned_with_little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    snapshot = fleet([(rng.uniform(0.02, 1.2), rng.uniform(0, 0.85)) for _ in range(64)])
    parts = [
        replace(
            snapshot,
            devices=tuple(
                replace(each, name=f"{part}.{each.name}", node=f"n{part}")
                for each in snapshot.devices
            ),
            engines=tuple(
                replace(
                    each,
                    id=f"{part}.{each.id}",
                    model=f"{part}.{each.model}",
                    device=f"{part}.{each.device}",
                )
                for each in snapshot.engines
            ),
            models=tuple(
                replace(each, name=f"{part}.{each.name}", devices=()) for each in snapshot.models
            ),
            links=tuple(
                replace(each, source=f"{part}.{each.source}", target=f"{part}.{each.target}")
                for each in snapshot.links
            ),
        )
        for part in range(16)
    ]
    large = Snapshot(
        at_s=0.0,
        **{
            name: tuple(each for part in parts for each in getattr(part, name))
            for name in ("devices", "models", "engines", "links")
        },
    )
    applied = []

    def counted(now: Snapshot, action: Action) -> Snapshot:
        applied.append(action)
        return apply(now, action)

    monkeypatch.setattr(planner, "apply", counted)
    options = Rebalancing(confirm_periods=1, settle_s=0.0)
    assert len(planned(large, options).chosen) == options.most_actions
    assert len(applied) < 100
    applied.clear()
    # Nothing passes: it is given up after so much work.
    assert planned(large, options.model_copy(update={"least_gain": 2.0})).chosen == ()
    assert len(applied) <= planner.MOST_WORK / 2 + 10
