"""Predicts what an action gains and costs, put right by factors learnt from actions carried out."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field

from loomserve.platform.base.frozen import Frozen
from loomserve.platform.rebalancing.policy.actions import (
    Action,
    ActionKind,
    AddReplica,
    Move,
    MoveRequests,
    RemoveReplica,
    SetRole,
)
from loomserve.platform.rebalancing.policy.effects import loan_between, moved_kv, whole
from loomserve.platform.rebalancing.policy.snapshot import (
    EngineSnapshot,
    Link,
    LoanSnapshot,
    MoveKind,
    Snapshot,
    compute_share,
)

MOST_ROUNDS = 5
"""Rounds of copying while steps run; the rest is copied in the pause."""


class Forecast(BaseModel):
    """Gain and cost of an action, predicted or measured."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gain: float = Field(description="Decrease of the gap between two devices' utilisations.")
    cost_s: float = Field(ge=0, description="Seconds of transfer and synchronisation.")
    pause_s: float = Field(ge=0, description="Seconds that the engine stands still.")
    duration_s: float = Field(ge=0, description="Seconds from begin to end, while steps run.")


def forecast(
    before: Snapshot, after: Snapshot, action: Action, source: str, target: str
) -> Forecast:
    """Predict an action that narrows the gap of the hot device ``source`` to the cold ``target``.
    Benefit is Δ_before - Δ_after (eq. 4-31), of magnitudes; a move costs T_transfer + T_sync (eq.
    4-24, without T_mem_realloc), heads as layers do. Raises LookupError if a move's link was not
    measured."""
    gain = gap(before, source, target) - gap(after, source, target)
    match action:
        case Move():
            cost_s, pause_s, duration_s = _move_s(before, action)
        case MoveRequests():
            engine = before.engine(action.engine)
            kv_s = kv_again_s(before, engine, before.engine(action.to))
            if kv_s is None:
                raise LookupError(f"what requests of {engine.id} cost elsewhere is not measured")
            # Only their own streams pause; no engine does.
            cost_s = duration_s = moved_kv(engine, action.requests) * kv_s
            pause_s = 0.0
        case AddReplica():
            cost_s = duration_s = before.model(action.model).start_s
            pause_s = 0.0
        case SetRole() | RemoveReplica():
            # It shows once the requests that are there have ended.
            cost_s = duration_s = before.engine(action.engine).drain_s
            pause_s = 0.0
    return Forecast(gain=gain, cost_s=cost_s, pause_s=pause_s, duration_s=duration_s)


def gap(snapshot: Snapshot, source: str, target: str) -> float:
    """|Δ| of two devices (eq. 4-30)."""
    loads = snapshot.loads
    return abs(loads[source] - loads[target])


def way(snapshot: Snapshot, move: Move) -> tuple[str, str]:
    """The devices that the move's bytes leave and come to."""
    home, there = (snapshot.engine(each).device for each in (move.engine, move.lender))
    return (there, home) if move.back else (home, there)


def route(snapshot: Snapshot, move: Move) -> Link | None:
    """The link that the move's bytes take."""
    return snapshot.link(*way(snapshot, move))


def kv_again_s(snapshot: Snapshot, engine: EngineSnapshot, there: EngineSnapshot) -> float | None:
    """Time until another replica has a byte of an engine's KV again; None: it is not measured. It
    loads the KV from the store, else it computes it. One that has been idle since its start has not
    shown how fast, nor that it has the store, as all replicas of its model do."""
    link = snapshot.link(engine.device, there.device)
    if engine.stores_kv and link is not None:
        return 1 / link.bytes_per_s
    if there.recompute_s is not None or engine.recompute_s is None:
        return there.recompute_s
    speeds = [snapshot.device(each.device).speed for each in (engine, there)]
    return engine.recompute_s * speeds[0] / speeds[1]


def _move_s(snapshot: Snapshot, move: Move) -> tuple[float, float, float]:
    """Cost, pause and duration. Full blocks are copied while steps run, each round what the one
    before has let grow, as in live migration of virtual machines (Clark et al. 2005); the pause
    copies the rest."""
    link = route(snapshot, move)
    if link is None:
        raise LookupError(f"no link measured between {move.engine} and {move.lender}")
    engine, lender = snapshot.engine(move.engine), snapshot.engine(move.lender)
    # Requests go one by one, between steps.
    halted = () if move.kind is MoveKind.REQUESTS else (engine, lender)
    halt_s = sum(each.sync_s for each in halted)
    size, growth = _bytes(snapshot, move)
    left, copying_s = float(size), 0.0
    for _ in range(MOST_ROUNDS):
        round_s = link.latency_s + left / link.bytes_per_s
        copying_s += round_s
        left = min(growth * round_s, left)
    pause_s = link.latency_s + left / link.bytes_per_s + halt_s
    cost_s = link.latency_s + size / link.bytes_per_s + halt_s
    return cost_s, pause_s, copying_s + pause_s


