"""Factors that put forecasts right, learnt from each action that was carried out."""

from __future__ import annotations

import math

from pydantic import Field

from loomserve.platform.base.frozen import Frozen
from loomserve.platform.rebalancing.policy.actions import ActionKind
from loomserve.platform.rebalancing.policy.forecast import Forecast

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
