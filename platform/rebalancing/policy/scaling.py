"""How many replicas a model should have, from its load, its SLO, and what a start takes.

Load is counted in replicas: 1.3 is what one replica and a third carry within the model's bounds.
More are wanted where the load, foreseen for as long as a start takes, exceeds those that there are;
fewer where all that was wanted for a whole quiet time fits into fewer with room to spare. So on a
constant load the number changes no more once it has been reached:

* up at a load above n, down to n - 1 only at one below 0.8 (n - 1);
* with queues, the load that is seen falls as soon as there are enough replicas. So the rate of
  requests at which a number was too small is remembered, and neither that number nor a smaller one
  is gone back to at more than 0.8 of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from loomserve.platform.base.frozen import Frozen
from loomserve.platform.config.scaling import Scaling
from loomserve.platform.fleet.snapshot import FleetModel, ReplicaRecord

ROOM = 0.8
"""The share of fewer replicas that may be filled as one goes."""
REMEMBERED_S = 3600.0
"""For so long a rate of requests that was too much is remembered."""
TREND_S = 10.0
"""A trend is of the last seconds, and foreseen for as long again at most."""

_LONG_WAIT_S = 1.0
_FULL_KV = 0.9
_FEWEST_SAMPLES = 4
_ROUNDING = 1e-9


def rules_of(model: FleetModel) -> Scaling:
    rules = model.record.model.scaling
    assert rules is not None, f"{model.name} is not scaled by its load"
    return rules


def most_of(model: FleetModel) -> int:
    """Replicas that the rules and the devices allow."""
    return min(rules_of(model).max, model.record.model.most_replicas)


class ScalingReason(StrEnum):
    """Why there are to be more or fewer replicas; a label of metrics."""

    REQUESTS = "requests"  # more requests than replicas are to have, or than engines run at once
    KV_MEMORY = "kv_memory"
    TTFT = "ttft"
    TPOT = "tpot"
    PREDICTED = "predicted"  # by the time that a replica could be there
    QUIET = "quiet"
    BOUNDS = "bounds"  # fewer than min, or more than max


@dataclass(frozen=True, slots=True)
class ScalingSample:
    """A look at a model: its load in replicas, the number of replicas into which it fits with room
    to spare, and the rate of requests, if it is measured."""

    at_s: float
    load: float
    ample: int
    arrived_per_s: float | None


class Shortage(Frozen):
    """The rate of requests at which a number of replicas was too small; outlives a controller."""

    at_s: float
    arrived_per_s: float


@dataclass(frozen=True, slots=True)
class ScalingWatch:
    """What is kept of a model from look to look.

    Attributes:
        samples: Looks of a whole quiet time, the newest last.
        short_since_s: Since when more have been wanted; None: they are not.
        shortages: By the number of replicas that was too small.
    """

    samples: tuple[ScalingSample, ...] = ()
    short_since_s: float | None = None
    shortages: Mapping[int, Shortage] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScalingWish:
    """Another number of replicas; more have been wanted for ``short_s``. ``why`` is for a
    person."""

    replicas: int
    reason: ScalingReason
    short_s: float
    why: str


@dataclass(frozen=True, slots=True)
class ScalingLook:
    """The watch for the next look, and the load in replicas. Without a wish, there are as many
    replicas as there should be, as far as is known yet."""

    watch: ScalingWatch
    load: float
    wish: ScalingWish | None


def look(watch: ScalingWatch, model: FleetModel, at_s: float) -> ScalingLook:
    """Decide on the replicas of a model that is there, once a second or so."""
    load, reason = load_of(model)
    foreseen = max(0.0, load + _growth(_samples_since(watch, at_s - TREND_S), model, at_s, load))
    quiet_s = quiet_time_s(model)
    ample = math.ceil(max(load, foreseen) / ROOM - _ROUNDING)
    samples = (
        *_samples_since(watch, at_s - quiet_s),
        ScalingSample(at_s, load, ample, model.arrived_per_s),
    )
    wanted = _wanted(model, foreseen)
    short = wanted > model.kept
    since_s = (watch.short_since_s if watch.short_since_s is not None else at_s) if short else None
    remembered = {n: each for n, each in watch.shortages.items() if at_s - each.at_s < REMEMBERED_S}
    watch = ScalingWatch(samples, since_s, remembered)
    least, most = rules_of(model).least, most_of(model)
    if not least <= model.kept <= most:
        inside = min(max(model.kept, least), most)
        why = f"there may be {least} to {most}"
        return ScalingLook(watch, load, ScalingWish(inside, ScalingReason.BOUNDS, 0.0, why))
    if since_s is not None:
        short_s = at_s - since_s
        if short_s < rules_of(model).upscale_delay_s:
            return ScalingLook(watch, load, None)
        if load <= model.kept:
            reason = ScalingReason.PREDICTED
        why = f"{_said(reason)}: load for {load:.1f} replicas, {foreseen:.1f} foreseen"
        return ScalingLook(watch, load, ScalingWish(wanted, reason, short_s, why))
    return ScalingLook(watch, load, _fewer(watch, model, at_s - quiet_s))


def carried_out(watch: ScalingWatch, model: FleetModel, at_s: float, *, more: bool) -> ScalingWatch:
    """After replicas were ordered or are about to leave: what was seen so far was of as many as
    there were, and of a number that was too small the rate of requests is remembered."""
    shortages = dict(watch.shortages)
    if more and model.arrived_per_s:
        shortages[model.kept] = Shortage(at_s=at_s, arrived_per_s=model.arrived_per_s)
    return ScalingWatch(shortages=shortages)


def leaves(model: FleetModel, replicas: int) -> tuple[ReplicaRecord, ...]:
    """Which replicas are to leave for there to be so many: the newest, which have least cached."""
    newest = sorted(model.serving, key=lambda each: (_ready_at_s(each), each.id), reverse=True)
    return tuple(newest[: max(0, model.kept - replicas)])


def _ready_at_s(replica: ReplicaRecord) -> float:
    """One that has not been measured yet has just come."""
    return replica.footprint.ready_at if replica.footprint is not None else math.inf


def quiet_time_s(model: FleetModel) -> float:
    """Seconds for which fewer must suffice. A replica that is not needed costs its device's time
    for as long as it stays. Once that is as much as a start, it goes: so it never costs more than
    twice what was best, whatever comes."""
    return max(rules_of(model).downscale_delay_s, model.start_s)


def load_of(model: FleetModel) -> tuple[float, ScalingReason]:
    """A model's load in replicas, and what asks for most of them."""
    return max(_loads(model), key=lambda each: each[0], default=(0.0, ScalingReason.REQUESTS))


