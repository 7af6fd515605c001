"""Who makes room: idle models whose absence costs least for what they free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from loomserve.platform.elastic.policy.snapshot import HOST, ElasticModel
from loomserve.platform.state import Presence

_LEAST_AWAY_S = 1.0


def chosen_victims(
    candidates: Sequence[ElasticModel], missing: Mapping[str, float]
) -> dict[str, Presence] | None:
    """What becomes of which models, by name, to free ``missing`` bytes by pool; None: they have
    less.

    The loss of putting one away is the time that it takes to come back, over the time until it is
    presumably asked for again. The least loss for a byte goes first, and who turns out not to be
    needed stays. Below 0, ``missing`` is room, which those that sleep may take.
    """
    by_name = {each.name: each for each in candidates}
    chosen: dict[str, Presence] = {}
    while left := _left(missing, by_name, chosen):
        options = [
            (_loss(model, presence) / gain, model.name, presence)
            for model, presence in _options(candidates, chosen)
            if (gain := _gain(model, presence, chosen, left)) > 0
        ]
        if not options:
            return None
        _, name, presence = min(options)
        chosen[name] = presence
    for name in list(chosen):
        fewer = {other: presence for other, presence in chosen.items() if other != name}
        if not _left(missing, by_name, fewer):
            chosen = fewer
    return chosen


def loss_of(candidates: Sequence[ElasticModel], chosen: Mapping[str, Presence]) -> float:
    """Share of the time that these will be waited for, since they are put away."""
    return sum(_loss(each, chosen[each.name]) for each in candidates if each.name in chosen)


def _options(
    candidates: Sequence[ElasticModel], chosen: Mapping[str, Presence]
) -> Iterator[tuple[ElasticModel, Presence]]:
    for model in candidates:
        present = chosen.get(model.name, model.presence)
        if present is Presence.READY and model.can_sleep:
            yield model, Presence.ASLEEP
        if present is not Presence.UNLOADED:
            yield model, Presence.UNLOADED


def _loss(model: ElasticModel, presence: Presence) -> float:
    back_s = model.wake_s if presence is Presence.ASLEEP else model.load_s
    return back_s / max(_LEAST_AWAY_S, model.away_s)


def _freed(model: ElasticModel, presence: Presence, pool: str) -> float:
    """Below 0: it takes more, as the host's memory is taken by a model that sleeps."""
    freed = model.held_in(pool) - model.bytes_as(presence, pool)
    return freed if pool.endswith(HOST) else max(0.0, freed)


def _gain(
    model: ElasticModel,
    presence: Presence,
    chosen: Mapping[str, Presence],
    left: Mapping[str, float],
) -> float:
    def more(pool: str) -> float:
        before = _freed(model, chosen[model.name], pool) if model.name in chosen else 0.0
        return _freed(model, presence, pool) - before

    return sum(min(more(pool), left[pool]) for pool in model.pools if pool in left)


def _left(
    missing: Mapping[str, float],
    by_name: Mapping[str, ElasticModel],
    chosen: Mapping[str, Presence],
) -> dict[str, float]:
    """What is missing still, by pool."""
    left = dict(missing)
    for name, presence in chosen.items():
        for pool in by_name[name].pools:
            if pool in left:
                left[pool] -= _freed(by_name[name], presence, pool)
    return {pool: size for pool, size in left.items() if size > 0}