def _bytes(snapshot: Snapshot, move: Move) -> tuple[int, float]:
    """Bytes of KV and weights that move, and bytes a second by which that KV grows meanwhile."""
    engine = snapshot.engine(move.engine)
    if move.back:
        loan = loan_between(snapshot, move.kind, move.engine, move.lender)
        assert loan is not None
        share = min(move.amount / loan.amount, 1.0)
        # Growth is measured at home, and is in proportion to what lies where.
        growth = engine.kv_growth * share * loan.kv_bytes / max(engine.kv_used_bytes, 1)
        return int(share * (loan.kv_bytes + loan.weights_bytes)), growth
    share = move.amount / whole(engine, move.kind)
    weights = move.amount * engine.layer_bytes if move.kind is MoveKind.LAYERS else 0
    return int(share * engine.kv_used_bytes) + weights, engine.kv_growth * share


def tpot_ratio(before: Snapshot, after: Snapshot, engine: str) -> float:
    """An engine's predicted time per output token, with loans as in ``after``, over that before. A
    borrower's step waits for a round trip a layer, or one in all where layers are elsewhere, and
    for the lender, which is the slower the busier its device is: a step is computed here and there
    in turn, never at once, so a move makes it no shorter. Borrowers take a share of a lender's
    device, and stretch its own steps. Infinite if all of a device is taken; 1 for an engine that
    generates nothing."""
    own = before.engine(engine)
    if not own.attention + own.linear:
        return 1.0
    trips_s = _trips_s(after, engine) - _trips_s(before, engine)
    there, later = borrowers_share(before, own.device), borrowers_share(after, own.device)
    if later >= 1 or there >= 1:
        return 1.0 if later <= there else math.inf
    was, waits = _stretch(before, engine), _stretch(after, engine)
    if math.isinf(waits):
        return 1.0 if math.isinf(was) else math.inf
    stretched = (waits + trips_s / own.tpot_s) / was
    return stretched * (1 - there) / (1 - later)


def _stretch(snapshot: Snapshot, engine: str) -> float:
    """A step's time over its time with lenders that do nothing else; devices serve all in turns."""
    loans = snapshot.loans_of(engine)
    whole_ = snapshot.engine(engine).compute + sum(loan.compute for loan in loans)
    if not whole_:
        return 1.0
    longer = 0.0
    for loan in loans:
        device = snapshot.engine(loan.lender).device
        others = compute_share(snapshot, device) - loan.compute
        if others >= 1:
            return math.inf
        longer += loan.compute * (1 / (1 - others) - 1)
    return 1.0 + longer / whole_


def _trips_s(snapshot: Snapshot, engine: str) -> float:
    def trip_s(loan: LoanSnapshot) -> float:
        home = snapshot.engine(engine)
        link = snapshot.link(home.device, snapshot.engine(loan.lender).device)
        trips = 1 if loan.kind is MoveKind.LAYERS else home.layers
        return 2 * trips * link.latency_s if link else 0.0

    return sum(map(trip_s, snapshot.loans_of(engine)))


def borrowers_share(snapshot: Snapshot, device: str) -> float:
    """Device seconds a second that borrowers ask for."""
    own = sum(engine.compute for engine in snapshot.on(device))
    return compute_share(snapshot, device) - own


_GAIN = 0.3
# A forecast is never corrected by more than this, either way: one odd measurement must neither
# make an action look free nor forbid it for ever.
MOST = 8.0


class Factors(Frozen):
    gain: float = 1.0
    cost_s: float = 1.0
    pause_s: float = 1.0
    duration_s: float = 1.0

    def __call__(self, forecast: Forecast) -> Forecast:
        factors = dict(self)
        return Forecast(**{name: value * factors[name] for name, value in forecast})


class Corrections(Frozen):
    """Factors by kind of action and pair of devices; a value that outlives the controller. Unlike
    :class:`loomserve.platform.costs.correction.Correction`, which sees thousands of steps, it sees
    few actions, and is bounded and kept."""

    factors: dict[str, Factors] = Field(default_factory=dict)

    def of(self, kind: ActionKind, source: str, target: str) -> Factors:
        return self.factors.get(_key(kind, source, target), Factors())

    def learn(
        self, kind: ActionKind, source: str, target: str, predicted: Forecast, real: Forecast
    ) -> Corrections:
        """The corrections after one more action; ``predicted`` is its forecast before correction. A
        moving geometric mean of real over predicted. A prediction of nothing teaches nothing; an
        action that did not gain, or made things worse, counts as the least factor."""
        before = self.of(kind, source, target)
        moved = {
            name: _moved(factor, getattr(predicted, name), getattr(real, name))
            for name, factor in before
        }
        factors = Factors(**moved)
        return Corrections(factors=self.factors | {_key(kind, source, target): factors})


def _moved(factor: float, predicted: float, real: float) -> float:
    if predicted <= 0:
        return factor
    ratio = min(max(real / predicted, 1 / MOST), MOST)
    return float(factor ** (1 - _GAIN) * math.pow(ratio, _GAIN))


def _key(kind: ActionKind, source: str, target: str) -> str:
    return f"{kind} {source} {target}"