def _loads(model: FleetModel) -> Iterator[tuple[float, ScalingReason]]:
    rules, replicas = rules_of(model), model.counted
    if not replicas:
        return
    yield (
        sum(_filled(each, rules.target_ongoing_requests) for each in replicas),
        (ScalingReason.REQUESTS),
    )
    yield sum(each.kv_share for each in replicas) / _FULL_KV, ScalingReason.KV_MEMORY
    if rules.ttft_slo_ms is not None:
        waited_s = sum(each.load.oldest_waiting_s for each in replicas if each.load)
        yield 1000 * waited_s / rules.ttft_slo_ms, ScalingReason.TTFT
    if rules.tpot_slo_ms is not None:
        yield (sum(_paced(each, rules.tpot_slo_ms / 1000) for each in replicas), ScalingReason.TPOT)


def _filled(replica: ReplicaRecord, target: float | None) -> float:
    """The replica's requests as a share of those that it is to have, or can run at once."""
    if target is not None:
        return replica.ongoing / target
    assert replica.load is not None
    # What waits for long in an engine finds no place in its memory, if there is one in its batch.
    full = replica.load.oldest_waiting_s > _LONG_WAIT_S and replica.load.running
    most = replica.load.running if full else replica.heartbeat.stats.max_running
    return replica.ongoing / most if most else 0.0


def _paced(replica: ReplicaRecord, slo_s: float) -> float:
    """Its step, a token of all that run, as a share of what one may take; none has less than a
    request."""
    assert replica.load is not None
    share = replica.load.step_time_s / slo_s if replica.load.running else 0.0
    return min(share, 1.0) if replica.load.running == 1 else share


def _wanted(model: FleetModel, foreseen: float) -> int:
    """Replicas for what is foreseen, within bounds; at most twice those that serve, since what so
    many do tells more than a forecast, and no more than there are requests."""
    replicas = math.ceil(foreseen - _ROUNDING)
    replicas = min(replicas, 2 * max(1, len(model.serving)), max(1, model.ongoing))
    return min(max(replicas, rules_of(model).least), most_of(model))


def _growth(samples: Sequence[ScalingSample], model: FleetModel, at_s: float, load: float) -> float:
    """By how much the load will have grown, or fallen, once a replica could be there. A line
    through the last looks; none that their scatter explains."""
    points = [(each.at_s - at_s, each.load) for each in samples] + [(0.0, load)]
    count = len(points)
    if count < _FEWEST_SAMPLES:
        return 0.0
    mean_at = sum(at for at, _ in points) / count
    mean_load = sum(y for _, y in points) / count
    spread = sum((at - mean_at) ** 2 for at, _ in points)
    if not spread:
        return 0.0
    slope = sum((at - mean_at) * (y - mean_load) for at, y in points) / spread
    left = sum((y - mean_load - slope * (at - mean_at)) ** 2 for at, y in points)
    if abs(slope) <= 2 * math.sqrt(left / (count - 2) / spread):
        return 0.0
    return slope * min(model.start_s, TREND_S)


def _fewer(watch: ScalingWatch, model: FleetModel, since_s: float) -> ScalingWish | None:
    """Fewer, if all looks of a quiet time agree, and all replicas that there are to be serve."""
    seen = watch.samples
    if seen[0].at_s > since_s + _ROUNDING or len(model.serving) < model.kept or model.leaving:
        return None
    too_few = [n for n, each in watch.shortages.items() if _was_short(each, seen)]
    enough = max(too_few, default=0) + 1
    replicas = max(rules_of(model).least, enough, *(each.ample for each in seen))
    if replicas >= model.kept:
        return None
    why = f"load for {max(each.load for each in seen):.1f} replicas at most for a while"
    return ScalingWish(replicas, ScalingReason.QUIET, 0.0, why)


def _was_short(shortage: Shortage, seen: Sequence[ScalingSample]) -> bool:
    """Whether so many were too few at a rate that is not far from the highest of late."""
    most = ROOM * shortage.arrived_per_s
    return any(each.arrived_per_s is None or each.arrived_per_s > most for each in seen)


def _samples_since(watch: ScalingWatch, since_s: float) -> tuple[ScalingSample, ...]:
    """Samples since then, and the last before, which tells that all of the time was seen."""
    samples = watch.samples
    first = next((n for n, each in enumerate(samples) if each.at_s > since_s), len(samples))
    return samples[max(0, first - 1) :]


def _said(reason: ScalingReason) -> str:
    return {
        ScalingReason.REQUESTS: "requests exceed what its replicas are to have",
        ScalingReason.KV_MEMORY: "KV memory is full",
        ScalingReason.TTFT: "first tokens take longer than ttft_slo_ms",
        ScalingReason.TPOT: "tokens take longer than tpot_slo_ms",
        ScalingReason.PREDICTED: "the load grows",
    }[reason]
